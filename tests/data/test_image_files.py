"""Images are clips of one frame: upright, in sRGB, whole, and resized as a video's
frames are.
"""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from tests.support.clips import noise, numbered, read_numbers, write_clip, write_image
from tests.support.datasets import filmed, problem_of
from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe


def picture(height: int = 64, width: int = 96) -> np.ndarray:
    """Red above, blue below, a white block at the left end of the top."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, :, 0] = 200
    pixels[height // 2 :, :, 2] = 200
    pixels[: height // 3, : width // 3] = 230
    return pixels


@pytest.mark.parametrize(
    "suffix", [".png", ".jpg", ".JPEG", ".webp", ".bmp", ".tif", ".tiff", ".gif"]
)
def test_every_format_is_one_still_frame(tmp_path: Path, suffix: str) -> None:
    lossy = suffix in (".jpg", ".JPEG", ".webp")
    info = probe(
        write_image(
            tmp_path / f"a{suffix}", picture(), **({"quality": 95} if lossy else {})
        )
    )
    codec = {".jpg": "jpeg", ".JPEG": "jpeg", ".tif": "tiff"}.get(suffix, suffix[1:])
    assert (info.codec, info.container, info.still) == (codec, "image", True)
    assert (info.width, info.height, info.fps, info.seconds) == (96, 64, 0.0, 0.0)
    assert (info.timestamps, info.keyframes) == ((0.0,), (0,))
    shown = decode(info, [0.0, 0.5, 0.1, 7.0], 64, 96)
    assert shown.shape == (4, 64, 96, 3)
    assert (shown == shown[0]).all(), "at any time"
    assert np.abs(shown[0].astype(int) - picture()).mean() <= (3.5 if lossy else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
def test_exif_orientation_makes_the_picture_upright(
    tmp_path: Path, suffix: str, orientation: int
) -> None:
    upright = picture()
    turn = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[
        orientation
    ]  # how a camera held so stores it
    stored = Image.fromarray(upright)
    stored = stored if turn is None else stored.transpose(Image.Transpose(turn))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / f"a{suffix}", exif=exif)
    info = probe(tmp_path / f"a{suffix}")
    assert (info.width, info.height, info.rotation) == (96, 64, 0)
    assert np.abs(decode(info, [0.0], 64, 96)[0].astype(int) - upright).mean() < 12


COLOUR = (200, 60, 30)


def red_and_green_swapped() -> bytes:
    """An ICC profile whose red primary is sRGB's green and the other way round."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    red, green = data.find(b"rXYZ"), data.find(b"gXYZ")
    data[red : red + 4], data[green : green + 4] = b"gXYZ", b"rXYZ"
    return bytes(data)


FLAT = Image.new("RGB", (64, 48), COLOUR)
SWAPPED, PROFILE = (
    Image.new("RGB", (64, 48), (60, 200, 30)),
    {"icc_profile": red_and_green_swapped()},
)
SEE_THROUGH = FLAT.convert("RGBA")
SEE_THROUGH.putalpha(17)
PALETTE = FLAT.convert("P", palette=Image.Palette.ADAPTIVE)
GREY = Image.new("L", (64, 48), 100)


@pytest.mark.parametrize(
    ("name", "made", "how", "colour"),
    [
        ("rgba.png", SEE_THROUGH, {}, COLOUR),
        ("rgba.webp", SEE_THROUGH, {"lossless": True, "exact": True}, COLOUR),
        ("palette.png", PALETTE, {}, COLOUR),
        ("palette_key.png", PALETTE, {"transparency": bytes([9] * 256)}, COLOUR),
        ("palette.gif", PALETTE, {}, COLOUR),
        ("palette.bmp", PALETTE, {}, COLOUR),
        ("cmyk.tif", FLAT.convert("CMYK"), {}, COLOUR),
        ("cmyk.jpg", FLAT.convert("CMYK"), {}, COLOUR),
        # Pillow 12.3 cannot read the uncompressed YCbCr TIFF that it writes; scanners
        # write compressed ones
        ("ycbcr.tif", FLAT.convert("YCbCr"), {"compression": "tiff_lzw"}, COLOUR),
        ("grey.png", GREY, {}, 100),
        ("grey.jpg", GREY, {}, 100),
        ("grey.tif", GREY, {}, 100),
        ("grey_alpha.png", GREY.convert("LA"), {}, 100),
        ("black_and_white.png", GREY.convert("1", dither=Image.Dither.NONE), {}, 0),
        *(
            (f"profile{suffix}", SWAPPED, PROFILE, COLOUR)
            for suffix in (".png", ".jpg", ".webp", ".tif")
        ),
        ("no_profile.png", FLAT, {"icc_profile": b"not a profile"}, COLOUR),
    ],
)
def test_colours_of_every_mode(
    tmp_path: Path, name: str, made: Image.Image, how: dict[str, Any], colour: Any
) -> None:
    """By an ICC profile, in sRGB; an alpha channel is left out, as a video's is: the
    colours below it are shown.
    """
    made.save(tmp_path / name, **how)
    shown = decode(probe(tmp_path / name), [0.0], 48, 64)[0].astype(int)
    assert np.abs(shown - colour).max() <= (6 if name.startswith("profile") else 4)


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_sixteen_bits_keep_their_brightness(tmp_path: Path, name: str) -> None:
    """Cutting to 8 bits by saturation, which is what a plain conversion does, would
    make all of it white.
    """
    ramp = np.tile(np.linspace(0, 65535, 96).astype(np.uint16), (64, 1))
    Image.fromarray(ramp).save(tmp_path / name)
    shown = decode(probe(tmp_path / name), [0.0], 64, 96)[0].astype(int)
    assert np.abs(shown - np.round(ramp / 257)[..., None]).max() <= 1


def test_pictures_that_are_not_opaque_are_said_to_be_so(tmp_path: Path) -> None:
    solid = Image.fromarray(picture())
    clear, veiled = solid.convert("RGBA"), solid.convert("RGBA")
    veiled.putpixel((3, 5), (1, 2, 3, 254))
    palette = solid.quantize(4)
    key = palette.getpixel((0, 0))
    grey = Image.fromarray(np.full((48, 64), 30000, np.uint16))
    how: dict[str, tuple[Image.Image, dict[str, Any], bool]] = {
        "solid.png": (solid, {}, False),
        "solid.jpg": (solid, {}, False),
        "clear.png": (clear, {}, False),
        "clear.webp": (clear, {"lossless": True}, False),
        "veiled.png": (veiled, {}, True),
        "veiled.webp": (veiled, {"lossless": True}, True),
        "veiled.tif": (veiled, {}, True),
        "veiled_grey.png": (veiled.convert("LA"), {}, True),
        "palette.png": (palette, {}, False),
        "palette_key.png": (palette, {"transparency": key}, True),
        "palette_key.gif": (palette, {"transparency": key}, True),
        "palette_bytes.png": (
            palette,
            {"transparency": bytes([255, 255, 255, 255])},
            False,
        ),
        "key.png": (solid, {"transparency": (200, 0, 0)}, True),
        "other_key.png": (solid, {"transparency": (1, 2, 3)}, False),
        "grey_key.png": (grey, {"transparency": 30000}, True),
        "other_grey_key.png": (grey, {"transparency": 5}, False),
    }
    for name, (made, words, _) in how.items():
        made.save(tmp_path / name, **words)
    info = {name: probe(tmp_path / name) for name in how}
    assert {name: one.transparent for name, one in info.items()} == {
        name: want for name, (_, _, want) in how.items()
    }
    assert all(
        MediaInfo.from_json(one.to_json()) == one and one.hdr is None
        for one in info.values()
    )


def test_an_animated_gif_is_a_video_with_its_own_times(tmp_path: Path) -> None:
    pages = [Image.fromarray(frame) for frame in numbered(8, 48, 48)]
    pages[0].save(
        tmp_path / "a.gif",
        save_all=True,
        append_images=pages[1:],
        duration=[100, 200] * 4,
    )
    info = probe(tmp_path / "a.gif")
    assert (info.still, info.codec, info.transparent, len(info.timestamps)) == (
        False,
        "gif",
        False,
        8,
    )
    assert info.timestamps[:4] == pytest.approx((0, 0.1, 0.3, 0.4))
    assert info.seconds == pytest.approx(1.2)
    assert read_numbers(decode(info, [0.05, 0.2, 0.35, 1.1, 0.0], 48, 48)) == [
        0,
        1,
        2,
        7,
        0,
    ]
    cut = tmp_path / "cut.gif"
    cut.write_bytes((tmp_path / "a.gif").read_bytes()[:40])
    assert problem_of(cut).reason in ("decode_error", "unreadable", "not_a_video")


def test_a_cameras_multi_picture_jpeg_is_its_picture(tmp_path: Path) -> None:
    views = [Image.fromarray(picture()), Image.new("RGB", (24, 16))]
    views[0].save(tmp_path / "a.mpo", save_all=True, append_images=views[1:])
    (tmp_path / "a.mpo").rename(tmp_path / "a.jpg")
    info = probe(tmp_path / "a.jpg")
    assert (info.codec, info.width, info.height) == ("jpeg", 96, 64)
    assert np.abs(decode(info, [0.0], 64, 96)[0].astype(int) - picture()).mean() < 12


def header_of(whole: bytes, side: int) -> bytes:
    """A PNG that says it has so many rows and columns."""
    head = bytearray(whole)
    head[16:24] = struct.pack(">II", side, side)
    head[29:33] = struct.pack(">I", zlib.crc32(bytes(head[12:29])))
    return bytes(head)


def test_junk_has_reason_codes(tmp_path: Path) -> None:
    """Bombs, before a pixel is decoded; several pictures, of which none is silently the
    one; files that are cut short.
    """
    pages, whole = (
        noise(3, seed=3),
        write_image(tmp_path / "a.png", picture()).read_bytes(),
    )
    several = {
        "save_all": True,
        "append_images": [Image.fromarray(page) for page in pages[1:]],
    }
    Image.fromarray(np.ones((48, 64), np.float32)).save(tmp_path / "deep.tif")
    for suffix in (".webp", ".png", ".tif"):
        write_image(tmp_path / f"several{suffix}", pages[0], **several)
    for name, content, reason, detail in [
        ("empty.png", b"", "empty", ""),
        ("text.png", b"not a picture at all\n" * 50, "not_a_video", ""),
        (
            "film.png",
            write_clip(tmp_path / "a.mp4", pages).read_bytes(),
            "not_a_video",
            "rename it to .mp4",
        ),
        (
            "script.jpg",
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "not_a_video",
            "",
        ),
        ("absent.png", None, "missing_file", ""),
        ("bomb.png", header_of(whole, 12_000), "unreadable", "12000 × 12000"),
        ("larger.png", header_of(whole, 60_000), "unreadable", "134 million"),
        ("deep.tif", None, "decode_error", "8 or 16 bits"),
        ("several.webp", None, "not_a_video", "3 frames; convert it to an .mp4"),
        ("several.png", None, "not_a_video", "3 frames; convert it to an .mp4"),
        ("several.tif", None, "not_a_video", "3 pages"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        problem = problem_of(tmp_path / name)
        assert (problem.reason, detail in problem.detail) == (reason, True), name
    for suffix in (".png", ".jpg", ".webp", ".bmp", ".tif"):
        path = write_image(tmp_path / f"cut{suffix}", pages[0])
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
        assert problem_of(path).reason in ("decode_error", "unreadable")


def test_an_image_that_changed_is_an_error(tmp_path: Path) -> None:
    info = probe(write_image(tmp_path / "a.png", picture()))
    write_image(tmp_path / "a.png", picture(32, 32))
    with pytest.raises(ClipProblem, match="frame 0 of 1 is 32 × 32 now") as caught:
        decode(info, [0.0], 64, 96)
    assert caught.value.reason == "decode_error"
    (tmp_path / "a.png").unlink()
    with pytest.raises(ClipProblem, match="frame 0 of 1: "):
        decode(info, [0.0], 64, 96)


@pytest.mark.parametrize(
    ("height", "width"), [(64, 96), (32, 48), (40, 100), (128, 192)]
)
def test_a_still_is_resized_as_a_videos_frame_is(
    tmp_path: Path, height: int, width: int
) -> None:
    pixels = noise(3, seed=4)
    still = probe(write_image(tmp_path / "a.png", pixels[0]))
    video = filmed(tmp_path / "a.mov", pixels, codec="png", pix_fmt="rgb24")
    a, b = decode(still, [0.0], height, width), decode(video, [0.0], height, width)
    assert np.array_equal(a, b)
    if (height, width) in ((32, 48), (128, 192)):
        filtered = Image.fromarray(pixels[0]).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        assert np.abs(a[0].astype(int) - np.asarray(filtered)).mean() < 2.5
