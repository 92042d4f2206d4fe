"""What may change when a run is resumed. Each key's field names one of four classes.

- safe: nothing that was learnt depends on it. It takes effect with the resume.
- override: it changes what is learnt from the next step on, so the user must allow it.
- data: it decides what is trained on. It is judged by what it does to clips and
  windows, as other changes of the data.
- fatal: the saved state has no meaning under another value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from videotune.config.nested_keys import flatten
from videotune.config.schema import leaves


@dataclass(frozen=True)
class Change:
    """A key that differs between the run's config and the one it is resumed with."""

    key: str
    before: Any
    after: Any
    kind: str
    """Its class."""
    why: str = ""
    """Why it is of its class."""

    def __str__(self) -> str:
        parts = []
        for key, before, after in differences(self.key, self.before, self.after):
            parts.append(f"{key}: {before!r} -> {after!r}")
        text = "; ".join(parts)
        return f"{text} ({self.why})" if self.why else text


def differences(key: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """Return (key, before, after) of a key; of a list of sections, those of each
    section's keys that differ.
    """
    are_lists = isinstance(before, list) and isinstance(after, list)
    if not are_lists or not all(isinstance(row, Mapping) for row in (*before, *after)):
        return [(key, before, after)]

    changes: list[tuple[str, Any, Any]] = []
    for index, (old, new) in enumerate(zip_longest(before, after)):
        # A section that was added or removed is named by its path.
        if old is None:
            changes.append((f"{key}.{index}", None, new.get("path", new)))
        elif new is None:
            changes.append((f"{key}.{index}", old.get("path", old), None))
        else:
            for name in {**old, **new}:
                if old.get(name) != new.get(name):
                    changes.append(
                        (f"{key}.{index}.{name}", old.get(name), new.get(name))
                    )
    return changes


def class_of(key: str) -> str:
    """Return the class of a key, as its field says; "checked" if it depends on the
    values, see ``drift``.
    """
    return str(leaves()[key].json_schema_extra["resume"])


def drift(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the keys that differ, each with its class.

    More or fewer steps are safe if the learning rate does not depend on them. Another
    split of a step's samples into batches and accumulation is safe if their product
    stays. A base model may be in another folder: the caller compares its bytes. If
    epochs are set they decide the steps, whatever ``steps`` says.

    Args:
        before: the config of the run, complete, as ``config.json`` keeps it.
        after: the config that it is resumed with.
    """
    old = flatten(before)
    new = flatten(after)
    changes = []
    for key, value in new.items():
        follows_from_epochs = key == "steps" and new["epochs"] is not None
        if old.get(key) != value and not follows_from_epochs:
            kind, why = _class_here(key, old, new)
            changes.append(Change(key, old.get(key), value, kind, why))
    return changes


def _class_here(
    key: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the class of a change, and why it is of that class."""
    match key:
        case "steps" | "epochs":
            scheduler = old["learning_rate_scheduler"]
            if scheduler == "CONSTANT":
                return "safe", "the rate is constant"
            if scheduler == "INVERSE_SQRT":
                return "safe", "the rate does not depend on the number of steps"
            return (
                "override",
                f"the rate of a {scheduler} schedule depends on the number of steps",
            )

        case "batch_size" | "gradient_accumulation_steps":
            old_samples = old["batch_size"] * old["gradient_accumulation_steps"]
            new_samples = new["batch_size"] * new["gradient_accumulation_steps"]
            if old_samples == new_samples:
                return "safe", "a step has the same samples"
            return "fatal", (
                f"a step would have {new_samples} samples instead of {old_samples}: "
                "which windows it shows follows from that"
            )

        case "base_model_name" | "base_parts":
            return "safe", "the same bytes in another folder"
        case "base_loras":
            return "safe", "the same weights: their fingerprint is compared"
        case "datasets":
            return "data", ""
    return class_of(key), ""


def of_class(changes: Sequence[Change], kind: str) -> list[Change]:
    """Return the changes of a class."""
    return [change for change in changes if change.kind == kind]
