"""``doctor RUN``: which lines of docs/troubleshooting.md apply to a run, from its journal, plan and account of clips."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from videotune.config.load import flatten
from videotune.config.resolve import parse
from videotune.errors import DONE
from videotune.records import read_record
from videotune.reporter.read import Record, Run, read_run
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
"""A ruler that has not come below this share of its first reading has learnt next to nothing."""

ENOUGH = 3
"""So many readings of one ruler, before anything is said of their course."""


def diagnose(folder: Path, *, as_json: bool = False) -> int:
    """Print what is wrong with a run, and what helps."""
    run = read_run(folder)
    for name in ("config", "plan", "check", "exports"):
        if (folder / f"{name}.json").is_file():
            read_record(folder / f"{name}.json")
    found = findings(run)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2, ensure_ascii=False))
        return DONE
    print(f"{folder}: {_where(run)}")
    for one in found:
        print(f"\n{one.line}\n  found: {one.found}\n  do:    {one.do}")
    if not found:
        print("nothing that its files show is wrong")
    else:
        print("\nEach line is told at length in docs/troubleshooting.md.")
    return DONE


def repair_journal(folder: Path) -> int:
    """Take damaged lines out of a run's journal, and say what was done. Refused while a process trains there."""
    read_run_config(folder)  # a sentence where the folder holds no run
    with only_process(folder):
        print(repair(folder, max((one.step for one in complete_checkpoints(folder)), default=0)))
    return DONE


def findings(run: Run) -> list[Finding]:
    """Everything that a run's files show, the gravest first."""
    return [one for check in CHECKS for one in check(run)]


def settings(run: Run) -> dict[str, Any]:
    """The run's config by dotted keys; of a folder without one nothing."""
    return flatten(parse(run.config["settings"]).model_dump(mode="json")) if run.config else {}


def _lines(run: Run, kind: str) -> list[Record]:
    return [line for line in run.journal if line["kind"] == kind]


def _where(run: Run) -> str:
    ended = _lines(run, "end")
    total = (run.config or {}).get("steps", "?")
    why = f"ended: {ended[-1]['why']}" if ended else "not ended"
    return f"{len(run.steps.at)} of {total} steps, {why}"


def _out_of_memory(run: Run) -> Iterator[Finding]:
    told = [line["text"] for line in _lines(run, "warning") if line["text"].startswith("out of memory")]
    if told:
        from videotune.planner.out_of_memory import remedies

        helps = remedies(parse(run.config["settings"])) if run.config else ["a smaller resolution or fewer frames"]
        yield Finding("Out of memory", told[-1], "; ".join(helps))


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


def _readings(run: Run, part: str) -> list[tuple[int, float]]:
    """(step, normalised) of the newest ruler."""
    lines = _lines(run, "ruler")
    newest = [line for line in lines if line.get("ruler") == lines[-1].get("ruler")] if lines else []
    pairs = [(line["step"], (line.get(part) or {}).get("normalised")) for line in newest]
    return [(step, float(value)) for step, value in pairs if value is not None]


def _learning(run: Run) -> Iterator[Finding]:
    """What the ruler says of the rate; where it was never read, what the steps say."""
    read, said = _readings(run, "train"), settings(run)
    rate = said.get("learning_rate")
    if len(read) < ENOUGH:
        yield from _learning_by_steps(run, rate)
        return
    last = read[-1][1]
    if last > 1.05:
        yield Finding(
            "Poor quality: the rate is too high",
            f"the error on training clips is {last:.2f} of what it was before training (step {read[-1][0]})",
            f"lower learning_rate (now {value_text(rate)}) to a third, from an earlier checkpoint: "
            "--resume --from STEP --override",
        )
    elif last > FLAT:
        yield Finding(
            "Poor quality: nothing is learnt",
            f"after {read[-1][0]} steps the error on training clips is {last:.3f} of what it was",
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
        yield Finding("Poor quality: overfitting", f"{most} views of a window by the end", str(views.get("advice")))


def _slow(run: Run) -> Iterator[Finding]:
    begun = run.steps.first["seconds"] if run.steps.first else {}  # the first one waits for everything to begin
    spent = {phase: seconds - begun.get(phase, 0.0) for phase, seconds in run.steps.seconds.items()}
    whole = sum(spent.values())
    if whole <= 0:
        return
    waiting, said = spent.get("data", 0.0) / whole, settings(run)
    if waiting > WAITING:
        yield Finding(
            "Slow training: steps wait for data",
            f"{waiting:.0%} of {whole:.0f} s were spent waiting for batches",
            f"more dataloader_threads (now {said.get('dataloader_threads')}), or cache_dir on a faster disk"
            + ("; variants 0 encodes each view anew" if said.get("video_config.variants") == 0 else ""),
        )
    if spent.get("experts", 0.0) / whole > WAITING:
        yield Finding(
            "Slow training: experts are loaded too often",
            f"{spent['experts'] / whole:.0%} of the time were spent loading experts",
            f"a longer expert_period (now {said.get('expert_period')}) in a new run",
        )


def _consistency(run: Run) -> Iterator[Finding]:
    """Settings that cost motion, whatever the numbers say."""
    said = settings(run)
    causes = {
        "video_config.use_temporal_attention": (said.get("video_config.use_temporal_attention") is False, "true"),
        "video_config.frame_dropout_probability": (
            said.get("video_config.frame_dropout_probability", 0) > 0.1,
            "0.1 or less",
        ),
        "video_config.temporal_augmentation": (said.get("video_config.temporal_augmentation") is True, "false"),
        "video_config.stretch": (said.get("video_config.stretch") is True, "false"),
    }
    bad = {key: better for key, (is_so, better) in causes.items() if is_so}
    if bad:
        yield Finding(
            "Poor temporal consistency",
            "; ".join(f"{key} is {json.dumps(said[key])}" for key in bad),
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
    said = settings(run)
    off = [key for key in ("sample_after", "validate_every") if said.get(key) == 0]
    if off:
        yield Finding(
            "Performance tips: regular sampling",
            f"{' and '.join(off)} 0",
            "250, the default: `videotune plan` says what it costs",
        )
    if said.get("save_every") == 0 and said.get("backup_after") == 0 and said.get("backup_every") == 0:
        yield Finding("Performance tips: back up", "nothing is saved before the end", "backup_after 30, the default")


def _stopped(run: Run) -> Iterator[Finding]:
    ended, step = _lines(run, "end"), run.steps.last
    last = ended[-1]["why"] if ended else None
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
