"""Wan from an image: what training feeds is what WanImageToVideoPipeline itself makes of the same frame."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image

from videotune.adapters.lora import add_lora
from videotune.config.schema import Lora
from videotune.exporter.lora import export_lora
from videotune.sampling.pipeline import SampleSettings, draw
from videotune.types import Batch, ClipShape

SIZES = [(1, 32, 32), (5, 32, 48), (9, 64, 32), (17, 32, 32)]
Open = Callable[..., Any]


def a_clip(frames: int, height: int, width: int) -> torch.Tensor:
    levels = torch.randint(256, (3, frames, height, width), generator=torch.Generator().manual_seed(0))
    return levels.float() / 127.5 - 1


def first_frame(clip: torch.Tensor) -> Image.Image:
    return Image.fromarray(((clip[:, 0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


def pipeline_of(folder: Path) -> WanImageToVideoPipeline:
    pipe = WanImageToVideoPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def theirs(pipe: WanImageToVideoPipeline, image: Image.Image, shape: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """What the pipeline makes of an image for a video of this shape: latents, condition (and the mask)."""
    frames, height, width = shape
    pixels = pipe.video_processor.preprocess(image, height=height, width=width).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return pipe.prepare_latents(
            pixels, 1, pipe.vae.config.z_dim, height, width, frames, torch.float32, torch.device("cpu"), generator
        )


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("variant", ["i2v", "i2v-a14b"])
def test_the_condition_is_the_pipelines(
    variant: str, shape: tuple[int, int, int], tiny_bases: Callable[..., Path], tiny_family: Open
) -> None:
    """Mask and latents of [first frame, then grey pixels]: encoded grey is not zero latents."""
    family, clip = tiny_family("wan", variant=variant), a_clip(*shape)
    pipe = pipeline_of(tiny_bases("wan", variant))
    _, wanted = theirs(pipe, first_frame(clip), shape)
    extras = family.encode_video(clip).extras
    torch.testing.assert_close(extras["image"], wanted[0], rtol=0, atol=1e-5)
    assert extras["image"][:4, 0].eq(1).all()
    assert extras["image"][:4, 1:].eq(0).all()
    if shape[0] > 1:
        assert extras["image"][4:, 1:].abs().max() > 1e-3, "grey frames are encoded, not left out"
    if variant == "i2v":
        with torch.no_grad():
            states = pipe.encode_image(first_frame(clip), torch.device("cpu"))[0]
        torch.testing.assert_close(extras["clip"], states, rtol=0, atol=1e-5)
    else:
        assert set(extras) == {"image"}, "2.2 looks at the image through its VAE alone"


def test_only_the_first_frame_is_told(tiny_family: Open) -> None:
    family, clip = tiny_family("wan", variant="i2v"), a_clip(9, 32, 32)
    other = clip.clone()
    other[:, 1:] = 0.5
    for name, value in family.encode_video(clip).extras.items():
        assert torch.equal(value, family.encode_video(other).extras[name])
        assert not torch.equal(value, family.encode_video(clip.flip(1)).extras[name])


def recorded(pipe: WanImageToVideoPipeline) -> list[dict[str, torch.Tensor]]:
    """Every call of the pipeline's transformer."""
    calls: list[dict[str, torch.Tensor]] = []

    def keep(module: Any, words: Any, named: dict[str, Any], answer: Any) -> None:
        found = {name: value for name, value in (named | {"answer": answer[0]}).items() if torch.is_tensor(value)}
        calls.append({name: value.clone() for name, value in found.items()})

    pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    return calls


def batch_like(family: Any, clip: torch.Tensor, caption: str, given: bool) -> Batch:
    moments = family.encode_video(clip)
    x0 = moments.mean[None]
    clean = torch.zeros(1, 1, x0.shape[2], 1, 1, dtype=torch.bool)
    clean[:, :, 0] = given
    text = family.encode_text([caption])[0]
    return Batch(
        x0, clean, torch.zeros_like(clean), (~clean).float(), torch.ones(1), torch.zeros(1, dtype=torch.bool),
        family.condition([text | moments.extras]), (caption,), ("w",), torch.ones(1), given,
    )  # fmt: skip


def test_the_first_latent_frame_is_that_of_the_image_alone(tiny_bases: Callable[..., Path], tiny_family: Open) -> None:
    """The VAE is causal: what a preview is given of a cached clip is what the pipeline makes of its first picture."""
    family, clip = tiny_family("wan", variant="ti2v"), a_clip(9, 64, 64)
    pipe = pipeline_of(tiny_bases("wan", "ti2v"))
    _, wanted, _ = theirs(pipe, first_frame(clip), (9, 64, 64))
    torch.testing.assert_close(family.encode_video(clip).mean[:, :1], wanted[0], rtol=0, atol=1e-5)


def test_one_timestep_a_sample_is_one_a_token(tiny_family: Open) -> None:
    """From text TI2V's pipeline tells every token the same; one a sample, as we train then, is the same number."""
    family = tiny_family("wan", variant="ti2v")
    batch = batch_like(family, a_clip(9, 64, 64), "a", given=False)
    net, x_t, t = family.denoiser(), torch.randn_like(batch.x0), torch.tensor([0.37])
    told: list[int] = []
    net.register_forward_hook(lambda m, w, named, out: told.append(named["timestep"].ndim), with_kwargs=True)
    from dataclasses import replace

    with torch.no_grad():
        one = family.predict(net, x_t, t, batch)
        each = family.predict(net, x_t, t, replace(batch, any_given=True))
    assert told == [1, 2]
    torch.testing.assert_close(one, each, rtol=0, atol=3e-6)


@pytest.mark.parametrize("variant", ["i2v", "i2v-a14b", "ti2v"])
def test_our_frames_are_the_pipelines_from_the_same_picture(
    variant: str, tiny_bases: Callable[..., Path], tiny_family: Open, tmp_path: Path
) -> None:
    """Two prompts with a picture each, a LoRA for each expert: as a person gets them who loads the files."""
    family, shape = tiny_family("wan", variant=variant), ClipShape(5, 64, 64, 16.0)
    clips = [a_clip(5, 64, 64), a_clip(5, 64, 64).flip(1, 3)]
    pipe = pipeline_of(tiny_bases("wan", variant))
    nets = {}
    for expert in family.spec.experts:
        nets[expert.name] = net = family.denoiser(expert.name)
        state = add_lora(net, family.spec, Lora(rank=4, targets="linear"), seed=0)
        for name, parameter in state.items():
            if "lora_B" in name:
                parameter.data.normal_(std=0.5, generator=torch.Generator().manual_seed(len(name) + len(nets)))
        file = tmp_path / f"lora{family.spec.export_suffix(expert.name)}.safetensors"
        export_lora(family, "diffusers", state, 1.0, file, {}, expert.name)
        pipe.load_lora_weights(str(file), load_into_transformer_2=expert.name == "low")
    captions = ["a zorble", "b"]
    states = dict(zip([*captions, ""], family.encode_text([*captions, ""]), strict=True))
    settings = SampleSettings(shape, 4, 3.0, guidance_2=2.0 if len(nets) > 1 else None)
    told = [family.encode_video(clip) for clip in clips]
    drawn = draw(family, nets, settings, states.__getitem__, captions, [7, 8], batch=2, told=told)
    for caption, clip, seed, latents in zip(captions, clips, (7, 8), drawn, strict=True):
        words = {"guidance_scale_2": 2.0} if len(nets) > 1 else {}
        frames = pipe(
            first_frame(clip), caption, negative_prompt="", height=64, width=64, num_frames=5, num_inference_steps=4,
            guidance_scale=3.0, generator=torch.Generator().manual_seed(seed), output_type="pt", **words,
        ).frames[0]  # fmt: skip
        wanted = torch.as_tensor(frames).permute(1, 0, 2, 3) * 2 - 1
        torch.testing.assert_close(family.decode(latents), wanted, rtol=0, atol=1e-4)
    assert not torch.allclose(drawn[0], drawn[1])


def test_the_images_projections_may_be_trained_by_name(tiny_family: Open, tmp_path: Path) -> None:
    """Not by the named sets; as patterns they are exported and read back, in both layouts."""
    family = tiny_family("wan", variant="i2v")
    targets = ["attn2.add_k_proj", "attn2.add_v_proj", "attn2.to_k", "attn2.to_v"]
    state = add_lora(family.denoiser(), family.spec, Lora(rank=2, targets=targets), seed=0)
    for parameter in state.values():
        parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    for format in family.key_maps():
        done = export_lora(family, format, state, 1.0, tmp_path / f"{format}.safetensors", {})
        assert (done.modules, done.max_error <= 1e-6) == (8, True)


def test_a_sample_that_is_not_told_its_frame_has_zeros(tiny_family: Open) -> None:
    """Its mask too: nothing says that a frame is given."""
    family = tiny_family("wan", variant="i2v")
    extras = {name: value * False for name, value in family.encode_video(a_clip(5, 32, 32)).extras.items()}
    text = family.encode_text(["a"])[0]
    cond = family.condition([text | extras])
    assert all(value.eq(0).all() for value in cond.extras.values())
