"""``plan``: say what a run would do: steps, views, tokens, memory, time, disk, and the
noise levels it would train.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from videotune.commands.simulation import Simulation
from videotune.config.schema import Config
from videotune.console import bar
from videotune.diffusion.timesteps import TimestepSampler, shift_of_tokens
from videotune.errors import DONE, SKIPPED, VideotuneError
from videotune.files import existing_folder
from videotune.job.experts import trained
from videotune.job.job import Job, open_job
from videotune.job.overrides import (
    ConfigSource,
    Overrides,
    resolve_config,
    to_overrides,
)
from videotune.job.skips import refuse_skips
from videotune.latent_cache import exposure
from videotune.memory.accelerator import local_device
from videotune.model_spec import ModelSpec
from videotune.planner.cluster import cluster_of, refuse_unused_network
from videotune.planner.compared import compared_ways
from videotune.planner.cpu_rate import measured_cpu
from videotune.planner.fit import (
    Fit,
    cache_seconds,
    fit,
    planned_dtype,
    requested_card,
    spare_memory,
    step_seconds,
)
from videotune.planner.fit_facts import to_json
from videotune.planner.gpus import Card, memory_and_name
from videotune.planner.plan import make_plan
from videotune.planner.process_choice import Target, shared_job
from videotune.planner.read_step import known_step_spec, step_spec
from videotune.presets.shipped import preset_card
from videotune.trainer import build
from videotune.validation.overhead import decide_spacings


@dataclass(frozen=True)
class PlanResult:
    """What a run would do."""

    plan: dict[str, Any]
    """What ``plan --json`` prints."""
    job: Job
    cpu_seconds: float | None = None
    """Calculated seconds of the steps on this machine's CPU, if the plan is for it."""
    cpu_cache_seconds: float | None = None
    """The same of the cache."""
    cpu_seconds_without_card: float | None = None
    """Seconds of the steps on this machine's CPU, if the plan is for a card and the
    machine has none.
    """
    is_here: bool = True
    """Whether the run may be on this machine: not if it has no GPU and the plan is for
    one.
    """

    @property
    def experts(self) -> int:
        """How many experts train."""
        return len(trained(self.job.spec, self.job.config))

    @property
    def exit_code(self) -> int:
        """0: the run fits, or no card is named; 2: the card or the disk is too small."""
        does_not_fit = self.plan["fits"] is False
        return SKIPPED if does_not_fit or self.plan["disk"]["short_bytes"] else DONE


def plan(
    config: ConfigSource = None,
    *,
    vram: float | None = None,
    card: str | None = None,
    views: Sequence[int] = (),
    allow_skips: str | None = None,
    known: bool = False,
    gpus: int | None = None,
    nodes: int = 1,
    network: float | None = None,
    simulation: Simulation | None = None,
    out: Path | str = "run",
    ways: bool = False,
    **overrides: Any,
) -> PlanResult:
    """Return what a run would do, on this machine or on other GPUs.

    Args:
        config: the config.
        vram: memory of the GPU in GiB, as it is sold and as nvidia-smi shows it.
        card: name of the GPU, or its memory, such as "16 GB". Without it and without ``vram``, the plan is for this
            machine's GPU, or else for the smallest cards that the preset is for.
        views: how often a window should be seen, to calculate the steps (10, 20, 50, 100).
        allow_skips: how many clips may be skipped: a number, or "all".
        known: leave memory and time out unless such a step was measured before, because
            measuring takes seconds.
        gpus: how many such GPUs of one machine train. Unless the config sets ``context_parallel``, the plan chooses
            how many of them share a sample. None: as many as the config lets share one.
        nodes: how many such machines train.
        network: Gbit/s of each one's network. None: that of the GPU's usual machines.
        simulation: what to simulate of the run. None: nothing.
        out: the run folder, whose disk must have room.
        ways: compare the ways of computing a step, which takes seconds more.
        overrides: fields of ``Overrides``.
    """
    all_overrides = to_overrides(config, overrides, allow_skips)
    resolved, spec, base = resolve_config(all_overrides, planning=True)
    limit, known_gpu, memory_from = _card_of_plan(all_overrides, vram, card)
    refuse_unused_network(nodes, network)
    _refuse_unknown_gpus(nodes * (gpus or 1), limit)
    gpus_a_machine = gpus or resolved.config.context_parallel
    cluster = cluster_of(known_gpu, nodes, gpus_a_machine, network)
    spare = spare_memory(limit or 0, is_free=memory_from == "machine")
    target = Target(cluster, limit, known_gpu, spare)
    job = decide_spacings(shared_job(resolved, spec, base, target))
    refuse_skips(job, allow_skips)

    facts = make_plan(job, views or exposure.TARGETS)
    facts["disk"] |= _free_disk(facts["disk"], Path(out))
    if job.base is None:
        if vram or card or target.gpus > 1 or simulation:
            raise VideotuneError(
                "--vram, --card, --gpus, --simulate: what a run needs is read from its base model. Set base_model_name"
            )
        return PlanResult(facts, job)

    has_gpu = local_device().type != "cpu"
    dtype = planned_dtype(job.config, limit is not None, known_gpu)
    if not known or known_step_spec(job, dtype) is not None:
        with bar("measuring without memory"):
            fitted = fit(job, dtype, limit, known_gpu, spare=spare)
            result = replace(fitted, cluster=cluster)
            saved = facts["disk"].get("checkpoint_bytes", 0)
            facts |= to_json(result, job, dtype, saved, memory_from)
            facts |= _asked_for(job, result, dtype, saved, simulation, ways=ways)
        if not has_gpu:
            return _plan_without_gpu(facts, job, result, dtype, limit)
    return PlanResult(facts, job, is_here=has_gpu or limit is None)


def _asked_for(
    job: Job,
    result: Fit,
    dtype: str,
    checkpoint_bytes: int,
    simulation: Simulation | None,
    *,
    ways: bool,
) -> dict[str, Any]:
    """Return the parts of a plan that are only made if they are asked for."""
    facts: dict[str, Any] = {}
    if ways:
        facts["ways"] = compared_ways(job, result, dtype)
    if simulation is not None:
        facts["simulation"] = simulation.run(job, result, dtype, checkpoint_bytes)
    return facts


def _refuse_unknown_gpus(count: int, limit: int | None) -> None:
    """Raise VideotuneError for several GPUs whose memory is not known."""
    if count > 1 and limit is None:
        raise VideotuneError(
            "--gpus: the plan does not know their memory. Add --card NAME, or --vram GB"
        )


def _free_disk(disk: Mapping[str, int], run: Path) -> dict[str, int]:
    """Return the free bytes of the disk of a run folder, and how many the run lacks."""
    free = shutil.disk_usage(existing_folder(run)).free
    needed = disk.get("run_bytes", 0)
    return {"free_bytes": free, "short_bytes": max(0, needed - free)}


def _plan_without_gpu(
    facts: dict[str, Any], job: Job, result: Fit, dtype: str, limit: int | None
) -> PlanResult:
    """Return the plan on a machine without a GPU, with the seconds on its CPU.

    Args:
        facts: the plan.
        job: the run.
        result: its fit.
        dtype: the dtype of the training.
        limit: memory of the card that the plan is for; None: it is for this CPU.
    """
    numbers = step_spec(job, dtype)
    cpu = measured_cpu()
    seconds = step_seconds(job, numbers, result.training, cpu, dtype) * job.steps

    if limit is not None:
        return PlanResult(facts, job, cpu_seconds_without_card=seconds, is_here=False)
    return PlanResult(
        facts,
        job,
        cpu_seconds=seconds,
        cpu_cache_seconds=cache_seconds(job, numbers, cpu, is_cpu=True),
    )


def _card_of_plan(
    overrides: Overrides, vram: float | None, name: str | None
) -> tuple[int | None, Card | None, str | None]:
    """Return (bytes of memory, card, how the memory is known) of a plan.

    The memory is that of ``--card`` or ``--vram``, of this machine's card, or of the
    cards that the preset is for; otherwise None.
    """
    vram, name = memory_and_name(vram, name)
    limit, card = requested_card(vram, name)
    if limit is not None:
        source = "machine"
        if vram is not None or name is not None:
            source = "card" if vram is None else "vram"
        return limit, card, source

    gigabytes = preset_card(overrides.preset) if overrides.preset else None
    if gigabytes is None:
        return None, None, None
    return gigabytes << 30, None, "preset"


BANDS = 9
"""Equal parts of [0, 1], as in the journal's by_t, and levels at which the validation
loss is measured.
"""

COLUMNS = 72
"""Points of a density."""


def noise_levels(config: ConfigSource = None, **overrides: Any) -> dict[str, Any]:
    """Return the distribution of t that a run would train; with a shift by resolution,
    one for each bucket of the clips.
    """
    resolved, spec, base = resolve_config(
        to_overrides(config, overrides), planning=True
    )
    buckets: dict[str, tuple[int, float]] = {}
    if resolved.config.timestep_shift == "resolution":
        job = open_job(resolved, spec, base, to_look=True)
        for shape, share in zip(job.shapes, job.shares, strict=True):
            _, earlier_share = buckets.get(str(shape), (0, 0.0))
            buckets[str(shape)] = (spec.video_tokens(shape), earlier_share + share)
    return levels(spec, resolved.config, buckets)


def levels(
    spec: ModelSpec, config: Config, buckets: dict[str, tuple[int, float]]
) -> dict[str, Any]:
    """Return the levels of the validation loss, and the distributions of t that a run
    would train.

    Args:
        spec: facts of the model.
        config: the settings.
        buckets: tokens and share of the steps of each bucket, if the shift depends on
            the bucket. Empty: it does not.

    Returns:
        {"validation": levels, "distributions": [one with its bucket, shift, share of
        the steps, bands, experts, density]}
    """
    timesteps = build.make_objective(spec, config).timesteps
    rule = spec.shift_by_tokens
    distributions = []
    if rule is not None and buckets:
        for bucket, (tokens, share) in buckets.items():
            shifted = replace(timesteps, shift=shift_of_tokens(tokens, rule))
            distributions.append(_describe_distribution(spec, shifted, bucket, share))
    else:
        distributions.append(_describe_distribution(spec, timesteps, None, 1.0))
    return {
        "validation": [round(t, 4) for t in timesteps.quantiles(BANDS).tolist()],
        "distributions": distributions,
    }


def _describe_distribution(
    spec: ModelSpec, timesteps: TimestepSampler, bucket: str | None, share: float
) -> dict[str, Any]:
    edges = torch.linspace(0, 1, COLUMNS + 1, dtype=torch.float64)
    density = timesteps.cdf(edges).diff() * COLUMNS
    bands = [timesteps.mass(band / BANDS, (band + 1) / BANDS) for band in range(BANDS)]
    experts = {
        expert.name: round(timesteps.mass(expert.t_lo, expert.t_hi), 4)
        for expert in spec.experts
    }
    return {
        "bucket": bucket,
        "share_of_steps": round(share, 4),
        "distribution": timesteps.distribution,
        "shift": round(timesteps.shift, 4),
        "bands": [round(mass, 4) for mass in bands],
        "experts": experts,
        "density": [round(value, 4) for value in density.tolist()],
    }
