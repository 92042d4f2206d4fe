"""The chapters with videos: before and after, all previews, one prompt over all checkpoints, and sample metrics."""

from collections.abc import Sequence
from os.path import isfile
from typing import Any

from videotune.reporter.curves import Line, line_chart
from videotune.reporter.media import BUDGET, Media, exported_steps, local_link, sample_rows
from videotune.reporter.read import Record, Run, at, items, mapping, number, points
from videotune.text import plain, some


def before(run: Run, media: Media) -> dict[str, Any]:
    """Each prompt as the base samples it beside what was learnt, with the same seed, in one video and so in step."""
    exported = exported_steps(run)
    for card in media.cards:
        card["kind"] = _prompt_kind(run, card["prompt"])
        card["names"] = [_step_name(step) + ", exported" * (step > 0 and step in exported) for step in card["steps"]]
        card["videos"] = [media.video(path) for path in card["paths"]]
    why = run.absent("a prompt appears as soon as it is sampled twice", "sample_after")
    return {"absent": "" if media.cards else why, "demo": run.demo, "cards": media.cards}


def _prompt_kind(run: Run, prompt: str) -> tuple[str, str] | None:
    """Whether a prompt is a caption that the run was shown, in words, and a colour; None where the account has none."""
    clips = [clip for clip in run.clips if clip.get("used") and "captions" in clip]
    kinds = {clip.get("kind") for clip in clips if prompt in items(clip.get("captions"))}
    if not clips:
        return None
    if kinds - {"regularization"}:
        return "caption of training clips", "care"  # what is sampled may be copied
    return ("caption of regularization clips", "calm") if kinds else ("caption of no clip", "good")


def _step_name(step: float) -> str:
    return "base" if step == 0 else f"step {plain(step)}"


def samples(run: Run, media: Media) -> dict[str, Any]:
    """Previews as a grid: a row a prompt and seed, a column a step, the base's first."""
    rows = sample_rows(run)
    above = {(card["prompt"], card["seed"], path) for card in media.cards for path in card["paths"]}
    there = {(*row, str(cell.get("path"))) for row, cells in rows.items() for cell in cells.values()}
    steps = sorted({step for cells in rows.values() for step in cells})
    return {
        "absent": "" if rows else run.absent("previews appear as the run samples them", "sample_after"),
        "all_above": there <= above,
        "left_out": media.left_out,
        "budget": f"{BUDGET / 1e6:g} MB",
        "steps": ["base (step 0)" if step == 0 else _step_name(step) for step in steps],
        "rows": [
            (*row, [media.video(str(mapping(cells.get(step)).get("path") or "")) for step in steps])
            for row, cells in rows.items()
        ],
    }


def compare(run: Run, media: Media) -> dict[str, Any]:
    """What ``compare`` sampled: one prompt and seed over all checkpoints."""
    entries = []
    for entry in run.compared or ():
        steps = ", ".join(_step_name(number(step) or 0) for step in items(entry.get("steps")))
        entries.append((mapping(entry), media.video(str(entry.get("video") or "")), steps))
    return {"entries": entries}


METRICS = {
    "diversity (Vendi)": ("diversity",),
    "motion energy": ("motion", "energy"),
    "flicker": ("motion", "flicker"),
    "saturation": ("motion", "saturation"),
}
"""Sample metrics of a record by their name: the keys under which each lies."""

LIKENESS = {
    "samples": (("mean",), "one"),
    "base": (("base",), "pale one"),
    "likely copy above": (("line",), "two"),
    "held-out clips, median": (("held_out", "median"), "three"),
    "other clips, median": (("others", "median"), "pale two"),
}
"""Curves of likeness by their name: the keys under which the values lie, and the stroke."""


def metrics(run: Run) -> dict[str, Any]:
    """Measured samples: the nearest clip beside each, and ratios to the base's and the clips'."""
    everything = run.of_kind("sample_metrics")
    measured = [record for record in everything if "not_measured" not in record]
    alike = [record for record in measured if record.get("sample_metrics") == measured[-1].get("sample_metrics")]
    last = mapping(alike[-1] if alike else None)
    others = [number(at(last, "replication", key, "p99")) or 0.0 for key in ("held_out", "others")]
    sampled = [mapping(one) for one in items(last.get("samples"))]
    return {
        "absent": "" if everything else run.absent("samples are measured at checkpoints", "sample_metrics.budget"),
        "not_measured": _not_measured([record for record in everything if "not_measured" in record]),
        "latest": last,
        "copies": {key: number(at(last, "replication", key)) for key in ("line", "copies", "base_copies")},
        "too_alike": max(others) > 0.95,
        "charts": _curves(alike),
        "head": ["step", *METRICS],
        "rows": [[plain(number(r.get("step"))), *(_figure(r, keys) for keys in METRICS.values())] for r in alike],
        "nearest": [(one, _link(run, str(one["path"] or ""))) for one in sampled],
    }


def _curves(records: Sequence[Record]) -> list[tuple[str, dict[str, Any]]]:
    """Mean likeness to the nearest clip by step, between the base's and the line; diversity and motion as ratios."""
    likeness = [Line(n, points(records, "replication", *keys), c, c == "one") for n, (keys, c) in LIKENESS.items()]
    ratio_keys = [keys for name, keys in METRICS.items() if name != "flicker"]
    strokes = zip(ratio_keys, ("one", "two", "three"), strict=True)
    ratios = [Line(keys[-1], points(records, *keys, "to_base"), css, dots=True) for keys, css in strokes]
    charts = []
    for title, lines in (("Likeness to the nearest training clip", likeness), ("As ratios to the base's", ratios)):
        if found := [line for line in lines if line.points]:
            charts.append((title, line_chart(found, says=title, x_label="step", from_zero=lines is ratios)))
    return charts


def _figure(record: Record, keys: Sequence[str]) -> str:
    """A metric's value, and its ratio to the base's and the clips'."""
    one = mapping(at(record, *keys))
    pairs = [(number(one.get("to_base")), "base"), (number(one.get("to_data")), "clips")]
    ratios = ", ".join(f"{ratio:.2f} × {of}" for ratio, of in pairs if ratio is not None)
    return plain(number(one.get("value")), 3) + (f" ({ratios})" if ratios else "")


def _link(run: Run, path: str) -> str | None:
    """The address of a sample; None where it was removed."""
    link = local_link(path)
    return link if link and isfile(run.folder / path) else None


def _not_measured(records: Sequence[Record]) -> list[str]:
    """Which steps were not measured, and why; equal reasons once, with the figures of the latest."""
    steps: dict[str, list[str]] = {}
    latest: dict[str, str] = {}
    for record in records:
        reason = str(record["not_measured"])
        key = reason.partition(":")[0]
        steps.setdefault(key, []).append(f"step {plain(number(record.get('step')))}")
        latest[key] = reason
    return [f"Not measured at {some(each)}: {latest[key]}." for key, each in steps.items()]
