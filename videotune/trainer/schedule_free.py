"""Schedule-free AdamW trains weights y and is evaluated at their average x, which
follows from y and its state.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class ScheduleFreeWeights:
    """The weights x at which schedule-free optimizers are evaluated.

    The library calculates x from y and z, and y from x again, each time to rounding. So
    y is kept and restored bit for bit. Source: Defazio et al. 2024, arXiv 2405.15682.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Any]
    ) -> None:
        self._parameters = dict(parameters)
        self._optimizers = optimizers

    @property
    def values(self) -> dict[str, Tensor]:
        """A copy of x, by the parameters' names."""
        with self.in_place():
            return self._copy_parameters()

    def update(self, step: int, applied: Tensor | None = None) -> None:
        """Do nothing: x follows from the weights and the optimizer's state."""

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Do nothing, for the same reason."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the network compute with x within the block, and restore weights and
        optimizer after it.
        """
        trained = self._copy_parameters()
        for optimizer in self._optimizers:
            optimizer.eval()
        try:
            yield
        finally:
            for optimizer in self._optimizers:
                optimizer.train()
            for name, parameter in self._parameters.items():
                parameter.detach().copy_(trained[name])

    def _copy_parameters(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach().clone()
            for name, parameter in self._parameters.items()
        }
