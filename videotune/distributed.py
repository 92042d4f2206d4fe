"""One run in several processes: each takes a part of every step's samples.

torchrun and ``accelerate launch`` both start them; they set RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Gradients are summed, not averaged: each
process has already divided by the samples of the whole step. Two processes with one
sample each make the same update as one process with two, and a process without a sample
adds nothing.

With ``context_parallel`` such a process is a group of processes, of which each has a part
of the tokens of every sample, and of the gradient.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.memory.accelerator import local_device
from videotune.process_watch import (
    ProcessLost,
    ProcessWatch,
    is_lost_connection,
    lost_message,
    watched_store,
)

T = TypeVar("T")

PATIENCE = timedelta(hours=48)
"""Time to wait for the main process, which encodes clips and draws previews by itself.

A process that dies, freezes or is cut off ends all of them sooner (``ProcessWatch``).
"""

SHORT_PATIENCE = timedelta(minutes=15)
"""Time that a process waits, at the end of what all run together, to hear whether the
others failed: one that failed comes there while the others wait for it in the network.
"""

BUFFER_NUMBERS = 1 << 26
"""Maximum numbers that are copied into one buffer and summed in one message."""


def launched() -> tuple[int, int]:
    """Return (rank, number of processes) of the launcher; (0, 1) without one.

    Raises:
        VideotuneError: The launcher's variables are inconsistent.
    """
    rank = os.environ.get("RANK", "0")
    size = os.environ.get("WORLD_SIZE", "1")
    are_numbers = rank.isdigit() and size.isdigit()
    if not are_numbers or int(rank) >= int(size):
        raise VideotuneError(
            f"RANK {rank!r} of WORLD_SIZE {size!r}: not a rank of a run. "
            f"Start several processes with torchrun."
        )
    return int(rank), int(size)


def processes_here() -> int:
    """Return how many processes of the run the launcher has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class RankMismatch(VideotuneError):
    """Some processes failed in a common step and others did not."""


@dataclass(frozen=True)
class DistributedContext:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1
    cpu_group: Any = None
    """Process group for messages of the host, through gloo. Tensors on devices are summed
    by torch's default group. None: a single process.
    """
    cpu_group_impatient: Any = None
    """The same processes as ``cpu_group``, which wait only for SHORT_PATIENCE."""
    watch: ProcessWatch | None = None
    """Ends this process soon after another one is lost."""
    context_parallel: int = 1
    """How many processes, with neighbouring ranks, share the tokens of a sample."""
    writer_group: Any = None
    """Process group of the threads that write a checkpoint while the processes train."""

    @property
    def for_writing_thread(self) -> "DistributedContext":
        """The same processes for a thread, whose messages never meet those of steps."""
        return replace(
            self, cpu_group=self.writer_group, cpu_group_impatient=None, watch=None
        )

    @property
    def is_main(self) -> bool:
        """Whether this process writes files, draws previews and prints."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """This process's group, among those that share the samples of a step."""
        return self.rank // self.context_parallel

    @property
    def data_size(self) -> int:
        """How many groups share the samples of a step."""
        return self.size // self.context_parallel

    @property
    def context_rank(self) -> int:
        """This process among those that share the tokens of its samples."""
        return self.rank % self.context_parallel

    @property
    def context_rank_key(self) -> tuple[int, ...]:
        """What distinguishes this process's draws inside the network from those of others
        that compute other tokens of its samples.
        """
        return (self.context_rank,) if self.context_rank else ()

    def any_process(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether any process raised it; the same on all
        processes.
        """
        if self.size == 1:
            return flags
        raised = torch.tensor([int(flag) for flag in flags])
        torch_dist.all_reduce(raised, torch_dist.ReduceOp.MAX, group=self.cpu_group)
        return tuple(bool(flag) for flag in raised.tolist())

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.any_process(False)

    def main_first(self, work: Callable[[], T]) -> T:
        """Do work on the main process first; the others then find its files."""
        if self.is_main:
            result = work()
            self.barrier()
            return result
        self.barrier()
        return work()

    def all_gather(self, value: T) -> list[T]:
        """Return the value of each process, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch_dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def broadcast(self, value: T) -> T:
        """Return the main process's value on every process."""
        return self.all_gather(value)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that all processes run together.

        An error that all of them raise is raised as it is.

        Raises:
            RankMismatch: Only some raised one, so all must end.
            ProcessLost: Others are gone, or wait within the block for this one, which
                has failed.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised

        if self.size > 1:
            self._refuse_mismatch(error)
        if error is not None:
            raise error

    def _refuse_mismatch(self, error: Exception | None) -> None:
        """Raise RankMismatch if some processes have an error and others have not, and
        ProcessLost if not all of them answer.
        """
        if error is not None and is_lost_connection(error):
            raise ProcessLost(lost_message(error)) from error

        failed: list[Any] = [None] * self.size
        try:
            torch_dist.all_gather_object(
                failed, error is not None, group=self.cpu_group_impatient
            )
        except RuntimeError as no_answer:
            if error is None:
                raise ProcessLost(lost_message(no_answer)) from no_answer
            raise ProcessLost(
                f"this process failed, and the others did not answer: {error}"
            ) from error
        if any(failed) and not all(failed):
            rank = failed.index(True)
            raise RankMismatch(
                f"process {rank} failed and others did not: {error}"
            ) from error

    def all_reduce_gradients(
        self, parameters: Sequence[nn.Parameter], *, keep_missing: bool = False
    ) -> None:
        """Replace each gradient by its sum over all processes; a missing one counts as
        0. Called only where there are several.

        Args:
            parameters: the same in all processes.
            keep_missing: leave out those that have a gradient in no process.
        """
        if keep_missing and parameters:
            has_gradient = [parameter.grad is not None for parameter in parameters]
            counts = torch.tensor(has_gradient, dtype=torch.int32)
            counts = self.all_reduce(counts.to(parameters[0].device))
            parameters = [
                parameter
                for parameter, count in zip(parameters, counts.tolist(), strict=True)
                if count
            ]
        for group in portions(parameters):
            gradients = []
            for parameter in group:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
            if len(gradients) == 1:
                torch_dist.all_reduce(gradients[0])
                continue

            flat = torch.cat([gradient.flatten() for gradient in gradients])
            torch_dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            sums = [
                part.view_as(gradient)
                for part, gradient in zip(parts, gradients, strict=True)
            ]
            torch._foreach_copy_(gradients, sums)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes in place, on the device, and return it."""
        if self.size > 1:
            torch_dist.all_reduce(values)
        return values

    def sum_over_groups(self, values: Tensor) -> Tensor:
        """Sum values over the groups of processes, in place.

        The processes of a group share samples and have the same values: one of them
        counts.
        """
        if self.context_rank > 0:
            values.zero_()
        return self.all_reduce(values)


def must_run_together(config: Config, dist: DistributedContext) -> bool:
    """Whether no process can run the network without others, because it lacks weights
    or tokens.
    """
    return sharded(config, dist) or dist.context_parallel > 1


def sharded(config: Config, dist: DistributedContext) -> bool:
    """Whether no process has the whole network.

    All processes then run it together, also for validation and previews.
    """
    return config.sharding == "FULL" and dist.size > 1


def portions(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield neighbours of one dtype and device, with at most BUFFER_NUMBERS numbers in
    all.

    A larger parameter is a portion by itself.
    """
    portion: list[nn.Parameter] = []
    numbers = 0
    for parameter in parameters:
        if portion:
            first = portion[0]
            differs = (parameter.dtype, parameter.device) != (first.dtype, first.device)
            if differs or numbers + parameter.numel() > BUFFER_NUMBERS:
                yield portion
                portion = []
                numbers = 0
        portion.append(parameter)
        numbers += parameter.numel()
    if portion:
        yield portion


def _gloo_group(patience: timedelta) -> Any:
    """Return a process group for messages of the host, which waits so long for others."""
    return torch_dist.new_group(backend="gloo", timeout=patience)


@contextmanager
def join() -> Iterator[DistributedContext]:
    """Join the launcher's processes for the length of a block."""
    rank, size = launched()
    if size == 1:
        yield DistributedContext()
        return

    device = local_device()
    if device.type == "mps":
        raise VideotuneError(
            "several processes cannot share an MPS device. Start one process."
        )
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)

    backends = []
    for kind in dict.fromkeys(("cpu", device.type)):
        backends.append(f"{kind}:{torch_dist.get_default_backend_for_device(kind)}")
    with watched_store(rank, size) as (store, watch):
        torch_dist.init_process_group(
            ",".join(backends),
            store=store,
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
        )
        try:
            yield DistributedContext(
                rank,
                size,
                cpu_group=_gloo_group(PATIENCE),
                cpu_group_impatient=_gloo_group(SHORT_PATIENCE),
                watch=watch,
                writer_group=_gloo_group(PATIENCE),
            )
        finally:
            # Taking leave of processes that are gone may take for ever.
            if not is_lost_connection(sys.exception()):
                torch_dist.destroy_process_group()
