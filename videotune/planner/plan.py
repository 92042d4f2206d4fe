"""What a run would do: steps, times each clip is seen, tokens, disk; memory and time are ``fit.py``'s."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from videotune.adapters import adapter_types, layers
from videotune.config import optimizers, schema
from videotune.data.dataset import totals
from videotune.exporter.formats import check_formats
from videotune.job.experts import trained
from videotune.job.job import Job
from videotune.latent_cache import exposure, sampler
from videotune.models.registry import find
from videotune.trainer.build import make_objective, what_trains
from videotune.trainer.expert_pool import make_expert_schedule
from videotune.trainer.text_encoders import text_size
from videotune.validation.callbacks import cache_items_of
from videotune.validation.overhead import overhead


def make_plan(job: Job, targets: Sequence[int] = exposure.TARGETS) -> dict[str, Any]:
    """The plan as ``plan --json`` prints it and ``plan.json`` keeps it; ``targets``: views for which it says the steps.

    ``fits``, the hours, ``device``, ``host`` and ``chosen`` are null here: memory and time are ``planner/fit.py``'s.
    """
    config = job.config
    total = len(job.library.windows)
    adapter = adapter_size(job)
    buckets = [
        {
            "shape": str(shape),
            "windows": len({window.id for window in bucket}),
            "share": round(share, 4),
            "batch": batch,
            "tokens": job.spec.tokens(shape),
        }
        for shape, bucket, batch, share in zip(
            job.shapes, job.buckets, job.schedule.batches, job.shares, strict=True
        )
    ]
    return {
        **dict.fromkeys(
            ("fits", "hours", "hours_beside", "device", "host", "seconds_a_step", "chosen")
        ),
        "remedies": [],
        "effective_batch": job.effective_batch,
        "micro_batch": min(config.micro_batch_size or config.batch_size, config.batch_size),
        "steps": job.steps,
        "clips": totals(job.library),
        "windows": total,
        "held_out_windows": len(job.library.held_out_windows),
        "views": job.exposure(job.steps).to_json(config.learning_rate)
        | {"steps_for": steps_for_views(job, targets)},
        "buckets": buckets,
        "adapter": adapter,
        "experts": experts_of(job),
        "beside": overhead(job),
        "disk": disk(job, adapter),
        "notes": list(job.notes),
        "settings": config.model_dump(mode="json"),
    }


def steps_for_views(job: Job, targets: Sequence[int]) -> dict[str, int]:
    """The steps after which the most shown training window has had so many views, by their number."""
    if not any(
        window.clip_id not in job.library.regularization for window in job.library.windows
    ):
        return {}
    repeats = max(clip.repeats for clip in job.library.clips if not clip.held_out)
    guess = float(sampler.steps_per_epoch(job.schedule)) / repeats
    # of views that were reached before the data changed the step is not known any more: that of the change is after it
    return {
        str(views): max(job.past.step, exposure.steps_for(views, job.exposure, guess))
        for views in sorted(targets)
    }


def adapter_size(job: Job) -> dict[str, Any] | None:
    """Modules and parameters that would train, of all experts that do; None where no base model is named.

    ``groups``: how many of each kind there are in one expert, a block's number written as *.
    """
    if job.base is None:
        return None
    family = find(job.spec.name)(job.base.folder, torch.device("cpu"), torch.float32)
    check_formats(job.config, family)
    net = family.skeleton()
    experts = len(trained(job.spec, job.config))
    own = what_trains(net, job.spec, job.config) if job.config.transformer.train else {}
    paths = list(adapter_types.by_module(own)) or list(
        dict.fromkeys(name.rpartition(".")[0] for name in own)
    )
    count = experts * sum(value.numel() for value in own.values())
    modules = experts * len(paths)
    if job.config.text_in_step:
        text_modules, numbers = text_size(family, job.config)
        modules = modules + text_modules
        count = count + numbers
    return {"modules": modules, "parameters": count, "groups": layers.grouped(paths)}


def disk(job: Job, adapter: Mapping[str, Any] | None) -> dict[str, int]:
    """Bytes that the cache (at most), all checkpoints that stay, and the export will take, calculated."""
    spec = job.spec
    noisy = job.spec.image_noise
    reads = cache_items_of(job)
    views = {
        (window, variant if window.varies or noisy else 0) for window, variant in reads.samples
    }
    latents = sum(4 * spec.cached_numbers(window.shape) for window, _ in views)
    numbers = job.spec.text_tokens * job.spec.text_width + job.spec.text_numbers
    out = {"latent_bytes": latents, "text_bytes_at_most": 4 * numbers * len(reads.captions)}
    if adapter is not None:
        out["checkpoint_bytes"] = bytes_a_parameter(job.config) * adapter["parameters"]
        out["checkpoints"] = checkpoints_at_most(job.config, job.steps)
        out["run_bytes"] = (
            out["checkpoints"] * out["checkpoint_bytes"] + 4 * adapter["parameters"]
        )
    return out


def experts_of(job: Job) -> dict[str, Any] | None:
    """Of a model with several experts the steps that each one trains for; None where there is one denoiser."""
    if len(job.spec.experts) == 1:
        return None
    expert_schedule = make_expert_schedule(
        job.spec, job.config, make_objective(job.spec, job.config)
    )
    steps = {
        expert.name: expert_schedule.count(job.steps, expert.name)
        for expert in job.spec.experts
    }
    each = [
        {"name": e.name, "from": e.t_lo, "to": e.t_hi, "steps": steps[e.name]}
        for e in job.spec.experts
    ]
    return {"period": expert_schedule.period, "each": each}


def bytes_a_parameter(config: schema.Config) -> int:
    """What a checkpoint holds of each trained number: itself, two moments, and its average if there is one."""
    weight = 2 if config.optimizer.masters == "STOCHASTIC_ROUNDING" else 4
    averaged = config.ema.decay is not None or config.optimizer.name == "SCHEDULE_FREE"
    return (
        weight
        + optimizers.OPTIMIZERS[config.optimizer.name].state_bytes
        + (4 if averaged else 0)
    )


def checkpoints_at_most(config: schema.Config, steps: int) -> int:
    """How many checkpoints stay: the saves, the last and the best one, and the backups."""
    saves = -(-steps // (config.save_every or steps))
    if config.save_keep is not None:
        saves = min(saves, config.save_keep + 1)
    return saves + (config.backup_keep if config.backup_after or config.backup_every else 0)
