"""Line charts as plain data.

``chart`` in macros.html.j2 draws them as inline SVG without a script. The drawing is
stretched to the available width; the numbers at its axes are HTML positioned by
percentage, so they stay readable on narrow and on wide screens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from videotune.reporter.read import Point
from videotune.text import plain

SIZE = 1000
"""Width and height of the drawing in its own coordinates."""

MARK_GAP = 25
"""Between a point and the mark below it, in coordinates of the drawing."""

MARK_LENGTH = 60
"""Length of the mark of a point."""

COLUMNS = 400
"""Pixel columns that a thinned curve is drawn for."""


@dataclass(frozen=True)
class Line:
    """A curve of a chart."""

    label: str
    """Its name in the legend; a curve without one is not listed."""

    points: Sequence[Point]
    """In order of x."""

    css: str
    """The stroke: "one", "two", …, "faint"."""

    dots: bool = False
    """Whether each point is marked."""


def smooth(
    xs: Sequence[float], ys: Sequence[float], width: int, columns: int = COLUMNS
) -> list[Point]:
    """Return the moving mean of a curve.

    Args:
        xs: the x values.
        ys: the y values.
        width: number of values to average, odd; fewer at the ends.
        columns: with more than twice as many points, only as many are returned.
    """
    num = len(xs)
    max_points = 2 * columns
    reach = width // 2
    indices: Sequence[int] = range(num)
    if num > max_points:
        indices = [(2 * i + 1) * num // (2 * max_points) for i in range(max_points)]

    curve = []
    for index in indices:
        values = ys[max(0, index - reach) : index + reach + 1]
        curve.append((xs[index], math.fsum(values) / len(values)))
    return curve


def smoothing_width(num_points: int) -> int:
    """Return an odd number of points to average: about a twentieth, at most 201.

    It is 1 for fewer than 10 points.
    """
    if num_points < 10:
        return 1
    return min(201, max(3, num_points // 20) | 1)


def thin(
    xs: Sequence[float], ys: Sequence[float], columns: int = COLUMNS
) -> list[Point]:
    """Reduce a curve to the lowest and the highest point of each column."""
    num = len(xs)
    if num <= 2 * columns:
        return list(zip(xs, ys, strict=True))

    points: list[Point] = []
    for column in range(columns):
        start = num * column // columns
        end = num * (column + 1) // columns
        values = ys[start:end]
        lowest = values.index(min(values))
        highest = values.index(max(values))
        for index in sorted({lowest, highest}):
            points.append((xs[start + index], values[index]))
    return points


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return round numbers within [low, high], about ``wanted`` of them."""
    if not high > low:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / wanted))
    steps = [unit * factor for factor in (1, 2, 5, 10)]
    step = min(steps, key=lambda step: abs((high - low) / step - wanted))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [step * index for index in range(first, last + 1)]


def axis_labels(values: Sequence[float]) -> list[str]:
    """Format the values of an axis with the fewest distinct digits, at least 3."""
    labels: list[str] = []
    for digits in range(3, 16):
        labels = [plain(value, digits) for value in values]
        if len(set(labels)) == len(values):
            break
    return labels


@dataclass(frozen=True)
class _Scale:
    """Maps a chart's values to the drawing's coordinates."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        width = (self.right - self.left) or 1
        return (value - self.left) / width * SIZE

    def y(self, value: float) -> float:
        height = (self.high - self.low) or 1
        clamped = min(max(value, self.low), self.high)
        return SIZE - (clamped - self.low) / height * SIZE


def line_chart(
    lines: Sequence[Line],
    *,
    says: str,
    x_label: str = "",
    height: int = 240,
    marks: Sequence[float] = (),
    marked_points: Sequence[Point] = (),
    from_zero: bool = False,
    num_ticks: int = 4,
    span: Point | None = None,
) -> dict[str, Any]:
    """Build a chart for the macro ``chart``.

    Args:
        lines: the curves. A lone spike of a faint one is cut off at the frame, so that
            it does not flatten everything else.
        says: text for screen readers.
        x_label: label of the x axis.
        height: in pixels.
        marks: x values to mark at the foot.
        marked_points: points of curves to mark, each by a stroke below it.
        from_zero: whether the y axis begins at 0 if no value is negative.
        num_ticks: about how many numbers at each axis.
        span: range of x; None: that of the points.
    """
    low, high = _y_range(lines, from_zero)
    xs: list[float] = []
    for line in lines:
        xs.extend(x for x, _ in line.points)
    left, right = span or (min(xs, default=0), max(xs, default=1))
    scale = _Scale(left, right, low, high)

    y_ticks = ticks(low, high, num_ticks)
    x_ticks = ticks(left, right, num_ticks)
    if all(float(x).is_integer() for x in xs):
        x_ticks = sorted({float(round(value)) for value in x_ticks})

    paths = [("grid", f"M0 {scale.y(value):.1f}H{SIZE}") for value in y_ticks]
    for line in lines:
        paths.extend(_line_paths(line, scale))
    for value in marks:
        paths.append(("mark", f"M{scale.x(value):.1f} {SIZE}V{SIZE - 45}"))
    for x, y in marked_points:
        top = min(scale.y(y) + MARK_GAP, SIZE - MARK_LENGTH)
        paths.append(("mark", f"M{scale.x(x):.1f} {top:.1f}v{MARK_LENGTH}"))

    y_labels = zip(axis_labels(y_ticks), y_ticks, strict=True)
    x_labels = zip(axis_labels(x_ticks), x_ticks, strict=True)
    return {
        "says": says,
        "x_label": x_label,
        "height": height,
        "size": SIZE,
        "paths": paths,
        "legend": [(line.css, line.label) for line in lines if line.label],
        "ys": [(label, f"{scale.y(value) / SIZE:.2%}") for label, value in y_labels],
        "xs": [(label, scale.x(value) / SIZE) for label, value in x_labels],
    }


def _line_paths(line: Line, scale: _Scale) -> list[tuple[str, str]]:
    """Return (CSS classes, path data) of a curve and of its dots."""
    corners = [f"{scale.x(x):.1f} {scale.y(y):.1f}" for x, y in line.points]
    if not corners:
        return []
    paths = [(f"line {line.css}", "M" + "L".join(corners))]
    if line.dots or len(corners) == 1:
        # Strokes of length 0 have round ends that stretching does not distort.
        dots = "".join(f"M{corner}h0" for corner in corners)
        paths.append((f"dots {line.css}", dots))
    return paths


def _y_range(lines: Sequence[Line], from_zero: bool) -> Point:
    """Return a range of y that holds every curve.

    Of faint curves the outermost hundredth of the points is ignored at either end.
    """
    ys: list[float] = []
    for line in lines:
        values = sorted(y for _, y in line.points)
        cut = len(values) // 100 if line.css == "faint" else 0
        ys.extend(values[cut : len(values) - cut])
    if not ys:
        return 0, 1

    low = min(ys)
    high = max(ys)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    if from_zero and low >= 0:
        return 0.0, high + margin
    return low - margin, high + margin
