"""The steps at which a run that shows its clips very often would show them less."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from videotune.commands.plan import PlanResult

MODERATE_LIMIT = 50
"""Views of a window from which on a plan names fewer steps."""


def fewer_steps(result: PlanResult) -> str:
    """Return the steps that ``init`` would choose, with their hours, in words; empty if
    the windows are seen moderately often.
    """
    facts = result.plan
    if facts["views"]["per_window"]["max"] < MODERATE_LIMIT:
        return ""

    from videotune.cli.plan_verdict import time_text
    from videotune.planner.plan import steps_for_views
    from videotune.presets.recipes import SMALL, recipes
    from videotune.runs.plan_facts import samples_per_step_words

    size = "small" if facts["clips"]["used"] < SMALL else "large"
    epochs = sorted(recipe[size] for recipe in recipes().values())
    least = epochs[0]
    most = epochs[-1]
    steps = steps_for_views(result.job, [least, most])
    if str(least) not in steps or str(most) not in steps:
        return ""

    fewer = steps[str(most)]
    if fewer == 1:
        samples = samples_per_step_words(facts)
        return f"none are few enough with {samples} a step; make the batch smaller"
    text = f"--set steps={fewer} shows each {most} times"
    if facts.get("hours") and facts["fits"]:
        hours = facts["hours"] + (facts["hours_beside"] or 0)
        is_rough = not facts["device"]["measured"]
        time = time_text(hours * fewer / facts["steps"], 0, is_rough=is_rough)
        text += f", {time}"
    return (
        f"{text}; `videotune init` chooses {steps[str(least)]:,} to {fewer:,} "
        "by what is to be learnt"
    )
