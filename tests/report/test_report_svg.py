import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from videotune.report.svg import Line, line_chart, named, smooth, smoothing_width, thin, ticks

finite = st.floats(-1e6, 1e6)


def strokes(chart: str, css: str) -> list[tuple[float, float]]:
    """The corners of a line, in the drawing's coordinates."""
    data = re.search(rf'class="line {css}" d="M([^"]+)"', chart)
    assert data, chart
    return [(float(x), float(y)) for x, y in (corner.split() for corner in data[1].split("L"))]


def test_smoothing_is_the_mean_of_the_neighbours() -> None:
    xs, ys = [0, 1, 2, 3, 4], [3.0, 0.0, 3.0, 6.0, 9.0]
    assert smooth(xs, ys, 3) == [(0, 1.5), (1, 2.0), (2, 3.0), (3, 6.0), (4, 7.5)]
    assert smooth(xs, ys, 1) == list(zip(xs, ys, strict=True))
    assert smooth([], [], 5) == []
    assert smooth(range(1000), [float(x) for x in range(1000)], 5, 10) == [
        (25.0 + 50 * i, 25.0 + 50 * i) for i in range(20)
    ]


@given(st.lists(finite, min_size=1, max_size=300))
def test_smoothing_stays_within_the_range_and_keeps_every_x(values: list[float]) -> None:
    smoothed = smooth(range(len(values)), values, smoothing_width(len(values)))
    assert [x for x, _ in smoothed] == list(range(len(values)))
    room = 1e-6 * max(1.0, *map(abs, values))
    assert all(min(values) - room <= y <= max(values) + room for _, y in smoothed)


def test_the_width_of_smoothing_is_odd_and_grows() -> None:
    assert [smoothing_width(n) for n in (1, 9, 10, 100, 400, 2000, 90000)] == [1, 1, 3, 5, 21, 101, 201]


@given(st.lists(finite, min_size=1, max_size=2000))
def test_thinning_keeps_the_extremes_and_the_order(values: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    thinned = thin([x for x, _ in points], values, columns=50)
    assert len(thinned) <= 100
    assert thinned == sorted(thinned)
    assert set(thinned) <= set(points)
    assert {min(values), max(values)} <= {y for _, y in thinned}


@given(finite, st.floats(1e-6, 1e6))
def test_ticks_lie_within_and_are_evenly_spaced(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 9
    room = 1e-6 * width + 1e-9 * abs(low)
    assert all(low - room <= value <= low + width + room for value in found)


def test_ticks_are_round_numbers() -> None:
    assert ticks(0, 400) == [0, 100, 200, 300, 400]
    assert ticks(1, 5) == [1, 2, 3, 4, 5]
    assert ticks(0.17, 0.47) == pytest.approx([0.2, 0.3, 0.4])
    assert ticks(7, 7) == [7]


@given(st.floats(-1e3, 1e3), st.floats(1e-6, 1e3))
def test_labels_of_an_axis_tell_its_values_apart(low: float, width: float) -> None:
    values = ticks(low, low + width)
    assert len(set(named(values))) == len(set(values))
    assert named([1.54, 1.535, 1.53]) == ["1.54", "1.535", "1.53"]


def test_points_are_drawn_where_they_belong() -> None:
    chart = line_chart([Line("mse", [(0, 0.0), (50, 4.0), (100, 2.0)], "one")], says="a curve", from_zero=True)
    (x0, y0), (x1, y1), (x2, y2) = strokes(chart, "one")
    assert (x0, x1, x2) == (0, 500, 1000)
    assert y0 == 1000
    assert (y0 - y1) / (y0 - y2) == pytest.approx(2, abs=0.01)
    assert 'aria-label="a curve"' in chart
    assert ">mse</span>" in chart


def test_a_spike_of_the_raw_curve_does_not_flatten_the_rest() -> None:
    raw = [(float(x), 1.0 + x / 400) for x in range(400)]
    raw[200] = (200.0, 1e6)
    chart = line_chart([Line("raw", raw, "faint")], says="")
    heights = [y for _, y in strokes(chart, "faint")]
    assert max(heights) - sorted(heights)[5] > 800


def test_marks_stand_at_their_step() -> None:
    chart = line_chart([Line("", [(0, 1.0), (10, 2.0)], "one")], says="", marks=[5])
    assert re.search(r'class="mark" d="M500\.0 ', chart)


def test_a_lone_point_is_a_dot_and_an_empty_chart_no_error() -> None:
    assert 'class="dots one"' in line_chart([Line("", [(3, 1.0)], "one")], says="")
    assert 'class="line' not in line_chart([Line("", [], "one")], says="")


def test_labels_cannot_become_markup() -> None:
    chart = line_chart([Line("<b>", [(0, 1.0)], "one")], says='"><script>', x_label="<i>")
    assert "<b>" not in chart
    assert "<script>" not in chart
    assert "<i>" not in chart
