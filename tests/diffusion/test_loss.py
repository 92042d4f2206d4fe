from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from tests.diffusion.test_timesteps import CONSTANTS
from videotune.diffusion.base_targets import BaseGuidance, guided_target, prior_target
from videotune.diffusion.loss import (
    Objective,
    denoising_loss,
    noisy_and_velocity,
    objective_for_prediction,
    robust,
    weighted_mean,
)
from videotune.diffusion.noise_paths import scaled_linear_alphas_cumprod
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.types import Batch, Conditioning

V = CONSTANTS | {"snr_shift_scale": 3.0}
KINDS = ["flow", "v"]


@dataclass
class Wired:
    """The smallest model there is: the network sees x_t and t, and nothing else."""

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        return net(x_t) * (1 + t.view(-1, 1, 1, 1, 1))


class Told:
    """A model that answers with what it is given."""

    def __init__(self, answer: Tensor) -> None:
        self.answer = answer

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        return self.answer


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(size: int = 3, frames: int = 5, side: int = 6) -> Batch:
    return Batch.of(
        numbers(size, 4, frames, side, side), Conditioning(torch.zeros(size, 1, 1))
    )


def plain(
    kind: str = "flow", strength: float = 0.0, weighting: str = "none"
) -> Objective:
    return objective_for_prediction(
        kind, V if kind == "v" else {}, TimestepSampler(), weighting, strength
    )


def conv(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Conv3d(4, 4, 3, padding=1)


def frame_mask(batch: Batch, sample: int, frame: int) -> Tensor:
    mask = torch.zeros_like(batch.conditioning_mask)
    mask[sample, :, frame] = True
    return mask


def with_error(batch: Batch, noise: Tensor, error: Tensor) -> Told:
    """On flow: a model whose error is exactly this."""
    return Told(noise - batch.x0 + error)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_mean_squared_error_of_v(kind: str) -> None:
    batch, noise, t = (
        batch_of(),
        numbers(3, 4, 5, 6, 6, seed=1),
        torch.tensor([0.0, 500 / 999, 1.0]),
    )
    net, family = conv(), Wired()
    out = denoising_loss(family, net, plain(kind), batch, t, noise)
    wanted = []
    alphas_cumprod = scaled_linear_alphas_cumprod(0.00085, 0.012, 1000, 3.0, True)
    for i, k in enumerate((0, 500, 999)):
        x0, e, abar = batch.x0[i : i + 1], noise[i : i + 1], alphas_cumprod[k].item()
        a, s = (1 - t[i], t[i]) if kind == "flow" else (abar**0.5, (1 - abar) ** 0.5)
        v = e - x0 if kind == "flow" else a * e - s * x0
        wanted.append((net(a * x0 + s * e) * (1 + t[i]) - v).square().mean())
    torch.testing.assert_close(out.mse, torch.stack(wanted).detach())
    torch.testing.assert_close(out.loss, torch.stack(wanted).mean())
    assert torch.equal(out.per_sample_loss, out.mse)
    assert torch.equal(out.t, t)


def test_low_precision_predictions_are_compared_in_float32() -> None:
    batch, noise, t = batch_of(), numbers(3, 4, 5, 6, 6, seed=1), torch.rand(3)
    out = denoising_loss(
        Told(torch.zeros_like(batch.x0).bfloat16()), conv(), plain(), batch, t, noise
    )
    assert out.mse.dtype == torch.float32
    torch.testing.assert_close(out.mse, (noise - batch.x0).square().mean((1, 2, 3, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_given_frames_are_fed_clean_and_dropped_ones_as_noise(kind: str) -> None:
    batch, noise, t = (
        batch_of(),
        numbers(3, 4, 5, 6, 6, seed=1),
        torch.tensor([0.3, 0.6, 0.8]),
    )
    batch = replace(
        batch,
        conditioning_mask=frame_mask(batch, 0, 0),
        dropped_frames_mask=frame_mask(batch, 1, 3),
    )
    seen = []

    class Listener:
        def predict(
            self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch
        ) -> Tensor:
            seen.append(x_t)
            return x_t

    denoising_loss(Listener(), conv(), plain(kind), batch, t, noise)
    path = plain(kind).noise_path(t)
    expected = path.alpha * batch.x0 + path.sigma * noise
    expected[0, :, 0] = batch.x0[0, :, 0]
    expected[1, :, 3] = noise[1, :, 3]
    assert torch.equal(seen[0], expected)


@pytest.mark.parametrize("strength", [0.0, 1.0])
@pytest.mark.parametrize(
    "layout",
    ["first frame", "frame between", "all frames", "left half", "frame and half"],
)
def test_what_has_no_weight_counts_nothing(layout: str, strength: float) -> None:
    batch, noise = batch_of(), numbers(3, 4, 5, 6, 6, seed=1)
    weight = torch.ones(3, 1, 5, 6, 6) if "half" in layout else batch.loss_mask.clone()
    if "frame" in layout:
        weight[
            1,
            :,
            {"first frame": 0, "frame between": 2, "frame and half": 1}.get(
                layout, slice(None)
            ),
        ] = 0
    if "half" in layout:
        weight[1, ..., :3] = 0
    batch = replace(batch, loss_mask=weight)
    error = numbers(3, 4, 5, 6, 6, seed=2)
    t, how = torch.tensor([0.2, 0.5, 0.8]), plain(strength=strength)
    clean = denoising_loss(
        with_error(batch, noise, error), conv(), how, batch, t, noise
    )
    disturbed = error + 100 * numbers(3, 4, 5, 6, 6, seed=3) * (weight == 0)
    again = denoising_loss(
        with_error(batch, noise, disturbed), conv(), how, batch, t, noise
    )
    torch.testing.assert_close(again.mse, clean.mse, rtol=2e-5, atol=0)
    torch.testing.assert_close(
        again.per_sample_loss, clean.per_sample_loss, rtol=2e-5, atol=0
    )
    if layout == "all frames":
        assert clean.mse[1] == 0
        assert clean.per_sample_loss[1] == 0
    else:
        counted = error[1][(weight[1] > 0).expand(4, 5, 6, 6)]
        torch.testing.assert_close(clean.mse[1], counted.square().mean())


def test_weights_are_relative_within_a_clip() -> None:
    batch, noise, t = batch_of(), numbers(3, 4, 5, 6, 6, seed=1), torch.rand(3)
    family = with_error(batch, noise, numbers(3, 4, 5, 6, 6, seed=2))
    whole = denoising_loss(family, conv(), plain(strength=1.0), batch, t, noise)
    half = denoising_loss(
        family,
        conv(),
        plain(strength=1.0),
        replace(batch, loss_mask=batch.loss_mask / 2),
        t,
        noise,
    )
    torch.testing.assert_close(half.per_sample_loss, whole.per_sample_loss)
    tilted = replace(
        batch,
        loss_mask=batch.loss_mask * torch.tensor([1.0, 1, 1, 1, 9]).view(1, 1, 5, 1, 1),
    )
    assert not torch.allclose(
        denoising_loss(family, conv(), plain(), tilted, t, noise).mse, whole.mse
    )


def test_weighted_mean() -> None:
    x = torch.arange(8.0).view(1, 2, 2, 1, 2)
    assert weighted_mean(x, torch.ones(1, 1, 2, 1, 1)).item() == 3.5
    for weight, mean in (
        ([[1.0], [0.0]], (0 + 1 + 4 + 5) / 4),
        ([[3.0, 0], [0, 1]], (0 * 3 + 3 + 4 * 3 + 7) / 8),
    ):
        assert weighted_mean(
            x, torch.tensor(weight).view(1, 1, 2, 1, -1)
        ).item() == pytest.approx(mean)
    assert weighted_mean(x, torch.zeros(1, 1, 2, 1, 1)).item() == 0
    nothing = weighted_mean(x.requires_grad_(), torch.zeros(1, 1, 2, 1, 1))
    nothing.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_a_sample_counts_as_much_as_its_scale_says() -> None:
    """The mean over the samples of scale × loss, so twice the scale is twice the
    gradient; mse is left alone.
    """
    batch, noise, t, how = (
        batch_of(2),
        numbers(2, 4, 5, 6, 6, seed=1),
        torch.tensor([0.2, 0.7]),
        plain(strength=0.5),
    )

    def gradient(scale: list[float]) -> tuple[Tensor, Tensor, Tensor]:
        net = conv()
        out = denoising_loss(
            Wired(), net, how, replace(batch, loss_weight=torch.tensor(scale)), t, noise
        )
        torch.testing.assert_close(out.loss.detach(), out.per_sample_loss.mean())
        out.loss.backward()
        return net.weight.grad, out.per_sample_loss, out.mse

    one, two = (gradient([float(i == 0), float(i == 1)]) for i in (0, 1))
    both, tilted = gradient([1.0, 1.0]), gradient([2.0, 0.25])
    torch.testing.assert_close(both[0], one[0] + two[0])
    torch.testing.assert_close(tilted[0], 2 * one[0] + 0.25 * two[0])
    torch.testing.assert_close(tilted[1], both[1] * torch.tensor([2.0, 0.25]))
    assert torch.equal(tilted[2], both[2])


@pytest.mark.parametrize("kind", KINDS)
def test_prior_samples_aim_at_what_the_base_says(kind: str) -> None:
    """The base sees them alone: their own x_t, dropped frames and all; the others keep
    the data's v.
    """
    batch, noise, t, how = (
        batch_of(4),
        numbers(4, 4, 5, 6, 6, seed=1),
        torch.tensor([0.1, 0.4, 0.6, 0.9]),
        plain(kind),
    )
    batch = replace(
        batch,
        dropped_frames_mask=frame_mask(batch, 3, 2),
        captions=tuple("abcd"),
        window_ids=tuple("ABCD"),
    )
    base, seen = conv(1), []

    class Listener(Wired):
        def predict(
            self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch
        ) -> Tensor:
            seen.append((x_t, t, batch))
            return super().predict(net, x_t, t, batch)

    target = prior_target(Listener(), base, how, batch, t, noise, [1, 3])
    x_t, v = noisy_and_velocity(how, batch, t, noise)
    assert not target.video.requires_grad
    assert torch.equal(target.video[[0, 2]], v[[0, 2]])
    expected = (base(x_t) * (1 + t.view(-1, 1, 1, 1, 1)))[[1, 3]].detach()
    torch.testing.assert_close(target.video[[1, 3]], expected)
    assert len(seen) == 1
    assert torch.equal(seen[0][0], x_t[[1, 3]])
    assert torch.equal(seen[0][1], t[[1, 3]])
    assert (seen[0][2].captions, seen[0][2].window_ids) == (("b", "d"), ("B", "D"))
    assert torch.equal(seen[0][2].x0, batch.x0[[1, 3]])
    out = denoising_loss(Told(target.video + 2), conv(), how, batch, t, noise, target)
    torch.testing.assert_close(
        out.mse, torch.full((4,), 4.0)
    )  # mse is measured against the same target


@pytest.mark.parametrize("strength", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("drop", [None, 0, 3])
def test_white_error_keeps_the_scale(strength: float, drop: int | None) -> None:
    batch, noise = batch_of(8, 7, 24), numbers(8, 4, 7, 24, 24, seed=1)
    weight = batch.loss_mask.clone()
    if drop is not None:
        weight[:, :, drop] = 0
    batch = replace(batch, loss_mask=weight)
    family = with_error(batch, noise, numbers(8, 4, 7, 24, 24, seed=2))
    out = denoising_loss(
        family, conv(), plain(strength=strength), batch, torch.rand(8), noise
    )
    assert out.loss.item() == pytest.approx(
        1, abs=0.015
    )  # 129,024 numbers: one standard error is 0.4 to 0.6 %


def test_temporal_consistency_is_the_published_formula() -> None:
    batch, noise, strength, frames = batch_of(), numbers(3, 4, 5, 6, 6, seed=1), 0.8, 5
    error = numbers(3, 4, frames, 6, 6, seed=2)
    out = denoising_loss(
        with_error(batch, noise, error),
        conv(),
        plain(strength=strength),
        batch,
        torch.rand(3),
        noise,
    )
    size = error[0].numel()
    total = error.square().sum((1, 2, 3, 4)) + strength * error.diff(
        dim=2
    ).square().sum((1, 2, 3, 4))
    expected = total / size / (1 + 2 * strength * (frames - 1) / frames)
    torch.testing.assert_close(out.per_sample_loss, expected)


def test_temporal_consistency_is_nothing_for_one_frame() -> None:
    batch, noise, t = batch_of(frames=1), numbers(3, 4, 1, 6, 6, seed=1), torch.rand(3)
    off, on = (
        denoising_loss(Wired(), conv(), plain(strength=s), batch, t, noise)
        for s in (0.0, 2.0)
    )
    assert torch.equal(off.loss, on.loss)


def test_min_snr_is_the_published_weight() -> None:
    how = plain("v", weighting="min_snr")
    # the last timestep has no signal: its ratio is 0 / 0 in this form
    k = torch.arange(999)
    abar = scaled_linear_alphas_cumprod(0.00085, 0.012, 1000, 3.0, True)[:999]
    snr = abar / (1 - abar)
    expected = snr.clamp(max=5.0) / (snr + 1)
    torch.testing.assert_close(
        how.weight(k / 999).double(), expected, rtol=1e-5, atol=1e-9
    )
    assert how.weight(torch.ones(1)).item() == 0
    assert torch.equal(plain("v").weight(torch.rand(4)), torch.ones(4))


def test_objective_gives_the_path_its_grid() -> None:
    t = plain("v").timesteps.draw(
        torch.rand(100, generator=torch.Generator().manual_seed(0))
    )
    assert torch.equal(t, ((t.double() * 999).round() / 999).float())


@pytest.mark.parametrize("name", sorted(V))
def test_every_constant_of_v_counts(name: str) -> None:
    other = {
        "beta_start": 0.001,
        "beta_end": 0.02,
        "num_train_timesteps": 500,
        "snr_shift_scale": 1.0,
    }
    changed = objective_for_prediction(
        "v", {**V, name: other.get(name, False)}, TimestepSampler()
    )
    t = torch.tensor([0.2, 1.0])
    assert not torch.equal(changed.noise_path(t).alpha, plain("v").noise_path(t).alpha)
    with pytest.raises(VideotuneError, match=name):
        objective_for_prediction(
            "v",
            {key: value for key, value in V.items() if key != name},
            TimestepSampler(),
        )


@pytest.mark.parametrize("kind", ["huber", "pseudo_huber"])
@pytest.mark.parametrize("delta", [0.1, 1.0])
def test_the_gradient_of_a_robust_loss_is_its_closed_form_s(
    kind: str, delta: float
) -> None:
    """In float64: 2e within δ and 2δ·sign(e) beyond; 2δe/√(e² + δ²)."""
    error = torch.cat(
        [numbers(500).double(), torch.tensor([0.0, delta, -delta, 1e-9, 1e9])]
    ).requires_grad_()
    robust(error, kind, delta).sum().backward()
    e = error.detach()
    wanted = (
        2 * e.clamp(-delta, delta)
        if kind == "huber"
        else 2 * delta * e / (e.square() + delta**2).sqrt()
    )
    torch.testing.assert_close(error.grad, wanted, rtol=1e-12, atol=1e-14)


class Captioned(Wired):
    """A model whose answer depends on the caption and on the clip's own states."""

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        conditioning = batch.conditioning
        text = conditioning.text.sum((1, 2)).view(-1, 1, 1, 1, 1)
        first_frame = conditioning.extras["first_frame"].view(-1, 1, 1, 1, 1)
        return super().predict(net, x_t, t, batch) * (1 + text) + first_frame * text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.5, 6.0])
def test_a_guided_target_adds_the_share_that_the_base_was_distilled_with(
    kind: str, scale: float
) -> None:
    """The empty caption replaces the clip's, and nothing else of the clip."""
    first_frame = numbers(3, 1, seed=3)
    text = numbers(3, 2, 1, seed=2)
    conditioning = Conditioning(text, extras={"first_frame": first_frame})
    batch = replace(batch_of(), conditioning=conditioning)
    noise = numbers(3, 4, 5, 6, 6, seed=1)
    t = torch.tensor([0.1, 0.5, 0.9])
    base = conv(1)
    empty_text = torch.full((1, 2, 1), 0.25)
    guidance = BaseGuidance(scale, Conditioning(empty_text))

    target = guided_target(Captioned(), base, plain(kind), batch, t, noise, guidance)
    x_t, v = noisy_and_velocity(plain(kind), batch, t, noise)
    plain_answer = Wired().predict(base, x_t, t, batch)
    text_sum = text.sum((1, 2)).view(-1, 1, 1, 1, 1)
    own_states = first_frame.view(-1, 1, 1, 1, 1)
    effect = (plain_answer + own_states) * (text_sum - 0.5)
    torch.testing.assert_close(target.video, (v + (1 - 1 / scale) * effect).detach())
    assert not target.video.requires_grad
    assert target.sound is None


def test_without_options_the_schedule_is_that_of_the_paper() -> None:
    schedule = scaled_linear_alphas_cumprod(0.00085, 0.012, 1000)
    betas = [
        (0.00085**0.5 + (0.012**0.5 - 0.00085**0.5) * step / 999) ** 2
        for step in range(1000)
    ]
    expected = torch.tensor([1 - beta for beta in betas], dtype=torch.float64)
    torch.testing.assert_close(schedule, expected.cumprod(0))
