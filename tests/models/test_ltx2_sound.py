"""The sound of LTX-2: against transformers' spectrogram, the pipeline's own packing and
calls, and a whole pipeline's waveform.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.audio_utils import mel_filter_bank, spectrogram

from tests.support import families
from tests.support.families import Open
from videotune.adapters.lora import idle_targets, matching
from videotune.diffusion.base_targets import prior_target
from videotune.diffusion.loss import Objective, denoising_loss, predict_and_target
from videotune.diffusion.noise_paths import flow_path
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.models.base_model import spec_for
from videotune.models.ltx2_sound import check_vocoder, log_mel
from videotune.models.model_files import CONFIGS
from videotune.models.registry import find
from videotune.types import BasePlace, Batch, ClipShape, SampleRequest, Sound

VERSIONS = pytest.mark.parametrize("version", find("ltx2").variants)
LEARNT = pytest.mark.parametrize(
    "generates", [("video", "sound"), ("sound",), ("video",)], ids="-".join
)
FLOW = Objective(flow_path, TimestepSampler())


@pytest.fixture
def family(version: str, tiny_family: Open) -> Any:
    return tiny_family("ltx2", variant=version)


def with_sound(family: Any, generates: Any = ("video", "sound")) -> Any:
    family.spec = family.spec.with_sound(generates)
    return family


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heard(
    family: Any, captions: list[str], generates: Any = ("video", "sound")
) -> Batch:
    """A batch with sound, which is noised if it is learnt."""
    batch = families.batch_of(family, captions)
    nothing = torch.zeros_like(batch.conditioning_mask)
    batch = replace(
        batch,
        conditioning_mask=nothing,
        loss_mask=(~nothing).float(),
        has_clean_frames=False,
    )
    samples = len(batch)
    shape = families.small_shape(family)
    rules = family.spec.sound
    size = (samples, rules.channels, rules.latents(shape), 1, 1)
    is_conditioning = "sound" not in generates
    t = torch.linspace(0.3, 0.7, samples) * (not is_conditioning)
    noise = drawn(*size, seed=2) * (not is_conditioning)
    sound = Sound(drawn(*size, seed=1), noise, t, is_conditioning)
    if "video" in generates:
        return replace(batch, sound=sound)
    return replace(
        batch,
        sound=sound,
        video_is_conditioning=True,
        has_clean_frames=True,
        conditioning_mask=torch.ones_like(batch.conditioning_mask),
        loss_mask=torch.zeros_like(batch.loss_mask),
    )


def tune(seconds: float, rate: int = 16000) -> torch.Tensor:
    """A rising tone on the left, noise on the right."""
    time = torch.arange(round(seconds * rate)) / rate
    tone = torch.sin(2 * torch.pi * (200 + 300 * time) * time)
    return torch.stack([0.5 * tone, 0.1 * drawn(len(time))])


@pytest.mark.parametrize("seconds", [0.05, 0.7, 1.0])
def test_the_spectrogram_is_that_of_transformers_in_double_precision(
    seconds: float,
) -> None:
    waveform = tune(seconds)
    ours = log_mel(waveform, 16000, 160, 64)
    bank = mel_filter_bank(
        513, 64, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney"
    )
    padded = np.pad(
        waveform.double().numpy(), ((0, 0), (0, max(0, 1024 - waveform.shape[1])))
    )
    for channel, mel in zip(padded, ours, strict=True):
        theirs = spectrogram(
            channel,
            np.hanning(1025)[:-1],
            1024,
            160,
            fft_length=1024,
            power=1.0,
            center=True,
            pad_mode="reflect",
            mel_filters=bank,
            mel_floor=1e-5,
            log_mel="log",
            dtype=np.float64,
        ).T
        assert mel.shape == theirs.shape
        # The log of magnitudes near the floor shows rounding.
        magnitudes = np.exp(mel.double().numpy())
        np.testing.assert_allclose(magnitudes, np.exp(theirs), rtol=1e-5, atol=2e-6)


@VERSIONS
def test_latents_are_packed_and_normalised_as_the_pipeline_does(family: Any) -> None:
    shape = ClipShape(17, 64, 64, 24.0)
    latents = family.encode_sound(tune(17 / 24), shape)
    vae = family._audio_vae()
    mel = log_mel(tune(17 / 24), 16000, 160, vae.config.mel_bins)
    with torch.no_grad():
        raw = vae.encode(mel[None]).latent_dist.mode()
    pipe = diffusers.LTX2Pipeline
    packed = pipe._normalize_audio_latents(
        pipe._pack_audio_latents(raw), vae.latents_mean, vae.latents_std
    )
    count = family.spec.sound.latents(shape)
    torch.testing.assert_close(latents.T, packed[0, :count])
    # Another order of rows and channels would be another sound.
    wrong = pipe._pack_audio_latents(raw.transpose(1, 3))[0, :count]
    assert not torch.allclose(latents.T, wrong, atol=1e-3)


def test_a_sound_has_the_latents_that_the_pipeline_draws(tiny_family: Open) -> None:
    """Of some lengths the VAE gives one more, never one fewer."""
    family = tiny_family("ltx2")
    encoded_more = 0
    for frames in (1, 9, 17, 25, 33, 49, 121):
        for fps in (24.0, 25.0, 30.0, 16.0):
            shape = ClipShape(frames, 64, 64, fps)
            seconds = frames / fps
            latents = family.encode_sound(drawn(2, round(seconds * 16000)), shape)
            assert latents.shape == (8, round(seconds * 25))
            encoded_more += round(seconds * 16000) // 640 + 1 > latents.shape[1]
    assert encoded_more > 5


@VERSIONS
@LEARNT
def test_what_is_called_idle_has_no_gradient_and_all_else_has(
    family: Any, generates: tuple[str, ...]
) -> None:
    batch = heard(with_sound(family, generates), ["a red circle"], generates)
    net = families.first_of(family).requires_grad_(True)
    # Gates that begin at zero would hide what lies behind them.
    for parameter in net.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    noise = drawn(*batch.x0.shape, seed=3)
    denoising_loss(family, net, FLOW, batch, torch.tensor([0.6]), noise).loss.backward()

    acting = set()
    for name, parameter in net.named_parameters():
        if parameter.grad is not None and bool(parameter.grad.any()):
            acting.add(name)
    idle = {name for name, _ in net.named_parameters() if family.spec.is_idle(name)}
    assert acting.isdisjoint(idle)
    quiet = {name for name, _ in net.named_parameters()} - acting - idle
    # A token table of one entry has a gradient of 0 in the bias of its keys.
    assert all(name.endswith("to_k.bias") for name in quiet), quiet


@VERSIONS
def test_without_sound_no_weight_of_it_has_a_gradient(family: Any) -> None:
    """Silent clips leave what acts on sound as it is."""
    with_sound(family)
    net = families.first_of(family).requires_grad_(True)
    silent = families.batch_of(family, ["a red circle"])
    noise = drawn(*silent.x0.shape, seed=3)
    t = torch.tensor([0.6])
    denoising_loss(family, net, FLOW, silent, t, noise).loss.backward()
    for name, parameter in net.named_parameters():
        if find("ltx2").spec.is_idle(name):
            assert parameter.grad is None or not parameter.grad.any(), name


@VERSIONS
def test_targets_reach_sound_by_name(family: Any) -> None:
    net = family.skeleton()
    with_sound(family)
    counts = {
        name: len(matching(net, family.spec, name))
        for name in (
            "attention",
            "feed_forward",
            "linear",
            "video",
            "sound",
            "cross_modal",
        )
    }
    # Two blocks: of each modality two attentions of four modules and a feed-forward of
    # two, and two attentions between them.
    assert counts == {
        "attention": 48,
        "feed_forward": 8,
        "linear": 56,
        "video": 20,
        "sound": 20,
        "cross_modal": 16,
    }
    assert len(matching(net, family.spec, ["to_k"])) == 12
    assert idle_targets(net, family.spec, ["to_k"]) == []


class Perfect(nn.Module):
    """Predicts noise - x0 of video and sound from what it is told of both."""

    def __init__(self, batch: Batch, noise: torch.Tensor) -> None:
        super().__init__()
        self.batch = batch
        self.noise = noise

    def forward(self, **inputs: Any) -> Any:
        assert self.batch.sound is not None
        video = (self.noise - self.batch.x0).flatten(2).transpose(1, 2)
        sound = self.batch.sound
        of_sound = (sound.noise - sound.x0).flatten(2).transpose(1, 2)
        return video, of_sound


@VERSIONS
@pytest.mark.parametrize("fault", ["none", "video", "sound"])
def test_a_perfect_network_has_no_error_in_either_modality(
    family: Any, fault: str
) -> None:
    batch = heard(with_sound(family), ["a red circle", "b"])
    assert batch.sound is not None
    noise = drawn(*batch.x0.shape, seed=3)
    told = batch
    if fault == "video":
        told = replace(batch, x0=batch.x0.flip(3))
    if fault == "sound":
        told = replace(batch, sound=replace(batch.sound, x0=batch.sound.x0.flip(2)))
    net = Perfect(told, noise)
    out = denoising_loss(family, net, FLOW, batch, torch.tensor([0.2, 0.9]), noise)
    assert out.sound_mse is not None
    errors = {"video": out.mse, "sound": out.sound_mse}
    for part, error in errors.items():
        assert bool((error > 0.1).all()) is (part == fault), part
        if part != fault:
            torch.testing.assert_close(error, torch.zeros(2), atol=1e-9, rtol=0)


def test_the_loss_weighs_the_sound(tiny_family: Open) -> None:
    family = with_sound(tiny_family("ltx2"))
    batch = heard(family, ["a red circle"])
    noise = drawn(*batch.x0.shape, seed=3)
    net = families.first_of(family)
    losses = []
    for weight in (1.0, 3.0):
        weighed = replace(FLOW, sound_weight=weight)
        out = denoising_loss(family, net, weighed, batch, torch.tensor([0.5]), noise)
        assert out.sound_mse is not None
        torch.testing.assert_close(out.loss, (out.mse + weight * out.sound_mse).mean())
        losses.append(out.loss)
    assert losses[0] < losses[1]


def recorded(net: Any) -> list[dict[str, Any]]:
    """What a network is called with from now on."""
    calls: list[dict[str, Any]] = []

    def keep(_: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        calls.append(dict(keywords))

    net.register_forward_pre_hook(keep, with_kwargs=True)
    return calls


WORDS = (
    "hidden_states",
    "audio_hidden_states",
    "encoder_hidden_states",
    "audio_encoder_hidden_states",
    "timestep",
    "sigma",
    "video_coords",
    "audio_coords",
)


@VERSIONS
@pytest.mark.parametrize("guided", [False, True])
def test_a_step_tells_the_network_what_the_pipeline_tells_it(
    family: Any, guided: bool
) -> None:
    """A pipeline has one noise level for both, at which a step is replayed."""
    batch = heard(with_sound(family), ["a red circle"])
    assert batch.sound is not None
    net = families.first_of(family)
    calls = recorded(net)
    request = SampleRequest(
        families.small_shape(family), 2, 3.0 if guided else 1.0, (3,)
    )
    negative = batch.conditioning if guided else None
    family.sample_with_sound(
        {"transformer": net}, batch.conditioning, negative, request
    )
    replayed = [call for call in calls if len(call["hidden_states"]) == 1]
    assert replayed
    for theirs in replayed:
        if theirs["isolate_modalities"] or theirs["spatio_temporal_guidance_blocks"]:
            continue
        t = theirs["sigma"] / 1000
        x_t = theirs["hidden_states"].transpose(1, 2).reshape(batch.x0.shape)
        sound_x_t = theirs["audio_hidden_states"].transpose(1, 2)[..., None, None]
        told = replace(batch, sound=replace(batch.sound, t=t))
        calls.clear()
        with torch.no_grad():
            family.predict_with_sound(net, x_t, t, told, sound_x_t)
        for word in WORDS:
            wanted = theirs[word]
            torch.testing.assert_close(calls[0][word].expand_as(wanted), wanted)
        for word in ("audio_timestep", "audio_sigma"):
            torch.testing.assert_close(calls[0][word], theirs["sigma"])
        assert calls[0]["audio_num_frames"] == theirs["audio_num_frames"]
        assert calls[0]["use_cross_timestep"] == theirs["use_cross_timestep"]


@VERSIONS
@pytest.mark.parametrize("given", ["video", "sound"])
@pytest.mark.parametrize("guided", [False, True])
def test_what_a_sample_is_given_is_told_clean_and_comes_back(
    family: Any, given: str, guided: bool
) -> None:
    other = "sound" if given == "video" else "video"
    batch = heard(with_sound(family, (other,)), ["a red circle"], (other,))
    assert batch.sound is not None
    net = families.first_of(family)
    calls = recorded(net)
    request = SampleRequest(
        families.small_shape(family), 2, 3.0 if guided else 1.0, (3,)
    )
    clean = batch.sound.x0[..., 0, 0]
    if given == "video":
        mask = torch.ones(1, 1, *batch.x0.shape[2:], dtype=torch.bool)
        request = replace(request, known=batch.x0, known_mask=mask)
    else:
        request = replace(request, sound=clean)
    negative = batch.conditioning if guided else None
    video, sound = family.sample_with_sound(
        {"transformer": net}, batch.conditioning, negative, request
    )
    if given == "video":
        assert torch.equal(video, batch.x0)
        assert not torch.allclose(sound, clean, atol=0.1)
    else:
        assert torch.equal(sound, clean)
        assert not torch.allclose(video, batch.x0, atol=0.1)

    # In each pass, those of guidance too.
    prefix = "" if given == "video" else "audio_"
    tokens = batch.x0.flatten(2).transpose(1, 2) if given == "video" else clean.mT
    for call in calls:
        told = call[f"{prefix}hidden_states"]
        torch.testing.assert_close(told, tokens.expand_as(told))
        for word in ("timestep", "sigma"):
            assert not call[f"{prefix}{word}"].any()
            noisy = call[f"audio_{word}" if given == "video" else word]
            assert bool((noisy > 0).all())


@VERSIONS
def test_training_with_a_given_modality_tells_what_sampling_tells(family: Any) -> None:
    """The same words with which the network samples foley."""
    batch = heard(with_sound(family, ("sound",)), ["a red circle"], ("sound",))
    assert batch.sound is not None
    net = families.first_of(family)
    calls = recorded(net)
    mask = torch.ones(1, 1, *batch.x0.shape[2:], dtype=torch.bool)
    request = SampleRequest(
        families.small_shape(family), 2, 1.0, (3,), known=batch.x0, known_mask=mask
    )
    family.sample_with_sound({"transformer": net}, batch.conditioning, None, request)
    theirs = calls[0]
    t = theirs["audio_sigma"] / 1000
    told = replace(batch, sound=replace(batch.sound, t=t))
    calls.clear()
    with torch.no_grad():
        denoising_loss(family, net, FLOW, told, t, torch.zeros_like(batch.x0))
    ours = calls[0]
    assert not ours["timestep"].any()
    for word in ("hidden_states", "sigma", "audio_timestep", "audio_sigma"):
        torch.testing.assert_close(ours[word], theirs[word].expand_as(ours[word]))


@VERSIONS
def test_video_and_sound_are_those_of_a_whole_pipeline(
    family: Any, version: str
) -> None:
    """Its own VAEs and vocoder decode what it draws from the same noise."""
    with_sound(family)
    pipe = diffusers.LTX2Pipeline.from_pretrained(family.folder)
    pipe.set_progress_bar_config(disable=True)
    caption = "a red circle"
    wanted = pipe(
        prompt=caption,
        height=64,
        width=64,
        num_frames=17,
        frame_rate=24.0,
        num_inference_steps=2,
        guidance_scale=1.0,
        generator=[torch.Generator().manual_seed(5)],
        output_type="pt",
        **family.spec.unguided_arguments,
        **family.spec.pipeline_arguments,
    )
    states = family.encode_text([caption])
    request = SampleRequest(ClipShape(17, 64, 64, 24.0), 2, 1.0, (5,))
    with torch.no_grad():
        _, sound = family.sample_with_sound(
            {"transformer": family.denoiser()},
            family.collate_states(states),
            None,
            request,
        )
    waveform, rate = family.decode_sound(sound[0])
    torch.testing.assert_close(waveform, wanted.audio[0].float(), rtol=1e-3, atol=1e-4)
    assert rate == pipe.vocoder.config.output_sampling_rate
    assert abs(waveform.shape[1] / rate - 17 / 24) < 0.05


def test_a_sounds_vae_without_statistics_is_refused(
    tiny_bases: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    weights = folder / "audio_vae" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    del state["latents_mean"], state["latents_std"]
    save_file(state, weights)
    family = families.open_family("ltx2", folder)
    with pytest.raises(VideotuneError):
        family.encode_sound(tune(0.7), ClipShape(17, 64, 64, 24.0))


def test_a_sounds_vae_of_another_width_is_refused(
    tiny_bases: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    families.edit_json(folder / "audio_vae" / "config.json", mel_bins=32)
    with pytest.raises(VideotuneError):
        find("ltx2").read_spec(folder)


def test_an_unknown_vocoder_is_refused(tiny_bases: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    families.edit_json(folder / "model_index.json", vocoder=["ltx2", "os"])
    family = families.open_family("ltx2", folder)
    with pytest.raises(VideotuneError):
        family.decode_sound(drawn(8, 18))


def test_another_vae_of_sound_is_another_cache(tiny_bases: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    family = with_sound(families.open_family("ltx2", folder))
    before = family.fingerprints()["audio_vae"]
    weights = folder / "audio_vae" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    name = next(iter(state))
    state[name] = state[name] + 1
    save_file(state, weights)
    assert (
        with_sound(families.open_family("ltx2", folder)).fingerprints()["audio_vae"]
        != before
    )


def test_a_prior_keeps_the_bases_sound_too(tiny_family: Open) -> None:
    """Samples of prior preservation have the base's prediction of both as their target,
    the others the data's.
    """
    family = with_sound(tiny_family("ltx2"))
    batch = heard(family, ["a red circle", "b"])
    assert batch.sound is not None
    noise = drawn(*batch.x0.shape, seed=3)
    t = torch.tensor([0.4, 0.8])
    net = families.first_of(family)
    target = prior_target(family, net, FLOW, batch, t, noise, [1])
    with torch.no_grad():
        theirs, data = predict_and_target(family, net, FLOW, batch, t, noise)
    assert target.sound is not None
    assert theirs.sound is not None
    assert data.sound is not None
    for mine, base, own in (
        (target.video, theirs.video, data.video),
        (target.sound, theirs.sound, data.sound),
    ):
        assert torch.equal(mine[0], own[0])
        torch.testing.assert_close(mine[1], base[1], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(mine[1], own[1], atol=1e-2)
    out = denoising_loss(family, net, FLOW, batch, t, noise, target)
    assert out.sound_mse is not None
    assert float(out.sound_mse[1]) < 1e-6 < float(out.sound_mse[0])


def test_micro_batches_have_the_sound_of_their_samples(tiny_family: Open) -> None:
    family = with_sound(tiny_family("ltx2"))
    batch = heard(family, ["a red circle", "b"])
    noise = drawn(*batch.x0.shape, seed=3)
    t = torch.tensor([0.4, 0.8])
    net = families.first_of(family)
    whole = denoising_loss(family, net, FLOW, batch, t, noise)
    for index, part in enumerate(batch.split(1)):
        rows = slice(index, index + 1)
        out = denoising_loss(family, net, FLOW, part, t[rows], noise[rows])
        for mine, other in ((out.mse, whole.mse), (out.sound_mse, whole.sound_mse)):
            assert mine is not None
            assert other is not None
            torch.testing.assert_close(mine[0], other[index], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "values",
    [
        {"sample_rate": 10**12},
        {"sample_rate": -1},
        {"sample_rate": True},
        {"mel_hop_length": 0},
        {"mel_hop_length": 1e-9},
        {"mel_hop_length": 4096},
        {"mel_hop_length": 8},
        {"mel_bins": "x"},
        {"latent_channels": None},
    ],
    ids=str,
)
def test_a_sounds_vae_with_impossible_numbers_is_refused(
    values: dict[str, Any], tiny_bases: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    families.edit_json(folder / "audio_vae" / "config.json", **values)
    with pytest.raises(VideotuneError):
        spec_for(None, BasePlace("base", folder))


@pytest.mark.parametrize(
    "values",
    [
        {"upsample_factors": [1000, 1000, 1000]},
        {"upsample_factors": [2, 2]},
        {"output_sampling_rate": 24000},
    ],
    ids=str,
)
def test_a_vocoder_that_does_not_keep_the_time_is_refused(
    values: dict[str, Any], tiny_bases: Any, tmp_path: Path
) -> None:
    """Its waveform would be of another length, or larger than any memory."""
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    families.edit_json(folder / "vocoder" / "config.json", **values)
    family = families.open_family("ltx2", folder)
    with pytest.raises(VideotuneError):
        family.decode_sound(drawn(8, 18))


@pytest.mark.parametrize("asset", ["ltx-2-19b", "ltx-2.3-22b"])
def test_published_vocoders_keep_the_time(asset: str) -> None:
    folder = CONFIGS / asset
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    check_vocoder(folder, index["vocoder"][1])
