"""Gradients of streamed weights that train: they go to the host as soon as their block's backward pass has made them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Sent:
    """Gradients on their way to the host; ``arrived`` is behind the last of them."""

    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    arrived: torch.cuda.Event | None = None


class GradientRelease:
    """Adds the network's gradients to those of the parameters on the host, in their own dtype, as autograd would.

    On CUDA they are copied on a stream of their own; the host waits for a block's while the next one but one computes, and
    for the last ones at the end of the backward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[Sent] = deque()
        self._watches = False

    def watch(self, parameter: nn.Parameter, host: nn.Parameter) -> None:
        """From now on what autograd accumulates for the one is the other's gradient."""
        parameter.register_post_accumulate_grad_hook(self._to(host))
        self._watches = True

    def _to(self, host: nn.Parameter) -> Callable[[Tensor], None]:
        def release(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if self._stream is None:
                _add(host, gradient)
                return
            if not self._under_way:
                self._under_way.append(Sent(arrived=torch.cuda.Event()))
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            staged = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
            with torch.cuda.stream(self._stream):
                staged.copy_(gradient, non_blocking=True)
                gradient.record_stream(self._stream)
                sent = self._under_way[-1]
                sent.gradients.append((host, staged))
                assert sent.arrived is not None
                sent.arrived.record(self._stream)

        return release

    def forget(self) -> None:
        """What is still under way is of a backward pass that was broken off."""
        self._under_way.clear()

    def next_block(self) -> None:
        """Another block's backward pass begins: those before the last one have had time to arrive."""
        if self._stream is not None and self._watches:
            self._settle(keep=1)
            self._under_way.append(Sent(arrived=torch.cuda.Event()))

    def finish(self) -> None:
        """Every gradient has arrived."""
        self._settle(keep=0)

    def _settle(self, keep: int) -> None:
        while len(self._under_way) > keep:
            sent = self._under_way.popleft()
            if sent.gradients:
                assert sent.arrived is not None
                sent.arrived.synchronize()
            for host, staged in sent.gradients:
                _add(host, staged.clone())  # pageable: pinned memory is for what is under way


def _add(host: nn.Parameter, gradient: Tensor) -> None:
    if host.grad is None:
        host.grad = gradient
    else:
        host.grad.add_(gradient)
