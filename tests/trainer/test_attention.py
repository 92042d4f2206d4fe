"""How a backend of attention is measured."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.trainers import Lab, trainer_of
from tests.trainer.test_step import Setup
from videotune.trainer import attention
from videotune.trainer.loop import step_context
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


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)


@pytest.mark.parametrize(
    ("native", "math", "best"),
    [
        ((5.0, 1.25), (2.0, 2.0), "native (native 1.25 s, _native_math 2 s"),
        ((1.25, 5.0), (2.0, 2.0), "native (native 1.25 s, _native_math 2 s"),
        ((3.0, 3.0), (9.0, 2.0), "_native_math (native 3 s, _native_math 2 s"),
    ],
)
def test_the_better_of_two_measurements_counts(
    native: tuple[float, float],
    math: tuple[float, float],
    best: str,
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first one may include what is set up once. Of the next step's batch."""
    trainer = trainer_of(lab, {"steps": 300})
    trainer.journal.close()
    trainer.first_step = 7
    context = step_context(trainer)
    readings = {"native": list(native), "_native_math": list(math)}
    forgotten: list[Any] = []

    def backend() -> str:
        return str(trainer.net.blocks[0].attn1.processor._attention_backend.value)

    def seconds(of: Any, given: Any, step_batch: Any) -> float:
        assert (of, given, step_batch.step) == (trainer, context, 7)
        return readings[backend()].pop(0)

    monkeypatch.setattr(attention, "has_streams", lambda device: True)
    monkeypatch.setattr(attention, "CANDIDATES", ("native", "flash", "_native_math"))
    monkeypatch.setattr(attention, "_seconds", seconds)
    monkeypatch.setattr(attention, "forget_gradients", forgotten.append)
    capsys.readouterr()
    attention.choose_attention(trainer, context)
    skipped, chosen = capsys.readouterr().err.splitlines()
    assert skipped.startswith("attention: flash is skipped: ")
    assert chosen == f"attention: {best} a step)"
    assert trainer.pool.attention == backend() == best.partition(" ")[0]
    assert forgotten == [trainer.pool.trainable] * 3


@pytest.mark.parametrize(
    ("fields", "can"),
    [
        ({}, True),
        ({"first_step": 102}, False),
        ({"first_step": 101, "streams": True}, True),
        ({"streams": False}, False),
        ({"attention": "native"}, False),
        ({"deterministic": True}, False),
        ({"size": 2}, False),
        ({"in_backward": True}, False),
        ({"switchable": False}, False),
    ],
)
def test_backends_are_measured_where_all_can_use_one_for_long(
    fields: dict[str, Any], can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 300 steps, of which 200 must be left."""
    net = object()
    config = SimpleNamespace(
        attention=fields.get("attention", "auto"),
        deterministic=fields.get("deterministic", False),
    )
    backward_optimizer = object() if fields.get("in_backward") else None
    trainable = SimpleNamespace(backward_optimizer=backward_optimizer)
    trainer: Any = SimpleNamespace(
        net=net,
        job=SimpleNamespace(config=config, steps=300),
        first_step=fields.get("first_step", 1),
        pool=SimpleNamespace(trainable=trainable),
        dist=SimpleNamespace(size=fields.get("size", 1)),
    )
    monkeypatch.setattr(attention, "local_device", lambda: "device")
    monkeypatch.setattr(
        attention,
        "has_streams",
        lambda device: device == "device" and fields.get("streams", True),
    )
    monkeypatch.setattr(
        attention, "switchable", lambda of: of is net and fields.get("switchable", True)
    )
    assert attention._can_measure(trainer) is can
