"""What a step returns for the journal: positions of its values, its phases, its line."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from videotune.latent_cache.step_batch import StepBatch
from videotune.trainer import step_record
from videotune.trainer.network_pass import PassOutput
from videotune.trainer.step_record import (
    FIRST_MSE,
    GRAD_NORM,
    LOSS,
    LOSS_SCALE,
    Clock,
    StepRecord,
    empty_values,
    loss_by_noise_level,
    write_values,
)

CPU = torch.device("cpu")


class Seconds:
    """A clock whose next readings are given."""

    def __init__(self, *readings: float) -> None:
        self._readings = list(readings)

    def perf_counter(self) -> float:
        return self._readings.pop(0)


def batch_of(samples: int, *, with_sound: bool = False) -> StepBatch:
    """A step of some samples of which this process has none."""
    names = tuple(f"w{number}" for number in range(samples))
    levels = torch.zeros(samples)
    return StepBatch(
        step=1,
        window_ids=names,
        captions=names,
        t=levels,
        first_sample=0,
        batch=None,
        noise=levels,
        sound_t=levels if with_sound else None,
    )


@pytest.mark.parametrize(("with_sound", "errors"), [(False, 3), (True, 6)])
def test_a_step_has_a_value_for_each_error_on_its_device(
    with_sound: bool, errors: int
) -> None:
    values = empty_values(batch_of(3, with_sound=with_sound), torch.device("meta"))
    assert values.shape == (FIRST_MSE + errors,)
    assert values.device.type == "meta"
    on_host = empty_values(batch_of(3, with_sound=with_sound), CPU)
    assert not on_host.any()


def written(samples: int, outputs: Sequence[tuple[int, PassOutput]]) -> list[float]:
    """The values of a step after micro-batches, each with its first sample."""
    with_sound = outputs[0][1].sound_mse is not None
    values = empty_values(batch_of(samples, with_sound=with_sound), CPU)
    for first, output in outputs:
        micro_batch: Any = SimpleNamespace(first_sample=first)
        write_values(values, micro_batch, output, samples)
    result: list[float] = values.tolist()
    return result


def output_of(loss: float, mse: Sequence[float], sound: Sequence[float] = ()) -> Any:
    return SimpleNamespace(
        weighted_loss=torch.tensor(loss),
        mse=torch.tensor(mse),
        sound_mse=torch.tensor(sound) if sound else None,
    )


def test_losses_add_up_and_each_error_has_its_sample_s_place() -> None:
    outputs = [(0, output_of(1.0, [2.0, 3.0])), (2, output_of(0.5, [4.0]))]
    assert written(3, outputs) == [1.5, 0, 0, 2, 3, 4]
    with_sound = [
        (0, output_of(1.0, [2.0, 3.0], [20.0, 30.0])),
        (2, output_of(0.5, [4.0], [40.0])),
    ]
    assert written(3, with_sound) == [1.5, 0, 0, 2, 3, 4, 20, 30, 40]


def test_phases_are_told_as_they_begin_and_their_seconds_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = Seconds(10.0, 11.0, 13.5, 14.0)
    monkeypatch.setattr(step_record, "time", seconds)
    told: list[str] = []
    clock = Clock(CPU, told.append)
    for phase in ("forward", "backward", "forward"):
        clock.end_phase(phase)
    assert told == ["start", "forward", "backward", "forward"]
    assert clock.read() == {"forward": 1.5, "backward": 2.5}


class CardEvent:
    """A mark in the work of a card, which takes two seconds a mark."""

    recorded = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        CardEvent.recorded += 1
        self.milliseconds = 2000.0 * CardEvent.recorded

    def elapsed_time(self, later: "CardEvent") -> float:
        return later.milliseconds - self.milliseconds


def test_on_a_device_with_streams_its_own_seconds_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_record, "has_streams", lambda device: True)
    monkeypatch.setattr(step_record.torch, "Event", CardEvent)
    clock = Clock(CPU)
    for phase in ("forward", "backward", "forward"):
        clock.end_phase(phase)
    assert clock.read() == {"forward": 4.0, "backward": 2.0}


def record_of(values: Sequence[float], **more: Any) -> StepRecord:
    clock = Clock(CPU)
    clock.end_phase("forward")
    return StepRecord(
        step=7,
        values=torch.tensor(values),
        arrived=None,
        t=torch.tensor([0.05, 0.95]),
        lr={"transformer": 0.25},
        window_ids=("a", "b"),
        captions=("one", "two"),
        clock=clock,
        **more,
    )


def test_a_line_has_the_means_and_what_a_step_has_beside_them() -> None:
    plain = record_of([0.5, 1.5, 0.0, 2.0, 4.0])
    line = plain.read()
    assert line == {
        "kind": "step",
        "step": 7,
        "loss": 0.5,
        "mse": 3.0,
        "by_t": [2.0, *[None] * 7, 4.0],
        "lr": {"transformer": 0.25},
        "grad_norm": 1.5,
        "window_ids": ["a", "b"],
        "seconds": plain.clock.read(),
    }

    full = record_of(
        [0.5, 1.5, 8.0, 2.0, 4.0, 10.0, 30.0],
        expert="low",
        sound_t=torch.tensor([0.5, 0.5]),
    )
    assert full.read() | {"seconds": None} == line | {
        "seconds": None,
        "expert": "low",
        "loss_scale": 8.0,
        "sound": {"mse": 20.0, "by_t": [*[None] * 4, 20.0, *[None] * 4]},
    }


@pytest.mark.parametrize("position", [LOSS, GRAD_NORM, LOSS_SCALE])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_without_a_finite_loss_or_gradient_was_skipped(
    position: int, value: float
) -> None:
    values = [0.5, 1.5, 8.0, 2.0, 4.0]
    values[position] = value
    record = record_of(values)
    assert record.read().get("skipped", False) is (position != LOSS_SCALE)
    assert record.broken() == ("a", "b")


@pytest.mark.parametrize(
    ("errors", "broken"),
    [
        ((2.0, float("nan"), 1.0, 1.0), ("b",)),
        ((2.0, 1.0, float("inf"), 1.0), ("a",)),
        ((float("nan"), 1.0, 1.0, float("nan")), ("a", "b")),
        ((1.0, 1.0, 1.0, 1.0), ("a", "b")),
    ],
)
def test_a_broken_window_has_an_error_of_its_video_or_its_sound(
    errors: tuple[float, ...], broken: tuple[str, ...]
) -> None:
    record = record_of([0.5, float("nan"), 0.0, *errors])
    assert record.broken() == broken


def test_a_level_is_counted_in_its_ninth_and_one_in_the_last() -> None:
    levels = [0.0, 0.11, 0.112, 0.9, 1.0]
    by_level = loss_by_noise_level(levels, [1.0, 3.0, 5.0, 2.0, 4.0])
    assert by_level == [2.0, 5.0, *[None] * 6, 3.0]
