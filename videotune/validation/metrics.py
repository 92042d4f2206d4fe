"""What samples are compared by: a clip's look as vectors, how near it comes to others, how many things a set shows, motion.

A frame becomes a unit vector, by a heuristic that needs no download or by an encoder of transformers. A clip that may have
been copied is looked at in several views (whole, and cropped in several places), since a copy may show a part of it; a clip
that is held against it is looked at as it is and mirrored. Similarity is the mean cosine of frames, at its greatest over
views, both ways round and time. How near unrelated clips come differs from one set of clips to another, so no number is a
copy by itself: see ``Baselines``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from videotune.errors import VideotuneError
from videotune.files import digest
from videotune.models.loading import pretrained

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


@dataclass(frozen=True)
class FrameEmbedding:
    """How frames become vectors.

    ``of_frames`` takes floats (N, 3, H, W) in [0, 1] and gives unit vectors (N, D); ``views`` are those in which a clip
    that may have been copied is kept. Vectors of embeddings with different names do not compare.
    """

    name: str
    of_frames: Callable[[Tensor], Tensor]
    views: tuple[View, ...] = (WHOLE,)


def default_embedding() -> FrameEmbedding:
    """The heuristic: directions of edges, light and colour in 8 × 8 places; robust to crops, re-encoding and gain.

    Its views: the whole frame, 90 % of its sides in the middle, and 80 % of them in 9 places.
    """
    nine = [(y * 0.1, x * 0.1, 0.8) for y in range(3) for x in range(3)]
    return FrameEmbedding(HEURISTIC, edges, (WHOLE, (0.05, 0.05, 0.9), *nine))


def edges(pictures: Tensor) -> Tensor:
    """Pictures (N, 3, H, W) in [0, 1] -> unit vectors (N, 704): see ``default_embedding``.

    A picture without any edge, light or colour, a black one, would have length 0: all such are one unit vector.
    """
    red, green, blue = _shrunk(pictures, SIDE).unbind(1)
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    padded = functional.pad(grey[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    across = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]
    down = padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    root = (
        across.square() + down.square() + 1e-12
    ) ** -0.25  # a strong edge counts as its square root
    angles = (torch.arange(TURNS) * (2 * torch.pi / TURNS))[:, None, None]
    turned = (
        (across * root)[:, None] * angles.cos() + (down * root)[:, None] * angles.sin()
    ).clamp_min(0)
    turned = _by_place(turned)
    turned = turned - turned.mean(
        1, keepdim=True
    )  # what all directions have in common says little
    length = turned.norm(dim=1, keepdim=True)
    turned = turned / (length + 0.5 * length.mean((2, 3), keepdim=True) + 1e-4)
    light = _by_place(grey[:, None])
    colour = _by_place(torch.stack([red - grey, blue - grey], 1))
    parts = [turned, light - light.mean((2, 3), keepdim=True), colour]
    whole = unit(
        torch.cat(
            [weight * unit(part.flatten(1)) for weight, part in zip(PARTS, parts, strict=True)],
            1,
        )
    )
    return torch.where(whole.norm(dim=1, keepdim=True) > 0.5, whole, whole.shape[1] ** -0.5)


def _shrunk(pictures: Tensor, side: int) -> Tensor:
    return functional.interpolate(
        pictures, (side, side), mode="bilinear", antialias=True, align_corners=False
    )


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
    y = round(top * height)
    x = round(left * width)
    return pictures[:, :, y : y + round(side * height), x : x + round(side * width)]


def in_views(embedding: FrameEmbedding, frames: NDArray[Any]) -> Tensor:
    """uint8 frames (T, H, W, 3) of a clip that may be copied -> (views, T, D)."""
    pictures = to_pictures(frames)
    return torch.stack(
        [embedding.of_frames(cut_out(pictures, view)) for view in embedding.views]
    )


def both_ways(embedding: FrameEmbedding, frames: NDArray[Any]) -> Tensor:
    """uint8 frames (T, H, W, 3) of a clip that may be a copy -> (2, T, D): as it is, and mirrored."""
    pictures = to_pictures(frames)
    return torch.stack([embedding.of_frames(pictures), embedding.of_frames(pictures.flip(3))])


def open_encoder(place: str) -> FrameEmbedding:
    """A person's own image encoder, a folder or a Hub id that transformers' AutoModel reads (CLIP, SigLIP, DINOv2 …).

    Its image features, else its pooled state, else the mean of its last states. Raises VideotuneError where transformers
    cannot read it, or it gives none of these for an image.
    """
    from transformers import AutoImageProcessor, AutoModel

    try:
        processor = pretrained(AutoImageProcessor, place)
        model = pretrained(AutoModel, place)
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
                inputs = processor(images=list(part), return_tensors="pt", do_rescale=False)[
                    "pixel_values"
                ]
                found.append(unit(_features(model, inputs, place).float().cpu()))
        return torch.cat(found)

    # a few numbers of the weights: two checkpoints of one kind are two embeddings
    weights = digest(
        [round(float(p.detach().float().sum()), 3) for p in list(model.parameters())[:8]]
    )[:8]
    name = digest([place.rstrip("/").rpartition("/")[2], weights])[:8]
    return FrameEmbedding(f"{model.config.model_type}-{name}", of_frames)


def _features(model: Any, pixels: Tensor, place: str) -> Tensor:
    """Images (N, 3, H, W) as the model reads them -> one vector each."""
    if hasattr(model, "get_image_features"):
        answer = model.get_image_features(pixel_values=pixels)
        if isinstance(answer, Tensor):
            return answer
    else:
        answer = model(pixel_values=pixels)
    pooled = getattr(answer, "pooler_output", None)
    last = getattr(answer, "last_hidden_state", None)
    if pooled is not None:
        return pooled.flatten(1)
    if last is None:
        raise VideotuneError(
            f"sample_metrics.encoder: {place!r} gives no features of images; name an image encoder"
        )
    return last.flatten(2).mean(2) if last.ndim == 4 else last.mean(1)


QUANTILE = 0.99
SHARE_OF_THE_WAY = 1 / 4
"""A copy is nearer than 99 % of clips that are none by a quarter of what is missing to sameness: of 40 planted copies the
least similar came to 0.74, of 200 unrelated clips the most similar to 0.64, with the line at 0.72 (research/copies.json)."""


@dataclass(frozen=True)
class Known:
    """A window to compare samples with: its clip, the video that this was cut from, and its ``in_views`` (V, F, D)."""

    clip: str
    source: str
    views: Tensor


@dataclass(frozen=True)
class Nearest:
    """The clip that something comes nearest to, and how near, -1 to 1."""

    clip: str
    similarity: float


class Gallery:
    """Windows side by side, those of equally many frames in one tensor, so that a comparison is one product."""

    def __init__(self, known: Iterable[Known]) -> None:
        by_length: dict[int, list[Known]] = {}
        for one in known:
            by_length.setdefault(one.views.shape[1], []).append(one)
        self._groups = [
            torch.stack([one.views for one in group]) for group in by_length.values()
        ]
        self.known = tuple(one for group in by_length.values() for one in group)

    def nearest(self, seen: Tensor, but: str | None = None) -> Nearest | None:
        """The nearest clip to ``seen``, a clip ``both_ways``; none of the source ``but``. None where there is no other."""
        allowed = torch.tensor([one.source != but for one in self.known])
        if not allowed.any():
            return None
        found = torch.cat([similarities(seen, views) for views in self._groups]).masked_fill(
            ~allowed, -2
        )
        place = int(found.argmax())
        return Nearest(self.known[place].clip, float(found[place]))


def similarities(seen: Tensor, views: Tensor) -> Tensor:
    """How near a clip (2, T, D) comes to each of others (N, V, F, D): (N,), the greatest over both ways, views and starts.

    Frames of both are equally far apart in time. Of a longer clip only the beginning is compared with a shorter one.
    """
    length = views.shape[2]
    cosines = torch.einsum("mtd,nvfd->mnvtf", seen[:, :length], views)
    starts = range(length - cosines.shape[3] + 1)
    means = [cosines.diagonal(start, 3, 4).mean(-1) for start in starts]
    return torch.stack(means).amax((0, 1, 3))


@dataclass(frozen=True)
class Baselines:
    """How near clips come that are no copies of what they are compared with.

    ``held_out``: held-out clips to training clips; ``others``: training clips to those cut from other videos. Either may be
    empty: no clip is held out, all clips are of one video.
    """

    held_out: tuple[float, ...]
    others: tuple[float, ...]

    def line(self, base: Sequence[float] = ()) -> float | None:
        """The similarity above which a sample is a likely copy.

        From the 99th percentile of both baselines a quarter of the way to 1; where both are empty, from the nearest of
        ``base``, the base model's samples. None where there is nothing to compare with.
        """
        pool = [*self.held_out, *self.others]
        if not pool and not base:
            return None
        usual = float(np.quantile(pool, QUANTILE)) if pool else max(base)
        return usual + (1 - usual) * SHARE_OF_THE_WAY

    def to_json(self) -> dict[str, Any]:
        """For each baseline {clips, median, p99}; null where it is empty."""
        return {
            name: _summary(values)
            for name, values in (("held_out", self.held_out), ("others", self.others))
        }


def baselines(
    gallery: Gallery,
    held_out: Mapping[str, Sequence[Tensor]],
    training: Sequence[tuple[str, Tensor]],
) -> Baselines:
    """Both baselines. ``held_out``: ``both_ways`` of held-out clips by source; ``training``: (source, ``both_ways``)."""
    first = [
        gallery.nearest(seen, but=source)
        for source, several in held_out.items()
        for seen in several
    ]
    second = [gallery.nearest(seen, but=source) for source, seen in training]
    return Baselines(
        *(tuple(one.similarity for one in part if one is not None) for part in (first, second))
    )


def _summary(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    middle, high = np.quantile(values, [0.5, QUANTILE])
    return {
        "clips": len(values),
        "median": round(float(middle), 4),
        "p99": round(float(high), 4),
    }


def vendi(vectors: NDArray[np.float64]) -> float:
    """The Vendi score of vectors (n, D), 1 (all the same) to n (nothing in common): an effective number of different ones.

    exp of the entropy of the eigenvalues of K / n, K the cosines (Friedman and Dieng 2023, arXiv 2210.02410), in float64.
    Raises ValueError for no vector, and for one of length 0.
    """
    x = np.asarray(vectors, np.float64)
    lengths = (
        np.linalg.norm(x, axis=1, keepdims=True) if x.ndim == 2 and len(x) else np.zeros(1)
    )
    if not (lengths > 0).all():
        raise ValueError("the Vendi score is of one or more vectors (n, D), none of length 0")
    x = x / lengths
    values = np.linalg.eigvalsh(x @ x.T / len(x))
    values = values[values > 1e-12]
    return float(np.exp(-(values * np.log(values)).sum()))


def diversity(by_prompt: Sequence[Sequence[Tensor]]) -> float | None:
    """The mean over prompts of the Vendi score of each one's samples, given as vectors of frames (T, D) each.

    Samples of different prompts are different anyway, so they are not compared. None where no prompt has two samples.
    """
    several = [
        torch.stack([one.flatten() for one in samples])
        for samples in by_prompt
        if len(samples) > 1
    ]
    scores = [vendi(vectors.double().numpy()) for vectors in several]
    return sum(scores) / len(scores) if scores else None


MEASURED_SIDE = 64
"""Rows and columns of the picture that is measured, so that clips of different sizes compare."""

BLOCK = 8
DARK = 8 / 255
"""Blocks darker than this say nothing of a gain."""


@dataclass(frozen=True)
class Measures:
    """``energy``: mean change of a pixel from frame to frame once the frame's gain is taken out, in shares of full light.

    ``flicker``: how much the light of the whole picture goes up and down: ±5 % from frame to frame are 0.05, a steady fade
    is 0. ``saturation``: mean distance of the strongest colour of a pixel from its weakest, 0 (grey) to 1. The first is
    None for fewer than two frames, the second for fewer than three.
    """

    energy: float | None
    flicker: float | None
    saturation: float


def measures(frames: NDArray[Any]) -> Measures:
    """Measure frames uint8 (T, H, W, 3).

    The gain between two frames is the median over blocks of 8 × 8 of the ratio of their light: what moves through the
    picture makes some blocks lighter and others darker, a lamp all of them.
    """
    small = _shrunk(to_pictures(frames), MEASURED_SIDE)
    grey = (small * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1)
    saturation = float((small.amax(1) - small.amin(1)).mean())
    gains = _gains(functional.avg_pool2d(grey[:, None], BLOCK)[:, 0])
    if len(grey) < 2:
        return Measures(None, None, saturation)
    level = grey[1:] * torch.exp(-gains)[:, None, None]
    energy = float((level - grey[:-1]).abs().mean())
    return Measures(
        energy, float(gains.diff().abs().mean()) / 4 if len(grey) > 2 else None, saturation
    )


def _gains(blocks: Tensor) -> Tensor:
    """Light of blocks (T, h, w) -> logarithm of the gain from each frame to the next (T - 1,); 0 where all is dark."""
    found = []
    for before, after in pairwise(blocks):
        lit = (before > DARK) & (after > DARK)
        ratios = torch.log(after[lit] / before[lit])
        found.append(torch.quantile(ratios, 0.5) if lit.any() else torch.zeros(()))
    return torch.stack(found) if found else torch.zeros(0)


def mean_measures(several: Sequence[Measures]) -> dict[str, float | None]:
    """Mean energy, flicker and saturation of several clips; None where none of them has it."""
    out: dict[str, float | None] = {}
    for name in ("energy", "flicker", "saturation"):
        values = [value for one in several if (value := getattr(one, name)) is not None]
        out[name] = round(sum(values) / len(values), 6) if values else None
    return out
