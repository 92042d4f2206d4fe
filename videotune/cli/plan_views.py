"""The steps at which a run that shows its clips very often would show them less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from videotune.config.safe_views import LOW_RATE, SAFE_VIEWS

if TYPE_CHECKING:
    from videotune.commands.plan import PlanResult

MODERATE_LIMIT = 50
"""Views of a window from which on a plan names fewer steps, unless the rate is low."""


def fewer_steps(result: PlanResult) -> str:
    """Return the steps that ``init`` would choose, with their hours, in words; empty if
    the windows are seen moderately often.
    """
    facts = result.plan
    is_low_rate = result.job.config.learning_rate <= LOW_RATE
    limit = SAFE_VIEWS + 1 if is_low_rate else MODERATE_LIMIT
    if facts["views"]["per_window"]["max"] < limit:
        return ""

    from videotune.cli.plan_verdict import time_text
    from videotune.planner.plan import steps_for_views
    from videotune.presets.recipes import SMALL, recipes
    from videotune.runs.plan_facts import samples_per_step_words

    size = "small" if facts["clips"]["used"] < SMALL else "large"
    epochs = sorted(recipe[size] for recipe in recipes().values())
    if is_low_rate:
        epochs = [min(views, SAFE_VIEWS) for views in epochs]
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
    if steps[str(least)] == fewer:
        return f"{text}; `videotune init` chooses as many"
    return (
        f"{text}; `videotune init` chooses {steps[str(least)]:,} to {fewer:,} "
        "by what is to be learnt"
    )
