"""train_dtype FLOAT_16: what computes in it, and the factor of the loss."""

import copy
from typing import Any

import pytest
import torch

from tests.support.trainers import Lab, run_steps, take_steps, trainer_of, weights
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.runs.step_sums import is_loss_scale_overflow
from videotune.trainer.loop import train_steps
from videotune.trainer.loss_scale import FIRST_SCALE, LossScale
from videotune.trainer.optimizer_state import optimizer_state
from videotune.trainer.trainer import Trainer

HALF = {
    "train_dtype": "FLOAT_16",
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "steps": 8,
}


def scale_of(trainer: Trainer) -> LossScale:
    loss_scale = trainer.pool.trainable.loss_scale
    assert loss_scale is not None
    return loss_scale


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of weights, moments and average."""
    trainable = trainer.pool.trainable
    state = optimizer_state(trainable.optimizer, trainable.parameters)
    return copy.deepcopy({**weights(trainer), **state, **trainer.averages})


@pytest.mark.effect("train_dtype")
def test_float16_trains_beside_the_other_dtypes(lab: Lab) -> None:
    """The network computes in it, what trains and text encoders do not, and the losses
    are those of the other dtypes.
    """
    losses = {}
    for name in ("FLOAT_32", "BFLOAT_16", "FLOAT_16"):
        trainer = trainer_of(lab, {**HALF, "train_dtype": name})
        if name == "FLOAT_16":
            text = make_step_batch(trainer.source, 1).batch.conditioning.text
            assert text.dtype == torch.float32
        took = take_steps(trainer, 8)
        losses[name] = [line["loss"] for line in took.lines]

        scales = {line.get("loss_scale") for line in took.lines}
        assert scales == ({FIRST_SCALE} if name == "FLOAT_16" else {None})
        assert not any("skipped" in line for line in took.lines)

    base = trainer.net.blocks[0].attn1.to_q.base_layer.weight
    assert base.dtype == torch.float16
    call = took.calls[0]
    assert (call["x_t"].dtype, call["text"].dtype) == (torch.float16, torch.float16)
    trained = {parameter.dtype for parameter in trainer.parameters.values()}
    assert trained == {torch.float32}
    assert losses["FLOAT_16"] != losses["FLOAT_32"]
    assert losses["FLOAT_16"] == pytest.approx(losses["FLOAT_32"], rel=3e-3)
    assert losses["BFLOAT_16"] == pytest.approx(losses["FLOAT_32"], rel=2e-2)


@pytest.mark.effect("train_dtype")
def test_the_gradient_is_that_of_the_loss_itself(lab: Lab) -> None:
    gradients, norms = [], []
    for factor in (2.0**8, 2.0**14):
        trainer = trainer_of(lab, HALF)
        scale_of(trainer).factor.fill_(factor)
        took = take_steps(trainer, 1)
        norms.append(took.lines[0]["grad_norm"])
        gradients.append(torch.cat([x.flatten() for x in took.gradients[0].values()]))
    plain = take_steps(trainer_of(lab, {**HALF, "train_dtype": "FLOAT_32"}), 1)

    assert norms == pytest.approx([plain.lines[0]["grad_norm"]] * 2, rel=0.02)
    torch.testing.assert_close(*gradients, rtol=0.02, atol=1e-5)


def test_a_factor_that_is_too_large_halves_and_nothing_else_changes(lab: Lab) -> None:
    trainer = trainer_of(lab, {**HALF, "ema": 0.5})
    steps = iter_of(trainer)
    next(steps)
    before = state_of(trainer)

    scale_of(trainer).factor.fill_(2.0**60)
    line = next(steps)
    assert line["skipped"]
    assert line["loss_scale"] == 2.0**60
    assert scale_of(trainer).factor.item() == 2.0**59
    assert scale_of(trainer).finite_steps.item() == 0
    assert is_loss_scale_overflow(line)
    after = state_of(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def iter_of(trainer: Trainer) -> Any:
    """Yield what each step measured."""
    for record in train_steps(trainer):
        yield record.read()


def test_the_factor_grows_after_enough_finite_steps(lab: Lab) -> None:
    trainer = trainer_of(lab, HALF)
    growing = LossScale(torch.device("cpu"), first=4.0, growth_interval=3)
    loss_scale = scale_of(trainer)
    loss_scale.__dict__.update(growing.__dict__)
    factors = [line["loss_scale"] for line in run_steps(trainer, 7)]
    assert factors == [4.0] * 3 + [8.0] * 3 + [16.0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"loss": 1.0, "loss_scale": 65536.0, "skipped": True}, True),
        ({"loss": 1.0, "loss_scale": 1.0, "skipped": True}, False),
        ({"loss": None, "loss_scale": 65536.0, "skipped": True}, False),
        ({"loss": 1.0, "loss_scale": 65536.0}, False),
        ({"loss": 1.0, "skipped": True}, False),
    ],
    ids=["search", "nowhere to fall", "loss", "applied", "another dtype"],
)
def test_which_skipped_steps_are_the_scales_own(
    line: dict[str, Any], expected: bool
) -> None:
    assert is_loss_scale_overflow(line) == expected


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"training_method": "FINE_TUNE"}, "weights of FINE_TUNE would train"),
        ({"optimizer": {"step_in_backward": True}}, "not within backward"),
    ],
)
def test_what_cannot_train_in_float16(
    lab: Lab, knobs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(VideotuneError, match=reason):
        trainer_of(lab, {"train_dtype": "FLOAT_16", **knobs})
