"""CogVideoX from an image: what is noised, encoded, scaled and told, against diffusers' image-to-video pipeline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import CogVideoXImageToVideoPipeline

from tests.models.cogvideox_kit import SHAPES, batch_for, opened
from videotune.errors import VideotuneError
from videotune.models.cogvideox import CogVideoX
from videotune.rng import draws
from videotune.types import ClipShape, SampleRequest

Bases = Callable[[str], Path]
IMAGE = pytest.mark.parametrize("variant", ["5b-i2v", "1.5-5b-i2v"])


def film(shape: ClipShape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(3, shape.frames, shape.height, shape.width, generator=generator) * 2 - 1


def pipeline(folder: Path) -> Any:
    pipe = CogVideoXImageToVideoPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@IMAGE
def test_image_latents_are_the_pipelines(variant: str, cog_bases: Bases) -> None:
    """With the noise of a view laid on the image and the same draw of its latents; the 1.5 pipeline divides by its scale."""
    family, pipe = opened(cog_bases(variant)), pipeline(cog_bases(variant))
    for shape in SHAPES[variant]:
        frames = film(shape)
        view = draws(0, "image noise", "a window", 3)
        moments = family.encode_video(frames, view)
        again = draws(0, "image noise", "a window", 3)
        strength = np.exp(-3 + 0.5 * again.standard_normal())
        noise = torch.from_numpy(again.standard_normal((3, 1, shape.height, shape.width), "float32"))
        noisy = (frames[:, :1] + strength * noise)[:, 0]
        draw = torch.from_numpy(again.standard_normal((4, 1, shape.height // 8, shape.width // 8), "float32"))
        with torch.no_grad():
            dist = pipe.vae.encode(noisy[None, :, None]).latent_dist
            scale = 1 / 0.7 if variant.startswith("1.5") else 0.7
            torch.testing.assert_close(moments.extras["image"], scale * (dist.mean[0] + dist.std[0] * draw))
            # the pipeline's own preparation, whose draw a generator of torch makes
            family_draw = torch.randn(1, 4, 1, *draw.shape[2:], generator=torch.Generator().manual_seed(5))
            _, theirs = pipe.prepare_latents(
                noisy[None], 1, 4, shape.frames, shape.height, shape.width, torch.float32, torch.device("cpu"),
                torch.Generator().manual_seed(5),
            )  # fmt: skip
        image = (moments.extras["image"] + scale * dist.std[0] * (family_draw[0] - draw))[None]
        cond = family.condition([{"text": torch.zeros(226, 16), "image": image[0]}])
        ours = family._image(cond, theirs.shape[1]).transpose(1, 2)
        torch.testing.assert_close(ours[:, :1], theirs[:, :1], rtol=1e-5, atol=1e-6)
        in_front = 0 if shape.frames == 49 else 1  # called by itself it puts the image twice where the count is odd
        assert not theirs[:, 1 + in_front :].any()
        assert not ours[:, 1:].any()


@IMAGE
def test_the_plain_view_has_no_noise_and_every_other_its_own(variant: str, cog_bases: Bases) -> None:
    family, shape = opened(cog_bases(variant)), SHAPES[variant][0]
    frames = film(shape)
    plain, same = family.encode_video(frames), family.encode_video(frames)
    one, other = (family.encode_video(frames, draws(0, "image noise", "w", v)) for v in (0, 1))
    assert torch.equal(plain.extras["image"], same.extras["image"])
    assert torch.equal(plain.mean, one.mean)
    assert plain.extras["image"].shape == (4, 1, shape.height // 8, shape.width // 8)
    assert not torch.equal(one.extras["image"], other.extras["image"])
    assert not torch.equal(one.extras["image"], plain.extras["image"])


def test_the_strength_of_image_noise_is_the_authors(cog_bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    """log σ is normal about -3 with deviation 0.5: measured on what the VAE is handed."""
    family = opened(cog_bases("1.5-5b-i2v"))
    vae, seen = family.vae(), []
    usual = vae.encode
    monkeypatch.setattr(vae, "encode", lambda x: (seen.append(x), usual(x))[1])
    frames = torch.zeros(3, 1, 32, 32)
    for view in range(60):
        family.encode_video(frames, draws(0, "image noise", "w", view))
    strengths = np.log([x.std().item() for x in seen[1::2]])
    assert strengths.mean() == pytest.approx(-3, abs=0.2)
    assert strengths.std() == pytest.approx(0.5, abs=0.15)


@IMAGE
def test_a_sample_that_is_told_nothing_is_fed_zeros(variant: str, cog_bases: Bases) -> None:
    """An image's latents times 0 are the zeros that the authors feed one sample in twenty."""
    family, shape = opened(cog_bases(variant)), SHAPES[variant][0]
    batch = batch_for(family, shape, ["a", "b"], image=True)
    batch.cond.extras["image"][1] *= 0
    net, calls = family.denoiser(), []
    net.register_forward_pre_hook(lambda _, words, named: calls.append(named["hidden_states"]), with_kwargs=True)
    with torch.no_grad():
        family.predict(net, torch.randn_like(batch.x0), torch.tensor([0.5, 0.5]), batch)
    told = calls[0][:, :, 4:]
    assert torch.equal(told[0, 0], batch.cond.extras["image"][0, :, 0])
    assert not told[0, 1:].any()
    assert not told[1].any()


def test_no_image_is_an_error(cog_bases: Bases) -> None:
    family, shape = opened(cog_bases("5b-i2v")), SHAPES["5b-i2v"][0]
    batch = batch_for(family, shape, ["a"], image=False)
    with pytest.raises(VideotuneError, match="goes on from an image, and none was given"):
        family.predict(family.denoiser(), batch.x0, torch.tensor([0.5]), batch)
    with pytest.raises(VideotuneError, match="goes on from an image, and none was given"):
        family.sample({"transformer": family.denoiser()}, batch.cond, None, SampleRequest(shape, 2, 1.0, (1,)))


@pytest.mark.parametrize("shape", [ClipShape(17, 32, 32, 8.0), ClipShape(49, 48, 32, 8.0), ClipShape(49, 32, 48, 8.0)])
def test_a_learned_table_fits_one_shape(shape: ClipShape, cog_bases: Bases) -> None:
    """At another count of frames the model itself would put untrained positions in place of the learned, silently."""
    family = opened(cog_bases("5b-i2v"))
    x0 = torch.zeros(1, 4, *family.spec.rules.latent_size(shape))
    request = SampleRequest(shape, 2, 1.0, (1,))
    for ask in (
        lambda: family.encode_video(film(shape)),
        lambda: family.predict(family.denoiser(), x0, torch.tensor([0.5]), None),
        lambda: family.sample({}, None, None, request),
    ):
        with pytest.raises(VideotuneError, match=r'49 frames of 32x32.*frames=49 and resolution="32x32"'):
            ask()


def test_positions_of_1_5_have_an_end(cog_bases: Bases) -> None:
    with pytest.raises(VideotuneError, match="at most 320x320 pixels"):
        opened(cog_bases("1.5-5b")).encode_video(torch.zeros(3, 1, 336, 32))


def test_only_one_count_of_frames_is_planned_for_a_learned_table(cog_bases: Bases) -> None:
    from videotune.data.frame_sampling import frame_rule, snap_frames

    rules = CogVideoX.read_spec(cog_bases("5b-i2v")).rules
    assert frame_rule(rules) == "exactly 49 frames"
    assert {snap_frames(count, rules) for count in (1, 17, 49, 81)} == {49}


def test_a_vae_that_keeps_images_beside_clips_has_a_name_of_its_own(cog_bases: Bases, tmp_path: Path) -> None:
    """Text and image checkpoints share the VAE's bytes; entries of the cache without an image must not be taken for both."""
    import shutil

    folder = shutil.copytree(cog_bases("5b-i2v"), tmp_path / "same")
    shutil.rmtree(folder / "vae")
    shutil.copytree(cog_bases("5b") / "vae", folder / "vae")
    assert opened(folder).fingerprints()["vae"] != opened(cog_bases("5b")).fingerprints()["vae"]
