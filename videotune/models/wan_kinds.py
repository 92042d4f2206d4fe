"""What a Wan checkpoint generates a video from, as its configs say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.model_spec import ConditionSupport, ImageConditioning
from videotune.models.model_files import read_config
from videotune.models.wan_conditions import BOTH_ENDS, IN_PLACE, ON_CHANNELS


@dataclass(frozen=True)
class Kind:
    """What a checkpoint generates a video from."""

    name: str
    image_conditioning: ImageConditioning
    first_frame_share: float | None
    """Share of the samples that are given their first frame, by default; None: the kind
    has none.
    """
    conditions: Mapping[str, ConditionSupport]
    images: int = 0
    """Images of which the denoiser reads CLIP's states."""


def kind_of(
    folder: Path, net: Mapping[str, Any], *, from_image: bool, is_ti2v: bool
) -> Kind:
    """Return the kind of a checkpoint.

    Args:
        folder: the checkpoint.
        net: config of its transformer.
        from_image: whether it has image channels.
        is_ti2v: whether it feeds a first frame clean.

    Raises:
        VideotuneError: if its transformer and its image encoder do not fit.
    """
    positions = net.get("pos_embed_seq_len")
    if positions is not None:
        _check_positions(folder, positions, net)
        return Kind(
            "FLF2V", "concat", first_frame_share=1.0, conditions=BOTH_ENDS, images=2
        )
    if is_ti2v:
        return Kind("TI2V", "replace", first_frame_share=0.0, conditions=IN_PLACE)
    if not from_image:
        return Kind("T2V", "none", first_frame_share=None, conditions=IN_PLACE)
    if net.get("image_dim") is None:
        return Kind("I2V", "concat", first_frame_share=1.0, conditions=ON_CHANNELS)

    # CLIP's states are those of a first frame alone.
    last_frame = ConditionSupport("channels", in_diffusers=False)
    conditions = {**ON_CHANNELS, "last_frame": last_frame}
    return Kind("I2V", "concat", first_frame_share=1.0, conditions=conditions, images=1)


def _check_positions(folder: Path, positions: Any, net: Mapping[str, Any]) -> None:
    """Raise VideotuneError if positions of image states are not those of two images."""
    has_clip = net.get("image_dim") is not None
    if not has_clip or positions != 2 * _clip_tokens(folder):
        raise VideotuneError(
            f"{folder}: pos_embed_seq_len {positions!r} is not what CLIP gives of a first and a last frame "
            "(FLF2V). Take transformer and image_encoder from one checkpoint"
        )


def _clip_tokens(folder: Path) -> int:
    """Return how many states CLIP gives of an image: patches + 1."""
    config = read_config(folder / "image_encoder" / "config.json")
    return int((config["image_size"] // config["patch_size"]) ** 2 + 1)


def clip_vision_numbers(folder: Path) -> int:
    """Return how many numbers CLIP's image encoder gives of an image."""
    config = read_config(folder / "image_encoder" / "config.json")
    return _clip_tokens(folder) * int(config["hidden_size"])
