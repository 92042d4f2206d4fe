"""The ways of computing a made step, counted one by one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_dataset
from tests.support.made_steps import DTYPE, Specs, specs_in_place
from tests.support.trainers import Lab, job_of
from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.memory.checkpointing import CPU_OFFLOADED, IN_PARTS, OFF, ON
from videotune.planner import compared, memory
from videotune.planner.cluster import Cluster, Network
from videotune.planner.compared import EIGHT_BITS, Way, compared_ways
from videotune.planner.fit import Fit, fit, process_share, step_seconds
from videotune.planner.gpus import Card
from videotune.planner.memory import Choice, Need, need
from videotune.planner.step_spec import StepSpec

CARD = Card("a card", 1 << 40, flops=1e13, link=1e3, bandwidth=1e12)
"""Streaming a block takes longer on it than computing one again."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The toy base model, and a clip."""
    folder = tmp_path_factory.mktemp("ways")
    clips = write_dataset(folder / "clips", {"a.mkv": noise(9, 32, 32)}, {}, fps=16)
    return Lab(Path("asset:toy"), clips, folder / "cache", folder)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> Specs:
    specs = specs_in_place(monkeypatch)
    monkeypatch.setattr(compared, "step_spec_in_parts", specs.reader("in_parts"))
    return specs


def pair(lab: Lab, **knobs: Any) -> Job:
    return job_of(lab, {"batch_size": 2, "gradient_checkpointing": None, **knobs})


def way(
    job: Job, specs: Specs, choice: Choice, verdict: Any, **changes: Any
) -> dict[str, Any]:
    """A way of these settings, of five blocks."""
    training = need(specs.in_parts, choice)
    if changes.get("is_compiled"):
        training = memory.compiled(training)
    seconds = step_seconds(job, specs.in_parts, training, CARD, DTYPE)
    return Way(training, seconds, verdict, 5, **changes).to_json()


def slow(specs: Specs) -> None:
    """Other operations than products take as long as these, so that compiling helps."""

    def slower(spec: StepSpec) -> StepSpec:
        return spec.changed(
            lambda reading, _: replace(
                reading, work=replace(reading.work, moved=reading.work.flops / 10)
            )
        )

    specs.plain, specs.in_parts = slower(specs.plain), slower(specs.in_parts)


def split(mode: str, streamed: int = 0) -> Choice:
    return Choice(1, mode, streamed, accumulates=True)


def test_each_kind_of_checkpointing_is_a_way_and_the_fastest_is_compiled_too(
    lab: Lab, specs: Specs
) -> None:
    slow(specs)
    job = pair(lab)
    result = fit(job, DTYPE, 1 << 40, CARD)
    plain = [
        way(job, specs, Choice(2, OFF, 0), "fits", is_chosen=True),
        way(job, specs, Choice(2, ON, 0), "fits"),
        way(job, specs, Choice(2, CPU_OFFLOADED, 0), "fits"),
        way(job, specs, Choice(2, IN_PARTS, 0), "fits"),
    ]
    compiled = way(job, specs, Choice(2, OFF, 0), "fits", is_compiled=True)
    rounded = way(
        job,
        specs,
        Choice(2, OFF, 0),
        "fits",
        is_compiled=True,
        matmul_dtype=EIGHT_BITS,
    )
    ways = compared_ways(job, result, DTYPE)
    assert ways[:3] == [compiled, rounded, plain[0]]
    assert sorted(map(str, ways[3:])) == sorted(map(str, plain[1:]))
    assert compiled["seconds_a_step"] < plain[0]["seconds_a_step"]

    compiling = pair(lab, compile=True)
    ways = compared_ways(compiling, fit(compiling, DTYPE, 1 << 40, CARD), DTYPE)
    chosen = [row for row in ways if row["is_chosen"]]
    assert chosen == [compiled | {"is_chosen": True}]

    forbidden = pair(lab, deterministic=True)
    ways = compared_ways(forbidden, fit(forbidden, DTYPE, 1 << 40, CARD), DTYPE)
    assert not any(row["settings"]["compile"] for row in ways)
    assert sum(row["is_another_base"] for row in ways) == 1


def test_a_way_of_the_run_that_is_not_the_fastest_of_its_kind_is_added(
    lab: Lab, specs: Specs
) -> None:
    fixed = {"micro_batch_size": 1, "gradient_checkpointing": ON}
    slow(specs)
    for compiles in (False, True):
        job = pair(lab, compile=compiles, **fixed)
        result = fit(job, DTYPE, 1 << 40, CARD)
        ways = compared_ways(job, result, DTYPE)
        changes = {"is_compiled": compiles, "is_chosen": True}
        added = way(job, specs, split(ON), "fits", **changes)
        assert [row for row in ways if row["is_chosen"]] == [added]
        assert len(ways) == 4 + 1 + 1 + 1


def test_of_each_kind_it_is_what_fits_or_is_tight_or_is_smallest(
    lab: Lab, specs: Specs
) -> None:
    """A card on which the settings of each kind have a verdict of their own."""
    job = pair(lab)
    spec = specs.in_parts
    least_off = need(spec, split(OFF, 5)).needed
    vram = need(spec, split(ON)).needed + 10
    assert least_off < vram
    result = fit(job, DTYPE, vram, CARD, spare=10)
    rows = {
        row["settings"]["gradient_checkpointing"]: row
        for row in compared_ways(job, result, DTYPE)
        if not row["settings"]["compile"] and not row["is_another_base"]
    }
    assert rows[ON] == way(job, specs, split(ON), "fits", is_chosen=True) | {
        "is_chosen": result.training.choice == split(ON)
    }

    # The run's own way takes a byte of those; each kind has one that does not.
    ways = compared_ways(job, replace(result, spare=11), DTYPE)
    tight = [row["is_chosen"] for row in ways if row["verdict"] == "tight"]
    assert tight == [True]

    vram = need(spec, split(IN_PARTS, 5)).needed
    for spare, verdict in ((0, "fits"), (1, "tight")):
        result = replace(fit(job, DTYPE, vram, CARD), spare=spare)
        ways = compared_ways(job, result, DTYPE)
        least = {
            OFF: split(OFF, 5),
            ON: split(ON, 5),
            CPU_OFFLOADED: split(CPU_OFFLOADED, 5),
        }
        rows = {
            row["settings"]["gradient_checkpointing"]: row
            for row in ways
            if not row["settings"]["compile"] and not row["is_another_base"]
        }
        for mode, choice in least.items():
            assert rows[mode] == way(job, specs, choice, "does not fit")
        assert rows[IN_PARTS] == way(
            job, specs, split(IN_PARTS, 5), verdict, is_chosen=True
        )
        assert ways[0]["settings"]["gradient_checkpointing"] == IN_PARTS


def test_without_a_card_or_its_rate_ways_have_no_seconds(
    lab: Lab, specs: Specs
) -> None:
    job = pair(lab)
    choices = {mode: Choice(2, mode, 0) for mode in (OFF, ON, CPU_OFFLOADED, IN_PARTS)}
    for card, vram in ((None, None), (replace(CARD, timed=False), 1 << 40)):
        result = fit(job, DTYPE, vram, card)
        ways = compared_ways(job, result, DTYPE)
        assert {row["seconds_a_step"] for row in ways} == {None}
        verdict = None if vram is None else "fits"
        assert {row["verdict"] for row in ways} == {verdict}
        for row in ways:
            choice = choices[row["settings"]["gradient_checkpointing"]]
            assert row["need_bytes"] == need(specs.in_parts, choice).needed
        sizes = [row["need_bytes"] for row in ways]
        assert sizes == sorted(sizes)


def test_ways_of_several_machines_wait_for_their_network(
    lab: Lab, specs: Specs, tiny_bases: Callable[..., Path]
) -> None:
    """Two processes that share each sample, in two machines."""
    shared = replace(lab, model=tiny_bases("wan"))
    fixed = {"micro_batch_size": 1, "gradient_checkpointing": ON}
    job = pair(shared, context_parallel=2, compile=True, **fixed)
    cluster = Cluster(2, 1, Network("a slow network", 1e3))
    result: Fit = replace(fit(job, DTYPE, 1 << 40, CARD), cluster=cluster)
    ways = compared_ways(job, result, DTYPE)
    part = process_share(job, specs.in_parts, DTYPE)

    def seconds(training: Need, machines: Cluster | None) -> float:
        whole = specs.in_parts
        return step_seconds(job, whole, training, CARD, DTYPE, machines)

    for row in ways:
        settings = row["settings"]
        choice = Choice(
            settings["micro_batch_size"],
            settings["gradient_checkpointing"],
            row["streamed_blocks"],
            accumulates=settings["micro_batch_size"] == 1,
        )
        training = need(part, choice)
        if settings["compile"]:
            training = memory.compiled(training)
        assert row["need_bytes"] == training.needed
        assert row["seconds_a_step"] == round(seconds(training, cluster), 4)
        assert row["seconds_a_step"] > 2 * seconds(training, None)
    assert sum(row["is_chosen"] for row in ways) == 1
    assert sum(row["is_another_base"] for row in ways) == 1


def test_a_model_without_products_in_eight_bits_has_no_such_way(
    lab: Lab, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(job: Job, dtype: str) -> StepSpec:
        if job.config.transformer.matmul_dtype == EIGHT_BITS:
            raise VideotuneError("no layer is large enough")
        return specs.in_parts

    monkeypatch.setattr(compared, "step_spec_in_parts", read)
    job = pair(lab)
    ways = compared_ways(job, fit(job, DTYPE, 1 << 40, CARD), DTYPE)
    assert not any(row["is_another_base"] for row in ways)
    assert len(ways) == 4 + 1
