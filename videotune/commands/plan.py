"""``plan``: what a run would do, before it does it: steps, times each clip is seen, tokens, memory, time, disk."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from videotune.console import bar
from videotune.errors import DONE, SKIPPED, VideotuneError
from videotune.latent_cache.exposure import TARGETS
from videotune.planner.fit import asked_card, fit, planned_dtype, to_json
from videotune.planner.plan import make_plan
from videotune.trainer.experts import trained
from videotune.trainer.resolve_config import ConfigSource, Layers, overrides, resolve_config
from videotune.trainer.run_spec import Job, open_job, refuse_skips
from videotune.validation.overhead import planned


@dataclass(frozen=True)
class PlanResult:
    """``plan``: what ``plan --json`` prints."""

    plan: dict[str, Any]
    job: Job

    @property
    def experts(self) -> int:
        """How many experts train."""
        return len(trained(self.job.spec, self.job.config))

    @property
    def exit_code(self) -> int:
        """0: the run fits, or no card is named; 2: the card or the disk is too small."""
        return SKIPPED if self.plan["fits"] is False or self.plan["disk"]["short_bytes"] else DONE


def plan(
    config: ConfigSource = None,
    *,
    vram: float | None = None,
    card: str | None = None,
    views: Sequence[int] = (),
    allow_skips: str | None = None,
    **layers: Unpack[Layers],
) -> PlanResult:
    """What a run would do, on a card with ``vram`` GB (10^9 bytes) of memory, or of that name; with neither on this machine.

    ``views``: how many times a window is to be seen, for which the steps are calculated, instead of 10, 20, 50 and 100.
    """
    job = planned(open_job(*resolve_config(overrides(config, layers, allow_skips), planning=True)))
    refuse_skips(job, allow_skips)
    found = make_plan(job, views or TARGETS)
    free = shutil.disk_usage(Path.cwd()).free  # a run lies below this folder, unless its --out names another
    found["disk"] |= {"free_bytes": free, "short_bytes": max(0, found["disk"].get("run_bytes", 0) - free)}
    if job.base is not None:
        limit, named = asked_card(vram, card)
        dtype = planned_dtype(job.config, limit is not None)
        with bar("measuring without memory"):
            found |= to_json(fit(job, dtype, limit, named), job, dtype)
    elif vram or card:
        raise VideotuneError("--vram, --card: what a run needs is read from its base model: name one (base_model_name)")
    return PlanResult(found, job)
