"""Choose a run's open settings before it starts: memory for this machine, and
compiling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil

from videotune.config.validators import cannot_compile
from videotune.console import echo
from videotune.errors import DoesNotFit
from videotune.job.job import Job
from videotune.memory.accelerator import has_streams, local_device
from videotune.memory.checkpointing import OFF
from videotune.memory.compiling import no_compiler
from videotune.planner import memory
from videotune.planner.denoiser_size import host_checkpointing, surely_fits
from videotune.planner.fit import (
    MEMORY_KEYS,
    config_constraints,
    fit,
    pass_samples,
    process_share,
    requested_card,
    spare_memory,
    step_seconds,
)
from videotune.planner.memory import Need
from videotune.planner.read_step import known_step_spec
from videotune.planner.step_spec import StepSpec
from videotune.text import memory_size
from videotune.trainer.build import dtype_name
from videotune.validation.overhead import decide_spacings

COMPILE_SECONDS = 36.0
"""Seconds for the graph of a kind of block.

Measured on one H100: 4.5 to 36 for models of 1.3 to 14 billion parameters.
"""


def fit_settings(job: Job) -> Job:
    """Return the job with its open memory settings chosen for this machine.

    Raises:
        DoesNotFit: No setting fits the card; the message has remedies.
    """
    is_open = any(getattr(job.config, key) is None for key in MEMORY_KEYS)
    if job.base is None or not is_open:
        return job
    if not has_streams(local_device()):
        return _with_chosen(job, _plainest(job, host_checkpointing(job)))
    vram, card = requested_card(None, None)
    assert vram is not None
    if surely_fits(job, vram):
        return _with_chosen(job, _plainest(job, OFF))

    free_host = psutil.virtual_memory().available
    spare = spare_memory(vram, is_free=True)
    result = fit(job, dtype_name(job.config), vram, card, free_host, spare=spare)
    if result.fits is False:
        need = memory_size(result.needed)
        lines = "".join(f"\n  {line}" for line in result.remedies)
        raise DoesNotFit(
            f"this run needs {need} for {result.worst}, "
            f"and the card has {memory_size(vram)} free:{lines}"
        )
    chosen = ", ".join(f"{key}={value}" for key, value in result.chosen.items())
    tight = f" (tight: {memory_size(result.needed)} of {memory_size(vram)} free)"
    echo(f"memory: {chosen}{tight if result.verdict == 'tight' else ''}")
    return _with_chosen(job, result.chosen)


def _plainest(job: Job, checkpointing: str) -> dict[str, Any]:
    """Return the settings for one pass per batch and all weights on the device."""
    return {
        "micro_batch_size": job.config.batch_size,
        "gradient_checkpointing": checkpointing,
        "layer_offload_fraction": 0.0,
    }


def _with_chosen(job: Job, chosen: Mapping[str, Any]) -> Job:
    """Return the job with these values for the keys that its config leaves open."""
    new = {
        key: value for key, value in chosen.items() if getattr(job.config, key) is None
    }
    return replace(job, resolved=job.resolved.with_planned(new))


def chosen_for_run(job: Job, replan: bool) -> tuple[Job, list[str]]:
    """Return the job with all settings chosen, and a line for each that ``replan``
    changed.

    Args:
        job: A run that starts or resumes.
        replan: Choose again what an earlier plan has chosen.
    """
    before = job.config
    job = fit_settings(_with_open_choices(job) if replan else job)
    job = decide_compile(decide_spacings(job))

    changes = []
    if replan:
        for key in MEMORY_KEYS:
            old = getattr(before, key)
            new = getattr(job.config, key)
            if new != old:
                changes.append(f"replanned: {key}: {old!r} -> {new!r}")
    for change in changes:
        echo(change)
    return job, changes


def _with_open_choices(job: Job) -> Job:
    """Return the job without the settings that a plan has chosen; the user's settings
    stay.
    """
    origins = job.resolved.origins
    chosen = [key for key in MEMORY_KEYS if origins.get(key) == "plan"]
    config = job.config.model_copy(update=dict.fromkeys(chosen))
    return replace(job, resolved=replace(job.resolved, config=config))


def decide_compile(job: Job) -> Job:
    """Return the job with ``compile: auto`` decided, on a GPU; print the reason.

    It becomes true if the run saves more time than compiling takes. Each kind of block
    needs a graph for the first bucket, and one for the shapes of all others.
    """
    if job.config.compile != "auto" or not has_streams(local_device()):
        return job

    compiles = False
    reason = cannot_compile(job.config) or no_compiler()
    known = planned_need(job, dtype_name(job.config))
    _, card = requested_card(None, None)
    is_counted = card is not None and card.timed and card.bandwidth is not None
    if known is None or card is None or not is_counted:
        reason = reason or "how long a step takes is unknown"
    elif reason is None:
        spec, training = known
        plain = step_seconds(job, spec, training, card, dtype_name(job.config))
        faster = step_seconds(
            job, spec, memory.compiled(training), card, dtype_name(job.config)
        )
        saved = job.steps * (plain - faster)
        cost = COMPILE_SECONDS * len(job.spec.blocks) * min(2, len(job.buckets))
        compiles = saved > cost
        reason = f"it would save about {saved:.0f} s of this run, and take up to {cost:.0f} s"
    echo(f"compile: {'on' if compiles else 'off'}: {reason}")
    return replace(job, resolved=job.resolved.with_planned({"compile": compiles}))


def planned_need(job: Job, dtype: str) -> tuple[StepSpec, Need] | None:
    """Return the step's spec and what the job's settings need; None if neither a plan
    nor a table has them.
    """
    spec = known_step_spec(job, dtype)
    config = job.config
    is_open = config.micro_batch_size is None or config.gradient_checkpointing is None
    if spec is None or is_open:
        return None
    batch = max(pass_samples(job))
    constraints = config_constraints(config, len(spec.blocks), batch)
    plainest = memory.choices(spec, batch, constraints)[0]
    return spec, memory.need(process_share(job, spec, dtype), plainest)


def peak(job: Job, measured: Mapping[str, int]) -> dict[str, int | None] | None:
    """Return a trainer's measured ``peaks`` with the planned bytes; None if nothing
    was.
    """
    if not measured:
        return None
    known = planned_need(job, dtype_name(job.config))
    return {**measured, "planned_bytes": None if known is None else known[1].allocated}
