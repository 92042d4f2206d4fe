"""CogVideoX's own facts, against diffusers' pipelines, schedulers and the published configurations."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler, DiffusionPipeline

from tests.models.cogvideox_kit import SHAPES, batch_for, opened
from tests.models.models_kit import edit, noisy_lora
from tests.models.oracles import v_oracle
from videotune.diffusion.loss import denoising_loss, objective
from videotune.diffusion.timesteps import Timesteps
from videotune.errors import VideotuneError
from videotune.exporter.lora import export_lora
from videotune.models.cogvideox import CogVideoX
from videotune.types import ClipShape, SampleRequest

Bases = Callable[[str], Path]
EACH = pytest.mark.parametrize("variant", CogVideoX.variants)


@EACH
def test_a_checkpoint_says_what_it_is(variant: str, cog_bases: Bases) -> None:
    spec = CogVideoX.read_spec(cog_bases(variant))
    image, newer = variant.endswith("i2v"), variant.startswith("1.5")
    assert spec.title.lower().replace("cogvideox ", "").replace(" ", "-") == variant
    assert spec.given == ("concat" if image else "none")
    assert (spec.first_frame, spec.image_noise) == ((0.95, True) if image else (None, False))
    assert spec.rules.fps == (16 if newer else 8)
    assert spec.patch == ((2, 2, 2) if newer else (1, 2, 2))
    step, rest = {"5b-i2v": (0, 49)}.get(variant, (16, 1) if newer else (8, 1))
    assert (spec.rules.frame_step, spec.rules.frame_rest) == (step, rest)
    assert spec.licence == ("Apache-2.0" if variant == "2b" else "CogVideoX License")
    assert spec.path_constants["snr_shift_scale"] == (3 if variant == "2b" else 1)
    assert spec.text_tokens == 226
    assert (spec.timestep_distribution, spec.path) == ("UNIFORM", "v")


@pytest.mark.parametrize(
    ("variant", "real", "tokens"),
    [
        ("5b", {"in_channels": 16, "sample_height": 60, "sample_width": 90}, 13 * 30 * 45),
        ("5b-i2v", {"in_channels": 32, "sample_height": 60, "sample_width": 90}, 13 * 30 * 45),
        ("1.5-5b", {"in_channels": 16, "sample_height": 300, "sample_width": 300}, 11 * 48 * 85),
    ],
)
def test_the_published_sizes(variant: str, real: dict[str, int], tokens: int, cog_bases: Bases, tmp_path: Path) -> None:
    """Channels and sizes of the real models: the spec speaks of 480x720 and of 768x1360."""
    folder = shutil.copytree(cog_bases(variant), tmp_path / "real")
    edit(folder / "transformer" / "config.json", **real)
    edit(folder / "vae" / "config.json", latent_channels=16)
    spec = CogVideoX.read_spec(folder)
    newer = variant.startswith("1.5")
    shape = ClipShape(81, 768, 1360, 16.0) if newer else ClipShape(49, 480, 720, 8.0)
    assert spec.tokens(shape) == tokens
    assert spec.sample_shape == (shape.frames, shape.height, shape.width)
    assert (spec.rules.most_frames, spec.rules.most_side) == ((161, 2400) if newer else (49, None))
    if variant == "5b-i2v":
        assert (spec.rules.size, spec.default_resolution) == ((480, 720), "480x720")
        return
    assert spec.default_resolution**2 == pytest.approx(shape.height * shape.width, rel=2e-3)
    if variant == "5b":
        assert spec == replace(CogVideoX.spec, text_width=16)


def test_what_only_looks_like_it_is_refused(cog_bases: Bases, tmp_path: Path) -> None:
    def changed(part: str, **words: Any) -> Path:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(cog_bases("5b"), folder)
        edit(folder / part, **words)
        return folder

    with pytest.raises(VideotuneError, match="reads 9 channels"):
        CogVideoX.read_spec(changed("transformer/config.json", in_channels=9))
    scheduler = "scheduler/scheduler_config.json"
    with pytest.raises(VideotuneError, match=r"prediction_type is 'epsilon'.*'v_prediction'"):
        CogVideoX.read_spec(changed(scheduler, prediction_type="epsilon"))
    with pytest.raises(VideotuneError, match="beta_schedule"):
        CogVideoX.read_spec(changed(scheduler, beta_schedule="linear"))
    with pytest.raises(VideotuneError, match="does not say snr_shift_scale, rescale_betas_zero_snr"):
        CogVideoX.read_spec(changed(scheduler, snr_shift_scale=None, rescale_betas_zero_snr=None))


@pytest.mark.parametrize("variant", ["5b", "5b-i2v"])
@pytest.mark.parametrize("caption", ["a red circle moves left", "", "Ünïcode — and &amp; entities", "long " * 100])
def test_text_is_what_the_pipeline_feeds(variant: str, caption: str, cog_bases: Bases) -> None:
    """The states of padding belong to it: T5 reads padding without a mask, and so does the transformer."""
    family = opened(cog_bases(variant))
    pipe = DiffusionPipeline.from_pretrained(cog_bases(variant), dtype=torch.float32)
    ours = family.condition(family.encode_text([caption])).text
    with torch.no_grad():
        theirs, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False)
    assert ours.shape == (1, 226, 16)
    assert torch.equal(ours, theirs)


def test_rotary_positions_of_the_real_sizes_are_the_pipelines() -> None:
    """5B at its own size has whole numbers for positions, and a stretched grid elsewhere; 1.5 always whole numbers."""
    from types import SimpleNamespace

    from diffusers import CogVideoXPipeline
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    family: Any = object.__new__(CogVideoX)
    family.spec = CogVideoX.spec
    common = {"use_rotary_positional_embeddings": True, "patch_size": 2, "attention_head_dim": 64}
    for frames, height, width, config in (
        (13, 480, 720, {"patch_size_t": None, "sample_height": 60, "sample_width": 90}),
        (22, 768, 1360, {"patch_size_t": 2, "sample_height": 300, "sample_width": 300}),
    ):
        family._net = SimpleNamespace(**common, **config)
        cos, sin = family._rotary(height, width, frames, torch.device("cpu"))
        pipe: Any = SimpleNamespace(vae_scale_factor_spatial=8, transformer=SimpleNamespace(config=family._net))
        theirs = CogVideoXPipeline._prepare_rotary_positional_embeddings(
            pipe, height, width, frames, torch.device("cpu")
        )
        assert torch.equal(cos, theirs[0])
        assert torch.equal(sin, theirs[1])
        tokens = frames // (config["patch_size_t"] or 1)
        rows = get_1d_rotary_pos_embed(24, torch.arange(height // 16).float(), use_real=True)[0]
        grid = cos.view(tokens, height // 16, width // 16, 64)
        torch.testing.assert_close(grid[3, :, 5, 16:40], rows, rtol=0, atol=2e-5)


@EACH
def test_the_loss_is_the_published_one(variant: str, cog_bases: Bases) -> None:
    """‖x̂0 - x0‖² / (1 - ᾱ), the published form, on the same tensors in float64, is the plain v-MSE that is trained."""
    family = opened(cog_bases(variant))
    batch = batch_for(family, SHAPES[variant][0], ["a", "b"], image=True)
    net, loss = family.denoiser(), objective("v", family.spec.path_constants, Timesteps())
    noise, t = torch.randn_like(batch.x0), torch.tensor([30 / 999, 0.8])
    scheduler = CogVideoXDDIMScheduler.from_pretrained(cog_bases(variant), subfolder="scheduler")
    k = (t * 999).round().long()
    with torch.no_grad():
        out = denoising_loss(family, net, loss, batch, t, noise)
        path = loss.path(t)
        said = family.predict(net, path.alpha * batch.x0 + path.sigma * noise, t, batch).double()
    x0, noise = batch.x0.double(), noise.double()
    x_t = scheduler.add_noise(x0, noise, k)
    x0_said = scheduler.get_velocity(said, x_t, k)  # with its words swapped: alpha x_t - sigma v
    weight = 1 / (1 - scheduler.alphas_cumprod[k])
    published = (weight.view(-1, 1, 1, 1, 1) * (x0_said - x0).square()).flatten(1).mean(1)
    torch.testing.assert_close(out.mse.double(), published, rtol=2e-6, atol=0)
    v = scheduler.get_velocity(x0, noise, k)
    torch.testing.assert_close((said - v).square().flatten(1).mean(1), published, rtol=1e-10, atol=0)


@pytest.mark.parametrize("scheduler", [CogVideoXDDIMScheduler, CogVideoXDPMScheduler])
@EACH
def test_a_perfect_transformer_ends_at_the_truth(
    variant: str, scheduler: type, cog_bases: Bases, tmp_path: Path
) -> None:
    """Through each variant's own pipeline, with either scheduler that the checkpoints come with."""
    folder = shutil.copytree(cog_bases(variant), tmp_path / "base")
    index = json.loads((folder / "model_index.json").read_text())
    edit(folder / "model_index.json", scheduler=["diffusers", scheduler.__name__], pipe=index["_class_name"])
    family = opened(folder)
    for shape in SHAPES[variant]:
        batch = batch_for(family, shape, ["a red circle"], image=True)
        net = family.denoiser()
        answer = v_oracle(batch.x0, family.spec)
        net.forward = lambda answer=answer, **named: (answer(**named),)
        pipe = family.pipeline({"transformer": net})
        assert type(pipe.scheduler) is scheduler
        assert type(pipe).__name__ == index["_class_name"]
        drawn = family.sample({"transformer": net}, batch.cond, None, SampleRequest(shape, 10, 1.0, (3,)))
        torch.testing.assert_close(drawn, batch.x0, rtol=0, atol=1e-5)
        t, noise = torch.tensor([0.4]), torch.randn_like(batch.x0)
        path = objective("v", family.spec.path_constants, Timesteps()).path(t)
        v = family.predict(net, path.alpha * batch.x0 + path.sigma * noise, t, batch)
        torch.testing.assert_close(v, path.d_alpha * batch.x0 + path.d_sigma * noise, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("variant", ["2b", "5b", "1.5-5b"])
def test_our_frames_are_those_of_the_pipeline_with_the_exported_file(
    variant: str, guidance: float, cog_bases: Bases, tmp_path: Path
) -> None:
    """What previews draw is what a person gets who loads the file with plain diffusers."""
    family, shape = opened(cog_bases(variant)), SHAPES[variant][0]
    net = family.denoiser()
    state = noisy_lora(family, net)
    cond, uncond = (family.condition(family.encode_text([text])) for text in ("a zorble", ""))
    request = SampleRequest(shape, 3, guidance, (7,))
    drawn = family.sample({"transformer": net}, cond, None if guidance == 1 else uncond, request)
    ours = family.decode(drawn[0])
    pipe = DiffusionPipeline.from_pretrained(cog_bases(variant), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)

    def theirs() -> torch.Tensor:
        frames = pipe(
            "a zorble", num_frames=shape.frames, height=shape.height, width=shape.width, num_inference_steps=3,
            guidance_scale=guidance, generator=torch.Generator().manual_seed(7), output_type="pt",
        ).frames[0]  # fmt: skip
        return torch.as_tensor(frames).permute(1, 0, 2, 3) * 2 - 1

    without = theirs()
    pipe.load_lora_weights(str(export_lora(family, "diffusers", state, 2.0, tmp_path / "l.safetensors", {}).path))
    torch.testing.assert_close(ours, theirs(), rtol=0, atol=1e-5)
    assert (ours - without).abs().max() > 1e-3, "the adapter must have changed the frames for this to mean anything"


def test_latents_have_the_scale_of_the_checkpoint(cog_bases: Bases, tmp_path: Path) -> None:
    """Normalising with a factor s turns the logarithm of the variance into itself + 2 log s; decoding undoes it."""
    frames = torch.rand(3, 9, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    folder = shutil.copytree(cog_bases("5b"), tmp_path / "scaled")
    edit(folder / "vae" / "config.json", scaling_factor=1.15258426)
    family, scaled = opened(cog_bases("5b")), opened(folder)
    pipe = DiffusionPipeline.from_pretrained(cog_bases("5b"), dtype=torch.float32)
    with torch.no_grad():
        dist = pipe.vae.encode(frames[None]).latent_dist
    one, other = family.encode_video(frames), scaled.encode_video(frames)
    torch.testing.assert_close(one.mean, 0.7 * dist.mean[0])
    torch.testing.assert_close(other.mean, 1.15258426 * dist.mean[0])
    draw = torch.randn_like(one.mean)
    assert one.logvar is not None
    drawn = one.mean + (0.5 * one.logvar).exp() * draw
    torch.testing.assert_close(drawn, 0.7 * (dist.mean[0] + dist.std[0] * draw))
    assert one.extras == {}
    with torch.no_grad():
        theirs = pipe.decode_latents(drawn[None].transpose(1, 2))[0].clamp(-1, 1)
    torch.testing.assert_close(family.decode(drawn), theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(scaled.decode(drawn / 0.7 * 1.15258426), theirs, rtol=0, atol=1e-5)


def test_large_pictures_are_not_tiled(cog_bases: Bases) -> None:
    """The pipeline does not tile unless told to; a tiled VAE would give other latents and other frames."""
    frames = torch.rand(3, 1, 256, 384, generator=torch.Generator().manual_seed(0)) * 2 - 1
    family = opened(cog_bases("5b"))
    pipe = DiffusionPipeline.from_pretrained(cog_bases("5b"), dtype=torch.float32)
    with torch.no_grad():
        theirs = 0.7 * pipe.vae.encode(frames[None]).latent_dist.mode()[0]
    torch.testing.assert_close(family.encode_video(frames).mean, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", ["1.5-5b", "1.5-5b-i2v"])
def test_the_frame_in_front_is_a_copy_with_noise_of_its_own(variant: str, cog_bases: Bases) -> None:
    """As the pipeline begins, and as the authors train: the first clean frame twice, each under other noise."""
    family = opened(cog_bases(variant))
    shape = ClipShape(17, 64, 96, 16.0)
    batch = batch_for(family, shape, ["a"], image=True)
    net, calls = family.denoiser(), []
    net.register_forward_pre_hook(lambda _, words, named: calls.append(named["hidden_states"]), with_kwargs=True)
    noise, t = torch.randn_like(batch.x0), torch.tensor([0.3])
    path = objective("v", family.spec.path_constants, Timesteps()).path(t)
    with torch.no_grad():
        v = family.predict(net, path.alpha * batch.x0 + path.sigma * noise, t, batch)
    assert v.shape == batch.x0.shape
    fed = calls[0][:, :, :4].transpose(1, 2)
    assert fed.shape[2] == batch.x0.shape[2] + 1
    in_front = (fed[:, :, :1] - path.alpha * batch.x0[:, :, :1]) / path.sigma
    first = noise[:, :, :1]
    torch.testing.assert_close(fed[:, :, 1:], path.alpha * batch.x0 + path.sigma * noise)
    torch.testing.assert_close(in_front.flatten().sort().values, first.flatten().sort().values, rtol=0, atol=1e-5)
    assert (in_front - first).abs().min() > 0, "none stays where it was"
    assert abs(np.corrcoef(in_front.flatten(), first.flatten())[0, 1]) < 0.15  # 384 numbers: three deviations
    near = np.corrcoef(in_front[..., 1:].flatten(), first[..., :-1].flatten())[0, 1]
    assert abs(near) < 0.15


def test_noise_is_scattered_over_every_size() -> None:
    from videotune.models.cogvideox import _scattered

    for channels, rows, columns in ((4, 4, 6), (16, 60, 90), (16, 96, 170), (16, 2, 2), (16, 62, 62)):
        places = torch.arange(channels * rows * columns).float().view(1, channels, 1, rows, columns)
        moved = _scattered(places)
        assert moved.shape == places.shape
        assert torch.equal(moved.flatten().sort().values, places.flatten())
        assert (moved != places).all()
        steps = moved.flatten().diff().abs()
        assert steps.min() > 0.3 * places.numel(), "neighbours come from far apart"


def test_a_shift_is_refused(cog_bases: Bases) -> None:
    family = opened(cog_bases("5b"))
    with pytest.raises(VideotuneError, match=r"sample\.shift.*no shift"):
        family.pipeline({"transformer": family.skeleton()}, shift=5.0)


@pytest.mark.parametrize("variant", CogVideoX.variants)
def test_presets_ask_for_what_their_checkpoint_takes(variant: str, cog_bases: Bases) -> None:
    """Frames need no change, sides are multiples, and the targets are there."""
    from videotune.adapters.lora import matching
    from videotune.config.load import preset_names, read_preset
    from videotune.data.buckets import parse_resolution
    from videotune.data.frame_sampling import snap_frames

    titles = {name.partition(" LoRA")[0].lower().replace(" ", "-"): name for name in preset_names()}
    family, preset = opened(cog_bases(variant)), read_preset(titles[f"cogvideox-{variant}"])
    rules, frames = family.spec.rules, preset["video_config"]["frames"]
    assert snap_frames(frames, rules) == frames == (81 if variant.startswith("1.5") else 49)
    own = {"1.5": (None, 2400)}.get(
        variant[:3], ((480, 720) if variant == "5b-i2v" else None, None)
    )  # not the tiny one's
    parse_resolution(preset["resolution"], replace(rules, size=own[0], most_side=own[1]))
    assert len(matching(family.skeleton(), family.spec, preset["lora"]["targets"])) == 2 * 4
