"""The steps at which a run that shows its clips very often would show them less."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from videotune.commands.plan import PlanResult

MODERATE_LIMIT = 50
"""Views of a window from which on a plan names fewer steps."""


def fewer_steps(result: PlanResult) -> str:
    """Return the steps at the limits of the bands, and those that ``init`` would choose,
    in words; empty if the windows are seen moderately often.
    """
    from videotune.latent_cache.view_bands import BANDS

    views = result.plan["views"]["per_window"]["max"]
    limits = [int(upper) for upper, _ in BANDS if MODERATE_LIMIT <= upper <= views]
    if not limits:
        return ""

    from videotune.planner.plan import steps_for_views
    from videotune.presets.recipes import SMALL, recipes

    clips = result.plan["clips"]["used"]
    size = "small" if clips < SMALL else "large"
    epochs = sorted(recipe[size] for recipe in recipes().values())
    least = epochs[0]
    most = epochs[-1]
    steps = steps_for_views(result.job, [*limits, least, most])

    parts = []
    for limit in limits:
        if str(limit) in steps:
            parts.append(f"{limit} views at {steps[str(limit)]:,} steps")
    if str(least) in steps and str(most) in steps:
        parts.append(
            f"`videotune init` would choose {steps[str(least)]:,} to "
            f"{steps[str(most)]:,} ({least} to {most} views, by what is to be learnt)"
        )
    return ", ".join(parts)
