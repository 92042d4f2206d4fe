"""Split the tokens of each sample over several processes (``context_parallel``).

diffusers does it: each process of a group runs the blocks over its part of the tokens,
and exchanges heads for tokens before and after attention (Ulysses: Jacobs et al. 2023,
arXiv 2309.14509). The network returns the whole prediction on every process, so that
each computes the whole loss, and the backward pass of a process starts from the part of
the prediction that it made. Its gradients are therefore a part of the sample's, of every
weight, and the sum over the group is the gradient.
"""

import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from videotune.errors import VideotuneError


def process_mesh(device_type: str, groups: int, parts: int) -> DeviceMesh:
    """Return the processes as one mesh: groups of neighbours share the tokens of a
    sample, and the groups share the samples of a step.

    diffusers wants "ring" beside "ulysses"; it has one process.

    Args:
        device_type: of torch.
        groups: groups of processes.
        parts: processes of a group.
    """
    return init_device_mesh(
        device_type,
        (groups, 1, parts),
        mesh_dim_names=("data", "ring", "ulysses"),
    )


def all_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh's processes in one dimension, over which weights are sharded."""
    return mesh["data", "ring", "ulysses"]._flatten("weights")


def split_tokens(
    net: Any,
    plan: Mapping[str, Any],
    attentions: Collection[nn.Module],
    mesh: DeviceMesh,
) -> None:
    """Let the processes of a group each run a network over a part of the tokens.

    Args:
        net: a diffusers model with its attention back end.
        plan: which tensors are split and gathered.
        attentions: the modules in which tokens attend to those of other processes. All
            others read text or sound, which each process has whole.
        mesh: of ``process_mesh``.

    Raises:
        VideotuneError: if the attention back end cannot do it.
    """
    from diffusers import ContextParallelConfig

    # What diffusers and torch would say in each run: that one timestep a sample is not
    # split, and that a function has another name.
    logging.getLogger("diffusers.hooks.context_parallel").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*all_gather_tensor.*")

    config = ContextParallelConfig(ulysses_degree=mesh["ulysses"].size(), mesh=mesh)
    try:
        with _without_warnings(), _counted_cpu(mesh.device_type):
            net.enable_parallelism(config=config, cp_plan=dict(plan))
    except ValueError as error:
        raise VideotuneError(
            f"attention: {str(error).splitlines()[0]} Set attention to native"
        ) from error

    split = set(attentions)
    for module in net.modules():
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config") and module not in split:
            processor._parallel_config = None
    net.register_forward_pre_hook(_flatten_single_timesteps, with_kwargs=True)


def _flatten_single_timesteps(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass one timestep a sample as (B,), not as (B,1): the plan splits the second
    dimension by tokens.
    """
    timestep = kwargs.get("timestep")
    if timestep is not None and timestep.ndim == 2 and timestep.shape[1] == 1:
        kwargs = {**kwargs, "timestep": timestep.flatten()}
    return args, kwargs


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out diffusers' warning, once a process, that its interface may change."""
    logger = logging.getLogger("diffusers.models.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _counted_cpu(device_type: str) -> Iterator[None]:
    """Count the CPU as one device while diffusers numbers the devices.

    It divides by the number of accelerators, which is 0 without one, and does not use
    the number that it gets.
    """
    if device_type != "cpu":
        yield
        return
    device_count = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = device_count
