"""CogVideoX's own facts: its loss as published, the frame in front, its image and the
noise on it, and its shapes.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXImageToVideoPipeline

from tests.support.families import (
    Bases,
    Open,
    batch_of,
    clip_of,
    open_family,
    small_shape,
)
from videotune.commands.sample import shape_of
from videotune.config.resolve import resolve
from videotune.data.clip_sizes import choose_size, parse_resolution
from videotune.diffusion.loss import denoising_loss, objective_for_prediction
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.models.cogvideox import CogVideoX
from videotune.rng import generator_for
from videotune.types import ClipShape, SampleRequest

NAME = "cogvideox"
EACH = pytest.mark.parametrize("variant", CogVideoX.variants)
IMAGE = pytest.mark.parametrize("variant", ["5b-i2v", "1.5-5b-i2v"])


@EACH
def test_the_loss_is_the_published_one(
    variant: str, tiny_family: Open, tiny_bases: Bases
) -> None:
    """‖x̂0 - x0‖² / (1 - ᾱ), the published form, on the same tensors in float64, is the
    plain v-MSE that is trained.
    """
    family = tiny_family(NAME, variant=variant)
    batch = batch_of(family, ["a", "b"])
    net, loss = (
        family.denoiser(),
        objective_for_prediction(
            "v", family.spec.prediction_constants, TimestepSampler()
        ),
    )
    noise, t = torch.randn_like(batch.x0), torch.tensor([30 / 999, 0.8])
    scheduler = CogVideoXDDIMScheduler.from_pretrained(
        tiny_bases(NAME, variant), subfolder="scheduler"
    )
    k = (t * 999).round().long()
    with torch.no_grad():
        out = denoising_loss(family, net, loss, batch, t, noise)
        path = loss.noise_path(t)
        said = family.predict(
            net, path.alpha * batch.x0 + path.sigma * noise, t, batch
        ).double()
    x0, noise = batch.x0.double(), noise.double()
    x_t = scheduler.add_noise(x0, noise, k)
    x0_said = scheduler.get_velocity(
        said, x_t, k
    )  # with its words swapped: alpha x_t - sigma v
    weight = 1 / (1 - scheduler.alphas_cumprod[k])
    published = (
        (weight.view(-1, 1, 1, 1, 1) * (x0_said - x0).square()).flatten(1).mean(1)
    )
    torch.testing.assert_close(out.mse.double(), published, rtol=2e-6, atol=0)
    v = scheduler.get_velocity(x0, noise, k)
    torch.testing.assert_close(
        (said - v).square().flatten(1).mean(1), published, rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("variant", ["1.5-5b", "1.5-5b-i2v"])
def test_the_frame_in_front_is_a_copy_with_noise_of_its_own(
    variant: str, tiny_family: Open
) -> None:
    """As the pipeline begins, and as the authors train: the first clean frame twice,
    each under other noise.
    """
    family = tiny_family(NAME, variant=variant)
    batch = batch_of(family, ["a"], shape=ClipShape(17, 64, 96, 16.0))
    net, calls = family.denoiser(), []
    net.register_forward_pre_hook(
        lambda _, words, named: calls.append(named["hidden_states"]), with_kwargs=True
    )
    torch.manual_seed(0)
    noise, t = torch.randn_like(batch.x0), torch.tensor([0.3])
    path = objective_for_prediction(
        "v", family.spec.prediction_constants, TimestepSampler()
    ).noise_path(t)
    with torch.no_grad():
        v = family.predict(net, path.alpha * batch.x0 + path.sigma * noise, t, batch)
    assert v.shape == batch.x0.shape
    fed = calls[0][:, :, :4].transpose(1, 2)
    assert fed.shape[2] == batch.x0.shape[2] + 1
    in_front = (fed[:, :, :1] - path.alpha * batch.x0[:, :, :1]) / path.sigma
    first = noise[:, :, :1]
    torch.testing.assert_close(
        fed[:, :, 1:], path.alpha * batch.x0 + path.sigma * noise
    )
    torch.testing.assert_close(
        in_front.flatten().sort().values,
        first.flatten().sort().values,
        rtol=0,
        atol=1e-5,
    )
    assert (
        abs(np.corrcoef(in_front.flatten(), first.flatten())[0, 1]) < 0.15
    )  # 384 numbers: three deviations
    assert (
        abs(np.corrcoef(in_front[..., 1:].flatten(), first[..., :-1].flatten())[0, 1])
        < 0.15
    )


def test_a_shift_is_refused(tiny_family: Open) -> None:
    with pytest.raises(VideotuneError, match=r"sample\.shift.*no shift"):
        tiny_family(NAME).pipeline({}, shift=5.0)


def test_a_published_tokenizer_is_read(tiny_bases: Bases, tmp_path: Path) -> None:
    """A sentencepiece model, and no tokenizer.json."""
    folder = shutil.copytree(tiny_bases(NAME), tmp_path / "published")
    shutil.rmtree(folder / "tokenizer")
    (folder / "tokenizer").mkdir()
    letters, model = (
        "".join(map(chr, range(97, 123))),
        folder / "tokenizer" / "spiece.model",
    )
    (tmp_path / "text.txt").write_text(
        "\n".join(letters[i:] + " " + letters[:i] + " red circle" for i in range(26))
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(model.with_suffix("")), vocab_size=80,
        hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    marks = {
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "extra_ids": 0,
    }
    (folder / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps(marks | {"tokenizer_class": "T5Tokenizer"})
    )
    family = open_family(NAME, folder)
    for caption in ("a red  circle", "", " circle red "):
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(model)).encode(
            caption
        )
        assert family.text_pipeline().tokenizer(caption).input_ids == [*pieces, 1]


@IMAGE
def test_image_latents_are_the_pipelines_with_a_views_own_noise(
    variant: str, tiny_family: Open, tiny_bases: Bases
) -> None:
    """With the noise of a view laid on the image and the same draw of its latents; the
    1.5 pipeline divides by its scale.
    """
    family = tiny_family(NAME, variant=variant)
    pipe = CogVideoXImageToVideoPipeline.from_pretrained(
        tiny_bases(NAME, variant), dtype=torch.float32
    )
    shape = small_shape(family)
    frames = clip_of(family, shape, 0)
    plain, same = family.encode_video(frames), family.encode_video(frames)
    moments, other = (
        family.encode_video(frames, generator_for(0, "image noise", "w", view))
        for view in (3, 4)
    )
    assert torch.equal(plain.extras["image"], same.extras["image"])
    assert torch.equal(plain.mean, moments.mean)
    assert not torch.equal(moments.extras["image"], other.extras["image"])
    again = generator_for(0, "image noise", "w", 3)
    strength = np.exp(-3 + 0.5 * again.standard_normal())
    noise = torch.from_numpy(
        again.standard_normal((3, 1, shape.height, shape.width), "float32")
    )
    noisy = (frames[:, :1] + strength * noise)[:, 0]
    draw = torch.from_numpy(
        again.standard_normal((4, 1, shape.height // 8, shape.width // 8), "float32")
    )
    scale = 1 / 0.7 if variant.startswith("1.5") else 0.7
    with torch.no_grad():
        dist = pipe.vae.encode(noisy[None, :, None]).latent_dist
        torch.testing.assert_close(
            moments.extras["image"], scale * (dist.mean[0] + dist.std[0] * draw)
        )
        # the pipeline's own preparation, whose draw a generator of torch makes
        _, theirs = pipe.prepare_latents(
            noisy[None], 1, 4, shape.frames, shape.height, shape.width, torch.float32, torch.device("cpu"),
            torch.Generator().manual_seed(5),
        )  # fmt: skip
    drawn = torch.randn(
        1, 4, 1, *draw.shape[2:], generator=torch.Generator().manual_seed(5)
    )
    image = (moments.extras["image"] + scale * dist.std[0] * (drawn[0] - draw))[None]
    conditioning = family.collate_states(
        [{"text": torch.zeros(226, 16), "image": image[0]}]
    )
    ours = family._image(conditioning, theirs.shape[1]).transpose(1, 2)
    torch.testing.assert_close(ours[:, :1], theirs[:, :1], rtol=1e-5, atol=1e-6)
    in_front = (
        0 if shape.frames == 49 else 1
    )  # called by itself it puts the image twice where the count is odd
    assert not theirs[:, 1 + in_front :].any()
    assert not ours[:, 1:].any()


def test_a_vae_that_keeps_images_beside_clips_has_a_name_of_its_own(
    tiny_bases: Bases, tmp_path: Path
) -> None:
    """Text and image checkpoints share the VAE's bytes; entries of the cache without an
    image must not be taken for both.
    """
    folder = shutil.copytree(tiny_bases(NAME, "5b-i2v"), tmp_path / "same")
    shutil.rmtree(folder / "vae")
    shutil.copytree(tiny_bases(NAME, "5b") / "vae", folder / "vae")
    assert (
        open_family(NAME, folder).fingerprints()["vae"]
        != open_family(NAME, tiny_bases(NAME, "5b")).fingerprints()["vae"]
    )


def test_no_image_and_shapes_without_positions_are_errors(tiny_family: Open) -> None:
    """At another count of frames the model itself would put untrained positions in
    place of the learned, silently.
    """
    family = tiny_family(NAME, variant="5b-i2v")
    net, shape = family.denoiser(), small_shape(family)
    batch = batch_of(family, ["a"])
    conditioning = family.collate_states([{"text": batch.conditioning.text[0]}])
    with pytest.raises(VideotuneError, match="continues an image, and none was given"):
        family.sample(
            {"transformer": net}, conditioning, None, SampleRequest(shape, 2, 1.0, (1,))
        )
    for other in (
        ClipShape(17, 32, 32, 8.0),
        ClipShape(49, 48, 32, 8.0),
        ClipShape(49, 32, 48, 8.0),
    ):
        x0 = torch.zeros(1, 4, *family.spec.rules.latent_size(other))
        for ask in (
            lambda other=other: family.encode_video(clip_of(family, other, 0)),
            lambda x0=x0: family.predict(net, x0, torch.tensor([0.5]), None),
            lambda other=other: family.sample(
                {}, None, None, SampleRequest(other, 2, 1.0, (1,))
            ),
        ):
            with pytest.raises(
                VideotuneError,
                match=r'49 frames of 32x32.*frames=49 and resolution="32x32"',
            ):
                ask()
    with pytest.raises(VideotuneError, match="at most 320x320 pixels"):
        tiny_family(NAME, variant="1.5-5b").encode_video(torch.zeros(3, 1, 336, 32))


def test_5b_i2v_takes_one_size_alone(
    tiny_bases: Bases, small_clips: Path, tmp_path: Path
) -> None:
    """Its own is the default; another is refused, an area too, before a clip is read."""

    def of(*sets: str) -> Overrides:
        fixed = (
            f"base_model_name={tiny_bases(NAME, '5b-i2v')}",
            f"cache_dir={tmp_path}",
        )
        return Overrides(
            data=str(small_clips), sets=(*fixed, "video_config.pad_short=freeze", *sets)
        )

    assert resolve_config(of())[0].config.resolution == "32x32"
    job = open_job(*resolve_config(of("video_config.max_frames=17")))
    assert {str(shape) for shape in job.shapes} == {"49x32x32"}
    assert any(
        "becomes 49: this model takes exactly 49 frames" in note for note in job.notes
    )
    for asked in ("512", '"32x48"'):
        with pytest.raises(
            VideotuneError, match=r'accepts only 32x32 pixels\. Set resolution="32x32"'
        ):
            open_job(*resolve_config(of(f"resolution={asked}")))


def test_sides_of_1_5_have_an_end(tiny_bases: Bases) -> None:
    """A pair beyond it is refused; a wide clip by area is made no wider."""
    rules = CogVideoX.read_spec(tiny_bases(NAME, "1.5-5b")).rules
    with pytest.raises(VideotuneError, match="at most 320 pixels"):
        choose_size(1920, 1080, parse_resolution("64x336", rules), rules)
    for width, height in ((4000, 400), (400, 4000), (1920, 1080)):
        assert (
            max(choose_size(width, height, parse_resolution(300, rules), rules)) == 320
        )


@pytest.mark.parametrize(
    ("variant", "shape"),
    [("5b", (49, 32, 48)), ("5b-i2v", (49, 32, 32)), ("1.5-5b", (81, 320, 320))],
)
def test_without_a_run_the_model_samples_its_own_shape(
    variant: str, shape: tuple[int, int, int], tiny_bases: Bases
) -> None:
    spec = CogVideoX.read_spec(tiny_bases(NAME, variant))
    usual = shape_of(None, spec.rules.fps, resolve({}, {}, spec).config, spec)
    assert (usual.frames, usual.height, usual.width) == shape
    long = resolve({"video_config": {"frames": 65}}, {}, spec).config
    assert shape_of(None, spec.rules.fps, long, spec).frames == (
        65 if variant.startswith("1.5") else 49
    )
