"""What is chosen on this machine before a run starts: memory settings and compiling."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.made_steps import DTYPE, SLOW_LINK, Specs, specs_in_place
from tests.support.trainers import Lab, job_of
from videotune.errors import DoesNotFit
from videotune.job.job import Job
from videotune.memory.checkpointing import IN_PARTS, OFF, ON
from videotune.planner import memory, settings
from videotune.planner.fit import MEMORY_KEYS, process_share, step_seconds
from videotune.planner.gpus import USUAL, Card
from videotune.planner.ledger import Work
from videotune.planner.memory import Choice, need
from videotune.planner.settings import (
    COMPILE_SECONDS,
    chosen_for_run,
    decide_compile,
    fit_settings,
    peak,
    planned_need,
)

CUDA = torch.device("cuda", 0)
OPEN: dict[str, Any] = {"batch_size": 2, "gradient_checkpointing": None}


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path, tiny_bases: Callable[..., Path]) -> Lab:
    """A tiny network whose tokens two processes can share."""
    return Lab(tiny_bases("wan"), small_clips, tmp_path / "cache", tmp_path)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> Specs:
    """A made step, also where a run looks for one that is known."""
    specs = specs_in_place(monkeypatch)
    monkeypatch.setattr(settings, "known_step_spec", specs.reader("plain"))
    return specs


def put_card(
    monkeypatch: pytest.MonkeyPatch, vram: int, card: Card | None, host: int = 1 << 40
) -> None:
    """As on a machine with a card on which ``vram`` bytes are free, and no small run is
    known to fit.
    """

    def requested(memory: float | None, name: str | None) -> tuple[int, Card | None]:
        assert (memory, name) == (None, None)
        return vram, card

    def surely_fits(job: Job, free: int) -> bool:
        assert (type(job), free) == (Job, vram)
        return False

    monkeypatch.setattr(settings, "local_device", lambda: CUDA)
    monkeypatch.setattr(settings, "requested_card", requested)
    monkeypatch.setattr(settings, "surely_fits", surely_fits)
    host_facts = SimpleNamespace(available=host, total=1 << 50)
    monkeypatch.setattr("psutil.virtual_memory", lambda: host_facts)


def with_spare(needed: int) -> int:
    """Return the bytes of a card of which a twentieth stays free beside these."""
    vram = round(needed / 0.95)
    while vram - round(vram / 20) < needed:
        vram += 1
    while vram - 1 - round((vram - 1) / 20) >= needed:
        vram -= 1
    return vram


def test_settings_of_a_run_fit_the_card_beside_a_twentieth_of_it_and_the_host(
    lab: Lab,
    specs: Specs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = job_of(lab, OPEN)
    streamed = need(specs.plain, Choice(2, OFF, 1))
    host = sum(streamed.host.values())
    vram = with_spare(streamed.needed)
    for free, free_host, card, expected in (
        (vram, host, USUAL, [2, OFF, 0.2]),
        (vram, host, SLOW_LINK, [1, OFF, 0.0]),
        (vram, host - 1, USUAL, [1, OFF, 0.0]),
        (vram - 1, host, USUAL, [1, OFF, 0.0]),
    ):
        put_card(monkeypatch, free, card, free_host)
        chosen = fit_settings(job)
        assert [getattr(chosen.config, key) for key in MEMORY_KEYS] == expected
        assert {chosen.resolved.origins[key] for key in MEMORY_KEYS} == {"plan"}
        line = capsys.readouterr().err
        assert f"memory: micro_batch_size={expected[0]} " in line.replace(",", "")
        assert "tight" not in line


def test_a_run_that_fits_only_without_the_twentieth_is_tight(
    lab: Lab,
    specs: Specs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = job_of(lab, OPEN)
    least = need(specs.in_parts, Choice(1, IN_PARTS, 5, accumulates=True))
    put_card(monkeypatch, least.needed, None)
    assert fit_settings(job).config.gradient_checkpointing == IN_PARTS
    assert "(tight: 1.0 GiB of 1.0 GiB free)" in capsys.readouterr().err

    put_card(monkeypatch, least.needed - 1, None)
    with pytest.raises(DoesNotFit) as refused:
        fit_settings(job)
    lines = str(refused.value).splitlines()
    assert "needs 1.0 GiB for training" in lines[0]
    assert "1.0 GiB free" in lines[0]
    assert lines[1].startswith("  training:")
    assert len(lines) > 2


def test_a_small_run_takes_the_plainest_settings_without_a_reading(
    lab: Lab, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_card(monkeypatch, 80 << 30, None)
    monkeypatch.setattr(settings, "surely_fits", lambda job, vram: True)
    chosen = fit_settings(job_of(lab, OPEN))
    assert [getattr(chosen.config, key) for key in MEMORY_KEYS] == [2, OFF, 0.0]
    assert specs.read == []


def test_a_second_plan_changes_only_what_a_plan_has_chosen(
    lab: Lab,
    specs: Specs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run's card has become smaller; its micro-batch is the user's."""
    job = job_of(lab, OPEN | {"micro_batch_size": 2, "compile": False})
    put_card(monkeypatch, 80 << 30, None)
    started, changes = chosen_for_run(job, replan=False)
    assert changes == []
    assert started.config.gradient_checkpointing == OFF

    put_card(monkeypatch, with_spare(need(specs.plain, Choice(2, ON, 0)).needed), None)
    resumed, changes = chosen_for_run(started, replan=False)
    assert (resumed.config, changes) == (started.config, [])
    capsys.readouterr()
    resumed, changes = chosen_for_run(started, replan=True)
    assert changes == ["replanned: gradient_checkpointing: 'OFF' -> 'ON'"]
    assert changes[0] in capsys.readouterr().err
    values = [getattr(resumed.config, key) for key in MEMORY_KEYS]
    assert values == [2, ON, 0.0]
    assert resumed.resolved.origins["micro_batch_size"] == "user"


CARD = Card("a card", 80 << 30, 1e15, 1e11, bandwidth=1e12)


def compiling_job(lab: Lab, **knobs: Any) -> Job:
    """Two buckets, two kinds of blocks, and samples that two processes share."""
    shared = {"context_parallel": 2, "video_config.frames": [9, 17], "batch_size": 1}
    fixed = {"micro_batch_size": 1, "gradient_checkpointing": "ON"}
    job = job_of(lab, {**shared, **fixed, **knobs})
    return replace(job, spec=replace(job.spec, blocks=("blocks",) * 2))


def slow_spec(specs: Specs) -> None:
    """A step of which other operations than products take seconds."""
    work = Work(flops=1e12, moved=1e13, operations=100)
    for name in ("one_sample", "two_samples"):
        readings = {
            mode: replace(read, work=work)
            for mode, read in getattr(specs.plain, name).items()
        }
        specs.plain = replace(specs.plain, **{name: readings})


@pytest.mark.parametrize(
    ("frames", "graphs"), [([9], 1), ([9, 17], 2), ([5, 9, 17], 2)]
)
def test_a_run_is_compiled_if_that_saves_more_than_a_graph_of_each_kind_takes(
    frames: list[int],
    graphs: int,
    lab: Lab,
    specs: Specs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For the first bucket and for all others; the reason is printed."""
    slow_spec(specs)
    put_card(monkeypatch, 80 << 30, CARD)
    monkeypatch.setattr(settings, "no_compiler", lambda: None)
    job = compiling_job(lab, **{"video_config.frames": frames})
    assert len(job.buckets) == len(frames)
    known = planned_need(job, DTYPE)
    assert known is not None
    spec, training = known
    plain = step_seconds(job, spec, training, CARD, DTYPE)
    faster = step_seconds(job, spec, memory.compiled(training), CARD, DTYPE)
    cost = COMPILE_SECONDS * graphs * 2
    enough = int(cost / (plain - faster)) + 1
    for steps, word in ((enough, "on"), (enough - 1, "off")):
        longer = compiling_job(lab, **{"video_config.frames": frames, "steps": steps})
        capsys.readouterr()
        decided = decide_compile(longer)
        assert decided.config.compile is (word == "on")
        assert decided.resolved.origins["compile"] == "plan"
        line = capsys.readouterr().err
        saved = round(steps * (plain - faster))
        assert f"compile: {word}: it would save about {saved} s " in line
        assert f"take up to {cost:.0f} s" in line


def test_a_run_that_saves_what_compiling_takes_is_not_compiled(
    lab: Lab, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two graphs for the first bucket, and two for the others."""
    slow_spec(specs)
    put_card(monkeypatch, 80 << 30, CARD)
    monkeypatch.setattr(settings, "no_compiler", lambda: None)
    job = compiling_job(lab, steps=1000)
    known = planned_need(job, DTYPE)
    assert known is not None
    spec, training = known
    plain, faster = (
        step_seconds(job, spec, way, CARD, DTYPE)
        for way in (training, memory.compiled(training))
    )
    cost_of_a_graph = 1000 * (plain - faster) / 4
    for cost, compiles in ((cost_of_a_graph, False), (0.99 * cost_of_a_graph, True)):
        monkeypatch.setattr(settings, "COMPILE_SECONDS", cost)
        assert decide_compile(job).config.compile is compiles


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("no compiler", "g++ is missing"),
        ("deterministic", "deterministic"),
        ("no card", "unknown"),
        ("no rate", "unknown"),
        ("no bandwidth", "unknown"),
        ("no reading", "unknown"),
        ("no reading and no compiler", "g++ is missing"),
    ],
)
def test_what_cannot_be_counted_is_not_compiled(
    case: str,
    reason: str,
    lab: Lab,
    specs: Specs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow_spec(specs)
    cards = {
        "no card": None,
        "no rate": replace(CARD, timed=False),
        "no bandwidth": replace(CARD, bandwidth=None),
    }
    put_card(monkeypatch, 80 << 30, cards.get(case, CARD))
    lacks = "g++ is missing" if "no compiler" in case else None
    monkeypatch.setattr(settings, "no_compiler", lambda: lacks)
    if "no reading" in case:
        monkeypatch.setattr(settings, "known_step_spec", lambda job, dtype: None)
    deterministic = {"deterministic": True} if case == "deterministic" else {}
    decided = decide_compile(compiling_job(lab, steps=10**6, **deterministic))
    assert decided.config.compile is False
    line = capsys.readouterr().err
    assert "compile: off: " in line
    assert reason in line


def test_compiling_is_decided_only_where_it_is_open_and_on_a_gpu(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = compiling_job(lab)
    assert decide_compile(job) is job
    put_card(monkeypatch, 80 << 30, CARD)
    for value in (True, False):
        named = compiling_job(lab, compile=value)
        assert decide_compile(named) is named


def test_a_planned_need_is_that_of_the_config_s_settings(
    lab: Lab, specs: Specs
) -> None:
    """A process's part of it, and none while a setting is open or nothing is known."""
    job = compiling_job(lab)
    known = planned_need(job, DTYPE)
    share = process_share(job, specs.plain, DTYPE)
    training = need(share, Choice(1, ON, 0))
    assert known == (specs.plain, training)
    streamed = compiling_job(lab, layer_offload_fraction=0.4)
    assert planned_need(streamed, DTYPE) == (specs.plain, need(share, Choice(1, ON, 2)))
    measured = {"allocated_bytes": 7}
    assert peak(job, measured) == measured | {"planned_bytes": training.allocated}
    assert peak(job, {}) is None

    for key in ("micro_batch_size", "gradient_checkpointing"):
        still_open = compiling_job(lab, **{key: None})
        assert planned_need(still_open, DTYPE) is None
        assert peak(still_open, measured) == measured | {"planned_bytes": None}


def test_nothing_is_planned_of_a_step_that_nobody_has_read(lab: Lab) -> None:
    fixed = {"micro_batch_size": 1, "gradient_checkpointing": "ON"}
    assert planned_need(job_of(lab, fixed), DTYPE) is None
