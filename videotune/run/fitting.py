"""Whether a run fits a card and how long it takes: the settings that are left open are chosen, what cannot be is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from videotune.config.schema import Config
from videotune.memory.cards import USUAL, Card
from videotune.memory.checkpointing import ON
from videotune.memory.measure import Parts
from videotune.memory.offload import spread
from videotune.memory.planner import (
    Choice,
    Fixed,
    Need,
    StepFacts,
    fastest,
    lighter,
    others,
    room,
    seconds,
    smallest,
)
from videotune.run.console import size
from videotune.run.job import Job
from videotune.run.memory_plan import step_facts

PROGRAM = 3 << 30
"""Bytes on the host of Python, torch and the libraries of a card."""


@dataclass(frozen=True)
class Fit:
    """What was chosen, what it needs, and whether the card has it (None: no card is named).

    ``phases``: for each time of the run in which way it is done, and its parts.
    """

    choice: Choice
    fraction: float
    training: Need
    phases: Mapping[str, tuple[str, Parts]]
    vram: int | None
    card: Card | None
    fits: bool | None
    remedies: tuple[str, ...] = ()

    @property
    def worst(self) -> str:
        """The time of the run that needs most."""
        return max(self.phases, key=lambda name: room(self.phases[name][1]))


def fixed(config: Config, blocks: int) -> Fixed:
    """What the person has decided of memory."""
    fraction = config.layer_offload_fraction
    streamed = None if fraction is None else len(spread(blocks, fraction))
    return Fixed(config.micro_batch_size, config.gradient_checkpointing, streamed)


def fit(job: Job, dtype: str, vram: int | None, card: Card | None) -> Fit:
    """Choose what is left open so that the run fits ``vram`` bytes and is fastest; without a limit, the fastest of all."""
    facts, config = step_facts(job, dtype), job.config
    own = fixed(config, len(facts.blocks))
    batch = config.batch_size
    limit = vram if vram is not None else 1 << 60
    if vram is None:  # nothing to fit into: as the config says, and where it says nothing the plain way of less memory
        own = replace(
            own, checkpointing=own.checkpointing or ON, streamed=own.streamed or 0, micro_batch=own.micro_batch or batch
        )
    found = fastest(facts, batch, own, limit, card or USUAL)
    choice, training = found or smallest(facts, batch, own)
    away = others(facts, training, vram)
    phases: dict[str, tuple[str, Parts]] = {"training": ("as it is", training.device[training.worst]), **away}
    fits = None if vram is None else all(room(parts) <= vram for _, parts in phases.values())
    fraction = choice.streamed / len(facts.blocks) if own.streamed is None else config.layer_offload_fraction or 0.0
    result = Fit(choice, fraction, training, phases, vram, card, fits)
    return result if fits is not False else replace(result, remedies=remedies(result, facts, config))


def remedies(tried: Fit, facts: StepFacts, config: Config) -> tuple[str, ...]:
    """What would make it fit, in the order of what it costs."""
    assert tried.vram is not None
    said = []
    if "training" in (tried.worst, *(n for n, (_, parts) in tried.phases.items() if room(parts) > tried.vram)):
        free, least = smallest(facts, config.batch_size, Fixed())
        if least.needed <= tried.vram:
            said.append(
                f"leave micro_batch_size, gradient_checkpointing and layer_offload_fraction open: {_in_words(free, facts)} "
                f"needs {size(least.needed)}"
            )
        else:
            said.append(
                f"the thriftiest settings ({_in_words(free, facts)}) need {size(least.needed)}: a card of that size, "
                "fewer frames (video_config.frames) or a lower resolution"
            )
            if config.training_method == "FINE_TUNE":
                said.append("training_method=LORA trains a small part of the weights, with a small optimizer")
    if room(tried.phases["encoding clips"][1]) > tried.vram:
        said.append("the autoencoder over the dearest clips does not fit: fewer frames or a lower resolution")
    if "preview" in tried.phases and room(tried.phases["preview"][1]) > tried.vram:
        said.append(
            "previews do not fit: sample.frames and sample.resolution make them smaller, sample_after=0 draws none"
        )
    if room(tried.phases["encoding text"][1]) > tried.vram:
        said.append("the text encoder does not fit: encode on a larger card first (videotune cache)")
    return tuple(said)


def _in_words(choice: Choice, facts: StepFacts) -> str:
    return (
        f"micro_batch_size={choice.micro_batch} gradient_checkpointing={choice.checkpointing} "
        f"layer_offload_fraction={choice.streamed / len(facts.blocks):.2f}"
    )


def to_json(result: Fit, job: Job, dtype: str) -> dict[str, Any]:
    """``plan.json``'s part of it."""
    import psutil

    facts, config, choice = step_facts(job, dtype), job.config, result.choice
    _, worst = result.phases[result.worst]
    host = {"program": PROGRAM, **result.training.host}
    took = None
    if result.card is not None:
        each = [
            seconds(
                result.training,
                batch,
                min(choice.micro_batch, batch),
                result.card,
                lighter(facts, job.spec.tokens(shape)),
            )
            for shape, batch in zip(job.shapes, job.schedule.batches, strict=True)
        ]
        took = (
            sum(time * share for time, share in zip(each, job.shares, strict=True)) * config.gradient_accumulation_steps
        )
    return {
        "fits": result.fits,
        "hours": None if took is None else round(took * job.steps / 3600, 2),
        "seconds_a_step": None if took is None else round(took, 3),
        "device": {
            "card": result.card.name if result.card else None,
            "vram_bytes": result.vram,
            "need_bytes": room(worst),
            "allocated_bytes": sum(worst.values()),
            "phase": result.worst,
            "parts": {name: count for name, count in worst.items() if count},
            "phases": {
                name: {"way": way, "need_bytes": room(parts), "allocated_bytes": sum(parts.values())}
                for name, (way, parts) in result.phases.items()
            },
        },
        "host": {
            "total_bytes": psutil.virtual_memory().total,
            "need_bytes": sum(host.values()),
            "parts": host,
        },
        "chosen": {
            "micro_batch_size": choice.micro_batch,
            "gradient_checkpointing": choice.checkpointing,
            "layer_offload_fraction": round(result.fraction, 4),
        },
        "remedies": list(result.remedies),
    }
