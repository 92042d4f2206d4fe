"""What the keys about text encoders and new tokens do; and what is refused by the name
of its key before any work.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.trainers import (
    Lab,
    job_of,
    run_steps,
    source_of,
    take_steps,
    trainer_of,
    weights,
    written,
)
from videotune.data.remarks import codes_of
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.trainer.trainer import Trainer
from videotune.types import Batch

NEW = {"training_method": "EMBEDDING", "steps": 1}
FULL = {"training_method": "FINE_TUNE", "steps": 1, "text_encoder.train": True}


def rows(trainer: Trainer) -> torch.Tensor:
    (value,) = weights(trainer).values()
    return value


def changed(trainer: Trainer, count: int = 1) -> dict[str, float]:
    """How far each trained tensor is moved by so many steps; what does not train is not
    in it.
    """
    return {
        name: float(move.abs().max())
        for name, move in take_steps(trainer, count).moves.items()
    }


@pytest.mark.effect("training_method")
def test_new_tokens_leave_both_networks_as_they_are(lab: Lab) -> None:
    trainer = trainer_of(lab, NEW)
    (part,) = trainer.family.text_parts().values()
    frozen = {
        "net": trainer.net.state_dict(),
        "text": part.encoder.get_input_embeddings().table.state_dict(),
    }
    before = {
        name: {key: value.clone() for key, value in one.items()}
        for name, one in frozen.items()
    }
    assert all(moved > 0 for moved in changed(trainer).values())
    assert all(
        torch.equal(frozen[name][key], value)
        for name, one in before.items()
        for key, value in one.items()
    )
    assert trainer.job.config.learning_rate == 1e-3
    assert trainer.job.config.caption_dropout == 0


@pytest.mark.effect("embedding.token")
def test_captions_hold_the_token(lab: Lab) -> None:
    """The rows are read where it stands; every caption gets the word, once; the file is
    called by it.
    """
    for token in ("<one>", "circle"):
        trainer = trainer_of(lab, NEW | {"embedding.token": token})
        texts = [
            caption for clip in trainer.job.library.clips for caption in clip.captions
        ]
        assert all(text.count(token) == 1 for text in texts)
        led = sum(text.startswith(f"{token}, ") for text in texts)
        assert led == (4 if token == "<one>" else 2), "two circles of four"
        with torch.no_grad():
            before = [
                trainer.family.encode_in_loop([text]).text
                for text in (f"a {token}", "a thing")
            ]
            rows_now = next(iter(trainer.parameters.values()))
            rows_now.add_(1)
            after = [
                trainer.family.encode_in_loop([text]).text
                for text in (f"a {token}", "a thing")
            ]
        assert not torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])
        assert set(load_file(written(trainer))) == {token}


@pytest.mark.effect("embedding.vectors")
def test_so_many_vectors_are_so_many_rows_and_tokens(lab: Lab) -> None:
    lengths = {}
    for count in (1, 3):
        trainer = trainer_of(lab, NEW | {"embedding.vectors": count})
        assert rows(trainer).shape == (count, 16)
        lengths[count] = int(
            (take_steps(trainer, 1).calls[0]["text"][0] != 0).any(1).sum()
        )
    assert lengths[3] == lengths[1] + 2


@pytest.mark.effect("embedding.init_text")
def test_rows_begin_as_the_words_of_the_text(lab: Lab) -> None:
    beginnings = ({}, {"embedding.init_text": "red"}, {"embedding.init_text": "blue"})
    drawn, words, other = (trainer_of(lab, NEW | begin) for begin in beginnings)
    (part,) = words.family.text_parts().values()
    numbers = part.tokenizer("red", add_special_tokens=False).input_ids
    torch.testing.assert_close(
        rows(words),
        part.encoder.get_input_embeddings().weight[numbers].mean(0, keepdim=True),
    )
    assert not torch.equal(rows(words), rows(other))
    assert not torch.equal(rows(words), rows(drawn))


@pytest.mark.effect("embedding_learning_rate", "text_encoder.learning_rate")
@pytest.mark.parametrize(
    ("method", "key", "own", "unused"),
    [
        (NEW, "embedding_learning_rate", 5e-3, 'training_method is not "EMBEDDING"'),
        (FULL, "text_encoder.learning_rate", 1e-2, "the text encoder does not train"),
    ],
)
def test_new_tokens_and_the_text_encoder_have_a_rate_of_their_own(
    method: dict[str, Any], key: str, own: float, unused: str, lab: Lab
) -> None:
    """Adam's first step moves each number by the rate; a rate that nothing uses is
    reported.
    """
    for rate in (None, own):
        knobs = {"learning_rate": 1e-3, "optimizer.weight_decay": 0} | (
            {key: rate} if rate else {}
        )
        trainer = trainer_of(lab, method | knobs)
        replaced = rate is not None and method is NEW
        assert (
            any("learning_rate is unused" in note for note in trainer.job.notes)
            == replaced
        )
        moved = changed(trainer)
        text = max(
            far
            for name, far in moved.items()
            if name.startswith(("text_encoder.", "embedding."))
        )
        assert text == pytest.approx(rate or 1e-3, rel=1e-2)
        rest = [
            far
            for name, far in moved.items()
            if not name.startswith(("text_encoder.", "embedding."))
        ]
        assert method is NEW or max(rest) == pytest.approx(1e-3, rel=1e-2)
    assert f"{key} is unused: {unused}" in job_of(lab, {key: 1e-3}).notes


@pytest.mark.effect("text_encoder.train")
def test_a_text_encoder_trains_or_stays_as_it_is(lab: Lab) -> None:
    still, live = (
        trainer_of(lab, FULL | {"text_encoder.train": train}) for train in (False, True)
    )
    (part,) = still.family.text_parts().values()
    names = {f"text_encoder.{name}" for name, _ in part.encoder.named_parameters()}
    moved = {
        name: far for trainer in (still, live) for name, far in changed(trainer).items()
    }
    assert not names & set(still.parameters)
    assert names < set(live.parameters)
    assert all(
        moved[name] > 0 for name in names if not name.endswith("embed_tokens.weight")
    )


@pytest.mark.effect("text_encoder.layers", "transformer.train")
@pytest.mark.parametrize(
    ("knobs", "part", "transformer"),
    [
        ({"text_encoder.layers": ["layer.0"]}, ".layer.0.", True),
        ({"text_encoder.layers": ["wo"]}, ".wo.", True),
        ({"transformer.train": False}, "", False),
    ],
)
def test_only_the_named_parts_train(
    knobs: dict[str, Any], part: str, transformer: bool, lab: Lab
) -> None:
    moved = changed(trainer_of(lab, FULL | knobs))
    own = {name for name in moved if name.startswith("text_encoder.")}
    assert own
    assert all(part in name and (not part or moved[name] > 0) for name in own)
    assert bool(set(moved) - own) == transformer


@pytest.mark.effect("caption_dropout")
def test_a_step_whose_caption_lost_the_token_is_a_step_without_a_gradient(
    lab: Lab,
) -> None:
    lines = run_steps(trainer_of(lab, NEW | {"steps": 4, "caption_dropout": 1}))
    assert [line["grad_norm"] for line in lines] == [0.0] * 4
    assert all("skipped" not in line for line in lines)
    assert all(
        line["grad_norm"] > 0 for line in run_steps(trainer_of(lab, NEW | {"steps": 4}))
    )


WHOLE = {"training_method": "FINE_TUNE"}
TEXT = {"text_encoder.train": True}
TOKENS = {"training_method": "EMBEDDING"}
OFT = {"lora.variant": "OFT", "lora.rank": 4}
SHARDED = {"sharding": "FULL"}
ROUNDED = {"optimizer.masters": "STOCHASTIC_ROUNDING"}
WITHIN = {"optimizer.step_in_backward": True}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lora.targets": "everything"}, r"lora\.targets"),
    ({"lora.targets": ["to_z"]}, r"lora\.targets"),
    ({"transformer.file": "none.safetensors"}, "transformer.file: no such file"),
    (OFT | {"lora.alpha": 4}, "lora.alpha: OFT rotates weights and scales nothing"),
    (OFT | {"lora.dropout": 0.1}, "lora.dropout: PEFT's OFT has no dropout"),
    (OFT | {"lora.rank": 1}, "lora.rank: must be at least 2 for OFT"),
    (OFT | {"lora.rank": 5}, "lora.rank: OFT turns 5 inputs at a time"),
    (
        OFT | {"output_model_format": "diffusers"},
        "output_model_format: OFT for Wan 2.1 T2V has peft, not 'diffusers'",
    ),
    (
        {"output_model_format": ["diffusers", "kohya"]},
        r"output_model_format.*'kohya'.*comfyui",
    ),
    (
        {"transformer.layers": ["blocks.1"]},
        r"transformer\.layers: it is for FINE_TUNE; lora\.targets says",
    ),
    (
        WHOLE | {"transformer.layers": ["blocks.9"]},
        r"transformer\.layers: 'blocks\.9' matches no module or parameter",
    ),
    (
        {"transformer.train": False},
        "transformer.train: LORA trains an adapter of the transformer",
    ),
    (WHOLE | {"transformer.train": False}, "transformer.train: nothing would train"),
    (
        TOKENS | {"transformer.train": True},
        "transformer.train: EMBEDDING trains new tokens",
    ),
    ({"text_encoder.train": True}, r"text_encoder.train: .* LORA does not"),
    (
        TOKENS | {"text_encoder.train": True},
        "text_encoder.train: EMBEDDING trains new tokens",
    ),
    (
        WHOLE | TEXT | {"text_encoder.layers": ["none"]},
        "text_encoder.layers: 'none' matches no module",
    ),
    (
        WHOLE | {"weight_dtype": "FLOAT_8"},
        "weight_dtype: FINE_TUNE trains the transformer, and FLOAT_8 is for frozen",
    ),
    (
        WHOLE | {"transformer.weight_dtype": "NFLOAT_4"},
        "transformer.weight_dtype: FINE_TUNE trains the transformer",
    ),
    (
        WHOLE | TEXT | {"transformer.train": False, "weight_dtype": "INT_8"},
        "or set only transformer.weight_dtype",
    ),
    ({"weight_dtype": "FLOAT_9"}, "weight_dtype: 'FLOAT_9' is not one of"),
    ({"optimizer": "PAGED_ADAMW_8BIT"}, "PAGED_ADAMW_8BIT pages"),
    ({"optimizer": "PRODIGY", "learning_rate": 3e-4}, "a rate for other optimizers"),
    (
        {"optimizer": {"name": "PRODIGY", "step_in_backward": True}},
        "PRODIGY finds one rate",
    ),
    (
        {"optimizer.name": "ADAFACTOR", "optimizer.beta1": 0.5},
        "ADAFACTOR keeps no such mean",
    ),
    (ROUNDED | {"train_dtype": "BFLOAT_16"}, "an adapter trains, in float32"),
    (ROUNDED | WHOLE | {"train_dtype": "FLOAT_32"}, "they are float32 themselves"),
    (
        ROUNDED | WHOLE | {"train_dtype": None},
        "train_dtype BFLOAT_16, and here it is FLOAT_32",
    ),
    (WITHIN | {"gradient_accumulation_steps": 2}, "cannot be summed over"),
    (WITHIN | {"batch_size": 2, "micro_batch_size": 1}, "passes of micro_batch_size 1"),
    (
        WHOLE | {"layer_offload_fraction": 0.5, "optimizer": "ADAMW_8BIT"},
        r"optimizer\.name: ADAMW_8BIT does not update offloaded weights",
    ),
    ({"expert_share": 0.5}, r"expert_share: .* only one denoiser trains"),
    ({"expert_period": 3}, r"expert_period: .* only one denoiser trains"),
    ({"learning_rate_low": 1e-5}, "learning_rate_low: no expert for low noise"),
    (SHARDED | {"layer_offload_fraction": 0.5}, "layer_offload_fraction"),
    (SHARDED | {"gradient_checkpointing": "CPU_OFFLOADED"}, "gradient_checkpointing"),
    (SHARDED | WHOLE | {"optimizer.name": "MUON"}, "optimizer.name: MUON"),
    (SHARDED | WHOLE | {"optimizer.name": "ADAMW_8BIT"}, "optimizer.name: ADAMW_8BIT"),
    ({"learning_rate_cycles": 2}, "learning_rate_cycles: it is for .*COSINE_RESTARTS"),
    (
        {"learning_rate_power": 2.0, "learning_rate_scheduler": "COSINE"},
        "learning_rate_power: it is for .*POLYNOMIAL",
    ),
    ({"learning_rate_min": 1e-6}, "learning_rate_min: it is for .*LINEAR"),
    (
        {"learning_rate_min": 1.0, "learning_rate_scheduler": "COSINE"},
        "learning_rate_min: 1 is above learning_rate",
    ),
    ({"learning_rate_decay_steps": 9}, "learning_rate_decay_steps: it is for .*WSD"),
    (
        {"learning_rate_timescale": 9, "learning_rate_scheduler": "COSINE"},
        "learning_rate_timescale: it is for .*INVERSE_SQRT",
    ),
    (
        {"timestep_mean": 0.5, "timestep_distribution": "UNIFORM"},
        "timestep_mean: it is for .*LOGIT_NORMAL",
    ),
    (
        {"timestep_std": 0.5, "timestep_distribution": "SIGMOID"},
        "timestep_std: it is for .*LOGIT_NORMAL",
    ),
    ({"timestep_scale": 0.5}, "timestep_scale: it is for .*SIGMOID or MODE"),
    ({"timestep_alpha": 3.0}, "timestep_alpha: it is for .*BETA"),
    ({"timestep_beta": 3.0}, "timestep_beta: it is for .*BETA"),
    ({"timestep_scale": 9.0, "timestep_distribution": "MODE"}, "scale of MODE"),
    ({"timestep_shift": "large"}, "timestep_shift"),
    (
        {"timestep_shift": "resolution"},
        r"timestep_shift: .* publishes no shift by resolution. Set a number",
    ),
    ({"loss_weighting_gamma": 1.0}, "loss_weighting_gamma: it is for .*min_snr"),
    ({"loss_weighting": "min_snr"}, r"loss_weighting.*flow"),
    ({"conditions": [{"type": "mask", "latent_frames": 2}]}, "latent_frames"),
    ({"missing_caption": "text"}, "belong together"),
    ({"resolution": None, "width": 96}, "width"),
    ({"resolution": None, "height": 64}, "height"),
    ({"width": 96, "height": 64}, "with resolution"),
    ({"resolution": None, "width": 1e6, "height": 1}, "width"),
    ({"video_config.frames": 8, "video_config.strict_frames": True}, r"frames.*8.*9"),
    (
        {"video_config.temporal_compression_ratio": 2},
        r"temporal_compression_ratio.*not a multiple of this VAE's 4",
    ),
    (
        {"video_config.temporal_compression_ratio": 6},
        r"temporal_compression_ratio.*not a multiple",
    ),
    (
        {"video_config.spatial_compression_ratio": 4},
        r"spatial_compression_ratio.*not a multiple of this VAE's 8",
    ),
    ({"sample_after": 1, "sample.frames": 6}, "sample.frames"),
    ({"sample_after": 1, "sample.resolution": "40x40"}, "sample.resolution"),
    ({"sample_after": 1, "sample.resolution": "64"}, "sample.resolution"),
    ({"sample.guidance_2": 2.0}, r"sample\.guidance_2.*one denoiser"),
]
"""Knobs, and what the error names."""

ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prior_preservation": True}, r"datasets\.prior_preservation.*regularization"),
    ({"kind": "validation", "loss_weight": 2}, r"datasets\.loss_weight.*never trained"),
    (
        {"kind": "validation", "caption_weights": [1.0]},
        r"datasets\.caption_weights.*never trained|first caption",
    ),
    ({"loss_weight": 0}, r"datasets\.loss_weight: it is 0 for all"),
]
"""The same of the one dataset's own keys."""


@pytest.mark.parametrize(
    ("knobs", "named"),
    REFUSED,
    ids=lambda value: value.replace("\\", "") if isinstance(value, str) else "",
)
def test_what_nothing_would_use_is_refused(
    lab: Lab, knobs: dict[str, Any], named: str
) -> None:
    with pytest.raises(VideotuneError, match=named):
        trainer_of(lab, knobs)


@pytest.mark.parametrize(("row", "named"), ROWS)
def test_keys_of_a_dataset_that_nothing_would_use_are_refused(
    lab: Lab, row: dict[str, Any], named: str
) -> None:
    with pytest.raises(VideotuneError, match=named):
        trainer_of(lab, {"datasets": [{"path": str(lab.clips), **row}]})


@pytest.mark.effect("text_encoder.convention")
def test_captions_of_older_ltx_are_read_as_diffusers_or_its_authors_read_them(
    lab: Lab, tiny_bases: Callable[..., Path]
) -> None:
    """The authors mask the padding and take 256 tokens; nothing else of a batch
    differs, and what the cache has of the one is not read as the other.
    """
    base = str(tiny_bases("ltx_video", "0.9.0"))
    knobs = {"base_model_name": base, "resolution": "32x32", "caption_dropout": 0}

    def batch(convention: str) -> Batch:
        chosen = knobs | {"text_encoder.convention": convention}
        return make_step_batch(source_of(lab, chosen), 1).batch

    plain, masked = batch("diffusers"), batch("authors")
    plain_mask, masked_mask = (
        plain.conditioning.text_mask,
        masked.conditioning.text_mask,
    )
    assert plain_mask is not None
    assert masked_mask is not None
    assert (plain_mask.shape[1], masked_mask.shape[1]) == (128, 256)
    assert plain_mask.sum() == masked_mask.sum()
    words = int(plain_mask[0].sum())
    own, theirs = (one.conditioning.text[0, :words] for one in (plain, masked))
    assert not torch.allclose(own, theirs, atol=1e-3)
    assert torch.equal(plain.x0, masked.x0)
    assert torch.equal(batch("diffusers").conditioning.text, plain.conditioning.text)


@pytest.mark.parametrize(
    ("version", "convention", "codes"),
    [
        ("0.9.0", "diffusers", ["caption_reading"]),
        ("0.9.1", "diffusers", ["caption_reading"]),
        ("0.9.0", "authors", []),
        ("0.9.7", "diffusers", []),
    ],
)
def test_a_plan_says_where_comfyui_reads_captions_differently(
    lab: Lab,
    tiny_bases: Callable[..., Path],
    version: str,
    convention: str,
    codes: list[str],
) -> None:
    knobs = {
        "base_model_name": str(tiny_bases("ltx_video", version)),
        "resolution": "32x32",
        "text_encoder.convention": convention,
    }
    notes = job_of(lab, knobs).notes
    assert [code for code in codes_of(notes) if code == "caption_reading"] == codes


def test_a_family_of_one_convention_refuses_another(lab: Lab) -> None:
    with pytest.raises(VideotuneError, match=r"text_encoder\.convention"):
        job_of(lab, {"text_encoder.convention": "authors"})
