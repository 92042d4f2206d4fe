"""Companions of a clip as a run uses them: read, and checked against their clip."""

import os
from dataclasses import dataclass
from pathlib import Path

from videotune.config.schema import Config
from videotune.data.clip_file import ClipFile, Role
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.tone_mapping import id_of_pixels
from videotune.text import counted

ASPECT_TOLERANCE = 0.02
"""How far the aspect ratio of a mask may differ from its clip's, as a share."""

FRAME_TOLERANCE = 1
"""How many frames a mask may have more or fewer than its clip."""

ALPHA = "-alpha"
"""End of the id of a mask that is the alpha channel of its clip."""

HIDDEN_ALPHA = ("vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d")
"""Codecs whose alpha channel is a stream of its own, which FFmpeg does not decode."""


@dataclass(slots=True)
class Companion:
    """A file that belongs to a clip, or the clip's alpha channel as its mask."""

    role: Role
    path: Path
    content_id: str = ""
    """Hash of the file's bytes."""
    info: MediaInfo | None = None
    problem: ClipProblem | None = None

    @property
    def media(self) -> MediaInfo:
        """Media info of a companion without a problem."""
        assert self.info is not None
        return self.info

    @property
    def is_alpha(self) -> bool:
        """Whether it is the alpha channel of its clip."""
        return self.content_id.endswith(ALPHA)

    @property
    def file_id(self) -> str:
        """Id of its pixels, by which windows name it."""
        if self.is_alpha:
            return self.content_id
        return id_of_pixels(self.content_id, self.media)


def used_companions(file: ClipFile, config: Config) -> dict[Role, Companion]:
    """Return the companions of a clip that the config uses, not yet read."""
    is_used: dict[Role, bool] = {
        "loss_mask": config.loss_mask.is_used,
        "mask": "mask" in config.condition_types,
        "start_image": "first_frame" in config.condition_types,
        "reference": "reference" in config.condition_types,
        "control": "control" in config.condition_types,
    }

    companions = {}
    for role, path in file.companions:
        if not is_used[role]:
            continue
        companions[role] = Companion(role, path)
        if is_missing(file, path):
            detail = (
                f"{file.metadata_row} names it in the column {column_of(file, role)}, but there is "
                "no such file"
            )
            companions[role].problem = ClipProblem("missing_file", detail)
    return companions


def is_missing(file: ClipFile, path: Path) -> bool:
    """Return whether a clip's companion does not exist, which can be only if a row names
    it.
    """
    return file.metadata_row is not None and not os.path.isfile(path)


def column_of(file: ClipFile, role: Role) -> Role:
    """Return the column of a metadata file that names a clip's companion: a file in the
    column ``mask`` is the mask of the loss too.
    """
    paths = dict(file.companions)
    if role == "loss_mask" and paths.get("mask") == paths["loss_mask"]:
        return "mask"
    return role


def alpha_mask(clip_id: str, media: MediaInfo) -> Companion:
    """Return the alpha channel of a clip as its loss mask."""
    return Companion("loss_mask", Path(media.path), f"{clip_id}{ALPHA}", media)


def check_companion(companion: Companion, clip: MediaInfo) -> None:
    """Raise ClipProblem if a companion cannot be used with its clip.

    A mask, reference or control is an image, or a video with the frames of its clip. A start
    image is an image.
    """
    if companion.role == "start_image":
        _check_start_image(companion)
        return

    reason = "bad_mask" if "mask" in companion.role else f"bad_{companion.role}"
    name = companion.path.name
    if companion.problem is not None:
        raise ClipProblem(reason, f"{name}: {companion.problem.detail}")

    media = companion.media
    if companion.is_alpha:
        if media.codec in HIDDEN_ALPHA:
            raise ClipProblem(
                reason,
                f"the alpha channel of {media.codec.upper()} is not read: write it as a mask "
                "into masks/ beside videos/",
            )
        return

    # A still may have any aspect ratio: it is cropped as start images are.
    if companion.role == "reference" and media.still:
        return
    aspect = media.width / media.height
    clip_aspect = clip.width / clip.height
    if abs(aspect / clip_aspect - 1) > ASPECT_TOLERANCE:
        raise ClipProblem(
            reason,
            f"{name} is {media.width}x{media.height}, the clip {clip.width}x{clip.height}: "
            "they need the same aspect ratio",
        )
    if media.still:
        return

    frames = len(media.ticks)
    clip_frames = len(clip.ticks)
    frame_seconds = clip.seconds / max(1, clip_frames)
    has_other_length = abs(media.seconds - clip.seconds) > 1.5 * frame_seconds
    has_other_count = abs(frames - clip_frames) > FRAME_TOLERANCE
    if clip.still or has_other_count or has_other_length:
        raise ClipProblem(
            reason,
            f"{name} has {_length(media)}, the clip {_length(clip)}: "
            f"a {companion.role.removeprefix('loss_')} is an image, or a video with the frames of its clip",
        )


def _check_start_image(companion: Companion) -> None:
    name = companion.path.name
    if companion.problem is not None:
        raise ClipProblem("bad_start_image", f"{name}: {companion.problem.detail}")
    if not companion.media.still:
        raise ClipProblem("bad_start_image", f"{name} is a video: it must be an image")


def _length(media: MediaInfo) -> str:
    if media.still:
        return "1 frame"
    return f"{counted(len(media.ticks), 'frame')} in {media.seconds:.2f} s"
