"""Filters that make the pictures of a control clip: edges, blurred, enlarged from a few
pixels, grey, or every n-th one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from videotune.errors import VideotuneError

Picture = NDArray[np.uint8]
"""Pixels in RGB: uint8 (H, W, 3)."""

ControlKind = Literal["edges", "blur", "lowres", "grey", "every-nth"]

LUMA_WEIGHTS = np.array([0.2126, 0.7152, 0.0722], np.float32)
"""Weights of red, green and blue in the luma of BT.709."""

SOBEL_STEP = 4.0
"""What Sobel's operator gives for an edge of height 1."""


class ControlOption(NamedTuple):
    """The setting of a kind of control, which is a number."""

    name: str
    default: float
    low: float
    high: float


OPTIONS: dict[ControlKind, ControlOption] = {
    "edges": ControlOption("strength", default=2.0, low=0.01, high=100.0),
    "blur": ControlOption("amount", default=0.02, low=0.0001, high=1.0),
    "lowres": ControlOption("factor", default=4.0, low=2.0, high=256.0),
    "every-nth": ControlOption("every", default=4.0, low=2.0, high=10_000.0),
}
"""The option of each kind. Kinds that are not in it have none."""


@dataclass(frozen=True)
class ControlSettings:
    """What is made of each picture."""

    kind: ControlKind
    value: float
    """Value of the kind's option; 0 if it has none."""


def control_settings(
    kind: ControlKind, options: Mapping[str, float | None]
) -> ControlSettings:
    """Return the settings of a kind, with its default if its option is not set.

    Args:
        kind: what is made of each picture.
        options: values by the option's name; None for one that is not set.

    Raises:
        VideotuneError: if an option of another kind is set, or a value is out of range.
    """
    kind_of_option = {option.name: name for name, option in OPTIONS.items()}
    for name, value in options.items():
        if value is not None and kind_of_option[name] != kind:
            raise VideotuneError(
                f"--{name} is for --kind {kind_of_option[name]}, not {kind}. Omit it."
            )

    option = OPTIONS.get(kind)
    if option is None:
        return ControlSettings(kind, 0.0)
    value = options.get(option.name)
    if value is None:
        value = option.default
    if not option.low <= value <= option.high:
        raise VideotuneError(
            f"--{option.name}: {value:g} is out of range. "
            f"Give a number from {option.low:g} to {option.high:g}."
        )
    return ControlSettings(kind, float(value))


def control_pictures(
    pictures: Iterable[Picture], settings: ControlSettings
) -> Iterator[Picture]:
    """Yield the control of each picture of a clip, in the same size."""
    if settings.kind == "every-nth":
        yield from _hold_every_nth(pictures, int(settings.value))
        return

    filters: dict[ControlKind, Callable[[Picture, float], Picture]] = {
        "edges": _edges,
        "blur": _blurred,
        "lowres": _low_resolution,
        "grey": _grey,
    }
    for picture in pictures:
        yield filters[settings.kind](picture, settings.value)


def _hold_every_nth(pictures: Iterable[Picture], every: int) -> Iterator[Picture]:
    """Yield the pictures, each repeated until the next n-th one."""
    held_picture: Picture | None = None
    for index, picture in enumerate(pictures):
        if held_picture is None or index % every == 0:
            held_picture = picture
        yield held_picture


def _edges(picture: Picture, strength: float) -> Picture:
    """Return the edges, white on black: the magnitude of Sobel's gradient.

    Each pixel has that of the colour channel that changes most, so that an edge between
    colours of the same brightness is one too.

    Args:
        picture: the picture.
        strength: 1 makes an edge between black and white white; larger brightens faint
            edges.
    """
    border = ((1, 1), (1, 1), (0, 0))
    padded = np.pad(picture, border, "edge").astype(np.float32)

    above = padded[:-2]
    level = padded[1:-1]
    below = padded[2:]
    summed_down = above + 2 * level + below
    across = summed_down[:, 2:] - summed_down[:, :-2]

    left = padded[:, :-2]
    middle = padded[:, 1:-1]
    right = padded[:, 2:]
    summed_across = left + 2 * middle + right
    down = summed_across[2:] - summed_across[:-2]

    magnitudes = np.hypot(across, down)
    brightness_of_step = strength / SOBEL_STEP
    return _in_three_channels(magnitudes.max(axis=2) * brightness_of_step)


def _blurred(picture: Picture, amount: float) -> Picture:
    """Return the picture under a Gaussian blur.

    Args:
        picture: the picture.
        amount: standard deviation, as a share of the height.
    """
    height = picture.shape[0]
    blur = ImageFilter.GaussianBlur(amount * height)
    image = Image.fromarray(picture)
    return np.asarray(image.filter(blur))


def _low_resolution(picture: Picture, factor: float) -> Picture:
    """Return the picture reduced by a factor, and enlarged to its size again."""
    height, width, _ = picture.shape
    small_width = max(1, round(width / factor))
    small_height = max(1, round(height / factor))

    image = Image.fromarray(picture)
    small = image.resize((small_width, small_height), Image.Resampling.BOX)
    enlarged = small.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(enlarged)


def _grey(picture: Picture, _: float) -> Picture:
    """Return the picture's luma in all channels."""
    return _in_three_channels(picture.astype(np.float32) @ LUMA_WEIGHTS)


def _in_three_channels(values: NDArray[np.float32]) -> Picture:
    """Return brightness (H, W) as a grey picture."""
    levels = np.clip(np.rint(values), 0, 255)
    brightness = levels.astype(np.uint8)
    return np.repeat(brightness[..., None], 3, axis=2)
