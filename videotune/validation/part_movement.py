"""Which parts of what trains move: the size of each part's change, and its share of the
gradient.

A part is a kind of module: self-attention, feed-forward, norms and so on, of each expert,
of video and of sound. One that trains and does not move is worth a warning: no gradient
reaches it, its rate is 0, or its updates are too small for the dtype of its weights.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from videotune.adapters.adapter_types import by_module, parse_param_name
from videotune.adapters.effect import change as change_of
from videotune.adapters.effect import lokr_factor
from videotune.job.job import Job
from videotune.memory.sharding import Shard
from videotune.model_spec import ModelSpec
from videotune.trainer.gradient_norms import GradientNorms
from videotune.trainer.step_context import TrainableState
from videotune.trainer.text_encoders import ROWS
from videotune.trainer.trainer import Callback, Trainer, due
from videotune.validation.decoding import broadcast_from_main

CHECKED_AT = 50
"""The step at which every part is looked at, whatever the validations."""

MIN_STEPS = 10
"""Steps that an expert has trained before its parts are judged."""

SAMPLED = 1024
"""Numbers of a parameter that are kept to see whether, and how far, it moves."""

NOT_MOVED = "trains and has not moved"
"""What a warning of a part says."""

KINDS = {
    "cross_modal": "between video and sound",
    "self_attention": "self-attention",
    "cross_attention": "cross-attention",
    "experts": "experts",
    "attention": "attention",
    "feed_forward": "feed-forward",
}
"""Names of the parts, by presets of LoRA targets, which are tried in this order."""


def part_of(name: str, spec: ModelSpec) -> str:
    """Return the part to which a parameter belongs.

    Args:
        name: its name, without an expert's prefix.
        spec: of the run.
    """
    if name.startswith(ROWS):
        return "new tokens"
    if name.startswith("text_encoder"):
        return "text encoder"

    parsed = parse_param_name(name)
    path = parsed[0] if parsed else name.rpartition(".")[0]
    if spec.is_connector(path):
        label = "text connectors"
        return f"sound: {label}" if spec.acts_on_sound(path) else label
    kind = "norms" if "norm" in path.rpartition(".")[2] else "other"
    for targets, label in KINDS.items():
        patterns = spec.lora_targets.get(targets, ())
        if any(re.fullmatch(pattern, path) for pattern in patterns):
            kind = label
            break
    acts_on_sound = spec.reads_sound and spec.sound is not None
    if acts_on_sound and kind != KINDS["cross_modal"] and spec.acts_on_sound(name):
        return f"sound: {kind}"
    return kind


@dataclass(frozen=True)
class Part:
    """Parameters that belong together."""

    expert: str | None
    names: tuple[str, ...]
    """Names in ``TrainableState.parameters``; of sharded weights also those of which
    this process has no row.
    """

    def of(self, trainable: TrainableState) -> dict[str, Tensor]:
        """Return the part's parameters, of which a process may have only rows."""
        parameters = trainable.parameters
        return {
            name: parameters[name].detach() for name in self.names if name in parameters
        }


def parts_of(
    trainables: Mapping[str, TrainableState], spec: ModelSpec
) -> dict[str, Part]:
    """Return the parts of what trains, by their names; the same on all processes."""
    names: dict[str, list[str]] = {}
    experts: dict[str, str | None] = {}
    for trainable in trainables.values():
        for name in dict.fromkeys((*trainable.parameters, *_rows_of(trainable))):
            label = part_of(name, spec)
            if trainable.expert is not None:
                label = f"{trainable.expert} noise: {label}"
            names.setdefault(label, []).append(name)
            experts[label] = trainable.expert
    return {
        label: Part(experts[label], tuple(members)) for label, members in names.items()
    }


def _rows_of(trainable: TrainableState) -> Mapping[str, Shard]:
    """Return this process's rows of sharded parameters, by name."""
    return {} if trainable.shards is None else trainable.shards.layout


def sampled(value: Tensor, shard: Shard | None = None) -> Tensor:
    """Return numbers of a parameter, evenly over it, in float32 on the CPU.

    Args:
        value: the parameter.
        shard: the rows of the whole parameter that ``value`` has. The numbers are then
            those of the whole parameter's that lie in these rows. None: it is whole.
    """
    flat = value.detach().flatten()
    first = 0
    numel = flat.numel()
    if shard is not None:
        numel = math.prod(shard.full_shape)
        first = shard.first * math.prod(shard.full_shape[1:])

    stride = _stride(numel)
    before_these_rows = -(-first // stride)
    count = max(0, SAMPLED - before_these_rows)
    start = before_these_rows * stride - first
    return flat[start::stride][:count].to("cpu", torch.float32, copy=True)


def _stride(numel: int) -> int:
    """Return the distance of two sampled numbers of a parameter."""
    return max(1, numel // SAMPLED)


def squared_change(
    parameters: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    scale: float,
    rows: Mapping[str, Shard] | None = None,
) -> float:
    """Return the squared Frobenius norm of a part's change of the weights.

    That of an adapter is exact; that of weights is estimated from the numbers that were
    kept before. Of sharded weights it is this process's share of it.

    Args:
        parameters: by name.
        before: ``sampled`` of each, before the training.
        scale: of the adapter.
        rows: the rows that this process has of sharded parameters.
    """
    squared = 0.0
    modules = by_module(parameters)
    for tensors in modules.values():
        squared += _squared_change(tensors, scale)
    for name, value in parameters.items():
        if parse_param_name(name) is not None:
            continue
        shard = (rows or {}).get(name)
        numel = value.numel() if shard is None else math.prod(shard.full_shape)
        if not numel:
            continue

        moved = sampled(value, shard) - before[name]
        sample_count = min(SAMPLED, -(-numel // _stride(numel)))
        squared += float(moved.square().sum()) * numel / sample_count
    return squared


def _squared_change(tensors: Mapping[str, Tensor], scale: float) -> float:
    """Return the squared norm of an adapter's change of a weight."""
    if "lora_A" in tensors:
        # ‖BA‖² is the sum of (BᵀB)∘(AAᵀ), without a matrix of the weight's size.
        down = tensors["lora_A"].float()
        up = tensors["lora_B"].float()
        gram = (up.T @ up) * (down @ down.T)
        return scale**2 * float(gram.sum())
    if "hada_w1_a" in tensors:
        factors = [
            tensors[f"{name}_a"].float() @ tensors[f"{name}_b"].float()
            for name in ("hada_w1", "hada_w2")
        ]
        return scale**2 * float((factors[0] * factors[1]).square().sum())
    if "oft_R" in tensors:
        return float(change_of(tensors, scale).square().sum())
    # Of a Kronecker product it is that of one factor times that of the other.
    return scale**2 * math.prod(
        float(lokr_factor(tensors, name).square().sum())
        for name in ("lokr_w1", "lokr_w2")
    )


@dataclass(frozen=True)
class PartReading:
    """What is read of a part at a step."""

    numbers: float
    """Numbers that train."""
    change: float
    """Squared norm of its change."""
    moved: float
    """How many processes see that a number has changed."""
    gradient: float
    """Squared norm of its gradient; 0 if that is not known."""


class PartMovement(Callback):
    """Records with each validation how far every part has moved, and warns of those that
    do not.
    """

    def __init__(self, job: Job) -> None:
        self.every = job.config.validate_every or 0
        self._steps = job.steps
        self._checked_at = min(CHECKED_AT, job.steps)
        self._parts: dict[str, Part] = {}
        self._before: dict[str, dict[str, Tensor]] = {}
        self._norms: GradientNorms | None = None

    def _is_due(self, step: int) -> bool:
        is_checked = step == self._checked_at
        return is_checked or (step > 0 and due(step, self.every, self._steps))

    def due(self, trainer: Trainer, step: int, requests: Collection[str]) -> bool:
        """Whether it runs after a step: with validations, and once early."""
        return self._is_due(step)

    def built(self, trainer: Trainer) -> None:
        """Keep numbers of what trains, and ask for the norms of gradients."""
        trainables = trainer.pool.trainables
        self._parts = parts_of(trainables, trainer.job.spec)
        for label, part in self._parts.items():
            trainable = self._trainable_of(trainer, part)
            rows = _rows_of(trainable)
            self._before[label] = {
                name: sampled(value, rows.get(name))
                for name, value in part.of(trainable).items()
            }

        counts = [len(trainable.parameters) for trainable in trainables.values()]
        self._norms = GradientNorms(self._is_due, max(counts), trainer.family.device)
        trainer.gradient_norms = self._norms

    def before(self, trainer: Trainer) -> None:
        """Write what a stop left out at the step of a checkpoint; its gradient is gone.

        The main process knows what the journal lacks. If the weights are sharded, it
        tells the others, since each reads its rows.
        """
        step = trainer.first_step - 1
        is_lacking = trainer.dist.is_main and self._is_lacking(trainer, step)
        if broadcast_from_main(trainer, is_lacking):
            self.run(trainer, step)

    def _is_lacking(self, trainer: Trainer, step: int) -> bool:
        lines = trainer.journal.history.of_kind("parts")
        return self._is_due(step) and all(line["step"] != step for line in lines)

    def run(self, trainer: Trainer, step: int) -> None:
        """Write how far each part has moved, and warn once of those that have not."""
        readings = self._read_all(trainer, step)
        if not trainer.dist.is_main:
            return

        shares = self._gradient_shares(step, readings)
        parts = {}
        for label, reading in readings.items():
            parts[label] = {
                "numbers": round(reading.numbers),
                "change": math.sqrt(max(reading.change, 0.0)),
                "moved": reading.moved > 0,
                "gradient": shares.get(label),
            }
        trainer.journal.event("parts", step=step, parts=parts)
        self._warn(trainer, step, parts)

    def _trainable_of(self, trainer: Trainer, part: Part) -> TrainableState:
        for trainable in trainer.pool.trainables.values():
            if trainable.expert == part.expert:
                return trainable
        raise AssertionError(part.expert)

    def _read_all(self, trainer: Trainer, step: int) -> dict[str, PartReading]:
        """Return what is read of each part; of sharded weights by all processes
        together.
        """
        norms = self._norms.read(step) if self._norms else None
        readings = {
            label: self._read(trainer, label, part, norms)
            for label, part in self._parts.items()
        }
        if not trainer.weights_sharded:
            return readings

        # A process that lacks rows may have met the parts in another order.
        labels = sorted(readings)
        rows = [astuple(readings[label]) for label in labels]
        table = trainer.dist.all_reduce(torch.tensor(rows, dtype=torch.float64))
        sums = dict(zip(labels, table.tolist(), strict=True))
        return {label: PartReading(*sums[label]) for label in self._parts}

    def _read(
        self, trainer: Trainer, label: str, part: Part, norms: Tensor | None
    ) -> PartReading:
        """Return what this process reads of a part.

        Args:
            trainer: the run.
            label: the part's name.
            part: the part.
            norms: those of the step's gradients; None: they are not known.
        """
        trainable = self._trainable_of(trainer, part)
        rows = _rows_of(trainable)
        # What every process has in full is counted by the main one.
        parameters = {
            name: value
            for name, value in part.of(trainable).items()
            if name in rows or trainer.dist.is_main
        }
        before = self._before[label]
        moved = any(
            not torch.equal(sampled(value, rows.get(name)), before[name])
            for name, value in parameters.items()
        )

        gradient = 0.0
        if norms is not None and self._has_trained(part):
            indices = [
                index
                for index, name in enumerate(trainable.parameters)
                if name in parameters
            ]
            gradient = float(norms[indices].square().sum())
        return PartReading(
            numbers=sum(value.numel() for value in parameters.values()),
            change=squared_change(
                parameters, before, trainer.job.config.lora.scale, rows
            ),
            moved=float(moved),
            gradient=gradient,
        )

    def _has_trained(self, part: Part) -> bool:
        """Whether the step whose gradient is kept trained the part: if only text trains,
        every step does, whichever expert runs.
        """
        return self._norms is not None and part.expert in (None, self._norms.expert)

    def _gradient_shares(
        self, step: int, readings: Mapping[str, PartReading]
    ) -> dict[str, float]:
        """Return each part's share of the squared norm of the step's gradient, of the
        expert that trained; empty if the gradient is not known.
        """
        if self._norms is None or self._norms.read(step) is None:
            return {}
        squared = {
            label: reading.gradient
            for label, reading in readings.items()
            if self._has_trained(self._parts[label])
        }
        total = sum(squared.values())
        return {
            label: value / total if total else 0.0 for label, value in squared.items()
        }

    def _warn(
        self, trainer: Trainer, step: int, parts: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Warn of parts that train and have not moved, each once in a run."""
        warned = [line["text"] for line in trainer.journal.history.of_kind("warning")]
        for label in unmoved(parts):
            text = f"{label} {NOT_MOVED}"
            part = self._parts[label]
            if any(line.startswith(text) for line in warned):
                continue
            if self._steps_of(trainer, part.expert, step) < MIN_STEPS:
                continue
            reason = "no gradient reaches it"
            if parts[label]["gradient"]:
                reason = "it has a gradient, so its learning rate is 0 or too small for the dtype of its weights"
            elif parts[label]["gradient"] is None:
                reason = "no gradient reaches it, or its learning rate is 0"
            trainer.journal.warn(step, f"{text}: {reason}")

    def _steps_of(self, trainer: Trainer, expert: str | None, step: int) -> int:
        """Return how many steps of this process an expert has had."""
        if expert is None:
            return step - trainer.first_step + 1
        count = trainer.pool.expert_schedule.count
        return count(step, expert) - count(trainer.first_step - 1, expert)


def unmoved(parts: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """Return the names of parts that have not moved."""
    return [label for label, part in parts.items() if not part["moved"]]
