"""Failures of a run whose processes share the weights out: what is saved before it ends,
and what a process says when another one is lost. Real processes, FSDP2 over gloo.
"""

import json
import re
from pathlib import Path

import pytest

from tests.support.command_line import Bases
from tests.support.launcher import (
    QUIET,
    STEPS,
    WAITING,
    begin,
    overrides_of,
    processes,
    said_by_all,
)
from tests.support.run_results import of_kind
from videotune.errors import DONE, FAILED
from videotune.job.overrides import Overrides
from videotune.runs.checkpoint import complete_checkpoints, incomplete_checkpoints, pick


@pytest.fixture(scope="module")
def words(
    small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Overrides:
    cache = tmp_path_factory.mktemp("shared-failures") / "cache"
    sets = ("warmup_steps=0", "sharding=FULL", "batch_size=1", *QUIET)
    return overrides_of(small_clips, tiny_bases("wan"), cache, *sets)


def arguments(run: Path, words: Overrides, *sets: str) -> list[str]:
    chosen = [part for text in (*words.sets, *sets) for part in ("--set", text)]
    return ["train", "--out", str(run), "--data", str(words.data), *chosen]


@pytest.mark.parametrize("method", ["FINE_TUNE", "LORA"])
def test_the_step_before_losses_that_are_not_finite_is_saved_by_all_processes(
    method: str, words: Overrides, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    sets = (f"training_method={method}", "steps=20", "save_every=0", "backup_every=0")
    fault = "not finite from the third step"
    said = said_by_all(2, tmp_path / "logs", arguments(run, words, *sets), fault)

    steps_saved = [checkpoint.step for checkpoint in complete_checkpoints(run)]
    assert steps_saved == [2], said
    for part in ("weights", "optimizer"):
        pick(run, 2).verify(part)
    assert not incomplete_checkpoints(run)
    assert not list((run / "checkpoints").glob(".step-*"))
    assert "5 steps in a row had no finite loss or gradient" in said[0]
    assert "only complete checkpoint is of step 2" in said[0]
    assert len(of_kind(run, "step")) == 7


def test_each_process_returns_the_last_step(words: Overrides, tmp_path: Path) -> None:
    """Also when it resumes a run that has nothing left to do."""
    run = tmp_path / "run"
    begun = arguments(run, words)
    for command in (begun, ["train", "--out", str(run), "--resume"]):
        ended = processes(2, tmp_path / "logs", command, "results noted")
        assert ended.codes == (DONE, DONE), ended.failures
        for rank in range(2):
            result = json.loads((tmp_path / f"result-{rank}.json").read_text())
            assert result == {"why": "done", "step": STEPS}


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_is_lost_in_a_preview_is_said_to_be_gone(
    moment: str, words: Overrides, tmp_path: Path
) -> None:
    """Lost before it runs the network, or when it has, so that this one has no error of
    its own.
    """
    run = tmp_path / "run"
    sets = ("save_every=1", "sample_after=2")
    command = arguments(run, words, *sets)
    fault = f"killed {moment} the second preview"
    crowd, logs = begin(2, tmp_path / "logs", command, fault)
    crowd[0].join(WAITING)
    for process in crowd:
        process.kill()
        process.join(WAITING)

    said = logs[0].read_text()
    assert crowd[0].exitcode == FAILED, said
    last_line = re.sub(r"\s+", " ", said.strip())
    assert "another process of the run is gone" in last_line, said
    assert "this process failed" not in said
    assert "omplete checkpoints are those of steps 1, 2" in last_line, said
    assert not of_kind(run, "warning"), "a lost process is no failure of the preview"
