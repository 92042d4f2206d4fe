"""The sections with charts: the training loss, and the ruler before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from videotune.report.markup import (
    NOTHING,
    Html,
    bullets,
    counted,
    element,
    join,
    missing,
    paragraph,
    plain,
    section,
    switched_off,
    table,
    text,
)
from videotune.report.read import Record, Run, items, mapping, number, of_kind, setting
from videotune.report.svg import Line, Point, line_chart, smooth, smoothing_width, thin
from videotune.train.logging.step_sums import NINTHS


def loss_section(run: Run) -> Html:
    """The mean squared error of each step, raw and smoothed, as a whole and by noise level.

    Steps that showed regularization clips alone are left out: their error says how the model is kept as it is.
    """
    title = "Loss"
    steps = run.steps
    xs, ys = steps.mse
    left_out, not_applied = _left_out(len(steps.alone)), list(steps.skipped)
    if not xs:
        return section("loss", title, missing("the curve appears with the first step"), left_out)
    width = smoothing_width(len(xs))
    lines = [Line("each step", thin(xs, ys), "faint", dots=len(xs) < 60)]
    if width > 1:
        lines.append(Line(f"mean of {width} steps", smooth(xs, ys, width), "one"))
    else:
        lines = [Line("each step", thin(xs, ys), "one", dots=True)]
    first, last, num = _ends(ys)
    over = f"the first {num} of them {plain(first)}, over the last {num} {plain(last)}"
    said = f"Mean squared error of the prediction at {counted(len(xs), 'step')}: over {over}."
    if num < 2:
        said = f"Mean squared error of the prediction: {plain(first)} at the first step, {plain(last)} at the last."
    return section(
        "loss",
        title,
        paragraph(text(said)),
        left_out,
        line_chart(lines, says=said, x_label="step", marks=not_applied),
        _not_applied(not_applied),
        _by_noise(run, (xs[0], xs[-1])),
    )


def _left_out(num: int) -> Html:
    """How many steps the curve does not show."""
    if not num:
        return NOTHING
    line = f"{counted(num, 'step')} of regularization clips alone {'is' if num == 1 else 'are'} left out."
    return paragraph(text(line), css="soft")


def _points(records: Sequence[Record], value: Callable[[Record], float | None]) -> list[Point]:
    """(step, value) of the records that have both, in order of steps."""
    pairs = ((number(record.get("step")), value(record)) for record in records)
    return sorted((x, y) for x, y in pairs if x is not None and y is not None)


def _ends(ys: Sequence[float]) -> tuple[float, float, int]:
    """The mean over the first tenth of the values, over the last, and how many these are."""
    num = max(1, len(ys) // 10)
    return sum(ys[:num]) / num, sum(ys[-num:]) / num, num


def _not_applied(steps: Sequence[float]) -> Html:
    """What the red marks at the foot mean."""
    if not steps:
        return NOTHING
    some = ", ".join(plain(step) for step in steps[:12]) + (", …" if len(steps) > 12 else "")
    line = f"{counted(len(steps), 'step')} not applied, the loss or gradient not being finite (red marks): {some}."
    return paragraph(text(line), css="bad")


def _by_noise(run: Run, span: Point) -> Html:
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
        chart = line_chart(lines, says=f"mean squared error, {name}: {change}", height=84, num_ticks=2, span=span)
        charts.append(element("div", element("h4", text(f"{name} "), element("span", text(change))), chart))
    if not charts:
        return NOTHING
    intro = (
        "t = 0 is data, 1 is noise. Each chart has its own scale; the numbers are means over its first and last tenth."
    )
    return join([element("h3", text("By noise level")), paragraph(text(intro), css="soft"), _multiples(charts)])


def _multiples(charts: Sequence[Html]) -> Html:
    return element("div", *charts, css="multiples")


def ruler_section(run: Run) -> Html:
    """The fixed measurement: the same clips, noise levels and noise at every reading."""
    title = "Ruler: before and after"
    everything = of_kind(run, "ruler")
    readings = [record for record in everything if record.get("ruler") == everything[-1].get("ruler")]
    if not readings and number(setting(run, "validate_every")) == 0:
        return section("ruler", title, switched_off("validate_every"))
    if not readings:
        return section("ruler", title, missing("readings of the ruler appear as the run makes them"))
    sets = [("held_out", "held-out clips", "one"), ("train", "training clips", "two")]
    lines, rows, after = [], [], []
    for key, name, css in sets:
        points = _points(readings, lambda record, key=key: number(mapping(record.get(key)).get("mean")))  # type: ignore[misc]
        if not points:
            after.append(text(f"No {name} are measured" + (": none are held out." if key == "held_out" else ".")))
            continue
        lines.append(Line(name, points, css, dots=True))
        rows.append([text(name), *map(text, _change(points))])
        head = ["clips", f"step {plain(points[0][0])}", f"step {plain(points[-1][0])}", "change", "lowest"]
    if not rows:
        return section("ruler", title, missing("no reading has a number yet"))
    if left := len(everything) - len(readings):
        other = f"{counted(left, 'reading')} of an earlier ruler, which had other clips or noise levels, left out: "
        after.append(text(f"{other}they do not compare with these."))
    return section(
        "ruler",
        title,
        paragraph(text("The same clips, noise levels and noise at every reading: only the model differs."), css="soft"),
        table(head, rows) if len(readings) > 1 else table(head[:2], [row[:2] for row in rows]),
        bullets(after),
        element(
            "div",
            element(
                "div", element("h4", text("Mean squared error by step")), line_chart(lines, says=title, x_label="step")
            ),
            _by_quantile(readings),
            css="pair",
        ),
        _parts(readings[-1]),
    )


def _parts(reading: Record) -> Html:
    """What a reading says of the average and of the weights themselves, and of each of two experts; nothing of neither."""
    live = mapping(reading.get("live"))
    whole = "the average of the weights, which is exported" if live else "the model"
    found = [(whole, {key: mapping(reading.get(key)).get("normalised") for key in ("held_out", "train")})]
    if live:
        weights = {key: mapping(live.get(key)).get("normalised") for key in ("held_out", "train")}
        found.append(("the weights themselves", weights))
    experts = {key: mapping(mapping(reading.get(key)).get("experts")) for key in ("held_out", "train")}
    for name in dict.fromkeys(name for own in experts.values() for name in own):
        found.append((f"expert {name}, at its noise levels", {key: own.get(name) for key, own in experts.items()}))
    if len(found) < 2:
        return NOTHING
    rows = [
        [text(name), *(text(plain(number(values[key]))) for key in ("held_out", "train"))] for name, values in found
    ]
    title = "At the last reading, relative to the base: below 1 is better"
    return join([element("h4", text(title)), table(["of", "held-out clips", "training clips"], rows)])


def _change(points: Sequence[Point]) -> tuple[str, str, str, str]:
    """First and last value, the change between them, and the lowest with its step."""
    before, now, lowest = points[0][1], points[-1][1], min(points, key=lambda point: point[1])
    change = f"{now / before - 1:+.1%}" if before else "–"
    return plain(before), plain(now), change, f"{plain(lowest[1])} at step {plain(lowest[0])}"


def _by_quantile(readings: Sequence[Record]) -> Html:
    """First and last reading at each of the nine noise levels."""
    lines = []
    for key, name, css in (("held_out", "held out", "one"), ("train", "training", "two")):
        curves = [
            curve
            for record in readings
            if (curve := _points(_numbered(mapping(record.get(key))), lambda entry: number(entry.get("value"))))
        ]
        if len(curves) > 1:
            lines.append(Line(f"{name}, first", curves[0], f"pale {css}"))
        if curves:
            lines.append(Line(f"{name}, last", curves[-1], css, dots=True))
    if not lines:
        return NOTHING
    title = "By noise level: first and last reading"
    chart = line_chart(lines, says=title, x_label="noise level, low to high", from_zero=True, num_ticks=5)
    return element("div", element("h4", text(title)), chart)


def _numbered(reading: Record) -> list[Record]:
    """A reading's quantiles as records with a place of their own."""
    return [{"step": place, "value": value} for place, value in enumerate(items(reading.get("by_quantile")), start=1)]
