"""Checkpoints that several processes write together, each its rows, while the steps go
on: real processes, FSDP2 over gloo.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Bases
from tests.support.launcher import QUIET, Ended, begin, overrides_of, processes
from tests.support.run_results import steps_of
from videotune.errors import DONE, FAILED, INTERRUPTED
from videotune.job.overrides import Overrides
from videotune.runs.checkpoint import complete_checkpoints, pick
from videotune.runs.journal import read_journal

STEPS = 8
WAITING = 120.0


@pytest.fixture(scope="module")
def words(
    small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Overrides:
    cache = tmp_path_factory.mktemp("shared-saves") / "cache"
    return overrides_of(
        small_clips,
        tiny_bases("wan"),
        cache,
        "warmup_steps=0",
        "training_method=FINE_TUNE",
        "sharding=FULL",
        "batch_size=1",
        *QUIET,
    )


def arguments(run: Path, words: Overrides, *sets: str) -> list[str]:
    chosen = [part for text in (*words.sets, *sets) for part in ("--set", text)]
    return ["train", "--out", str(run), "--data", str(words.data), *chosen]


def in_two(run: Path, words: Overrides, *sets: str, fault: str = "") -> Ended:
    logs = run.parent / f"logs-{run.name}"
    return processes(2, logs, arguments(run, words, *sets), fault)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAITING
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def last_step(run: Path) -> int:
    if not (run / "journal.jsonl").is_file():
        return 0
    steps = [line["step"] for line in steps_of(run)]
    return max(steps, default=0)


def saves_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_journal(run) if line["kind"] == "save"]


def hashes(run: Path, step: int) -> dict[str, str]:
    """The hash of each file of a checkpoint."""
    checkpoint = pick(run, step)
    return {name: entry["hash"] for name, entry in checkpoint.files.items()}


@pytest.fixture(scope="module")
def at_once(words: Overrides, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose steps wait while all of a checkpoint is written."""
    run = tmp_path_factory.mktemp("at-once") / "run"
    sets = (f"steps={STEPS}", "save_every=4")
    ended = in_two(run, words, *sets, fault="writes at once")
    assert ended.codes == (DONE, DONE), ended.failures
    return run


@pytest.mark.slow
def test_steps_go_on_while_threads_write_the_same_bytes(
    words: Overrides, at_once: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    sets = (f"steps={STEPS}", "save_every=4")
    ended = in_two(run, words, *sets, fault="writes and steps slowly")
    assert ended.codes == (DONE, DONE), ended.failures

    for step in (4, STEPS):
        assert hashes(run, step) == hashes(at_once, step)
    lines = [(line["kind"], line.get("step")) for line in read_journal(run)]
    assert lines.index(("step", 5)) < lines.index(("save", 4))
    in_background, last = saves_of(run)
    assert in_background["waited"] < 0.5 * in_background["seconds"]
    assert last["waited"] > 0.5 * last["seconds"], "the end waits for its checkpoint"
    for line in saves_of(at_once):
        assert line["waited"] > 0.8 * line["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_while_threads_write_the_run_goes_on_from_the_checkpoint_before(
    rank: int, words: Overrides, at_once: Path, tmp_path: Path
) -> None:
    """Both processes have trained on when one of them is killed, and the other ends."""
    run = tmp_path / "run"
    sets = (f"steps={STEPS}", "save_every=2")
    fault = "stuck in the second save"
    crowd, _ = begin(2, tmp_path / "logs", arguments(run, words, *sets), fault)
    try:
        # The save of step 6 would wait for that of step 4.
        wait_until(lambda: last_step(run) >= 5)
        half = list((run / "checkpoints" / ".step-4.part").glob("*.safetensors"))
        assert [path.read_bytes() for path in half] == [b"half", b"half"]
        os.kill(crowd[rank].pid or 0, signal.SIGKILL)
        crowd[rank].join(WAITING)
        assert crowd[rank].exitcode == -signal.SIGKILL
    finally:
        for process in crowd:
            process.kill()
            process.join(WAITING)
    assert [checkpoint.step for checkpoint in complete_checkpoints(run)] == [2]
    pick(run, 2).verify("weights")

    resumed = ["train", "--out", str(run), "--resume"]
    ended = processes(2, tmp_path / "logs-resumed", resumed)
    assert ended.codes == (DONE, DONE), ended.failures
    assert not list((run / "checkpoints").glob(".step-*"))
    assert hashes(run, STEPS) == hashes(at_once, STEPS)


@pytest.mark.slow
def test_asked_to_stop_the_processes_wait_for_what_their_threads_write(
    words: Overrides, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    sets = ("steps=100000", "save_every=2", "save_keep=1000")
    fault = "writes slowly"
    crowd, logs = begin(2, tmp_path / "logs", arguments(run, words, *sets), fault)
    wait_until(lambda: last_step(run) >= 3)
    assert not complete_checkpoints(run), "its thread still writes"
    (run / "control.json").write_text(json.dumps({"stop": True}))
    for process in crowd:
        process.join(WAITING)
    said = "\n".join(log.read_text() for log in logs)
    assert [process.exitcode for process in crowd] == [INTERRUPTED] * 2, said

    steps = [checkpoint.step for checkpoint in complete_checkpoints(run)]
    assert steps == sorted({2, *range(2, last_step(run) + 1, 2), last_step(run)})
    assert [line["step"] for line in saves_of(run)] == steps


@pytest.mark.slow
def test_a_thread_whose_disk_is_broken_ends_the_run_as_a_write_at_once_does(
    words: Overrides, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    sets = (f"steps={STEPS}", "save_every=2")
    ended = in_two(run, words, *sets, fault="broken disk")
    assert FAILED in ended.codes
    assert DONE not in ended.codes
    said = "".join(ended.said)
    assert "step 4 cannot be saved" in said
    assert "only complete checkpoint is of step 2" in said
    assert [checkpoint.step for checkpoint in complete_checkpoints(run)] == [2]
