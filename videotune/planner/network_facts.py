"""What trains in a denoiser, and how large the denoiser is: from tables that come with
videotune, or from its skeleton, whose libraries take seconds to import.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from videotune.adapters import adapter_types, layers
from videotune.adapters.lora import idle_targets
from videotune.config.schema import Config
from videotune.job.job import Job
from videotune.model_spec import ModelSpec
from videotune.models.base import DiffusersModel
from videotune.models.registry import find
from videotune.planner.shipped_readings import (
    family_tables,
    mixed,
    network_key,
    rank_weights,
    sizes_key,
)
from videotune.trainer.build import what_trains
from videotune.trainer.text_encoders import text_size
from videotune.validation.part_movement import part_of


class LinearSizes(NamedTuple):
    """Sizes of a denoiser."""

    parameters: int
    in_and_out: int
    """Numbers into and out of all linear layers for one token."""
    block_weights: int
    """Weights of the linear layers in blocks."""


@dataclass(frozen=True)
class NetworkFacts:
    """What trains in one denoiser."""

    modules: int
    parts: Mapping[str, int]
    """Numbers that train, by part of the network, the most first."""
    groups: Mapping[str, int]
    """How many modules of each kind train, with * for a block's number."""
    idle: Mapping[str, int]
    """The same of modules that the config names and that do not train."""
    text: tuple[int, int] = (0, 0)
    """How many modules and numbers of the text encoders train."""
    by_rows: Mapping[int, int] = field(default_factory=dict)
    """How many numbers of the denoiser's own weights train, by their tensors' rows."""

    def numbers_below(self, rows: int) -> int:
        """How many numbers train in tensors with fewer rows."""
        return sum(
            count for tensor_rows, count in self.by_rows.items() if tensor_rows < rows
        )

    @property
    def parameters(self) -> int:
        """How many numbers train."""
        return sum(self.parts.values())


def network_facts(job: Job) -> NetworkFacts:
    """Return what trains in one denoiser of a job that names a base model."""
    assert job.base is not None
    spec = job.spec

    if not spec.reads_sound:
        networks = family_tables(spec.name).get("networks", {})
        table = networks.get(network_key(spec, job.base.folder, job.config))
        if table is not None:
            weights = rank_weights(table["ranks"], job.config.lora.rank)
            parts = mixed(table["parts"], weights)
            numbers = {part: round(count) for part, count in parts.items()}
            return NetworkFacts(
                modules=table["modules"],
                parts=numbers,
                groups=table["groups"],
                idle=table["idle"],
                text=tuple(table["text"]),
            )

    return read_network_facts(skeleton_family(job), job.config)


def skeleton_family(job: Job) -> DiffusersModel:
    """Return the family of a job, to read its networks' shapes."""
    assert job.base is not None
    family = find(job.spec.name)(job.base.folder, torch.device("cpu"), torch.float32)
    family.spec = job.spec
    return family


def read_network_facts(family: DiffusersModel, config: Config) -> NetworkFacts:
    """Read what trains from the denoiser's skeleton."""
    parameters: Mapping[str, torch.Tensor] = {}
    if config.transformer.train:
        parameters = what_trains(family.skeleton(), family.spec, config)
    paths = list(adapter_types.by_module(parameters))
    if not paths:
        module_names = [name.rpartition(".")[0] for name in parameters]
        paths = list(dict.fromkeys(module_names))
    return NetworkFacts(
        modules=len(paths),
        parts=_numbers_by_part(parameters, family.spec),
        groups=layers.grouped(paths),
        idle=layers.grouped(named_and_idle(family, config)),
        text=text_size(family, config) if config.text_in_step else (0, 0),
        by_rows=_numbers_by_rows(parameters),
    )


def _numbers_by_part(
    parameters: Mapping[str, torch.Tensor], spec: ModelSpec
) -> dict[str, int]:
    """Return how many numbers train in each part, the most first."""
    numbers: Counter[str] = Counter()
    for name, value in parameters.items():
        numbers[part_of(name, spec)] += value.numel()
    return dict(numbers.most_common())


def _numbers_by_rows(parameters: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """Return how many numbers train in tensors of each number of rows."""
    numbers: Counter[int] = Counter()
    for value in parameters.values():
        rows = value.shape[0] if value.ndim else 1
        numbers[rows] += value.numel()
    return dict(numbers)


def named_and_idle(family: DiffusersModel, config: Config) -> list[str]:
    """Return the modules of the denoiser that the config names and that do not train,
    because they have no effect in a training step.

    A parameter that is neither a weight nor a bias is returned under its own path.
    """
    spec = family.spec
    if not spec.idle_paths or not config.transformer.train:
        return []

    net = family.skeleton()
    if config.training_method != "FINE_TUNE":
        return idle_targets(net, spec, config.lora.targets)
    if config.transformer.layers is None:
        return []

    names = [name for name, _ in net.named_parameters()]
    chosen = layers.layers_of(names, config.transformer.layers)
    modules = []
    for name in chosen:
        if spec.is_idle(name):
            modules.append(name.removesuffix(".weight").removesuffix(".bias"))
    return list(dict.fromkeys(modules))


def linear_sizes(job: Job) -> LinearSizes:
    """Return the sizes of the denoiser of a job that names a base model."""
    assert job.base is not None
    sizes = family_tables(job.spec.name).get("sizes", {})
    table = sizes.get(sizes_key(job.spec, job.base.folder))
    if table is not None:
        return LinearSizes(**table)
    return read_linear_sizes(skeleton_family(job))


def read_linear_sizes(family: DiffusersModel) -> LinearSizes:
    """Read the sizes from the denoiser's skeleton."""
    net = family.skeleton()
    block_prefixes = tuple(f"{path}." for path in family.spec.block_lists)
    in_and_out = 0
    block_weights = 0
    for path, module in net.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        in_and_out += module.in_features + module.out_features
        if path.startswith(block_prefixes):
            block_weights += module.in_features * module.out_features
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return LinearSizes(parameters, in_and_out, block_weights)
