"""What the keys about checkpoints, readings, previews and exports do to the files of a run."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.effects.effects_kit import Lab, film, lines_of, run_steps, text_of, trainer_of, watched
from tests.runs import callback, preview
from videotune.files import digest
from videotune.trainer.loop import train_loop
from videotune.trainer.run_export import export_run
from videotune.validation.callbacks import Previews


def steps_of(files: list[Path]) -> list[int]:
    """The steps in the names of files or folders."""
    return sorted({int(re.findall(r"step-(\d+)", path.name)[0]) for path in files})


@pytest.mark.effect("save_every")
@pytest.mark.parametrize(("every", "steps"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5])])
def test_checkpoints_come_every_so_many_steps_and_at_the_last(lab: Lab, every: int, steps: list[int]) -> None:
    trainer = trainer_of(lab, {"steps": 5, "save_every": every})
    assert train_loop(trainer) == "done"
    folders = list((trainer.run / "checkpoints").iterdir())
    assert steps_of(folders) == steps
    assert all((folder / "COMPLETE").is_file() for folder in folders)
    last = load_file(trainer.run / "checkpoints" / "step-5" / "weights.safetensors")
    assert all(torch.equal(last[name], parameter) for name, parameter in trainer.parameters.items())


@pytest.mark.effect("validate_every", "sample_after")
@pytest.mark.parametrize(("every", "steps"), [(0, []), (2, [0, 2, 4, 5]), (3, [0, 3, 5])])
def test_validation_and_previews_come_every_so_many_steps(lab: Lab, every: int, steps: list[int]) -> None:
    """Each validation calls the network once for each of the 4 clips, at three of its nine noise levels."""
    trainer = trainer_of(lab, {"steps": 5, "validate_every": every, "validation_windows": 24})
    with watched(trainer.net) as calls:
        train_loop(trainer)
    assert len(calls) == 5 + 4 * len(steps)
    assert sum(len(call["t"]) for call in calls) == 5 + 12 * len(steps)
    losses = lines_of(trainer.run, "validation")
    assert [line["step"] for line in losses] == steps
    assert all(len(line["train"]["by_quantile"]) == 9 for line in losses)
    assert len({line["train"]["mean"] for line in losses}) == len(steps)
    trainer = trainer_of(lab, {"steps": 5, "sample_after": every, "samples": 1})
    train_loop(trainer)
    assert steps_of(list((trainer.run / "samples").glob("*.mp4"))) == steps
    assert lines_of(trainer.run, "warning") == []


def previews(lab: Lab, **knobs: Any) -> tuple[list[np.ndarray], list[dict[str, torch.Tensor]], list[str]]:
    """The films of a preview in order of their prompts, the network's calls for them, and the films' file names."""
    settings = {key.replace("__", "."): value for key, value in knobs.items()}
    trainer = trainer_of(lab, {"sample_after": 1000} | settings)
    with watched(trainer.net) as calls:
        preview(trainer, 0)
    assert lines_of(trainer.run, "warning") == []
    paths = [trainer.run / line["path"] for line in lines_of(trainer.run, "sample")]
    assert sorted(paths) == sorted((trainer.run / "samples").glob("*")) or not paths
    return [film(path) for path in paths], calls, [path.name for path in paths]


@pytest.mark.effect("samples")
def test_the_prompts_that_are_named_are_sampled(lab: Lab) -> None:
    captions = [(lab.clips / "captions" / f"{name}.txt").read_text(encoding="utf-8") for name in "abcd"]
    for samples, prompts in (
        (["a cat"], ["a cat"]),
        (["a cat", "a dog", "a cow"], ["a cat", "a dog", "a cow"]),
        (1, captions[:1]),
        (2, captions[::2]),
        (9, captions),
        (0, []),
    ):
        films, calls, names = previews(lab, samples=samples)
        assert len(films) == len(prompts)
        for call, prompt in zip(calls, prompts, strict=True):
            assert torch.equal(call["text"][0], text_of(lab, prompt)[0])
        assert [name.split("-")[2] for name in names] == [digest(prompt)[:8] for prompt in prompts]


@pytest.mark.effect("samples")
def test_previews_have_as_many_different_captions_as_asked(lab: Lab) -> None:
    """Three clips of which two share a caption have two captions to draw."""
    for name in "abc":
        (lab.tmp / "data").mkdir(exist_ok=True)
        (lab.tmp / "data" / f"{name}.mp4").write_bytes((lab.clips / "videos" / f"{name}.mp4").read_bytes())
        (lab.tmp / "data" / f"{name}.txt").write_text("a dog" if name == "c" else "a cat", encoding="utf-8")
    assert callback(trainer_of(lab, {"samples": 2}, lab.tmp / "data"), Previews).prompts() == ["a cat", "a dog"]


@pytest.mark.effect("samples", "sample_after", "sample.frames")
@pytest.mark.parametrize("frames", [None, 6])
def test_a_preview_on_request_is_made_or_its_failure_a_warning(lab: Lab, frames: int | None) -> None:
    """Although none are due."""
    trainer = trainer_of(
        lab, {"sample_after": 0, "samples": ["a prompt of no clip"], "steps": 2, "sample.frames": frames}
    )
    (trainer.run / "control.json").write_text('{"sample": true}', encoding="utf-8")
    assert train_loop(trainer) == "done"
    assert steps_of(list((trainer.run / "samples").glob("*.mp4"))) == ([1] if frames is None else [])
    assert ["sample.frames" in line["text"] for line in lines_of(trainer.run, "warning")] == [True] * (frames == 6)


@pytest.mark.effect("sample.seed")
def test_the_seed_names_the_noise_and_the_next_prompt_takes_the_next(lab: Lab) -> None:
    seven, _, names = previews(lab, samples=["a cat", "a cat"], sample__seed=7)
    eight, _, _ = previews(lab, samples=["a cat"], sample__seed=8)
    again, _, _ = previews(lab, samples=["a cat"], sample__seed=7)
    assert np.array_equal(seven[0], again[0])
    assert np.array_equal(seven[1], eight[0])
    assert not np.array_equal(seven[0], seven[1])
    assert [name.rsplit("-", 1)[1] for name in names] == ["seed7.mp4", "seed8.mp4"]


@pytest.mark.effect("sample.frames", "sample.resolution")
def test_previews_have_the_shape(lab: Lab) -> None:
    def shape(**knobs: Any) -> tuple[int, ...]:
        return previews(lab, samples=["a cat"], **knobs)[0][0].shape

    assert shape() == (9, 32, 32, 3), "the shape of training"
    assert shape(sample__frames=5) == (5, 32, 32, 3)
    assert shape(sample__frames=13) == (13, 32, 32, 3)
    assert shape(sample__resolution="32x64") == (9, 32, 64, 3)
    assert shape(sample__resolution="48x16", sample__frames=1) == (1, 48, 16, 3)


@pytest.mark.effect("sample.steps")
def test_the_network_is_called_once_a_denoising_step(lab: Lab) -> None:
    for steps in (1, 4):
        _, calls, _ = previews(lab, samples=["a cat"], sample__steps=steps)
        levels = [call["t"].item() for call in calls]
        assert len(levels) == steps
        assert levels == sorted(levels, reverse=True)
    _, calls, _ = previews(lab, samples=["a cat"], sample__steps=None)
    assert len(calls) == 30, "the family's own number"


@pytest.mark.effect("sample.shift")
def test_the_shift_moves_the_noise_levels_of_denoising(lab: Lab) -> None:
    def levels(shift: float | None) -> list[float]:
        return [
            call["t"].item() / 1000
            for call in previews(lab, samples=["a cat"], sample__steps=5, sample__shift=shift)[1]
        ]

    plain = levels(1)
    for shift, wanted in ((6, 6), (0.5, 0.5), (None, 3)):  # the checkpoint's own is 3
        assert levels(shift) == pytest.approx([wanted * t / (1 + (wanted - 1) * t) for t in plain], abs=0.002)


@pytest.mark.effect("sample.guidance")
def test_above_1_each_denoising_step_asks_the_network_twice_with_the_prompt_and_without(lab: Lab) -> None:
    """How the answers are combined: tests/models/test_pipelines.py."""
    texts, films = text_of(lab, "a cat", ""), []
    for guidance, passes in ((1, 1), (2, 2), (9, 2), (None, 2)):  # the family's own is above 1
        (film,), calls, _ = previews(lab, samples=["a cat"], sample__guidance=guidance)
        assert torch.equal(torch.cat([call["text"] for call in calls]), texts[:passes])
        films.append(film)
    assert not any(np.array_equal(one, other) for one, other in itertools.combinations(films[:3], 2))


@pytest.mark.effect("output_model_destination", "output_model_format")
def test_the_lora_is_written_where_and_as_the_config_says(lab: Lab) -> None:
    roots = {"diffusers": "transformer.blocks.0.attn1.to_q.", "comfyui": "diffusion_model.blocks.0.self_attn.q."}
    for formats, place in ((["diffusers"], None), (["comfyui"], None), (["diffusers", "comfyui"], lab.tmp / "other")):
        destination = None if place is None else str(place)
        trainer = trainer_of(lab, {"output_model_format": formats, "output_model_destination": destination})
        run_steps(trainer, 1)
        done = export_run(trainer.run, trainer.family, trainer.parameters, 1, trainer.job.resolved)
        assert [one.path.parent for one in done] == [place or trainer.run / "export"] * len(formats)
        for format, one in zip(formats, done, strict=True):
            assert f"{roots[format]}lora_B.weight" in load_file(one.path)
