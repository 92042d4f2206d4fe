"""Norms of the gradients of single steps, kept on the device until they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


class GradientNorms:
    """The norms of the gradients of a step that was asked for."""

    def __init__(
        self, is_due: Callable[[int], bool], most: int, device: torch.device
    ) -> None:
        """Take the memory at once, so that it does not grow in a step.

        Args:
            is_due: whether a step's norms are wanted.
            most: the most parameters that train together.
            device: of the parameters.
        """
        self._is_due = is_due
        # Gradients of offloaded weights are in host memory; their norms stay there.
        self._norms_by_device = {
            each.type: torch.zeros(most, device=each) for each in {device, CPU}
        }
        self._step = 0
        self.expert: str | None = None
        """The expert that trained in the step whose norms are kept."""

    def keep(
        self, step: int, parameters: Sequence[nn.Parameter], expert: str | None
    ) -> None:
        """Keep the norms of a step, if they are wanted. Nothing waits for the device.

        Args:
            step: the step.
            parameters: what trains, with complete gradients.
            expert: that trained.
        """
        if not self._is_due(step):
            return
        indices = []
        gradients = []
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                indices.append(index)
                gradients.append(parameter.grad)
        norms = torch._foreach_norm(gradients) if gradients else ()
        self._write(step, zip(indices, norms, strict=True), expert)

    def keep_norms(
        self,
        step: int,
        norms: Mapping[str, Tensor],
        names: Iterable[str],
        expert: str | None,
    ) -> None:
        """Keep the norms of a step that have been measured already, if they are wanted.
        Nothing waits for the device.

        Args:
            step: the step.
            norms: () each, by name; those of tensors without a gradient are missing.
            names: of what trains, in the order of ``TrainableState.parameters``.
            expert: that trained.
        """
        if not self._is_due(step):
            return
        by_index = [
            (index, norms[name]) for index, name in enumerate(names) if name in norms
        ]
        self._write(step, by_index, expert)

    def _write(
        self, step: int, norms: Iterable[tuple[int, Tensor]], expert: str | None
    ) -> None:
        """Copy norms () to their indices; all others are 0."""
        for buffer in self._norms_by_device.values():
            buffer.zero_()
        for index, norm in norms:
            self._norms_by_device[norm.device.type][index] = norm
        self._step = step
        self.expert = expert

    def read(self, step: int) -> Tensor | None:
        """Return a step's norms in the order of ``TrainableState.parameters``.

        Returns:
            (n,), 0 beyond the parameters of the step's expert; None if those of the step
            are not kept.
        """
        if step != self._step:
            return None
        norms = [norms.double().cpu() for norms in self._norms_by_device.values()]
        return torch.stack(norms).sum(dim=0)
