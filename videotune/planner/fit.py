"""Whether a run fits a card and how long it takes: the settings that are left open are chosen, what cannot be is told."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from videotune.config.resolve import Resolved
from videotune.config.schema import Config
from videotune.config.validators import cannot_compile, cannot_wait
from videotune.console import echo, size
from videotune.errors import DoesNotFit
from videotune.job.job import Job
from videotune.memory.accelerator import local_device, overlaps
from videotune.memory.block_offload import spread
from videotune.memory.checkpointing import OFF, ON
from videotune.memory.compiling import no_compiler
from videotune.memory.quantization import bytes_a_number
from videotune.models.registry import find
from videotune.planner import memory
from videotune.planner.gpus import USUAL, Card, known_card
from videotune.planner.gpus import card as card_of
from videotune.planner.measure import CountsByPart
from videotune.planner.memory import Fixed, Need, StepSpec
from videotune.trainer.build import DTYPES, dtype_name, weights_of
from videotune.validation.overhead import overhead, plan_overhead, total_share

OPEN = ("micro_batch_size", "gradient_checkpointing", "layer_offload_fraction")
"""The keys that are chosen where the person leaves them open."""

PROGRAM = 3 << 30
"""Bytes on the host of Python, torch and the libraries of a card."""


@dataclass(frozen=True)
class Fit:
    """What was chosen, what it needs, and whether the card has it (None: no card is named).

    ``phases``: for each time of the run in which way it is done, and its parts.
    """

    fraction: float
    training: Need
    phases: Mapping[str, tuple[str, CountsByPart]]
    vram: int | None
    card: Card | None
    fits: bool | None
    remedies: tuple[str, ...] = ()

    @property
    def worst(self) -> str:
        """The time of the run that needs most."""
        return max(self.phases, key=lambda name: memory.room(self.phases[name][1]))

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings by their keys."""
        choice = self.training.choice
        return dict(
            zip(
                OPEN,
                (choice.micro_batch, choice.checkpointing, round(self.fraction, 4)),
                strict=True,
            )
        )


def asked_card(vram: float | None, name: str | None) -> tuple[int | None, Card | None]:
    """(bytes of a card's memory, the card), as the person says or as this machine has it; None: no card."""
    card = None if name is None else card_of(name)
    if vram is not None:
        return int(vram * 1e9), card
    device = local_device()
    if card is None and overlaps(device):
        free, whole = torch.accelerator.get_memory_info(
            device
        )  # other programs, a desktop say, hold some of it
        own = torch.accelerator.memory_reserved(device)
        return free + own, known_card(
            torch.get_device_module(device).get_device_name(device), whole
        )
    return (card.vram if card else None), card


def planned_dtype(config: Config, on_card: bool) -> str:
    """The dtype of the plan: of a card BFLOAT_16 unless the config says otherwise, whatever this machine has."""
    return config.train_dtype or ("BFLOAT_16" if on_card else dtype_name(config))


def forced(config: Config, batch: int) -> Fixed:
    """What keys beside those of memory leave no choice of; ``batch``: samples of a pass that is not split."""
    whole = (
        batch if config.optimizer.step_in_backward else None
    )  # gradients that are used at once cannot be summed
    stays = config.sharding == "FULL"
    several = config.gradient_accumulation_steps > 1
    return Fixed(
        whole,
        streamed=0 if stays or cannot_wait(config) else None,
        waits=not stays,
        accumulates=several,
    )


def fixed(config: Config, blocks: int, batch: int) -> Fixed:
    """What the person has decided of memory, by its own keys or by others; ``batch`` as in ``forced``."""
    leaves = forced(config, batch)
    fraction = config.layer_offload_fraction
    streamed = leaves.streamed if fraction is None else len(spread(blocks, fraction))
    size = leaves.micro_batch or config.micro_batch_size
    mode = config.gradient_checkpointing
    return replace(leaves, micro_batch=size, checkpointing=mode, streamed=streamed)


def own_share(job: Job, spec: StepSpec) -> StepSpec:
    """What this process holds of a step: where weights are sharded its part."""
    if job.config.sharding != "FULL" or job.processes == 1:
        return spec
    whole = job.config.training_method == "FINE_TUNE" and job.config.transformer.train
    return memory.sharded(spec, job.processes, whole)


def pass_samples(job: Job) -> list[int]:
    """Of each bucket the samples that one forward pass takes where it is not split further."""
    return [
        -(-batch // (job.config.gradient_accumulation_steps * job.processes))
        for batch in job.schedule.batches
    ]


def fit(
    job: Job, dtype: str, vram: int | None, card: Card | None, host: int | None = None
) -> Fit:
    """Choose what is left open so that the run fits into ``vram`` bytes and is fastest.

    Without a limit: what a training on this machine's processor takes, and nothing on the host. ``host``: bytes of host
    memory that are free (None: not known, as of another machine).
    """
    spec = own_share(job, memory.step_spec(job, dtype))
    config = job.config
    batch = max(pass_samples(job))
    own = fixed(config, len(spec.blocks), batch)
    if vram is None:
        mode = own.checkpointing or str(on_host(job)["gradient_checkpointing"])
        own = replace(
            own,
            micro_batch=own.micro_batch or batch,
            checkpointing=mode,
            streamed=own.streamed or 0,
        )
    found = memory.fastest(
        spec, batch, own, vram if vram is not None else 1 << 60, card or USUAL, host
    )
    training = found or memory.smallest(spec, batch, own)
    away = memory.others(spec, training, vram)
    if vram is not None and "preview" in away and memory.room(away["preview"][1]) > vram:
        away = memory.others(own_share(job, memory.with_tiles(job, dtype)), training, vram)
    streamed = training.choice.streamed
    way = f"{streamed} of {len(spec.blocks)} blocks streamed" if streamed else memory.UNCHANGED
    phases: dict[str, tuple[str, CountsByPart]] = {
        "training": (way, training.device[training.worst]),
        **away,
    }
    most = max(memory.room(parts) for _, parts in phases.values())
    fits = None if vram is None else found is not None and most <= vram
    given = config.layer_offload_fraction
    fraction = (
        given if given is not None else training.choice.streamed / max(1, len(spec.blocks))
    )
    result = Fit(fraction, training, phases, vram, card, fits)
    return (
        replace(result, remedies=remedies(result, spec, job, dtype))
        if fits is False
        else result
    )


def remedies(tried: Fit, spec: StepSpec, job: Job, dtype: str) -> tuple[str, ...]:
    """What would make it fit, in the order of what it costs.

    Rounding frozen weights is named where they stand in the way, and never chosen: it changes the base.
    """
    config = job.config
    vram = tried.vram or 0
    batch = max(pass_samples(job))
    lines = []
    full = config.training_method == "FINE_TUNE"
    kept = weights_of(config, dtype)
    short = {name for name, (_, parts) in tried.phases.items() if memory.room(parts) > vram}
    if "training" in short:
        least = memory.smallest(spec, batch, forced(config, batch))
        choice = least.choice
        share = f"{least.choice.streamed / max(1, len(spec.blocks)):.2f}"
        values = zip(OPEN, (choice.micro_batch, choice.checkpointing, share), strict=True)
        settings = " ".join(f"{key}={value}" for key, value in values)
        if least.needed <= vram:
            lines.append(
                f"left open, the settings that need least ({settings}) would fit: {size(least.needed)}"
            )
        else:
            less = (
                "take a larger card, fewer frames (video_config.frames) or a lower resolution"
            )
            lines.append(
                f"the settings that need least ({settings}) need {size(least.needed)}: {less}"
            )
            if config.text_encoder.train:
                lines.append(
                    "text_encoder.train=false leaves the text encoder as it is, outside of the step"
                )
            if full:
                lines.append(
                    "training_method=LORA trains a small part of the weights, with a small optimizer"
                )
    if not short:  # the card would have room, and the host has not
        there = sum(tried.training.host.values())
        lines.append(
            f"the host has too little memory for what would wait there ({size(there)})"
        )
    if "encoding clips" in short:
        lines.append(
            "encoding the largest clips: fewer frames (video_config.frames) or a lower resolution"
        )
    if "preview" in short:
        lines.append(
            "previews: sample.frames and sample.resolution make them smaller, sample_after=0 draws none"
        )
    if "encoding text" in short:
        lines.append(
            "the text encoder: fill the cache on a larger card first (videotune cache)"
        )
    if kept.transformer is None and not full and short & {"training", "preview"}:
        numbers = linear_sizes(job).block_weights
        width = DTYPES[dtype].itemsize
        half, quarter = (
            size(round(numbers * (width - bytes_a_number(kind))))
            for kind in ("FLOAT_8", "NFLOAT_4")
        )
        rounding = (
            "weight_dtype=FLOAT_8 rounds frozen weights, which is another base (docs/memory.md)"
        )
        lines.append(f"{rounding}: the denoiser's take {half} less, {quarter} less in NFLOAT_4")
    encoder = config.text_in_step or "encoding text" in short
    if kept.text_encoder is None and not config.text_encoder.train and encoder:
        lines.append(
            "text_encoder.weight_dtype=FLOAT_8 takes half of the text encoder's memory, NFLOAT_4 a quarter"
        )
    return tuple(lines)


def to_json(result: Fit, job: Job, dtype: str, checkpoint_bytes: int = 0) -> dict[str, Any]:
    """``plan.json``'s part of it. ``checkpoint_bytes``: of its tensors, which are copied before they are written."""
    spec = memory.step_spec(job, dtype)
    training = result.training
    _, worst = result.phases[result.worst]
    host = {
        "program": PROGRAM,
        **training.host,
        "checkpoint while it is written": checkpoint_bytes,
    }
    times: dict[str, float | None] = dict.fromkeys(("hours", "hours_beside", "seconds_a_step"))
    if result.card is not None and result.card.timed:
        took = step_seconds(job, spec, training, result.card)
        hours = took * job.steps / 3600
        beside = round(hours * total_share(overhead(job)), 3)
        times = {
            "hours": round(hours, 3),
            "hours_beside": beside,
            "seconds_a_step": round(took, 4),
        }
    return {
        "fits": result.fits,
        **times,
        "device": {
            "card": result.card.name if result.card else None,
            "measured": result.card and result.card.measured,
            "vram_bytes": result.vram,
            **bytes_of(worst),
            "phase": result.worst,
            "parts": {name: count for name, count in worst.items() if count},
            "phases": {
                name: {"way": way, **bytes_of(parts)}
                for name, (way, parts) in result.phases.items()
            },
        },
        "host": {
            "total_bytes": psutil.virtual_memory().total,
            "need_bytes": sum(host.values()),
            "parts": host,
        },
        "chosen": result.chosen,
        "micro_batch": training.choice.micro_batch,
        "remedies": list(result.remedies),
    }


def bytes_of(parts: CountsByPart) -> dict[str, int]:
    """What a card must have for these parts, and what they are."""
    return {"need_bytes": memory.room(parts), "allocated_bytes": sum(parts.values())}


def step_seconds(job: Job, spec: StepSpec, training: Need, card: Card) -> float:
    """Seconds of a step, calculated: the mean over the buckets."""
    each = [
        memory.seconds(training, own, card, memory.lighter(spec, job.spec.tokens(shape)))
        for shape, own in zip(job.shapes, pass_samples(job), strict=True)
    ]
    mean = sum(time * share for time, share in zip(each, job.shares, strict=True))
    return job.config.gradient_accumulation_steps * mean


# ---- before a training


def fit_settings(job: Job) -> Job:
    """The job with nothing of memory left open: chosen for this machine's card, or by a bound in the host's memory.

    Raises DoesNotFit, with remedies, where nothing fits the card.
    """
    if job.base is None or all(getattr(job.config, key) is not None for key in OPEN):
        return job
    if not overlaps(local_device()):
        return decided(job, on_host(job))
    vram, card = asked_card(None, None)
    if small_enough(job, vram or 0):
        return decided(job, plainest(job, OFF))
    result = fit(job, dtype_name(job.config), vram, card, psutil.virtual_memory().available)
    if result.fits is False:
        lines = "".join(f"\n  {line}" for line in result.remedies)
        needed = f"{size(memory.room(result.phases[result.worst][1]))} for {result.worst}"
        raise DoesNotFit(f"this run needs {needed}, and the card has {size(vram or 0)}:{lines}")
    echo("memory: " + ", ".join(f"{key}={value}" for key, value in result.chosen.items()))
    return decided(job, result.chosen)


def chosen_for_run(job: Job, replan: bool) -> tuple[Job, list[str]]:
    """``fit_settings`` for a run that starts or resumes; with ``replan`` what was chosen before is chosen anew, and told."""
    before = job.config
    job = decide_compile(plan_overhead(fit_settings(reopened(job) if replan else job)))
    told = []
    for key in OPEN if replan else ():
        if getattr(job.config, key) != getattr(before, key):
            told.append(
                f"replanned: {key}: {getattr(before, key)!r} -> {getattr(job.config, key)!r}"
            )
            echo(told[-1])
    return job, told


COMPILE_GAIN = 1 - 1 / 1.34
"""Share of a step's time that compiled blocks save: measured on one H100, where steps are × 1.34 to × 1.51 faster."""

COMPILE_SECONDS = 36.0
"""Seconds for the graph of a kind of block: measured on one H100, 4.5 to 36 for models of 1.3 to 14 billion."""


def decide_compile(job: Job) -> Job:
    """On a GPU ``compile: auto`` becomes true where the planned run saves more time than compiling takes; told in a line.

    A graph of each kind of block is compiled for the first bucket, and one for the shapes of all others.
    """
    if job.config.compile != "auto" or not overlaps(local_device()):
        return job
    on = False
    why = cannot_compile(job.config) or no_compiler()
    found = planned_need(job, dtype_name(job.config))
    card = asked_card(None, None)[1]
    if found is None or card is None or not card.timed:
        why = why or "how long a step takes is not known"
    elif why is None:
        saved = COMPILE_GAIN * job.steps * step_seconds(job, *found, card)
        cost = COMPILE_SECONDS * len(job.spec.blocks) * min(2, len(job.buckets))
        on = saved > cost
        why = f"it would save about {saved:.0f} s of this run, and take up to {cost:.0f} s"
    echo(f"compile: {'on' if on else 'off'}: {why}")
    return replace(job, resolved=job.resolved.with_planned({"compile": on}))


def planned_need(job: Job, dtype: str) -> tuple[StepSpec, Need] | None:
    """What a plan has read of a step, and what its settings need; None where no plan was made."""
    spec = memory.known_step_spec(job, dtype)
    config = job.config
    if spec is None or config.micro_batch_size is None or config.gradient_checkpointing is None:
        return None
    batch = max(pass_samples(job))
    plainest = memory.choices(spec, batch, fixed(config, len(spec.blocks), batch))[0]
    return spec, memory.need(own_share(job, spec), plainest)


def peak(job: Job, held: Mapping[str, int]) -> dict[str, int | None] | None:
    """What a device has held in a step at the most (a trainer's ``peaks``), beside what was planned; None elsewhere."""
    found = planned_need(job, dtype_name(job.config)) if held else None
    return {**held, "planned_bytes": found and found[1].allocated} if held else None


def reopened(job: Job) -> Job:
    """The job with what a plan has chosen open again; what the person named stays."""
    new = dict.fromkeys(key for key in OPEN if job.resolved.origins.get(key) == "plan")
    return replace(
        job, resolved=Resolved(job.config.model_copy(update=new), job.resolved.origins)
    )


def decided(job: Job, chosen: Mapping[str, Any]) -> Job:
    """The job with these values where the config left the keys open."""
    new = {key: value for key, value in chosen.items() if getattr(job.config, key) is None}
    return replace(job, resolved=job.resolved.with_planned(new))


def plainest(job: Job, checkpointing: str) -> dict[str, Any]:
    """One pass for the batch, all weights on the device."""
    return dict(zip(OPEN, (job.config.batch_size, checkpointing, 0.0), strict=True))


def on_host(job: Job) -> dict[str, Any]:
    """On a CPU and on MPS: nothing is streamed, and activations are kept where the host has room for them twice over."""
    roomy = 2 * activations_at_most(job, 4) <= psutil.virtual_memory().available
    return plainest(job, OFF if roomy else ON)


def small_enough(job: Job, vram: int) -> bool:
    """Whether a bound shows, without reading a step, that all fits with room to spare; it knows nothing of text encoders."""
    if job.config.text_in_step:
        return False
    trained = 24 if job.config.training_method == "FINE_TUNE" else 4
    return (
        2 * (trained * linear_sizes(job).parameters + activations_at_most(job, 4)) <= vram // 2
    )


class LinearSizes(NamedTuple):
    """Parameters of the denoiser; numbers into and out of its linear layers for one token; weights of those in blocks."""

    parameters: int
    in_and_out: int
    block_weights: int


def linear_sizes(job: Job) -> LinearSizes:
    """The sizes of a job's denoiser, which names a base model."""
    assert job.base is not None
    net = find(job.spec.name)(job.base.folder, torch.device("cpu"), torch.float32).skeleton()
    linear = {
        path: module for path, module in net.named_modules() if isinstance(module, nn.Linear)
    }
    inside = tuple(f"{path}." for path in job.spec.blocks)
    return LinearSizes(
        sum(p.numel() for p in net.parameters()),
        sum(one.in_features + one.out_features for one in linear.values()),
        sum(
            one.in_features * one.out_features
            for path, one in linear.items()
            if path.startswith(inside)
        ),
    )


def activations_at_most(job: Job, bytes_a_number: int) -> int:
    """A bound of what a step keeps without computing anything again: three times what its linear layers read and write.

    The 14 billion parameters of Wan keep 1.2 times that.
    """
    tokens = max(
        job.spec.tokens(shape) * batch
        for shape, batch in zip(job.shapes, job.schedule.batches, strict=True)
    )
    tokens += job.spec.text_tokens * max(job.schedule.batches)
    return 3 * bytes_a_number * tokens * linear_sizes(job).in_and_out
