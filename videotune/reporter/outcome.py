"""The state of a run, its verdict, and the recommended checkpoint with the evidence."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from videotune.reporter.charts import Line, line_chart
from videotune.reporter.curves import PARTS
from videotune.reporter.kept import kept_figures
from videotune.reporter.read import (
    FINISHED_STATES,
    Fields,
    Record,
    Run,
    at,
    items,
    mapping,
    number,
    points,
    read_run,
)
from videotune.runs.run_life import life
from videotune.sampling.picture_faults import faulty_kinds, remark_at
from videotune.text import as_argument, moment, plain
from videotune.validation.frontier import kept_by_step, weigh_kept
from videotune.validation.overfitting import (
    LAST_STEP,
    OVERFITTING,
    recommend,
)
from videotune.validation.verdict_words import shown_word

RELATIVE_ERROR = "error on the same clips, as a share of {}: below 1 is better"

PART_STROKES = (("one", "two"), ("three", "four"))
"""Strokes of the curves of held-out and training clips, of the first and second part."""

RUNNING_STATES = ("running", "paused")
"""States of a run that has a process."""

RunState = tuple[str, str, str]
"""A word for the badge, the badge's colour, and a sentence."""


def describe_state(run: Run, is_complete: bool, *, is_page: bool = True) -> RunState:
    """Return the state of the run at the time it was read.

    An end in the journal counts, unless a later process is alive. Without an end, the
    heartbeat shows whether a process is alive: a dead run must not be called running.

    Args:
        run: the run.
        is_complete: whether all of its steps are done.
        is_page: whether a page shows it, which may be read later.
    """
    end = run.last("end")
    beat = mapping(run.life)
    started = number(beat["started"])
    ended = number(end["time"])
    is_resumed = (
        beat["alive"] and started is not None and ended is not None and started > ended
    )

    if end and not is_resumed:
        return _ended_state(str(end["why"]), is_complete)
    if not beat:
        written = f" {moment(run.written)}" if run.written is not None else ""
        sentence = (
            f"the journal, last written{written}, has no end: still going, or killed"
        )
        return "no end", "care", sentence
    if beat["alive"]:
        return _alive_state(run, beat, is_page=is_page)
    return _dead_state(beat)


def _ended_state(reason: str, is_complete: bool) -> RunState:
    if reason == "early":
        return reason, "good", "ended early: clips kept aside had turned"
    return reason, "good" if is_complete else "care", f"ended: {reason}"


def _alive_state(run: Run, beat: Fields, *, is_page: bool) -> RunState:
    started = number(beat["started"])
    process = _process_words(beat)
    if started is not None:
        process += f", begun {moment(started)}"
    now = moment(run.read)
    if beat["state"] == "paused":
        since = ""
        if number(beat["since"]) is not None:
            since = f" since {moment(beat['since'])}"
        sentence = f"paused{since} because the disk is full ({process}; checked {now})"
        return "paused", "care", sentence
    written = f"running when this page was written, {now}" if is_page else "running"
    sentence = f"{written}: {beat['state']} ({process})"
    return "running", "good", sentence


def _process_words(beat: Fields) -> str:
    """Return which process trains; a page that is sent to others does not know it."""
    if beat["host"] is None:
        return "its process"
    return f"process {beat['pid']} on {beat['host']}"


def _dead_state(beat: Fields) -> RunState:
    process = _process_words(beat)
    last_beat = moment(beat["heard"])
    if beat["state"] == "ended":
        sentence = (
            f"{process} ended {last_beat} without finishing: "
            "with an error, or stopped before its first step"
        )
        return "failed", "bad", sentence
    step = plain(number(beat["step"]))
    sentence = (
        f"{process} is dead: last heartbeat {last_beat}, {beat['state']} at step {step}, "
        "and no end written; `videotune resume` goes on from what is saved"
    )
    return "dead", "bad", sentence


def status(run: Path) -> dict[str, Any]:
    """Return state, steps, verdict and recommended step of a run folder.

    The state is absent, running, paused, done, early, stopped, interrupted, failed, dead
    or no end.
    """
    has_run = any((run / name).is_file() for name in ("config.json", "journal.jsonl"))
    if not has_run:
        return _status_before_run(run)

    contents = read_run(run)
    steps = number(at(contents.config, "steps"))
    latest = contents.last("verdict")
    is_complete = steps is not None and contents.steps.last >= steps
    state, _, why = describe_state(contents, is_complete, is_page=False)
    recommended, _ = recommended_checkpoint(contents, latest)
    return {
        "run": str(run),
        "state": state,
        "why": why,
        "step": contents.steps.last,
        "steps": steps,
        "verdict": latest["verdict"],
        "shown_verdict": shown_word(latest, contents.error_reference.changed_at),
        "verdict_reason": latest["reason"] if latest["verdict"] else None,
        "verdict_parts": latest["parts"],
        "recommended": recommended,
    }


def _status_before_run(run: Path) -> dict[str, Any]:
    """Return the status of a folder in which no run has been written yet."""
    beat = mapping(life(run))
    state = "absent"
    why = f"{run} holds no run yet"
    if beat["alive"]:
        state = "running"
        why = str(beat["state"])

    return {
        "run": str(run),
        "state": state,
        "why": why,
        "step": 0,
        "steps": None,
        "verdict": None,
        "shown_verdict": "none",
        "verdict_reason": None,
        "verdict_parts": None,
        "recommended": None,
    }


def reason_without_verdict(run: Run) -> str:
    """Return why a run has no verdict."""
    latest = run.last("verdict")
    if latest["reason"]:
        return str(latest["reason"])
    return _absent_verdict(run).rstrip(".")


def _absent_verdict(run: Run) -> str:
    """Return why no verdict was ever written."""
    key = "" if run.validations else "validate_every"
    return run.absent("a verdict, which takes three validations", key)


def verdict(run: Run) -> dict[str, Any]:
    """Return the chapter of the verdict and the recommended checkpoint."""
    latest = run.last("verdict")
    step, why = recommended_checkpoint(run, latest)
    absent = ""
    if not latest:
        absent = _absent_verdict(run)

    exported_files = []
    for entry in run.exports or ():
        path = str(entry.get("path"))
        if re.search(rf"-step-{step}(?!\d)", path):
            exported_files.append(path)
    return {
        "absent": absent,
        "reference": run.error_reference,
        "recent_fall": _recent_fall(run),
        "demo": run.demo,
        "changes": [] if run.demo else _error_changes(run),
        "has_held_out": bool(run.held_out_losses),
        "measures_samples": _measures_samples(run),
        "kept": kept_figures(run),
        "remark": "" if step is None else remark_at(run.journal, step),
        "faulty_kinds": [] if step is None else faulty_kinds(run.journal, step),
        "doubt": _doubt(run),
        "is_complete": _is_complete(run),
        "is_running": bool(mapping(run.life)["alive"]),
        "is_in_studio": _is_in_studio(run),
        "latest": latest,
        "best": number(latest["best_step"]),
        "run": _shown_folder(run),
        "step": step,
        "why": why,
        "files": exported_files,
    }


def _measures_samples(run: Run) -> bool:
    """Whether the settings of a run let it compare samples with its clips."""
    return bool(number(run.setting("sample_metrics", "budget")))


def _is_complete(run: Run) -> bool:
    """Whether all steps of a run are done."""
    steps = number(at(run.config, "steps"))
    return steps is not None and run.steps.last >= steps


def _is_in_studio(run: Run) -> bool:
    """Whether a run is one of a project of the studio, where buttons do what commands do
    in a terminal.
    """
    runs = run.folder.absolute().parent
    return runs.name == "runs" and (runs.parent / "project.json").is_file()


def _shown_folder(run: Run) -> str:
    """Return a run's folder as commands name it: as it was given if that is relative, so
    that the page says nothing of the machine.
    """
    folder = run.folder
    return as_argument(folder.name if folder.is_absolute() else folder)


def _doubt(run: Run) -> str:
    """Return the note of the check that makes the verdict untrustworthy, or ""."""
    check = mapping(run.check)
    notes = items(check["notes"])
    codes = items(check["note_codes"])
    for note, code in zip(notes, codes, strict=False):
        if code == "shared_sources":
            return str(note)
    return ""


def _error_changes(run: Run) -> list[tuple[str, float, float]]:
    """Return name, latest error relative to the first validation, and its step, of the
    validated clips.
    """
    if len(run.validations) < 2:
        return []
    changes = []
    for part in run.parts:
        if not part.validations:
            continue
        for key, name, _ in PARTS:
            error = number(at(part.validations[-1], key, "normalised"))
            if error is not None:
                subject = f"the {part.name} of {name}" if part.name else name
                step = number(part.validations[-1].get("step")) or 0.0
                changes.append((subject, error, step))
    return changes


def _recent_fall(run: Run) -> dict[str, float] | None:
    """Return by what share the error on clips kept aside has fallen over the last third of
    the steps, or nearly so, and since which step; None where it was not measured twice.
    """
    curve = points(run.validations, "held_out", "normalised")
    if len(curve) < 2:
        return None
    *earlier, last = curve
    two_thirds = last[0] * 2 / 3
    since, first = min(earlier, key=lambda reading: abs(reading[0] - two_thirds))
    return {"share": 1 - last[1] / first, "since": since} if first else None


def recommended_checkpoint(run: Run, latest: Record) -> tuple[int | None, str]:
    """Return the recommended step, and why it is not the best one (empty if it is).

    At its end a run records the recommendation. Before, it is the saved step with the
    lowest validation loss, or the nearest to the best step, or the last.

    Args:
        run: the run.
        latest: its latest verdict.
    """
    recorded = mapping(run.last("end")["take"])
    best = number(latest.get("best_step"))
    turned = latest.get("turned")
    recorded_step = number(recorded["step"])
    if recorded_step is not None:
        why = ""
        expected = best if turned else number(run.last("end")["step"])
        kept = kept_by_step(run.journal).get(int(recorded_step))
        has_loss = kept is not None and kept.label is not None
        is_lowest = best is None or recorded_step == best
        is_plain = recorded_step == expected and is_lowest and not has_loss
        if recorded["why"] != LAST_STEP and not is_plain:
            why = str(recorded["why"] or "")
        return int(recorded_step), why

    saved = set()
    for record in run.of_kind("save"):
        step = number(record.get("step"))
        if step is not None:
            saved.add(int(step))
    held_out = {int(step): loss for step, loss in run.held_out_losses}
    choice = max(saved, default=None)
    why = ""
    if saved and turned and best is not None:
        choice, why = recommend(held_out, int(best), saved)
    if choice is None:
        return None, ""
    step, reason = weigh_kept(choice, held_out, kept_by_step(run.journal), saved)
    return step, reason or why


def is_result_next(state: str, latest: Record, recommended: int | None) -> bool:
    """Return whether the user goes on with the recommended checkpoint of a run that has no
    process: it has ended as it should, or more steps would make it worse.

    Args:
        state: of ``status``.
        latest: the latest verdict of the run.
        recommended: the step of the recommended checkpoint.
    """
    if state in FINISHED_STATES:
        return True
    is_stopped = state not in (*RUNNING_STATES, "failed", "absent")
    return is_stopped and latest["verdict"] == OVERFITTING and bool(recommended)


def grounds(run: Run) -> dict[str, Any]:
    """Return the evidence for the verdict: validation curve, changes, clips."""
    records = run.validations
    has_course = len(records) > 1
    best = number(run.last("verdict")["best_step"])
    lines = []
    best_points = []
    for part, strokes in zip(run.parts, PART_STROKES, strict=False):
        for (key, name, _), css in zip(PARTS, strokes, strict=True):
            curve = points(part.validations, key, "normalised")
            label = f"{part.name}, {name}" if part.name else name
            if curve:
                lines.append(Line(label, curve, css, dots=True))
            if key == "held_out":
                best_points += [point for point in curve if point[0] == best]
    chart = None
    if lines and has_course:
        chart = line_chart(
            lines,
            says=RELATIVE_ERROR.format(run.error_reference.share),
            x_label="step",
            marked_points=best_points,
        )

    changes = []
    previous_verdict = "none"
    for record in run.of_kind("verdict"):
        verdict_word = shown_word(record, run.error_reference.changed_at)
        if verdict_word != previous_verdict:
            changes.append(record)
        previous_verdict = verdict_word

    clips = []
    if has_course:
        for part in run.parts:
            for row in _clip_rows(run, part.validations):
                clips.append({**row, "part": part.name})
    return {
        "chart": chart,
        "best": best,
        "reference": run.error_reference,
        "changes": changes,
        "clips": clips,
    }


def _clip_rows(run: Run, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return error and exposure of each validated clip, the least learnt first.

    The error is a share of the clip's error at the first validation.
    """
    if not records:
        return []
    paths = {str(clip["id"])[:12]: str(clip["path"]) for clip in run.clips}
    rows = []
    for key, _, _ in reversed(PARTS):
        is_held_out = key == "held_out"
        shares = _error_shares(records, key)
        for clip, share in sorted(shares.items(), key=lambda pair: -pair[1]):
            row = {
                "path": paths.get(clip, clip),
                "seen": None if is_held_out else run.steps.clips[clip],
                "share": share,
                "held_out": is_held_out,
            }
            rows.append(row)
    return rows


def _error_shares(records: Sequence[Record], part: str) -> dict[str, float]:
    """Return each clip's latest error as a share of its first one."""
    first = mapping(at(records[0], part, "clips"))
    last = mapping(at(records[-1], part, "clips"))
    shares = {}
    for clip, value in last.items():
        first_error = number(first[clip])
        last_error = number(value)
        if first_error and last_error is not None:
            shares[clip] = last_error / first_error
    return shares
