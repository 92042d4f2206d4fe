"""One run in several processes: each takes a part of every step's samples, and all make the same update.

Started by torchrun or ``accelerate launch`` alike, which set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
Gradients are summed, not averaged: each process has already divided by the samples of the whole step, so that two processes
with one sample each are one process with two, and a process without a sample adds nothing.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.memory.accelerator import local_device

T = TypeVar("T")

PATIENCE = timedelta(hours=48)
"""How long a process waits for the first one, which encodes clips and draws previews alone; a dead one ends all sooner."""

SOON = timedelta(minutes=15)
"""How long a process that failed where all run the network together waits for the others to say that they failed too."""

FLAT = 1 << 26
"""At most so many numbers are copied into one buffer to be summed in one message."""


def launched() -> tuple[int, int]:
    """(rank, number of processes) as the launcher says; (0, 1) without one.

    Raises VideotuneError where its variables make no sense.
    """
    words = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not all(word.isdigit() for word in words) or int(words[0]) >= int(words[1]):
        raise VideotuneError(
            f"RANK {words[0]!r} of WORLD_SIZE {words[1]!r}: start several processes with torchrun"
        )
    return int(words[0]), int(words[1])


class RankMismatch(VideotuneError):
    """Processes that must do something together have not all come through it."""


@dataclass(frozen=True)
class DistributedContext:
    """This process's place among those of the run."""

    rank: int = 0
    size: int = 1
    hosts: Any = None
    """The group over which hosts agree, apart from the one that sums on devices."""
    impatient: Any = None
    """The same with SOON as its patience."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files, draws previews and talks."""
        return self.rank == 0

    def all_agree(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag whether any process raised it; all are answered alike."""
        if self.size == 1:
            return flags
        raised = torch.tensor([int(flag) for flag in flags])
        torch_dist.all_reduce(raised, torch_dist.ReduceOp.MAX, group=self.hosts)
        return tuple(bool(flag) for flag in raised.tolist())

    def barrier(self) -> None:
        """Until every process is here."""
        self.all_agree(False)

    def main_first(self, work: Callable[[], T]) -> T:
        """The first process alone, then the others, who find what it has left on the disk."""
        if self.is_main:
            done = work()
            self.barrier()
            return done
        self.barrier()
        return work()

    def all_gather(self, value: T) -> list[T]:
        """Each process's value, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch_dist.all_gather_object(values, value, group=self.hosts)
        return values

    def broadcast(self, value: T) -> T:
        """The first process's value, everywhere."""
        return self.all_gather(value)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all processes do alike and together: an error that all of them meet is raised as it is.

        Raises OutOfStep where some met one and others did not: these may wait for them for ever, so all must end.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as met:
            error = met
        if self.size > 1:
            failed: list[Any] = [None] * self.size
            try:
                torch_dist.all_gather_object(failed, error is not None, group=self.impatient)
            except RuntimeError as late:
                raise RankMismatch(
                    f"this process failed and the others did not: {error or late}"
                ) from (error or late)
            if any(failed) and not all(failed):
                raise RankMismatch(
                    f"process {failed.index(True)} failed where others did not: {error}"
                ) from error
        if error is not None:
            raise error

    def all_reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Each gradient becomes the sum over all processes; a process that has none counts as zeros."""
        for group in portions(parameters):
            for parameter in group:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            if len(gradients) == 1:
                torch_dist.all_reduce(gradients[0])
                continue
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            torch_dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(
                gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)]
            )

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes, on the device."""
        if self.size > 1:
            torch_dist.all_reduce(values)
        return values


def sharded(config: Config, dist: DistributedContext) -> bool:
    """Whether no process has the whole network: then all run it in step, also for validation and previews."""
    return config.sharding == "FULL" and dist.size > 1


def portions(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype on one device, together at most FLAT numbers; a larger one goes by itself."""
    portion: list[nn.Parameter] = []
    for parameter in parameters:
        held = sum(p.numel() for p in portion)
        other = portion and (parameter.dtype, parameter.device) != (
            portion[0].dtype,
            portion[0].device,
        )
        if portion and (held + parameter.numel() > FLAT or other):
            yield portion
            portion = []
        portion.append(parameter)
    if portion:
        yield portion


@contextmanager
def join() -> Iterator[DistributedContext]:
    """The distributed context that the launcher made of this process, for the length of a block."""
    rank, size = launched()
    if size == 1:
        yield DistributedContext()
        return
    device = local_device()
    if device.type == "mps":
        raise VideotuneError("several processes cannot share an MPS device: start one")
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    backends = {
        one: torch_dist.get_default_backend_for_device(one) for one in ("cpu", device.type)
    }
    torch_dist.init_process_group(
        ",".join(f"{one}:{name}" for one, name in backends.items()), timeout=PATIENCE
    )
    try:
        hosts, impatient = (
            torch_dist.new_group(backend="gloo", timeout=patience)
            for patience in (PATIENCE, SOON)
        )
        yield DistributedContext(rank, size, hosts, impatient)
    finally:
        torch_dist.destroy_process_group()
