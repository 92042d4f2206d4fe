"""What a container declares about a whole stream: cropping, stereo pairs, all-round
pictures.

PyAV does not show this data. FFmpeg's own description of a file does, so that is read.
"""

import re
from dataclasses import dataclass
from threading import Lock
from typing import Any

from videotune.data.file_checks import ClipProblem
from videotune.lazy import av

_description_lock = Lock()
"""FFmpeg's log level, which the description needs, is one for the whole process."""

Crop = tuple[int, int, int, int]
"""Pixels that are not shown: at the left, right, top and bottom of a decoded frame."""


@dataclass(frozen=True)
class StreamSideData:
    """Side data of one video stream."""

    crop: Crop = (0, 0, 0, 0)
    """The clean aperture of MP4 and MOV, or PixelCrop of Matroska."""

    stereo: bool = False
    """Whether each frame has a picture for each eye."""

    spherical: bool = False
    """Whether the picture is a projection of all directions, which a player turns to a
    view.
    """

    dolby_vision_profile: int | None = None


def read_side_data(container: Any, stream: Any) -> StreamSideData:
    """Read what a container declares about a stream.

    Raises:
        ClipProblem: "unreadable" if nothing of the picture is inside its cropping.
    """
    lines = _stream_lines(_describe(container), stream.index)
    values: dict[str, str] = {}
    for line in lines:
        # Metadata has its colon at a fixed column, so no tag looks like side data.
        match = re.fullmatch(r" {6}(\S.*?): (.*)", line)
        if match:
            values[match[1].lower()] = match[2]

    stereo = values.get("stereo 3d", "2D")
    profile = re.search(r"profile: (\d+)", values.get("dovi configuration record", ""))
    return StreamSideData(
        crop=_parse_crop(values.get("frame cropping", ""), stream.codec_context),
        stereo=not stereo.startswith(("2D", "unspecified")),
        spherical="spherical mapping" in values,
        dolby_vision_profile=int(profile[1]) if profile else None,
    )


def _describe(container: Any) -> str:
    """Return FFmpeg's description of a file, as the ffmpeg program prints it."""
    with _description_lock:
        level = av.logging.get_level()
        av.logging.set_level(av.logging.INFO)
        try:
            return str(container.dumps_format())
        finally:
            av.logging.set_level(level)


def _stream_lines(description: str, index: int) -> list[str]:
    """Return the lines of one stream's side data."""
    lines = []
    is_of_stream = False
    is_side_data = False
    for line in description.splitlines():
        header = re.match(r"  Stream #0:(\d+)", line)
        if header:
            is_of_stream = int(header[1]) == index
            is_side_data = False
        elif line.startswith("    ") and not line.startswith("     "):
            is_side_data = line.strip().lower() == "side data:"
        elif is_of_stream and is_side_data:
            lines.append(line)
    return lines


def _parse_crop(text: str, context: Any) -> Crop:
    """Parse "left/right/top/bottom"."""
    match = re.fullmatch(r"(\d+)/(\d+)/(\d+)/(\d+)", text.strip())
    if match is None:
        return (0, 0, 0, 0)

    left, right, top, bottom = (int(side) for side in match.groups())
    if left + right >= context.width or top + bottom >= context.height:
        raise ClipProblem(
            "unreadable",
            f"its cropping ({text.strip()}) leaves nothing of "
            f"{context.width}x{context.height} pixels",
        )
    return (left, right, top, bottom)
