"""An image file's pixels, upright and in sRGB, by Pillow."""

import warnings
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from PIL.Image import Image as Picture

from videotune.data.file_checks import MAX_PIXELS, ClipProblem, head_of, type_of

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
"""What counts as an image in a dataset folder (compared in lower case). A GIF of several pictures is a video."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
"""Pillow's readers that may open a file: others (PostScript) run programs."""


def is_animated(path: Path) -> bool:
    """Whether a GIF has more than one picture: it is a video then."""
    try:
        with Image.open(path, formats=("GIF",)) as picture:
            return bool(getattr(picture, "is_animated", False))
    except Exception:  # ``read_image`` explains what it is
        return False


def read_image(path: Path) -> tuple[NDArray[np.uint8], str, bool]:
    """uint8 (H, W, 3), the name of the format, and whether a pixel is not opaque; ClipProblem, whatever is in the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Pillow's warnings of bombs: the limit here is our own
            with Image.open(path, formats=FORMATS) as picture:
                _refuse(picture)
                picture.load()
                codec = "jpeg" if picture.format == "MPO" else str(picture.format).lower()
                return _pixels(picture), codec, _is_transparent(picture)
    except ClipProblem:
        raise
    except UnidentifiedImageError as error:
        raise _unidentified(path) from error
    except Image.DecompressionBombError as error:
        raise _too_large("more") from error
    except Exception as error:
        # Pillow's readers are Python that meets bytes of any kind: SyntaxError, struct.error, KeyError, IndexError …
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ClipProblem(
            "decode_error", f"the image is damaged or cut short ({what})"
        ) from error


def _too_large(size: str) -> ClipProblem:
    detail = (
        f"its header declares {size} pixels; at most {MAX_PIXELS // 10**6} million are read"
    )
    return ClipProblem("unreadable", detail)


def _unidentified(path: Path) -> ClipProblem:
    """Why a file with an image's name is none."""
    kind = type_of(head_of(path))
    if kind == "video":
        return ClipProblem(
            "not_a_video",
            "it is no image, whatever its name says; if it is a video, rename it to .mp4",
        )
    if kind == "image":
        return ClipProblem("unreadable", "the image's header is damaged or cut short")
    return ClipProblem("not_a_video", "its bytes are no image, whatever its name says")


def _refuse(picture: Picture) -> None:
    """ClipProblem for what is several pictures, and for what is too large, before a pixel is decoded."""
    if picture.width * picture.height > MAX_PIXELS:
        raise _too_large(f"{picture.width} × {picture.height}")
    count = getattr(picture, "n_frames", 1)
    if count > 1 and picture.format == "TIFF":
        raise ClipProblem(
            "not_a_video",
            f"it holds {count} pages; save the one that is meant as a file of its own",
        )
    if (
        count > 1 and picture.format != "MPO"
    ):  # cameras' MPO is a JPEG with further views behind the picture
        hint = "convert it to an .mp4 (ffmpeg -i NAME NAME.mp4) to train on its motion"
        raise ClipProblem("not_a_video", f"it is an animation of {count} frames; {hint}")


def _pixels(picture: Picture) -> NDArray[np.uint8]:
    """uint8 (H, W, 3): upright by the EXIF orientation, in sRGB; an alpha channel is left out, as a video's is."""
    profile = picture.info.get("icc_profile")
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16"):  # Pillow's own way to 8 bits cuts brightness off
        grey = np.asarray(picture).astype(np.uint32)
        return np.repeat(((grey * 255 + 32767) // 65535).astype(np.uint8)[..., None], 3, axis=2)
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


def _is_transparent(picture: Picture) -> bool:
    """Whether some pixel is not wholly opaque, by an alpha channel, a palette's or one colour that stands for nothing."""
    key = picture.info.get("transparency")
    if picture.mode.startswith("I"):  # no way of Pillow's from there to RGBA
        return key is not None and bool((np.asarray(picture) == key).any())
    if not picture.has_transparency_data or (
        isinstance(key, tuple) and max(key) > 255
    ):  # a colour of 16 bits
        return False
    return bool(np.asarray(picture.convert("RGBA"))[..., 3].min() < 255)


def _to_srgb(picture: Picture, profile: bytes | None) -> Picture:
    """The picture in sRGB; a profile that is damaged or belongs to other channels is ignored, as browsers do."""
    if not profile:
        return picture
    try:
        own = ImageCms.ImageCmsProfile(BytesIO(profile))
        srgb = ImageCms.createProfile("sRGB")
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        flags = ImageCms.Flags.BLACKPOINTCOMPENSATION
        return (
            ImageCms.profileToProfile(picture, own, srgb, intent, "RGB", flags=flags) or picture
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return picture
