"""The chapters on how training went (its loss, the validation loss, how often each clip was seen, the time), and charts.

Charts are plain data, which ``chart`` in macros.html.j2 draws as inline SVG without a script. The drawing is stretched to
the width at hand, while the numbers at its axes are HTML laid over it by percentage: so they stay readable on a telephone
and on a wide screen alike.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from videotune.latent_cache.exposure import BANDS
from videotune.latent_cache.exposure import band as band_of
from videotune.reporter.read import Point, Record, Run, at, items, mapping, number, points
from videotune.runs.step_sums import NINTHS, clip_of, regularization
from videotune.text import counted, plain

SIZE = 1000
"""Side of the drawing's own coordinates, which stand for the plot's full width and height."""


@dataclass(frozen=True)
class Line:
    """Points in order of x, joined up; ``css`` names the stroke ("one", "two", …, "faint"), ``dots`` marks each point.

    A line without a label stands outside the legend.
    """

    label: str
    points: Sequence[Point]
    css: str
    dots: bool = False


def smooth(
    xs: Sequence[float], ys: Sequence[float], width: int, columns: int = 400
) -> list[Point]:
    """The mean of the ``width`` (odd) values around each point, or of those among them that there are.

    At all points, or at twice as many as columns, evenly spread.
    """
    num = len(xs)
    most = 2 * columns
    reach = width // 2
    places = (
        range(num) if num <= most else [(2 * i + 1) * num // (2 * most) for i in range(most)]
    )
    parts = ((xs[place], ys[max(0, place - reach) : place + reach + 1]) for place in places)
    return [(x, math.fsum(part) / len(part)) for x, part in parts]


def smoothing_width(num_points: int) -> int:
    """An odd number of points to average: about a twentieth of them, 201 at most; 1 where there are too few to smooth."""
    return 1 if num_points < 10 else min(201, max(3, num_points // 20) | 1)


def thin(xs: Sequence[float], ys: Sequence[float], columns: int = 400) -> list[Point]:
    """The same curve in at most twice as many points as columns: the lowest and the highest of each stay."""
    num = len(xs)
    if num <= 2 * columns:
        return list(zip(xs, ys, strict=True))
    kept: list[Point] = []
    for column in range(columns):
        begin = num * column // columns
        part = ys[begin : num * (column + 1) // columns]
        kept.extend(
            (xs[begin + i], part[i])
            for i in sorted({part.index(min(part)), part.index(max(part))})
        )
    return kept


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers within [low, high], about ``wanted`` of them."""
    if not high > low:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / wanted))
    step = min(
        (unit * factor for factor in (1, 2, 5, 10)),
        key=lambda step: abs((high - low) / step - wanted),
    )
    return [
        step * place
        for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def axis_labels(values: Sequence[float]) -> list[str]:
    """The values of an axis in words, with as many digits as tell them apart, three or more."""
    words = [[plain(value, digits) for value in values] for digits in range(3, 16)]
    return next((each for each in words if len(set(each)) == len(values)), words[-1])


def line_chart(
    lines: Sequence[Line],
    *,
    says: str,
    x_label: str = "",
    height: int = 240,
    marks: Sequence[float] = (),
    from_zero: bool = False,
    num_ticks: int = 4,
    span: Point | None = None,
) -> dict[str, Any]:
    """A chart ``height`` pixels high; ``says`` is its text for those who cannot see it.

    ``marks`` are x values to be pointed out at the foot. A lone spike in a faint line leaves the frame at its edge
    rather than flatten everything else. ``span`` is the range of x where it is not the points' own.
    """
    low, high = _range(lines, from_zero)
    xs = [x for line in lines for x, _ in line.points]
    left, right = span or (min(xs, default=0), max(xs, default=1))

    def x(value: float) -> float:
        return (value - left) / ((right - left) or 1) * SIZE

    def y(value: float) -> float:
        return SIZE - (min(max(value, low), high) - low) / ((high - low) or 1) * SIZE

    down = ticks(low, high, num_ticks)
    across = ticks(left, right, num_ticks)
    if all(float(x).is_integer() for x in xs):
        across = sorted({float(round(value)) for value in across})
    paths = [("grid", f"M0 {y(value):.1f}H{SIZE}") for value in down]
    for line in lines:
        corners = [f"{x(at):.1f} {y(value):.1f}" for at, value in line.points]
        if corners:
            paths.append((f"line {line.css}", "M" + "L".join(corners)))
        if len(corners) == 1 or (
            line.dots and corners
        ):  # strokes of no length, whose round ends no stretching bends
            paths.append((f"dots {line.css}", "".join(f"M{corner}h0" for corner in corners)))
    paths += [("mark", f"M{x(value):.1f} {SIZE}V{SIZE - 45}") for value in marks]
    return {
        "says": says,
        "x_label": x_label,
        "height": height,
        "size": SIZE,
        "paths": paths,
        "legend": [(line.css, line.label) for line in lines if line.label],
        "ys": [
            (word, f"{y(value) / SIZE:.2%}")
            for word, value in zip(axis_labels(down), down, strict=True)
        ],
        "xs": [
            (word, x(value) / SIZE)
            for word, value in zip(axis_labels(across), across, strict=True)
        ],
    }


def _range(lines: Sequence[Line], from_zero: bool) -> Point:
    """A range of y that holds every line; of the faint ones, all but the outermost hundredth of their points."""
    ys = []
    for line in lines:
        values = sorted(y for _, y in line.points)
        cut = len(values) // 100 if line.css == "faint" else 0
        ys += values[cut : len(values) - cut]
    if not ys:
        return 0, 1
    low = min(ys)
    high = max(ys)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return 0.0 if from_zero and low >= 0 else low - room, high + room


PARTS = (("held_out", "held-out clips", "one"), ("train", "training clips", "two"))
"""The two sets that validation measures: their key, their name, and the stroke of their curve."""

COLOURS = {"conservative": "calm", "moderate": "good", "high": "care", "risky": "bad"}
"""The colour of each band of a number of times that a window is seen."""


def loss(run: Run) -> dict[str, Any]:
    """The mean squared error of each step, raw and smoothed, as a whole and by noise level.

    Steps that showed regularization clips alone are left out: their error says how the model is kept as it is.
    """
    xs, ys = run.steps.mse
    data: dict[str, Any] = {
        "left_out": len(run.steps.alone),
        "not_applied": list(run.steps.skipped),
    }
    if not xs:
        return data | {"absent": run.absent("the curve appears with the first step")}
    width = smoothing_width(len(xs))
    lines = [
        Line("each step", thin(xs, ys), "faint" if width > 1 else "one", dots=len(xs) < 60)
    ]
    if width > 1:
        lines.append(Line(f"mean of {width} steps", smooth(xs, ys, width), "one"))
    first, last, num = _ends(ys)
    over = f"the first {num} of them {plain(first)}, over the last {num} {plain(last)}"
    says = f"Mean squared error of the prediction at {counted(len(xs), 'step')}: over {over}."
    if num < 2:
        says = f"Mean squared error of the prediction: {plain(first)} at the first step, {plain(last)} at the last."
    chart = line_chart(lines, says=says, x_label="step", marks=data["not_applied"])
    return data | {
        "absent": "",
        "says": says,
        "chart": chart,
        "by_noise": _by_noise(run, (xs[0], xs[-1])),
    }


def _ends(ys: Sequence[float]) -> tuple[float, float, int]:
    """The mean over the first tenth of the values, over the last, and how many these are."""
    num = max(1, len(ys) // 10)
    return sum(ys[:num]) / num, sum(ys[-num:]) / num, num


def _by_noise(run: Run, span: Point) -> list[dict[str, Any]]:
    """Nine small charts: the samples whose noise level fell into each ninth of [0, 1]."""
    charts = []
    for ninth, (xs, ys) in enumerate(run.steps.by_noise):
        if not xs:
            continue
        name = f"t {ninth / NINTHS:.2f}–{(ninth + 1) / NINTHS:.2f}"
        first, last, _ = _ends(ys)
        change = f"{plain(first, 3)} → {plain(last, 3)}, {counted(len(xs), 'step')}"
        mean = smooth(xs, ys, smoothing_width(len(xs)), 150)
        lines = [Line("", thin(xs, ys, 150), "faint"), Line("", mean, "one")]
        chart = line_chart(
            lines,
            says=f"mean squared error, {name}: {change}",
            height=84,
            num_ticks=2,
            span=span,
        )
        charts.append({"name": name, "change": change, "chart": chart})
    return charts


def validation(run: Run) -> dict[str, Any]:
    """The fixed measurement: the same clips, noise levels and noise each time."""
    records = run.validations
    if not records:
        return {
            "absent": run.absent(
                "validation losses appear as the run measures them", "validate_every"
            )
        }
    curves = [(name, css, points(records, key, "mean")) for key, name, css in PARTS]
    found = [(name, css, curve) for name, css, curve in curves if curve]
    if not found:
        return {"absent": run.absent("no validation has a number yet")}
    none = [
        (name, ": none are held out" * (css == "one"))
        for name, css, curve in curves
        if not curve
    ]
    notes = [f"No {name} are measured{why}." for name, why in none]
    if left := len(run.of_kind("validation")) - len(records):
        other = f"{counted(left, 'validation')} of an earlier set, which had other clips or noise levels, left out: "
        notes.append(f"{other}they do not compare with these.")
    first, last = (f"step {plain(found[-1][2][place][0])}" for place in (0, -1))
    head = ["clips", first, last, "change", "lowest"]
    rows = [[name, *_change(curve)] for name, _, curve in found]
    wide = len(head) if len(records) > 1 else 2
    chart = line_chart(
        [Line(n, p, c, dots=True) for n, c, p in found],
        says="Validation loss by step",
        x_label="step",
    )
    return {
        "absent": "",
        "head": head[:wide],
        "rows": [row[:wide] for row in rows],
        "notes": notes,
        "charts": [("Mean squared error by step", chart), *_by_quantile(records)],
        "averages": _averages(records[-1]),
    }


def _averages(record: Record) -> list[list[str]]:
    """What a validation says of the average and of the weights themselves, and of each of two experts; else nothing."""
    whole = (
        "the average of the weights, which is exported" if record.get("live") else "the model"
    )
    found = {whole: [at(record, key, "normalised") for key, _, _ in PARTS]}
    if record.get("live"):
        found["the weights themselves"] = [
            at(record, "live", key, "normalised") for key, _, _ in PARTS
        ]
    for expert in dict.fromkeys(
        name for key, _, _ in PARTS for name in mapping(at(record, key, "experts"))
    ):
        values = [at(record, key, "experts", expert) for key, _, _ in PARTS]
        found[f"expert {expert}, at its noise levels"] = values
    rows = [
        [name, *(plain(number(value)) for value in values)] for name, values in found.items()
    ]
    return rows if len(rows) > 1 else []


def _change(curve: Sequence[Point]) -> list[str]:
    """First and last value, the change between them, and the lowest with its step."""
    before = curve[0][1]
    now = curve[-1][1]
    lowest = min(curve, key=lambda point: point[1])
    change = f"{now / before - 1:+.1%}" if before else "–"
    return [plain(before), plain(now), change, f"{plain(lowest[1])} at step {plain(lowest[0])}"]


def _by_quantile(records: Sequence[Record]) -> list[tuple[str, dict[str, Any]]]:
    """First and last validation at each of the nine noise levels."""
    lines = []
    for key, name, css in PARTS:
        levels = [
            enumerate(map(number, items(at(record, key, "by_quantile"))), 1)
            for record in records
        ]
        curves = [
            curve
            for each in levels
            if (curve := [(float(x), y) for x, y in each if y is not None])
        ]
        if len(curves) > 1:
            lines.append(Line(f"{name}, first", curves[0], f"pale {css}"))
        if curves:
            lines.append(Line(f"{name}, last", curves[-1], css, dots=True))
    title = "By noise level: first and last validation"
    chart = line_chart(
        lines, says=title, x_label="noise level, low to high", from_zero=True, num_ticks=5
    )
    return [(title, chart)] if lines else []


@dataclass(frozen=True)
class TimesSeen:
    """How often a clip is seen: summed over its ``windows``, so far (None where the journal cannot tell) and by the end."""

    path: str
    so_far: int | None
    planned: float | None
    windows: int

    @property
    def shown(self) -> float:
        """What its bar shows: what has been, else what is planned."""
        return float(self.so_far if self.so_far is not None else self.planned or 0)

    @property
    def whole(self) -> float:
        """How long its bar is."""
        return max(self.shown, self.planned or 0)

    @property
    def amount(self) -> str:
        """So far, and by the end where that differs."""
        differs = self.so_far is not None and self.planned not in (None, self.so_far)
        return plain(self.shown) + (f" of {plain(self.planned)}" if differs else "")

    @property
    def band(self) -> tuple[str, str]:
        """Name and colour of the band of its windows."""
        return band(self.shown / self.windows)


def band(times: float) -> tuple[str, str]:
    """Name and colour of the band of a number of times that one window was seen."""
    name = band_of(times)
    return name, COLOURS[name]


def times_seen(run: Run) -> list[TimesSeen]:
    """Every training clip with how often it is seen, the most seen first; regularization clips are not among them.

    The account of clips names them by path. Where it gives their ids too, the times so far are the journal's; where it
    gives none, only the planned ones are known by path. Without an account clips go by the id in the journal's windows.
    """
    seen = run.steps.windows
    kept = regularization(run.check)
    used = [clip for clip in run.clips if clip["used"]]
    so_far = run.steps.clips
    windows = Counter(map(clip_of, seen))
    found = []
    for clip in used:
        if (key := str(clip["id"])[:12]) not in kept:
            times = so_far[key] if clip["id"] and seen else None
            num = max(1, int(number(clip["windows"]) or 1))
            found.append(TimesSeen(str(clip["path"]), times, number(clip["views"]), num))
    if not used:
        planned = {
            str(key)[:12]: number(value)
            for key, value in mapping(at(run.plan, "views", "clips")).items()
        }
        for key in sorted(planned | so_far):
            found.append(
                TimesSeen(
                    key, so_far[key] if seen else None, planned.get(key), windows[key] or 1
                )
            )
    return sorted(found, key=lambda clip: (-clip.shown, clip.path))


def exposure(run: Run) -> dict[str, Any]:
    """How often every clip is seen as a sorted list of bars, and which band they fall into."""
    clips = [
        clip for clip in times_seen(run) if clip.so_far is not None or clip.planned is not None
    ]
    counts = Counter(clip.band[0] for clip in clips)
    seen = run.steps.clips
    kept = regularization(run.check)
    planned = sum(number(clip.get("views")) or 0 for clip in kept.values())
    empty = not clips and not kept
    starts = (0, *(round(limit) for limit, _ in BANDS))
    return {
        "absent": run.absent("counts appear with the first step, or with the plan")
        if empty
        else "",
        "so_far": _so_far(run),
        "planned": mapping(at(run.plan, "views", "per_window")),
        "advice": at(run.plan, "views", "advice"),
        "regularization": {
            "num": len(kept),
            "seen": sum(seen[clip] for clip in kept),
            "planned": planned,
        },
        "only_planned": all(clip.so_far is None for clip in clips),
        "bands": [
            (start, *one, counts[one[0]])
            for start, one in zip(starts, COLOURS.items(), strict=True)
        ],
        "clips": clips,
        "most": max((clip.whole for clip in clips), default=0) or 1,
    }


def _so_far(run: Run) -> dict[str, Any] | None:
    """How many samples of training clips the steps had, of how many windows, and how often each was seen.

    Of clips that are trained on now, not of those that were taken out or are held out since.
    """
    kept = regularization(run.check)
    here = {str(clip["id"])[:12] for clip in run.clips if clip["used"] and clip["id"]}
    counts = ((clip_of(window), count) for window, count in run.steps.windows.items())
    times = [count for clip, count in counts if clip not in kept and (not here or clip in here)]
    if not times:
        return None
    whole = number(at(run.plan, "windows")) or number(run.last("start").get("windows")) or 0
    windows = whole - sum(number(clip.get("windows")) or 0 for clip in kept.values())
    windows = windows if windows > 0 else len(times)
    least = min(times) if len(times) >= windows else 0
    return {
        "band": band(max(times)),
        "samples": sum(times),
        "windows": windows,
        "least": least,
        "most": max(times),
    }


def time_spent(run: Run) -> dict[str, Any]:
    """The wall time by phase, over all processes of the run; the parts of a step are the journal's."""
    end = run.last("end") if run.journal and run.journal[-1]["kind"] == "end" else {}
    seconds = mapping(end.get("seconds")) or mapping(at(run.life, "seconds"))
    spent = {
        str(key): n
        for key, value in seconds.items()
        if (n := number(value)) is not None and n > 0
    }
    whole = sum((spent or run.steps.seconds).values())
    return {
        "absent": ""
        if whole
        else run.absent("the time of each phase appears with the first steps"),
        "spent": sorted(spent.items(), key=lambda pair: -pair[1]),
        "steps": run.steps.seconds,
        "between": max(0.0, spent.get("training", 0.0) - sum(run.steps.seconds.values())),
        "resumed": bool(run.of_kind("resume")),
        "whole": whole or 1,
    }
