"""Average the weights of the latest steps, exponentially: steadier than those of the
last step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from videotune.distributed import portions


class EmaWeights:
    """e ← d·e + (1 - d)·w after each step that was applied, with d = min(decay, (1 +
    k)/(10 + k)) at step k.

    The ramp keeps the first average from being the untrained weights. Source: Polyak &
    Juditsky 1992; the ramp of TensorFlow's average; diffusers' has the same, one step
    later.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], decay: float, host: bool = False
    ) -> None:
        """Begin the averages with the weights as they are.

        Args:
            parameters: what is averaged, by name.
            decay: d at the end of the ramp.
            host: keep the averages in host memory. Every step then copies the weights
                there, and waits for them.
        """
        self.decay = decay
        self.host = host
        self._parameters = dict(parameters)
        self.values: dict[str, Tensor] = {}
        """The averages, float32, by the parameters' names."""
        for name, parameter in parameters.items():
            (first_average,) = self._in_form_of_averages([parameter])
            self.values[name] = first_average.clone()

    def _in_form_of_averages(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return weights of one device as averages are kept: float32, and on the host
        in one copy if so configured.
        """
        if not self.host or weights[0].device.type == "cpu":
            return [weight.detach().float() for weight in weights]

        flat_weights = [weight.detach().flatten().float() for weight in weights]
        lengths = [weight.numel() for weight in weights]
        on_host = torch.cat(flat_weights).cpu()
        parts = on_host.split(lengths)
        averages = []
        for part, weight in zip(parts, weights, strict=True):
            averages.append(part.view_as(weight))
        return averages

    @torch.no_grad()
    def update(self, step: int, applied: Tensor | None = None) -> None:
        """Add the weights after ``step``.

        If the scalar ``applied`` is 0 the step was skipped, and nothing changes.
        """
        ramp = (1 + step) / (10 + step)
        share: float | Tensor = 1 - min(self.decay, ramp)
        if applied is not None:
            # The host needs the answer for averages that are on the host.
            is_elsewhere = any(
                value.device != applied.device for value in self.values.values()
            )
            share = share * (float(applied) if is_elsewhere else applied)

        averages = iter(self.values.values())
        for weights in portions(list(self._parameters.values())):
            values = [next(averages) for _ in weights]
            current = self._in_form_of_averages(weights)
            change = torch._foreach_sub(current, values)
            torch._foreach_mul_(change, share)
            torch._foreach_add_(values, change)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the network compute with the averages within the block; restore weights
        and averages bit for bit.
        """
        # Weights in bf16 take the averages rounded, and swapping back would bring them
        # back rounded.
        exact_averages = {}
        for name, parameter in self._parameters.items():
            if parameter.dtype != self.values[name].dtype:
                exact_averages[name] = self.values[name].clone()

        self._swap()
        try:
            yield
        finally:
            self._swap()
            for name, value in exact_averages.items():
                self.values[name].copy_(value)

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange averages and weights, one tensor at a time."""
        for name, parameter in self._parameters.items():
            weight = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(weight)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Restore saved averages.

        Raises ValueError that names a missing, superfluous or misshapen one.
        """
        in_one_only = set(values) ^ set(self.values)
        misfits = sorted(in_one_only)
        for name, value in self.values.items():
            has_other_shape = name in values and values[name].shape != value.shape
            if has_other_shape:
                misfits.append(name)
        if misfits:
            raise ValueError(
                f"{len(misfits)} averages do not fit, the first is {misfits[0]}"
            )
        for name, value in self.values.items():
            value.copy_(values[name])
