"""The last stages: the trained parts become a checkpoint of package size, and what it
can do is measured.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from toymaking.autoencoder import held_out_clips, psnr, rebuilt
from toymaking.recipe import Recipe

from videotune.files import write_whole
from videotune.models.base_model import place
from videotune.toy.dataset import CONCEPT
from videotune.toy.detection import detect
from videotune.toy.shapes import HELD_OUT, TEMPLATES, Look, caption

GUIDANCE = 2.0
STEPS = 20
AT_ONCE = 12
"""Samples of one call: few enough for a small machine."""


def assemble(trained: Path, folder: Path) -> Path:
    """Store a trained checkpoint in float16, without the names of the folders that it
    was made in.
    """
    if folder.is_dir():
        return folder
    aside = folder.with_name(f"{folder.name}-unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    pipeline: Any = WanPipeline.from_pretrained(trained, dtype=torch.float32)
    for part in (pipeline.transformer, pipeline.vae, pipeline.text_encoder):
        for parameter in (
            part.parameters()
        ):  # .half() alone would leave those that diffusers keeps in float32
            parameter.data = parameter.data.half()
    pipeline.save_pretrained(aside)
    for path in aside.rglob("*.json"):
        value = json.loads(path.read_text())
        if (
            path.parent.name != "tokenizer"
            and value.pop("_name_or_path", None) is not None
        ):
            path.write_text(json.dumps(value, indent=2) + "\n")
    aside.rename(folder)
    return folder


def size(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def score(
    named: str, recipe: Recipe
) -> tuple[dict[str, Any], dict[str, list[NDArray[Any]]]]:
    """Figures of a checkpoint, a folder or asset:toy, and the pictures that show them.

    A round draws each of the held-out looks once, each with a caption template and a
    noise of its own, by diffusers' own pipeline. Shares are of all samples; dB are
    means over clips that no stage was trained on.
    """
    folder = place(named).folder
    pipeline: Any = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    looks = HELD_OUT[: recipe.held_out] * recipe.rounds
    captions = [
        caption(colour, shape, direction, index // recipe.held_out % len(TEMPLATES))
        for index, (colour, shape, direction) in enumerate(looks)
    ]
    drawn = sample(pipeline, captions, list(range(1000, 1000 + len(looks))))
    facts: dict[str, Any] = {
        "n": len(looks),
        "guidance": GUIDANCE,
        "steps": STEPS,
    } | shares(drawn, looks)
    decibels = {}
    pictures = {}
    for part in ("base", "concept", "striped"):
        shown = held_out_clips(part, recipe.scored_clips)
        back = rebuilt(pipeline.vae, shown)
        decibels[part] = round(psnr(shown, back), 2)
        pairs = zip(to_bytes(shown), to_bytes(back), strict=True)
        pictures[part] = [clip for pair in pairs for clip in pair]
    seen = [detect(clip) for clip in pictures["concept"][1::2]]
    recognised = sum((one.colour, one.shape) == CONCEPT for one in seen) / len(seen)
    facts |= {
        "psnr": decibels | {"clips": recipe.scored_clips},
        "concept_recognised": round(recognised, 3),
    }
    return facts | {"bytes": size(folder)}, {"samples": drawn, **pictures}


def sample(
    pipeline: Any, captions: Sequence[str], seeds: Sequence[int]
) -> list[NDArray[Any]]:
    """uint8 frames (T,H,W,3) of each caption with its seed."""
    out = []
    for first in range(0, len(captions), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        frames = pipeline(
            prompt=list(captions[part]),
            height=64,
            width=64,
            num_frames=17,
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds[part]],
            output_type="np",
        ).frames
        out += list((frames * 255).round().astype(np.uint8))
    return out


def shares(clips: Sequence[NDArray[Any]], looks: Sequence[Look]) -> dict[str, float]:
    """The share of clips that show the colour, the shape, the direction that was asked
    for, and all three.
    """
    seen = [detect(clip) for clip in clips]
    right = np.array(
        [[one.colour, one.shape, one.direction] for one in seen]
    ) == np.array(looks)
    names = ("colour", "shape", "direction")
    parts = {
        name: round(float(right[:, index].mean()), 3)
        for index, name in enumerate(names)
    }
    return parts | {
        "all": round(float(right.all(1).mean()), 3),
        "iou": round(float(np.mean([s.iou for s in seen])), 3),
    }


def to_bytes(clips: torch.Tensor) -> list[NDArray[Any]]:
    """(B,3,T,H,W) in [-1,1] -> uint8 (T,H,W,3) each."""
    frames = ((clips + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 4, 1)
    return list(frames.numpy())


def sheet(
    path: Path, rows: Sequence[tuple[str, NDArray[Any]]], columns: int = 2
) -> None:
    """A picture of clips, five frames each, with words beside."""
    height, width = rows[0][1].shape[1:3]
    words = 160
    wide = 160 + 5 * (width + 2) + 8
    high = height + 2
    picture = Image.new(
        "RGB", (columns * wide, -(-len(rows) // columns) * high), "white"
    )
    pen = ImageDraw.Draw(picture)
    for index, (text, clip) in enumerate(rows):
        left = index % columns * wide
        top = index // columns * high
        pen.text((left + 4, top + height // 2 - 6), text, fill="black")
        for column, frame in enumerate(
            np.linspace(0, len(clip) - 1, 5).round().astype(int)
        ):
            picture.paste(
                Image.fromarray(clip[frame]), (left + words + column * (width + 2), top)
            )
    write_whole(
        path,
        lambda aside: picture.save(aside, format="PNG", optimize=True),
        durable=False,
    )
