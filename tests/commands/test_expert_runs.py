"""Two experts in one run: dealt out as promised, each inside its noise levels, one in memory, a file for each."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import moments
from tests.commands.safety_kit import (
    KILLED,
    Finished,
    Make,
    assert_same_run,
    resume,
    start,
    state,
    steps_of,
    warnings_of,
)
from tests.runs import open_run, prepare
from tests.shell import sample, train
from videotune.commands.sample import SampleOptions
from videotune.errors import DONE, VideotuneError
from videotune.latent_cache.batches import prepare as prepare_batch
from videotune.latent_cache.expert_schedule import ExpertSchedule, exact
from videotune.planner.plan import make_plan
from videotune.trainer.loop import step_records
from videotune.trainer.resolve_config import resolve_config
from videotune.trainer.run_spec import open_job

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
        assert longest <= max(1 / share, 1 / (1 - share)) + 1, "spread evenly, not in two halves"


def test_each_step_draws_inside_its_expert_s_noise_levels(overrides: Make, tmp_path: Path) -> None:
    """By the boundary of the checkpoint, 0.875; and together the draws are those of the whole distribution."""
    settings = overrides("steps=40", "batch_size=4", "expert_period=1", "expert_share=0.5", base=BASE)
    trainer = prepare(open_run(settings, tmp_path / "run", None).job, tmp_path / "run", False)
    levels: dict[str, list[float]] = {"high": [], "low": []}
    for step in range(1, 41):
        levels[trainer.pool.expert_schedule.at(step)] += prepare_batch(trainer.source, step).t.tolist()
    trainer.journal.close()
    assert len(levels["high"]) == len(levels["low"]) == 80
    assert min(levels["high"]) >= 0.875 > max(levels["low"])
    assert max(levels["high"]) > 0.95
    assert min(levels["low"]) < 0.5


def test_a_step_moves_its_own_expert_alone_and_one_is_in_memory(overrides: Make, tmp_path: Path) -> None:
    job = open_run(overrides("steps=6", "learning_rate_low=0.002", *HALVES, base=BASE), tmp_path / "run", None).job
    trainer = prepare(job, tmp_path / "run", False)
    records = step_records(trainer)
    for expert in ("high", "high", "low", "low", "high", "high"):
        before = {name: value.detach().clone() for name, value in trainer.parameters.items()}
        line = next(records).read()
        moved = {
            name.split(".")[0] for name, value in trainer.parameters.items() if not torch.equal(value, before[name])
        }
        assert (moved, line["expert"], trainer.pool.current) == ({expert}, expert, expert)
        assert line["lr"] == {expert: 0.01 if expert == "high" else 0.002}
        folder = job.base.folder / ("transformer" if expert == "high" else "transformer_2")
        on_disk = load_file(folder / "diffusion_pytorch_model.safetensors")
        assert torch.equal(trainer.net.blocks[0].attn1.to_q.base_layer.weight, on_disk["blocks.0.attn1.to_q.weight"])
    trainer.journal.close()


def test_killed_in_any_expert_and_resumed_is_one_run(
    server: None, overrides: Make, finished: Finished, tmp_path: Path
) -> None:
    """With previews and validation, which need both experts in between; the kill falls into step 7, a low one."""
    often = ("save_every=3", "validate_every=4", "sample_after=4", "samples=1", "sample.steps=2")
    settings = ("steps=8", *often, "ema=0.5", "learning_rate_scheduler=LINEAR", *HALVES)
    cut = tmp_path / "cut"
    kill = {"first": moments.kill_at, "given": ("trainer.step:denoising_loss", 7)}
    assert start(overrides(*settings, base=BASE), cut, **kill).ended() == KILLED
    assert 0 < len(steps_of(cut)) < 8
    assert resume(cut) == DONE
    whole = finished(*settings, base=BASE)
    assert_same_run(cut, whole, 8)
    assert [line["expert"] for line in steps_of(cut)] == [line["expert"] for line in steps_of(whole)]
    assert {name.split(".")[0] for name in state(cut, 8)} >= {"weights/high", "weights/low", "ema/high", "ema/low"}


def test_both_files_load_into_one_pipeline_and_change_what_it_draws(
    overrides: Make, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """diffusers' own pipeline with the two files samples what the run's preview computed with; `sample RUN` too."""
    from diffusers import WanPipeline

    run, forms = tmp_path / "run", 'output_model_format=["diffusers", "comfyui"]'
    assert train(overrides("steps=8", *HALVES, forms, base=BASE), run) == DONE
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
        shape: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4}
        return pipe("a red circle", **shape, generator=noise, output_type="latent").frames

    samples = [draw()]
    pipe.load_lora_weights(run / "export", weight_name=files[2], adapter_name="high")
    samples.append(draw())
    pipe.load_lora_weights(run / "export", weight_name=files[3], adapter_name="low", load_into_transformer_2=True)
    samples.append(draw())
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in itertools.combinations(samples, 2))
    assert sample(SampleOptions(("a red circle",), 1, run=run, sets=("sample.steps=2",)), tmp_path / "out") == DONE
    assert len(list((tmp_path / "out").glob("*.mp4"))) == 1


@pytest.mark.parametrize(
    ("base", "sets", "named"),
    [
        (("wan",), ("expert_share=0.5",), r"expert_share: .* one denoiser"),
        (BASE, ("training_method=FINE_TUNE",), "FINE_TUNE changes every weight of one expert"),
        (BASE, ("experts=high", "expert_share=0.5"), "expert_share: high alone trains"),
    ],
)
def test_what_one_denoiser_does_not_have_is_refused(
    base: tuple[str, ...], sets: tuple[str, ...], named: str, overrides: Make, tmp_path: Path
) -> None:
    with pytest.raises(VideotuneError, match=named):
        train(overrides("steps=1", *sets, base=base), tmp_path / "run")


@pytest.mark.parametrize(("sets", "high"), [((), 400), (("experts=low",), 0), (("expert_share=0.25",), 250)])
def test_the_plan_says_what_each_expert_trains(sets: tuple[str, ...], high: int, overrides: Make) -> None:
    """By default the share of its noise levels among the draws, in runs of 50: at shift 5 the expert above
    0.875 has 37 % of a thousand steps, eight runs."""
    plan = make_plan(open_job(*resolve_config(overrides("steps=1000", "expert_period=50", *sets, base=BASE))))
    each = {expert["name"]: expert["steps"] for expert in plan["experts"]["each"]}
    assert abs(each["high"] - high) <= 50
    assert sum(each.values()) == 1000
    assert [(e["from"], e["to"]) for e in plan["experts"]["each"]] == [(0.875, 1.0), (0.0, 0.875)]


def test_an_expert_without_a_step_gets_no_file_and_a_warning(
    overrides: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(overrides("steps=2", *HALVES, base=BASE), run) == DONE
    assert len(list((run / "export").iterdir())) == 1
    (warning,) = warnings_of(run)
    assert "has had no step" in warning
    assert warning in capsys.readouterr().err
    assert "has had no step" in (run / "report.html").read_text()
