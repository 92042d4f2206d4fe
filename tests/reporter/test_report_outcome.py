"""How a run stands and how it went: a dead process is never called running; when to
have stopped, which file to use.
"""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import reports
from videotune.reporter.build import summary, warnings
from videotune.reporter.outcome import status
from videotune.reporter.progress import without_pauses
from videotune.reporter.read import read_run
from videotune.runs.run_life import LATE, life
from videotune.text import moment
from videotune.validation.overfitting import judge
from videotune.validation.verdict_words import shown_word

BEGUN, NOW = 1790000000.0, 1790000600.0
HERE = socket.gethostname()


NOBODY = -1
"""Stands for the number of a process that has ended."""

LIVING = f"process {os.getpid()} on {HERE}"
HERE_AND = f"7 of 120 steps, running when this page was written, {moment(NOW)}"
BEGUN_THEN, AGAIN = (
    f"begun {moment(BEGUN)}).",
    {"started": NOW - 20, "state": "starting"},
)
BEATS = [
    (False, 3, {}, "running", f"{HERE_AND}: training ({LIVING}, {BEGUN_THEN}"),
    (
        False,
        3,
        {"pid": NOBODY},
        "dead",
        f"is dead: last heartbeat {moment(NOW - 3)}, training at step 7",
    ),
    (False, LATE - 1, {"host": "elsewhere", "pid": 1}, "running", "running"),
    (False, LATE + 1, {"host": "elsewhere", "pid": 1}, "dead", "is dead"),
    (
        False,
        3,
        {"state": "paused", "since": NOW - 9},
        "paused",
        f"since {moment(NOW - 9)} because the disk is full",
    ),
    (
        False,
        3,
        {"state": "ended"},
        "failed",
        f"ended {moment(NOW - 3)} without finishing",
    ),
    # while a process that goes on loads the model the journal still has the old end;
    # one that died there changed nothing
    (
        True,
        1,
        {},
        "interrupted",
        "run on a base that is not named: 7 of 120 steps, ended: interrupted.",
    ),
    (True, 1, AGAIN, "running", "starting"),
    (True, 1, AGAIN | {"pid": NOBODY}, "interrupted", "ended: interrupted."),
]
"""Whether the journal has an end; the heartbeat's age and what it says; the badge, and
what the sentence holds.
"""


def heartbeat(folder: Path, heard: float, **changed: Any) -> None:
    here = {
        "pid": os.getpid(),
        "host": HERE,
        "started": BEGUN,
        "step": 7,
        "state": "training",
    }
    reports.write_file(
        folder, "heartbeat.json", here | {"since": BEGUN + 60, "time": heard} | changed
    )
    os.utime(folder / "heartbeat.json", (heard, heard))


def a_run(folder: Path, *more: dict[str, Any], **facts: Any) -> Path:
    reports.write_journal(
        folder, [reports.start(**facts), *map(reports.step, range(1, 8)), *more]
    )
    return folder


def state_of(folder: Path) -> tuple[str, str]:
    """The badge and the sentence."""
    word, _, sentence = summary(read_run(folder))["state"]
    return word, sentence


@pytest.mark.parametrize(("ended", "age", "changed", "badge", "words"), BEATS)
def test_a_process_that_is_gone_is_dead_and_not_running(
    ended: bool,
    age: float,
    changed: dict[str, Any],
    badge: str,
    words: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    if changed.get("pid") == NOBODY:
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        changed = changed | {"pid": process.pid}
    monkeypatch.setattr(time, "time", lambda: NOW)
    end = {"kind": "end", "time": NOW - 100, "step": 7, "why": "interrupted"}
    heartbeat(a_run(tmp_path, *[end] * ended), NOW - age, **changed)
    assert state_of(tmp_path)[0] == badge
    assert words in state_of(tmp_path)[1]
    assert (badge == "running") == ("running" in state_of(tmp_path)[1])


def test_a_number_that_another_process_has_by_now_is_no_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the machine was started anew: a process of that number is there, and its
    heartbeat is hours old.
    """
    heartbeat(a_run(tmp_path), time.time(), pid=10**30)
    assert life(tmp_path) is None, "no process can have such a number"
    monkeypatch.setattr(time, "time", lambda: NOW)
    heartbeat(tmp_path, NOW - 10 * LATE)
    assert state_of(tmp_path)[0] == "dead"


BEAT = '{"pid": 1, "host": "x", "started": 1.0, "state": "training", "since": 1.0, "time": 2.0}'
DAMAGED = [
    "",
    "{",
    "[]",
    "{}",
    '{"pid": 1e400, "host": 3}',
    '{"time": "x", "state": 1}',
]
WRONG = (("2.0", "1e308"), ("2.0", "-1"), ("1.0", "1" * 400), ("1.0", "[]"))
DAMAGED += [BEAT.replace(one, other) for one, other in WRONG]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_heartbeat_that_says_nothing_is_none(content: str, tmp_path: Path) -> None:
    (a_run(tmp_path) / "heartbeat.json").write_text(content)
    badge, sentence = state_of(tmp_path)
    assert badge == "no end"
    assert "has no end: still going, or killed" in sentence


def test_steps_are_counted_against_those_that_the_run_has_now(tmp_path: Path) -> None:
    """A resume with more steps leaves the journal's start as it was."""
    a_run(tmp_path, {"kind": "end", "step": 7, "why": "done"}, steps=4)
    reports.write_file(tmp_path, "config.json", reports.config() | {"steps": 7})
    assert state_of(tmp_path) == (
        "done",
        "LORA on the toy base model: 7 of 7 steps, ended: done.",
    )


def ruled(
    number: int, held: tuple[float, float] | float, train: float
) -> dict[str, Any]:
    """A validation in which the first clip is learnt as the mean is and the second not
    at all; of two held-out clips.
    """
    one, other = held if isinstance(held, tuple) else (held, held)
    line = reports.reading(number, (one + other) / 2, train) | {
        "validation": "aaaaaaaa"
    }
    first, second, *_ = reports.CLIPS
    line["held_out"] |= {
        "normalised": (one + other) / 2,
        "clips": {"c" * 12: one, "d" * 12: other},
    }
    line["train"] |= {
        "normalised": train,
        "clips": {first[:12]: train, second[:12]: 1.0},
    }
    return line


def judged(*course: tuple[int, Any, float]) -> list[dict[str, Any]]:
    """Validations with the verdict after each, as a run writes them; of COURSE the
    second noise level turns most.
    """
    records = [ruled(*each) for each in course]
    for line in records[-2:] if course == COURSE else ():
        line["held_out"]["by_quantile"][1] *= 1.2
    lines: list[dict[str, Any]] = []
    for record in records:
        found = judge([*lines, record])
        lines += [record, {"kind": "verdict", "time": 1.0, **found.to_json()}]
    return lines


COURSE = (
    (0, 1.0, 1.0),
    (10, (0.4, 0.8), 0.6),
    (20, 0.5, 0.45),
    (30, 0.52, 0.35),
    (40, 0.54, 0.3),
)
"""Best at step 20, from which step 10 cannot be told: one of the clips was better
there.
"""


def ended(folder: Path, course: tuple[Any, ...], take: int, why: str = "done") -> Path:
    lines = [
        reports.start(),
        *(reports.step(number) for number, *_ in course if number),
        *judged(*course),
    ]
    recommended = {"step": take, "why": "clips kept aside were best there"}
    end = {"kind": "end", "step": course[-1][0], "why": why, "take": recommended}
    reports.write_journal(folder, [*lines, end])
    for name, value in (("check", reports.account()), ("config", reports.config())):
        reports.write_file(folder, f"{name}.json", value)
    return folder


def test_the_verdict_says_when_to_have_stopped_and_which_file_to_use(
    tmp_path: Path,
) -> None:
    said = reports.visible_text(reports.report(ended(tmp_path, COURSE, 20, "early")))
    for sentence in (
        "OVERFITTING It should have stopped at step 20 (steps 10 to 20 cannot be told apart).",
        f"Recommended checkpoint: step 20, which is not exported yet: videotune export {tmp_path.name} --step 20",
        "ended early: clips kept aside had turned",
        "More steps on these clips make it worse.",
    ):
        assert sentence in said
    changes = reports.chapters(tmp_path)["validation"]["grounds"]["changes"]
    rows = [(one["step"], shown_word(one)) for one in changes]
    assert rows == [
        (20, "cannot be told"),
        (30, "GETTING WORSE"),
        (40, "OVERFITTING"),
    ], "where the word changes"
    reports.write_file(
        tmp_path,
        "exports.json",
        [{"path": f"export/run-step-{n}.safetensors"} for n in (200, 20)],
    )
    assert (
        "step 20, exported as export/run-step-20.safetensors"
        in reports.visible_text(reports.report(tmp_path))
    )


def saved(number: int) -> dict[str, Any]:
    return {
        "kind": "save",
        "time": 1.0,
        "step": number,
        "path": f"checkpoints/step-{number}",
        "seconds": 0.1,
    }


@pytest.mark.parametrize(
    ("there", "step_", "why"),
    [
        ((), None, ""),
        ((10, 30), 30, "there is no checkpoint of step 20"),
        ((10, 20, 30), 20, ""),
        ((5, 17, 29), 17, "the nearest to step 20, where clips kept aside were best"),
    ],
)
def test_a_run_that_goes_on_recommends_what_is_saved(
    tmp_path: Path, there: tuple[int, ...], step_: int | None, why: str
) -> None:
    reports.write_journal(
        tmp_path,
        [
            reports.start(),
            *map(reports.step, range(1, 41)),
            *judged(*COURSE),
            *map(saved, there),
        ],
    )
    found = reports.chapters(tmp_path)["verdict"]
    assert found["step"] == step_
    assert why in found["why"]
    assert bool(why) == bool(found["why"])
    said = reports.visible_text(reports.report(tmp_path))
    assert (f"videotune resume {tmp_path.name} --from" in said) == bool(there)
    assert ("Nothing is saved yet." in said) == (not there)
    assert "OVERFITTING It should have stopped at step 20" in said


ERROR = "the error on clips that it was not shown is"


def test_the_error_of_each_clip_leaves_the_judgement_to_the_verdict(
    tmp_path: Path,
) -> None:
    said = reports.part(reports.report(ended(tmp_path, COURSE, 20)), "validation")
    order = (
        r"training \d+ 100% as before training .* "
        r"training \d+ 30% lower .* kept aside – 54% lower"
    )
    assert re.search(order, said), "the highest first, training clips before others"
    assert "below 90% lower" in said, "what the words stand for"
    assert "learnt" not in said.partition("Error of each clip")[2]


BY_CHANCE = (
    (0, 1.0, 1.0),
    (100, (0.72, 0.466), 0.232),
    (120, (0.722, 0.467), 0.227),
)
"""Two held-out clips fell, but by such different amounts that chance explains it."""


def test_what_chance_explains_is_not_called_learnt(tmp_path: Path) -> None:
    said = reports.part(reports.report(ended(tmp_path, BY_CHANCE, 120)), "verdict")
    assert "cannot be told It is not shown that it has learnt" in said
    assert f"{ERROR} 59% of the base model's at step 100" in said
    assert "It has learnt what these clips teach" not in said
    assert "Keep more clips aside for checking" in said
    assert "More steps will change little" not in said


UNDECIDED = (
    (0, 1.0, 1.0),
    (20, (0.7, 0.53), 0.6),
    (40, (0.6, 0.5), 0.5),
    (60, (0.435, 0.43), 0.4),
)
"""The latest reading is the lowest, but two clips are too few to tell it from chance."""


def test_a_verdict_has_changed_where_its_word_has(tmp_path: Path) -> None:
    """From "cannot be told" to PLATEAU, which the journal keeps as one verdict."""
    course = (*UNDECIDED, (80, (0.5, 0.47), 0.4), (100, (0.5, 0.47), 0.4))
    ended(tmp_path, course, 60)
    changes = reports.chapters(tmp_path)["validation"]["grounds"]["changes"]
    words = [shown_word(change) for change in changes]
    assert words[-2:] == ["cannot be told", "PLATEAU"]
    assert [change["verdict"] for change in changes[-2:]] == ["PLATEAU", "PLATEAU"]


def test_a_fall_that_may_be_chance_is_no_end_of_learning(tmp_path: Path) -> None:
    """The page and the reason, which the terminal prints, say the same."""
    said = reports.part(reports.report(ended(tmp_path, UNDECIDED, 60)), "verdict")
    assert "PLATEAU" not in said, "a badge that contradicts its sentence"
    assert "cannot be told It has learnt: the error on clips that it was not" in said
    assert "Whether it still falls cannot be told" in said
    assert "falls no further" not in said
    assert "More steps will change little" not in said
    assert status(tmp_path)["shown_verdict"] == "cannot be told", "as at the terminal"
    assert status(tmp_path)["verdict"] == "PLATEAU", "the code in --json"
    assert "Keep more clips aside for checking" in said


def test_errors_of_other_clips_are_not_called_shares_of_the_base_model(
    tmp_path: Path,
) -> None:
    """The clips kept aside changed at step 60, where the first reading of them is 1."""
    course = tuple((step + 60, held_out, train) for step, held_out, train in LEARNT)
    page = reports.report(ended(tmp_path, course, 90))
    said = reports.visible_text(page)
    assert "The clips kept aside changed at step 60" in said
    assert "70% of that at step 60 at step 90" in said
    assert "70% of the error on clips kept aside at step 60, at step 90" in said
    assert "of the base model's error" not in said
    assert "a share of the base model's" not in said


def test_what_is_not_shown_since_the_clips_changed_is_not_called_learnt(
    tmp_path: Path,
) -> None:
    """The first reading of the clips of now is as good as the best, by chance."""
    course = tuple((step + 60, held_out, train) for step, held_out, train in BY_CHANCE)
    said = reports.part(reports.report(ended(tmp_path, course, 180)), "verdict")
    assert "cannot be told It is not shown that it has learnt" in said
    assert "It has learnt:" not in said


LEARNT = ((0, 1.0, 1.0), (10, 0.9, 0.9), (20, 0.8, 0.8), (30, 0.7, 0.7))


@pytest.mark.parametrize(
    ("held_out", "advice"),
    [
        ((1.0, 0.9, 0.8, 0.7), "More steps would probably help"),
        ((1.0, 0.35, 0.348, 0.344), "It falls slowly, by 1% since step 20"),
        ((1.0, 0.35, 0.349, 0.348), "It falls slowly, by less than 1% since step 20"),
        # The fall from the base model says nothing of the steps to come.
        ((1.0, 0.364, 0.3576), "It falls slowly, by 2% since step 10"),
        ((1.0, 0.8, 0.6, 0.5, 0.505), "It has not fallen since step 30"),
    ],
)
def test_more_steps_are_advised_where_the_error_still_falls_by_much(
    tmp_path: Path, held_out: tuple[float, ...], advice: str
) -> None:
    course = tuple((10 * i, error, error) for i, error in enumerate(held_out))
    lines = [reports.start(), *map(reports.step, range(1, 31)), *judged(*course)]
    reports.write_journal(
        tmp_path, [*lines, {"kind": "end", "step": 30, "why": "done"}]
    )
    reports.write_file(tmp_path, "config.json", reports.config() | {"steps": 30})
    said = reports.part(reports.report(tmp_path), "verdict")
    assert "LEARNING" in said
    assert advice in said
    assert ("would change little" in said) is ("since step" in advice)


def test_the_fall_from_the_base_model_is_no_sign_that_it_still_learns() -> None:
    """Two clips, whose error hardly changed after the first hundred steps."""
    flat = ((0, 1.0, 1.0), (100, (0.3615, 0.3664), 0.36), (177, (0.3532, 0.362), 0.35))
    verdict = judge(judged(*flat))
    assert verdict is not None
    assert verdict.label == "PLATEAU"
    falling = ((0, 1.0, 1.0), (100, (0.7, 0.71), 0.7), (200, (0.4, 0.41), 0.4))
    verdict = judge(judged(*falling))
    assert verdict is not None
    assert verdict.label == "LEARNING"


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        ([0.2] * 30, 30),
        ([0.2] * 29 + [40.2], 29),
        ([0.2] * 28 + [40.2, 20.2], 28),
        # Every other step is of a video, and takes longer.
        ([0.2, 9.0] * 15, 30),
        ([0.2], 1),
        ([], 0),
        ([1.0, 2.9, 8.0], 3),
    ],
)
def test_a_pause_does_not_count_as_the_time_of_a_step(
    seconds: list[float], kept: int
) -> None:
    assert sorted(seconds)[:kept] == without_pauses(seconds)


def test_a_figure_of_the_held_out_clips_is_the_same_on_the_whole_page(
    tmp_path: Path,
) -> None:
    """The clip with the large error fell less: the mean of the errors would fall less
    than the mean of the clips' own changes.
    """
    ended(tmp_path, BY_CHANCE, 120)
    page = reports.report(tmp_path)
    outcome = reports.part(page, "verdict")
    assert "of the base model's error on clips kept aside, at step 120" in outcome
    (found,) = reports.chapters(tmp_path)["validation"]["parts"]
    assert found["rows"][0] == [
        "clips kept aside",
        "100.0%",
        "59.5%",
        "59.3% at step 100",
    ]
    assert re.search(r"59% of the base model's error on clips kept aside", outcome)


@pytest.mark.parametrize(
    ("values", "sentence", "take"),
    [
        (
            (1.0, 0.9, 0.8, 0.7),
            f"LEARNING It was still learning at step 30: {ERROR} 70% of the base model's at step 30, its lowest.",
            30,
        ),
        (
            (1.0, 0.8, 0.6, 0.5, 0.505),
            "LEARNING It was still learning at step 40; the error on clips that it was not shown "
            "was lowest at step 30, 50% of the base model's, and the later steps are as good",
            30,
        ),
        (
            (1.0, 0.5, 0.5, 0.5),
            f"PLATEAU It has learnt what these clips teach: {ERROR} 50% of the base model's at step 10, and falls no further.",
            30,
        ),
        (
            (1.0, 1.0, 1.0, 1.0),
            "PLATEAU It has learnt nothing that helps on clips that it was not shown.",
            30,
        ),
        ((1.0, 0.5, 0.9, 1.5), "GETTING WORSE It has got worse since step 10.", 10),
        (
            (1.0, 1.1, 1.3, 1.5),
            "GETTING WORSE It is worse than the base model itself.",
            10,
        ),
        (
            (1.0, 0.5, 0.9, 0.8, 0.7),
            "It was still learning at step 40, but clips kept aside were better at step 10",
            10,
        ),
    ],
)
def test_a_run_that_learns_or_rests_is_reported_so(
    tmp_path: Path, values: tuple[float, ...], sentence: str, take: int
) -> None:
    """Held-out and training clips take the same course; saved are steps 10 and 30."""
    course = judged(*((10 * i, value, value) for i, value in enumerate(values)))
    reports.write_journal(
        tmp_path, [reports.start(), reports.step(1), *course, saved(10), saved(30)]
    )
    said = reports.visible_text(reports.report(tmp_path))
    assert sentence in said
    assert "should have stopped" not in said
    assert ("A lower learning_rate, or fewer steps" in said) == (
        "got worse" in sentence
    )
    assert ("no state of this run is better than the base model" in said) == (
        "than the base" in sentence
    )
    assert f"Recommended checkpoint: step {take}," in said


@pytest.mark.parametrize("code", ["shared_sources", "cropped"])
def test_a_verdict_on_clips_of_the_same_videos_is_doubted_beside_it(
    tmp_path: Path, code: str
) -> None:
    ended(tmp_path, COURSE, 20)
    note = "validation and training share 1 source video (held/kitten)"
    reports.write_file(tmp_path, "check.json", {"notes": [note], "note_codes": [code]})
    said = reports.part(reports.report(tmp_path), "verdict")
    assert ("not to be trusted" in said) == (code == "shared_sources")


@pytest.mark.parametrize(
    ("steps", "wanted"), [(40, "--set steps=… --override"), (80, "not done all")]
)
def test_a_run_that_learns_says_how_to_train_on(
    tmp_path: Path, steps: int, wanted: str
) -> None:
    course = tuple((10 * n, 1.0 - 0.1 * n, 1.0 - 0.1 * n) for n in range(5))
    ended(tmp_path, course, 40)
    settings = reports.config()
    settings["steps"] = steps
    reports.write_file(tmp_path, "config.json", settings)
    chapter = reports.chapters(tmp_path)["verdict"]
    assert chapter["is_complete"] == (steps == 40)
    said = reports.part(reports.report(tmp_path), "verdict")
    assert "LEARNING" in said
    assert wanted in said


@pytest.mark.parametrize(
    ("settings", "reason", "others"),
    [
        ({"forgetting": {"budget": 0.01}}, "too short", ("given",)),
        (
            {"forgetting": {"budget": 0.01}, "generate": ["video"]},
            "given the sound",
            ("too short",),
        ),
        (
            {"forgetting": {"budget": 0.01}, "generate": ["sound"]},
            "given the video",
            ("too short",),
        ),
        (
            {"forgetting": {"budget": 0.01}, "generate": ["video", "sound"]},
            "A higher forgetting.budget",
            ("given",),
        ),
    ],
)
def test_the_one_reason_is_named_for_which_the_base_model_was_not_measured(
    settings: dict[str, Any], reason: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    folder = ended(tmp_path, COURSE, 20)
    config = reports.config()
    config["settings"] |= settings
    reports.write_file(folder, "config.json", config)
    reports.write_file(folder, "plan.json", {**reports.plan(), "beside": {}})
    said = reports.part(reports.report(folder), "forgetting")
    assert reason in said
    assert not [other for other in others if other in said]


def test_a_budget_of_nothing_has_no_chapter_with_another_reason(tmp_path: Path) -> None:
    folder = ended(tmp_path, COURSE, 20)
    config = reports.config()
    config["settings"] |= {"forgetting": {"budget": 0}}
    reports.write_file(folder, "config.json", config)
    reports.write_file(folder, "plan.json", {**reports.plan(), "beside": {}})
    page = reports.report(folder)
    assert "Not measured" not in page
    assert "forgetting" not in reports.attributes(page, "id", "section")


@pytest.mark.parametrize("count", [1, 3])
def test_clips_with_warnings_are_not_said_to_have_that_of_the_first(
    tmp_path: Path, count: int
) -> None:
    account = reports.account()
    names = []
    for clip in account["clips"]:
        clip["warnings"] = []
    for clip in account["clips"][:count]:
        clip["warnings"] = ["looks nearly the same as b.mp4"]
        names.append(Path(clip["path"]).name)
    reports.write_journal(tmp_path, [reports.start()])
    reports.write_file(tmp_path, "check.json", account)
    (line,) = warnings(read_run(tmp_path))["lines"]
    own = f"{names[0]}: looks nearly the same as b.mp4"
    expected = (
        own if count == 1 else f"3 clips have warnings of their own. That of {own}"
    )
    assert line == expected


def test_a_finished_run_does_not_promise_a_measurement(tmp_path: Path) -> None:
    """It has no clips kept aside, and its budget allowed no sample metrics."""
    lines = [reports.start(), reports.step(1)]
    reports.write_journal(tmp_path, [*lines, {"kind": "end", "step": 1, "why": "done"}])
    config = reports.config()
    config["steps"] = 1
    config["settings"] |= {"sample_metrics": {"budget": 60}}
    reports.write_file(tmp_path, "config.json", config)
    reports.write_file(tmp_path, "check.json", reports.account())
    said = reports.part(reports.report(tmp_path), "verdict")
    assert "none is measured yet" not in said
