import pytest
from hypothesis import given
from hypothesis import strategies as st

from videotune.reporter.curves import Line, axis_labels, line_chart, smooth, thin, ticks

finite = st.floats(-1e6, 1e6)


def strokes(chart: dict, css: str) -> list[tuple[float, float]]:
    """The corners of a line, in the drawing's coordinates."""
    data = dict(chart["paths"])[f"line {css}"]
    return [(float(x), float(y)) for x, y in (corner.split() for corner in data[1:].split("L"))]


def test_smoothing_is_the_mean_of_the_neighbours() -> None:
    xs, ys = [0, 1, 2, 3, 4], [3.0, 0.0, 3.0, 6.0, 9.0]
    assert smooth(xs, ys, 3) == [(0, 1.5), (1, 2.0), (2, 3.0), (3, 6.0), (4, 7.5)]
    assert smooth(xs, ys, 1) == list(zip(xs, ys, strict=True))
    assert smooth([], [], 5) == []
    far = [(25.0 + 50 * i, 25.0 + 50 * i) for i in range(20)]
    assert smooth(range(1000), [float(x) for x in range(1000)], 5, 10) == far


@given(st.lists(finite, min_size=1, max_size=2000))
def test_thinning_keeps_the_extremes_and_the_order(values: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    thinned = thin([x for x, _ in points], values, columns=50)
    assert len(thinned) <= 100
    assert thinned == sorted(thinned)
    assert set(thinned) <= set(points)
    assert {min(values), max(values)} <= {y for _, y in thinned}


@given(finite, st.floats(1e-6, 1e6))
def test_ticks_lie_within_and_their_labels_tell_them_apart(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 9
    room = 1e-6 * width + 1e-9 * abs(low)
    assert all(low - room <= value <= low + width + room for value in found)
    if abs(low) < 1e3:
        assert len(set(axis_labels(found))) == len(set(found))


def test_points_and_marks_are_drawn_where_they_belong() -> None:
    line = Line("mse", [(0, 0.0), (50, 4.0), (100, 2.0)], "one")
    chart = line_chart([line], says="a curve", from_zero=True, marks=[50])
    (x0, y0), (x1, y1), (x2, y2) = strokes(chart, "one")
    assert (x0, x1, x2, y0) == (0, 500, 1000, 1000)
    assert (y0 - y1) / (y0 - y2) == pytest.approx(2, abs=0.01)
    assert dict(chart["paths"])["mark"].startswith("M500.0 ")
    assert chart["legend"] == [("one", "mse")]


def test_a_spike_of_the_raw_curve_does_not_flatten_the_rest() -> None:
    raw = [(float(x), 1.0 + x / 400) for x in range(400)]
    raw[200] = (200.0, 1e6)
    heights = [y for _, y in strokes(line_chart([Line("raw", raw, "faint")], says=""), "faint")]
    assert max(heights) - sorted(heights)[5] > 800
