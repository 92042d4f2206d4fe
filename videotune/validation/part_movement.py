"""Which parts of what trains move: the size of each part's change, and its share of the
gradient.

A part is a kind of module: self-attention, feed-forward, norms and so on, of each expert,
of video and of sound. One that trains and does not move is worth a warning: no gradient
reaches it, its rate is 0, or its updates are too small for the dtype of its weights.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from videotune.adapters.adapter_types import by_module, parse_param_name
from videotune.adapters.effect import change as change_of
from videotune.adapters.effect import lokr_factor
from videotune.job.job import Job
from videotune.model_spec import ModelSpec
from videotune.trainer.gradient_norms import GradientNorms
from videotune.trainer.step import TrainableState
from videotune.trainer.text_encoders import ROWS
from videotune.trainer.trainer import Callback, Trainer, due

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
    """Names in ``TrainableState.parameters``."""
    indices: tuple[int, ...]
    """Their positions there."""

    def of(self, trainable: TrainableState) -> dict[str, Tensor]:
        """Return the part's parameters."""
        return {name: trainable.parameters[name].detach() for name in self.names}


def parts_of(
    trainables: Mapping[str, TrainableState], spec: ModelSpec
) -> dict[str, Part]:
    """Return the parts of what trains, by their names."""
    names: dict[str, list[tuple[int, str]]] = {}
    experts: dict[str, str | None] = {}
    for trainable in trainables.values():
        for index, name in enumerate(trainable.parameters):
            label = part_of(name, spec)
            if trainable.expert is not None:
                label = f"{trainable.expert} noise: {label}"
            names.setdefault(label, []).append((index, name))
            experts[label] = trainable.expert
    return {
        label: Part(
            experts[label],
            tuple(name for _, name in members),
            tuple(index for index, _ in members),
        )
        for label, members in names.items()
    }


def sampled(value: Tensor) -> Tensor:
    """Return numbers of a parameter, evenly over it, in float32 on the CPU."""
    flat = value.detach().flatten()
    stride = max(1, flat.numel() // SAMPLED)
    return flat[::stride][:SAMPLED].to("cpu", torch.float32, copy=True)


def size_of_change(
    parameters: Mapping[str, Tensor], before: Mapping[str, Tensor], scale: float
) -> float:
    """Return the Frobenius norm of a part's change of the weights.

    That of an adapter is exact; that of weights is estimated from the numbers that were
    kept before.

    Args:
        parameters: by name.
        before: ``sampled`` of each, before the training.
        scale: of the adapter.
    """
    squared = 0.0
    modules = by_module(parameters)
    for tensors in modules.values():
        squared += _squared_change(tensors, scale)
    for name, value in parameters.items():
        if parse_param_name(name) is not None:
            continue
        moved = sampled(value) - before[name]
        if len(moved):
            squared += float(moved.square().mean()) * value.numel()
    return squared**0.5


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

    def due(self, trainer: Trainer, step: int, asked: Collection[str]) -> bool:
        """Whether it runs after a step: with validations, and once early."""
        return self._is_due(step)

    def built(self, trainer: Trainer) -> None:
        """Keep numbers of what trains, and ask for the norms of gradients."""
        self._parts = parts_of(trainer.pool.trainables, trainer.job.spec)
        for label, part in self._parts.items():
            parameters = part.of(self._trainable_of(trainer, part))
            self._before[label] = {
                name: sampled(value) for name, value in parameters.items()
            }
        updates_late = all(
            trainable.backward_optimizer is None
            for trainable in trainer.pool.trainables.values()
        )
        if updates_late and not trainer.weights_sharded:
            counts = [
                len(trainable.parameters)
                for trainable in trainer.pool.trainables.values()
            ]
            self._norms = GradientNorms(
                self._is_due, max(counts), trainer.family.device
            )
            trainer.gradient_norms = self._norms

    def before(self, trainer: Trainer) -> None:
        """Write what a stop left out at the step of a checkpoint; its gradient is gone."""
        step = trainer.first - 1
        if not trainer.dist.is_main or not self._is_due(step):
            return
        lines = trainer.journal.history.of_kind("parts")
        if all(line["step"] != step for line in lines):
            self.run(trainer, step)

    def run(self, trainer: Trainer, step: int) -> None:
        """Write how far each part has moved, and warn once of those that have not."""
        if trainer.weights_sharded:
            return
        shares = self._gradient_shares(step)
        parts = {}
        for label, part in self._parts.items():
            parts[label] = self._read(trainer, label, part) | {
                "gradient": shares.get(label)
            }
        trainer.journal.event("parts", step=step, parts=parts)
        self._warn(trainer, step, parts)

    def _trainable_of(self, trainer: Trainer, part: Part) -> TrainableState:
        for trainable in trainer.pool.trainables.values():
            if trainable.expert == part.expert:
                return trainable
        raise AssertionError(part.expert)

    def _read(self, trainer: Trainer, label: str, part: Part) -> dict[str, Any]:
        """Return what is read of a part."""
        parameters = part.of(self._trainable_of(trainer, part))
        before = self._before[label]
        moved = any(
            not torch.equal(sampled(value), before[name])
            for name, value in parameters.items()
        )
        scale = trainer.job.config.lora.scale
        return {
            "numbers": sum(value.numel() for value in parameters.values()),
            "change": size_of_change(parameters, before, scale),
            "moved": moved,
        }

    def _gradient_shares(self, step: int) -> dict[str, float | None]:
        """Return each part's share of the squared norm of the step's gradient, of the
        expert that trained.
        """
        norms = self._norms.read(step) if self._norms else None
        if self._norms is None or norms is None:
            return {}
        expert = self._norms.expert
        squared = norms.square()
        total = float(squared.sum())
        shares: dict[str, float | None] = {}
        for label, part in self._parts.items():
            if part.expert == expert:
                part_sum = float(squared[list(part.indices)].sum())
                shares[label] = part_sum / total if total else 0.0
        return shares

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
            return step - trainer.first + 1
        count = trainer.pool.expert_schedule.count
        return count(step, expert) - count(trainer.first - 1, expert)


def unmoved(parts: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """Return the names of parts that have not moved."""
    return [label for label, part in parts.items() if not part["moved"]]
