"""The report tells a stranger when to have stopped, which file to take, and which clips are learnt."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from report_kit import CLIPS, account, config, put, reading, start, step, write_journal

from videotune.report.html import write_report
from videotune.validation.overfitting import judge


def report(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def words(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def ruled(number: int, held: tuple[float, float] | float, train: float) -> dict[str, Any]:
    """A reading in which the first clip is learnt as the mean is and the second not at all; of two held-out clips."""
    one, other = held if isinstance(held, tuple) else (held, held)
    line = reading(number, (one + other) / 2, train) | {"ruler": "aaaaaaaa"}
    first, second, *_ = CLIPS
    line["held_out"] |= {"normalised": (one + other) / 2, "clips": {"c" * 12: one, "d" * 12: other}}
    line["train"] |= {"normalised": train, "clips": {first[:12]: train, second[:12]: 1.0}}
    return line


def judged(readings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Readings with the verdict after each, as a run writes them."""
    lines: list[dict[str, Any]] = []
    for record in readings:
        lines.append(record)
        found = judge(lines)
        assert found is not None
        lines.append({"kind": "verdict", "time": 1.0, **found.to_json()})
    return lines


COURSE = ((0, 1.0, 1.0), (10, (0.4, 0.8), 0.6), (20, 0.5, 0.45), (30, 0.52, 0.35), (40, 0.54, 0.3))
"""Best at step 20, from which step 10 cannot be told: one of the clips was better there."""


def overfitted(folder: Path) -> Path:
    readings = [ruled(*each) for each in COURSE]
    for line in readings[-2:]:
        line["held_out"]["by_quantile"][1] *= 1.2  # the second noise level turned most
    lines = [start(), *(step(n) for n in range(1, 41)), *judged(readings)]
    take = {"step": 20, "why": "held-out clips were best there"}
    write_journal(folder, [*lines, {"kind": "end", "step": 40, "why": "early", "take": take}])
    put(folder, "check.json", account())
    put(folder, "config.json", config())
    return folder


def test_a_stranger_is_told_when_to_have_stopped_and_which_file_to_take(tmp_path: Path) -> None:
    said = words(report(overfitted(tmp_path)))
    assert "OVERFITTING It should have stopped at step 20 (steps 10 to 20 cannot be told apart)." in said
    assert "noise level 2 of 9, where the model decides fine detail" in said
    assert (
        f"Take the state after step 20, which is not exported yet: videotune export {tmp_path.name} --step 20" in said
    )
    assert "ended early: held-out clips had turned" in said
    assert "More steps on these clips make it worse." in said


def test_steps_in_commands_are_plain_numbers(tmp_path: Path) -> None:
    """1000 and not 1,000, which no command takes."""
    course = [(0, 1.0, 1.0), (1000, 0.5, 0.5), (2000, 0.6, 0.4), (3000, 0.7, 0.3)]
    take = {"step": 1000, "why": "held-out clips were best there"}
    lines = [start(), *(step(n) for n in (1000, 2000, 3000)), *judged([ruled(*each) for each in course])]
    lines += [{"kind": "end", "step": 3000, "why": "done", "take": take}]
    write_journal(tmp_path, lines)
    said = words(report(tmp_path))
    assert f"videotune export {tmp_path.name} --step 1000" in said
    assert f"videotune train --out {tmp_path.name} --resume --from 1000" in said


def saved(number: int) -> dict[str, Any]:
    return {"kind": "save", "time": 1.0, "step": number, "path": f"checkpoints/step-{number}", "seconds": 0.1}


def test_a_run_that_goes_on_names_what_is_saved(tmp_path: Path) -> None:
    base = [start(), *(step(n) for n in range(1, 41)), *judged([ruled(*each) for each in COURSE])]
    for there, sentence in (
        ((), "Nothing is saved yet."),
        ((10, 30), "Take the state after step 30"),
        ((10, 20, 30), "Take the state after step 20"),
        ((5, 17, 29), "Take the state after step 17"),
    ):
        write_journal(tmp_path, [*base, *map(saved, there)])
        said = words(report(tmp_path))
        assert sentence in said
        assert ("there is no checkpoint of step 20" in said) == (there == (10, 30))
        assert ("It is the nearest to step 20, where held-out clips were best" in said) == (17 in there)
        assert ("--resume --from" in said) == bool(there)
        assert "OVERFITTING It should have stopped at step 20" in said


def test_where_the_base_was_best_it_is_said(tmp_path: Path) -> None:
    course = [(0, 1.0, 1.0), (10, 1.1, 0.9), (20, 1.2, 0.8)]
    take = {"step": 10, "why": "the best of the checkpoints that were kept"}
    lines = [start(), step(1), *judged([ruled(*each) for each in course])]
    write_journal(tmp_path, [*lines, {"kind": "end", "step": 20, "why": "done", "take": take}])
    said = words(report(tmp_path))
    assert "OVERFITTING No state was better than the base model itself." in said
    assert "no state of this run is better than the base model. The best of those saved:" in said
    assert "--step 10" in said
    assert "a lower learning_rate" in said
    assert "should have stopped at step 0" not in said


def test_the_file_is_named_where_it_was_exported(tmp_path: Path) -> None:
    put(overfitted(tmp_path), "exports.json", [{"path": f"export/run-step-{n}.safetensors"} for n in (200, 20)])
    assert "Take export/run-step-20.safetensors (the state after step 20)." in words(report(tmp_path))


def test_each_change_stands_there_with_its_step_and_reason(tmp_path: Path) -> None:
    said = words(report(overfitted(tmp_path)))
    changes = said[said.index("When it changed") : said.index("Which clips are learnt")]
    rows = re.findall(r"\d+ (?:no verdict|LEARNING|PLATEAU|OVERFITTING) [A-Z]", changes)
    assert rows == ["20 LEARNING S", "30 PLATEAU S", "40 OVERFITTING H"], (
        "a row where the word changes, of five readings"
    )


def test_clips_are_called_learnt_or_not(tmp_path: Path) -> None:
    said = words(report(overfitted(tmp_path)))
    assert "training" in said
    assert "30% learnt" in said
    assert "100% not learnt" in said
    assert "54% better than the base" in said, "a held-out clip"


def test_a_run_that_learns_or_rests_is_told_so(tmp_path: Path) -> None:
    """Held-out and training clips take the same course; saved are steps 10 and 30."""
    for values, sentence, take in (
        ((1.0, 0.9, 0.8, 0.7), "LEARNING It was still learning at step 30. Since step 10", 30),
        ((1.0, 0.5, 0.5, 0.5), "PLATEAU It has come to rest.", 30),
        ((1.0, 0.5, 0.9, 1.5), "PLATEAU It has got worse since step 10.", 10),
        ((1.0, 1.1, 1.3, 1.5), "PLATEAU It is worse than the base model itself.", 10),
        (
            (1.0, 0.5, 0.9, 0.8, 0.7),
            "LEARNING It was still learning at step 40, but held-out clips were better at step 10.",
            10,
        ),
    ):
        course = [ruled(10 * i, value, value) for i, value in enumerate(values)]
        write_journal(tmp_path, [start(), step(1), *judged(course), saved(10), saved(30)])
        said = words(report(tmp_path))
        assert sentence in said
        assert "should have stopped" not in said
        assert ("A lower learning_rate, or fewer steps" in said) == ("got worse" in sentence)
        assert ("no state of this run is better than the base model" in said) == ("than the base" in sentence)
        assert f"Take the state after step {take}" in said, sentence


def test_a_run_without_held_out_clips_is_told_so_at_once(tmp_path: Path) -> None:
    write_journal(tmp_path, [start(), step(1), *judged([reading(0, None, 1.0)])])
    assert "no verdict No validation possible: no clip is held out" in words(report(tmp_path))


def test_without_readings_it_says_what_a_verdict_takes(tmp_path: Path) -> None:
    write_journal(tmp_path, [start(), step(1)])
    assert "Not there yet: a verdict, which takes three readings of the ruler." in words(report(tmp_path))
