"""Folders of frames: numbered images in a folder of their own become one clip.

The images of a folder are joined into a video file in the cache, as they are: their bytes
are copied, nothing is encoded again. From there on it is a clip like others.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from PIL import Image

from videotune import files
from videotune.data.archives import RESERVE, FileProgressFn
from videotune.data.clip_file import CLIP_FOLDERS, CLIP_SUFFIXES, ClipFile
from videotune.data.fetch_ahead import local_copies
from videotune.data.file_checks import MAX_PIXELS, ClipProblem, check_opens, stat_of
from videotune.data.images import FORMATS, IMAGE_SUFFIXES
from videotune.data.object_files import size_of
from videotune.errors import VideotuneError
from videotune.lazy import av

MAX_FRAMES = 100_000
"""Most images of a folder: an hour at 24 frames a second."""

MAX_IMAGE_BYTES = 1 << 28
"""Most bytes of an image of a folder: 256 MiB."""

CODECS = {"PNG": ("png", "rgb24"), "JPEG": ("mjpeg", "yuvj420p")}
"""FFmpeg's names of the codec, by Pillow's name of the format. The pixel format is only
declared: a decoder reads that of the images."""

_NUMBERED = re.compile(r"(.*?)(\d{1,12})")
_CONTENT_ID = re.compile("[0-9a-f]{32}")
_FOLDER = "frames"


def find_frame_folders(paths: Iterable[str], root: str) -> dict[str, tuple[Path, ...]]:
    """Return the folders whose clips are frames, each with its images in the order of
    their numbers.

    It is a folder below the root, not called videos or images, that directly has at least
    two images and no video, all with one suffix and with names that differ only in the
    number at their end. Gaps in the numbers do not matter here.

    Args:
        paths: the files of a dataset.
        root: its folder.
    """
    names_by_folder: dict[str, list[str]] = {}
    for path in paths:
        if path.lower().endswith(CLIP_SUFFIXES):
            folder, name = os.path.split(path)
            names_by_folder.setdefault(folder, []).append(name)

    frames_by_folder = {}
    for folder, names in names_by_folder.items():
        is_root = os.path.abspath(folder) == os.path.abspath(root)
        if is_root or os.path.basename(folder) in CLIP_FOLDERS or len(names) < 2:
            continue
        kinds: set[tuple[str, str] | None] = set()
        numbers = []
        for name in names:
            stem, suffix = os.path.splitext(name)
            match = _NUMBERED.fullmatch(stem)
            is_frame = match is not None and suffix.lower() in IMAGE_SUFFIXES
            kinds.add((match[1], suffix.lower()) if match and is_frame else None)
            numbers.append(int(match[2]) if match else 0)
        if len(kinds) == 1 and None not in kinds:
            in_order = sorted(zip(numbers, names, strict=True))
            frames_by_folder[folder] = tuple(Path(folder, name) for _, name in in_order)
    return frames_by_folder


def join_frames(
    file: ClipFile, cache: Path, fps: float, progress: FileProgressFn
) -> ClipFile:
    """Return a folder of frames as a clip whose frames are in a file of the cache.

    The file is made once, and again if an image has another size or time of change.

    Raises:
        ClipProblem: if an image is missing, is not a PNG or JPEG, or is too large.
        VideotuneError: if the cache has no room, or cannot be written.
    """
    _check_numbers(file.frames)
    stamps = []
    total_bytes = 0
    for path in file.frames:
        stat = stat_of(path)
        size = size_of(path, stat)
        stamps.append([path.name, size, stat.st_mtime_ns])
        total_bytes += size
        if size > MAX_IMAGE_BYTES:
            raise ClipProblem(
                "unreadable",
                f"{path.name} has {size / 1e6:.0f} MB; an image of a folder of "
                f"frames may have {MAX_IMAGE_BYTES >> 20} MiB",
            )

    # The name holds both what the file was made of and what is in it.
    key = files.digest([stamps, fps])
    folder = cache / _FOLDER
    joined_files = [
        path
        for path in sorted(folder.glob(f"{key}-*.mov"))
        if _CONTENT_ID.fullmatch(path.stem.removeprefix(f"{key}-"))
    ]
    if not joined_files:
        try:
            joined_files = [_join(file, folder, key, fps, total_bytes, progress)]
        except OSError as error:
            raise VideotuneError(
                f"the frames of {file.path} cannot be joined in {folder}: "
                f"{error.strerror or error}. Set cache_dir to another folder."
            ) from error
    content_id = joined_files[0].stem.removeprefix(f"{key}-")
    return replace(file, joined_video=joined_files[0], content_id=content_id)


def _check_numbers(frames: Sequence[Path]) -> None:
    """Raise ClipProblem if a number is missing or appears twice, or there are too many."""
    if len(frames) > MAX_FRAMES:
        raise ClipProblem(
            "unreadable",
            f"it has {len(frames)} images; a folder of frames may have {MAX_FRAMES}",
        )
    numbers = []
    for path in frames:
        match = _NUMBERED.fullmatch(path.stem)
        assert match is not None
        numbers.append(int(match[2]))
    for path, number, expected in zip(
        frames, numbers, range(numbers[0], numbers[0] + len(numbers)), strict=True
    ):
        if number != expected:
            fault = "appears twice" if number < expected else "is missing"
            raise ClipProblem(
                "missing_file",
                f"frame {min(number, expected)} {fault} before {path.name}; number the images "
                "without a gap",
            )


def _join(
    file: ClipFile,
    folder: Path,
    key: str,
    fps: float,
    total_bytes: int,
    progress: FileProgressFn,
) -> Path:
    """Write the file of a folder of frames and return it.

    Raises:
        ClipProblem: if an image cannot be used.
        VideotuneError: if the disk has no room for it.
        OSError: if the cache cannot be written.
    """
    codec, pixel_format, size = _form_of(file.frames)
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = max(0, shutil.disk_usage(folder).free - RESERVE)
    if total_bytes > free_bytes:
        raise VideotuneError(
            f"the frames of {file.path} need {total_bytes / 1e9:.1f} GB in {folder}, where "
            f"{free_bytes / 1e9:.1f} GB are free. Free some space, or set cache_dir to another disk."
        )

    hashes = [codec, str(fps)]

    def write(temporary: Path) -> None:
        interval = 1 / Fraction(fps).limit_denominator(1001)
        options = {"fflags": "+bitexact"}
        with av.open(str(temporary), "w", format="mov", options=options) as container:
            stream = container.add_stream(codec, rate=1 / interval)
            stream.width, stream.height = size
            stream.pix_fmt = pixel_format
            for number, local in enumerate(local_copies(file.frames)):
                content = local.read_bytes()
                hashes.append(hashlib.blake2b(content, digest_size=16).hexdigest())
                packet = av.Packet(content)
                packet.stream = stream
                packet.time_base = interval
                packet.pts = packet.dts = number
                packet.duration = 1
                packet.is_keyframe = True
                container.mux(packet)
                progress(number, len(file.frames), f"joining {file.path.name}")

    unfinished = folder / f"{key}.mov"
    files.write_whole(unfinished, write)
    finished = folder / f"{key}-{files.digest(hashes)}.mov"
    os.replace(unfinished, finished)
    return finished


def _form_of(frames: Sequence[Path]) -> tuple[str, str, tuple[int, int]]:
    """Return codec, pixel format and size (width, height) of images that are all alike.

    Raises:
        ClipProblem: if an image is no PNG or JPEG, or they are not alike.
    """
    forms: set[tuple[str, tuple[int, int]]] = set()
    for path, local in zip(frames, local_copies(frames), strict=True):
        check_opens(path)
        try:
            with Image.open(local, formats=FORMATS) as picture:
                image_format = (
                    "JPEG" if picture.format == "MPO" else str(picture.format)
                )
                form = (image_format, picture.size)
        except Exception as error:  # Pillow's readers raise anything
            raise ClipProblem(
                "decode_error", f"{path.name} is damaged or not an image"
            ) from error
        forms.add(form)
        if len(forms) > 1:
            raise ClipProblem(
                "unreadable",
                f"{path.name} has another size or format than {frames[0].name}; the frames "
                "of a clip are alike",
            )

    ((image_format, size),) = forms
    if image_format not in CODECS:
        raise ClipProblem(
            "unreadable",
            f"its frames are {image_format} images; save them as PNG or JPEG",
        )
    if size[0] * size[1] > MAX_PIXELS:
        raise ClipProblem("unreadable", f"its frames have {size[0]} x {size[1]} pixels")
    codec, pixel_format = CODECS[image_format]
    return codec, pixel_format, size
