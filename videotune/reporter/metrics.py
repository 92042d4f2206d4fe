"""The chapter of the sample metrics: copies, diversity and motion of measured samples."""

from collections.abc import Sequence
from typing import Any

from videotune.reporter.charts import Line, line_chart
from videotune.reporter.previews import link_in, step_name
from videotune.reporter.read import (
    Fields,
    Record,
    Run,
    at,
    items,
    mapping,
    number,
    points,
)
from videotune.reporter.sample_findings import are_clips_alike
from videotune.runs.start_state import StartState
from videotune.sampling.picture_faults import describe_faults
from videotune.text import plain, some

METRICS = {
    "diversity (Vendi)": ("diversity",),
    "motion energy": ("motion", "energy"),
    "flicker": ("motion", "flicker"),
    "saturation": ("motion", "saturation"),
}
"""Keys of each sample metric in a record."""

LIKENESS = {
    "samples": (("mean",), "one"),
    "before training": (("base",), "pale one"),
    "likely copy above": (("line",), "two"),
    "clips kept aside, median": (("held_out", "median"), "three"),
    "other clips, median": (("others", "median"), "pale two"),
}
"""Keys and stroke of each curve of likeness."""


def metrics(run: Run) -> dict[str, Any]:
    """Return the chapter of the sample metrics."""
    records = run.of_kind("sample_metrics")
    measured = [record for record in records if "not_measured" not in record]
    not_measured = [record for record in records if "not_measured" in record]
    comparable = []
    for record in measured:
        if record.get("sample_metrics") == measured[-1].get("sample_metrics"):
            comparable.append(record)
    latest_row = comparable[-1] if comparable else None
    latest = mapping(latest_row)

    nearest = [_measured_sample(run, entry) for entry in items(latest.get("samples"))]
    rows = []
    for record in comparable:
        figures = [_figure(record, keys, run.start) for keys in METRICS.values()]
        rows.append([plain(number(record.get("step"))), *figures])

    absent = ""
    if not records:
        absent = run.absent(
            "samples are measured at checkpoints", "sample_metrics.budget"
        )
    return {
        "absent": absent,
        "not_measured": _not_measured(not_measured),
        "latest": latest,
        "copies": {
            key: number(at(latest, "replication", key))
            for key in ("line", "copies", "base_copies")
        },
        "too_alike": are_clips_alike(latest),
        "charts": _metric_charts(comparable),
        "head": ["step", *METRICS],
        "rows": rows,
        "nearest": nearest,
        "faulty": _faulty_samples(
            run, [row for row in records if row is not latest_row]
        ),
    }


def _measured_sample(run: Run, entry: Any) -> tuple[Fields, str | None, str]:
    """Return a sample of the metrics, the address of its file, and its fault in words."""
    sample = mapping(entry)
    link = link_in(run, str(sample["path"] or ""))
    return sample, link, describe_faults(sample)


def _faulty_samples(
    run: Run, records: Sequence[Record]
) -> list[tuple[str, list[tuple[Fields, str | None, str]]]]:
    """Return the samples with a fault of records of the metrics, by step.

    The report counts them, so they must be seen although their records are not shown.
    """
    faulty = []
    for record in records:
        samples = [
            _measured_sample(run, entry) for entry in items(record.get("samples"))
        ]
        marked = [sample for sample in samples if sample[2]]
        if marked:
            faulty.append(
                (step_name(number(record.get("step")) or 0, run.start), marked)
            )
    return faulty


def _metric_charts(records: Sequence[Record]) -> list[tuple[str, dict[str, Any]]]:
    """Return the charts of likeness and of the ratios to the samples before training."""
    likeness = []
    for name, (keys, css) in LIKENESS.items():
        curve = points(records, "replication", *keys)
        likeness.append(Line(name, curve, css, dots=css == "one"))

    ratio_keys = [keys for name, keys in METRICS.items() if name != "flicker"]
    ratios = []
    for keys, css in zip(ratio_keys, ("one", "two", "three"), strict=True):
        curve = points(records, *keys, "to_base")
        ratios.append(Line(keys[-1], curve, css, dots=True))

    charts = []
    for title, lines, from_zero in (
        ("Likeness to the nearest training clip", likeness, False),
        ("As ratios to those before training", ratios, True),
    ):
        lines_with_points = [line for line in lines if line.points]
        if lines_with_points:
            chart = line_chart(
                lines_with_points, says=title, x_label="step", from_zero=from_zero
            )
            charts.append((title, chart))
    return charts


def _figure(record: Record, keys: Sequence[str], start: StartState) -> str:
    """Return a metric's value with its ratios to the first samples and to the clips."""
    fields = mapping(at(record, *keys))
    ratios = []
    for key, name in (("to_base", start.label), ("to_data", "clips")):
        ratio = number(fields.get(key))
        if ratio is not None:
            ratios.append(f"{ratio:.2f} × {name}")

    value = plain(number(fields.get("value")), 3)
    return f"{value} ({', '.join(ratios)})" if ratios else value


def _not_measured(records: Sequence[Record]) -> list[str]:
    """Return why steps were not measured, one line per reason.

    The part after the colon is the one of the latest step.
    """
    steps_by_reason: dict[str, list[str]] = {}
    latest: dict[str, str] = {}
    for record in records:
        reason = str(record["not_measured"])
        kind = reason.partition(":")[0]
        step = plain(number(record.get("step")))
        steps_by_reason.setdefault(kind, []).append(f"step {step}")
        latest[kind] = reason
    return [
        f"Not measured at {some(steps)}: {latest[kind]}."
        for kind, steps in steps_by_reason.items()
    ]
