"""What the keys about the base model, its adapter and how frozen weights are kept do to
weights, answers and files.
"""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.adapters import read_back
from tests.support.run_parts import measure
from tests.support.trainers import (
    Lab,
    job_of,
    run_steps,
    take_steps,
    trainer_of,
    weights,
    written,
)
from videotune.adapters.adapter_types import PARTS, parse_param_name
from videotune.config.fields import ROUNDED
from videotune.errors import VideotuneError
from videotune.exporter.formats import configured_formats
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.memory.quantization import QuantizedLinear
from videotune.models.registry import names
from videotune.models.wan import Wan
from videotune.trainer.trainer import Trainer


def exported(trainer: Trainer, steps: int = 1) -> Path:
    """The LoRA file of a trainer after this number of steps."""
    run_steps(trainer, steps)
    return written(trainer, steps)


def modules(path: Path) -> set[str]:
    """The modules that a LoRA file changes, in the names of the model."""
    return {
        key.removeprefix("transformer.").rsplit(".lora_", 1)[0]
        for key in load_file(path)
    }


@pytest.mark.effect("base_model_name")
def test_the_model_that_is_named_is_trained(lab: Lab) -> None:
    other = Wan.tiny(lab.tmp / "other", seed=1)
    answers = []
    for folder in (lab.model, other):
        trainer = trainer_of(lab, {"base_model_name": str(folder)})
        on_disk = load_file(
            folder / "transformer" / "diffusion_pytorch_model.safetensors"
        )
        assert torch.equal(
            trainer.net.blocks[0].attn1.to_q.base_layer.weight,
            on_disk["blocks.0.attn1.to_q.weight"],
        )
        answers.append(take_steps(trainer, 1).calls[0]["answer"])
    assert not torch.allclose(*answers)


@pytest.mark.effect("transformer.file")
def test_the_file_s_weights_stand_for_the_base_s(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own weights train, under its own fingerprint, with the base's text encoder
    and VAE; a LoRA of it loads.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(lab.tmp / "cache"))
    other = (
        Wan.tiny(lab.tmp / "other", seed=1)
        / "transformer"
        / "diffusion_pytorch_model.safetensors"
    )
    file = lab.tmp / "own.safetensors"
    file.write_bytes(other.read_bytes())
    answers, prints = [], []
    for value in (None, str(file), [str(file)]):
        trainer = trainer_of(lab, {"transformer.file": value})
        prints.append(trainer.family.fingerprints())
        answers.append(take_steps(trainer, 1).calls[0]["answer"])
    held = trainer.net.blocks[0].attn1.to_q.base_layer.weight
    assert torch.equal(held, load_file(file)["blocks.0.attn1.to_q.weight"])
    assert not torch.allclose(answers[0], answers[1])
    assert torch.equal(answers[1], answers[2])
    assert {part for part in prints[0] if prints[0][part] != prints[1][part]} == {
        "transformer"
    }
    job = job_of(lab, {"transformer.file": os.path.relpath(file)})
    assert Path(job.config.transformer.file).is_absolute(), (
        "a resume from another folder would not find it"
    )
    assert Path(job.config.transformer.file).samefile(file)
    with pytest.raises(VideotuneError, match=r"transformer.file: 2 given; .* takes 1"):
        job_of(lab, {"transformer.file": [str(file)] * 2})


@pytest.mark.effect("base_parts")
def test_all_but_the_transformer_is_that_of_the_parts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(lab.tmp / "cache"))
    other = Wan.tiny(lab.tmp / "other", seed=1)
    file = str(other / "transformer" / "diffusion_pytorch_model.safetensors")
    knobs = (
        {"base_model_name": file, "base_parts": str(base)}
        for base in (lab.model, other)
    )
    one, two = (trainer_of(lab, own).family.fingerprints() for own in knobs)
    assert {part for part in one if one[part] != two[part]} == {"text_encoder", "vae"}


@pytest.mark.effect("text_encoder.file", "vae.file")
def test_a_run_trains_with_the_files(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(lab.tmp / "user"))
    other = Wan.tiny(lab.tmp / "other", seed=5)
    files = {}
    for part in ("text_encoder", "vae"):
        (weights,) = (other / part).glob("*.safetensors")
        files[f"{part}.file"] = str(weights)
    knobs = {"cache_dir": str(lab.tmp / "cache")}
    plain = trainer_of(lab, knobs)
    trained = trainer_of(lab, knobs | files)
    prints = plain.family.fingerprints()
    changed = trained.family.fingerprints()
    assert {part for part in prints if prints[part] != changed[part]} == {
        "text_encoder",
        "vae",
    }
    assert trained.family.folder != plain.family.folder


@pytest.mark.effect("family")
def test_a_family_stands_in_for_a_base_model_and_must_not_contradict_one(
    lab: Lab,
) -> None:
    """Without a base model each family lays the same clips out by its own rules; with
    one the name is checked.
    """

    def shapes(family: str | None, base: Path | None = None) -> tuple[Any, list[str]]:
        sets = [
            f"cache_dir={lab.cache}",
            "video_config.max_frames=16",
            "video_config.target_fps=16",
        ]
        sets += [f"base_model_name={base}"] if base else []
        words = Overrides(family=family, data=str(lab.clips), sets=tuple(sets))
        job = open_job(*resolve_config(words))
        return job.spec, [str(shape) for shape in job.shapes]

    for name in names():
        spec, laid = shapes(name)
        assert spec.name == name
        side = (
            spec.default_resolution
            // spec.rules.side_multiple
            * spec.rules.side_multiple
        )
        assert laid
        for shape in laid:
            frames, height, width = (int(part) for part in shape.split("x"))
            assert (frames - spec.rules.frame_rest) % max(1, spec.rules.frame_step) == 0
            assert height == width
            assert abs(height - side) <= spec.rules.side_multiple
    with pytest.raises(VideotuneError, match="no model given"):
        shapes(None)
    assert shapes("wan2.1", lab.model) == shapes(None, lab.model)
    with pytest.raises(VideotuneError, match="no family 'wam'; did you mean 'wan'"):
        shapes("wam", lab.model)


@pytest.mark.effect("lora.rank")
def test_the_update_has_the_rank(lab: Lab) -> None:
    for rank in (1, 3):
        path = exported(trainer_of(lab, {"lora.rank": rank}))
        tensors = load_file(path)
        assert {
            value.shape[0] for key, value in tensors.items() if ".lora_A." in key
        } == {rank}
        assert {
            value.shape[1] for key, value in tensors.items() if ".lora_B." in key
        } == {rank}
        for name in modules(path):
            a, b = (
                tensors[f"transformer.{name}.lora_{part}.weight"].double()
                for part in "AB"
            )
            assert torch.linalg.matrix_rank(b @ a) == rank


@pytest.mark.effect("lora.alpha")
def test_the_update_is_scaled_by_alpha_over_rank(lab: Lab) -> None:
    """With the same A and B: in the network that trains, and in the file as diffusers
    reads it.
    """
    inside: dict[Any, torch.Tensor] = {}
    outside: dict[Any, Mapping[str, torch.Tensor]] = {}
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    for alpha in (None, 2, 4, 8):
        trainer = trainer_of(lab, {"lora.rank": 2, "lora.alpha": alpha})
        for index, parameter in enumerate(trainer.parameters.values()):
            parameter.data.normal_(generator=torch.Generator().manual_seed(index))
        layer = trainer.net.blocks[0].attn1.to_q
        with torch.no_grad():
            inside[alpha] = layer(x) - layer.base_layer(x)
        outside[alpha] = read_back(trainer.family, written(trainer))
    a, b = (
        trainer.parameters[f"blocks.0.attn1.to_q.lora_{part}.weight"].detach()
        for part in "AB"
    )
    for alpha, scale in ((None, 1), (2, 1), (4, 2), (8, 4)):
        torch.testing.assert_close(
            inside[alpha], scale * x @ a.T @ b.T, rtol=1e-4, atol=1e-4
        )
        update = outside[alpha]["blocks.0.attn1.to_q"].detach()
        torch.testing.assert_close(
            update, scale * b.double() @ a.double(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.effect("lora.dropout")
def test_the_adapter_s_input_is_dropped_while_training_and_only_then(lab: Lab) -> None:
    def inputs(dropout: float, training: bool) -> tuple[float, float, float]:
        """The share of zeros in what A sees, and the mean size of the rest over that of
        the layer's own input.
        """
        trainer = trainer_of(lab, {"lora.dropout": dropout})
        layer, seen = trainer.net.blocks[0].attn1.to_q, []
        layer.lora_A["default"].register_forward_pre_hook(
            lambda _, words: seen.append(words[0].detach())
        )
        layer.base_layer.register_forward_pre_hook(
            lambda _, words: seen.append(words[0].detach())
        )
        if training:
            (line,) = run_steps(trainer, 1)
        else:
            measure(trainer, 0)
            line = {"loss": 0.0}
        if not seen:  # one function computes layer and adapter, and drops nothing
            return (0, 1, line["loss"])
        whole, part = seen[0], seen[1]
        left = part != 0
        return (
            (~left).float().mean().item(),
            (part[left] / whole[left]).mean().item(),
            line["loss"],
        )

    assert inputs(0.0, True)[:2] == (0, 1)
    share, scale, loss = inputs(0.5, True)
    assert 0.4 < share < 0.6
    assert scale == pytest.approx(2)
    assert inputs(0.5, True) == (share, scale, loss), (
        "the draws are not those of the seed"
    )
    assert inputs(0.5, False)[:2] == (0, 1)


@pytest.mark.effect("lora.targets")
def test_the_modules_that_are_named_train(lab: Lab) -> None:
    layers = ("to_q", "to_k", "to_v", "to_out.0")
    attention = {
        f"blocks.{block}.attn{kind}.{name}"
        for block in (0, 1)
        for kind in (1, 2)
        for name in layers
    }
    forward = {
        f"blocks.{block}.ffn.{name}"
        for block in range(2)
        for name in ("net.0.proj", "net.2")
    }
    queries_and_keys = {"blocks.1.attn1.to_q", "blocks.1.attn1.to_k"}
    for targets, wanted in (
        ("attention", attention),
        ("linear", attention | forward),
        ([r"blocks\.1\.attn1\.to_[qk]"], queries_and_keys),
        (["ffn.net.2"], {"blocks.0.ffn.net.2", "blocks.1.ffn.net.2"}),
    ):
        assert (
            modules(exported(trainer_of(lab, {"lora.targets": targets}), 2)) == wanted
        )


@pytest.mark.effect("lora.variant")
def test_the_kind_that_is_named_trains_and_is_written(lab: Lab) -> None:
    """Each variant has its own tensors and parameter count, starts with the same loss,
    and has another loss after a step.
    """
    counts, losses = {}, {}
    for kind in PARTS:
        knobs = {
            "lora.variant": kind.lower(),
            "lora.rank": 4,
            "lora.targets": ["attn1.to_q"],
            "learning_rate": 0.1,
        }
        trainer = trainer_of(lab, knobs)
        losses[kind] = [line["loss"] for line in run_steps(trainer, 2)]
        parts = {
            place[1] for name in trainer.parameters if (place := parse_param_name(name))
        }
        assert parts == set(PARTS[kind]) & parts
        assert kind == "LOKR" or parts == set(PARTS[kind])
        counts[kind] = (
            sum(parameter.numel() for parameter in trainer.parameters.values()) // 2
        )
        first_format = configured_formats(trainer.job.config, trainer.family)[0]
        assert first_format == (
            "peft" if kind in ("LOHA", "LOKR", "OFT") else "diffusers"
        )
        in_file = {
            key.removesuffix(".weight").rsplit(".", 1)[1]
            for key in load_file(written(trainer))
        }
        assert in_file == parts
    one = 4 * (24 + 24)
    assert counts == {
        "LORA": one,
        "DORA": one + 24,
        "LOHA": 2 * one,
        "LOKR": 4 * 4 + 6 * 6,
        "OFT": 24 // 4 * 6,
    }
    assert len({loss[0] for loss in losses.values()}) == 1, (
        "step 1 is of the base itself"
    )
    assert len({loss[1] for loss in losses.values()}) == len(PARTS)


def test_a_preset_s_alpha_is_not_held_against_rotations(lab: Lab) -> None:
    trainer = trainer_of(
        lab,
        {"lora.variant": "OFT", "lora.rank": 4, "resolution": "32x32"},
        preset="toy",
    )
    assert trainer.job.config.lora.alpha is None
    assert trainer.job.resolved.origins["lora.variant"] == "user"


@pytest.mark.effect("transformer.layers")
def test_the_layers_that_are_named_train_and_the_model_is_written_whole(
    lab: Lab,
) -> None:
    base = load_file(lab.model / "transformer" / "diffusion_pytorch_model.safetensors")
    trained = {}
    for layers in (None, ["blocks.1.attn1"], [r"blocks\.\d+\.ffn", "proj_out.bias"]):
        trainer = trainer_of(
            lab,
            {
                "training_method": "FINE_TUNE",
                "transformer.layers": layers,
                "learning_rate": 0.01,
            },
        )
        held = [
            parameter
            for group in trainer.pool.trainable.optimizer.param_groups
            for parameter in group["params"]
        ]
        assert {id(parameter) for parameter in held} == {
            id(parameter) for parameter in trainer.parameters.values()
        }
        moves = take_steps(trainer, 2).moves
        assert all(
            moves[name].any() for name, value in weights(trainer).items() if value.any()
        )
        saved = load_file(
            written(trainer) / "transformer" / "diffusion_pytorch_model.safetensors"
        )
        assert set(saved) == set(base)
        trained[str(layers)] = {
            name for name, value in saved.items() if not torch.equal(value, base[name])
        }
        assert trained[str(layers)] <= set(trainer.parameters)
    whole, one, two = trained.values()
    assert one
    assert {name.rsplit(".", 2)[0] for name in one} <= {
        "blocks.1.attn1",
        "blocks.1.attn1.to_out",
    }
    assert two
    assert all(".ffn." in name or name == "proj_out.bias" for name in two)
    assert len(whole) > len(one | two)


NEAR = {"FLOAT_8": 0.02, "INT_8": 0.005, "NFLOAT_4": 0.05, "BFLOAT_16": 0.005}
"""How far the losses over rounded weights may lie from those over plain ones, as a
share of them.
"""

TEXT_ALONE = {
    "transformer.train": False,
    "text_encoder.train": True,
    "text_encoder.weight_dtype": "FLOAT_32",
}
METHODS: dict[str, dict[str, Any]] = {
    "LORA": {"lora.dropout": 0.2},
    "EMBEDDING": {"training_method": "EMBEDDING"},
    "FINE_TUNE": {"training_method": "FINE_TUNE", **TEXT_ALONE},
}
"""What each method trains over frozen weights; FINE_TUNE the text encoder alone, since
what trains is not rounded.
"""

SEEN: dict[tuple[str, str], list[float]] = {}


def packed(net: torch.nn.Module) -> set[str]:
    return {
        path
        for path, module in net.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def bytes_of(trainer: Trainer) -> int:
    return sum(parameter.nbytes for parameter in trainer.net.parameters())


def first_text(lab: Lab, knobs: dict[str, Any]) -> torch.Tensor:
    """The text states of the network in the first step."""
    return take_steps(trainer_of(lab, knobs), 1).calls[0]["text"]


def losses(lab: Lab, knobs: dict[str, Any], steps: int = 2) -> list[float]:
    return [
        line["loss"]
        for line in run_steps(trainer_of(lab, {"learning_rate": 0.01} | knobs), steps)
    ]


@pytest.mark.effect("weight_dtype")
def test_the_kind_decides_bytes_and_the_base(lab: Lab) -> None:
    size, first = {}, {}
    for kind in ("auto", "BFLOAT_16", *ROUNDED):
        trainer = trainer_of(lab, {"weight_dtype": kind})
        assert bool(packed(trainer.net)) == (kind != "auto")
        size[kind] = bytes_of(trainer)
        first[kind] = run_steps(trainer, 1)[0]["loss"]
    assert (
        size["auto"]
        > size["BFLOAT_16"]
        > size["FLOAT_8"]
        == size["INT_8"]
        > size["NFLOAT_4"]
    )
    assert len(set(first.values())) == 5
    for kind, near in NEAR.items():
        assert first[kind] == pytest.approx(first["auto"], rel=near)


@pytest.mark.effect("transformer.weight_dtype")
def test_the_denoiser_has_a_kind_of_its_own(lab: Lab) -> None:
    """Text is read as it was; beside weight_dtype it wins."""
    both, own = {"weight_dtype": "INT_8"}, {"transformer.weight_dtype": "INT_8"}
    off = both | {"transformer.weight_dtype": "FLOAT_32"}
    assert packed(trainer_of(lab, own).net) == packed(trainer_of(lab, both).net)
    assert not packed(trainer_of(lab, off).net)
    assert torch.equal(first_text(lab, own), first_text(lab, {}))
    assert torch.equal(first_text(lab, off), first_text(lab, both))


@pytest.mark.effect("text_encoder.weight_dtype")
def test_the_text_encoder_has_a_kind_of_its_own(lab: Lab) -> None:
    """Its states are other ones, and are kept under another name, so that no run is
    given those of another kind.
    """
    plain, rounded = (
        first_text(lab, {}),
        first_text(lab, {"text_encoder.weight_dtype": "NFLOAT_4"}),
    )
    assert not torch.equal(plain, rounded)
    assert torch.equal(first_text(lab, {}), plain), (
        "what the cache has of plain weights stays"
    )
    off = {"weight_dtype": "NFLOAT_4", "text_encoder.weight_dtype": "FLOAT_32"}
    assert torch.equal(first_text(lab, off), plain)
    assert not packed(trainer_of(lab, {"text_encoder.weight_dtype": "NFLOAT_4"}).net)


def expected(lab: Lab, kind: str, method: str) -> list[float]:
    """The losses of the run that keeps everything on the device; near those of plain
    weights.
    """
    if (kind, method) not in SEEN:
        knobs = METHODS[method] | {"gradient_checkpointing": "OFF"}
        plain = SEEN.setdefault(("auto", method), losses(lab, knobs))
        SEEN[kind, method] = losses(lab, knobs | {"weight_dtype": kind})
        assert SEEN[kind, method] == pytest.approx(plain, rel=NEAR[kind])
        assert SEEN[kind, method] != plain
    return SEEN[kind, method]


SOME = [
    ("FLOAT_8", "LORA", "ON", 0.5),
    ("INT_8", "LORA", "CPU_OFFLOADED", 1.0),
    ("NFLOAT_4", "LORA", "OFF", 1.0),
    ("FLOAT_8", "EMBEDDING", "CPU_OFFLOADED", 1.0),
    ("INT_8", "FINE_TUNE", "OFF", 0.5),
    ("NFLOAT_4", "EMBEDDING", "ON", 0.5),
]
"""Each pair of values is there."""

ALL = itertools.product(NEAR, METHODS, ("OFF", "ON", "CPU_OFFLOADED"), (0.0, 0.5, 1.0))


@pytest.mark.parametrize(
    ("kind", "method", "mode", "fraction"),
    [
        *SOME,
        *(pytest.param(*one, marks=pytest.mark.long) for one in ALL if one not in SOME),
    ],
)
def test_quantized_weights_train_with_the_same_losses_wherever_they_lie(
    kind: str, method: str, mode: str, fraction: float, lab: Lab
) -> None:
    """To the bit those of the same weights on the device, near those of plain weights."""
    knobs = {
        "weight_dtype": kind,
        "gradient_checkpointing": mode,
        "layer_offload_fraction": fraction,
    }
    assert losses(lab, METHODS[method] | knobs) == expected(lab, kind, method)


def test_frozen_parts_of_a_fine_tuning_may_be_quantized(lab: Lab) -> None:
    """And a statement of the dtype that the weights have anyway is none of another."""
    knobs = {
        "training_method": "FINE_TUNE",
        "transformer.weight_dtype": "FLOAT_32",
        "weight_dtype": "INT_8",
    }
    trainer = trainer_of(lab, knobs)
    assert not packed(trainer.net)
    assert trainer.family.weights.text_encoder == "INT_8"
    assert trainer.family.weights.transformer is None


def test_dtypes_are_not_case_sensitive_and_auto_undoes_a_preset_s(lab: Lab) -> None:
    sets = (
        f"base_model_name={lab.model}",
        "weight_dtype=nfloat_4",
        "transformer.weight_dtype=AUTO",
    )
    config = resolve_config(Overrides(sets=sets))[0].config
    assert (config.weight_dtype, config.transformer.weight_dtype) == (
        "NFLOAT_4",
        "auto",
    )
