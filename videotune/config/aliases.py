"""Keys under the names of earlier versions; each stands for its new name until version 0.3."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import digest

KEYS = {
    "ruler_after": "validate_every",
    "probe_budget": "sample_metrics.budget",
    "tensorboard": "trackers",
} | {
    f"probe.{key}": f"sample_metrics.{key}"
    for key in ("samples", "steps", "prompts", "encoder")
}
"""Old name -> new name, dotted."""

VALUES: Mapping[str, Mapping[Any, Any]] = {"tensorboard": {True: ["tensorboard"], False: []}}
"""Old name -> old value -> new value, where these differ."""

TARGETS = {"base": True, "clip": False}
"""``datasets.target`` -> ``datasets.prior_preservation``."""


def renamed(raw: Mapping[str, Any], where: str, warn: Callable[[str], None]) -> dict[str, Any]:
    """A layer of config with today's names; ``warn`` is told of each old one.

    Raises VideotuneError where a key stands there under both names.
    """
    out = copy.deepcopy(dict(raw))
    for old, new in KEYS.items():
        section, _, key = old.rpartition(".")
        inside = out.get(section) if section else out
        if not isinstance(inside, dict) or key not in inside:
            continue
        target, _, name = new.rpartition(".")
        place = out.setdefault(target, {}) if target else out
        if not isinstance(place, dict) or name in place:
            raise VideotuneError(
                f"{where}: {old} is the old name of {new}, and both are there: leave {old} out"
            )
        value = inside.pop(key)
        place[name] = (
            VALUES.get(old, {}).get(value, value) if isinstance(value, bool) else value
        )
        if section and not inside:
            del out[section]
        warn(f"{where}: {old} is now {new}; the old name is read until version 0.3")
    for row in out["datasets"] if isinstance(out.get("datasets"), list) else ():
        if isinstance(row, dict) and "target" in row:
            value = row.pop("target")
            if value is not None:
                row["prior_preservation"] = TARGETS.get(value, value)
                warn(
                    f"{where}: datasets.target is now prior_preservation, true for base; it is read until version 0.3"
                )
    return out


def renamed_run(found: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config.json with today's names; its digest follows, unless it was wrong."""
    kept = dict(found)
    whole = kept.get("digest") == digest(
        {key: value for key, value in kept.items() if key != "digest"}
    )
    for name in ("settings", "asked"):
        if isinstance(kept.get(name), Mapping):
            kept[name] = renamed(kept[name], "config.json", lambda _: None)
    kept["origins"] = {
        KEYS.get(key, key): value for key, value in kept.get("origins", {}).items()
    }
    if whole:
        kept["digest"] = digest({key: value for key, value in kept.items() if key != "digest"})
    return kept
