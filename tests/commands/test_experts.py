"""Two experts in one run: dealt out as promised, each inside its noise levels, one in memory, a file for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.processes import KILLED, end, start
from tests.runs import open_run, prepare
from tests.shell import sample, train
from videotune.commands.sample import SampleOptions
from videotune.errors import DONE, VideotuneError
from videotune.latent_cache.batches import prepare as prepare_batch
from videotune.latent_cache.expert_schedule import ExpertSchedule, exact
from videotune.planner.plan import make_plan
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.loop import step_records
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.resume import Resume
from videotune.trainer.run_spec import open_job

VARIANT = "t2v-a14b"


@pytest.fixture(scope="module")
def base(tiny_bases: Callable[..., Path]) -> Path:
    return tiny_bases("wan", VARIANT)


@pytest.fixture
def words(small_clips: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Overrides]:
    cache = tmp_path_factory.getbasetemp() / "experts-cache"
    fixed = (
        f"base_model_name={base}",
        f"cache_dir={cache}",
        "resolution=32x32",
        "learning_rate=0.01",
        "warmup_steps=0",
        "sample.steps=2",
        "samples=1",
        "expert_period=2",
        "expert_share=0.5",
    )

    def make(*sets: str) -> Overrides:
        return Overrides(data=str(small_clips), sets=(*fixed, *sets))

    return make


QUIET = ("sample_after=0", "validate_every=0", "save_every=0")


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_journal(run) if line["kind"] == "step"]


@pytest.mark.parametrize("share", [0.0, 0.198, 0.368, 0.5, 0.705, 1.0])
@pytest.mark.parametrize("period", [1, 7, 50])
def test_the_rota_deals_out_the_share_in_runs(share: float, period: int) -> None:
    expert_schedule = ExpertSchedule(("high", "low"), exact(share), period)
    names = [expert_schedule.at(step) for step in range(1, 2001)]
    for step in (1, 2, 49, 50, 51, 99, 100, 777, 2000):
        for name in expert_schedule.names:
            assert expert_schedule.count(step, name) == names[:step].count(name)
    assert abs(names.count("high") - 2000 * share) <= period
    runs = [len(list(group)) for _, group in itertools.groupby(names)]
    assert all(length % period == 0 for length in runs[:-1])
    if 0 < share < 1:
        longest = max(runs) / period
        assert longest <= max(1 / share, 1 / (1 - share)) + 1, "spread evenly, not in two halves"


def test_one_expert_has_every_step() -> None:
    expert_schedule = ExpertSchedule(("low",))
    assert {expert_schedule.at(step) for step in range(1, 100)} == {"low"}
    assert expert_schedule.count(99, "low") == 99
    assert expert_schedule.share == Fraction(1)


def test_each_step_draws_inside_its_expert_s_noise_levels(words: Callable[..., Overrides], tmp_path: Path) -> None:
    """By the boundary of the checkpoint, 0.875; and together the draws are those of the whole distribution."""
    job = open_run(words(*QUIET, "steps=40", "batch_size=4", "expert_period=1"), tmp_path / "run", None).job
    trainer = prepare(job, tmp_path / "run", False)
    drawn: dict[str, list[float]] = {"high": [], "low": []}
    for step in range(1, 41):
        drawn[trainer.pool.expert_schedule.at(step)] += prepare_batch(trainer.source, step).t.tolist()
    assert len(drawn["high"]) == len(drawn["low"]) == 80
    assert min(drawn["high"]) >= 0.875 > max(drawn["low"])
    assert max(drawn["high"]) > 0.95
    assert min(drawn["low"]) < 0.5
    trainer.journal.close()


def test_unless_set_the_share_is_that_of_the_draws(words: Callable[..., Overrides], tmp_path: Path) -> None:
    """Under logit-normal at shift 5 the expert above 0.875 has 37 % of them."""
    said = words(*QUIET, "steps=1000", "timestep_shift=5")
    said = Overrides(data=said.data, sets=tuple(text for text in said.sets if not text.startswith("expert_share")))
    trainer = prepare(open_run(said, tmp_path / "run").job, tmp_path / "run", False)
    assert float(trainer.pool.expert_schedule.share) == pytest.approx(0.368, abs=0.001)
    trainer.journal.close()


def test_a_step_moves_its_own_expert_alone_and_one_is_in_memory(
    words: Callable[..., Overrides], tmp_path: Path
) -> None:
    job = open_run(words(*QUIET, "steps=6", "learning_rate_low=0.002"), tmp_path / "run", None).job
    trainer = prepare(job, tmp_path / "run", False)
    nets = set()
    records = step_records(trainer)
    for step in range(1, 7):
        before = {name: value.detach().clone() for name, value in trainer.parameters.items()}
        line = next(records).read()
        moved = {
            name.split(".")[0] for name, value in trainer.parameters.items() if not torch.equal(value, before[name])
        }
        expert = "high" if step in (1, 2, 5, 6) else "low"
        assert (moved, line["expert"]) == ({expert}, expert)
        assert line["lr"] == {expert: 0.01 if expert == "high" else 0.002}
        nets.add(id(trainer.net))
        assert trainer.pool.current == expert
        on_disk = load_file(
            job.base.folder
            / ("transformer" if expert == "high" else "transformer_2")
            / "diffusion_pytorch_model.safetensors"
        )
        assert torch.equal(trainer.net.blocks[0].attn1.to_q.base_layer.weight, on_disk["blocks.0.attn1.to_q.weight"])
    trainer.journal.close()


def test_killed_in_any_expert_and_resumed_is_one_run(words: Callable[..., Overrides], tmp_path: Path) -> None:
    """With previews and readings, which need both experts in between; the kill falls into step 7, a low one."""
    said = words(
        "steps=8", "save_every=3", "validate_every=4", "sample_after=4", "ema=0.5", "learning_rate_scheduler=LINEAR"
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert end(start(said, whole)) == DONE
    assert end(start(said, cut, None, "mid-accumulation", 7)) == KILLED
    assert 0 < len(steps_of(cut)) < 8
    assert end(start(Overrides(), cut, Resume())) == DONE
    names = ("step", "expert", "loss", "lr", "window_ids", "by_t", "grad_norm")
    assert [[line[name] for name in names] for line in steps_of(cut)] == [
        [line[name] for name in names] for line in steps_of(whole)
    ]
    for part in ("weights", "optimizer", "ema"):
        a, b = (complete_checkpoints(run)[-1].load(part) for run in (whole, cut))
        assert set(a) == set(b)
        assert {name.split(".")[0] for name in a} == {"high", "low"}
        assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_both_files_load_into_one_pipeline_and_change_what_it_draws(
    words: Callable[..., Overrides], base: Path, tmp_path: Path
) -> None:
    """diffusers' own pipeline with the two files draws what the run's preview computed with; `sample RUN` too."""
    from diffusers import WanPipeline

    run = tmp_path / "run"
    both = '["diffusers", "comfyui"]'
    assert train(words(*QUIET, "steps=8", f"output_model_format={both}"), run) == DONE
    files = sorted(path.name for path in (run / "export").iterdir())
    assert files == [
        "run-step-8-comfyui_high_noise.safetensors",
        "run-step-8-comfyui_low_noise.safetensors",
        "run-step-8_high_noise.safetensors",
        "run-step-8_low_noise.safetensors",
    ]
    pipe = WanPipeline.from_pretrained(base)
    pipe.set_progress_bar_config(disable=True)

    def draw() -> torch.Tensor:
        noise = torch.Generator().manual_seed(1)
        shape: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4}
        return pipe("a red circle", **shape, generator=noise, output_type="latent").frames

    drawn = [draw()]
    pipe.load_lora_weights(run / "export", weight_name=files[2], adapter_name="high")
    drawn.append(draw())
    pipe.load_lora_weights(run / "export", weight_name=files[3], adapter_name="low", load_into_transformer_2=True)
    drawn.append(draw())
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in itertools.combinations(drawn, 2))
    assert sample(SampleOptions(("a red circle",), 1, run=run, sets=("sample.steps=2",)), tmp_path / "out") == DONE
    assert len(list((tmp_path / "out").glob("*.mp4"))) == 1


@pytest.mark.parametrize("expert", ["high", "low"])
def test_one_expert_may_train_alone(expert: str, words: Callable[..., Overrides], tmp_path: Path) -> None:
    said = words(*QUIET, "steps=3", f"experts={expert}")
    said = Overrides(data=said.data, sets=tuple(text for text in said.sets if not text.startswith("expert_share")))
    run = tmp_path / "run"
    assert train(said, run) == DONE
    assert {line["expert"] for line in steps_of(run)} == {expert}
    assert [path.name for path in (run / "export").iterdir()] == [f"run-step-3_{expert}_noise.safetensors"]
    assert all(name.startswith(f"{expert}.") for name in complete_checkpoints(run)[-1].load("weights"))


def test_what_one_denoiser_does_not_have_is_refused(
    words: Callable[..., Overrides], tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    single = f"base_model_name={tiny_bases('wan')}"
    with pytest.raises(VideotuneError, match=r"expert_share: .* one denoiser"):
        train(words(*QUIET, single), tmp_path / "a")
    with pytest.raises(VideotuneError, match="FINE_TUNE changes every weight of one expert"):
        train(words(*QUIET, "training_method=FINE_TUNE"), tmp_path / "b")
    with pytest.raises(VideotuneError, match="expert_share: high alone trains"):
        train(words(*QUIET, "experts=high"), tmp_path / "c")


@pytest.mark.parametrize(("sets", "high"), [((), 400), (("experts=low",), 0), (("expert_share=0.25",), 250)])
def test_the_plan_says_what_each_expert_trains(
    sets: tuple[str, ...], high: int, words: Callable[..., Overrides]
) -> None:
    """By default the share of its noise levels among the draws, in runs of 50: 37 % of a thousand steps are eight runs."""
    said = words("steps=1000", "expert_period=50", *sets)
    if "expert_share=0.25" not in sets:
        said = Overrides(data=said.data, sets=tuple(word for word in said.sets if not word.startswith("expert_share")))
    plan = make_plan(open_job(*resolve_config(said)))
    each = {expert["name"]: expert["steps"] for expert in plan["experts"]["each"]}
    assert abs(each["high"] - high) <= 50
    assert sum(each.values()) == 1000
    assert [(e["from"], e["to"]) for e in plan["experts"]["each"]] == [(0.875, 1.0), (0.0, 0.875)]


def test_an_expert_that_has_had_no_step_gets_no_file_and_is_told(
    words: Callable[..., Overrides], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(words(*QUIET, "sample_metrics.budget=0", "steps=2"), tmp_path / "run") == DONE
    assert len(list((tmp_path / "run" / "export").iterdir())) == 1
    (warning,) = [line["text"] for line in read_journal(tmp_path / "run") if line["kind"] == "warning"]
    assert "has had no step" in warning
    assert warning in capsys.readouterr().err
    assert "has had no step" in (tmp_path / "run" / "report.html").read_text()
