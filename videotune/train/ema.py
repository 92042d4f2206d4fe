"""An exponential moving average of what trains: the mean of the last steps' weights, steadier than the last ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

TOGETHER = 1 << 26
"""Weights of so many numbers together are averaged in a few operations; more of them one by one, to save memory."""


class Ema:
    """e ← d·e + (1 - d)·w after each step that was applied, with d = min(decay, (1 + k)/(10 + k)) at step k.

    The ramp keeps the first average from being the untrained weights. Source: Polyak & Juditsky 1992; the ramp as in
    diffusers' and TensorFlow's averages. ``values`` are float32, by the parameters' names.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters)
        self.values = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, step: int, applied: Tensor | None = None) -> None:
        """Take in the weights after ``step``; ``applied`` () is 0 where the step was not, and then nothing changes."""
        share: float | Tensor = 1 - min(self.decay, (1 + step) / (10 + step))
        if applied is not None:
            share = applied * share
        values, now = list(self.values.values()), [p.detach() for p in self._parameters.values()]
        if applied is not None and any(value.device != applied.device for value in values):
            share = float(share)  # some weights are on the host, which waits for this anyway
        if sum(value.numel() for value in values) <= TOGETHER:
            change = torch._foreach_sub(now, values)
            torch._foreach_mul_(change, share)
            torch._foreach_add_(values, change)
            return
        for value, weight in zip(values, now, strict=True):
            value.lerp_(weight, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The network computes with the averages; after it the weights are back, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Averages and weights change places, one tensor at a time."""
        for name, parameter in self._parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(kept)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put saved averages back.

        Raises ValueError that names a missing, superfluous or misshapen one.
        """
        odd = sorted(set(values) ^ set(self.values))
        odd += [name for name in self.values if name in values and values[name].shape != self.values[name].shape]
        if odd:
            raise ValueError(f"{len(odd)} averages do not fit, the first is {odd[0]}")
        for name, value in self.values.items():
            value.copy_(values[name])
