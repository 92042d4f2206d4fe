"""How a run stands: ended, running, paused, failed or dead, by its journal and its process's heartbeat."""

from __future__ import annotations

from videotune.report.markup import moment, plain
from videotune.report.read import Record, Run, last_of_kind, mapping, number

Standing = tuple[str, str, str]
"""A word for the badge, the badge's colour, and a sentence."""


def standing(run: Run, whole: bool) -> Standing:
    """How the run stood when it was read; ``whole``: whether all of its steps are done.

    An end in the journal counts, unless a process has begun since and lives. Without one the heartbeat says whether a
    process is still there: a page must not call a dead one running.
    """
    end, pulse = last_of_kind(run, "end"), mapping(run.life)
    if end and not (pulse.get("alive") and _after(pulse.get("started"), end.get("time"))):
        why = str(end.get("why"))
        told = "ended early: held-out clips had turned" if why == "early" else f"ended: {why}"
        return why, "good" if whole or why == "early" else "care", told
    if not pulse:
        when = f" {moment(run.written)}" if run.written is not None else ""
        return "no end", "care", f"the journal, last written{when}, has no end: still going, or killed"
    return _by_heartbeat(run, pulse)


def _by_heartbeat(run: Run, pulse: Record) -> Standing:
    who, doing = f"process {pulse.get('pid')} on {pulse.get('host')}", str(pulse.get("state"))
    heard, now = moment(pulse.get("heard")), moment(run.read)
    since = "" if number(pulse.get("started")) is None else f", begun {moment(pulse['started'])}"
    if pulse.get("alive") and doing == "paused":
        waits = "" if number(pulse.get("since")) is None else f" since {moment(pulse['since'])}"
        return "paused", "care", f"paused{waits} for want of room on its disk ({who}{since}; looked at {now})"
    if pulse.get("alive"):
        return "running", "good", f"running when this page was written, {now}: {doing} ({who}{since})"
    if doing == "ended":
        told = f"{who} ended {heard} without finishing: with an error, or stopped before its first step"
        return "failed", "bad", told
    where = f"{doing}, step {plain(number(pulse.get('step')))} done"
    told = f"{who} is dead: last heard of {heard} ({where}), no end written; --resume goes on from what was saved"
    return "dead", "bad", told


def _after(one: object, other: object) -> bool:
    """Whether both are times and the first is the later one."""
    a, b = number(one), number(other)
    return a is not None and b is not None and a > b
