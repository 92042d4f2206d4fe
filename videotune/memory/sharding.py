"""Shard a denoiser's weights by rows over the processes with FSDP2 (``fully_shard``).

The weights of a block are gathered while it computes, forward and backward, and freed
afterwards. The parameters that train are exposed as plain tensors over this process's
rows, so that optimizers, averages and checkpoints work as without sharding.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from videotune.errors import VideotuneError
from videotune.lazy import fsdp


@dataclass(frozen=True)
class Shard:
    """The rows of a tensor that one process has."""

    full_shape: tuple[int, ...]
    """Shape of the unsharded tensor."""

    first: int
    """Index of the first row."""

    count: int
    """Number of rows; 0 if the process has none."""

    def of(self, value: Tensor) -> Tensor:
        """Return these rows of the full tensor."""
        return value.narrow(0, self.first, self.count)


class Shards:
    """This process's rows of the parameters that train.

    They outlive a network: another network of the same shape that is bound computes
    with them.
    """

    def __init__(self) -> None:
        self.local_parameters: dict[str, nn.Parameter] = {}
        """What exists in this process, by name: its rows of each tensor of which it has some.
        ``take_gradients`` sets the gradients.
        """

        self.layout: dict[str, Shard] = {}
        """Which rows this process has of every sharded parameter that trains, also of those of
        which it has none.
        """

        self._sharded: dict[str, Any] = {}

    def bind(
        self,
        net: nn.Module,
        paths: Sequence[str],
        mesh: DeviceMesh,
        unsharded: Collection[nn.Parameter],
    ) -> None:
        """Shard a network over the processes of ``mesh``, one FSDP group per block.

        Each block in turn moves to the device and is sharded there, so that no device
        holds the full network. Parameters of another dtype than most of the network
        stay unsharded, because the gradients of a group must share a dtype; so do those
        with fewer rows than processes.

        Args:
            net: the network on the CPU, preferably memory-mapped from its files.
            paths: module paths of the lists of blocks.
            mesh: the processes.
            unsharded: parameters that every process keeps in full (an adapter's).

        Raises:
            VideotuneError: if everything that trains is sharded, and some process has no
                row of it.
        """
        # FSDP2 warns about in-place writes to its outputs; nothing here writes to them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")

        ignored = _move_unsharded(net, mesh, unsharded)
        shapes = {
            name: tuple(parameter.shape)
            for name, parameter in net.named_parameters()
            if parameter.requires_grad and parameter not in ignored
        }

        if shapes and not any(p.requires_grad for p in ignored):
            refuse_idle_processes(shapes, mesh.size())

        modules: list[nn.Module] = []
        for path in paths:
            modules.extend(net.get_submodule(path).children())
        modules.append(net)
        _shard_modules(modules, mesh, ignored)

        self._sharded = {
            name: parameter
            for name, parameter in net.named_parameters()
            if name in shapes
        }
        for name, shape in shapes.items():
            self._bind_local(name, shape, mesh)

    @torch.no_grad()
    def _bind_local(self, name: str, shape: tuple[int, ...], mesh: DeviceMesh) -> None:
        """Make a local parameter share memory with its rows in the bound network."""
        rows: Tensor = self._sharded[name].to_local()
        first = _first_row(shape[0], mesh.get_local_rank(), mesh.size())
        self.layout[name] = Shard(full_shape=shape, first=first, count=rows.shape[0])
        if rows.shape[0] == 0:
            return

        parameter = self.local_parameters.get(name)
        if parameter is None:
            self.local_parameters[name] = nn.Parameter(rows)
        else:
            rows.copy_(parameter)
            parameter.data = rows

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Hand the gradients that FSDP has summed to this process's rows; nothing is sent.

        The gradient is zero if no sample of the step used a parameter.
        """
        for name, parameter in self.local_parameters.items():
            sharded = self._sharded[name]
            if sharded.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad = sharded.grad.to_local()
            sharded.grad = None

    def forget_gradients(self) -> None:
        """Remove what the passes so far have left in the network's gradients."""
        for parameter in self._sharded.values():
            parameter.grad = None

    @torch.no_grad()
    def drop_zero_gradients(
        self, sum_over_processes: Callable[[Tensor], Tensor]
    ) -> None:
        """Remove the gradients of parameters whose rows have zeros in all processes.

        Where nothing reads a module's output, autograd leaves its weights without a
        gradient. FSDP's hooks hand zeros on to them instead.

        Args:
            sum_over_processes: sums a tensor over the processes of the mesh, in place.
        """
        if not self.layout:
            return  # an adapter trains, which is not sharded

        device = next(iter(self._sharded.values())).device
        is_nonzero = torch.zeros(len(self.layout), dtype=torch.int32, device=device)
        for index, name in enumerate(self.layout):
            if name in self.local_parameters:
                gradient = self.local_parameters[name].grad
                assert gradient is not None, "take_gradients gives each one a gradient"
                is_nonzero[index] = gradient.any()

        counts = sum_over_processes(is_nonzero).tolist()
        for name, count in zip(self.layout, counts, strict=True):
            if not count and name in self.local_parameters:
                self.local_parameters[name].grad = None


def _move_unsharded(
    net: nn.Module, mesh: DeviceMesh, unsharded: Collection[nn.Parameter]
) -> set[nn.Parameter]:
    """Move buffers and unsharded parameters to the device; return the parameters."""
    device = _device_of(mesh)
    ignored_ids = {id(parameter) for parameter in unsharded}
    ignored_ids |= _unshardable(net, mesh.size())
    ignored = {
        parameter for parameter in net.parameters() if id(parameter) in ignored_ids
    }
    for tensor in (*ignored, *net.buffers()):
        tensor.data = tensor.data.to(device)
    return ignored


def _shard_modules(
    modules: Sequence[nn.Module], mesh: DeviceMesh, ignored: set[nn.Parameter]
) -> None:
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in modules:
        # The root frees its weights too: a forward pass between two updates must not
        # see old ones.
        sharded = fsdp.fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=policy,
            ignored_params=ignored,
        )

        # Sum, not average: each process has divided by the samples of the whole step.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _first_row(rows: int, rank: int, processes: int) -> int:
    """Return the first row of a process, or ``rows`` if it has none, as torch.chunk does."""
    rows_per_process = -(-rows // processes)
    return min(rows_per_process * rank, rows)


def refuse_idle_processes(
    shapes: Mapping[str, tuple[int, ...]], processes: int
) -> None:
    """Raise VideotuneError if the last process has no row of anything that trains.

    Rows are dealt out from the first process on, so that the last one has the fewest.
    """
    last = processes - 1
    if all(
        _first_row(shape[0], last, processes) == shape[0] for shape in shapes.values()
    ):
        raise VideotuneError(
            f"sharding: of what transformer.layers names, the last of {processes} processes would have no row to "
            "train. Set sharding to OFF, or name more layers"
        )


def _unshardable(net: nn.Module, processes: int) -> set[int]:
    """Return the ids of the parameters of a rarer dtype or with fewer rows than processes."""
    count: Counter[torch.dtype] = Counter()
    for parameter in net.parameters():
        count[parameter.dtype] += parameter.numel()
    most_common = count.most_common(1)[0][0]
    return {
        id(parameter)
        for parameter in net.parameters()
        if parameter.dtype != most_common
        or parameter.ndim == 0
        or parameter.shape[0] < processes
    }


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
