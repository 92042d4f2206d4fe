"""``doctor RUN``: which lines of docs/troubleshooting.md apply to a run, from its journal, plan and account of clips."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from videotune.config.load import flatten
from videotune.config.resolve import parse
from videotune.records import read_record
from videotune.reporter.read import Run, points, read_run
from videotune.text import value_text
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.logging.journal import repair
from videotune.trainer.logging.speed import WAITING
from videotune.trainer.run_dir import only_process, read_run_config
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
    why, total = run.last("end")["why"], (run.config or {}).get("steps", "?")
    return f"{len(run.steps.at)} of {total} steps, {f'ended: {why}' if why else 'not ended'}", findings(run)


def repair_journal(folder: Path) -> str:
    """Take damaged lines out of a run's journal; what was done, in words. Refused while a process trains there."""
    read_run_config(folder)  # raises where the folder holds no run
    with only_process(folder):
        return repair(folder, max((one.step for one in complete_checkpoints(folder)), default=0))


def findings(run: Run) -> list[Finding]:
    """Everything that a run's files show, the gravest first."""
    return [one for check in CHECKS for one in check(run)]


def settings(run: Run) -> dict[str, Any]:
    """The run's config by dotted keys; of a folder without one nothing."""
    return flatten(parse(run.config["settings"]).model_dump(mode="json")) if run.config else {}


def _out_of_memory(run: Run) -> Iterator[Finding]:
    warnings = [line["text"] for line in run.of_kind("warning") if line["text"].startswith("out of memory")]
    if warnings:
        from videotune.planner.out_of_memory import remedies

        helps = remedies(parse(run.config["settings"])) if run.config else ["a smaller resolution or fewer frames"]
        yield Finding("Out of memory", warnings[-1], "; ".join(helps))


def _not_finite(run: Run) -> Iterator[Finding]:
    skipped = run.steps.skipped
    if not skipped:
        return
    always = list(set.intersection(*map(set, skipped.values())))
    one = f" A window that is in all of them: {always[0]}." if len(always) == 1 and len(skipped) > 1 else ""
    yield Finding(
        "Loss or gradient not finite",
        f"{len(skipped)} steps, the first {min(skipped)}, were not applied.{one}",
        "look at the clips that the warnings name; if they are others each time, lower learning_rate (--override), or "
        "train_dtype FLOAT_32 in a new run",
    )


def _learning(run: Run) -> Iterator[Finding]:
    """What validation says of the rate; where it was never measured, what the steps say."""
    measured, rate = points(run.validations, "train", "normalised"), settings(run).get("learning_rate")
    if len(measured) < ENOUGH:
        yield from _learning_by_steps(run, rate)
        return
    step, last = measured[-1]
    if last > 1.05:
        yield Finding(
            "Poor quality: the rate is too high",
            f"the error on training clips is {last:.2f} of what it was before training (step {step})",
            f"lower learning_rate (now {value_text(rate)}) to a third, from an earlier checkpoint: "
            "--resume --from STEP --override",
        )
    elif last > FLAT:
        yield Finding(
            "Poor quality: nothing is learnt",
            f"after {step} steps the error on training clips is {last:.3f} of what it was",
            f"raise learning_rate (now {value_text(rate)}) threefold (--override), or train longer; look at the captions",
        )


def _learning_by_steps(run: Run, rate: Any) -> Iterator[Finding]:
    errors = [error for step, error in zip(*run.steps.mse, strict=True) if step not in run.steps.skipped]
    if len(errors) < 100:
        return
    fifth = len(errors) // 5
    before, after = median(errors[:fifth]), median(errors[-fifth:])
    if after > 1.3 * before:
        yield Finding(
            "Poor quality: the rate is too high",
            f"the median error of the last {fifth} steps is {after / before:.2f} times that of the first {fifth}",
            f"lower learning_rate (now {value_text(rate)}); set validate_every, which measures without single steps' noise",
        )


def _overfitting(run: Run) -> Iterator[Finding]:
    found = judge(run.journal)
    if found is not None and found.word == OVERFITTING:
        yield Finding(
            "Poor quality: overfitting",
            found.reason,
            f"use the checkpoint of step {found.best_step}; then more clips, fewer steps, or a smaller lora.rank",
        )
    views = (run.plan or {}).get("views", {})
    if views.get("per_window", {}).get("band") in ("high", "risky"):
        most = views["per_window"]["max"]
        yield Finding(
            "Poor quality: overfitting", f"planned by the end: {most} views of a window", str(views.get("advice"))
        )


def _slow(run: Run) -> Iterator[Finding]:
    begun = run.steps.first["seconds"] if run.steps.first else {}  # the first one waits for everything to begin
    spent = {phase: seconds - begun.get(phase, 0.0) for phase, seconds in run.steps.seconds.items()}
    whole = sum(spent.values())
    if whole <= 0:
        return
    waiting, now = spent.get("data", 0.0) / whole, settings(run)
    if waiting > WAITING:
        yield Finding(
            "Slow training: steps wait for data",
            f"{waiting:.0%} of {whole:.0f} s were spent waiting for batches",
            f"more dataloader_threads (now {now.get('dataloader_threads')}), or cache_dir on a faster disk"
            + ("; variants 0 encodes each view anew" if now.get("video_config.variants") == 0 else ""),
        )
    if spent.get("experts", 0.0) / whole > WAITING:
        yield Finding(
            "Slow training: experts are loaded too often",
            f"{spent['experts'] / whole:.0%} of the time were spent loading experts",
            f"a longer expert_period (now {now.get('expert_period')}) in a new run",
        )


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
    bad = {key: better for key, (is_bad, better) in keys.items() if key in now and is_bad(now[key])}
    if bad:
        yield Finding(
            "Poor temporal consistency",
            "; ".join(f"{key} is {json.dumps(now[key])}" for key in bad),
            "; ".join(f"{key} {better}" for key, better in bad.items()),
        )


def _clips(run: Run) -> Iterator[Finding]:
    clips = [clip for clip in (run.check or {}).get("clips", ()) if clip["used"]]
    wanted = settings(run).get("video_config.target_fps")
    repeating = [clip for clip in clips if (clip.get("repeats_share") or 0) > 0.2]
    if repeating:
        slowest = min(clip["source_fps"] or 0 for clip in repeating)
        yield Finding(
            "Poor quality: frame rates do not fit",
            f"{len(repeating)} of {len(clips)} clips are slower ({slowest:g} fps and up) than the {value_text(wanted)} fps "
            "of training: more than a fifth of their frames are repeated",
            "clips of a higher rate, or video_config.target_fps near theirs",
        )
    hints = [clip for clip in clips if clip.get("warnings")]
    if hints:
        yield Finding(
            "Poor quality: clips and captions",
            f"{len(hints)} of {len(clips)} clips have remarks, such as {hints[0]['path']}: {hints[0]['warnings'][0]}",
            "videotune check lists them all",
        )
    skipped = (run.check or {}).get("skipped", 0)
    if skipped:
        yield Finding("Poor quality: clips and captions", f"{skipped} clips were skipped", "videotune check says why")


def _clipped(run: Run) -> Iterator[Finding]:
    limit, known = settings(run).get("max_grad_norm"), run.steps.norms[1]
    if limit and len(known) >= 20:
        share = sum(norm > limit for norm in known) / len(known)
        if share > 0.5:
            yield Finding(
                "Poor quality: most gradients are clipped",
                f"{share:.0%} of the steps were longer than max_grad_norm {limit:g} (median {median(known):.3g})",
                "a smaller learning_rate or a larger batch where the loss jumps; else a larger max_grad_norm",
            )


def _habits(run: Run) -> Iterator[Finding]:
    now = settings(run)
    off = [key for key in ("sample_after", "validate_every") if now.get(key) == 0]
    if off:
        yield Finding(
            "Performance tips: regular sampling",
            f"{' and '.join(off)} 0",
            "leave them out: `videotune plan` chooses the spacing and prints what it costs",
        )
    if all(now.get(key) == 0 for key in ("save_every", "backup_after", "backup_every")):
        yield Finding("Performance tips: back up", "nothing is saved before the end", "backup_after 30, the default")


def _stopped(run: Run) -> Iterator[Finding]:
    step, last = run.steps.last, run.last("end")["why"]
    if step and last != "done" and run.config and step < run.config["steps"]:
        yield Finding(
            "The run has not come to its end",
            f"its last step is {step} of {run.config['steps']}" + (f" ({last})" if last else ""),
            f"if no process works on it: videotune train --out {run.folder} --resume",
        )


CHECKS: Sequence[Callable[[Run], Iterator[Finding]]] = (
    _out_of_memory,
    _not_finite,
    _learning,
    _overfitting,
    _consistency,
    _clips,
    _clipped,
    _slow,
    _habits,
    _stopped,
)
