"""Facts of a plan that several pages and commands name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from videotune.text import counted_between


def samples_per_step(plan: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the fewest and the most samples of a step, or None if the plan has neither.

    Buckets may differ: where images and videos are mixed, a step of videos takes fewer,
    and a dataset may have a batch of its own. Plans of earlier versions do not say it;
    then it is the effective batch.
    """
    buckets = plan.get("buckets") or ()
    batches = [bucket["batch"] for bucket in buckets if "batch" in bucket]
    if batches:
        return min(batches), max(batches)

    effective_batch = plan.get("effective_batch")
    if not isinstance(effective_batch, int):
        return None
    return effective_batch, effective_batch


def samples_per_step_words(plan: Mapping[str, Any]) -> str | None:
    """Return '1 sample', '2 to 4 samples', or None if the plan does not say it."""
    samples = samples_per_step(plan)
    if samples is None:
        return None
    return counted_between(*samples, "sample")
