"""The ways of computing a run's step that a plan compares: each kind of checkpointing,
compiled blocks, and products in eight bits, with their memory and seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from videotune.config.precision_checks import faults_with_eight_bits
from videotune.config.schema import Config
from videotune.config.validators import cannot_compile
from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.memory.checkpointing import (
    ATTENTION_SAVED,
    CPU_OFFLOADED,
    IN_PARTS,
    OFF,
    ON,
)
from videotune.planner import memory
from videotune.planner.fit import (
    Fit,
    Verdict,
    implied_constraints,
    pass_samples,
    process_share,
    step_seconds,
)
from videotune.planner.gpus import USUAL
from videotune.planner.memory import Need
from videotune.planner.read_step import step_spec_in_parts
from videotune.planner.step_spec import StepSpec

MODES = (OFF, ATTENTION_SAVED, ON, CPU_OFFLOADED, IN_PARTS)

EIGHT_BITS = "INT_8"
"""The kind of products in eight bits that is compared: the one with smaller errors."""


@dataclass(frozen=True)
class Way:
    """A way of computing the step, at its fastest on the card."""

    training: Need
    seconds: float | None
    """Of a step; None if the card has no known rates."""
    verdict: Verdict | None
    """None: no card is named."""
    blocks: int
    """Blocks of the denoiser."""
    is_compiled: bool = False
    matmul_dtype: str = "auto"
    is_chosen: bool = False
    """Whether the run would train so."""

    @property
    def fits(self) -> bool:
        """Whether the card has room for it, however tight."""
        return self.verdict != "does not fit"

    def to_json(self) -> dict[str, Any]:
        """Return the settings of the way, what it needs, and its seconds."""
        choice = self.training.choice
        fraction = choice.streamed / self.blocks
        return {
            "settings": {
                "gradient_checkpointing": choice.checkpointing,
                "layer_offload_fraction": round(fraction, 4),
                "micro_batch_size": choice.micro_batch,
                "compile": self.is_compiled,
                "transformer.matmul_dtype": self.matmul_dtype,
            },
            "streamed_blocks": choice.streamed,
            "blocks": self.blocks,
            "need_bytes": self.training.needed,
            "fits": self.fits,
            "verdict": self.verdict,
            "is_chosen": self.is_chosen,
            "seconds_a_step": self.seconds and round(self.seconds, 4),
            "is_another_base": self.matmul_dtype != "auto",
        }


def compared_ways(job: Job, result: Fit, dtype: str) -> list[dict[str, Any]]:
    """Return the ways of computing the step, the fastest of those that fit first.

    Of each kind of checkpointing it is the fastest that fits the card, or the fastest of
    those that are tight, or the smallest. The way that the run would take is marked, and
    added if it is none of these. The fastest of all is compared with compiled blocks too, and with
    products in eight bits, which are never chosen: they change the base model.

    Args:
        job: The run.
        result: Its fit to a card.
        dtype: The dtype of the training.
    """
    ways = _with_chosen(job, list(_ways(job, result, dtype)), result, dtype)
    ways += _way_in_eight_bits(job, result, dtype)
    return [way.to_json() for way in sorted(ways, key=_order)]


def _with_chosen(job: Job, ways: list[Way], result: Fit, dtype: str) -> list[Way]:
    """Return the ways with that of the run marked, or added and marked."""
    training = result.training
    # "auto" is decided when the training starts, by the card and compiler of that machine.
    is_compiled = job.config.compile is True
    marked = []
    for way in ways:
        is_chosen = (
            way.training.choice == training.choice and way.is_compiled == is_compiled
        )
        marked.append(replace(way, is_chosen=is_chosen))
    if any(way.is_chosen for way in marked):
        return marked

    if is_compiled:
        training = memory.compiled(training)
    chosen = Way(
        training,
        _seconds(job, step_spec_in_parts(job, dtype), training, result, dtype),
        _verdict(training, result),
        ways[0].blocks,
        is_compiled=is_compiled,
        is_chosen=True,
    )
    return [*marked, chosen]


def _verdict(training: Need, result: Fit) -> Verdict | None:
    """Return whether the card has room for a way, by the rule of the whole plan."""
    if result.vram is None:
        return None
    if training.needed > result.vram:
        return "does not fit"
    return "fits" if training.needed <= result.vram - result.spare else "tight"


def _way_in_eight_bits(job: Job, result: Fit, dtype: str) -> list[Way]:
    """Return the fastest way with products in eight bits, if there is one."""
    eight_bit_job = _with_eight_bits(job)
    if eight_bit_job is None:
        return []
    try:
        ways = list(_ways(eight_bit_job, result, dtype))
    except VideotuneError:  # the layers of a small model have no such products
        return []
    return [replace(min(ways, key=_order), matmul_dtype=EIGHT_BITS)]


_ORDER = (None, "fits", "tight", "does not fit")


def _order(way: Way) -> tuple[int, float, int]:
    return (_ORDER.index(way.verdict), way.seconds or 0.0, way.training.needed)


def _ways(job: Job, result: Fit, dtype: str) -> Iterator[Way]:
    """Yield the fastest way of each kind of checkpointing, and the fastest of all with
    compiled blocks.
    """
    whole_spec = step_spec_in_parts(job, dtype)
    spec = process_share(job, whole_spec, dtype)
    ways = []
    for mode in MODES:
        training = _fastest(job, spec, mode, result)
        if training is None:
            continue
        seconds = _seconds(job, whole_spec, training, result, dtype)
        verdict = _verdict(training, result)
        ways.append(Way(training, seconds, verdict, len(spec.blocks)))
    yield from ways

    if cannot_compile(job.config) is None:
        fastest = min(ways, key=_order)
        compiled = memory.compiled(fastest.training)
        seconds = _seconds(job, whole_spec, compiled, result, dtype)
        verdict = _verdict(compiled, result)
        yield Way(compiled, seconds, verdict, fastest.blocks, is_compiled=True)


def _fastest(job: Job, spec: StepSpec, mode: str, result: Fit) -> Need | None:
    """Return the fastest fitting choice of a mode, or its smallest; None if the run
    cannot be trained so.
    """
    batch = max(pass_samples(job))
    constraints = replace(
        implied_constraints(job.config, batch), checkpointing=mode, tries_parts=True
    )
    if mode == CPU_OFFLOADED and not constraints.allows_cpu_offload:
        return None
    if not memory.choices(spec, batch, constraints):
        return None
    card = result.card or USUAL
    if result.vram is None:
        return memory.fastest(spec, batch, constraints, math.inf, card)
    for limit in (result.vram - result.spare, result.vram):
        fastest = memory.fastest(spec, batch, constraints, limit, card)
        if fastest is not None:
            return fastest
    return memory.smallest(spec, batch, constraints)


def _seconds(
    job: Job, spec: StepSpec, training: Need, result: Fit, dtype: str
) -> float | None:
    if result.card is None or not result.card.timed:
        return None
    return step_seconds(job, spec, training, result.card, dtype, result.cluster)


def _with_eight_bits(job: Job) -> Job | None:
    """Return the job with products in eight bits; None if its config has them already,
    or cannot have them.
    """
    config = job.config
    if config.transformer.matmul_dtype != "auto":
        return None
    rounded = _rounded(config)
    if list(faults_with_eight_bits(rounded)):
        return None
    return replace(job, resolved=replace(job.resolved, config=rounded))


def _rounded(config: Config) -> Config:
    transformer = config.transformer.model_copy(update={"matmul_dtype": EIGHT_BITS})
    return config.model_copy(update={"transformer": transformer})
