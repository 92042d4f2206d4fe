"""The numbers of the journal's lines, by the names that every tracker gives them."""

from collections.abc import Mapping
from typing import Any


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a journal's line by their tags; what was not finite is left out, as a gap in the curve."""
    found: dict[str, float | None] = {}
    match line["kind"]:
        case "step":
            found = {f"train/{key}": line[key] for key in ("loss", "mse", "grad_norm")}
            found |= {
                f"mse_by_t/{i / 9:.2f}-{(i + 1) / 9:.2f}": value
                for i, value in enumerate(line["by_t"])
            }
            found |= {f"lr/{group}": value for group, value in line["lr"].items()}
            found |= {f"seconds/{phase}": value for phase, value in line["seconds"].items()}
        case "validation":
            for name, parts in (
                ("validation", line),
                ("validation_live", line.get("live") or {}),
            ):
                for part in ("held_out", "train"):
                    if parts.get(part):
                        found[f"{name}/{part}"] = parts[part]["normalised"]
                        found[f"{name}/{part}_mean"] = parts[part]["mean"]
                        experts = parts[part].get("experts") or {}
                        found |= {
                            f"{name}/{part}_{expert}": value
                            for expert, value in experts.items()
                        }
        case "views":
            found = {
                f"views/{key}_window": line["per_window"][key] for key in ("min", "mean", "max")
            }
        case "sample_metrics" if "samples" in line:
            values = {
                "replication": line["replication"]["mean"],
                "copies": line["replication"]["copies"],
            }
            values |= {
                key: one["value"]
                for key, one in ({"diversity": line["diversity"]} | line["motion"]).items()
            }
            found = {f"sample_metrics/{key}": value for key, value in values.items()}
        case "save" | "sample":
            found = {f"seconds/{line['kind']}": line["seconds"]}
    return {
        tag: float(value)
        for tag, value in found.items()
        if value is not None and abs(value) < float("inf")
    }
