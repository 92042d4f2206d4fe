"""What a checkpoint holds of the training, by part, and its copy in host memory."""

from collections.abc import Mapping

import psutil
import torch
from torch import Tensor

from videotune.adapters.adapter_types import parse_param_name
from videotune.adapters.lora import of_module
from videotune.memory.accelerator import has_streams
from videotune.memory.host_weights import pinned
from videotune.trainer.optimizer_state import optimizer_state
from videotune.trainer.trainer import Trainer

CheckpointParts = Mapping[str, Mapping[str, Tensor]]
"""Tensors of a checkpoint, by part ("weights", "optimizer", "ema") and by name."""


def collect_parts(trainer: Trainer) -> dict[str, Mapping[str, Tensor]]:
    """Return what a checkpoint holds of the training, by part."""
    optimizer_tensors: dict[str, Tensor] = {}
    for expert, trainable in trainer.pool.trainables.items():
        prefix = trainer.prefix(expert)
        named = {
            prefix + key: parameter for key, parameter in trainable.parameters.items()
        }
        optimizer_tensors |= optimizer_state(trainable.optimizer, named)
        if trainable.loss_scale is not None:
            for key, tensor in trainable.loss_scale.state().items():
                optimizer_tensors[prefix + key] = tensor

    parts: dict[str, Mapping[str, Tensor]] = {
        "weights": trainer.parameters,
        "optimizer": optimizer_tensors,
    }
    if trainer.averages:
        parts["ema"] = trainer.averages
    return parts


def host_copy(
    parts: CheckpointParts,
) -> tuple[dict[str, dict[str, Tensor]], torch.Event | None]:
    """Copy a checkpoint's tensors to host memory.

    From a GPU they go to pinned memory, without waiting for them.

    Returns:
        The copies, and an event that comes after those from a GPU (None: they are
        done).
    """
    copies: dict[str, dict[str, Tensor]] = {}
    has_gpu_tensors = False
    for part, tensors in parts.items():
        copies[part] = {}
        for name, tensor in tensors.items():
            copies[part][name] = _on_host(tensor)
            has_gpu_tensors = has_gpu_tensors or has_streams(tensor.device)

    arrived = None
    if has_gpu_tensors:
        arrived = torch.accelerator.current_stream().record_event()
    return copies, arrived


def has_room_for_copy(parts: CheckpointParts, processes: int) -> bool:
    """Return whether copies of a checkpoint take at most half of the free host memory.

    Args:
        parts: what this process copies.
        processes: how many processes of this machine copy as much at the same time.
    """
    return processes * bytes_of(parts) <= psutil.virtual_memory().available // 2


def _on_host(tensor: Tensor) -> Tensor:
    allocate = pinned if has_streams(tensor.device) else torch.empty
    host_tensor = allocate(tensor.shape, dtype=tensor.dtype)
    return host_tensor.copy_(tensor.detach(), non_blocking=True)


def bytes_of(parts: CheckpointParts) -> int:
    """Return the bytes of a checkpoint's tensors."""
    total = 0
    for tensors in parts.values():
        total += sum(tensor.nbytes for tensor in tensors.values())
    return total


def lora_scale(trainer: Trainer) -> float | dict[str, float] | None:
    """Return the factor of an adapter's updates, by module if ``lora.modules`` may make
    them differ; None without LoRA.
    """
    config = trainer.job.config
    if config.training_method != "LORA":
        return None
    if not config.lora.modules:
        return config.lora.scale

    module_paths: set[str] = set()
    for trainable in trainer.pool.trainables.values():
        for name in trainable.parameters:
            parsed = parse_param_name(name)
            if parsed:
                module_paths.add(parsed[0])
    scales = {path: of_module(config.lora, path).scale for path in sorted(module_paths)}
    return scales or config.lora.scale
