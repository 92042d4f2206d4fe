"""Runs of models with two experts, and of those that begin with an image."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.support import interruptions
from tests.support.clips import write_image
from tests.support.command_line import Bases, Patch, Printed, sample, train
from tests.support.run_parts import build_trainer, open_run
from tests.support.run_processes import KILLED, Make, Work, resume, start
from tests.support.run_results import (
    assert_same_run,
    of_kind,
    state,
    steps_of,
    warnings_of,
)
from videotune.commands.sample_options import SampleOptions
from videotune.config.sections import Lora
from videotune.data.decode import decode
from videotune.data.probe import probe
from videotune.errors import DONE, VideotuneError
from videotune.job.job import Job, open_job
from videotune.job.overrides import resolve_config
from videotune.latent_cache.batches import make_step_batch
from videotune.latent_cache.sampler import ExpertSchedule, exact
from videotune.models.registry import find
from videotune.planner.plan import make_plan
from videotune.planner.read_step import step_spec
from videotune.trainer.loop import train_steps
from videotune.types import DETERMINISTIC_VARIANT
from videotune.validation.callbacks import cache_items_of
from videotune.validation.selection import preview_windows

BASE = ("wan", "t2v-a14b")
HALVES = ("expert_period=2", "expert_share=0.5")


@pytest.mark.parametrize("share", [0.0, 0.198, 0.368, 0.5, 0.705, 1.0])
@pytest.mark.parametrize("period", [1, 7, 50])
def test_the_expert_schedule_has_the_share_in_runs(share: float, period: int) -> None:
    schedule = ExpertSchedule(("high", "low"), exact(share), period)
    names = [schedule.at(step) for step in range(1, 2001)]
    for step in (1, 2, 49, 50, 51, 99, 100, 777, 2000):
        for name in schedule.names:
            assert schedule.count(step, name) == names[:step].count(name)
    assert abs(names.count("high") - 2000 * share) <= period
    runs = [len(list(group)) for _, group in itertools.groupby(names)]
    assert all(length % period == 0 for length in runs[:-1])
    if 0 < share < 1:
        longest = max(runs) / period
        assert longest <= max(1 / share, 1 / (1 - share)) + 1, (
            "spread evenly, not in two halves"
        )


def test_each_step_draws_inside_its_expert_s_noise_levels(work: Work) -> None:
    """By the boundary of the checkpoint, 0.875; and together the draws are those of the
    whole distribution.
    """
    settings = work.overrides(
        "steps=40", "batch_size=4", "expert_period=1", "expert_share=0.5", base=BASE
    )
    trainer = build_trainer(open_run(settings, work.run, None).job, work.run, False)
    levels: dict[str, list[float]] = {"high": [], "low": []}
    for step in range(1, 41):
        levels[trainer.pool.expert_schedule.at(step)] += make_step_batch(
            trainer.source, step
        ).t.tolist()
    trainer.journal.close()
    assert len(levels["high"]) == len(levels["low"]) == 80
    assert min(levels["high"]) >= 0.875 > max(levels["low"])
    assert max(levels["high"]) > 0.95
    assert min(levels["low"]) < 0.5


def test_a_step_moves_its_own_expert_alone_and_one_is_in_memory(work: Work) -> None:
    job = open_run(
        work.overrides("steps=6", "learning_rate_low=0.002", *HALVES, base=BASE),
        work.run,
        None,
    ).job
    trainer = build_trainer(job, work.run, False)
    records = train_steps(trainer)
    for expert in ("high", "high", "low", "low", "high", "high"):
        before = {
            name: value.detach().clone() for name, value in trainer.parameters.items()
        }
        line = next(records).read()
        now = trainer.parameters
        moved = {
            name.split(".")[0]
            for name in now
            if not torch.equal(now[name], before[name])
        }
        assert (moved, line["expert"], trainer.pool.current) == (
            {expert},
            expert,
            expert,
        )
        assert line["lr"] == {expert: 0.01 if expert == "high" else 0.002}
        folder = job.base.folder / (
            "transformer" if expert == "high" else "transformer_2"
        )
        on_disk = load_file(folder / "diffusion_pytorch_model.safetensors")
        assert torch.equal(
            trainer.net.blocks[0].attn1.to_q.base_layer.weight,
            on_disk["blocks.0.attn1.to_q.weight"],
        )
    trainer.journal.close()


def test_killed_in_any_expert_and_resumed_is_one_run(server: None, work: Work) -> None:
    """With previews and validation, which need both experts in between; the kill falls
    into step 7, a low one.
    """
    often = (
        "save_every=3",
        "validate_every=4",
        "sample_after=4",
        "samples=1",
        "sample.steps=2",
    )
    settings = ("steps=8", *often, "ema=0.5", "learning_rate_scheduler=LINEAR", *HALVES)
    cut = work.tmp / "cut"
    kill = {
        "first": interruptions.kill_at,
        "given": ("trainer.network_pass:denoising_loss", 7),
    }
    assert start(work.overrides(*settings, base=BASE), cut, **kill).ended() == KILLED
    assert 0 < len(steps_of(cut)) < 8
    assert resume(cut) == DONE
    whole = work.finished(*settings, base=BASE)
    assert_same_run(cut, whole, 8)
    assert [line["expert"] for line in steps_of(cut)] == [
        line["expert"] for line in steps_of(whole)
    ]
    assert {name.split(".")[0] for name in state(cut, 8)} >= {
        "weights/high",
        "weights/low",
        "ema/high",
        "ema/low",
    }


def test_both_files_load_into_one_pipeline_and_change_what_it_draws(
    work: Work, tiny_bases: Bases
) -> None:
    """diffusers' own pipeline with the two files samples what the run's preview
    computed with; `sample RUN` too.
    """
    from diffusers import WanPipeline

    run, forms = work.run, 'output_model_format=["diffusers", "comfyui"]'
    assert train(work.overrides("steps=8", *HALVES, forms, base=BASE), run) == DONE
    files = sorted(path.name for path in (run / "export").iterdir())
    assert files == [
        "run-step-8-comfyui_high_noise.safetensors",
        "run-step-8-comfyui_low_noise.safetensors",
        "run-step-8_high_noise.safetensors",
        "run-step-8_low_noise.safetensors",
    ]
    pipe = WanPipeline.from_pretrained(tiny_bases(*BASE))
    pipe.set_progress_bar_config(disable=True)

    def draw() -> torch.Tensor:
        noise = torch.Generator().manual_seed(1)
        shape: dict[str, Any] = {
            "height": 32,
            "width": 32,
            "num_frames": 5,
            "num_inference_steps": 4,
        }
        return pipe(
            "a red circle", **shape, generator=noise, output_type="latent"
        ).frames

    samples = [draw()]
    pipe.load_lora_weights(run / "export", weight_name=files[2], adapter_name="high")
    samples.append(draw())
    pipe.load_lora_weights(
        run / "export",
        weight_name=files[3],
        adapter_name="low",
        load_into_transformer_2=True,
    )
    samples.append(draw())
    assert not any(
        torch.allclose(a, b, atol=1e-3) for a, b in itertools.combinations(samples, 2)
    )
    assert (
        sample(
            SampleOptions(("a red circle",), 1, run=run, sets=("sample.steps=2",)),
            work.tmp / "out",
        )
        == DONE
    )
    assert len(list((work.tmp / "out").glob("*.mp4"))) == 1


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        (
            ("training_method=FINE_TUNE",),
            "FINE_TUNE changes every weight of one expert",
        ),
        (("experts=high", "expert_share=0.5"), "only one denoiser trains"),
    ],
)
def test_what_two_experts_do_not_allow_is_refused(
    sets: tuple[str, ...], named: str, work: Work
) -> None:
    with pytest.raises(VideotuneError, match=named):
        train(work.overrides("steps=1", *sets, base=BASE), work.run)


@pytest.mark.parametrize(
    ("sets", "high"), [((), 400), (("experts=low",), 0), (("expert_share=0.25",), 250)]
)
def test_the_plan_says_what_each_expert_trains(
    sets: tuple[str, ...], high: int, overrides: Make
) -> None:
    """By default the share of its noise levels among the draws, in runs of 50: at shift
    5 the expert above 0.875 has 37 % of a thousand steps, eight runs.
    """
    plan = make_plan(
        open_job(
            *resolve_config(
                overrides("steps=1000", "expert_period=50", *sets, base=BASE)
            )
        )
    )
    each = {expert["name"]: expert["steps"] for expert in plan["experts"]["each"]}
    assert abs(each["high"] - high) <= 50
    assert sum(each.values()) == 1000
    assert [(e["from"], e["to"]) for e in plan["experts"]["each"]] == [
        (0.875, 1.0),
        (0.0, 0.875),
    ]


@pytest.mark.parametrize(
    ("sets", "count"),
    [
        ((), 2),
        (("experts=low",), 1),
        (("training_method=EMBEDDING", "embedding.token=ohwx"), 1),
    ],
)
def test_the_plan_counts_the_experts_that_train(
    sets: tuple[str, ...], count: int, overrides: Make
) -> None:
    """Each has its own adapter and optimizer; with the embedding alone nothing of them
    trains.
    """
    job = open_job(*resolve_config(overrides("steps=10", *sets, base=BASE)))
    assert step_spec(job, "FLOAT_32").experts == count


def test_an_expert_without_a_step_gets_no_file_and_a_warning(
    work: Work, capsys: Printed
) -> None:
    run = work.train("steps=2", *HALVES, base=BASE)
    assert sorted(path.name for path in (run / "export").iterdir()) == [
        "run-step-2-comfyui_high_noise.safetensors",
        "run-step-2_high_noise.safetensors",
    ]
    (warning,) = warnings_of(run)
    assert "has had no step" in warning
    assert warning in capsys.readouterr().err
    assert "has had no step" in (run / "report.html").read_text()


SIZE = (
    "sample.frames=9",
    "sample.resolution=32x32",
    "sample.steps=2",
    "sample.guidance=2",
)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


IMAGE_SETS = ("steps=1", "video_config.frames=9", "first_frame_probability=1")


def picture(path: Path, seed: int) -> Path:
    return write_image(
        path, np.random.default_rng(seed).integers(0, 256, (40, 72, 3), dtype=np.uint8)
    )


def job_of(overrides: Make, variant: str, *sets: str) -> Job:
    return open_job(
        *resolve_config(
            overrides("video_config.frames=9", *sets, base=("wan", variant))
        )
    )


def test_a_preview_begins_with_the_first_frame_of_the_clip_of_its_caption(
    overrides: Make,
) -> None:
    job = job_of(overrides, "i2v", "samples=3", "sample_after=1")
    found = preview_windows(job)
    captions = {clip.id: clip.captions for clip in job.library.clips}
    assert len(found) == 3
    assert all(one.prompt in captions[window.clip_id] for one, window in found.items())
    assert {(window, DETERMINISTIC_VARIANT) for window in found.values()} <= set(
        cache_items_of(job).samples
    )
    one, two = preview_windows(
        job_of(overrides, "i2v", 'samples=["no caption", "none too"]')
    ).values()
    assert one != two, "the first windows, one after the other"


def test_a_model_without_an_image_has_no_first_frames(overrides: Make) -> None:
    for variant, sets in (("t2v", ()), ("ti2v", ()), ("i2v", ("samples=0",))):
        assert not preview_windows(job_of(overrides, variant, *sets))
    for variant, sets in (("ti2v", ("first_frame_probability=0.7",)), ("i2v", ())):
        assert preview_windows(job_of(overrides, variant, *sets))


@pytest.mark.parametrize("shape", ["sample.frames=5", "sample.resolution=32x64"])
def test_a_preview_of_a_shape_that_no_window_has_is_refused_before_the_work(
    shape: str, work: Work
) -> None:
    sets = (*IMAGE_SETS[:2], "sample_after=1", f"cache_dir={work.tmp / 'cache'}", shape)
    with pytest.raises(
        VideotuneError, match=r"no window has .* choose one of: .*9x32x32"
    ):
        train(work.overrides(*sets, base=("wan", "i2v")), work.run)
    assert not list((work.tmp / "cache").glob("*latents*"))


@pytest.mark.parametrize("variant", ["i2v", "ti2v"])
def test_previews_begin_with_the_first_frames_of_clips(
    variant: str, work: Work
) -> None:
    """And `sample` of the run, given that clip's first frame as a picture, makes the
    same.
    """
    sets = (
        *IMAGE_SETS,
        "samples=1",
        "sample_after=1",
        "sample.steps=2",
        "sample.guidance=1",
    )
    run = work.finished(*sets, base=("wan", variant))
    assert warnings_of(run) == []
    _, last = of_kind(run, "sample")
    job = open_job(*resolve_config(work.overrides(*sets, base=("wan", variant))))
    (window,) = preview_windows(job).values()
    first = decode(job.library.media[window.clip_id], [window.start], 32, 32)[0]

    def sampled(name: str, image: Path) -> np.ndarray:
        assert (
            sample(
                SampleOptions((last["prompt"],), last["seed"], run, images=(image,)),
                work.tmp / name,
            )
            == DONE
        )
        return film(next((work.tmp / name).glob("*.mp4")))

    preview = film(run / last["path"])
    assert np.array_equal(
        preview, sampled("again", write_image(work.tmp / "first.png", first))
    )
    assert (
        np.abs(preview - sampled("other", picture(work.tmp / "other.png", 1))).mean()
        > 0.5
    )


def film(path: Path) -> np.ndarray:
    facts = probe(path)
    return decode(facts, facts.timestamps, 32, 32).astype(int)


def test_the_picture_is_cropped_to_the_shape_and_each_prompt_may_have_its_own(
    tiny_bases: Bases, tmp_path: Path
) -> None:
    base, (one, two) = (
        str(tiny_bases("wan", "ti2v")),
        (picture(tmp_path / f"{i}.png", i) for i in (1, 2)),
    )

    def sampled(out: str, prompts: tuple[str, ...], *images: Path) -> list[np.ndarray]:
        settings = SampleOptions(prompts, 3, base=base, sets=SIZE, images=images)
        assert sample(settings, tmp_path / out) == DONE
        return [
            film(path)
            for path in sorted(
                (tmp_path / out).glob("*.mp4"),
                key=lambda path: path.name.partition("-seed")[2],
            )
        ]

    family = find("wan")(Path(base), torch.device("cpu"), torch.float32)
    both, first = sampled("both", ("a", "a"), one, two), sampled("one", ("a", "a"), one)
    assert np.array_equal(both[0], first[0])
    assert np.abs(both[1] - first[1]).mean() > 0.5
    with Image.open(one) as image:
        wide = image.resize(
            (58, 32), Image.Resampling.BICUBIC
        )  # covers 32 x 32 at its own aspect
        crop = np.asarray(wide.crop((13, 0, 45, 32)))
    moments = family.encode_video(
        torch.from_numpy(crop.copy()).permute(2, 0, 1)[:, None].float() / 127.5 - 1
    )
    start = (
        ((family.decode(moments.mean)[:, 0] / 2 + 0.5) * 255)
        .round()
        .permute(1, 2, 0)
        .numpy()
    )
    assert np.abs(both[0][0] - start).mean() < 12, (
        "the video begins with what the VAE keeps of the crop"
    )
    assert np.abs(both[1][0] - start).mean() > np.abs(both[0][0] - start).mean()
    text_alone = sampled("none", ("a", "a"))
    assert np.abs(text_alone[0] - both[0]).mean() > 0.5


def test_images_that_do_not_fit_the_model_or_the_prompts(
    tiny_bases: Bases, tmp_path: Path
) -> None:
    image, broken = picture(tmp_path / "a.png", 0), tmp_path / "b.png"
    broken.write_bytes(b"no picture")

    def refused(match: str, variant: str, prompts: int = 1, **options: Any) -> None:
        base = str(tiny_bases("wan", variant))
        with pytest.raises(VideotuneError, match=match):
            sample(
                SampleOptions(("a",) * prompts, 1, base=base, sets=SIZE, **options),
                tmp_path,
            )

    refused("in a run that learns it", "t2v", images=(image,))
    refused("no image given", "i2v")
    refused("one for all 3 prompts", "i2v", 3, images=(image, image))
    refused(r"b\.png", "i2v", images=(broken,))
    refused(r"none\.png", "i2v", images=(tmp_path / "none.png",))
    refused("one file, not 2", "t2v", loras=(image, image))
    refused("whose name says", "t2v-a14b", loras=(image,))


def test_the_base_with_two_experts_is_sampled_and_its_files_find_their_experts(
    tiny_bases: Bases, tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    from videotune.adapters.lora import add_lora
    from videotune.exporter.adapter_export import export_lora

    family, files = tiny_family("wan", variant="t2v-a14b"), {}
    for expert in ("high", "low"):
        state = add_lora(
            family.denoiser(expert), family.spec, Lora(rank=2, targets="linear"), seed=0
        )
        for name, parameter in state.items():
            if "lora_B" in name:
                parameter.data.normal_(
                    std=2.0, generator=torch.Generator().manual_seed(len(name))
                )
        files[expert] = tmp_path / f"x{family.spec.export_suffix(expert)}.safetensors"
        export_lora(family, "diffusers", state, 1.0, files[expert], {}, expert)

    def sampled(out: str, *loras: Path) -> np.ndarray:
        settings = SampleOptions(
            ("a",), 3, base=str(tiny_bases("wan", "t2v-a14b")), sets=SIZE, loras=loras
        )
        assert sample(settings, tmp_path / out) == DONE
        return film(next((tmp_path / out).glob("*.mp4")))

    alone, both, swapped = (
        sampled("a"),
        sampled("b", *files.values()),
        sampled("c", files["low"], files["high"]),
    )
    low = sampled("d", files["low"])
    assert np.array_equal(both, swapped), (
        "their names say whose they are, not their order"
    )
    assert np.abs(alone - low).mean() > 0.3
    assert np.abs(both - low).mean() > 0.3
