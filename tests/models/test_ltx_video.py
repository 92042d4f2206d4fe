"""LTX-Video's own facts, against diffusers' pipelines and the published configurations."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, LTXConditionPipeline, LTXPipeline

from tests.models.models_kit import Open, batch_of, clip_of, edit, opened
from tests.models.oracles import unpacked
from tests.models.test_family_outputs import same_words
from videotune.errors import VideotuneError
from videotune.models.base import DiffusersModel
from videotune.models.ltx_video import LTXVideo
from videotune.rng import draws
from videotune.types import ClipShape, SampleRequest

Bases = Callable[..., Path]
NAME = "ltx_video"
EACH = pytest.mark.parametrize("variant", LTXVideo.variants)
SHAPE = ClipShape(17, 64, 96, 25.0)


def test_a_newer_checkpoint_is_known_by_its_vae_too(tiny_bases: Bases, tmp_path: Path) -> None:
    """Whatever pipeline its index names: how it counts time goes with the weights."""
    titles = [LTXVideo.read_spec(tiny_bases(NAME, variant)).title for variant in LTXVideo.variants]
    assert titles == ["LTX-Video 0.9.0", "LTX-Video 0.9.1", "LTX-Video 0.9.5+"]
    folder = Path(shutil.copytree(tiny_bases(NAME, "0.9.7"), tmp_path / "a"))
    edit(folder / "model_index.json", _class_name="LTXPipeline")
    assert opened(NAME, folder).pipeline_class() is LTXConditionPipeline
    assert opened(NAME, tiny_bases(NAME, "0.9.1")).pipeline_class() is LTXPipeline


def heard_by(net: Any) -> list[Any]:
    heard: list[Any] = []
    net.register_forward_pre_hook(lambda _, words, named: heard.append(("transformer", dict(named))), with_kwargs=True)
    return heard


@EACH
def test_each_sample_is_told_its_own_fps(variant: str, tiny_family: Open) -> None:
    """Two rates in one batch: each is predicted as in a batch of its own, which hears the pipeline's words."""
    family = tiny_family(NAME, variant=variant)
    net = family.denoiser()
    batch = replace(batch_of(family, ["a", "b"], shape=SHAPE), fps=torch.tensor([12.0, 25.0]), any_given=False)
    x_t, t = torch.randn_like(batch.x0), torch.tensor([0.3, 0.8])
    heard = heard_by(net)
    with torch.no_grad():
        both = family.predict(net, x_t, t, batch)
        other = family.predict(net, x_t, t, replace(batch, fps=batch.fps.flip(0)))
        for i, one in enumerate(batch.split(1)):
            alone = family.predict(net, x_t[i : i + 1], t[i : i + 1], one)
            torch.testing.assert_close(alone, both[i : i + 1], rtol=1e-5, atol=1e-6)
            assert (other[i] - both[i]).abs().max() > 1e-5
            heard.clear()
            request = SampleRequest(replace(SHAPE, fps=float(one.fps)), 2, 1.0, (3,))
            family.sample({"transformer": net}, one.cond, None, request)
            assert same_words(family, net, one, heard[0][1], heard) == []


@EACH
def test_a_first_frame_is_fed_as_the_pipeline_feeds_it(variant: str, tiny_family: Open) -> None:
    """Clean, its tokens told 0; every word of a draw from an image, replayed with that frame given, is the same."""
    family = tiny_family(NAME, variant=variant)
    net = family.denoiser()
    batch, heard = batch_of(family, ["a red circle"], given=True, shape=SHAPE), heard_by(net)
    first = batch.x0[:, :, :1]
    with torch.no_grad():
        drawn = family.sample({"transformer": net}, batch.cond, None, SampleRequest(SHAPE, 4, 1.0, (3,), first=first))
    assert torch.equal(drawn[:, :, :1], first)
    size = batch.x0.shape[2:]
    a_frame = size[1] * size[2]
    for _, theirs in list(heard):
        assert theirs["timestep"].shape == (1, size[0] * a_frame)
        assert not theirs["timestep"][:, :a_frame].any()
        assert same_words(family, net, batch, theirs, heard) == []
        fed = unpacked(LTXVideo.spec, theirs["hidden_states"], size)[:, :, :1]
        noise = 0.15 * float(theirs["timestep"].max() / 1000) ** 2 if family.newer else 0.0  # the pipeline's own
        assert (fed - first).abs().max() <= 6 * noise


@EACH
def test_the_decoder_is_told_a_timestep_and_noise_that_are_always_the_same(variant: str, tiny_family: Open) -> None:
    """0.05, over latents with 2.5 % of noise, where the VAE is told a timestep; nobody else's draws move."""
    family = tiny_family(NAME, variant=variant)
    latents = family.encode_video(clip_of(family, SHAPE, 0)).mean
    before = torch.get_rng_state()
    ours = family.decode(latents)
    assert torch.equal(ours, family.decode(latents)), "also where the decoder draws noise inside"
    assert torch.equal(torch.get_rng_state(), before)
    vae: Any = AutoencoderKLLTXVideo.from_pretrained(family.folder / "vae", torch_dtype=torch.float32)
    raw, words = DiffusersModel.raw_latents(family, latents)[None], []
    if variant == "0.9.1":  # it draws inside: only its timestep can be looked at
        with pytest.raises(Exception, match="NoneType"):
            vae.decode(raw)
        return
    if variant == "0.9.7":
        noise = torch.from_numpy(draws(0, "decode noise").standard_normal(tuple(raw.shape[1:]), "float32"))
        raw, words = 0.975 * raw + 0.025 * noise, [torch.tensor([0.05])]
    with torch.no_grad():
        torch.testing.assert_close(ours, vae.decode(raw, *words).sample[0].clamp(-1, 1), rtol=1e-4, atol=1e-5)


def test_the_shift_of_a_sample_is_the_schedulers_or_the_asked_one(tiny_family: Open) -> None:
    older, since = (tiny_family(NAME, variant=variant) for variant in ("0.9.0", "0.9.7"))
    assert older.pipeline({}).scheduler.config.use_dynamic_shifting
    asked = older.pipeline({}, 3.0).scheduler
    asked.set_timesteps(sigmas=[1.0, 0.5])
    assert (asked.config.use_dynamic_shifting, asked.config.shift) == (False, 3.0)
    with pytest.raises(VideotuneError, match="schedule of its own"):
        since.pipeline({}, 3.0)
    assert LTXVideo.spec.timestep_shift == 4.48, "e^1.5: half way between 1024 and 4096 tokens"
