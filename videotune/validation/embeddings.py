"""Turn video frames into unit vectors that can be compared.

The default embedding is a heuristic of edges, light and colour that needs no download.
Any image encoder that transformers can load may take its place. A clip that may have
been copied is embedded in several crops, because a copy may show only a part of it. A
clip that may be a copy is embedded as it is and mirrored.
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
from videotune.models.skeletons import pretrained

HEURISTIC = "edges-1"
"""Name of the default embedding. Raise its number when the heuristic changes."""

SIDE = 48
"""Rows and columns to which the heuristic resizes a frame of any aspect ratio."""

CELLS = 8
"""Rows and columns of the grid of cells that are averaged."""

DIRECTIONS = 8
"""Edge directions, from dark to light, so a mirrored picture has another vector."""

PART_WEIGHTS = (1.0, 0.5, 0.35)
"""Weights of edges, light and colour."""

GREY_WEIGHTS = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the grey value (ITU-R BT.601)."""

ENCODER_BATCH = 32
"""Frames per forward pass of an image encoder."""

View = tuple[float, float, float]
"""A crop with the frame's aspect ratio: (top, left, side) as shares of the frame."""

WHOLE: View = (0.0, 0.0, 1.0)


@dataclass(frozen=True)
class FrameEmbedding:
    """A function from frames to unit vectors.

    Vectors of embeddings with different names cannot be compared.
    """

    name: str

    of_frames: Callable[[Tensor], Tensor]
    """Maps floats (N, 3, H, W) in [0, 1] to unit vectors (N, D)."""

    views: tuple[View, ...] = (WHOLE,)
    """The crops in which a clip that may have been copied is embedded."""


def default_embedding() -> FrameEmbedding:
    """Return the heuristic embedding, which is robust to crops, re-encoding and gain.

    Its views are the whole frame, the middle 90 % of its sides, and 80 % of its sides
    at nine positions.
    """
    corners = []
    for row in range(3):
        for column in range(3):
            top = row * 0.1
            left = column * 0.1
            corners.append((top, left, 0.8))

    middle = (0.05, 0.05, 0.9)
    return FrameEmbedding(HEURISTIC, edge_features, (WHOLE, middle, *corners))


def edge_features(pictures: Tensor) -> Tensor:
    """Map pictures (N, 3, H, W) in [0, 1] to unit vectors (N, 704).

    The parts of a vector are edge directions, light and colour in 8 × 8 cells. A
    picture without any edge, light or colour (a black one) would have length 0; all
    such pictures share one constant unit vector.
    """
    red, green, blue = resize_square(pictures, SIDE).unbind(1)
    red_weight, green_weight, blue_weight = GREY_WEIGHTS
    grey = red_weight * red + green_weight * green + blue_weight * blue

    light = _cell_means(grey[:, None])
    light = light - light.mean((2, 3), keepdim=True)
    colour_planes = torch.stack([red - grey, blue - grey], 1)
    colour = _cell_means(colour_planes)
    parts = [_edge_directions(grey), light, colour]

    weighted = []
    for weight, part in zip(PART_WEIGHTS, parts, strict=True):
        direction = unit(part.flatten(1))
        weighted.append(weight * direction)
    vectors = unit(torch.cat(weighted, 1))

    has_content = vectors.norm(dim=1, keepdim=True) > 0.5
    constant = vectors.shape[1] ** -0.5
    return torch.where(has_content, vectors, constant)


def _edge_directions(grey: Tensor) -> Tensor:
    """Map grey pictures (N, H, W) to normalised edges (N, DIRECTIONS, 8, 8)."""
    with_channel = functional.pad(grey[:, None], (1, 1, 1, 1), mode="replicate")
    padded = with_channel[:, 0]
    inner_rows = padded[:, 1:-1]
    across = inner_rows[:, :, 2:] - inner_rows[:, :, :-2]
    inner_columns = padded[:, :, 1:-1]
    down = inner_columns[:, 2:] - inner_columns[:, :-2]

    # A strong edge counts as its square root.
    squared_strength = across.square() + down.square()
    factor = (squared_strength + 1e-12) ** -0.25
    angle = 2 * torch.pi / DIRECTIONS
    angles = torch.arange(DIRECTIONS) * angle
    angles = angles[:, None, None]
    across_part = (across * factor)[:, None] * angles.cos()
    down_part = (down * factor)[:, None] * angles.sin()
    strengths = (across_part + down_part).clamp_min(0)
    edges = _cell_means(strengths)

    # The part that all directions have in common carries little information.
    edges = edges - edges.mean(1, keepdim=True)
    length = edges.norm(dim=1, keepdim=True)
    mean_length = length.mean((2, 3), keepdim=True)
    return edges / (length + 0.5 * mean_length + 1e-4)


def _cell_means(planes: Tensor) -> Tensor:
    """Average planes (N, C, 48, 48) over 8 × 8 cells.

    The cells overlap by half, so a small shift of the picture changes little.
    """
    side = SIDE // CELLS
    return functional.avg_pool2d(
        planes, 2 * side, side, side // 2, count_include_pad=False
    )


def resize_square(pictures: Tensor, side: int) -> Tensor:
    """Resize pictures (N, 3, H, W) to (N, 3, side, side)."""
    return functional.interpolate(
        pictures, (side, side), mode="bilinear", antialias=True, align_corners=False
    )


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors (N, D) to length 1; vectors of length 0 stay 0."""
    lengths = vectors.norm(dim=1, keepdim=True)
    return vectors / lengths.clamp_min(1e-6)


def to_pictures(frames: NDArray[Any]) -> Tensor:
    """Convert uint8 frames (T, H, W, 3) to floats (T, 3, H, W) in [0, 1]."""
    pixels = torch.from_numpy(np.ascontiguousarray(frames))
    return pixels.permute(0, 3, 1, 2).float() / 255


def crop_view(pictures: Tensor, view: View) -> Tensor:
    """Crop pictures (N, 3, H, W) to a view."""
    top, left, side = view
    height, width = pictures.shape[2:]
    first_row = round(top * height)
    first_column = round(left * width)
    last_row = first_row + round(side * height)
    last_column = first_column + round(side * width)
    return pictures[:, :, first_row:last_row, first_column:last_column]


def embed_views(embedding: FrameEmbedding, frames: NDArray[Any]) -> Tensor:
    """Embed a clip that may be copied: uint8 frames (T, H, W, 3) to (views, T, D)."""
    pictures = to_pictures(frames)
    vectors = []
    for view in embedding.views:
        cropped = crop_view(pictures, view)
        vectors.append(embedding.of_frames(cropped))
    return torch.stack(vectors)


def embed_with_mirror(embedding: FrameEmbedding, frames: NDArray[Any]) -> Tensor:
    """Embed a clip that may be a copy: uint8 frames (T, H, W, 3) to (2, T, D).

    The first row is the clip as it is, the second is mirrored left to right.
    """
    pictures = to_pictures(frames)
    mirrored = pictures.flip(3)
    return torch.stack([embedding.of_frames(pictures), embedding.of_frames(mirrored)])


def open_encoder(source: str) -> FrameEmbedding:
    """Load an image encoder (CLIP, SigLIP, DINOv2 …) with transformers' AutoModel.

    The vector of a frame is the model's image features if it has them, else its pooled
    output, else the mean of its last hidden state.

    Args:
        source: folder or Hub id.

    Raises:
        VideotuneError: if transformers cannot load the encoder, or it gives no image
            features.
    """
    from transformers import AutoImageProcessor, AutoModel

    try:
        processor = pretrained(AutoImageProcessor, source)
        model = pretrained(AutoModel, source)
    except VideotuneError as error:
        raise VideotuneError(
            f"sample_metrics.encoder: {source!r} has no image encoder that "
            f"transformers can load ({error}). Give a folder with config.json, weights "
            "and preprocessor_config.json, or a Hub id; "
            "null uses the built-in heuristic."
        ) from error
    model = model.eval()

    def embed_frames(pictures: Tensor) -> Tensor:
        vectors = []
        with torch.no_grad():
            for batch in pictures.split(ENCODER_BATCH):
                inputs = processor(
                    images=list(batch), return_tensors="pt", do_rescale=False
                )
                features = _image_features(model, inputs["pixel_values"], source)
                vectors.append(unit(features.float().cpu()))
        return torch.cat(vectors)

    return FrameEmbedding(_encoder_name(model, source), embed_frames)


def _encoder_name(model: Any, source: str) -> str:
    """Name an encoder by its model type, its folder and a few sums of its weights.

    The sums distinguish two checkpoints of one architecture.
    """
    first_parameters = list(model.parameters())[:8]
    sums = []
    for parameter in first_parameters:
        weight_sum = float(parameter.detach().float().sum())
        sums.append(round(weight_sum, 3))
    folder = source.rstrip("/").rpartition("/")[2]
    name = digest([folder, digest(sums)[:8]])[:8]
    return f"{model.config.model_type}-{name}"


def _image_features(model: Any, pixels: Tensor, source: str) -> Tensor:
    """Map preprocessed images (N, 3, H, W) to vectors (N, D)."""
    if hasattr(model, "get_image_features"):
        output = model.get_image_features(pixel_values=pixels)
        if isinstance(output, Tensor):
            return output
    else:
        output = model(pixel_values=pixels)

    pooled = getattr(output, "pooler_output", None)
    if pooled is not None:
        return pooled.flatten(1)

    last_state = getattr(output, "last_hidden_state", None)
    if last_state is None:
        raise VideotuneError(
            f"sample_metrics.encoder: {source!r} gives no image features. "
            "Choose an image encoder."
        )
    if last_state.ndim == 4:
        return last_state.flatten(2).mean(2)
    return last_state.mean(1)
