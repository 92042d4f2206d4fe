"""``doctor RUN``: find which headings of docs/troubleshooting.md apply to a run.

The findings come from the run's journal, plan and account of clips.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from videotune.config.nested_keys import flatten
from videotune.config.resolve import parse
from videotune.config.usual_rates import far_rates
from videotune.data.remarks import code_of, with_codes
from videotune.files import read_json
from videotune.latent_cache.view_bands import views_text
from videotune.reporter.read import Run, mapping, number, points, read_run
from videotune.reporter.sample_findings import likely_copies
from videotune.runs import checkpoint, journal, run_dir
from videotune.runs.schemas import read_record
from videotune.sampling.picture_faults import faulty_share, remark_at
from videotune.text import as_argument, counted, value_text
from videotune.trainer import throughput
from videotune.validation.overfitting import LEARNING, OVERFITTING, judge
from videotune.validation.part_movement import NOT_MOVED


@dataclass(frozen=True)
class Finding:
    """A problem of a run."""

    line: str
    """A heading of docs/troubleshooting.md."""

    found: str
    """What was measured."""

    do: str
    """The remedy."""


FLAT = 0.98
"""A validation loss above this share of the first: next to nothing is learnt."""

RISEN = 1.05
"""A validation loss above this share of the first means too high a learning rate."""

MANY_FAULTY = 0.5
"""Share of samples with a fault from which on the samples as a whole show nothing."""

MIN_VALIDATIONS = 3
"""Comparable validations before their course is judged."""

MIN_STEPS = 100
"""Steps before their loss is judged without validation."""


def diagnose(folder: Path) -> tuple[str, list[Finding]]:
    """Return a sentence on the progress of a run, and its problems.

    Raises:
        VideotuneError: if a file of the run is damaged.
    """
    run = read_run(folder)
    for name in ("config", "plan", "check", "exports"):
        if (folder / f"{name}.json").is_file():
            read_record(folder / f"{name}.json")

    reason = run.last("end")["why"]
    total = (run.config or {}).get("steps", "?")
    state = f"ended: {reason}" if reason else "not ended"
    if _is_running(run):
        state = "running"
    return f"{len(run.steps.at)} of {total} steps, {state}", findings(run)


def repair_journal(folder: Path) -> str:
    """Remove damaged lines from a run's journal and return what was done.

    Refused while a process trains in the folder.
    """
    run_dir.read_run_config(folder)  # raises if the folder has no run
    with run_dir.only_process(folder):
        steps = [saved.step for saved in checkpoint.complete_checkpoints(folder)]
        return journal.repair(folder, max(steps, default=0))


def findings(run: Run) -> list[Finding]:
    """Return the problems that a run's files show, the most serious first."""
    problems: list[Finding] = []
    for check in CHECKS:
        problems.extend(check(run))
    return problems


def settings(run: Run) -> dict[str, Any]:
    """Return the run's config by dotted keys; empty if it has none."""
    if not run.config:
        return {}
    return flatten(parse(run.config["settings"]).model_dump(mode="json"))


def _finding(name: str, **values: Any) -> Finding:
    """Fill the texts of an entry of ``findings.json`` with values."""
    texts = {key: text.format(**values) for key, text in _texts()[name].items()}
    return Finding(**texts)


@cache
def _texts() -> dict[str, dict[str, str]]:
    return read_json(Path(__file__).with_name("findings.json"))


def _out_of_memory(run: Run) -> Iterator[Finding]:
    warnings = []
    for line in run.of_kind("warning"):
        if line["text"].startswith("out of memory"):
            warnings.append(line["text"])
    if not warnings:
        return

    from videotune.planner.out_of_memory import remedies

    helps = ["a smaller resolution or fewer frames"]
    if run.config:
        helps = remedies(parse(run.config["settings"]))
    yield _finding("memory", warning=warnings[-1], helps="; ".join(helps))


def _not_finite(run: Run) -> Iterator[Finding]:
    skipped = {}
    for step, window_ids in run.steps.skipped.items():
        if step not in run.steps.scale_searches:
            skipped[step] = window_ids
    if not skipped:
        return
    common = list(set.intersection(*map(set, skipped.values())))
    note = ""
    if len(common) == 1 and len(skipped) > 1:
        note = f" A window that is in all of them: {common[0]}."
    yield _finding("not finite", count=len(skipped), first=min(skipped), one=note)


def _learning(run: Run) -> Iterator[Finding]:
    """Judge the learning rate by validation, or by the steps without it."""
    measured = points(run.validations, "train", "normalised")
    if len(measured) < MIN_VALIDATIONS:
        yield from _learning_by_steps(run)
        return
    step, last = measured[-1]
    if last > RISEN:
        advice = _advice_on_high_rate(run)
        yield _finding("rate by validation", last=last, step=step, advice=advice)
    elif last > FLAT:
        rate = value_text(settings(run).get("learning_rate"))
        yield _finding("nothing learnt", last=last, step=step, rate=rate)


def _learning_by_steps(run: Run) -> Iterator[Finding]:
    errors = []
    for step, error in zip(*run.steps.mse, strict=True):
        if step not in run.steps.skipped:
            errors.append(error)
    if len(errors) < MIN_STEPS:
        return

    fifth = len(errors) // 5
    before = median(errors[:fifth])
    after = median(errors[-fifth:])
    if after > 1.3 * before:
        ratio = after / before
        advice = _advice_on_high_rate(run)
        yield _finding("rate by steps", fifth=fifth, ratio=ratio, advice=advice)


def _advice_on_high_rate(run: Run) -> str:
    """Return the remedy for an error that has risen: the usual rate for one that is far
    above it, else a third.
    """
    far = _far_rates(run)
    if far:
        return far
    rate = settings(run).get("learning_rate")
    if rate is None:
        return "lower learning_rate"
    third = f"{rate / 3:.2g}"
    return (
        f"lower learning_rate to a third, {third} (now {value_text(rate)}), from a "
        f"checkpoint before the error rose: videotune resume {as_argument(run.folder)} "
        f"--from STEP --set learning_rate={third} --override"
    )


def _far_rates(run: Run) -> str:
    """Return what to set for rates far above the usual ones; empty if there are none.

    No checkpoint of such a run is worth continuing.
    """
    if not run.config:
        return ""
    far = far_rates(parse(run.config["settings"]))
    return f"{'; '.join(far.values())}, in a new run" if far else ""


def _parts(run: Run) -> Iterator[Finding]:
    """Find parts that train and do not move, which the run has warned of."""
    for record in run.of_kind("warning"):
        text = str(record.get("text", ""))
        if NOT_MOVED in text:
            yield _finding("part", warning=text)


def _pictures(run: Run) -> Iterator[Finding]:
    """Find black, frozen or noisy samples of the latest step that was sampled."""
    kinds = ("sample", "sample_metrics")
    steps = [
        number(line.get("step")) or 0 for line in run.journal if line["kind"] in kinds
    ]
    step = max(steps, default=0)
    remark = remark_at(run.journal, step)
    if not remark or step == 0:
        return

    base_remark = remark_at(run.journal, 0)
    advice = _advice_on_rate(run)
    base = "; before training they were good"
    if base_remark:
        base = f"; before training, {base_remark}"
        advice = (
            "sample.steps and sample.guidance as the base model needs them; "
            "look at the clips if samples do not move"
        )
    if run.is_toy:
        advice += (
            ". If the clips are filmed: the toy draws moving shapes alone, so take a real "
            "model for them"
        )
    name = "some pictures"
    if faulty_share(run.journal, step) >= MANY_FAULTY:
        name = "pictures"
    yield _finding(name, step=step, remark=remark, base=base, advice=advice)


def _copies(run: Run) -> Iterator[Finding]:
    """Find samples that are likely copies of training clips."""
    copies = likely_copies(run.journal)
    if copies is None or not copies.are_found:
        return
    run_argument = as_argument(run.folder)
    yield _finding("copies", found=copies.sentence, run=run_argument)


def _advice_on_rate(run: Run) -> str:
    """Return the remedy for samples that the training has spoiled."""
    if not run.config:
        return (
            "lower learning_rate, or use an earlier checkpoint whose samples are good"
        )
    rate = value_text(settings(run).get("learning_rate"))
    return _far_rates(run) or (
        f"lower learning_rate (now {rate}), or use an earlier checkpoint whose samples are "
        "good"
    )


def _overfitting(run: Run) -> Iterator[Finding]:
    verdict = judge(run.journal)
    if verdict is not None and verdict.label == OVERFITTING:
        yield _finding("overfitting", reason=verdict.reason, best=verdict.best_step)

    if verdict is not None and verdict.label == LEARNING:
        return  # what is measured counts more than how often clips are to be seen
    views = (run.plan or {}).get("views", {})
    per_window = views.get("per_window", {})
    if per_window.get("band") in ("high", "risky"):
        yield _finding(
            "views", views=views_text(per_window), advice=views.get("advice")
        )


def _slow(run: Run) -> Iterator[Finding]:
    # The first step waits for everything to start.
    first_step = run.steps.first["seconds"] if run.steps.first else {}
    seconds = {}
    for phase, spent in run.steps.seconds.items():
        seconds[phase] = spent - first_step.get(phase, 0.0)
    total = sum(seconds.values())
    config = settings(run)
    if total <= 0:
        return

    waiting = seconds.get("data", 0.0) / total
    if waiting > throughput.WAITING:
        note = ""
        if config.get("video_config.variants") == 0:
            note = "; variants 0 encodes each view again"
        yield _finding(
            "data",
            share=waiting,
            whole=total,
            threads=config.get("dataloader_threads"),
            anew=note,
        )
    loading = seconds.get("experts", 0.0) / total
    if loading > throughput.WAITING:
        yield _finding("experts", share=loading, period=config.get("expert_period"))


MOTION_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "video_config.use_temporal_attention": (lambda value: value is False, "true"),
    "video_config.frame_dropout_probability": (
        lambda value: value > 0.1,
        "0.1 or less",
    ),
    "video_config.temporal_augmentation": (lambda value: value is True, "false"),
    "video_config.stretch": (lambda value: value is True, "false"),
}
"""Settings that cost motion: whether a value does, and a better one."""


def _consistency(run: Run) -> Iterator[Finding]:
    """Find settings that cost motion, whatever the losses are."""
    config = settings(run)
    harmful = []
    better_values = []
    for key, (is_harmful, better) in MOTION_SETTINGS.items():
        if key in config and is_harmful(config[key]):
            harmful.append(f"{key} is {json.dumps(config[key])}")
            better_values.append(f"{key} {better}")
    if harmful:
        yield _finding(
            "motion", bad="; ".join(harmful), better="; ".join(better_values)
        )


def _clips(run: Run) -> Iterator[Finding]:
    account = run.check or {}
    clips = [clip for clip in account.get("clips", ()) if clip["used"]]
    wanted_fps = value_text(settings(run).get("video_config.target_fps"))

    repeating = [clip for clip in clips if (clip.get("repeats_share") or 0) > 0.2]
    if repeating:
        slowest = min(clip["source_fps"] or 0 for clip in repeating)
        yield _finding(
            "rates",
            count=len(repeating),
            clips=counted(len(clips), "clip"),
            slowest=slowest,
            wanted=wanted_fps,
        )
    yield from _flagged_clips(run, clips)
    skipped = account.get("skipped", 0)
    if skipped:
        yield _finding(
            "skipped", count=counted(skipped, "clip"), data=_check_argument(run)
        )


def _flagged_clips(run: Run, clips: Sequence[Any]) -> Iterator[Finding]:
    """Find remarks on clips, but those that the finding of the frame rates has."""
    flagged = []
    for clip in clips:
        codes = clip.get("warning_codes") or ()
        warnings = with_codes(clip.get("warnings") or (), codes)
        others = [text for text in warnings if code_of(text) != "repeated_frames"]
        if others:
            flagged.append((clip["path"], others[0]))
    if flagged:
        path, warning = flagged[0]
        name = path.removeprefix(f"{_dataset_folder(run)}/")
        yield _finding(
            "remarks",
            count=len(flagged),
            clips=counted(len(clips), "clip"),
            path=name,
            warning=warning,
            data=_check_argument(run),
        )


def _check_argument(run: Run) -> str:
    """Return the clips of a run, as a command with ``check`` takes them."""
    folder = _dataset_folder(run)
    return "CLIPS" if folder is None else as_argument(folder)


def _dataset_folder(run: Run) -> str | None:
    """Return the folder of a run's clips; None if it has none, or several."""
    datasets = parse(run.config["settings"]).datasets if run.config else []
    return datasets[0].path if len(datasets) == 1 else None


def _clipped(run: Run) -> Iterator[Finding]:
    limit = settings(run).get("max_grad_norm")
    norms = run.steps.norms[1]
    if not limit or len(norms) < 20:
        return
    share = sum(norm > limit for norm in norms) / len(norms)
    if share > 0.5:
        yield _finding("clipped", share=share, limit=limit, median=median(norms))


def _habits(run: Run) -> Iterator[Finding]:
    config = settings(run)
    off = [key for key in ("sample_after", "validate_every") if config.get(key) == 0]
    if off:
        yield _finding("spacing", keys=" and ".join(off))
    save_keys = ("save_every", "backup_after", "backup_every")
    if all(config.get(key) == 0 for key in save_keys):
        yield _finding("backups")


def _is_running(run: Run) -> bool:
    """Return whether a process works on the run."""
    return bool(mapping(run.life)["alive"])


def _stopped(run: Run) -> Iterator[Finding]:
    if _is_running(run):
        return
    step = run.steps.last
    reason = run.last("end")["why"]
    if not step or not run.config or reason == "done" or step >= run.config["steps"]:
        return
    yield _finding(
        "end",
        step=step,
        steps=run.config["steps"],
        why=f" ({reason})" if reason else "",
        run=as_argument(run.folder),
    )


CHECKS: Sequence[Callable[[Run], Iterator[Finding]]] = (
    _out_of_memory,
    _not_finite,
    _learning,
    _parts,
    _pictures,
    _copies,
    _overfitting,
    _consistency,
    _clips,
    _clipped,
    _slow,
    _habits,
    _stopped,
)
