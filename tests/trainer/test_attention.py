"""How a backend of attention is measured."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.test_step import Setup
from videotune.trainer import attention
from videotune.trainer.step_context import StepContext


def test_a_measurement_takes_the_time_of_a_step_s_passes_and_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, tiny_family: Any
) -> None:
    setup = Setup(tiny_family("wan"))
    compiled: list[Any] = []
    calls: list[tuple[Any, ...]] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=compiler)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def passes(*arguments: Any) -> None:
        calls.append(arguments)
        assert setup.net.training
        assert double(torch.ones(2)).sum() == 4
        time.sleep(0.05)

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(attention, "accumulate_gradients", passes)
    trainable = object()
    trainer: Any = SimpleNamespace(
        net=setup.net,
        device=torch.device("cpu"),
        pool=SimpleNamespace(trainable=trainable),
    )
    context = StepContext(setup.family, setup.objective, 1, 1.0)
    step_batch = setup.prepared()
    setup.net.eval()
    assert 0.05 <= attention._seconds(trainer, context, step_batch) < 5
    assert compiled == []

    ((*given, clock, values),) = calls
    assert given == [context, setup.net, trainable, step_batch]
    assert not values.any()
    assert "forward" not in clock.read()
    double(torch.ones(2))
    assert len(compiled) == 1, "outside of it the function is compiled"
