"""Each kind of checkpoint against diffusers' own pipeline: text, latents, and the
frames that exported files give there.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.families import (
    GREY,
    KINDS,
    clip_of,
    denoisers,
    edit_json,
    noisy_lora,
    open_family,
    shapes_of,
    shown_of,
    small_shape,
)
from tests.support.oracles import unpacked
from videotune.exporter.adapter_export import export_lora
from videotune.models.base import DiffusersModel
from videotune.models.registry import find, names
from videotune.sampling.pipeline import (
    SampleSettings,
    decode,
    draw,
    file_name,
    to_frames,
)
from videotune.types import ClipShape, SampleRequest

CAPTIONS = (
    "a red circle moves left",
    'a sign that says "zorble" and “zörble”',
    "",
    "Ünïcode — {braces} &amp; 你好",
    "long " * 600,
)
FED = {
    "ltx_video": ("text", "mask"),
    "hunyuan_video": ("text", "pooled", "mask"),
    "hidream": ("text", "", "llama", "", "pooled"),
    "ltx2": ("text", "mask"),
    "hunyuan_video15": ("text", "mask", "glyph", "glyph_mask"),
    "kandinsky5": ("text", "pooled", ""),
}
"""What a pipeline's ``encode_prompt`` returns, by our names; of other families the text
comes first.
"""
WEIGHTS = "diffusion_pytorch_model.safetensors"
CERTAIN = {
    "cogvideox": ("encoder.conv_out.conv.bias", slice(4, None), -60.0),
    "ltx_video": ("encoder.conv_out.conv.bias", slice(-1, None), -1e4),
    "kandinsky5": ("quant_conv.bias", slice(4, None), -60.0),
}
"""Biases of the encoder's last layer that leave latents next to no variance, so that a
pipeline's draw is the mean.
"""


def pipeline_of(folder: Path, cls: Any = diffusers.DiffusionPipeline) -> Any:
    pipe = cls.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@KINDS
def test_text_is_what_the_pipeline_feeds(
    name: str, variant: str, tiny_bases: Callable[..., Path]
) -> None:
    """To the bit, with states of padding where the network sees them; a mask counts the
    tokens that we count.
    """
    family, pipe = (
        open_family(name, tiny_bases(name, variant)),
        pipeline_of(tiny_bases(name, variant)),
    )
    words: dict[str, Any] = {
        "max_sequence_length": family.spec.text_tokens,
        "do_classifier_free_guidance": False,
    }
    asked = {
        key: value
        for key, value in words.items()
        if key in signature(pipe.encode_prompt).parameters
    }
    for caption in CAPTIONS:
        ours = family.collate_states(family.encode_text([caption]))
        with torch.no_grad():  # attention takes another kernel under grad
            theirs = dict(
                zip(
                    FED.get(name, ("text",)),
                    pipe.encode_prompt(caption, **asked),
                    strict=False,
                )
            )
        if name == "ltx2":
            with torch.no_grad():
                text, *_ = pipe.connectors(
                    theirs["text"],
                    theirs.pop("mask"),
                    padding_side=pipe.tokenizer.padding_side,
                )
            theirs["text"] = text
        shown = theirs["mask"].bool() if "mask" in theirs else None
        # what its mask hides we keep as zeros
        seen = shown if name.startswith("hunyuan_video") else ...
        assert ours.text.shape == theirs["text"].shape
        assert torch.equal(ours.text[seen], theirs["text"][seen])
        assert (ours.text_mask is None) == (shown is None)
        if shown is not None:
            assert torch.equal(ours.text_mask, shown)
            assert shown.sum() == min(
                family.text_length(caption), family.spec.text_tokens
            )
        if "glyph" in theirs:
            glyph_mask = theirs["glyph_mask"].bool()
            assert torch.equal(ours.extras["glyph_mask"], glyph_mask)
            assert torch.equal(
                ours.extras["glyph"][glyph_mask], theirs["glyph"][glyph_mask]
            )
        for extra in {"llama", "pooled"} & set(theirs):
            assert torch.equal(
                ours.extras[extra],
                theirs[extra].transpose(0, 1) if extra == "llama" else theirs[extra],
            )


@KINDS
def test_latents_are_those_of_the_vae(
    name: str, variant: str, tiny_bases: Callable[..., Path]
) -> None:
    """What the VAE is given to decode is what it made of the clip, mean and deviation,
    also of a long one and of a picture that diffusers would cut in tiles if told to;
    and a clip comes back with its frames and size.
    """
    family, folder = (
        open_family(name, tiny_bases(name, variant)),
        tiny_bases(name, variant),
    )
    vae = getattr(diffusers, family.vae_class).from_pretrained(
        folder / "vae", torch_dtype=torch.float32
    )
    # HunyuanVideo's alone would take 17 frames at a time, unlike its authors' class.
    vae.use_framewise_encoding = False
    rules, raw_latents = (
        family.spec.rules,
        partial(DiffusersModel.raw_latents, family),
    )  # LTX adds noise to those
    side = 2 * rules.side_multiple
    large = ClipShape(rules.frame_rest, side, 384, rules.fps)
    long = ClipShape(
        5 * rules.frame_step + rules.frame_rest, side, side, rules.fps
    )  # more than a VAE takes at a time
    more = (
        []
        if rules.size or rules.most_area
        else [long]
        if rules.most_side
        else [long, large]
    )
    for shape in [*shapes_of(family), *more]:
        clip = clip_of(family, shape, 0)
        moments = family.encode_video(clip)
        with torch.no_grad():
            dist = vae.encode(
                clip[None] if rules.most_frames != 1 else clip.transpose(0, 1)
            ).latent_dist
        mean, std = (
            x[0] if rules.most_frames != 1 else x.transpose(0, 1)
            for x in (dist.mean, dist.std)
        )
        assert moments.mean.shape == (
            family.spec.latent_channels,
            *rules.latent_size(shape),
        )
        torch.testing.assert_close(
            raw_latents(moments.mean), mean, rtol=1e-4, atol=1e-5
        )
        if moments.logvar is not None:
            far = raw_latents(moments.mean + (0.5 * moments.logvar).exp())
            torch.testing.assert_close(far - mean, std, rtol=1e-4, atol=1e-5)
        pixels = family.decode(moments.mean)
        assert pixels.shape == clip.shape
        assert pixels.abs().max() <= 1


def base_of(
    name: str, variant: str, tiny_bases: Callable[..., Path], folder: Path
) -> Path:
    """A copy of a checkpoint whose latents are certain; of HunyuanVideo one without an
    embedded guidance, of CogVideoX one with the other scheduler that its checkpoints
    come with.
    """
    shutil.copytree(
        tiny_bases(name, None if variant in ("undistilled", "dpm") else variant), folder
    )
    if name in CERTAIN:
        state, (key, rows, bias) = load_file(folder / "vae" / WEIGHTS), CERTAIN[name]
        state[key][rows] = bias
        save_file(state, folder / "vae" / WEIGHTS, metadata={"format": "pt"})
    if variant == "undistilled":
        net = diffusers.HunyuanVideoTransformer3DModel
        config = net.load_config(folder / "transformer") | {"guidance_embeds": False}
        net.from_config(config).save_pretrained(folder / "transformer")
    if variant == "dpm":
        edit_json(
            folder / "model_index.json",
            scheduler=["diffusers", "CogVideoXDPMScheduler"],
        )
    return folder


def reader_of(family: Any, image: bool) -> Any:
    """The pipeline by which a user samples from the checkpoint, from text or from an
    image.
    """
    if image and family.spec.name == "wan":
        return diffusers.WanImageToVideoPipeline
    if image and family.spec.name == "ltx2":
        return diffusers.LTX2ConditionPipeline
    if image and family.spec.name == "kandinsky5":
        return diffusers.Kandinsky5I2VPipeline
    if image and family.spec.name == "ltx_video" and not family.is_newer:
        return diffusers.LTXImageToVideoPipeline
    return family.pipeline_class()


def picture_of(frame: torch.Tensor) -> Image.Image:
    """A frame (3,H,W) in [-1, 1] as an image."""
    pixels = ((frame + 1) * 127.5).round().byte().permute(1, 2, 0)
    return Image.fromarray(pixels.numpy())


def theirs_of(
    pipe: Any, family: Any, request: SampleRequest, caption: str, seed: int, clip: Any
) -> torch.Tensor:
    """What the pipeline gives of one caption: pixels (3,T,H,W), of LTX, whose decoder
    draws, latents; ``clip`` is told.
    """
    shape, generator = request.shape, torch.Generator().manual_seed(seed)
    words: dict[str, Any] = {
        "negative_prompt": "",
        "num_frames": shape.frames,
        "frame_rate": shape.fps,
        "guidance_scale": request.guidance,
        "guidance_scale_2": request.guidance_2,
    }
    if family.spec.name == "hunyuan_video" and not family.spec.guidance_embedded:
        words |= {"guidance_scale": 1.0, "true_cfg_scale": request.guidance}
    words = {
        key: value
        for key, value in words.items()
        if key in signature(pipe.__call__).parameters
    }
    if clip is not None:
        words["image"] = picture_of(clip[:, 0])
        if "last_frame" in family.spec.cached_with_latents:
            words["last_image"] = picture_of(clip[:, -1])
        if family.spec.control_channels:
            del words["image"]
            white = torch.full_like(clip[:, 0], -1)
            white[:, white.shape[1] // 2 :] = 1
            shown = clip.where(white[:, None] < 0, torch.tensor(GREY / 127.5 - 1))
            words["video"] = [picture_of(frame) for frame in shown.unbind(1)]
            words["mask"] = [picture_of(white)] * clip.shape[1]
    if len(family.spec.experts) == 1:
        words.pop("guidance_scale_2", None)
    if family.spec.name == "hunyuan_video15":
        pipe.guider = pipe.guider.new(guidance_scale=request.guidance)
        size = (shape.height, shape.width)  # it chooses one by the image
        pipe.video_processor.calculate_default_height_width = lambda **_: size
    words |= family.spec.pipeline_arguments
    if request.guidance <= 1:
        words |= family.spec.unguided_arguments
    if family.spec.name == "ltx2" and "image" in words:
        words["conditions"] = [LTX2VideoCondition(words.pop("image"), crf=0)]
    if (
        family.spec.name == "hidream"
    ):  # it samples each request at one area, and Dev draws without a seed
        pipe.default_sample_size = shape.height // 8
        if "generator" in signature(pipe.scheduler.step).parameters:
            pipe.scheduler.step = partial(
                type(pipe.scheduler).step, pipe.scheduler, generator=generator
            )
    ltx = family.spec.name == "ltx_video"
    if "height" in signature(pipe.__call__).parameters:
        words |= {"height": shape.height, "width": shape.width}
    found = pipe(
        prompt=caption, num_inference_steps=request.steps, generator=generator,
        output_type="latent" if ltx else "pt", **words,
    )  # fmt: skip
    if ltx:
        size = family.spec.rules.latent_size(shape)
        return (
            found.frames[0]
            if family.is_newer
            else unpacked(family.spec, found.frames, size)[0]
        )
    frames = torch.as_tensor(found.images if "images" in found else found.frames[0])
    return frames.permute(1, 0, 2, 3) * 2 - 1


def load_file_of(
    pipe: Any, family: Any, form: str, path: Path, words: dict[str, Any]
) -> None:
    """Load a LoRA file as its user does; ComfyUI's names, which the transformer does not
    know, are converted by diffusers' reader.
    """
    if family.load_lora == "pipe.load_lora_weights":
        pipe.load_lora_weights(str(path), **words)
        return
    source: Any = str(path)
    if form == "comfyui":
        source = family.lora_reader().lora_state_dict(source)
    pipe.transformer.load_lora_adapter(source)


def unload(pipe: Any, family: Any) -> None:
    """Take the LoRA off again."""
    if family.load_lora == "pipe.load_lora_weights":
        pipe.unload_lora_weights()
    else:
        pipe.transformer.unload_lora()


CASES = [(name, variant) for name in names() for variant in find(name).variants]
CASES += [("hunyuan_video", "undistilled"), ("cogvideox", "dpm")]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize(("name", "variant"), CASES, ids=lambda word: word)
def test_our_frames_are_those_of_the_pipeline_with_the_exported_files(
    name: str,
    variant: str,
    guidance: float,
    tiny_bases: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """What previews show is what a user gets who loads the files with plain diffusers:
    the same seed gives the same frames.

    Two captions at once, each with an image of its own where the checkpoint takes one,
    an adapter for each expert, in every format that diffusers reads. The first caption
    shows that a further format has the same numbers.
    """
    family = open_family(name, base_of(name, variant, tiny_bases, tmp_path / "base"))
    spec, shape = family.spec, small_shape(family)
    if spec.rules.size is None and spec.rules.most_frames != 1:
        shape = replace(
            shape,
            width=3 * shape.width // 2,
            fps=30.0 if name == "ltx_video" else shape.fps,
        )
    if spec.encodes_first_frame:
        shape = replace(shape, frames=21)  # enough that the pipeline repaints some
    nets, files = denoisers(family), dict[tuple[str, str], Path]()
    for number, (expert, net) in enumerate(nets.items()):
        state = noisy_lora(family, net, seed=number)
        for form in family.lora_formats():
            path = tmp_path / f"{form}{spec.export_suffix(expert)}.safetensors"
            done = export_lora(family, form, state, 2.0, path, {"step": 1}, expert)
            assert done.max_error <= 1e-6
            assert done.modules == len(state) // 2
            if done.reader.startswith("diffusers"):
                files[form, expert] = done.path
    assert len(set(files.values())) == len(files), "each expert has a file of its own"
    captions, seeds, clips = (
        ["a zorble", "b"],
        (7, 8),
        [clip_of(family, shape, seed) for seed in (0, 1)],
    )
    has_images = {"none": (False,), "concat": (True,), "replace": (False, True)}
    if spec.control_channels:
        has_images["none"] = (True,)
    for image in has_images[spec.image_conditioning]:
        moments = [family.encode_video(clip) for clip in clips]
        told = [
            shown_of(family, clip, one)
            for clip, one in zip(clips, moments, strict=True)
        ]
        first = (
            torch.stack(
                [one.mean[:, :1] if one.start is None else one.start for one in moments]
            )
            if image and spec.image_conditioning == "replace"
            else None
        )
        conditioning, unconditional = (
            family.collate_states(
                [
                    text | one
                    for text, one in zip(family.encode_text(texts), told, strict=True)
                ]
            )
            for texts in (captions, ["", ""])
        )
        second = 2.0 if len(nets) > 1 and guidance > 1 else None
        request = SampleRequest(
            shape,
            4,
            guidance,
            seeds,
            guidance_2=second,
            first=first,
            guidance_rescale=spec.sample_rescale,
        )
        random_state = torch.random.get_rng_state()
        drawn = family.sample(
            nets, conditioning, None if guidance == 1 else unconditional, request
        )
        assert torch.equal(random_state, torch.random.get_rng_state()), (
            "training draws as it would have"
        )
        ours = (
            drawn
            if name == "ltx_video"
            else torch.stack([family.decode(latents) for latents in drawn])
        )
        pipe = pipeline_of(family.folder, reader_of(family, image))
        theirs = partial(theirs_of, pipe, family, request)
        later = slice(
            1 if image and name == "ltx_video" else 0, None
        )  # LTX's pipeline leaves noise on the image
        without = theirs(captions[0], seeds[0], clips[0] if image else None)
        assert (ours[0] - without)[:, later].abs().max() > 1e-3, (
            "the adapter must change what is sampled"
        )
        for form in sorted({form for form, _ in files}):
            for expert in nets:
                words = {"load_into_transformer_2": True} if expert == "low" else {}
                load_file_of(pipe, family, form, files[form, expert], words)
            samples = list(zip(captions, seeds, clips, ours, strict=True))
            is_first_form = form == min(form for form, _ in files)
            for caption, seed, clip, mine in samples if is_first_form else samples[:1]:
                wanted = theirs(caption, seed, clip if image else None)
                torch.testing.assert_close(
                    mine[:, later], wanted[:, later], rtol=1e-4, atol=1e-4
                )
            unload(pipe, family)
        assert not torch.allclose(ours[0], ours[1], atol=1e-3)


def test_pixels_are_rounded_as_diffusers_does() -> None:
    from diffusers.video_processor import VideoProcessor

    pixels = (
        torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * 2.4 - 1.2
    )
    theirs = VideoProcessor().postprocess_video(pixels[None], output_type="pil")[0]
    ours = to_frames(pixels)
    assert all(
        np.array_equal(ours[i], np.asarray(image)) for i, image in enumerate(theirs)
    )


def test_drawing_moves_nothing_of_the_training(tiny_family: Callable[..., Any]) -> None:
    family = tiny_family("wan")
    net = family.denoiser()
    net.train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.random.get_rng_state()
    states = dict(zip(["a", ""], family.encode_text(["a", ""]), strict=True))
    family.free("text_encoder")
    settings = SampleSettings(ClipShape(5, 32, 32, 16.0), 2, 3.0)
    latents = draw(
        family, {"transformer": net}, settings, states.__getitem__, [("a", 1)]
    )
    frames = decode(family, latents)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert net.training
    assert all(
        torch.equal(before[name], value) for name, value in net.state_dict().items()
    )
    assert not family._loaded, "the VAE is freed"
    assert frames[0].shape == (5, 32, 32, 3)


def test_file_names_say_step_prompt_and_seed() -> None:
    names = {
        file_name(5, "a", 1),
        file_name(6, "a", 1),
        file_name(5, "b", 1),
        file_name(5, "a", 2),
    }
    assert len(names) == 4
    assert file_name(250, "a", 42).startswith("step-000250-")
    assert file_name(250, "a", 42).endswith("-seed42.mp4")
