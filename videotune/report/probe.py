"""The section on samples that were measured: the nearest clip beside each, and ratios to the base's and the clips'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from videotune.report.markup import (
    NOTHING,
    Html,
    badge,
    bullets,
    counted,
    element,
    local_link,
    missing,
    paragraph,
    plain,
    section,
    switched_off,
    table,
    text,
)
from videotune.report.read import Record, Run, items, mapping, number, of_kind, setting
from videotune.report.svg import Line, line_chart

ANCHOR, TITLE = "probe", "Samples, measured"
COLOURS = ("one", "two", "three")


def probe_section(run: Run) -> Html:
    """What probes found, the latest in full and all as curves; where nothing was measured, why."""
    everything = of_kind(run, "probe")
    if not everything and number(setting(run, "sample_metrics.budget")) == 0:
        return section(ANCHOR, TITLE, switched_off("sample_metrics.budget"))
    if not everything:
        return section(ANCHOR, TITLE, missing("samples are measured at checkpoints"))
    read = [record for record in everything if "not_measured" not in record]
    left_out = _not_measured([record for record in everything if "not_measured" in record])
    if not read:
        return section(ANCHOR, TITLE, left_out)
    alike = [record for record in read if record.get("probe") == read[-1].get("probe")]
    last = alike[-1]
    return section(
        ANCHOR,
        TITLE,
        paragraph(text(_by_what(last)), css="soft"),
        _verdict(last),
        element("div", _likeness(alike), _ratios(alike), css="pair"),
        _table(alike),
        _nearest(run, last),
        left_out,
    )


def _by_what(record: Record) -> str:
    """What the likeness is worth."""
    name = record.get("embedding", "?")
    if record.get("heuristic"):
        return (
            f"Likeness is by {name}, a heuristic of edges, light and colour: it finds a clip shown again, cropped or "
            "mirrored too; it does not know what a picture shows."
        )
    return f"Likeness is by the encoder {name}."


def _verdict(record: Record) -> Html:
    """How many likely copies there are, and what that is held against."""
    found, samples = mapping(record.get("replication")), len(items(record.get("samples")))
    copies, line = number(found.get("copies")) or 0, number(found.get("line"))
    if line is None:
        return paragraph(text("No clip is unlike the others by its video, so nothing says how near a copy would be."))
    own = number(found.get("base_copies")) or 0
    said = (
        f"{plain(copies)} of {counted(samples, 'sample')} of step {plain(number(record.get('step')))} nearer to a training "
        f"clip than {plain(line, 3)}, the line above which a sample is a likely copy; of the base's {plain(own)}."
    )
    alike = [number(mapping(found.get(key)).get("p99")) for key in ("held_out", "others")]
    if max((x for x in alike if x is not None), default=0.0) > 0.95:
        said += " The clips are so alike among themselves that a copy can hardly be told."
    return paragraph(
        badge("likely copies" if copies > own else "no copies seen", "bad" if copies > own else "calm"), text(said)
    )


def _likeness(records: Sequence[Record]) -> Html:
    """Mean likeness to the nearest clip by step, between the base's and the line."""
    parts = [(number(record.get("step")) or 0.0, mapping(record.get("replication"))) for record in records]
    told = [("samples", "mean", "one"), ("base", "base", "pale one"), ("likely copy above", "line", "two")]
    lines = [
        Line(label, [(step, y) for step, part in parts if (y := number(part.get(key))) is not None], css, key == "mean")
        for label, key, css in told
    ]
    for key, label, css in (
        ("held_out", "held-out clips, median", "three"),
        ("others", "other clips, median", "pale two"),
    ):
        points = [(step, y) for step, part in parts if (y := number(mapping(part.get(key)).get("median"))) is not None]
        lines.append(Line(label, points, css))
    title = "Likeness to the nearest training clip"
    chart = line_chart([line for line in lines if line.points], says=title, x_label="step")
    return element("div", element("h4", text(title)), chart)


def _ratios(records: Sequence[Record]) -> Html:
    """Diversity and motion as ratios to the base's."""
    lines = []
    for label, css in (("diversity", "one"), ("energy", "two"), ("saturation", "three")):
        points = [
            (number(r.get("step")) or 0.0, y)
            for r in records
            if (y := number(_figure(r, label).get("to_base"))) is not None
        ]
        if points:
            lines.append(Line(label, points, css, dots=True))
    if not lines:
        return NOTHING
    title = "As ratios to the base's"
    return element("div", element("h4", text(title)), line_chart(lines, says=title, x_label="step", from_zero=True))


def _figure(record: Record, name: str) -> Record:
    return mapping(record.get(name) if name == "diversity" else mapping(record.get("motion")).get(name))


def _table(records: Sequence[Record]) -> Html:
    """The figures by step: value, and ratio to the base's and the clips'."""
    names = {
        "diversity": "diversity (Vendi)",
        "energy": "motion energy",
        "flicker": "flicker",
        "saturation": "saturation",
    }
    rows = []
    for record in records:
        cells = [text(plain(number(record.get("step"))))]
        for name in names:
            one = _figure(record, name)
            ratios = [
                f"{y:.2f} × {of}"
                for of, key in (("base", "to_base"), ("clips", "to_data"))
                if (y := number(one.get(key))) is not None
            ]
            cells.append(
                text(
                    f"{plain(number(one.get('value')), 3)} ({', '.join(ratios)})"
                    if ratios
                    else plain(number(one.get("value")), 3)
                )
            )
        rows.append(cells)
    return table(["step", *names.values()], rows)


def _nearest(run: Run, record: Record) -> Html:
    """Each sample of the latest probe with its nearest clip."""
    rows = []
    for one in map(mapping, items(record.get("samples"))):
        path = str(one.get("path") or "")
        link = local_link(path)
        shown = text("no longer there")
        if link is not None and (run.folder / path).is_file():
            source = {"src": link, "preload": "metadata"}
            shown = element("video", attributes=source, flags="controls loop muted playsinline")
        clip = str(one.get("clip", "?"))
        near = element("span", text(PurePath(clip).name), attributes={"title": clip})
        mark = badge("likely copy", "bad") if one.get("copy") else NOTHING
        words = text(f"{one.get('prompt', '')} (seed {plain(number(one.get('seed')))})")
        rows.append([shown, words, near, text(plain(number(one.get("similarity")), 3)), mark])
    return table(["sample", "prompt", "nearest training clip", "likeness", ""], rows, css="cards")


def _not_measured(records: Sequence[Record]) -> Html:
    """Which steps were not measured, and why; equal reasons once, with the figures of the latest."""
    told: dict[str, list[str]] = {}
    for record in records:
        reason = str(record["not_measured"])
        told.setdefault(reason.partition(":")[0], []).append(f"step {plain(number(record.get('step')))}")
    latest = {str(record["not_measured"]).partition(":")[0]: str(record["not_measured"]) for record in records}
    lines = [
        f"Not measured at {', '.join(steps[:8])}{', …' if len(steps) > 8 else ''}: {latest[key]}."
        for key, steps in told.items()
    ]
    return bullets([text(line) for line in lines], css="soft")
