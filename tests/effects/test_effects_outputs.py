"""What the keys about checkpoints, previews, measured samples and exports do to the
files of a run.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.run_parts import callback, preview, probe
from tests.support.run_results import film, of_kind
from tests.support.trainers import (
    Lab,
    record_calls,
    run_steps,
    take_steps,
    text_of,
    trainer_of,
)
from videotune.commands.sample import open_sampler, render
from videotune.commands.sample_options import SampleOptions
from videotune.errors import VideotuneError
from videotune.files import digest
from videotune.latent_cache.batches import make_step_batch
from videotune.trainer.export import export_run
from videotune.trainer.loop import train_loop
from videotune.trainer.trainer import Trainer
from videotune.validation.callbacks import Previews


def steps_of(files: list[Path]) -> list[int]:
    """The steps in the names of files or folders."""
    return sorted({int(re.findall(r"step-(\d+)", path.name)[0]) for path in files})


@pytest.mark.effect("save_every")
@pytest.mark.parametrize(
    ("every", "steps"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5])]
)
def test_checkpoints_come_every_so_many_steps_and_at_the_last(
    lab: Lab, every: int, steps: list[int]
) -> None:
    trainer = trainer_of(lab, {"steps": 5, "save_every": every})
    assert train_loop(trainer) == "done"
    folders = list((trainer.run / "checkpoints").iterdir())
    assert steps_of(folders) == steps
    assert all((folder / "COMPLETE").is_file() for folder in folders)
    last = load_file(trainer.run / "checkpoints" / "step-5" / "weights.safetensors")
    assert all(
        torch.equal(last[name], parameter)
        for name, parameter in trainer.parameters.items()
    )


@pytest.mark.effect("validate_every", "sample_after")
@pytest.mark.parametrize(
    ("every", "steps"), [(0, []), (2, [0, 2, 4, 5]), (3, [0, 3, 5])]
)
def test_validation_and_previews_come_every_so_many_steps(
    lab: Lab, every: int, steps: list[int]
) -> None:
    """Each validation calls the network once for each of the 4 clips, at three of its
    nine noise levels.
    """
    trainer = trainer_of(
        lab, {"steps": 5, "validate_every": every, "validation_windows": 24}
    )
    with record_calls(trainer.net) as calls:
        train_loop(trainer)
    assert len(calls) == 5 + 4 * len(steps)
    assert sum(len(call["t"]) for call in calls) == 5 + 12 * len(steps)
    losses = of_kind(trainer.run, "validation")
    assert [line["step"] for line in losses] == steps
    assert all(len(line["train"]["by_quantile"]) == 9 for line in losses)
    assert len({line["train"]["mean"] for line in losses}) == len(steps)
    trainer = trainer_of(lab, {"steps": 5, "sample_after": every, "samples": 1})
    train_loop(trainer)
    assert steps_of(list((trainer.run / "samples").glob("*.mp4"))) == steps
    assert of_kind(trainer.run, "warning") == []


def previews(
    lab: Lab, **knobs: Any
) -> tuple[list[np.ndarray], list[dict[str, torch.Tensor]], list[str]]:
    """The films of a preview in order of their prompts, the network's calls for them,
    and the films' file names.
    """
    settings = {key.replace("__", "."): value for key, value in knobs.items()}
    trainer = trainer_of(lab, {"sample_after": 1000} | settings)
    with record_calls(trainer.net) as calls:
        preview(trainer, 0)
    assert of_kind(trainer.run, "warning") == []
    paths = [trainer.run / line["path"] for line in of_kind(trainer.run, "sample")]
    assert sorted(paths) == sorted((trainer.run / "samples").glob("*")) or not paths
    return [film(path) for path in paths], calls, [path.name for path in paths]


@pytest.mark.effect("samples")
def test_the_prompts_that_are_named_are_sampled(lab: Lab) -> None:
    captions = [
        (lab.clips / "captions" / f"{name}.txt").read_text(encoding="utf-8")
        for name in "abcd"
    ]
    own = ["a cat", "a dog", "a cow"]
    for samples, prompts in ((own, own), (2, captions[::2]), (9, captions), (0, [])):
        films, calls, names = previews(lab, samples=samples)
        assert len(films) == len(prompts)
        for call, prompt in zip(calls, prompts, strict=True):
            assert torch.equal(call["text"][0], text_of(lab, prompt)[0])
        assert [name.split("-")[2] for name in names] == [
            digest(prompt)[:8] for prompt in prompts
        ]


@pytest.mark.effect("samples")
def test_a_prompt_has_settings_of_its_own_in_the_place_of_the_runs(lab: Lab) -> None:
    own = {
        "seed": 7,
        "steps": 2,
        "frames": 5,
        "resolution": "32x48",
        "guidance": 3.0,
        "negative": "blurry",
    }
    films, calls, names = previews(
        lab, samples=["a cat", {"prompt": "a dog"} | own, "a cow"], sample__steps=1
    )
    assert sorted(one.shape for one in films) == [
        (5, 32, 48, 3),
        (9, 32, 32, 3),
        (9, 32, 32, 3),
    ]
    assert {name.rsplit("-", 1)[1] for name in names} == {
        "seed42.mp4",
        "seed7.mp4",
        "seed44.mp4",
    }
    assert any(
        torch.equal(call["text"][0], text_of(lab, "blurry")[0]) for call in calls
    )
    alone, _, _ = previews(lab, samples=[{"prompt": "a dog"} | own])
    place = next(i for i, name in enumerate(names) if "seed7" in name)
    assert np.array_equal(alone[0], films[place])


@pytest.mark.effect("sample.negative")
def test_guidance_leads_away_from_the_negative_prompt(lab: Lab) -> None:
    """diffusers' own combination of both answers: tests/models/test_pipelines.py."""
    films = []
    for negative in ("", "blurry"):
        (film,), calls, _ = previews(
            lab, samples=["a cat"], sample__negative=negative, sample__guidance=5
        )
        assert torch.equal(
            torch.cat([call["text"] for call in calls]), text_of(lab, "a cat", negative)
        )
        films.append(film)
    assert not np.array_equal(*films)


@pytest.mark.parametrize(
    "knobs",
    [
        {"samples": ["a cat", {"prompt": "a cat", "seed": 42}]},
        {"samples": [{"prompt": "a cat", "frames": 6}]},
        {"sample.negative": "blurry", "sample.guidance": 1},
        {"samples": [{"prompt": "a cat", "stepz": 6}]},
        {"samples": [{"negative": "a cat"}]},
    ],
)
def test_prompts_that_cannot_be_sampled_as_they_say_are_refused(
    lab: Lab, knobs: dict[str, Any]
) -> None:
    with pytest.raises(VideotuneError):
        trainer_of(lab, {"sample_after": 1} | knobs)


def test_previews_have_as_many_different_captions_as_asked(lab: Lab) -> None:
    """Three clips of which two share a caption have two captions to draw."""
    for name in "abc":
        (lab.tmp / "data").mkdir(exist_ok=True)
        (lab.tmp / "data" / f"{name}.mp4").write_bytes(
            (lab.clips / "videos" / f"{name}.mp4").read_bytes()
        )
        (lab.tmp / "data" / f"{name}.txt").write_text(
            "a dog" if name == "c" else "a cat", encoding="utf-8"
        )
    assert callback(
        trainer_of(lab, {"samples": 2}, lab.tmp / "data"), Previews
    ).prompts() == [
        "a cat",
        "a dog",
    ]


@pytest.mark.effect("samples", "sample_after", "sample.frames")
@pytest.mark.parametrize("frames", [None, 6])
def test_a_preview_on_request_is_made_or_its_failure_a_warning(
    lab: Lab, frames: int | None
) -> None:
    """Although none are due."""
    knobs = {
        "sample_after": 0,
        "samples": ["a prompt of no clip"],
        "steps": 2,
        "sample.frames": frames,
    }
    trainer = trainer_of(lab, knobs)
    (trainer.run / "control.json").write_text('{"sample": true}', encoding="utf-8")
    assert train_loop(trainer) == "done"
    assert steps_of(list((trainer.run / "samples").glob("*.mp4"))) == (
        [1] if frames is None else []
    )
    assert [
        "sample.frames" in line["text"] for line in of_kind(trainer.run, "warning")
    ] == [True] * (frames == 6)


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
        _, calls, _ = previews(
            lab, samples=["a cat"], sample__steps=5, sample__shift=shift
        )
        return [call["t"].item() / 1000 for call in calls]

    plain = levels(1)
    for shift, wanted in ((6, 6), (0.5, 0.5), (None, 3)):  # the checkpoint's own is 3
        assert levels(shift) == pytest.approx(
            [wanted * t / (1 + (wanted - 1) * t) for t in plain], abs=0.002
        )


@pytest.mark.effect("sample.guidance")
def test_above_1_each_denoising_step_asks_the_network_twice_with_the_prompt_and_without(
    lab: Lab,
) -> None:
    """How the answers are combined: tests/models/test_pipelines.py."""
    texts, films = text_of(lab, "a cat", ""), []
    for guidance, passes in ((1, 1), (9, 2), (None, 2)):  # the family's own is above 1
        (film,), calls, _ = previews(lab, samples=["a cat"], sample__guidance=guidance)
        assert torch.equal(torch.cat([call["text"] for call in calls]), texts[:passes])
        films.append(film)
    assert not any(
        np.array_equal(one, other) for one, other in itertools.combinations(films, 2)
    )


@pytest.mark.effect("output_model_destination", "output_model_format")
def test_the_lora_is_written_where_and_as_the_config_says(lab: Lab) -> None:
    roots = {
        "diffusers": "transformer.blocks.0.attn1.to_q.",
        "comfyui": "diffusion_model.blocks.0.self_attn.q.",
    }
    for formats, place in (
        (["diffusers"], None),
        (["comfyui"], None),
        (["diffusers", "comfyui"], lab.tmp / "other"),
    ):
        destination = None if place is None else str(place)
        trainer = trainer_of(
            lab,
            {"output_model_format": formats, "output_model_destination": destination},
        )
        run_steps(trainer, 1)
        done = export_run(
            trainer.run, trainer.family, trainer.parameters, 1, trainer.job.resolved
        )
        assert [one.path.parent for one in done] == [
            place or trainer.run / "export"
        ] * len(formats)
        for format, one in zip(formats, done, strict=True):
            assert f"{roots[format]}lora_B.weight" in load_file(one.path)


PROBED = {
    "sample_metrics.budget": 1e6,
    "sample_metrics.steps": 1,
    "sample_metrics.samples": 2,
}


def measured(
    lab: Lab, **knobs: Any
) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]], Path]:
    """The journal's line of the base's probe, the network's calls for it, and the run
    folder.
    """
    trainer = trainer_of(
        lab, PROBED | {f"sample_metrics.{key}": value for key, value in knobs.items()}
    )
    with record_calls(trainer.net) as calls:
        probe(trainer, 0)
    (line,) = of_kind(trainer.run, "sample_metrics")
    return line, calls, trainer.run


def test_a_page_can_count_the_samples_that_are_measured(lab: Lab) -> None:
    """The heartbeat has how many are done, of how many."""
    trainer = trainer_of(lab, PROBED)
    counts: list[tuple[str, int, int]] = []
    trainer.heartbeat.progress = lambda subject, done, total: counts.append(  # type: ignore[method-assign]
        (subject, done, total)
    )
    probe(trainer, 0)
    assert counts
    assert counts[-1][0] == "sample metrics"
    assert (
        counts[-1][1]
        == counts[-1][2]
        == len(list((trainer.run / "sample_metrics").glob("*.mp4")))
    )


@pytest.mark.effect("sample_metrics.budget")
@pytest.mark.parametrize(
    ("budget", "steps", "not_measured"),
    [(0, [], []), (0.05, [], [0]), (1e6, [0, 3, 4], [])],
)
def test_what_the_budget_does_not_allow_is_not_measured(
    lab: Lab, budget: float, steps: list[int], not_measured: list[int]
) -> None:
    trainer = trainer_of(
        lab, PROBED | {"sample_metrics.budget": budget, "steps": 4, "save_every": 3}
    )
    with record_calls(trainer.net) as calls:
        train_loop(trainer)
    lines = of_kind(trainer.run, "sample_metrics")
    assert [line["step"] for line in lines if "not_measured" not in line] == steps
    assert [line["step"] for line in lines if "not_measured" in line] == not_measured
    assert len(calls) == 4 + 2 * len(steps)


@pytest.mark.effect(
    "sample_metrics.samples", "sample_metrics.steps", "sample_metrics.prompts"
)
@pytest.mark.parametrize(
    ("samples", "steps", "prompts"),
    [(1, 1, 2), (3, 1, 2), (1, 3, 2), (2, 1, ["a cat", "a dog"])],
)
def test_the_number_of_samples_their_steps_and_their_prompts(
    samples: int, steps: int, prompts: int | list[str], lab: Lab
) -> None:
    """Prompts are those that are named, or captions."""
    line, calls, run = measured(lab, samples=samples, steps=steps, prompts=prompts)
    captions = [
        (lab.clips / "captions" / f"{name}.txt").read_text(encoding="utf-8")
        for name in "ac"
    ]
    wanted = [
        (captions if prompts == 2 else prompts)[place % 2] for place in range(samples)
    ]
    assert [sample["prompt"] for sample in line["samples"]] == wanted
    assert len(list((run / "sample_metrics").glob("*.mp4"))) == samples
    assert len(calls) == samples * steps
    texts = {prompt: text_of(lab, prompt)[0] for prompt in wanted}
    assert all(
        torch.equal(call["text"][0], texts[prompt])
        for call, prompt in zip(calls[::steps], wanted, strict=True)
    )


@pytest.mark.effect("sample_metrics.encoder")
def test_samples_are_compared_by_the_encoder_that_is_named(lab: Lab) -> None:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    torch.manual_seed(0)
    CLIPVisionModel(CLIPVisionConfig(**small, intermediate_size=16)).save_pretrained(
        lab.tmp / "clip"
    )
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPImageProcessor(**size).save_pretrained(lab.tmp / "clip")
    own, _, _ = measured(lab, encoder=str(lab.tmp / "clip"))
    default, _, _ = measured(lab)
    assert default["heuristic"]
    assert not own["heuristic"]
    assert own["embedding"].startswith("clip_vision_model-")
    assert [a["similarity"] for a in own["samples"]] != [
        b["similarity"] for b in default["samples"]
    ]


@pytest.fixture
def kind(lab: Lab, tiny_bases: Callable[..., Path]) -> Callable[[str], Lab]:
    """The lab with another kind of model and its own cache."""
    return lambda variant: replace(
        lab, model=tiny_bases("wan", variant), cache=lab.tmp / variant
    )


@pytest.mark.effect("first_frame_probability")
def test_the_share_has_a_clean_first_frame_at_noise_level_0(
    kind: Callable[[str], Lab],
) -> None:
    for share in (0.0, 1.0, None):
        trainer = trainer_of(
            kind("ti2v"), {"first_frame_probability": share, "steps": 3}
        )
        for step, call in enumerate(take_steps(trainer).calls, 1):
            x0 = make_step_batch(trainer.source, step).batch.x0
            clean = torch.equal(call["x_t"][:, :, 0], x0[:, :, 0])
            assert clean == (share == 1.0)
            zeros = (
                call["t"].view(1, -1).eq(0)[0].tolist()
                if call["t"].ndim == 2
                else [False]
            )
            assert zeros == ([True, False, False] if share == 1.0 else [False]), (
                "a token a latent frame"
            )


@pytest.mark.effect("first_frame_probability")
def test_an_image_model_is_conditioned_on_its_image_or_zeros(
    kind: Callable[[str], Lab],
) -> None:
    for share, conditioned in ((0.0, False), (1.0, True), (None, True)):
        calls = take_steps(
            trainer_of(kind("i2v"), {"first_frame_probability": share, "steps": 2})
        ).calls
        mask, image = (calls[0]["x_t"][:, part] for part in (slice(4, 8), slice(8, 12)))
        assert mask[:, :, 0].eq(float(conditioned)).all()
        assert bool(image.any()) == conditioned


def sees_other_frames(trainer: Trainer) -> bool:
    """Whether what the network says of the first frame hangs on the last one."""
    one = make_step_batch(trainer.source, 1)
    moved = one.batch.x0.clone()
    moved[:, :, -1] += 1
    with torch.no_grad():
        said = [
            trainer.family.predict(trainer.net, x_t, one.t, one.batch)
            for x_t in (one.batch.x0, moved)
        ]
    assert not torch.equal(said[0][:, :, -1], said[1][:, :, -1])
    return not torch.equal(said[0][:, :, 0], said[1][:, :, 0])


@pytest.mark.effect("video_config.use_temporal_attention")
def test_frames_attend_to_each_other_or_to_themselves_alone(lab: Lab) -> None:
    losses = []
    for on in (True, False):
        trainer = trainer_of(lab, {"video_config.use_temporal_attention": on})
        assert sees_other_frames(trainer) == on
        losses.append(run_steps(trainer, 1)[0]["loss"])
    assert losses[0] != losses[1]


@pytest.mark.effect(
    "sample.use_temporal_attention", "video_config.use_temporal_attention"
)
def test_previews_run_the_model_as_shipped_unless_set_otherwise(lab: Lab) -> None:
    """However the run trains; and afterwards it trains as before."""
    drawn: dict[tuple[bool, bool], np.ndarray] = {}
    for trained in (True, False):
        for sampled in (True, False):
            knobs: dict[str, Any] = {"samples": ["a cat"], "sample.steps": 2}
            knobs |= {
                "video_config.use_temporal_attention": trained,
                "sample.use_temporal_attention": sampled,
            }
            trainer = trainer_of(lab, knobs)
            preview(trainer, 0)
            drawn[trained, sampled] = film(
                next((trainer.run / "samples").glob("*.mp4"))
            ).astype(int)
            assert sees_other_frames(trainer) == trained
    assert np.array_equal(drawn[True, True], drawn[False, True])
    assert np.array_equal(drawn[True, False], drawn[False, False])
    assert np.abs(drawn[True, True] - drawn[True, False]).max() > 0


@pytest.mark.effect("sample.guidance_2")
def test_the_second_expert_has_guidance_of_its_own(
    lab: Lab, tiny_bases: Callable[..., Path]
) -> None:
    """Its first expert alone draws the first half: with one step there is no other, and
    the key changes nothing.
    """
    base = str(tiny_bases("wan", "t2v-a14b"))

    def drawn(steps: int, guidance_2: float | None) -> np.ndarray:
        sets = [
            "sample.frames=5",
            "sample.resolution=32x32",
            f"sample.steps={steps}",
            "sample.guidance=4",
        ]
        sets += [] if guidance_2 is None else [f"sample.guidance_2={guidance_2}"]
        sampler = open_sampler(
            SampleOptions(("a cat",), 1, base=base, sets=tuple(sets))
        )
        return render(sampler, ["a cat"], [1])[0].astype(int)

    assert np.array_equal(drawn(8, None), drawn(8, 4))
    assert np.abs(drawn(8, 1) - drawn(8, 4)).max() > 0
    assert np.array_equal(drawn(1, 1), drawn(1, 8))
