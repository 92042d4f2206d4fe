"""LTX-Video's own facts, against diffusers' pipelines and the published configurations."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, LTXConditionPipeline, LTXPipeline

from tests.models import models_kit
from tests.models.models_kit import batch_of, clip_of, edit
from tests.models.oracles import unpacked
from tests.models.test_family_outputs import same_words
from videotune.errors import VideotuneError
from videotune.models.ltx_video import LTXVideo
from videotune.types import ClipShape, SampleRequest

Bases = Callable[..., Path]
EACH = pytest.mark.parametrize("variant", LTXVideo.variants)
SHAPE = ClipShape(17, 64, 96, 25.0)


opened = partial(models_kit.opened, "ltx_video")


def edited(base: Path, folder: Path, part: str, **words: Any) -> Path:
    """A copy of a checkpoint in which keys of a JSON file are others."""
    shutil.copytree(base, folder)
    edit(folder / part, **words)
    return folder


@EACH
def test_a_checkpoint_says_what_it_is(variant: str, tiny_bases: Bases) -> None:
    spec = LTXVideo.read_spec(tiny_bases("ltx_video", variant))
    since = variant == "0.9.7"
    assert spec.title == f"LTX-Video {'0.9.5+' if since else variant}"
    assert spec.text_tokens == (256 if since else 128)
    assert (spec.rules.frame_step, spec.rules.frame_rest, spec.rules.side_multiple, spec.rules.fps) == (8, 1, 32, 25)
    assert (spec.given, spec.first_frame, spec.patch) == ("replace", 0.1, (1, 1, 1))
    assert spec.shift_by_tokens == (1024, 0.95, 4096, 2.05)
    assert ("Open" in spec.licence) == since


def test_a_newer_checkpoint_is_known_by_its_vae_too(tiny_bases: Bases, tmp_path: Path) -> None:
    """Whatever pipeline its index names: how it counts time goes with the weights."""
    folder = edited(tiny_bases("ltx_video", "0.9.7"), tmp_path / "a", "model_index.json", _class_name="LTXPipeline")
    assert opened(folder).pipeline_class() is LTXConditionPipeline
    assert opened(tiny_bases("ltx_video", "0.9.1")).pipeline_class() is LTXPipeline


def heard_by(net: Any) -> list[Any]:
    heard: list[Any] = []
    net.register_forward_pre_hook(lambda _, words, named: heard.append(("transformer", dict(named))), with_kwargs=True)
    return heard


@EACH
def test_each_sample_is_told_its_own_fps(variant: str, tiny_bases: Bases) -> None:
    """Two rates in one batch: each is predicted as in a batch of its own, which hears the pipeline's words."""
    family = opened(tiny_bases("ltx_video", variant))
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
def test_a_wrong_word_would_be_found(variant: str, tiny_bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shows that training hears the pipeline's words does find a wrong rate, unit, form of time and mask."""
    family = opened(tiny_bases("ltx_video", variant))
    net = family.denoiser()
    batch, heard = batch_of(family, ["a red circle"], shape=SHAPE), heard_by(net)
    with torch.no_grad():
        family.sample({"transformer": net}, batch.cond, None, SampleRequest(SHAPE, 2, 1.0, (3,)))
    theirs, place = heard[0][1], "video_coords" if family.newer else "rope_interpolation_scale"
    assert same_words(family, net, batch, theirs, heard) == []
    assert same_words(family, net, replace(batch, fps=batch.fps - 1), theirs, heard) == [place]
    blind = replace(batch.cond, text_mask=torch.ones_like(batch.cond.text_mask))  # type: ignore[arg-type]
    assert same_words(family, net, replace(batch, cond=blind), theirs, heard) == ["encoder_attention_mask"]
    own = family.predict
    with monkeypatch.context() as wrong:
        wrong.setattr(family, "predict", lambda net, x_t, t, batch: own(net, x_t, 0.999 * t, batch))
        assert same_words(family, net, batch, theirs, heard) == ["timestep"]
    with monkeypatch.context() as wrong:
        wrong.setattr(family, "newer", not family.newer)
        assert place in same_words(family, net, batch, theirs, heard)
    rules = replace(family.spec.rules, temporal_stride=4)
    monkeypatch.setattr(family, "spec", replace(family.spec, rules=rules))
    assert same_words(family, net, batch, theirs, heard) == [place]


@EACH
def test_a_first_frame_is_fed_as_the_pipeline_feeds_it(variant: str, tiny_bases: Bases) -> None:
    """Clean, its tokens told 0; every word of a draw from an image, replayed with that frame given, is the same."""
    family = opened(tiny_bases("ltx_video", variant))
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
def test_latents_are_normalised_and_decoded_as_in_the_pipeline(variant: str, tiny_bases: Bases) -> None:
    """With the VAE's buffers; and a VAE that is told a timestep is told 0.05, over latents with 2.5 % of noise."""
    family = opened(tiny_bases("ltx_video", variant))
    pipe = DiffusionPipeline.from_pretrained(tiny_bases("ltx_video", variant), dtype=torch.float32)
    vae, clip = pipe.vae, clip_of(family, SHAPE, 0)
    moments = family.encode_video(clip)
    with torch.no_grad():
        dist = vae.encode(clip[None]).latent_dist
    wanted = pipe._normalize_latents(dist.mean, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    torch.testing.assert_close(moments.mean[None], wanted)
    deviation = dist.std[0] / vae.latents_std.view(-1, 1, 1, 1)
    torch.testing.assert_close((moments.logvar / 2).exp(), deviation, rtol=1e-4, atol=1e-6)
    before = torch.get_rng_state()
    ours = family.decode(moments.mean)
    assert torch.equal(ours, family.decode(moments.mean)), "also where the decoder draws noise inside"
    assert torch.equal(torch.get_rng_state(), before), "and nobody else's draws move"
    if variant == "0.9.1":  # it draws inside: only its timestep can be looked at
        with pytest.raises(Exception, match="NoneType"):
            vae.decode(wanted)
        return
    raw, words = dist.mean, []
    if variant == "0.9.7":
        from videotune.rng import draws

        noise = torch.from_numpy(draws(0, "decode noise").standard_normal(tuple(raw.shape), "float32"))
        raw, words = 0.975 * raw + 0.025 * noise, [torch.tensor([0.05])]
    with torch.no_grad():
        torch.testing.assert_close(ours, vae.decode(raw, *words).sample[0].clamp(-1, 1), rtol=1e-4, atol=1e-5)
        if words:
            told_other = vae.decode(raw, torch.tensor([0.0])).sample[0].clamp(-1, 1)
            assert (ours - told_other).abs().max() > 1e-4


def test_the_shift_of_a_sample_is_the_schedulers_or_the_asked_one(tiny_bases: Bases) -> None:
    older, since = (opened(tiny_bases("ltx_video", variant)) for variant in ("0.9.0", "0.9.7"))
    assert older.pipeline({}).scheduler.config.use_dynamic_shifting
    asked = older.pipeline({}, 3.0).scheduler
    asked.set_timesteps(sigmas=[1.0, 0.5])
    assert (asked.config.use_dynamic_shifting, asked.config.shift) == (False, 3.0)
    with pytest.raises(VideotuneError, match="schedule of its own"):
        since.pipeline({}, 3.0)
    assert LTXVideo.spec.timestep_shift == 4.48, "e^1.5: half way between 1024 and 4096 tokens"
