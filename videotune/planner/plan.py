"""The plan of a run: steps, views of each clip, tokens, disk.

Memory and time are added by ``planner/fit.py``.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from videotune.config import schema
from videotune.config.base_models import download_size
from videotune.config.sections import Condition
from videotune.data.dataset import totals
from videotune.data.remarks import codes_of, most_serious_first
from videotune.exporter.formats import check_formats
from videotune.job.experts import trained
from videotune.job.job import Job
from videotune.latent_cache import exposure, sampler
from videotune.models.base_model import has_weights_here
from videotune.planner.cache_size import cache_size
from videotune.planner.network_facts import network_facts, skeleton_family
from videotune.planner.step_spec import state_bytes_per_number
from videotune.trainer.build import make_objective
from videotune.trainer.expert_pool import make_expert_schedule
from videotune.trainer.optimizer_contract import refuse_failing_optimizer
from videotune.types import ClipShape
from videotune.validation.overhead import notes_on_validations, overhead


def make_plan(job: Job, targets: Sequence[int] = exposure.TARGETS) -> dict[str, Any]:
    """Return the plan as ``plan --json`` prints it and ``plan.json`` stores it.

    Args:
        job: The run.
        targets: Numbers of views for which the plan has the steps.
    """
    config = job.config
    refuse_failing_optimizer(config)
    adapter = adapter_size(job)
    notes = most_serious_first([*job.notes, *notes_on_validations(job)])
    views = job.exposure(job.steps).to_json(config.learning_rate)
    return {
        # of memory and time: planner/fit.py fills them
        "fits": None,
        "verdict": None,
        "hours": None,
        "hours_beside": None,
        "hours_encoding": None,
        "price": None,
        "device": None,
        "host": None,
        "seconds_a_step": None,
        "examples": [],
        "chosen": None,
        "processes": None,
        "simulation": None,
        "ways": None,
        "remedies": [],
        "effective_batch": job.effective_batch,
        "micro_batch": min(
            config.micro_batch_size or config.batch_size, config.batch_size
        ),
        "steps": job.steps,
        "clips": totals(job.library),
        "windows": len(job.library.windows),
        "sound_windows": sound_windows_of(job),
        "held_out_windows": len(job.library.held_out_windows),
        "views": views | {"steps_for": steps_for_views(job, targets)},
        "buckets": buckets_of(job),
        "pipeline_arguments": pipeline_arguments(job),
        "adapter": adapter,
        "experts": experts_of(job),
        "conditions": conditions_of(job),
        "takes": list(job.spec.conditions),
        "licence": licence_of(job),
        "licence_name": job.spec.licence,
        "download": download_of(job),
        "beside": overhead(job),
        "disk": disk(job, adapter),
        "notes": notes,
        "note_codes": codes_of(notes),
        "settings": config.model_dump(mode="json"),
    }


def licence_of(job: Job) -> dict[str, str] | None:
    """Return the base model's licence if its terms have to be accepted before a run."""
    spec = job.spec
    if not spec.licence_terms:
        return None
    return {"model": spec.title, "name": spec.licence, "terms": spec.licence_terms}


def download_of(job: Job) -> dict[str, Any] | None:
    """Return how large the base model's download is, if that is known without asking
    the Hub; None also for one that is on this machine.
    """
    if job.base is None or has_weights_here(job.base):
        return None
    size = download_size(job.base.name.partition("@")[0])
    return None if size is None else asdict(size)


def sound_windows_of(job: Job) -> int | None:
    """Return how many training windows have sound; None if the run does not read it."""
    if not job.config.reads_sound:
        return None
    return sum(window.shape.sound for window in job.library.windows)


def buckets_of(job: Job) -> list[dict[str, Any]]:
    """Return the buckets with their windows, share of the steps, batch and tokens.

    Buckets of one shape and batch are one row, such as those of several phases.
    """
    window_ids: dict[tuple[ClipShape, int], set[str]] = {}
    shares: Counter[tuple[ClipShape, int]] = Counter()
    for shape, bucket, batch, share in zip(
        job.shapes, job.buckets, job.schedule.batch_sizes, job.shares, strict=True
    ):
        row_key = (shape, batch)
        window_ids.setdefault(row_key, set()).update(window.id for window in bucket)
        shares[row_key] += share  # type: ignore[assignment]

    order = {shape: position for position, shape in enumerate(job.shapes_by_cost)}
    rows = []
    for shape, batch in sorted(shares, key=lambda key: (order[key[0]], key[1])):
        row = {
            "shape": str(shape),
            "sound": shape.sound,
            "windows": len(window_ids[shape, batch]),
            "share": round(shares[shape, batch], 4),
            "batch": batch,
            "tokens": job.spec.tokens(shape),
        }
        rows.append(row)
    return rows


def steps_for_views(job: Job, targets: Sequence[int]) -> dict[str, int]:
    """Return the step at which the most shown training window has each number of views."""
    has_training_window = any(
        window.clip_id not in job.library.regularization
        for window in job.library.windows
    )
    if not has_training_window:
        return {}

    repeats = max(clip.repeats for clip in job.library.clips if not clip.held_out)
    guess = float(sampler.steps_per_epoch(job.schedule)) / repeats
    steps = {}
    for views in sorted(targets):
        step = exposure.steps_for(views, job.exposure, guess)
        if step is None:
            continue
        # views from before a change of the data have no known step: the change is later
        steps[str(views)] = max(job.view_history.step, step)
    return steps


def adapter_size(job: Job) -> dict[str, Any] | None:
    """Return modules and parameters that train, in all experts; None without a base
    model.

    "groups" counts each kind of module in one expert, with * for a block's number;
    "parts" has its numbers by part, as a run reports how far they have moved; "idle" those that are named and do not train.
    """
    if job.base is None:
        return None
    family = skeleton_family(job)
    check_formats(job.config, family)

    facts = network_facts(job)
    experts = len(trained(job.spec, job.config))
    text_modules, text_numbers = facts.text
    return {
        "modules": experts * facts.modules + text_modules,
        "parameters": experts * facts.parameters + text_numbers,
        "groups": facts.groups,
        "parts": facts.parts,
        "idle": facts.idle,
    }


def pipeline_arguments(job: Job) -> dict[str, Any]:
    """Return the arguments with which diffusers' pipeline draws what was trained, where
    they differ from its defaults.
    """
    arguments = dict(job.spec.pipeline_arguments)
    if job.spec.takes_frame_rate:
        frame_rate = job.config.video_config.target_fps or job.spec.rules.fps
        arguments["frame_rate"] = float(frame_rate)

    sample = job.config.sample
    guidance = job.spec.sample_guidance if sample.guidance is None else sample.guidance
    if guidance <= 1:
        return arguments | dict(job.spec.unguided_arguments)
    if sample.guidance_rescale != job.spec.sample_rescale:
        arguments["guidance_rescale"] = sample.guidance_rescale
    return arguments


def conditions_of(job: Job) -> list[dict[str, Any]]:
    """Return what some samples are given clean, and who samples with it."""
    config = job.config
    conditions = list(config.conditions)
    if config.first_frame_probability:
        first_frame = Condition(
            type="first_frame", probability=config.first_frame_probability
        )
        conditions.insert(0, first_frame)

    rows = []
    for condition in conditions:
        if not condition.probability:
            continue
        latent_frames = condition.latent_frames
        if condition.type in ("prefix", "suffix"):
            latent_frames = condition.frames_given
        support = job.spec.conditions[condition.type]
        rows.append(
            {
                "type": condition.type,
                "probability": condition.probability,
                "latent_frames": latent_frames,
                "mechanism": support.mechanism,
                "in_diffusers": support.in_diffusers,
            }
        )
    return rows


def disk(job: Job, adapter: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the calculated bytes of the cache (at most), the checkpoints and the
    export.
    """
    spec = job.spec
    cache = cache_size(job)
    text_numbers = spec.text_tokens * spec.text_width + spec.text_numbers
    sizes = {
        "latent_entries": cache.windows.count,
        "latent_bytes": cache.windows.bytes,
        "condition_entries": cache.conditions.count,
        "condition_bytes": cache.conditions.bytes,
        "text_bytes_at_most": 4 * text_numbers * cache.captions,
    }
    if adapter is not None:
        assert job.base is not None
        family = skeleton_family(job)
        state = state_bytes_per_number(family, spec, job.config)
        checkpoint = round(bytes_a_parameter(job.config, state) * adapter["parameters"])
        checkpoints = checkpoints_at_most(job.config, job.steps)
        sizes["checkpoint_bytes"] = checkpoint
        sizes["checkpoints"] = checkpoints
        sizes["run_bytes"] = checkpoints * checkpoint + 4 * adapter["parameters"]
    return sizes


def experts_of(job: Job) -> dict[str, Any] | None:
    """Return the steps of each expert; None for a model with one denoiser."""
    if len(job.spec.experts) == 1:
        return None
    objective = make_objective(job.spec, job.config)
    expert_schedule = make_expert_schedule(job.spec, job.config, objective)
    each = []
    for expert in job.spec.experts:
        steps = expert_schedule.count(job.steps, expert.name)
        row = {
            "name": expert.name,
            "from": expert.t_lo,
            "to": expert.t_hi,
            "steps": steps,
        }
        each.append(row)
    return {"period": expert_schedule.turn_length, "each": each}


def bytes_a_parameter(config: schema.Config, state: float) -> float:
    """Return the bytes of a checkpoint for each trained number.

    They are those of the number, of the optimizer's ``state``, and of its average.
    """
    weight = 2 if config.optimizer.masters == "STOCHASTIC_ROUNDING" else 4
    has_average = (
        config.ema.decay is not None or config.optimizer.name == "SCHEDULE_FREE"
    )
    average = 4 if has_average else 0
    return weight + state + average


def checkpoints_at_most(config: schema.Config, steps: int) -> int:
    """Return the number of checkpoints that stay: saves, the last and best one,
    backups.
    """
    saves = -(-steps // (config.save_every or steps))
    if config.save_keep is not None:
        saves = min(saves, config.save_keep + 1)
    has_backups = config.backup_after or config.backup_every
    return saves + (config.backup_keep if has_backups else 0)
