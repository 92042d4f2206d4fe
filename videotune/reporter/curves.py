"""The chapters on the course of training: loss, validation loss, exposure and time."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from videotune.latent_cache.view_bands import BANDS
from videotune.reporter.charts import Line, line_chart, smooth, smoothing_width, thin
from videotune.reporter.read import (
    LearntPart,
    Point,
    Record,
    Run,
    at,
    items,
    mapping,
    number,
    points,
)
from videotune.reporter.times_seen import COLOURS, TimesSeen, band, times_seen
from videotune.runs.step_sums import NINTHS, clip_of, regularization
from videotune.text import counted, plain

GUIDED_TARGET = (
    "The validation loss is measured against the run's own target, which keeps the "
    "guidance of the base model (distilled_guidance). Against the clips alone a run "
    "that keeps it looks worse than one that loses it."
)
"""What a report says of validations of such a run."""

PARTS = (("held_out", "clips kept aside", "one"), ("train", "training clips", "two"))
"""The two parts of a validation: key, name, and stroke of the curve."""

SMALL_COLUMNS = 150
"""Pixel columns of a small chart."""

NOISY_STEPS = 50
"""Steps in which the loss shows no trend.

Each step has other clips at other noise levels: of the toy, single steps differ by a
factor of 10, and the mean of 15 steps falls visibly only after some 50.
"""


def loss(run: Run) -> dict[str, Any]:
    """Return the chapter of the training loss, as a whole and by noise level.

    Steps with only regularization clips are left out: their loss shows how well the
    model is preserved, not how well it learns.

    Returns:
        The chapter, with {"name", "ends", "early", "says", "chart", "by_noise"} of each
        part that is learnt under "parts".
    """
    parts = [_loss_of(run, part) for part in run.parts if part.errors.mse[0]]
    absent = "" if parts else run.absent("the curve appears with the first step")
    ends = [f"{part['name']} {part['ends']}".strip() for part in parts]
    return {
        "absent": absent,
        "left_out": len(run.steps.alone),
        "not_applied": list(run.steps.skipped),
        "ends": "; ".join(ends),
        "parts": parts,
    }


def _loss_of(run: Run, part: LearntPart) -> dict[str, Any]:
    """Return the training loss of a part that has some."""
    xs, ys = part.errors.mse
    skipped = list(run.steps.skipped)
    width = smoothing_width(len(xs))
    raw_css = "faint" if width > 1 else "one"
    lines = [Line("each step", thin(xs, ys), raw_css, dots=len(xs) < 60)]
    if width > 1:
        lines.append(Line(f"mean of {width} steps", smooth(xs, ys, width), "one"))
    says = _describe_loss(ys)
    return {
        "name": part.name,
        "early": describe_early_loss(len(xs)),
        "ends": " → ".join(plain(mean) for mean in _ends(ys)[:2]),
        "says": says,
        "chart": line_chart(lines, says=says, x_label="step", marks=skipped),
        "by_noise": _by_noise(part, (xs[0], xs[-1])),
    }


def describe_early_loss(num_steps: int) -> str:
    """Return what to make of the loss of the first steps; empty when there are more."""
    if num_steps >= NOISY_STEPS:
        return ""
    return (
        "The first steps are noise: each shows other clips at other noise levels, so the "
        f"curve may rise or fall by several times. A trend shows after about {NOISY_STEPS} "
        "steps, and more surely in the validations."
    )


def _describe_loss(ys: Sequence[float]) -> str:
    first, last, num = _ends(ys)
    if num < 2:
        return (
            f"Mean squared error of the prediction: {plain(first)} at the first step, "
            f"{plain(last)} at the last."
        )
    return (
        f"Mean squared error of the prediction at {counted(len(ys), 'step')}: over "
        f"the first {num} of them {plain(first)}, over the last {num} {plain(last)}."
    )


def _ends(ys: Sequence[float]) -> tuple[float, float, int]:
    """Return the mean of the first and of the last tenth, and the size of a tenth."""
    num = max(1, len(ys) // 10)
    return sum(ys[:num]) / num, sum(ys[-num:]) / num, num


def _by_noise(part: LearntPart, span: Point) -> list[dict[str, Any]]:
    """Return a small chart for each ninth of the noise levels that has samples."""
    charts = []
    for ninth, (xs, ys) in enumerate(part.errors.by_noise):
        if not xs:
            continue
        name = f"t {ninth / NINTHS:.2f}–{(ninth + 1) / NINTHS:.2f}"
        first, last, _ = _ends(ys)
        change = f"{plain(first, 3)} → {plain(last, 3)}, {counted(len(xs), 'step')}"

        mean = smooth(xs, ys, smoothing_width(len(xs)), SMALL_COLUMNS)
        raw = thin(xs, ys, SMALL_COLUMNS)
        chart = line_chart(
            [Line("", raw, "faint"), Line("", mean, "one")],
            says=f"mean squared error, {name}: {change}",
            height=84,
            num_ticks=2,
            span=span,
        )
        charts.append({"name": name, "change": change, "chart": chart})
    return charts


def validation(run: Run) -> dict[str, Any]:
    """Return the chapter of the validation loss, without its ``grounds``.

    Returns:
        The chapter, with {"name", "head", "rows", "notes", "charts", "level_note",
        "averages"} of each part that is learnt under "parts".
    """
    if not run.validations:
        event = "validation losses appear as the run measures them"
        return {"absent": run.absent(event, "validate_every")}

    parts = []
    for part in run.parts:
        chapter = _validation_of(run, part)
        if chapter is not None:
            parts.append(chapter)
    absent = "" if parts else run.absent("validations whose errors are numbers")
    return {"absent": absent, "parts": parts}


def _validation_of(run: Run, part: LearntPart) -> dict[str, Any] | None:
    """Return the validation loss of a part, or None if nothing of it is measured."""
    records = part.validations
    curves = []
    notes = []
    for key, name, css in PARTS:
        curve = points(records, key, "mean")
        if curve:
            curves.append(Line(name, curve, css, dots=True))
        else:
            reason = ": none are kept aside" if key == "held_out" else ""
            notes.append(f"No {name} are measured{reason}.")
    if not curves:
        return None

    num_earlier = len(run.of_kind("validation")) - len(run.validations)
    if num_earlier and part.name != "sound":
        notes.append(
            f"{counted(num_earlier, 'validation')} of an earlier set, which had other "
            "clips or noise levels, left out: they do not compare with these."
        )

    steps = [x for x, _ in curves[-1].points]
    first = f"step {plain(steps[0])}"
    last = f"step {plain(steps[-1])}"
    head = ["clips", first, last, "lowest"]
    rows = _shares_of_first(records)
    if at(records[-1], "plain") is not None:
        notes.append(GUIDED_TARGET)
        rows += _shares_of_first(
            _against_clips(part), suffix=", against the clips alone"
        )
    if len(records) < 2:
        head = ["clips", first]
        rows = [[line.label, plain(line.points[0][1])] for line in curves]
    chart = line_chart(curves, says="Validation loss by step", x_label="step")
    level_charts = _by_quantile(records, run.error_reference.error)
    return {
        "name": part.name,
        "head": head,
        "rows": rows,
        "is_relative": len(records) > 1,
        "notes": notes,
        "charts": [("Mean squared error by step", chart), *level_charts],
        "level_note": _note_on_levels(records) if level_charts else "",
        "averages": _averages(records[-1]),
    }


def _averages(record: Record) -> list[list[str]]:
    """Return a table of a validation's values by weights and by expert.

    It is empty if there is neither an average of the weights nor a second expert.
    """
    name = "the model"
    if record.get("live"):
        name = "the average of the weights, which is exported"
    values = {name: [at(record, key, "normalised") for key, _, _ in PARTS]}
    if record.get("live"):
        live = [at(record, "live", key, "normalised") for key, _, _ in PARTS]
        values["the weights themselves"] = live

    experts: list[str] = []
    for key, _, _ in PARTS:
        experts.extend(mapping(at(record, key, "experts")))
    for expert in dict.fromkeys(experts):
        label = f"expert {expert}, at its noise levels"
        values[label] = [at(record, key, "experts", expert) for key, _, _ in PARTS]

    rows = []
    for label, row in values.items():
        rows.append([label, *(plain(number(value)) for value in row)])
    return rows if len(rows) > 1 else []


def _against_clips(part: LearntPart) -> list[Record]:
    """Return the validations of a part against the clips alone, in the form of those
    against a target that keeps the base model's guidance.
    """
    records: list[Record] = []
    for record in part.validations:
        plain_part = at(record, "plain")
        if part.name == "sound":
            plain_part = at(record, "plain", "sound")
        records.append({**record, **mapping(plain_part)})
    return records


def _shares_of_first(records: Sequence[Record], suffix: str = "") -> list[list[str]]:
    """Return the first, the last and the lowest error of each kind of clips, as shares of
    the first one of the same clips: what the verdict judges and the outcome shows.

    Args:
        records: validations.
        suffix: what follows the names of the clips.
    """
    rows = []
    for key, name, _ in PARTS:
        curve = points(records, key, "normalised")
        if not curve:
            continue
        step, lowest = min(curve, key=lambda point: point[1])
        at_lowest = f"{lowest:.1%} at step {plain(step)}"
        rows.append(
            [name + suffix, f"{curve[0][1]:.1%}", f"{curve[-1][1]:.1%}", at_lowest]
        )
    return rows


def _by_quantile(
    records: Sequence[Record], reference: str
) -> list[tuple[str, dict[str, Any]]]:
    """Return a chart of the last validation by noise level, if any, as shares of the first
    one at the same level, which has the same clips.

    Args:
        records: the validations.
        reference: what the errors are shares of.
    """
    is_relative = len(records) > 1
    lines = []
    for key, name, css in PARTS:
        first = dict(_quantile_curve(items(at(records[0], key, "by_quantile"))))
        curve = _quantile_curve(items(at(records[-1], key, "by_quantile")))
        if is_relative:
            curve = [
                (level, error / first[level])
                for level, error in curve
                if first.get(level)
            ]
        if curve:
            lines.append(Line(name, curve, css, dots=True))
    if not lines:
        return []

    title = "By noise level: mean squared error"
    if is_relative:
        title = f"By noise level: the last validation, as a share of {reference}"
    chart = line_chart(
        lines,
        says=title,
        x_label="noise level, low to high",
        from_zero=True,
        num_ticks=5,
    )
    return [(title, chart)]


def _note_on_levels(records: Sequence[Record]) -> str:
    """Return why levels differ by their clips; empty if each has all of them."""
    counts = [len(mapping(at(records[-1], key, "clips"))) for key, _, _ in PARTS]
    if max(counts) < 2:
        return ""
    note = "Each clip is measured at every third noise level, so neighbouring levels have other clips"
    if len(records) > 1:
        return f"{note}: a level is compared with itself."
    return f"{note}, and a line of few clips jumps between them."


def _quantile_curve(values: Sequence[Any]) -> list[Point]:
    curve = []
    for level, value in enumerate(values, start=1):
        y = number(value)
        if y is not None:
            curve.append((float(level), y))
    return curve


def exposure(run: Run) -> dict[str, Any]:
    """Return the chapter of the exposure: bars of all clips, and counts by band."""
    clips = []
    for clip in times_seen(run):
        if clip.so_far is not None or clip.planned is not None:
            clips.append(clip)
    preserved = regularization(run.check)
    absent = ""
    if not clips and not preserved:
        absent = run.absent("counts appear with the first step, or with the plan")

    counts = Counter(clip.band[0] for clip in clips)
    starts = (0, *(round(limit) for limit, _ in BANDS))
    bands = []
    for start, (name, colour) in zip(starts, COLOURS.items(), strict=True):
        bands.append((start, name, colour, counts[name]))
    return {
        "absent": absent,
        "so_far": _so_far(run),
        "planned": mapping(at(run.plan, "views", "per_window")),
        "advice": at(run.plan, "views", "advice"),
        "regularization": {
            "num": len(preserved),
            "seen": sum(run.steps.clips[clip_id] for clip_id in preserved),
            "planned": sum(
                number(clip.get("views")) or 0 for clip in preserved.values()
            ),
        },
        "only_planned": all(clip.so_far is None for clip in clips),
        "bands": bands if sum(count > 0 for *_, count in bands) > 1 else [],
        "clips": clips,
        "is_even": _is_even(clips),
        "most": max((clip.whole for clip in clips), default=0) or 1,
    }


def _is_even(clips: Sequence[TimesSeen]) -> bool:
    """Whether many clips are seen about equally often, so that bars show nothing."""
    times = [clip.whole / clip.windows for clip in clips]
    return len(clips) > 8 and max(times) <= 1.2 * min(times)


def _so_far(run: Run) -> dict[str, Any] | None:
    """Return how often windows of the current training clips were seen, or None.

    Clips that were removed or are held out since do not count.
    """
    preserved = regularization(run.check)
    current = {
        str(clip["id"])[:12] for clip in run.clips if clip["used"] and clip["id"]
    }
    times = []
    for window, count in run.steps.windows.items():
        clip_id = clip_of(window)
        if clip_id not in preserved and (not current or clip_id in current):
            times.append(count)
    if not times:
        return None

    total = number(at(run.plan, "windows")) or number(run.last("start").get("windows"))
    preserved_windows = sum(
        number(clip.get("windows")) or 0 for clip in preserved.values()
    )
    windows = (total or 0) - preserved_windows
    if windows <= 0:
        windows = len(times)
    return {
        "band": band(max(times)),
        "samples": sum(times),
        "windows": windows,
        "least": min(times) if len(times) >= windows else 0,
        "most": max(times),
    }


def time_spent(run: Run) -> dict[str, Any]:
    """Return the chapter of the wall time by phase, over all processes of the run."""
    has_ended = bool(run.journal) and run.journal[-1]["kind"] == "end"
    end = run.last("end") if has_ended else {}
    seconds = mapping(end.get("seconds")) or mapping(at(run.life, "seconds"))
    spent: dict[str, float] = {}
    for key, value in seconds.items():
        duration = number(value)
        if duration is not None and duration > 0:
            spent[str(key)] = duration

    total = sum((spent or run.steps.seconds).values())
    absent = ""
    if not total:
        absent = run.absent("the time of each phase appears with the first steps")
    in_steps = sum(run.steps.seconds.values())
    return {
        "absent": absent,
        "spent": sorted(spent.items(), key=lambda pair: -pair[1]),
        "steps": run.steps.seconds,
        "between": max(0.0, spent.get("training", 0.0) - in_steps),
        "resumed": bool(run.of_kind("resume")),
        "whole": total or 1,
    }
