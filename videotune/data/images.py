"""Read an image file's pixels, upright and in sRGB, with Pillow."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from PIL.Image import Image as Picture

from videotune.data.file_checks import MAX_PIXELS, ClipProblem, head_of, type_of
from videotune.data.object_files import local_copy

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
"""Suffixes of images in a dataset folder, in lower case. An animated GIF is a video."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
"""Pillow's readers that may open a file. Others (PostScript) run programs."""


def is_animated(path: Path) -> bool:
    """Return whether a GIF has more than one picture, which makes it a video."""
    with local_copy(path) as local:
        try:
            with Image.open(local, formats=("GIF",)) as picture:
                return bool(getattr(picture, "is_animated", False))
        except Exception:  # read_image reports what is wrong with it
            return False


def read_image(path: Path) -> tuple[NDArray[np.uint8], str, bool]:
    """Decode an image file.

    Returns:
        The pixels, uint8 (H, W, 3); the name of the format; whether any pixel is not
        opaque.

    Raises:
        ClipProblem: if the file cannot be used, whatever its bytes are.
    """
    with _opened(path) as picture:
        codec = "jpeg" if picture.format == "MPO" else str(picture.format).lower()
        return _pixels(picture), codec, _is_transparent(picture)


def read_alpha(path: Path) -> NDArray[np.uint8]:
    """Decode the alpha channel of an image file, upright: uint8 (H, W).

    Raises:
        ClipProblem: if the file cannot be used, whatever its bytes are.
    """
    with _opened(path) as picture:
        return _alpha(picture)


@contextmanager
def _opened(path: Path) -> Iterator[Picture]:
    """Open and decode an image; turn every failure into a ClipProblem."""
    with local_copy(path) as local, _opened_here(local) as picture:
        yield picture


@contextmanager
def _opened_here(path: Path) -> Iterator[Picture]:
    """Open and decode an image of this disk."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of decompression bombs; MAX_PIXELS is the limit here.
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as picture:
                _check_header(picture)
                picture.load()
                yield picture
    except ClipProblem:
        raise
    except UnidentifiedImageError as error:
        raise _unidentified(path) from error
    except Image.DecompressionBombError as error:
        raise _too_large("more") from error
    except Exception as error:
        # Pillow's readers are Python that parses arbitrary bytes: they raise
        # SyntaxError, struct.error, KeyError, IndexError and others.
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ClipProblem(
            "decode_error", f"the image is damaged or cut short ({cause})"
        ) from error


def _too_large(pixels: str) -> ClipProblem:
    detail = f"its header declares {pixels} pixels; at most {MAX_PIXELS // 10**6} million are read"
    return ClipProblem("unreadable", detail)


def _unidentified(path: Path) -> ClipProblem:
    """Build the problem of a file that has an image's suffix but that Pillow does not
    open.
    """
    file_type = type_of(head_of(path))
    if file_type == "video":
        return ClipProblem(
            "not_a_video",
            "despite its suffix it is not an image; if it is a video, rename it to .mp4",
        )
    if file_type == "image":
        return ClipProblem("unreadable", "the image's header is damaged or cut short")
    return ClipProblem("not_a_video", "despite its suffix it is not an image")


def _check_header(picture: Picture) -> None:
    """Check size and number of pictures before any pixel is decoded.

    Raises:
        ClipProblem: if the image is too large or has several pictures.
    """
    if picture.width * picture.height > MAX_PIXELS:
        raise _too_large(f"{picture.width} × {picture.height}")

    count = getattr(picture, "n_frames", 1)
    if count > 1 and picture.format == "TIFF":
        raise ClipProblem(
            "not_a_video",
            f"it has {count} pages; save the page you want as a file of its own",
        )

    # A camera's MPO is a JPEG with further views after the picture.
    if count > 1 and picture.format != "MPO":
        hint = "convert it to an .mp4 (ffmpeg -i NAME NAME.mp4) to train on its motion"
        raise ClipProblem(
            "not_a_video", f"it is an animation of {count} frames; {hint}"
        )


def _pixels(picture: Picture) -> NDArray[np.uint8]:
    """Return uint8 (H, W, 3): upright by its EXIF orientation, in sRGB, without alpha."""
    profile = picture.info.get("icc_profile")
    picture = ImageOps.exif_transpose(picture)

    # Pillow itself clips 16-bit brightness to 8 bits instead of scaling it.
    if picture.mode.startswith("I;16"):
        grey = np.asarray(picture).astype(np.uint32)
        scaled = ((grey * 255 + 32767) // 65535).astype(np.uint8)
        return np.repeat(scaled[..., None], 3, axis=2)

    if picture.mode in ("I", "F"):
        raise ClipProblem(
            "decode_error",
            "its 32-bit brightness has no defined white; save it with 8 or 16 bits",
        )

    if picture.mode in ("P", "PA", "RGBa", "RGBA", "RGBX"):
        picture = picture.convert("RGBA").convert("RGB")
    elif picture.mode in ("1", "LA"):
        picture = picture.convert("L")
    return np.asarray(_to_srgb(picture, profile).convert("RGB"))


def _alpha(picture: Picture) -> NDArray[np.uint8]:
    """Return uint8 (H, W): 255 where a picture is opaque, upright."""
    transparent_colour = picture.info.get("transparency")
    picture = ImageOps.exif_transpose(picture)

    # Pillow cannot convert integer modes to RGBA.
    if picture.mode.startswith("I"):
        is_transparent = np.asarray(picture) == transparent_colour
        return np.where(is_transparent, 0, 255).astype(np.uint8)
    return np.asarray(picture.convert("RGBA"))[..., 3].copy()


def _is_transparent(picture: Picture) -> bool:
    """Return whether any pixel is not opaque: by alpha channel, palette or key colour."""
    transparent_colour = picture.info.get("transparency")

    # Pillow cannot convert integer modes to RGBA.
    if picture.mode.startswith("I"):
        if transparent_colour is None:
            return False
        return bool((np.asarray(picture) == transparent_colour).any())

    is_16_bit = isinstance(transparent_colour, tuple) and max(transparent_colour) > 255
    if not picture.has_transparency_data or is_16_bit:
        return False
    return bool(np.asarray(picture.convert("RGBA"))[..., 3].min() < 255)


def _to_srgb(picture: Picture, profile: bytes | None) -> Picture:
    """Convert to sRGB; ignore a profile that is damaged or does not fit, as browsers
    do.
    """
    if not profile:
        return picture

    try:
        converted = ImageCms.profileToProfile(
            picture,
            ImageCms.ImageCmsProfile(BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            outputMode="RGB",
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return picture
    return converted or picture
