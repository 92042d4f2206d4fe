"""Write the control of a clip as a file, and check it."""

from functools import partial
from pathlib import Path

from PIL import Image

from videotune import files
from videotune.data.control_filters import ControlSettings, control_pictures
from videotune.data.decode import decode_all
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.data.scene_encoding import encode_pictures
from videotune.lazy import av

TIME_TOLERANCE = 1e-3
"""Seconds by which the time of a control's frame may differ from its clip's."""


def write_control(path: Path, info: MediaInfo, settings: ControlSettings) -> None:
    """Write the control of a clip: a video as H.264 in MP4, an image as PNG.

    Args:
        path: the file to write.
        info: media info of the clip.
        settings: what is made of each picture.

    Raises:
        ClipProblem: "decode_error" if the clip cannot be decoded, or if its control
            would have another size or other times.
        OSError: if the file cannot be written.
    """
    files.write_whole(path, partial(_write_file, info=info, settings=settings))


def _write_file(path: Path, info: MediaInfo, settings: ControlSettings) -> None:
    pictures = control_pictures(decode_all(info, threads=1), settings)
    if info.still:
        Image.fromarray(next(pictures)).save(path, format="PNG")
        return

    try:
        encode_pictures(path, info, pictures)
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        raise ClipProblem(
            "decode_error", f"its control cannot be encoded ({error.strerror})"
        ) from error
    _check_written(path, info)


def _check_written(path: Path, info: MediaInfo) -> None:
    """Raise ClipProblem if a control lacks the size or the times of its clip."""
    written = probe(path)
    if (written.width, written.height) != (info.width, info.height):
        raise ClipProblem(
            "decode_error",
            f"its control would be {written.width} x {written.height}, "
            f"not {info.width} x {info.height}",
        )

    has_times = len(written.ticks) == len(info.ticks)
    if has_times:
        stamps = zip(written.timestamps, info.timestamps, strict=True)
        has_times = all(abs(ours - its) <= TIME_TOLERANCE for ours, its in stamps)
    if not has_times:
        raise ClipProblem("decode_error", "its frames have times that MP4 cannot hold")
