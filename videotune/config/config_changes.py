"""What may change when a run is resumed: each key's field names one of four classes.

- safe: nothing that was learnt depends on it; it takes effect with the resume.
- override: it changes what is learnt from the next step on; only when the person says so.
- data: it decides what is trained on; judged by what it does to clips and windows, as other changes of the data are.
- fatal: the saved state has no meaning under another value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from videotune.config.load import flatten
from videotune.config.schema import leaves


@dataclass(frozen=True)
class Change:
    """A key that differs between the run's config and the one it is to go on with; ``why`` it is of its class."""

    key: str
    before: Any
    after: Any
    kind: str
    why: str = ""

    def __str__(self) -> str:
        pairs = differences(self.key, self.before, self.after)
        told = "; ".join(f"{key}: {before!r} -> {after!r}" for key, before, after in pairs)
        return told + (f" ({self.why})" if self.why else "")


def differences(key: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """(key, before, after) of a key; of a list of sections those of each section's own keys that differ."""
    lists = isinstance(before, list) and isinstance(after, list)
    if not lists or not all(isinstance(row, Mapping) for row in (*before, *after)):
        return [(key, before, after)]
    found: list[tuple[str, Any, Any]] = []
    for place, (old, new) in enumerate(zip_longest(before, after)):
        if old is None or new is None:  # one more, or one less: its path says which
            found.append(
                (f"{key}.{place}", *(row and row.get("path", row) for row in (old, new)))
            )
        else:
            names = (name for name in {**old, **new} if old.get(name) != new.get(name))
            found += [(f"{key}.{place}.{name}", old.get(name), new.get(name)) for name in names]
    return found


def class_of(key: str) -> str:
    """The class of a key, as its field says; "checked" where it depends on the values: see ``drift``."""
    return str(leaves()[key].json_schema_extra["resume"])


def drift(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The keys that differ, each with its class. Both are whole configs as ``config.json`` keeps them.

    More or fewer steps are safe where the rate does not depend on them. Another split of a step's samples into batches and
    accumulation is safe where their product stays. A base model may lie elsewhere: its bytes are compared by the caller.
    Where epochs are given they decide the steps, whatever stands there.
    """
    old = flatten(before)
    new = flatten(after)
    changed = [
        key
        for key in new
        if old.get(key) != new[key] and not (key == "steps" and new["epochs"] is not None)
    ]
    return [Change(key, old.get(key), new[key], *_class_here(key, old, new)) for key in changed]


def _class_here(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    match key:
        case "steps" | "epochs":
            if old["learning_rate_scheduler"] == "CONSTANT":
                return "safe", "the rate is constant"
            return (
                "override",
                f"the rate of a {old['learning_rate_scheduler']} schedule depends on the number of steps",
            )
        case "batch_size" | "gradient_accumulation_steps":
            one, other = (
                values["batch_size"] * values["gradient_accumulation_steps"]
                for values in (old, new)
            )
            if one == other:
                return "safe", "a step has the same samples"
            many = f"a step would have {other} samples instead of {one}"
            return "fatal", f"{many}: which windows it shows follows from that"
        case "base_model_name" | "base_parts":
            return "safe", "the same bytes in another place"
        case "datasets":
            return "data", ""
    return class_of(key), ""


def of_class(changes: Sequence[Change], kind: str) -> list[Change]:
    """The changes of a class."""
    return [change for change in changes if change.kind == kind]
