"""An exponential moving average of what trains: the mean of the last steps' weights, steadier than the last ones."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from videotune.distributed import portions


class EmaWeights:
    """e ← d·e + (1 - d)·w after each step that was applied, with d = min(decay, (1 + k)/(10 + k)) at step k.

    The ramp keeps the first average from being the untrained weights. Source: Polyak & Juditsky 1992; the ramp of
    TensorFlow's average; diffusers' has the same, one step later. ``values`` are float32, by the parameters' names.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], decay: float, host: bool = False
    ) -> None:
        """``host``: the averages lie in host memory; every step then copies the weights there, and waits for each
        portion of them."""
        self.decay = decay
        self.host = host
        self._parameters = dict(parameters)
        self.values = {
            name: self._now([parameter])[0].clone() for name, parameter in parameters.items()
        }

    def _now(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Weights of one device as averages are kept: float32, and on the host where that is wished, by one copy."""
        if not self.host or weights[0].device.type == "cpu":
            return [weight.detach().float() for weight in weights]
        flat = torch.cat([weight.detach().flatten().float() for weight in weights]).cpu()
        return [
            part.view_as(w)
            for part, w in zip(flat.split([w.numel() for w in weights]), weights, strict=True)
        ]

    @torch.no_grad()
    def update(self, step: int, applied: Tensor | None = None) -> None:
        """Take in the weights after ``step``; ``applied`` () is 0 where the step was not, and then nothing changes."""
        share: float | Tensor = 1 - min(self.decay, (1 + step) / (10 + step))
        if applied is not None:  # of averages on the host the host needs the answer
            apart = any(value.device != applied.device for value in self.values.values())
            share = share * (float(applied) if apart else applied)
        averages = iter(self.values.values())
        for weights in portions(list(self._parameters.values())):
            values = [next(averages) for _ in weights]
            change = torch._foreach_sub(self._now(weights), values)
            torch._foreach_mul_(change, share)
            torch._foreach_add_(values, change)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The network computes with the averages; after it weights and averages are back, bit for bit."""
        rounded = {
            n: self.values[n].clone()
            for n, p in self._parameters.items()
            if p.dtype != self.values[n].dtype
        }
        self._swap()
        try:
            yield
        finally:
            self._swap()
            for name, value in rounded.items():  # bf16 weights have taken them rounded
                self.values[name].copy_(value)

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
        odd += [
            name
            for name in self.values
            if name in values and values[name].shape != self.values[name].shape
        ]
        if odd:
            raise ValueError(f"{len(odd)} averages do not fit, the first is {odd[0]}")
        for name, value in self.values.items():
            value.copy_(values[name])
