"""A clip's look as vectors, to compare clips by: a heuristic that needs no download, or an encoder by transformers.

A frame becomes a unit vector. A clip that may have been copied is looked at in several views (whole, and cropped in
several places), since a copy may show a part of it; a clip that is held against it is looked at as it is and mirrored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from videotune.errors import VideotuneError
from videotune.files import digest
from videotune.models.pretrained import pretrained

HEURISTIC = "edges-1"
"""Name of the default: a heuristic of edges, light and colour by place. Another number is another measure."""

SIDE = 48
"""Rows and columns of the picture that the heuristic reads, whatever the frame's aspect."""

CELLS = 8
"""Rows and columns of places."""

TURNS = 8
"""Directions of edges that are told apart, dark to light: a mirrored picture is another one."""

PARTS = (1.0, 0.5, 0.35)
"""Weights of edges, of light and of colour."""

View = tuple[float, float, float]
"""A square of the frame's own aspect: (top, left, side), all in shares of the frame."""

WHOLE: View = (0.0, 0.0, 1.0)


def _crops() -> tuple[View, ...]:
    """The whole frame, 90 % of its sides in the middle, and 80 % of them in 9 places."""
    nine = [(y * 0.1, x * 0.1) for y in range(3) for x in range(3)]
    return (WHOLE, (0.05, 0.05, 0.9), *((top, left, 0.8) for top, left in nine))


@dataclass(frozen=True)
class Embedding:
    """How frames become vectors.

    ``of_frames`` takes floats (N, 3, H, W) in [0, 1] and gives unit vectors (N, D); ``views`` are those in which a clip
    that may have been copied is kept. Vectors of embeddings with different names do not compare.
    """

    name: str
    of_frames: Callable[[Tensor], Tensor]
    views: tuple[View, ...] = (WHOLE,)

    @property
    def heuristic(self) -> bool:
        """Whether it is the default, which nobody has trained."""
        return self.name == HEURISTIC


def default_embedding() -> Embedding:
    """The heuristic: directions of edges, light and colour in 8 × 8 places; robust to crops, re-encoding and gain."""
    return Embedding(HEURISTIC, edges, _crops())


def edges(pictures: Tensor) -> Tensor:
    """Pictures (N, 3, H, W) in [0, 1] -> unit vectors (N, 704): see ``default_embedding``.

    A picture without any edge, light or colour, a black one, would have length 0: all such are one unit vector.
    """
    small = functional.interpolate(pictures, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
    red, green, blue = small.unbind(1)
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    padded = functional.pad(grey[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    across, down = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2], padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    root = (across.square() + down.square() + 1e-12) ** -0.25  # a strong edge counts as its square root
    angles = (torch.arange(TURNS) * (2 * torch.pi / TURNS))[:, None, None]
    turned = ((across * root)[:, None] * angles.cos() + (down * root)[:, None] * angles.sin()).clamp_min(0)
    turned = _by_place(turned)
    turned = turned - turned.mean(1, keepdim=True)  # what all directions have in common says little
    length = turned.norm(dim=1, keepdim=True)
    turned = turned / (length + 0.5 * length.mean((2, 3), keepdim=True) + 1e-4)
    light, colour = _by_place(grey[:, None]), _by_place(torch.stack([red - grey, blue - grey], 1))
    parts = [turned, light - light.mean((2, 3), keepdim=True), colour]
    whole = unit(torch.cat([weight * unit(part.flatten(1)) for weight, part in zip(PARTS, parts, strict=True)], 1))
    return torch.where(whole.norm(dim=1, keepdim=True) > 0.5, whole, whole.shape[1] ** -0.5)


def _by_place(planes: Tensor) -> Tensor:
    """Planes (N, C, 48, 48) -> means over 8 × 8 places that overlap by half, so that a small shift changes little."""
    side = SIDE // CELLS
    return functional.avg_pool2d(planes, 2 * side, side, side // 2, count_include_pad=False)


def unit(vectors: Tensor) -> Tensor:
    """Vectors (N, D) at length 1; those of length 0 stay."""
    return vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-6)


def to_pictures(frames: NDArray[Any]) -> Tensor:
    """uint8 (T, H, W, 3) -> floats (T, 3, H, W) in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 255


def cut_out(pictures: Tensor, view: View) -> Tensor:
    """The part of pictures (N, 3, H, W) that a view shows."""
    top, left, side = view
    height, width = pictures.shape[2:]
    y, x = round(top * height), round(left * width)
    return pictures[:, :, y : y + round(side * height), x : x + round(side * width)]


def in_views(embedding: Embedding, frames: NDArray[Any]) -> Tensor:
    """uint8 frames (T, H, W, 3) of a clip that may be copied -> (views, T, D)."""
    pictures = to_pictures(frames)
    return torch.stack([embedding.of_frames(cut_out(pictures, view)) for view in embedding.views])


def both_ways(embedding: Embedding, frames: NDArray[Any]) -> Tensor:
    """uint8 frames (T, H, W, 3) of a clip that may be a copy -> (2, T, D): as it is, and mirrored."""
    pictures = to_pictures(frames)
    return torch.stack([embedding.of_frames(pictures), embedding.of_frames(pictures.flip(3))])


def open_encoder(place: str) -> Embedding:
    """A person's own image encoder, a folder or a Hub id that transformers' AutoModel reads (CLIP, SigLIP, DINOv2 …).

    Its image features, else its pooled state, else the mean of its last states. Raises VideotuneError where transformers
    cannot read it, or it gives none of these for an image.
    """
    from transformers import AutoImageProcessor, AutoModel

    try:
        processor, model = pretrained(AutoImageProcessor, place), pretrained(AutoModel, place)
    except VideotuneError as error:
        raise VideotuneError(
            f"sample_metrics.encoder: transformers finds no image encoder in {place!r} ({error}). Give a folder "
            "with config.json, weights and preprocessor_config.json, or a Hub id; null: the heuristic, which needs none"
        ) from error
    model = model.eval()

    def of_frames(pictures: Tensor) -> Tensor:
        found = []
        with torch.no_grad():
            for part in pictures.split(32):
                inputs = processor(images=list(part), return_tensors="pt", do_rescale=False)["pixel_values"]
                found.append(unit(_features(model, inputs, place).float().cpu()))
        return torch.cat(found)

    name = digest([place.rstrip("/").rpartition("/")[2], weights_name(model)])[:8]
    return Embedding(f"{model.config.model_type}-{name}", of_frames)


def _features(model: Any, pixels: Tensor, place: str) -> Tensor:
    """Images (N, 3, H, W) as the model reads them -> one vector each."""
    if hasattr(model, "get_image_features"):
        answer = model.get_image_features(pixel_values=pixels)
        if isinstance(answer, Tensor):
            return answer
    else:
        answer = model(pixel_values=pixels)
    pooled, last = getattr(answer, "pooler_output", None), getattr(answer, "last_hidden_state", None)
    if pooled is not None:
        return pooled.flatten(1)
    if last is None:
        raise VideotuneError(
            f"sample_metrics.encoder: {place!r} gives no features of an image; an image encoder is needed"
        )
    return last.flatten(2).mean(2) if last.ndim == 4 else last.mean(1)


def weights_name(model: Any) -> str:
    """A few numbers of the weights: two checkpoints of one kind are two embeddings."""
    return digest([round(float(p.detach().float().sum()), 3) for p in list(model.parameters())[:8]])[:8]
