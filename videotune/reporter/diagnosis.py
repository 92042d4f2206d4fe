"""``doctor RUN``: which lines of docs/troubleshooting.md apply to a run, from its journal, plan and account of clips."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from videotune.config.load import flatten
from videotune.config.resolve import parse
from videotune.files import read_json
from videotune.reporter.read import Run, points, read_run
from videotune.runs import checkpoint, journal, run_dir
from videotune.runs.schemas import read_record
from videotune.text import value_text
from videotune.trainer import throughput
from videotune.validation.overfitting import OVERFITTING, judge


@dataclass(frozen=True)
class Finding:
    """``line``: a heading of docs/troubleshooting.md; ``found``: what was measured; ``do``: what helps."""

    line: str
    found: str
    do: str


FLAT = 0.98
"""A run whose validation loss has not come below this share of its first has learnt next to nothing."""

ENOUGH = 3
"""Validations that compare with each other, before anything is found in their course."""


def diagnose(folder: Path) -> tuple[str, list[Finding]]:
    """How far a run came, in words, and what is wrong with it. Raises VideotuneError for a damaged file of it."""
    run = read_run(folder)
    for name in ("config", "plan", "check", "exports"):
        if (folder / f"{name}.json").is_file():
            read_record(folder / f"{name}.json")
    why = run.last("end")["why"]
    total = (run.config or {}).get("steps", "?")
    return (
        f"{len(run.steps.at)} of {total} steps, {f'ended: {why}' if why else 'not ended'}",
        findings(run),
    )


def repair_journal(folder: Path) -> str:
    """Take damaged lines out of a run's journal; what was done, in words. Refused while a process trains there."""
    run_dir.read_run_config(folder)  # raises where the folder holds no run
    with run_dir.only_process(folder):
        return journal.repair(
            folder,
            max((one.step for one in checkpoint.complete_checkpoints(folder)), default=0),
        )


def findings(run: Run) -> list[Finding]:
    """Everything that a run's files show, the gravest first."""
    return [one for check in CHECKS for one in check(run)]


def settings(run: Run) -> dict[str, Any]:
    """The run's config by dotted keys; of a folder without one nothing."""
    return flatten(parse(run.config["settings"]).model_dump(mode="json")) if run.config else {}


def _finding(name: str, **values: Any) -> Finding:
    """A finding of ``findings.json`` with these values in its sentences."""
    return Finding(**{key: text.format(**values) for key, text in _texts()[name].items()})


@cache
def _texts() -> dict[str, dict[str, str]]:
    return read_json(Path(__file__).with_name("findings.json"))


def _out_of_memory(run: Run) -> Iterator[Finding]:
    warnings = [
        line["text"]
        for line in run.of_kind("warning")
        if line["text"].startswith("out of memory")
    ]
    if warnings:
        from videotune.planner.out_of_memory import remedies

        helps = (
            remedies(parse(run.config["settings"]))
            if run.config
            else ["a smaller resolution or fewer frames"]
        )
        yield _finding("memory", warning=warnings[-1], helps="; ".join(helps))


def _not_finite(run: Run) -> Iterator[Finding]:
    if skipped := run.steps.skipped:
        always = list(set.intersection(*map(set, skipped.values())))
        one = (
            f" A window that is in all of them: {always[0]}."
            if len(always) == 1 and len(skipped) > 1
            else ""
        )
        yield _finding("not finite", count=len(skipped), first=min(skipped), one=one)


def _learning(run: Run) -> Iterator[Finding]:
    """What validation says of the rate; where it was never measured, what the steps say."""
    measured = points(run.validations, "train", "normalised")
    rate = settings(run).get("learning_rate")
    if len(measured) < ENOUGH:
        yield from _learning_by_steps(run, rate)
        return
    step, last = measured[-1]
    if last > FLAT:
        name = "rate by validation" if last > 1.05 else "nothing learnt"
        yield _finding(name, last=last, step=step, rate=value_text(rate))


def _learning_by_steps(run: Run, rate: Any) -> Iterator[Finding]:
    errors = [
        error
        for step, error in zip(*run.steps.mse, strict=True)
        if step not in run.steps.skipped
    ]
    if len(errors) < 100:
        return
    fifth = len(errors) // 5
    before = median(errors[:fifth])
    after = median(errors[-fifth:])
    if after > 1.3 * before:
        yield _finding(
            "rate by steps", fifth=fifth, ratio=after / before, rate=value_text(rate)
        )


def _overfitting(run: Run) -> Iterator[Finding]:
    found = judge(run.journal)
    if found is not None and found.label == OVERFITTING:
        yield _finding("overfitting", reason=found.reason, best=found.best_step)
    views = (run.plan or {}).get("views", {})
    if views.get("per_window", {}).get("band") in ("high", "risky"):
        yield _finding("views", most=views["per_window"]["max"], advice=views.get("advice"))


def _slow(run: Run) -> Iterator[Finding]:
    begun = (
        run.steps.first["seconds"] if run.steps.first else {}
    )  # the first one waits for everything to begin
    spent = {
        phase: seconds - begun.get(phase, 0.0) for phase, seconds in run.steps.seconds.items()
    }
    whole = sum(spent.values())
    now = settings(run)
    if whole <= 0:
        return
    if (waiting := spent.get("data", 0.0) / whole) > throughput.WAITING:
        anew = (
            "; variants 0 encodes each view anew"
            if now.get("video_config.variants") == 0
            else ""
        )
        yield _finding(
            "data", share=waiting, whole=whole, threads=now.get("dataloader_threads"), anew=anew
        )
    if (loading := spent.get("experts", 0.0) / whole) > throughput.WAITING:
        yield _finding("experts", share=loading, period=now.get("expert_period"))


def _consistency(run: Run) -> Iterator[Finding]:
    """Settings that cost motion, whatever the numbers say."""
    now = settings(run)
    causes = {
        "use_temporal_attention": (lambda value: value is False, "true"),
        "frame_dropout_probability": (lambda value: value > 0.1, "0.1 or less"),
        "temporal_augmentation": (lambda value: value is True, "false"),
        "stretch": (lambda value: value is True, "false"),
    }
    keys = {f"video_config.{key}": cause for key, cause in causes.items()}
    bad = {
        key: better for key, (is_bad, better) in keys.items() if key in now and is_bad(now[key])
    }
    if bad:
        said = "; ".join(f"{key} is {json.dumps(now[key])}" for key in bad)
        yield _finding(
            "motion",
            bad=said,
            better="; ".join(f"{key} {better}" for key, better in bad.items()),
        )


def _clips(run: Run) -> Iterator[Finding]:
    clips = [clip for clip in (run.check or {}).get("clips", ()) if clip["used"]]
    wanted = value_text(settings(run).get("video_config.target_fps"))
    count = len(clips)
    if repeating := [clip for clip in clips if (clip.get("repeats_share") or 0) > 0.2]:
        slowest = min(clip["source_fps"] or 0 for clip in repeating)
        yield _finding(
            "rates", count=len(repeating), clips=count, slowest=slowest, wanted=wanted
        )
    if hints := [clip for clip in clips if clip.get("warnings")]:
        first = {"path": hints[0]["path"], "warning": hints[0]["warnings"][0]}
        yield _finding("remarks", count=len(hints), clips=count, **first)
    if skipped := (run.check or {}).get("skipped", 0):
        yield _finding("skipped", count=skipped)


def _clipped(run: Run) -> Iterator[Finding]:
    limit = settings(run).get("max_grad_norm")
    known = run.steps.norms[1]
    if (
        limit
        and len(known) >= 20
        and (share := sum(norm > limit for norm in known) / len(known)) > 0.5
    ):
        yield _finding("clipped", share=share, limit=limit, median=median(known))


def _habits(run: Run) -> Iterator[Finding]:
    now = settings(run)
    if off := [key for key in ("sample_after", "validate_every") if now.get(key) == 0]:
        yield _finding("spacing", keys=" and ".join(off))
    if all(now.get(key) == 0 for key in ("save_every", "backup_after", "backup_every")):
        yield _finding("backups")


def _stopped(run: Run) -> Iterator[Finding]:
    step = run.steps.last
    last = run.last("end")["why"]
    if step and last != "done" and run.config and step < run.config["steps"]:
        why = f" ({last})" if last else ""
        yield _finding("end", step=step, steps=run.config["steps"], why=why, run=run.folder)


CHECKS: Sequence[Callable[[Run], Iterator[Finding]]] = (
    *(_out_of_memory, _not_finite, _learning, _overfitting, _consistency),
    *(_clips, _clipped, _slow, _habits, _stopped),
)
