"""Video and sound in one loss, against the sum written out."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.diffusion.test_loss import V, batch_of, conv, numbers
from videotune.diffusion.base_targets import data_velocity, prior_target
from videotune.diffusion.loss import (
    Objective,
    denoising_loss,
    noisy_and_velocity,
    noisy_sound,
    objective_for_prediction,
    robust,
)
from videotune.diffusion.timesteps import TimestepSampler
from videotune.types import Batch, Sound, Velocity

T = torch.tensor([0.2, 0.5, 0.9])
SOUND_T = torch.tensor([0.7, 0.1, 0.4])
LENGTH = 9


class Duet:
    """A model that answers with a multiple of what it sees, and remembers it."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        raise AssertionError("the batch has sound")

    def predict_with_sound(
        self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch, sound_x_t: Tensor
    ) -> Velocity:
        self.seen.append((x_t, t, sound_x_t))
        return Velocity(self.factor * x_t, 2 * self.factor * sound_x_t)


def with_sound(batch: Batch, *, is_conditioning: bool = False) -> Batch:
    shape = (len(batch), 4, LENGTH, 1, 1)
    sound = Sound(
        numbers(*shape, seed=5), numbers(*shape, seed=6), SOUND_T, is_conditioning
    )
    return replace(batch, sound=sound)


def mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


@pytest.mark.parametrize("kind", ["mse", "huber", "pseudo_huber"])
def test_the_sound_s_loss_is_added_with_the_weight_of_its_own_noise_level(
    kind: str,
) -> None:
    how = objective_for_prediction("v", V, TimestepSampler(), "min_snr")
    how = replace(how, loss=kind, delta=0.3, sound_weight=0.25)
    batch = replace(with_sound(batch_of()), loss_weight=torch.tensor([1.0, 0.5, 3.0]))
    noise = numbers(3, 4, 5, 6, 6, seed=1)
    family = Duet()
    out = denoising_loss(family, conv(), how, batch, T, noise)

    x_t, v = noisy_and_velocity(how, batch, T, noise)
    assert batch.sound is not None
    sound_path = how.noise_path(SOUND_T)
    sound_x_t = sound_path.alpha * batch.sound.x0 + sound_path.sigma * batch.sound.noise
    sound_v = sound_path.alpha * batch.sound.noise - sound_path.sigma * batch.sound.x0
    assert torch.equal(family.seen[0][0], x_t)
    assert torch.equal(family.seen[0][1], T)
    torch.testing.assert_close(family.seen[0][2], sound_x_t)

    errors = (x_t - v, 2 * sound_x_t - sound_v)
    costs = [e.square() if kind == "mse" else robust(e, kind, 0.3) for e in errors]
    video_loss = how.weight(T) * mean(costs[0])
    sound_loss = how.weight(SOUND_T) * 0.25 * mean(costs[1])
    per_sample = batch.loss_weight * (video_loss + sound_loss)
    torch.testing.assert_close(out.per_sample_loss, per_sample)
    torch.testing.assert_close(out.loss, per_sample.mean())
    torch.testing.assert_close(out.mse, mean(errors[0].square()))
    assert out.sound_mse is not None
    torch.testing.assert_close(out.sound_mse, mean(errors[1].square()))
    assert torch.equal(out.t, T)
    assert not out.mse.requires_grad
    assert not out.sound_mse.requires_grad


def test_sound_that_is_given_has_no_loss() -> None:
    how = objective_for_prediction("flow", {}, TimestepSampler())
    noise = numbers(3, 4, 5, 6, 6, seed=1)
    out = denoising_loss(
        Duet(), conv(), how, with_sound(batch_of(), is_conditioning=True), T, noise
    )
    x_t, v = noisy_and_velocity(how, batch_of(), T, noise)
    assert out.sound_mse is None
    torch.testing.assert_close(out.per_sample_loss, mean((x_t - v).square()))


def test_sound_for_a_given_video_is_learnt_alone_and_sees_it_clean() -> None:
    how = replace(
        objective_for_prediction("flow", {}, TimestepSampler()), sound_weight=0.25
    )
    batch = replace(with_sound(batch_of()), video_is_conditioning=True)
    noise = numbers(3, 4, 5, 6, 6, seed=1)
    family = Duet()
    out = denoising_loss(family, conv(), how, batch, T, noise)
    assert torch.equal(family.seen[0][0], batch.x0)
    assert torch.equal(family.seen[0][1], torch.zeros(3))
    assert batch.sound is not None
    sound_x_t, sound_v = noisy_sound(how, batch.sound)
    error = mean((2 * sound_x_t - sound_v).square())
    torch.testing.assert_close(out.per_sample_loss, error)
    torch.testing.assert_close(out.mse, error)
    assert torch.equal(out.t, SOUND_T)
    assert out.sound_mse is None


def test_prior_samples_aim_at_what_the_base_says_of_their_sound() -> None:
    how: Objective = objective_for_prediction("flow", {}, TimestepSampler())
    batch = with_sound(batch_of())
    noise = numbers(3, 4, 5, 6, 6, seed=1)
    data = data_velocity(how, batch, T, noise)
    assert batch.sound is not None
    torch.testing.assert_close(data.sound, batch.sound.noise - batch.sound.x0)
    base = Duet(factor=3.0)
    target = prior_target(base, conv(), how, batch, T, noise, [1])

    x_t, v = noisy_and_velocity(how, batch, T, noise)
    sound_x_t, sound_v = noisy_sound(how, batch.sound)
    assert target.sound is not None
    assert torch.equal(base.seen[0][2], sound_x_t[[1]])
    torch.testing.assert_close(target.video[1], 3 * x_t[1])
    torch.testing.assert_close(target.sound[1], 6 * sound_x_t[1])
    assert torch.equal(target.video[[0, 2]], v[[0, 2]])
    assert torch.equal(target.sound[[0, 2]], sound_v[[0, 2]])


def test_a_robust_cost_of_no_error_is_nothing() -> None:
    """And of a large error it is 2δ|e| less a constant: δ² of Huber, 2δ² of the smooth one."""
    errors = torch.tensor([0.0, 1e4], dtype=torch.float64)
    for kind, constant in (("huber", 0.25), ("pseudo_huber", 0.5)):
        cost = robust(errors, kind, 0.5)
        assert cost[0] == 0
        torch.testing.assert_close(cost[1], errors[1] - constant, rtol=1e-8, atol=1e-4)
