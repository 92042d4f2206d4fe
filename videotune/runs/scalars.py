"""The numbers of the journal's lines, by the names that every tracker gives them."""

from collections.abc import Mapping, Sequence
from typing import Any


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a journal's line by their tags.

    What was not finite is left out, as a gap in the curve.
    """
    values: dict[str, float | None] = {}
    match line["kind"]:
        case "step":
            values = _of_step(line)
        case "validation":
            values = _of_validation("validation", line)
            values |= _of_validation("validation_live", line.get("live") or {})
        case "views":
            views = line["per_window"]
            for key in ("min", "mean", "max"):
                values[f"views/{key}_window"] = views[key]
        case "sample_metrics" if "samples" in line:
            replication = line["replication"]
            values["sample_metrics/replication"] = replication["mean"]
            values["sample_metrics/copies"] = replication["copies"]
            values["sample_metrics/diversity"] = line["diversity"]["value"]
            for key, measure in line["motion"].items():
                values[f"sample_metrics/{key}"] = measure["value"]
        case "forgetting" if "guidance" in line:
            values["forgetting/guidance"] = line["guidance"]["mean"]
            values["forgetting/distance"] = line["distance"]["mean"]
            values["forgetting/effect"] = line["effect"]["mean"]
            values["forgetting/few_step_error"] = line["few_steps"]["error"]
        case "save" | "sample":
            values[f"seconds/{line['kind']}"] = line["seconds"]

    finite = {}
    for tag, value in values.items():
        if value is not None and abs(value) < float("inf"):
            finite[tag] = float(value)
    return finite


def _of_step(line: Mapping[str, Any]) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    for key in ("loss", "mse", "grad_norm"):
        values[f"train/{key}"] = line[key]
    values |= _by_noise_level("mse_by_t", line["by_t"])
    if "sound" in line:
        sound = line["sound"]
        values["sound/mse"] = sound["mse"]
        values |= _by_noise_level("sound/mse_by_t", sound["by_t"])
    for group, rate in line["lr"].items():
        values[f"lr/{group}"] = rate
    for phase, seconds in line["seconds"].items():
        values[f"seconds/{phase}"] = seconds
    return values


def _by_noise_level(name: str, by_t: Sequence[float | None]) -> dict[str, float | None]:
    values = {}
    for ninth, value in enumerate(by_t):
        lowest = ninth / 9
        highest = (ninth + 1) / 9
        values[f"{name}/{lowest:.2f}-{highest:.2f}"] = value
    return values


def _of_validation(name: str, parts: Mapping[str, Any]) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    if parts.get("sound"):
        values |= _of_validation(f"sound/{name}", parts["sound"])
    if parts.get("plain"):
        values |= _of_validation(f"plain/{name}", parts["plain"])
    for part in ("held_out", "train"):
        reading = parts.get(part)
        if not reading:
            continue
        values[f"{name}/{part}"] = reading["normalised"]
        values[f"{name}/{part}_mean"] = reading["mean"]
        for expert, value in (reading.get("experts") or {}).items():
            values[f"{name}/{part}_{expert}"] = value
    return values
