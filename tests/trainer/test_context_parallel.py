"""Processes that share the tokens of each sample are one that has them all: real
processes, diffusers' context parallelism over gloo.
"""

from pathlib import Path

import pytest

from tests.support.command_line import Bases, train
from tests.support.launcher import (
    QUIET,
    Ended,
    assert_runs_close,
    overrides_of,
    processes,
)
from videotune.errors import DONE
from videotune.job.overrides import Overrides

FULL = "training_method=FINE_TUNE"


@pytest.fixture(scope="module")
def words(
    small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Overrides:
    cache = tmp_path_factory.mktemp("context") / "cache"
    return overrides_of(
        small_clips, tiny_bases("wan"), cache, "save_every=2", "warmup_steps=0", *QUIET
    )


def in_processes(
    count: int, run: Path, words: Overrides, *sets: str, fault: str = ""
) -> Ended:
    """A run in so many processes."""
    sets = [part for text in (*words.sets, *sets) for part in ("--set", text)]
    arguments = ["train", "--out", str(run), "--data", str(words.data), *sets]
    return processes(count, run.parent / f"logs-{run.name}", arguments, fault)


@pytest.fixture(scope="module")
def alone(words: Overrides, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """One process with two samples a step, for each method once."""
    made: dict[str, Path] = {}

    def get(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp(f"alone-{method}") / "run"
            sets = (*words.sets, f"training_method={method}", "batch_size=2")
            overrides = Overrides(data=words.data, sets=sets)
            assert train(overrides, made[method]) == DONE
        return made[method]

    return get


@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
def test_two_processes_that_share_each_sample_are_one(
    method: str, words: Overrides, alone: Bases, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ("batch_size=2", "context_parallel=2", f"training_method={method}")
    ended = in_processes(2, run, words, *settings)
    assert ended.codes == (DONE, DONE), ended.said
    assert_runs_close(run, alone(method), ("weights", "ema", "optimizer"))
