"""The chapters on what a run cost what it began with, and on which part of it moved."""

from typing import Any

from videotune.reporter.charts import Line, line_chart
from videotune.reporter.read import Record, Run, at, items, mapping, number, points
from videotune.text import plain

FIGURES = {
    "effect of other prompts left": ("guidance", "mean"),
    "change, as a share of their effect": ("effect", "mean"),
    "distance of the prediction": ("distance", "mean"),
    "error of few steps": ("few_steps", "error"),
}
"""Columns of the table of readings, with their keys in a record."""


def readings(run: Run) -> list[Record]:
    """Return the readings of what is left of the abilities before training that compare
    with the latest one.
    """
    measured = [record for record in run.of_kind("forgetting") if "guidance" in record]
    if not measured:
        return []
    name = measured[-1].get("forgetting")
    return [record for record in measured if record.get("forgetting") == name]


def kept_figures(run: Run) -> dict[str, Any] | None:
    """Return what the outcome says of the abilities before training, or None."""
    records = readings(run)
    if len(records) < 2:
        return None
    latest = mapping(records[-1])
    share = number(at(latest, "guidance", "mean"))
    if share is None:
        return None
    return {
        "share": min(1.0, share),
        "step": number(latest["step"]),
        "verdict": latest["verdict"],
        "reason": latest["reason"],
    }


def forgetting(run: Run) -> dict[str, Any]:
    """Return the chapter on what the training cost."""
    records = readings(run)
    not_measured = [
        f"Step {plain(number(record.get('step')))}: {record['not_measured']}."
        for record in run.of_kind("forgetting")
        if "not_measured" in record
    ]
    if not records:
        event = "prompts that have nothing to do with the clips are read at checkpoints"
        absent = run.absent(event, "forgetting.budget")
        if not not_measured:
            absent = _reason_for_no_plan(run) or absent
        return {"absent": absent, "not_measured": not_measured}

    rows = []
    for record in records:
        figures = [plain(number(at(record, *keys)), 3) for keys in FIGURES.values()]
        rows.append([plain(number(record.get("step"))), *figures])
    latest = mapping(records[-1])
    return {
        "absent": "",
        "not_measured": not_measured,
        "head": ["step", *FIGURES],
        "rows": rows,
        "latest": latest,
        "share": number(at(latest, "guidance", "mean")),
        "base_error": number(at(latest, "few_steps", "base")),
        "start": run.start,
        "prompts": [str(prompt) for prompt in items(latest["prompts"])],
        "charts": _charts(records),
    }


def _reason_for_no_plan(run: Run) -> str:
    """Return why the plan of a run has no reading of the abilities before training, and what
    to set; empty if it has some, or if they are switched off.
    """
    beside = at(run.plan, "beside")
    budget = number(run.setting("forgetting", "budget"))
    if beside is None or at(beside, "forgetting") is not None or budget == 0:
        return ""

    generates = items(run.setting("generate"))
    if len(generates) == 1:
        given = "sound" if generates[0] == "video" else "video"
        return (
            f"Not measured: samples of this run are given the {given} of a clip, and prompts "
            "that have nothing to do with the clips have none (generate is "
            f"{generates[0]}). A run that generates both measures it."
        )
    allowed = "" if budget is None else f" ({budget:g})"
    return (
        "Not measured: the run is too short to read it twice in the share of its time that "
        f"forgetting.budget allows{allowed}. A higher forgetting.budget measures it in the "
        "next run."
    )


def _charts(records: list[Record]) -> list[tuple[str, dict[str, Any]]]:
    """Return the charts of the readings by step and by noise level."""
    charts = []
    by_step = [
        Line("effect of the prompts left", points(records, "guidance", "mean"), "one"),
        Line("change", points(records, "effect", "mean"), "two"),
    ]
    if len(records) > 1:
        title = "Prompts that have nothing to do with the clips, by step"
        chart = line_chart(by_step, says=title, x_label="step", from_zero=True)
        charts.append((title, chart))

    latest = records[-1]
    levels = [number(level) for level in items(latest.get("levels"))]
    lines = []
    for name, key, css in (
        ("effect of the prompts left", "guidance", "one"),
        ("distance of the prediction", "distance", "two"),
    ):
        curve = []
        for level, value in zip(
            levels, items(at(latest, key, "by_level")), strict=False
        ):
            y = number(value)
            if level is not None and y is not None:
                curve.append((level, y))
        if curve:
            lines.append(Line(name, sorted(curve), css, dots=True))
    if lines:
        title = "By noise level: the last reading"
        chart = line_chart(
            lines, says=title, x_label="noise level, 0 to 1", from_zero=True
        )
        charts.append((title, chart))
    return charts


def parts(run: Run) -> dict[str, Any]:
    """Return the chapter on how far each part of what trains has moved."""
    records = run.of_kind("parts")
    if not records:
        event = "how far each part has moved is read with the validations"
        return {"absent": run.absent(event, "validate_every")}

    latest = records[-1]
    latest_parts = mapping(latest.get("parts"))
    changes = {name: number(at(part, "change")) for name, part in latest_parts.items()}
    largest_first = sorted(changes, key=lambda name: -(changes[name] or 0.0))
    rows = []
    for name in largest_first:
        part = mapping(latest_parts[name])
        gradient = number(part["gradient"])
        rows.append(
            {
                "name": name,
                "numbers": number(part["numbers"]),
                "change": changes[name],
                "gradient": gradient,
                "moved": part["moved"] is not False,
            }
        )
    return {
        "absent": "",
        "step": number(latest.get("step")),
        "rows": rows,
        "unmoved": [row["name"] for row in rows if not row["moved"]],
    }
