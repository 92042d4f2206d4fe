"""Line charts as inline SVG, without a script.

The drawing is stretched to the width at hand, while the numbers at its axes are HTML laid over it by percentage: so they
stay readable on a telephone and on a wide screen alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from videotune.report.markup import Html, element, join, plain, text

Point = tuple[float, float]
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


@dataclass(frozen=True)
class _Frame:
    """The ranges that the plot shows."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return (value - self.left) / ((self.right - self.left) or 1) * SIZE

    def y(self, value: float) -> float:
        return SIZE - (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or 1) * SIZE


def smooth(xs: Sequence[float], ys: Sequence[float], width: int, columns: int = 400) -> list[Point]:
    """The mean of the ``width`` (odd) values around each point, or of those among them that there are.

    At all points, or at twice as many as columns, evenly spread.
    """
    num, most, reach = len(xs), 2 * columns, width // 2
    places = range(num) if num <= most else [(2 * i + 1) * num // (2 * most) for i in range(most)]
    parts = ((xs[place], ys[max(0, place - reach) : place + reach + 1]) for place in places)
    return [(x, fsum(part) / len(part)) for x, part in parts]


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
        begin, part = num * column // columns, ys[num * column // columns : num * (column + 1) // columns]
        kept.extend((xs[begin + i], part[i]) for i in sorted({part.index(min(part)), part.index(max(part))}))
    return kept


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers within [low, high], about ``wanted`` of them."""
    if not high > low:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / wanted))
    step = min((unit * factor for factor in (1, 2, 5, 10)), key=lambda step: abs((high - low) / step - wanted))
    return [step * place for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def named(values: Sequence[float]) -> list[str]:
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
) -> Html:
    """A chart ``height`` pixels high; ``says`` is its text for those who cannot see it.

    ``marks`` are x values to be pointed out at the foot. A lone spike in a faint line leaves the frame at its edge
    rather than flatten everything else. ``span`` is the range of x where it is not the points' own.
    """
    frame = _frame(lines, from_zero, span)
    down, across = ticks(frame.low, frame.high, num_ticks), ticks(frame.left, frame.right, num_ticks)
    if all(float(x).is_integer() for line in lines for x, _ in line.points):
        across = sorted({float(round(value)) for value in across})
    grid = [_path(f"M0 {frame.y(value):.1f}H{SIZE}", "grid") for value in down]
    feet = [_path(f"M{frame.x(value):.1f} {SIZE}V{SIZE - 45}", "mark") for value in marks]
    drawn = [part for line in lines for part in _draw(line, frame)]
    picture = element(
        "svg",
        *grid,
        *drawn,
        *feet,
        attributes={"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "role": "img", "aria-label": says},
    )
    ys = join(_label(word, f"top:{frame.y(value) / SIZE:.2%}") for word, value in zip(named(down), down, strict=True))
    xs = join(_label(word, _across(frame.x(value) / SIZE)) for word, value in zip(named(across), across, strict=True))
    return element(
        "div",
        _legend(lines),
        element(
            "div",
            element("div", ys, css="ys"),
            element("div", picture, css="plot", attributes={"style": f"height:{height}px"}),
            element("div", xs, css="xs"),
            css="axes",
        ),
        element("div", text(x_label), css="x-label") if x_label else Html(""),
        css="chart",
    )


def _frame(lines: Sequence[Line], from_zero: bool, span: Point | None) -> _Frame:
    """Ranges that hold every line; of the faint ones, all but the outermost hundredth of their points."""
    xs = [x for line in lines for x, _ in line.points]
    ys = []
    for line in lines:
        values = sorted(y for _, y in line.points)
        cut = len(values) // 100 if line.css == "faint" else 0
        ys += values[cut : len(values) - cut]
    if not ys:
        return _Frame(0, 1, 0, 1)
    low, high = min(ys), max(ys)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    low = 0.0 if from_zero and low >= 0 else low - room
    left, right = span or (min(xs), max(xs))
    return _Frame(left, right, low, high + room)


def _draw(line: Line, frame: _Frame) -> list[Html]:
    """A line's stroke, and its dots: strokes of no length with round ends, which stretching leaves round."""
    points = [(frame.x(x), frame.y(y)) for x, y in line.points]
    if not points:
        return []
    parts = [_path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), f"line {line.css}")]
    if line.dots or len(points) == 1:
        parts.append(_path("".join(f"M{x:.1f} {y:.1f}h0" for x, y in points), f"dots {line.css}"))
    return parts


def _path(data: str, css: str) -> Html:
    return element("path", css=css, attributes={"d": data, "vector-effect": "non-scaling-stroke"})


def _across(share: float) -> str:
    """Where the label of an x stands: under it, but within the chart at its right end."""
    return f"left:{share:.2%}" + (";transform:translateX(-100%)" if share > 0.96 else "")


def _label(words: str, style: str) -> Html:
    return element("span", text(words), attributes={"style": style})


def _legend(lines: Sequence[Line]) -> Html:
    named = [line for line in lines if line.label]
    if not named:
        return Html("")
    keys = (element("span", element("i", css=f"key {line.css}"), text(line.label)) for line in named)
    return element("div", *keys, css="legend")
