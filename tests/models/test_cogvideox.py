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
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler

from tests.models.cogvideox_kit import SHAPES, batch_for, opened
from tests.models.models_kit import edit
from tests.models.oracles import v_oracle
from videotune.diffusion.loss import denoising_loss, objective
from videotune.diffusion.timesteps import Timesteps
from videotune.errors import VideotuneError
from videotune.models.cogvideox import CogVideoX
from videotune.types import ClipShape, SampleRequest

Bases = Callable[[str], Path]
EACH = pytest.mark.parametrize("variant", CogVideoX.variants)


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
