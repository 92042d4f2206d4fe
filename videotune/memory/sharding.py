"""A denoiser whose weights are cut into rows, a part with each process, by torch's FSDP2 (``fully_shard``).

A block's weights are gathered when it computes, forward and backward, and let go after it. What trains of them is held here
as plain tensors over this process's rows, so that optimizers, averages and checkpoints know nothing of the cutting.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Shard:
    """Which rows of a tensor a process has: ``count`` from number ``first`` on, of a tensor of the shape ``whole``."""

    whole: tuple[int, ...]
    first: int
    count: int

    def of(self, value: Tensor) -> Tensor:
        """These rows of the whole tensor."""
        return value.narrow(0, self.first, self.count)


class Shards:
    """This process's part of what trains of a network that is cut. ``bind`` makes a network a cut one.

    ``local``: by name what it has rows of, as plain parameters, whose gradients are there after ``collect``. ``rows``: of
    every parameter that is cut and trains, those too of which this process has no row. They outlive a network: another of
    the same shape that is bound computes with them.
    """

    def __init__(self) -> None:
        self.local: dict[str, nn.Parameter] = {}
        self.rows: dict[str, Shard] = {}
        self._cut: dict[str, Any] = {}

    def bind(
        self,
        net: nn.Module,
        paths: Sequence[str],
        mesh: DeviceMesh,
        alone: Collection[nn.Parameter],
    ) -> None:
        """Cut the network's blocks, each a group of its own, and what is beside them, over the processes of ``mesh``.

        ``net`` lies on the CPU, mapped from its files at best: each block in turn comes to the device and is cut there, so
        that no device holds the whole network. ``paths`` are module paths of lists of blocks. ``alone`` (an adapter's
        parameters) stay whole with every process, and so does what has another dtype than most of the network: a group's
        gradients are of one.
        """
        # it warns of writing into the output in place, which nobody does here
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")

        device = _device_of(mesh)
        whole = {id(parameter) for parameter in alone} | _odd(net)
        kept = {parameter for parameter in net.parameters() if id(parameter) in whole}
        for tensor in (*kept, *net.buffers()):
            tensor.data = tensor.data.to(device)
        names = {
            name: p
            for name, p in net.named_parameters()
            if p.requires_grad and id(p) not in whole
        }
        shapes = {name: tuple(parameter.shape) for name, parameter in names.items()}
        blocks = [block for path in paths for block in net.get_submodule(path).children()]
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in (*blocks, net):
            # the root too lets its weights go: a reading between two updates must not see old ones
            cut = fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=True,
                mp_policy=policy,
                ignored_params=kept,
            )
            cut.set_gradient_divide_factor(
                1.0
            )  # summed: each process has divided by the samples of the whole step
            cut.set_force_sum_reduction_for_comms(True)
        self._cut = {
            name: parameter for name, parameter in net.named_parameters() if name in shapes
        }
        for name, shape in shapes.items():
            self._hold(name, shape, mesh)

    @torch.no_grad()
    def _hold(self, name: str, shape: tuple[int, ...], mesh: DeviceMesh) -> None:
        """Let the plain parameter of a name be this process's rows of the network that is bound now."""
        part: Tensor = self._cut[name].to_local()
        each = -(-shape[0] // mesh.size())  # as torch.chunk cuts
        self.rows[name] = Shard(
            shape, min(each * mesh.get_local_rank(), shape[0]), part.shape[0]
        )
        if part.shape[0] == 0:
            return
        before = self.local.get(name)
        if before is None:
            self.local[name] = nn.Parameter(part)
        else:
            part.copy_(before)
            before.data = part

    @torch.no_grad()
    def collect(self) -> None:
        """After backward: this process's rows of each summed gradient, zeros where no sample of the step used a weight."""
        for name, parameter in self.local.items():
            held = self._cut[name]
            parameter.grad = (
                torch.zeros_like(parameter) if held.grad is None else held.grad.to_local()
            )
            held.grad = None


def _odd(net: nn.Module) -> set[int]:
    """The parameters, by identity, that cannot be cut: of a rarer dtype, or without rows."""
    count: Counter[torch.dtype] = Counter()
    for parameter in net.parameters():
        count[parameter.dtype] += parameter.numel()
    usual = count.most_common(1)[0][0]
    return {
        id(parameter)
        for parameter in net.parameters()
        if parameter.dtype != usual or parameter.ndim == 0
    }


def _device_of(mesh: DeviceMesh) -> torch.device:
    own = mesh.device_type
    return (
        torch.device(own)
        if own == "cpu"
        else torch.device(own, torch.accelerator.current_device_index())
    )
