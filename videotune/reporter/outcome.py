"""What a reader should know first: how the run stands, how it went, the recommended checkpoint, which clips are learnt."""

import re
from pathlib import Path
from typing import Any

from videotune.files import life
from videotune.reporter.charts import Line, line_chart
from videotune.reporter.curves import PARTS
from videotune.reporter.read import Record, Run, at, mapping, number, points, read_run
from videotune.text import moment, plain
from videotune.validation.overfitting import recommend

RunState = tuple[str, str, str]
"""A word for the badge, the badge's colour, and a sentence."""


def describe_state(run: Run, whole: bool) -> RunState:
    """How the run stood when it was read; ``whole``: whether all of its steps are done.

    An end in the journal counts, unless a process has begun since and lives. Without one the heartbeat says whether a
    process is still there: a page must not call a dead one running.
    """
    end = run.last("end")
    beat = mapping(run.life)
    begun = number(beat["started"])
    ended = number(end["time"])
    doing = str(beat["state"])
    again = beat["alive"] and begun is not None and ended is not None and begun > ended
    if end and not again:
        why = str(end["why"])
        sentence = (
            "ended early: held-out clips had turned" if why == "early" else f"ended: {why}"
        )
        return why, "good" if whole or why == "early" else "care", sentence
    if not beat:
        when = f" {moment(run.written)}" if run.written is not None else ""
        return (
            "no end",
            "care",
            f"the journal, last written{when}, has no end: still going, or killed",
        )
    who = f"process {beat['pid']} on {beat['host']}"
    heard = moment(beat["heard"])
    now = moment(run.read)
    since = "" if begun is None else f", begun {moment(begun)}"
    if beat["alive"] and doing == "paused":
        waits = "" if number(beat["since"]) is None else f" since {moment(beat['since'])}"
        return (
            "paused",
            "care",
            f"paused{waits} for want of room on its disk ({who}{since}; looked at {now})",
        )
    if beat["alive"]:
        return (
            "running",
            "good",
            f"running when this page was written, {now}: {doing} ({who}{since})",
        )
    if doing == "ended":
        sentence = f"{who} ended {heard} without finishing: with an error, or stopped before its first step"
        return "failed", "bad", sentence
    sentence = f"last heard of {heard} ({doing}, step {plain(number(beat['step']))} done), no end written"
    return "dead", "bad", f"{who} is dead: {sentence}; --resume goes on from what was saved"


def status(run: Path) -> dict[str, Any]:
    """How a run stands: absent, running, paused, done, early, stopped, failed, dead, or no end; steps, verdict."""
    if not any((run / name).is_file() for name in ("config.json", "journal.jsonl")):
        beat = mapping(life(run))
        state, why = (
            ("running", str(beat["state"]))
            if beat["alive"]
            else ("absent", f"{run} holds no run yet")
        )
        facts: dict[str, Any] = {"run": str(run), "state": state, "why": why, "step": 0}
        return facts | dict.fromkeys(("steps", "verdict", "recommended"))
    found = read_run(run)
    steps = number(at(found.config, "steps"))
    latest = found.last("verdict")
    state, _, why = describe_state(found, steps is not None and found.steps.last >= steps)
    best = recommended_checkpoint(found, latest)[0]
    facts = {
        "run": str(run),
        "state": state,
        "why": why,
        "step": found.steps.last,
        "steps": steps,
    }
    return facts | {"verdict": latest["verdict"], "recommended": best}


def verdict(run: Run) -> dict[str, Any]:
    """The verdict, the recommended checkpoint, and what the verdict rests on."""
    latest = run.last("verdict")
    step, why = recommended_checkpoint(run, latest)
    paths = [str(entry.get("path")) for entry in run.exports or ()]
    missing = run.absent(
        "a verdict, which takes three validations", "" if run.validations else "validate_every"
    )
    return {
        "absent": "" if latest else missing,
        "latest": latest,
        "best": number(latest["best_step"]),
        "run": run.folder.name,
        "step": step,
        "why": why,
        "file": next((path for path in paths if re.search(rf"-step-{step}(?!\d)", path)), None),
        "grounds": grounds(run),
    }


def recommended_checkpoint(run: Run, latest: Record) -> tuple[int | None, str]:
    """The step of the recommended checkpoint, and why it is that one.

    What the run recorded at its end; of one that goes on, of what is saved the one with the lowest validation loss, or the
    nearest to the best step, or the last.
    """
    taken = mapping(run.last("end")["take"])
    best = number(latest.get("best_step"))
    turned = latest.get("turned")
    if (step := number(taken["step"])) is not None:
        return int(step), str(taken["why"]) if taken["why"] and turned and step != best else ""
    saved = {
        int(step)
        for record in run.of_kind("save")
        if (step := number(record.get("step"))) is not None
    }
    if not saved or not turned or best is None:
        return max(saved, default=None), ""
    held_out = {
        int(step): loss for step, loss in points(run.validations, "held_out", "normalised")
    }
    return recommend(held_out, int(best), saved)


def grounds(run: Run) -> dict[str, Any]:
    """What the verdict rests on: the curve of validation losses, when it changed, and the clips one by one."""
    records = run.validations
    best = number(run.last("verdict")["best_step"])
    curves = [
        Line(name, points(records, key, "normalised"), css, dots=True)
        for key, name, css in PARTS
    ]
    lines = [line for line in curves if line.points]
    says = "error on the same clips, relative to the base model: below 1 is better"
    chart = line_chart(lines, says=says, x_label="step", marks=[] if best is None else [best])
    verdicts = run.of_kind("verdict")
    words = [None, *(record.get("verdict") for record in verdicts)]
    changes = [
        record
        for record, before in zip(verdicts, words, strict=False)
        if record.get("verdict") != before
    ]
    clips = _learnt_clips(run, records) if len(records) > 1 else []
    return {
        "chart": chart if lines and len(records) > 1 else None,
        "best": best,
        "changes": changes,
        "clips": clips,
    }


def _learnt_clips(run: Run, records: list[Record]) -> list[dict[str, Any]]:
    """Each clip that validation measures, the least learnt first: its error as a share of its first, and times seen."""
    paths = {str(clip["id"])[:12]: str(clip["path"]) for clip in run.clips}
    rows = []
    for key, _, _ in reversed(PARTS):
        first, last = (mapping(at(records[place], key, "clips")) for place in (0, -1))
        pairs = ((clip, number(first[clip]), number(value)) for clip, value in last.items())
        shares = {clip: now / then for clip, then, now in pairs if then and now is not None}
        for clip, share in sorted(shares.items(), key=lambda pair: -pair[1]):
            seen = None if key == "held_out" else run.steps.clips[clip]
            rows.append(
                {
                    "path": paths.get(clip, clip),
                    "seen": seen,
                    "share": share,
                    "held_out": key == "held_out",
                }
            )
    return rows
