"""Line charts as plain data, which ``chart`` in macros.html.j2 draws as inline SVG without a script.

The drawing is stretched to the width at hand, while the numbers at its axes are HTML laid over it by percentage: so they
stay readable on a telephone and on a wide screen alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from videotune.reporter.read import Point
from videotune.text import plain

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


def smooth(xs: Sequence[float], ys: Sequence[float], width: int, columns: int = 400) -> list[Point]:
    """The mean of the ``width`` (odd) values around each point, or of those among them that there are.

    At all points, or at twice as many as columns, evenly spread.
    """
    num, most, reach = len(xs), 2 * columns, width // 2
    places = range(num) if num <= most else [(2 * i + 1) * num // (2 * most) for i in range(most)]
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
        kept.extend((xs[begin + i], part[i]) for i in sorted({part.index(min(part)), part.index(max(part))}))
    return kept


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers within [low, high], about ``wanted`` of them."""
    if not high > low:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / wanted))
    step = min((unit * factor for factor in (1, 2, 5, 10)), key=lambda step: abs((high - low) / step - wanted))
    return [step * place for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


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

    down, across = ticks(low, high, num_ticks), ticks(left, right, num_ticks)
    if all(float(x).is_integer() for x in xs):
        across = sorted({float(round(value)) for value in across})
    paths = [("grid", f"M0 {y(value):.1f}H{SIZE}") for value in down]
    for line in lines:
        corners = [f"{x(at):.1f} {y(value):.1f}" for at, value in line.points]
        if corners:
            paths.append((f"line {line.css}", "M" + "L".join(corners)))
        if len(corners) == 1 or (line.dots and corners):  # strokes of no length, whose round ends no stretching bends
            paths.append((f"dots {line.css}", "".join(f"M{corner}h0" for corner in corners)))
    paths += [("mark", f"M{x(value):.1f} {SIZE}V{SIZE - 45}") for value in marks]
    return {
        "says": says,
        "x_label": x_label,
        "height": height,
        "size": SIZE,
        "paths": paths,
        "legend": [(line.css, line.label) for line in lines if line.label],
        "ys": [(word, f"{y(value) / SIZE:.2%}") for word, value in zip(axis_labels(down), down, strict=True)],
        "xs": [(word, x(value) / SIZE) for word, value in zip(axis_labels(across), across, strict=True)],
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
    low, high = min(ys), max(ys)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return 0.0 if from_zero and low >= 0 else low - room, high + room
