"""Whether a run fits a card, how long it takes, and what would make it fit.

Memory settings that the config leaves open are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from videotune.config.schema import Config
from videotune.config.validators import cannot_wait
from videotune.job.job import Job
from videotune.memory.accelerator import has_streams, local_device
from videotune.memory.block_offload import spread
from videotune.memory.checkpointing import ON
from videotune.memory.quantization import bytes_a_number
from videotune.planner import memory
from videotune.planner.cache_size import cache_size, encoding_seconds
from videotune.planner.cluster import Cluster
from videotune.planner.denoiser_size import host_checkpointing
from videotune.planner.gpus import (
    USUAL,
    Card,
    find_card,
    known_card,
)
from videotune.planner.ledger import CountsByPart
from videotune.planner.memory import Constraints, Need
from videotune.planner.network_facts import linear_sizes
from videotune.planner.processes import (
    message_seconds_of,
)
from videotune.planner.read_step import (
    step_spec,
    step_spec_in_parts,
    step_spec_with_tiles,
)
from videotune.planner.step_spec import (
    UNCHANGED,
    StepSpec,
    sharded,
    with_shared_samples,
)
from videotune.planner.traffic import exchanged_bytes_per_token, process_count
from videotune.text import memory_size
from videotune.trainer.build import (
    DTYPES,
    dtype_name,
    half_precision,
    weights_of,
)

MEMORY_KEYS = ("micro_batch_size", "gradient_checkpointing", "layer_offload_fraction")
"""Keys that are chosen if the config leaves them open."""

TIGHT = 0.05
"""Share of a card's memory that should stay free: figures are calculated, not measured."""

DESKTOP = 768 << 20
"""Bytes that should stay free on a card that may draw a desktop."""

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Fit:
    """The chosen settings, what they need, and whether the card has it."""

    fraction: float
    """The layer_offload_fraction."""
    training: Need
    phases: Mapping[str, tuple[str, CountsByPart]]
    """(way, bytes by part) of each phase of the run."""
    vram: int | None
    card: Card | None
    fits: bool | None
    """None: no card is named."""
    remedies: tuple[str, ...] = ()
    spare: int = 0
    """Bytes of the card that should stay free."""
    unstreamed: int = 0
    """Bytes that a card must have if nothing waits on the host."""
    cluster: Cluster | None = None
    """The machines. None: one, with all processes."""

    @property
    def verdict(self) -> Verdict | None:
        """Whether the card has room, also for what should stay free; None: no card."""
        if self.vram is None:
            return None
        if not self.fits:
            return "does not fit"
        return "fits" if self.needed <= self.vram - self.spare else "tight"

    @property
    def needed(self) -> int:
        """Bytes that a card must have."""
        return memory.room(self.phases[self.worst][1])

    @property
    def worst(self) -> str:
        """The phase of the run that needs most."""
        return max(self.phases, key=lambda phase: memory.room(self.phases[phase][1]))

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings by their keys."""
        choice = self.training.choice
        values = (choice.micro_batch, choice.checkpointing, round(self.fraction, 4))
        return dict(zip(MEMORY_KEYS, values, strict=True))


def requested_card(
    vram: float | None, name: str | None
) -> tuple[int | None, Card | None]:
    """Return (bytes of memory, card) as the user names them, or those of this machine.

    Args:
        vram: Memory in GiB, as cards are sold and nvidia-smi shows them.
        name: Name of a card.
    """
    card = None if name is None else find_card(name, vram)
    if vram is not None:
        return int(vram * 2**30), card
    if card is not None:
        return card.vram, card

    device = local_device()
    if not has_streams(device):
        return None, None
    # other programs, such as a desktop, may hold some of the memory
    free, total = torch.accelerator.get_memory_info(device)
    reserved = torch.accelerator.memory_reserved(device)
    driver_name = torch.get_device_module(device).get_device_name(device)
    return free + reserved, known_card(driver_name, total)


def spare_memory(vram: int, *, is_free: bool) -> int:
    """Return the bytes of a card that should stay free.

    Args:
        vram: Bytes of the card.
        is_free: They are free on this machine, so that a desktop is counted already.
    """
    share = round(TIGHT * vram)
    return share if is_free else max(share, DESKTOP)


def planned_dtype(config: Config, on_card: bool, card: Card | None = None) -> str:
    """Return the dtype of the plan: BFLOAT_16 on a card that has it, unless the config
    names another.

    Args:
        config: The config.
        on_card: Whether the plan is for a card.
        card: The card, if it is known.
    """
    if config.train_dtype:
        return config.train_dtype
    if not on_card:
        return dtype_name(config)
    has_bf16 = card is None or card.has_bf16
    return half_precision(config, has_bf16=has_bf16, has_float16=True)


def implied_constraints(config: Config, batch: int) -> Constraints:
    """Return the memory settings that other keys of the config imply.

    Args:
        config: The config.
        batch: Samples of a pass that is not split.
    """
    is_sharded = config.sharding == "FULL"
    cannot_stream = is_sharded or cannot_wait(config)
    # gradients that are applied at once cannot be summed over several passes
    micro_batch = batch if config.optimizer.step_in_backward else None
    return Constraints(
        micro_batch=micro_batch,
        streamed=0 if cannot_stream else None,
        allows_cpu_offload=not is_sharded,
        accumulates=config.gradient_accumulation_steps > 1,
    )


def config_constraints(config: Config, blocks: int, batch: int) -> Constraints:
    """Return the memory settings that the config names or implies.

    Args:
        config: The config.
        blocks: Number of blocks of the denoiser.
        batch: Samples of a pass that is not split.
    """
    implied = implied_constraints(config, batch)
    streamed = implied.streamed
    if config.layer_offload_fraction is not None:
        streamed = len(spread(blocks, config.layer_offload_fraction))
    return replace(
        implied,
        micro_batch=implied.micro_batch or config.micro_batch_size,
        checkpointing=config.gradient_checkpointing,
        streamed=streamed,
    )


def process_share(job: Job, spec: StepSpec, dtype: str) -> StepSpec:
    """Return what this process holds of a step: its tokens, if samples are shared, and
    its shards, if the weights are sharded.
    """
    config = job.config
    if config.context_parallel > 1:
        tokens = max(job.spec.video_tokens(shape) for shape in job.shapes)
        exchanged = tokens * exchanged_bytes_per_token(job, dtype)
        spec = with_shared_samples(spec, config.context_parallel, exchanged)
    if config.sharding != "FULL" or process_count(job) == 1:
        return spec
    is_full = config.training_method == "FINE_TUNE" and config.transformer.train
    return sharded(spec, process_count(job), is_full)


def pass_samples(job: Job) -> list[int]:
    """Return the samples of an unsplit forward pass of each bucket."""
    passes = job.config.gradient_accumulation_steps * job.processes
    return [-(-batch // passes) for batch in job.schedule.batch_sizes]


def fit(
    job: Job,
    dtype: str,
    vram: int | None,
    card: Card | None,
    host: int | None = None,
    *,
    spare: int = 0,
) -> Fit:
    """Choose the open memory settings so that the run fits and is fastest.

    Args:
        job: The run.
        dtype: The dtype of the training.
        vram: Bytes of the device. None: no limit; nothing is streamed then.
        card: Rates of the device.
        host: Free bytes of host memory. None: unknown, such as another machine's.
        spare: Bytes of the device that stay free, unless the run fits only without.
    """
    if vram is not None and spare:
        roomy = _fit_within(job, dtype, vram - spare, card, host)
        if roomy.fits:
            return replace(roomy, vram=vram, spare=spare)
    return replace(_fit_within(job, dtype, vram, card, host), spare=spare)


def _fit_within(
    job: Job, dtype: str, vram: int | None, card: Card | None, host: int | None
) -> Fit:
    """Choose the open memory settings for a device of which all bytes may be used."""
    spec = process_share(job, step_spec(job, dtype), dtype)
    config = job.config
    batch = max(pass_samples(job))
    constraints = config_constraints(config, len(spec.blocks), batch)
    if vram is None:
        mode = constraints.checkpointing or host_checkpointing(job)
        constraints = replace(
            constraints,
            micro_batch=constraints.micro_batch or batch,
            checkpointing=mode,
            streamed=constraints.streamed or 0,
        )

    limit = math.inf if vram is None else vram
    fastest = memory.fastest(spec, batch, constraints, limit, card or USUAL, host)
    if fastest is None and constraints.checkpointing is None:
        spec = process_share(job, step_spec_in_parts(job, dtype), dtype)
        constraints = replace(constraints, tries_parts=True)
        fastest = memory.fastest(spec, batch, constraints, limit, card or USUAL, host)
    training = fastest or memory.smallest(spec, batch, constraints)
    other_phases = memory.fit_other_phases(spec, training, vram)
    preview = other_phases.get("preview")
    if vram is not None and preview is not None and memory.room(preview[1]) > vram:
        tiled_spec = process_share(job, step_spec_with_tiles(job, dtype), dtype)
        other_phases = memory.fit_other_phases(tiled_spec, training, vram)

    streamed = training.choice.streamed
    way = f"{streamed} of {len(spec.blocks)} blocks streamed" if streamed else UNCHANGED
    phases: dict[str, tuple[str, CountsByPart]] = {
        "training": (way, training.device[training.worst]),
        **other_phases,
    }
    fits = None
    if vram is not None:
        most = max(memory.room(parts) for _, parts in phases.values())
        fits = fastest is not None and most <= vram
    fraction = config.layer_offload_fraction
    if fraction is None:
        fraction = streamed / len(spec.blocks)

    unstreamed = unstreamed_bytes(spec, training, constraints)
    result = Fit(fraction, training, phases, vram, card, fits, unstreamed=unstreamed)
    if fits is False:
        result = replace(result, remedies=remedies(result, spec, job, dtype))
    return result


def unstreamed_bytes(spec: StepSpec, training: Need, constraints: Constraints) -> int:
    """Return the bytes that a card must have if nothing waits on the host: all blocks on
    the card, and every other phase done the plainest way.
    """
    choice = replace(
        training.choice, streamed=0, checkpointing=constraints.checkpointing or ON
    )
    resident = memory.need(spec, choice)
    other_phases = memory.fit_other_phases(spec, resident, None)
    needs = [memory.room(parts) for _, parts in other_phases.values()]
    return max([resident.needed, *needs])


def remedies(result: Fit, spec: StepSpec, job: Job, dtype: str) -> tuple[str, ...]:
    """Return what would make the run fit, the cheapest remedy first.

    Rounded frozen weights are suggested but never chosen: they change the base model.
    """
    assert result.vram is not None
    vram = result.vram
    too_large = {
        phase
        for phase, (_, parts) in result.phases.items()
        if memory.room(parts) > vram
    }
    lines = []
    if "training" in too_large:
        lines += _training_remedies(job, dtype, vram)
    if not too_large:  # the card has room, and the host has not
        host = memory_size(sum(result.training.host.values()))
        lines.append(
            f"the host has too little memory for what would wait there ({host})"
        )
    if "encoding clips" in too_large:
        lines.append(
            "encoding the largest clips: "
            "fewer frames (video_config.frames) or a lower resolution"
        )
    if "preview" in too_large:
        lines.append(
            "previews: sample.frames and sample.resolution make them smaller, "
            "sample_after=0 draws none"
        )
    if "encoding text" in too_large:
        lines.append(
            "the text encoder: fill the cache on a larger card first (videotune cache)"
        )
    lines += _rounding_remedies(job, dtype, too_large)
    return tuple(lines)


def _training_remedies(job: Job, dtype: str, vram: int) -> list[str]:
    """Return what would make the training step fit."""
    config = job.config
    batch = max(pass_samples(job))
    spec = process_share(job, step_spec_in_parts(job, dtype), dtype)
    constraints = replace(implied_constraints(config, batch), tries_parts=True)
    least = memory.smallest(spec, batch, constraints)
    share = f"{least.choice.streamed / len(spec.blocks):.2f}"
    values = (least.choice.micro_batch, least.choice.checkpointing, share)
    settings = " ".join(
        f"{key}={value}" for key, value in zip(MEMORY_KEYS, values, strict=True)
    )
    need = memory_size(least.needed)
    if least.needed <= vram:
        return [
            f"training: left open, the settings that need least ({settings}) would fit: {need}"
        ]

    lines = [
        f"training: the settings that need least ({settings}) need {need}: take a larger card, "
        f"fewer frames (video_config.frames) or a lower resolution"
    ]
    if job.spec.splits_tokens and config.context_parallel == 1:
        lines.append(
            "several cards can share each sample (context_parallel): plan --gpus N"
        )
    if config.text_encoder.train:
        lines.append(
            "text_encoder.train=false leaves the text encoder as it is, outside of the step"
        )
    if config.training_method == "FINE_TUNE":
        lines.append(
            "training_method=LORA trains a small part of the weights, with a small optimizer"
        )
    return lines


def _rounding_remedies(job: Job, dtype: str, too_large: set[str]) -> list[str]:
    """Return which frozen weights could be rounded."""
    config = job.config
    weights = weights_of(config, dtype)
    lines = []
    is_full = config.training_method == "FINE_TUNE"
    denoiser_matters = bool(too_large & {"training", "preview"})
    is_rounded = weights.transformer is not None or weights.matmul is not None
    if not is_rounded and not is_full and denoiser_matters:
        numbers = linear_sizes(job).block_weights
        saved = {}
        for kind in ("FLOAT_8", "NFLOAT_4"):
            bytes_saved = DTYPES[dtype].itemsize - bytes_a_number(kind)
            saved[kind] = memory_size(round(numbers * bytes_saved))
        lines.append(
            f"weight_dtype=FLOAT_8 rounds frozen weights, which is another base: "
            f"the denoiser's take {saved['FLOAT_8']} less, "
            f"{saved['NFLOAT_4']} less in NFLOAT_4"
        )

    encoder_matters = config.text_in_step or "encoding text" in too_large
    if (
        weights.text_encoder in (None, "BFLOAT_16")
        and not config.text_encoder.train
        and encoder_matters
    ):
        lines.append(
            "text_encoder.weight_dtype=FLOAT_8 takes half of the text encoder's memory, "
            "NFLOAT_4 a quarter"
        )
    return lines


def cache_seconds(
    job: Job, spec: StepSpec, card: Card, *, is_cpu: bool = False
) -> float:
    """Return the calculated seconds in which all processes fill an empty cache."""
    size = cache_size(job)
    pixels = size.windows.pixels + size.conditions.pixels
    flops_per_pixel = spec.encoding_flops_per_pixel
    seconds = encoding_seconds(pixels, flops_per_pixel, card, is_cpu=is_cpu)
    return seconds / process_count(job)


def step_seconds(
    job: Job,
    spec: StepSpec,
    training: Need,
    card: Card,
    dtype: str,
    cluster: Cluster | None = None,
) -> float:
    """Return the calculated seconds of a step: the mean over the buckets.

    Args:
        job: The run.
        spec: The step of a whole network.
        training: What a process needs with the chosen settings.
        card: The card.
        dtype: The dtype of the training.
        cluster: The machines. None: one, with all processes.
    """
    computing = 0.0
    by_bucket = computing_seconds(job, spec, training, card)
    for seconds, share in zip(by_bucket, job.shares, strict=True):
        computing += seconds * share

    sent = message_seconds_of(job, spec, training, dtype, card, cluster)
    # Weights arrive while blocks compute; for everything else the step waits.
    return max(computing + sent.waiting, sent.beside)


def computing_seconds(
    job: Job, spec: StepSpec, training: Need, card: Card
) -> list[float]:
    """Return the seconds that a process computes in a step of each bucket."""
    by_bucket = []
    for shape, samples in zip(job.shapes, pass_samples(job), strict=True):
        work = memory.relative_work(spec, job.spec.tokens(shape))
        seconds = memory.seconds(training, samples, card, work)
        by_bucket.append(job.config.gradient_accumulation_steps * seconds)
    return by_bucket
