"""What is decided before the first step, and what a second save of a step leaves alone."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.run_results import of_kind
from tests.support.trainers import Lab, job_of, source_of, trainer_of
from videotune.config.resolve import parse
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.latent_cache.conditions import CHANNELS
from videotune.models.base_model import place, spec_for
from videotune.runs.checkpoint import complete_checkpoints
from videotune.trainer import build
from videotune.trainer.build import (
    dtype_name,
    make_objective,
    make_timesteps,
    open_models,
    plain_batch,
    weights_of,
    what_trains,
)
from videotune.trainer.loop import train_steps
from videotune.trainer.progress import announce
from videotune.trainer.saving import save
from videotune.trainer.text_encoders import attach_text, refuse_text
from videotune.types import DETERMINISTIC_VARIANT, WeightDtypes
from videotune.validation.callbacks import cache_items_of


@pytest.mark.parametrize(
    ("settings", "dtype", "weights"),
    [
        ({}, "BFLOAT_16", (None, None, None)),
        ({"weight_dtype": "BFLOAT_16"}, "BFLOAT_16", (None, None, None)),
        ({"weight_dtype": "FLOAT_8"}, "BFLOAT_16", ("FLOAT_8", "FLOAT_8", None)),
        (
            {"weight_dtype": "FLOAT_8", "transformer": {"weight_dtype": "NFLOAT_4"}},
            "BFLOAT_16",
            ("NFLOAT_4", "FLOAT_8", None),
        ),
        (
            {"text_encoder": {"weight_dtype": "NFLOAT_4"}},
            "FLOAT_32",
            (None, "NFLOAT_4", None),
        ),
        (
            {"transformer": {"matmul_dtype": "INT_8"}},
            "BFLOAT_16",
            (None, None, "INT_8"),
        ),
        ({}, "FLOAT_16", (None, "BFLOAT_16", None)),
        ({"weight_dtype": "FLOAT_16"}, "FLOAT_16", (None, "FLOAT_16", None)),
        (
            {"text_encoder": {"weight_dtype": "FLOAT_16"}},
            "FLOAT_16",
            (None, "FLOAT_16", None),
        ),
        ({"weight_dtype": "FLOAT_8"}, "FLOAT_16", ("FLOAT_8", "FLOAT_8", None)),
    ],
)
def test_each_part_is_stored_as_its_own_setting_or_that_of_all_says(
    settings: dict[str, Any], dtype: str, weights: tuple[str | None, ...]
) -> None:
    """Of the denoiser, of text encoders, and of products. None: in the run's dtype."""
    transformer, text_encoder, matmul = weights
    assert weights_of(parse(settings), dtype) == WeightDtypes(
        transformer=transformer, text_encoder=text_encoder, matmul=matmul
    )


@pytest.mark.parametrize(
    ("settings", "has_bf16", "has_float16", "dtype"),
    [
        ({}, True, True, "BFLOAT_16"),
        ({}, True, False, "BFLOAT_16"),
        ({}, False, True, "FLOAT_16"),
        ({}, False, False, "FLOAT_32"),
        ({"training_method": "FINE_TUNE"}, False, True, "FLOAT_32"),
        ({"training_method": "FINE_TUNE"}, True, True, "BFLOAT_16"),
        ({"train_dtype": "FLOAT_32"}, True, True, "FLOAT_32"),
    ],
)
def test_the_dtype_suits_the_device_unless_it_is_named(
    settings: dict[str, Any],
    has_bf16: bool,
    has_float16: bool,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "local_device", lambda: "device")
    monkeypatch.setattr(build, "has_bf16", lambda d: d == "device" and has_bf16)
    monkeypatch.setattr(build, "needs_float16", lambda d: d == "device" and has_float16)
    assert dtype_name(parse(settings)) == dtype


@pytest.mark.parametrize(
    ("device", "knobs", "message"),
    [
        ("mps", {"train_dtype": "FLOAT_16"}, r"^train_dtype: "),
        ("mps", {"weight_dtype": "FLOAT_8"}, r"^weight_dtype: .* INT_8"),
        ("mps", {"text_encoder.weight_dtype": "NFLOAT_4"}, r"^weight_dtype: "),
        ("mps", {"transformer.weight_dtype": "NFLOAT_4"}, r"^weight_dtype: "),
        ("xpu", {"transformer.matmul_dtype": "INT_8"}, r"INT_8 .* device is XPU"),
    ],
)
def test_what_a_device_does_not_have_is_refused_before_anything_is_loaded(
    device: str,
    knobs: dict[str, Any],
    message: str,
    tmp_path: Path,
    small_clips: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    job = job_of(lab, knobs)
    monkeypatch.setattr(build, "find", pytest.fail)
    monkeypatch.setattr(build, "local_device", lambda: torch.device(device))
    with pytest.raises(VideotuneError, match=message):
        open_models(job.spec, job.base, job.config)
    with pytest.raises(VideotuneError, match=r"^base_model_name: no "):
        open_models(job.spec, None, job.config)


def test_an_opened_model_computes_on_the_device_as_the_config_says(
    tmp_path: Path, small_clips: Path
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    job = job_of(lab, {"text_encoder.weight_dtype": "INT_8"})
    family = open_models(job.spec, job.base, job.config)
    assert (family.device, family.dtype) == (torch.device("cpu"), torch.float32)
    assert family.weights == WeightDtypes(None, "INT_8", None)


def test_an_objective_is_that_of_the_config() -> None:
    settings = {
        "loss": "huber",
        "loss_delta": 0.3,
        "loss_weighting_gamma": 2.5,
        "video_config": {"temporal_consistency_weight": 0.25},
        "sound": {"loss_weight": 0.5},
        "timestep_shift": 4.0,
        "timestep_min": 0.125,
        "timestep_max": 0.75,
    }
    spec = spec_for(None, place("asset:toy"))
    config = parse(settings)
    objective = make_objective(spec, config)
    assert (objective.loss, objective.delta) == ("huber", 0.3)
    assert objective.temporal_consistency == 0.25
    assert objective.sound_weight == 0.5
    timesteps = objective.timesteps
    assert timesteps == make_timesteps(spec, config)
    assert (timesteps.shift, timesteps.lo, timesteps.hi) == (4.0, 0.125, 0.75)
    assert timesteps.distribution == spec.timestep_distribution

    constants = {
        "num_train_timesteps": 1000,
        "beta_start": 0.001,
        "beta_end": 0.01,
        "snr_shift_scale": 1.0,
        "rescale_betas_zero_snr": 1,
    }
    of_v = replace(spec, prediction="v", prediction_constants=constants)
    weighted = parse(settings | {"loss_weighting": "min_snr"})
    objective = make_objective(of_v, weighted)
    assert (objective.weighting, objective.gamma) == ("min_snr", 2.5)
    assert objective.temporal_consistency == 0.25


def test_a_shift_by_resolution_begins_as_the_family_s() -> None:
    spec = replace(spec_for(None, place("asset:toy")), timestep_shift=2.5)
    for value in (None, "resolution"):
        settings = {} if value is None else {"timestep_shift": value}
        assert make_timesteps(spec, parse(settings)).shift == 2.5


@pytest.mark.parametrize(
    ("distribution", "field", "other"),
    [("MODE", "mode_scale", "scale"), ("SIGMOID", "scale", "mode_scale")],
)
def test_a_distribution_has_the_scale_of_its_kind(
    distribution: str, field: str, other: str
) -> None:
    spec = spec_for(None, place("asset:toy"))
    settings = {"timestep_distribution": distribution, "timestep_scale": 0.375}
    timesteps = make_timesteps(spec, parse(settings))
    assert timesteps.distribution == distribution
    assert getattr(timesteps, field) == 0.375
    assert getattr(timesteps, other) == getattr(TimestepSampler(), other)


def test_a_plain_batch_has_the_first_caption_and_the_plain_latents(
    tmp_path: Path, small_clips: Path
) -> None:
    clips = shutil.copytree(small_clips, tmp_path / "clips")
    for file in (clips / "captions").iterdir():
        file.write_text("the first\nthe second\n")
    lab = Lab(Path("asset:toy"), clips, tmp_path / "cache", tmp_path)
    source = source_of(lab)
    window = source.buckets[0][0]
    assert source.clips[window.clip_id].captions == ("the first", "the second")
    batch = plain_batch(source, window)
    assert batch.captions == ("the first",)
    assert batch.window_ids == (window.id,)
    assert torch.equal(batch.x0[0], source.plain_latents(window).mean)
    expected = source.collate_states([source.text_states("the first")]).text
    assert torch.equal(batch.conditioning.text, expected)


def test_patterns_of_text_encoders_may_leave_out_the_encoder(tiny_family: Any) -> None:
    """A regular expression names a whole path, from the encoder on or from below it."""

    def config_of(pattern: str) -> Any:
        return parse({"text_encoder": {"train": True, "layers": [pattern]}})

    family = tiny_family("wan")
    for pattern in (r"encoder\.block\.0", r"text_encoder\.encoder\.block\.0"):
        refuse_text(family, config_of(pattern))
    with pytest.raises(VideotuneError, match=r"^text_encoder\.layers: 'nothing'"):
        refuse_text(family, config_of("nothing"))
    refuse_text(family, parse({"text_encoder": {"train": True}}))
    refuse_text(family, parse({"text_encoder": {"layers": ["nothing"]}}))


@pytest.mark.parametrize(
    ("checkpointing", "recomputes"),
    [(None, True), ("ON", True), ("ATTENTION_SAVED", True), ("OFF", False)],
)
def test_text_encoders_that_train_recompute_unless_they_are_told_not_to(
    checkpointing: str | None, recomputes: bool, tiny_family: Any
) -> None:
    family = tiny_family("wan")
    settings = {"training_method": "EMBEDDING", "gradient_checkpointing": checkpointing}
    attach_text(family, parse(settings))
    for part in family.text_parts().values():
        assert part.encoder.is_gradient_checkpointing is recomputes


def test_what_is_read_without_random_parts_has_the_usual_conditions(
    tmp_path: Path, small_clips: Path
) -> None:
    """Those of half of the samples and more."""
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    conditions = [
        {"type": "last_frame", "probability": 0.3},
        {"type": "mask", "probability": 0.6},
    ]
    knobs = {"conditions": conditions, "video_config.variants": 2}
    items = cache_items_of(job_of(lab, knobs | {"validate_every": 2}))
    types: dict[bool, set[str]] = {True: set(), False: set()}
    for sample in items.conditions:
        types[sample.variant == DETERMINISTIC_VARIANT].add(sample.type)
    assert types == {True: {"mask"}, False: {"last_frame", "mask"}}


def test_each_variant_has_channels_of_its_own(
    tmp_path: Path, small_clips: Path, tiny_bases: Callable[..., Path]
) -> None:
    lab = Lab(tiny_bases("wan", "i2v"), small_clips, tmp_path / "cache", tmp_path)
    conditions = [{"type": "last_frame", "probability": 0.5}]
    knobs = {"conditions": conditions, "video_config.variants": 2}
    items = cache_items_of(job_of(lab, knobs))
    of_channels = {
        (sample.window.id, sample.variant)
        for sample in items.conditions
        if sample.type == CHANNELS
    }
    assert of_channels == {(window.id, variant) for window, variant in items.samples}


def test_the_share_of_each_expert_is_announced(
    tmp_path: Path,
    small_clips: Path,
    tiny_bases: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_bases("wan", "t2v-a14b")
    lab = Lab(model, small_clips, tmp_path / "cache", tmp_path)
    trainer = trainer_of(lab, {"expert_share": 0.25, "expert_period": 2, "steps": 8})
    announce(trainer, None)
    trainer.journal.close()
    line = "experts: high 25%, low 75% of the steps, 2 in a row"
    assert line in capsys.readouterr().err.splitlines()


def test_a_step_is_saved_once_and_a_backup_becomes_a_save(
    tmp_path: Path, small_clips: Path
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    trainer = trainer_of(lab)
    for record in train_steps(trainer):
        if record.step == 2:
            break
    kinds = []
    for kind in ("backup", "backup", "save", "save", "backup"):
        save(trainer, 2, kind, thread=False)
        (checkpoint,) = complete_checkpoints(trainer.run)
        assert checkpoint.step == 2
        kinds.append(checkpoint.kind)
    trainer.journal.close()
    assert kinds == ["backup", "backup", "save", "save", "save"]
    assert len(of_kind(trainer.run, "save")) == 2


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("timestep_mean", "mean", 0.3),
        ("timestep_std", "std", 0.7),
        ("timestep_alpha", "alpha", 2.5),
        ("timestep_beta", "beta", 3.0),
    ],
)
def test_each_parameter_reaches_the_distribution_of_noise_levels(
    key: str, field: str, value: float
) -> None:
    spec = spec_for(None, place("asset:toy"))
    plain = make_timesteps(spec, parse({}))
    changed = make_timesteps(spec, parse({key: value}))
    assert getattr(changed, field) == value
    assert getattr(plain, field) != value


@pytest.mark.parametrize(
    "knobs",
    [
        {"lora.targets": "attention"},
        {"training_method": "FINE_TUNE", "transformer.layers": [r"blocks\.0"]},
        {"training_method": "FINE_TUNE"},
    ],
    ids=["adapter", "some weights", "all weights"],
)
def test_what_would_train_is_known_without_loading_it(
    knobs: dict[str, Any], tmp_path: Path, small_clips: Path
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    trainer = trainer_of(lab, knobs)
    trainer.journal.close()
    family = trainer.family
    would_train = what_trains(family.skeleton(), family.spec, trainer.job.config)
    shapes = {name: parameter.shape for name, parameter in would_train.items()}
    trained = {name: parameter.shape for name, parameter in trainer.parameters.items()}
    assert shapes == trained
    assert all(parameter.is_meta for parameter in would_train.values())
