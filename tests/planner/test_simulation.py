"""A simulated run of many processes is what real processes do, as far as there are as
many here.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.launcher import QUIET, overrides_of, processes
from tests.support.run_results import steps_of
from videotune.commands.simulation import Simulation
from videotune.errors import DONE
from videotune.job.job import Job, open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.planner import simulation
from videotune.planner.cluster import Cluster
from videotune.planner.simulation import (
    CacheReads,
    SaveTimes,
    SimulatedStep,
    _Work,
    asynchronous_wait,
    bytes_by_window,
    simulate,
    simulated_steps,
    steps_that_save,
)

Bases = Callable[..., Path]
STEPS = 6


@pytest.fixture(scope="module")
def words(
    small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Overrides:
    """Two buckets, so that steps differ."""
    cache = tmp_path_factory.mktemp("simulated") / "cache"
    sets = (*QUIET, f"steps={STEPS}", "batch_size=2", "save_every=2")
    return overrides_of(
        small_clips, tiny_bases("wan"), cache, *sets, "video_config.frames=[9, 17]"
    )


def job_of(words: Overrides, groups: int, *sets: str) -> Job:
    overrides = Overrides(data=words.data, sets=(*words.sets, *sets))
    return open_job(*resolve_config(overrides), processes=groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sets"),
    [
        (1, ()),
        (2, ()),
        (4, ()),
        (4, ("context_parallel=2",)),
        (2, ("training_method=FINE_TUNE", "sharding=FULL")),
    ],
)
def test_processes_train_the_windows_that_are_simulated(
    ranks: int, sets: tuple[str, ...], words: Overrides, tmp_path: Path
) -> None:
    """The journal has a step's windows, and each process notes its own."""
    run = tmp_path / "run"
    chosen = [part for text in (*words.sets, *sets) for part in ("--set", text)]
    arguments = ["train", "--out", str(run), "--data", str(words.data), *chosen]
    ended = processes(ranks, tmp_path / "logs", arguments, fault="shares noted")
    assert ended.codes == (DONE,) * ranks, ended.failures

    job = job_of(words, ranks // (2 if "context_parallel=2" in sets else 1), *sets)
    parts = job.config.context_parallel
    simulated = list(simulated_steps(job, ranks // parts, STEPS))
    journal = [line["window_ids"] for line in steps_of(run)]
    assert [list(step.window_ids) for step in simulated] == journal
    assert len({step.bucket for step in simulated}) > 1

    noted: dict[tuple[int, int], list[str]] = {}
    for line in (run.parent / "shares.jsonl").read_text().splitlines():
        note = json.loads(line)
        noted[note["rank"], note["step"]] = note["window_ids"]
    expected = {
        (rank, step.step): list(step.of_rank(rank, parts))
        for step in simulated
        for rank in range(ranks)
    }
    assert noted == expected


def test_a_resume_with_more_processes_than_samples_leaves_some_without(
    words: Overrides,
) -> None:
    job = job_of(words, 1)
    (step,) = simulated_steps(job, 3, 1)
    assert sorted(end - begin for begin, end in step.ranges) == [0, 1, 1]
    out = simulate(job, Cluster(1, 3), None, 1000, None)
    assert out["work"]["share_without_sample"] == 0.3333
    assert out["work"]["most_over_mean_of_ranks"] == 1.5
    assert out["work"]["slowest_over_mean_step"] is None
    assert out["work"]["buckets"][0]["seconds_a_step"] is None
    assert out["cache"]["storage_bytes_a_second"] is None
    assert out["checkpoints"] is None

    sharded_sets = ("training_method=FINE_TUNE", "sharding=FULL")
    sharded = job_of(words, 1, *sharded_sets)
    (step,) = simulated_steps(sharded, 3, 1)
    assert [end - begin for begin, end in step.ranges] == [1, 1, 1]
    assert step.padding_samples == 1
    out = simulate(sharded, Cluster(1, 7), None, 1000, None)
    assert out["work"]["share_without_sample"] == 0.7143
    assert out["work"]["most_over_mean_of_ranks"] == 3.5

    single = job_of(words, 1, *sharded_sets, "batch_size=1")
    (step,) = simulated_steps(single, 2, 1)
    assert step.ranges == ((0, 1), (0, 1))
    assert step.padding_samples == 1


def test_a_whole_simulation_is_counted_by_hand(
    words: Overrides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of six steps, of which those of the second bucket take longer: two machines
    with a process each, of which the main one saves.
    """
    monkeypatch.setattr(simulation, "STEPS", 5)
    job = job_of(words, 2)
    seconds_by_bucket = [1.23456, 3.0]
    out = simulate(job, Cluster(2, 1), seconds_by_bucket, 8 * 10**9, 4e9)

    steps = list(simulated_steps(job, 2, 5))
    counts = Counter(step.bucket for step in steps)
    assert set(counts) == {0, 1}
    seconds = [seconds_by_bucket[step.bucket] for step in steps]
    rows = [
        {
            "shape": str(shape),
            "steps": counts[bucket],
            "samples": 4,
            "samples_a_group": 2,
            "tokens_a_rank": 2 * job.spec.tokens(shape),
            "seconds_a_step": (1.2346, 3.0)[bucket],
        }
        for bucket, shape in enumerate(job.shapes)
    ]

    sizes = bytes_by_window(job)
    of_machines = [
        [
            sum(sizes[window] for window in windows)
            for windows in (step.window_ids[:2], step.window_ids[2:])
        ]
        for step in steps
    ]
    read = [sum(machines) for machines in of_machines]
    a_step = {"mean": round(fmean(read)), "most": max(read)}
    most = [max(machines) for machines in of_machines]
    rates = [size / duration for size, duration in zip(read, seconds, strict=True)]

    times = SaveTimes(staging=2.0, writing=8 / 0.9)
    blocking = 3 * times.writing
    asynchronous = clocked([2, 4, 6], fmean(seconds), times)
    training = 6 * fmean(seconds)
    assert out == {
        "steps": 5,
        "of": 6,
        "ranks": 2,
        "machines": 2,
        "work": {
            "buckets": rows,
            "most_over_mean_of_ranks": 1.0,
            "share_without_sample": 0,
            "slowest_over_mean_step": round(3 / fmean(seconds), 3),
        },
        "cache": {
            "read_bytes_a_step": a_step,
            "storage_bytes_a_step": a_step,
            "storage_bytes_a_step_and_machine": {
                "mean": round(fmean(most)),
                "most": max(most),
            },
            "storage_bytes_a_second": {
                "mean": round(sum(read) / sum(seconds)),
                "most": round(max(rates)),
            },
        },
        "checkpoints": {
            "count": 3,
            "bytes": 8 * 10**9,
            "writers": 1,
            "bytes_a_writer": 8 * 10**9,
            "storage_bytes_a_second": 2 * 10**9,
            "storage_is_assumed": True,
            "staging_seconds": 2.0,
            "writing_seconds": 8.8889,
            "waiting_seconds": {
                "blocking": 26.667,
                "asynchronous": round(asynchronous, 3),
            },
            "waiting_shares": {
                "blocking": round(blocking / (training + blocking), 6),
                "asynchronous": round(asynchronous / (training + asynchronous), 6),
            },
        },
    }


@pytest.mark.parametrize(
    ("cluster", "fetched"),
    [
        # each machine has one process of a group, and all of its windows
        (Cluster(4, 1), [5, 5, 7, 7]),
        (Cluster(2, 2), [5, 7]),
        (Cluster(1, 4), [1 + 4 + 3]),
    ],
)
def test_a_group_of_several_machines_is_read_by_each_of_them(
    cluster: Cluster,
    fetched: list[int],
    words: Overrides,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two groups of two processes train windows a and b, and b and c."""
    sizes = {"a": 1, "b": 4, "c": 3}
    monkeypatch.setattr(simulation, "bytes_by_window", lambda job: sizes)
    step = SimulatedStep(1, 0, ("a", "b", "b", "c"), ((0, 2), (2, 4)), 0)
    assert [step.of_rank(rank, 2) for rank in (1, 2)] == [("a", "b"), ("b", "c")]

    reads = CacheReads(job_of(words, 2, "context_parallel=2"), cluster)
    reads.add(step, seconds=None)
    reads.add(step, seconds=None)
    read = 2 * 5 + 2 * 7
    assert reads.to_json() == {
        "read_bytes_a_step": {"mean": read, "most": read},
        "storage_bytes_a_step": {"mean": sum(fetched), "most": sum(fetched)},
        "storage_bytes_a_step_and_machine": {
            "mean": max(fetched),
            "most": max(fetched),
        },
        "storage_bytes_a_second": None,
    }


@pytest.mark.parametrize(
    ("sets", "steps"),
    [
        (("save_every=4", "backup_every=3"), [3, 4, 6, 8, 9, 10]),
        (("save_every=5", "backup_every=0"), [5, 10]),
        (("save_every=0", "backup_every=0"), [10]),
        (("save_every=1", "steps=3"), [1, 2, 3]),
    ],
)
def test_a_run_saves_by_two_rhythms_and_at_its_end(
    sets: tuple[str, ...], steps: list[int], words: Overrides
) -> None:
    assert steps_that_save(job_of(words, 1, "steps=10", *sets)) == steps


def test_machines_read_what_their_processes_train(words: Overrides) -> None:
    """Processes that share a sample read it each, and its machine fetches it once."""
    job = job_of(words, 4)
    sizes = bytes_by_window(job)
    out = simulate(job, Cluster(2, 2), [0.5] * len(job.buckets), 1000, 1e9)
    read, fetched = [], []
    for step in simulated_steps(job, 4, STEPS):
        windows = [step.of_rank(rank, 1) for rank in range(4)]
        read.append(sum(sizes[window] for part in windows for window in part))
        machines = (windows[0] + windows[1], windows[2] + windows[3])
        fetched.append(sum(sizes[window] for part in machines for window in set(part)))
    cache = out["cache"]
    assert cache["read_bytes_a_step"]["most"] == max(read)
    assert cache["storage_bytes_a_step"]["most"] == max(fetched)
    assert cache["storage_bytes_a_second"]["most"] == round(max(fetched) / 0.5)

    shared = job_of(words, 4, "context_parallel=2")
    doubled = simulate(shared, Cluster(2, 4), None, 1000, None)["cache"]
    assert doubled["read_bytes_a_step"]["most"] == 2 * max(read)
    assert doubled["storage_bytes_a_step"]["most"] <= max(read)


def clocked(steps: list[int], step_seconds: float, times: SaveTimes) -> float:
    """Go through a run step by step, with one writer."""
    now, busy_until, waited = 0.0, 0.0, 0.0
    for step in range(1, steps[-1] + 1):
        now += step_seconds
        if step in steps:
            begun = now
            now = max(now, busy_until) + times.staging
            busy_until = now + times.writing
            waited += now - begun
    return waited + max(0.0, busy_until - now)


@pytest.mark.parametrize("writing", [0.5, 3.0, 20.0])
@pytest.mark.parametrize("step_seconds", [0.5, 1.0])
def test_steps_wait_for_copies_and_for_a_writer_that_is_late(
    writing: float, step_seconds: float
) -> None:
    times = SaveTimes(staging=0.25, writing=writing)
    steps = [1, 4, 8, 12, 13]
    waited = asynchronous_wait(steps, step_seconds, times)
    assert waited == pytest.approx(clocked(steps, step_seconds, times))
    assert waited <= 5 * (times.staging + times.writing)


def test_a_faster_storage_and_threads_make_steps_wait_less(words: Overrides) -> None:
    job = job_of(words, 2, "training_method=FINE_TUNE", "sharding=FULL")
    assert steps_that_save(job) == [2, 4, 6]
    waits = {}
    for storage in (1e9, 4e9):
        seconds = [30.0] * len(job.buckets)
        out = simulate(job, Cluster(1, 2), seconds, 8 * 10**9, 50e9, storage)
        saves = out["checkpoints"]
        assert saves["writers"] == 2
        assert saves["bytes_a_writer"] == 4 * 10**9
        waits[storage] = saves["waiting_seconds"]
    assert waits[1e9]["blocking"] == pytest.approx(3 * 8.0)
    assert waits[4e9]["blocking"] == pytest.approx(3 * 4e9 / 0.9e9, abs=0.001)
    for wait in waits.values():
        assert wait["asynchronous"] < 0.5 * wait["blocking"]


def test_a_thousand_processes_are_simulated_in_seconds(
    words: Overrides, tmp_path: Path
) -> None:
    sets = ("steps=1000", "batch_size=1", "context_parallel=2")
    job = job_of(words, 512, *sets)
    begun = time.process_time()
    out: dict[str, Any] = simulate(
        job, Cluster(128, 8), [1.0] * len(job.buckets), 10**9, 50e9
    )
    assert time.process_time() - begun < 20
    assert (out["ranks"], out["machines"], out["steps"]) == (1024, 128, 1000)
    rows = out["work"]["buckets"]
    assert sum(row["steps"] for row in rows) == 1000
    tokens = {str(shape): job.spec.tokens(shape) for shape in job.shapes}
    for row in rows:
        assert row == {
            "shape": row["shape"],
            "steps": row["steps"],
            "samples": 512,
            "samples_a_group": 1,
            "tokens_a_rank": tokens[row["shape"]] // 2,
            "seconds_a_step": 1.0,
        }
        assert isinstance(row["tokens_a_rank"], int)
    assert out["work"]["slowest_over_mean_step"] == 1.0
    assert out["work"]["share_without_sample"] == 0
    assert out["work"]["most_over_mean_of_ranks"] == 1.0


def test_a_schedule_is_a_line_a_step(words: Overrides, tmp_path: Path) -> None:
    from videotune.planner.fit import fit

    job = job_of(words, 2)
    path = tmp_path / "schedule.jsonl"
    result = fit(job, "FLOAT_32", None, None)
    Simulation(schedule=path).run(job, result, "FLOAT_32", 1000)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, step in zip(lines, simulated_steps(job, 2, STEPS), strict=True):
        assert line == {
            "step": step.step,
            "shape": str(job.shapes[step.bucket]),
            "window_ids": list(step.window_ids),
            "samples_of_groups": [[0, 2], [2, 4]],
            "context_parallel": 1,
        }


def test_work_is_told_to_three_and_four_digits(words: Overrides) -> None:
    """Seven samples on three groups, of which one has a padding sample, too."""
    work = _Work(job_of(words, 1), 3, None)
    step: Any = SimpleNamespace(
        bucket=0,
        ranges=((0, 3), (3, 5), (5, 7)),
        window_ids=tuple("abcdefg"),
        padding_samples=1,
    )
    work.add(step)
    told = work.to_json()
    assert told["most_over_mean_of_ranks"] == 1.286
    assert told["share_without_sample"] == 0.3333
    (row,) = told["buckets"]
    assert (row["steps"], row["samples"], row["samples_a_group"]) == (1, 7, 3)
