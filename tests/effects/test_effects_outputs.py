"""What the keys about checkpoints, readings, previews and exports do to the files of a run."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.effects.effects_kit import Lab, film, lines_of, text_of, trainer_of, watched
from tests.runs import callback, preview
from videotune.files import digest
from videotune.sampling.pipeline import draw
from videotune.trainer.loop import train_loop
from videotune.trainer.run_export import export_run
from videotune.validation.callbacks import Previews
from videotune.validation.previews import sample_settings, usual_shape


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
def test_guidance_goes_from_the_empty_prompt_through_the_prompt(lab: Lab) -> None:
    """One denoising step is linear in v = v_empty + g (v_prompt - v_empty); above 1 each step asks the network twice."""
    sampled, texts = {}, text_of(lab, "a cat", "")
    texts_by_prompt = {"a cat": texts[0], "": texts[1]}
    for guidance in (1, 2, 4):
        trainer = trainer_of(lab, {"sample.guidance": guidance})
        settings = sample_settings(trainer.job.config, trainer.job.spec, usual_shape(trainer.job))
        with watched(trainer.net) as calls:
            (sampled[guidance],) = draw(
                trainer.family,
                {"transformer": trainer.net},
                settings,
                lambda prompt: {"text": texts_by_prompt[prompt]},
                [("a cat", 1)],
            )
        assert torch.equal(torch.cat([call["text"] for call in calls]), texts[:1] if guidance == 1 else texts)
    assert not torch.allclose(sampled[2], sampled[1])
    torch.testing.assert_close(sampled[4] - sampled[1], 3 * (sampled[2] - sampled[1]), rtol=1e-3, atol=1e-4)
    _, calls, _ = previews(lab, samples=["a cat"], sample__guidance=None)
    assert len(calls) == 2, "the family's own guidance is above 1"


@pytest.mark.effect("output_model_destination", "output_model_format")
def test_the_lora_is_written_where_and_as_the_config_says(lab: Lab) -> None:
    roots = {"diffusers": "transformer.blocks.0.attn1.to_q.", "comfyui": "diffusion_model.blocks.0.self_attn.q."}

    def written(formats: Any, destination: Path | None) -> tuple[set[str], list[Path]]:
        """The formats by the names of the tensors in the files, and where these lie."""
        place = None if destination is None else str(destination)
        trainer = trainer_of(lab, {"output_model_format": formats, "output_model_destination": place, "steps": 1})
        train_loop(trainer)
        done = export_run(trainer.run, trainer.family, trainer.parameters, 1, trainer.job.resolved)
        lying = list((destination or trainer.run / "export").glob("*.safetensors"))
        assert sorted(lying) == sorted(one.path for one in done)
        found = set()
        for path in lying:
            keys = set(load_file(path))
            found |= {
                format for format, root in roots.items() if {f"{root}lora_A.weight", f"{root}lora_B.weight"} <= keys
            }
        return found, lying

    assert written("diffusers", None)[0] == {"diffusers"}
    assert written("comfyui", None)[0] == {"comfyui"}
    formats, files = written(["diffusers", "comfyui"], lab.tmp / "elsewhere")
    assert formats == {"diffusers", "comfyui"}
    assert {path.parent for path in files} == {lab.tmp / "elsewhere"}
