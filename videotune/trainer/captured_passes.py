"""Replay passes of the denoiser as CUDA graphs (``cuda_graphs``).

A pass starts thousands of kernels. For small models the host takes longer to start them
than the card to run them. A CUDA graph starts all of them at once: it is captured from
one pass, and replayed with other inputs, which are copied into the captured pass's own.
What the host computes in a pass is not repeated, so a graph holds only for inputs of the
same shapes and for the same parameters in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from videotune.console import echo
from videotune.memory.accelerator import empty_cache
from videotune.trainer.network_pass import PassInputs, PassOutput

MAX_GRAPHS = 24
"""Graphs that are kept at most; passes of further shapes run without one."""


def no_cuda_graphs(device: torch.device) -> str | None:
    """Return why a device has no CUDA graphs, or None."""
    if device.type != "cuda":
        return "only a CUDA GPU has CUDA graphs"
    if not (torch.version.cuda or torch.version.hip):
        return "this build of torch has no CUDA graphs"
    return None


RunPass = Callable[[PassInputs], PassOutput]
"""Runs a pass forward and backward, and returns its detached output."""


class CudaGraph:
    """A captured sequence of kernels.

    Graphs share memory. What one graph used only within its pass was free when the next
    one was captured, whose results may lie there. So a replay may write over the results
    of any other graph, and losses are read, and gradients copied, before it.
    """

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], None], pool: Any) -> None:
        """Record the kernels that ``run`` starts; they do not run."""
        # Threads that read batches and write checkpoints may use the card meanwhile.
        with torch.cuda.graph(self._graph, pool, capture_error_mode="thread_local"):
            run()

    def replay(self) -> None:
        """Run the kernels."""
        self._graph.replay()

    @staticmethod
    def new_pool() -> Any:
        """Return a handle of memory that graphs share."""
        return torch.cuda.graph_pool_handle()


@dataclass(frozen=True)
class CapturedPass:
    """A graph with the memory that it reads and writes."""

    graph: CudaGraph
    inputs: tuple[Tensor, ...]
    output: PassOutput
    gradients: tuple[tuple[nn.Parameter, Tensor], ...]
    """What trains, and the gradient that the graph writes of it."""
    fixed: tuple[Tensor, ...]
    """Parameters and buffers of the network."""
    addresses: tuple[int, ...]
    """Where these were."""


class CapturedPasses:
    """The graphs of a denoiser's passes, by the shapes of their inputs.

    The first pass of each shape runs as usual, because libraries set themselves up in
    it. The second one is captured.
    """

    def __init__(self, graph_class: type[CudaGraph] = CudaGraph) -> None:
        self._graph_class = graph_class
        self._graphs: dict[str, CapturedPass] = {}
        self._seen: set[str] = set()
        self._pool: Any = None
        self.failure: str | None = None
        """Why capturing has failed; then all passes run without graphs."""

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Free the graphs and their memory; they are captured again when needed."""
        if self._graphs:
            self._graphs.clear()
            self._pool = None
            empty_cache()

    def give_up(self, reason: str) -> None:
        """Free the graphs for good, and print why."""
        self.failure = reason
        self.clear()
        echo(f"cuda_graphs: off: {reason}")

    def run(self, net: nn.Module, inputs: PassInputs, run_pass: RunPass) -> PassOutput:
        """Run a pass, by its graph if it has one; gradients grow by the pass's own."""
        captured = self._find_or_capture(net, inputs, run_pass)
        if captured is None:
            return run_pass(inputs)
        _copy_into(captured.inputs, inputs)
        self._keep_gradients()
        captured.graph.replay()
        _add_gradients(captured)
        return captured.output

    def _keep_gradients(self) -> None:
        """Copy the gradients of earlier passes out of the memory of graphs."""
        for captured in self._graphs.values():
            for parameter, gradient in captured.gradients:
                if parameter.grad is gradient:
                    parameter.grad = gradient.clone()

    def _find_or_capture(
        self, net: nn.Module, inputs: PassInputs, run_pass: RunPass
    ) -> CapturedPass | None:
        """Return the graph of a pass; None: the pass has to run without one."""
        if self.failure is not None:
            return None

        key = _key(inputs)
        captured = self._graphs.get(key)
        if captured is not None:
            if _addresses(captured.fixed) == captured.addresses:
                return captured
            # The network has moved, and the graphs would read where it was.
            self.clear()

        is_first = key not in self._seen
        self._seen.add(key)
        if is_first or len(self._graphs) >= MAX_GRAPHS:
            return None
        captured = self._capture(net, inputs, run_pass)
        if captured is not None:
            self._graphs[key] = captured
        return captured

    def _capture(
        self, net: nn.Module, inputs: PassInputs, run_pass: RunPass
    ) -> CapturedPass | None:
        """Capture a pass, or switch capturing off and say why it failed."""
        own_inputs = inputs.map(torch.clone)
        trained = [
            parameter for parameter in net.parameters() if parameter.requires_grad
        ]
        outputs: list[PassOutput] = []
        graph = self._graph_class()
        if self._pool is None:
            self._pool = self._graph_class.new_pool()

        try:
            with _gradients_set_aside(trained):
                graph.capture(lambda: outputs.append(run_pass(own_inputs)), self._pool)
                written = tuple(
                    (parameter, parameter.grad)
                    for parameter in trained
                    if parameter.grad is not None
                )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0][:150]
            self.give_up(f"the pass cannot be captured: {reason}")
            return None

        fixed = tuple(chain(net.parameters(), net.buffers()))
        return CapturedPass(
            graph=graph,
            inputs=_tensors(own_inputs),
            output=outputs[0],
            gradients=written,
            fixed=fixed,
            addresses=_addresses(fixed),
        )


@contextmanager
def _gradients_set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Take the gradients of earlier passes away within the block, so that the graph
    allocates its own and does not add to theirs.
    """
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _key(inputs: PassInputs) -> str:
    """Return all that a pass depends on but the numbers of its tensors."""

    def describe(x: Tensor) -> Tensor:
        return x.to("meta")

    # Names of samples, and which of them the base model teaches, do not change the kernels.
    batch = replace(inputs.batch, captions=(), window_ids=(), prior_preservation=())
    return repr(replace(inputs, batch=batch).map(describe))


def _tensors(inputs: PassInputs) -> tuple[Tensor, ...]:
    """Return the tensors of a pass's inputs, in the order of ``map``."""
    tensors: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    inputs.map(keep)
    return tuple(tensors)


def _addresses(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _copy_into(targets: tuple[Tensor, ...], inputs: PassInputs) -> None:
    """Copy a pass's inputs into those of a captured one."""
    for target, value in zip(targets, _tensors(inputs), strict=True):
        target.copy_(value, non_blocking=True)


def _add_gradients(captured: CapturedPass) -> None:
    """Add the gradients that the graph has written to those of earlier passes.

    ``parameter.grad`` is never the graph's own tensor here, since ``_keep_gradients`` has
    copied it before the replay.
    """
    sums: list[Tensor] = []
    summands: list[Tensor] = []
    for parameter, gradient in captured.gradients:
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            sums.append(parameter.grad)
            summands.append(gradient)
    if sums:
        torch._foreach_add_(sums, summands)
