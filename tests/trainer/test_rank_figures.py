"""What each process of a run has measured, and which one is named as slower."""

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.support.command_line import train
from tests.support.launcher import QUIET, overrides_of, processes
from tests.support.run_results import warnings_of
from videotune.commands.status import overview
from videotune.errors import DONE
from videotune.job.overrides import Overrides
from videotune.runs.rank_figures import (
    FEWEST_STEPS,
    RankFigures,
    find_stragglers,
    from_text,
    ranks_in,
    to_text,
)
from videotune.runs.run_life import life
from videotune.trainer.rank_meter import LOOKS, WINDOW, RankMeter, _name_of

USUAL = RankFigures(
    rank=0,
    host="host",
    device="GPU 0",
    step=60,
    measured=50,
    samples=1,
    own_seconds=1.0,
    waiting_seconds=0.1,
    data_seconds=0.01,
    samples_per_second=0.9,
    memory_bytes=1,
    peak_bytes=2,
)


def ranks_of(*own_seconds: float, **changes: Any) -> list[RankFigures]:
    return [
        replace(USUAL, rank=rank, own_seconds=seconds, **changes)
        for rank, seconds in enumerate(own_seconds)
    ]


def named(ranks: list[RankFigures]) -> list[int]:
    return [straggler.figures.rank for straggler in find_stragglers(ranks)]


def test_a_process_is_named_that_is_slower_than_the_median_of_the_others() -> None:
    assert named(ranks_of(1.0, 1.05, 1.6, 0.98)) == [2]
    assert named(ranks_of(1.0, 1.6)) == [1]
    assert named(ranks_of(1.0, 1.4, 0.9, 1.1)) == []


def test_a_process_measures_its_samples_times_and_memory() -> None:
    """Medians of all steps but the first, which warms up; of five samples the second of
    two processes has three.
    """
    dist: Any = SimpleNamespace(rank=1, data_rank=1, data_size=2, watch=None)
    meter = RankMeter(dist, torch.device("cpu"), in_lockstep=False)
    meter.add(7, {"forward": 90.0}, samples=5, peak=0)
    assert meter.figures() is None
    for step, total in ((8, 2.0), (9, 6.0), (10, 4.0)):
        seconds = {
            "data": 0.25 * total,
            "forward": 0.5 * total,
            "waiting": 0.25 * total,
        }
        meter.add(step, seconds, samples=5, peak=1)
    memory = psutil.Process().memory_info().rss

    (figures,) = meter.all_ranks()
    assert figures == meter.figures()
    assert (figures.rank, figures.step, figures.measured) == (1, 10, 3)
    assert figures.samples == 3
    assert figures.own_seconds == 3.0
    assert (figures.waiting_seconds, figures.data_seconds) == (1.0, 1.0)
    assert figures.samples_per_second == 3 / 4.0
    assert figures.memory_bytes == pytest.approx(memory, rel=0.2)
    assert figures.peak_bytes >= figures.memory_bytes

    meter = RankMeter(dist, torch.device("cpu"), in_lockstep=True)
    for step in (1, 2):
        meter.add(step, {"forward": 1.0}, samples=5, peak=1 << 60)
    (figures,) = meter.all_ranks()
    assert (figures.own_seconds, figures.waiting_seconds) == (None, None)
    assert figures.peak_bytes == 1 << 60


def alone(rank: int = 0, watch: Any = None) -> Any:
    """A process that has all samples of each step."""
    return SimpleNamespace(rank=rank, data_rank=0, data_size=1, watch=watch)


def test_the_figures_of_a_process_are_medians_of_its_latest_steps() -> None:
    """To the microsecond; the first step is none of them."""
    meter = RankMeter(alone(), torch.device("cpu"), in_lockstep=False)
    assert meter.all_ranks() == []
    assert meter.newly_slow() == []
    for step in range(1, WINDOW + 3):
        seconds = {"forward": 1.23456789, "waiting": 0.98765432, "data": 0.1111119}
        if step <= 2:
            seconds = {"forward": 1e9}
        meter.add(step, seconds, samples=2, peak=0)
        if step == 2:
            figures = meter.figures()
            assert figures is not None
            assert (figures.waiting_seconds, figures.data_seconds) == (0.0, 0.0)
            assert figures.measured == 1
    figures = meter.figures()
    assert figures is not None
    assert figures.host == socket.gethostname()
    assert (figures.device, figures.rank) == ("cpu", 0)
    assert (figures.step, figures.measured, figures.samples) == (52, 50, 2)
    assert figures.own_seconds == 1.34568
    assert figures.waiting_seconds == 0.987654
    assert figures.data_seconds == 0.111112
    assert figures.samples_per_second == round(
        2 / (1.23456789 + 0.98765432 + 0.1111119), 6
    )
    assert meter.newly_slow() == []

    meter = RankMeter(alone(), torch.device("cpu"), in_lockstep=False)
    for step in (1, 2):
        meter.add(step, {}, samples=2, peak=0)
    figures = meter.figures()
    assert figures is not None
    assert (figures.own_seconds, figures.samples_per_second) == (0, None)


def test_what_a_device_has_held_at_most_is_kept() -> None:
    """Of the host it is the most that was seen after a step."""
    meter = RankMeter(alone(), torch.device("cpu"), in_lockstep=False)
    for step, peak in ((1, 1 << 61), (2, 5), (3, 1 << 60)):
        meter.add(step, {"forward": 1.0}, samples=1, peak=peak)
    figures = meter.figures()
    assert figures is not None
    assert figures.peak_bytes == 1 << 61


@pytest.mark.parametrize(
    ("device", "cards", "name"),
    [
        ("cpu", "3,5", "cpu"),
        ("cuda", "3,5", "cuda"),
        ("cuda:0", "3,5", "GPU 3"),
        ("cuda:1", "3,5", "GPU 5"),
        ("cuda:2", "3,5", "cuda:2"),
        ("cuda:1", "3,,5", "GPU 1"),
        ("cuda:0", "", "GPU 0"),
        ("cuda:0", None, "GPU 0"),
        ("cuda:1", None, "cuda:1"),
        ("xpu:0", "3,5", "xpu:0"),
    ],
)
def test_a_card_is_named_as_it_was_given_to_the_process(
    device: str, cards: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cards is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cards)
    assert _name_of(torch.device(device)) == name


def test_figures_that_are_damaged_or_of_the_same_steps_are_no_new_ones() -> None:
    """A process is slow three looks in a row before it is named, the others then too."""
    watch = SimpleNamespace(details_of_others=("",), details=None)
    meter = RankMeter(alone(watch=watch), torch.device("cpu"), in_lockstep=False)
    assert meter.all_ranks() == []
    sentences = []
    for step in range(1, LOOKS + 3):
        ranks = ranks_of(1.0, 1.0, 1.0, 3.0, 3.0 if step > 1 else 1.0, step=step)
        told = [to_text(figures) for figures in reversed(ranks)]
        watch.details_of_others = (*told, "damaged")
        assert [figures.rank for figures in meter.all_ranks()] == [0, 1, 2, 3, 4]
        sentences.append(meter.newly_slow())
        # The same lines again, and new lines of the same steps.
        assert meter.newly_slow() == []
        watch.details_of_others = tuple(told)
        assert meter.newly_slow() == []
    begins = [[text[:10] for text in texts] for texts in sentences]
    assert begins == [[], [], ["process 3 "], ["process 4 "], []]


def test_a_process_is_named_once_after_three_looks_at_new_figures() -> None:
    """A look at figures of the same steps does not count, and a quick one begins anew."""
    watch = SimpleNamespace(details_of_others=(), details=None)
    dist: Any = SimpleNamespace(rank=0, data_rank=0, data_size=3, watch=watch)
    meter = RankMeter(dist, torch.device("cpu"), in_lockstep=False)
    assert watch.details() == ""
    for step in range(1, FEWEST_STEPS + 2):
        meter.add(step, {"forward": 1.0}, samples=3, peak=1)
    assert from_text(watch.details()) == meter.figures()

    def look(step: int, seconds: float) -> list[str]:
        others = ranks_of(1.0, 1.0, seconds, step=step)[1:]
        watch.details_of_others = tuple(map(to_text, others))
        return meter.newly_slow()

    assert meter.newly_slow() == []
    assert look(60, 2.0) == []
    assert look(60, 2.0) == []
    assert meter.newly_slow() == []
    assert look(61, 2.0) == []
    assert look(62, 1.0) == []
    assert [look(step, 2.0) for step in (63, 64)] == [[], []]
    (sentence,) = look(65, 2.0)
    assert sentence.startswith("process 2 ")
    assert [look(step, 2.0) for step in range(66, 70)] == [[]] * 4
    assert [figures.rank for figures in meter.all_ranks()] == [0, 1, 2]


def test_several_slow_ones_do_not_hide_each_other() -> None:
    assert named(ranks_of(1.0, 1.0, 1.0, 2.0, 3.0)) == [3, 4]


def test_a_difference_of_milliseconds_is_none() -> None:
    assert named(ranks_of(0.01, 0.09)) == []


def test_a_process_with_few_steps_is_not_compared() -> None:
    assert named(ranks_of(1.0, 2.0, measured=FEWEST_STEPS - 1)) == []


def test_a_process_with_more_samples_is_compared_with_those_that_have_as_many() -> None:
    ranks = ranks_of(1.0, 1.0, 2.0, 2.0)
    ranks = [*ranks[:2], *(replace(figures, samples=2) for figures in ranks[2:])]
    assert named(ranks) == []
    ranks[3] = replace(ranks[3], own_seconds=4.0)
    assert named(ranks) == [3]


def test_of_processes_in_step_only_the_reading_is_compared() -> None:
    ranks = [replace(USUAL, rank=rank, own_seconds=None) for rank in range(3)]
    assert named(ranks) == []
    ranks[1] = replace(ranks[1], data_seconds=0.5)
    assert named(ranks) == [1]
    (straggler,) = find_stragglers(ranks)
    assert "reading" in str(straggler)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "3",
        '{"rank": 1}',
        json.dumps(USUAL.to_json() | {"rank": "x"}),
    ],
)
def test_a_damaged_line_is_nothing(text: str) -> None:
    assert from_text(text) is None
    assert ranks_in({"ranks": [text]}) == []


def test_figures_come_back_from_a_line_and_a_heartbeat() -> None:
    assert from_text(to_text(USUAL)) == USUAL
    later = replace(USUAL, rank=1, own_seconds=None)
    assert ranks_in({"ranks": [later.to_json(), USUAL.to_json()]}) == [USUAL, later]
    assert ranks_in(None) == []


@pytest.fixture(scope="module")
def words(
    small_clips: Path,
    tiny_bases: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Overrides:
    cache = tmp_path_factory.mktemp("ranks") / "cache"
    return overrides_of(small_clips, tiny_bases("wan"), cache, *QUIET)


def train_in_two(words: Overrides, run: Path, *sets: str, fault: str = "") -> str:
    """Train in two processes, and return what they have printed."""
    arguments = ["train", "--out", str(run), "--data", str(words.data)]
    for text in (*words.sets, *sets):
        arguments += ["--set", text]
    ended = processes(2, run.parent / "logs", arguments, fault)
    assert ended.codes == (DONE, DONE), ended.said
    return "".join(ended.said)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["one slow in each step", "all slow in each step"])
def test_a_process_with_a_delay_in_each_step_is_named(
    fault: str,
    words: Overrides,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process 1 sleeps in its steps, and process 0 waits for it, or sleeps as long.

    In both cases the run takes long enough for the figures to come several times.
    """
    monkeypatch.setenv("VIDEOTUNE_LOST_AFTER", "10")  # the figures come each second
    run = tmp_path / "run"
    train_in_two(words, run, "steps=60", "save_every=60", fault=fault)

    about_processes = [text for text in warnings_of(run) if "process 1" in text]
    ranks = overview(run).ranks
    assert [figures.rank for figures in ranks] == [0, 1]
    assert all(figures.memory_bytes > 0 for figures in ranks)
    first, second = ranks
    if fault == "all slow in each step":
        assert about_processes == []
        assert find_stragglers(ranks) == []
        return
    (sentence,) = about_processes
    assert "slower than the others" in sentence
    assert [s.figures.rank for s in find_stragglers(ranks)] == [1]
    assert first.own_seconds is not None
    assert first.waiting_seconds is not None
    assert second.own_seconds is not None
    assert second.waiting_seconds is not None
    assert second.own_seconds > 0.4 > first.own_seconds
    assert first.waiting_seconds > 0.3 > second.waiting_seconds


def test_a_run_of_one_process_has_no_such_figures(
    words: Overrides, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(words, run) == DONE
    assert "ranks" not in (life(run) or {})
    assert overview(run).ranks == []
