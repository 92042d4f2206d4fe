"""Which clips a note on the whole set speaks of, so that the page can show just these."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from videotune.data.dataset_notes import FEWEST_NUMBERED_STILLS, number_of_still
from videotune.data.remarks import Remark, with_codes
from videotune.data.sound_notes import CLIPPED_SHARE, MISSING_SECONDS
from videotune.studio.clip_row import ClipRow

ABOUT = "about "
"""The filter "about CODE" selects the clips that the note with this code counts."""


@dataclass(frozen=True)
class Subject:
    """The clips that a note counts."""

    label: str
    """How the filter and the cards name such a clip."""

    select: Callable[[Collection[ClipRow]], list[ClipRow]]
    """Returns them of all usable clips."""


def clips_about(rows: Collection[ClipRow], code: str) -> list[ClipRow]:
    """Return the clips that the note with a code speaks of; none if it counts no clips."""
    subject = SUBJECTS.get(code)
    if subject is None:
        return []
    usable_rows = [row for row in rows if row["state"] in ("used", "held out")]
    return subject.select(usable_rows)


def line_about(row: ClipRow, code: str) -> str:
    """Return what the check says of a clip under the code of a note; "" for nothing."""
    for line in _warnings(row):
        if line.code in (code, _WARNING_OF_NOTE.get(code)):
            return line
    return ""


_WARNING_OF_NOTE = {"slow_clips": "repeated_frames"}
"""By the code of a note, that of the warning that its clips have."""


def _warnings(row: ClipRow) -> list[Remark]:
    """Return the warnings of the check, also those that the row's card leaves out."""
    lines = with_codes(row.get("warnings", ()), row.get("warning_codes", ()))
    return [line for line in lines if isinstance(line, Remark)]


def _with_warning(code: str) -> Callable[[Collection[ClipRow]], list[ClipRow]]:
    """Return a function that selects the clips with a warning of the check."""

    def select(rows: Collection[ClipRow]) -> list[ClipRow]:
        return [row for row in rows if code in row.get("warning_codes", ())]

    return select


def _where(
    is_counted: Callable[[ClipRow], bool],
) -> Callable[[Collection[ClipRow]], list[ClipRow]]:
    """Return a function that selects the clips of which a fact holds."""

    def select(rows: Collection[ClipRow]) -> list[ClipRow]:
        return [row for row in rows if is_counted(row)]

    return select


def _with_commonest_caption(rows: Collection[ClipRow]) -> list[ClipRow]:
    """Return the clips whose caption most clips share."""
    captions = [" ".join(row["caption"].split()) for row in rows]
    if not captions:
        return []
    [(commonest, _)] = Counter(captions).most_common(1)
    return [
        row for row, caption in zip(rows, captions, strict=True) if caption == commonest
    ]


def _numbered_stills(rows: Collection[ClipRow]) -> list[ClipRow]:
    """Return the images that look like the frames of a video."""
    stills = [row for row in rows if row["source_seconds"] is None]
    series = []
    for row in stills:
        path = PurePosixPath(row["name"])
        numbered = number_of_still(path)
        size = (row["width"], row["height"])
        series.append(None if numbered is None else (path.parent, numbered[0], size))
    counts = Counter(series)
    return [
        row
        for row, name in zip(stills, series, strict=True)
        if name is not None and counts[name] >= FEWEST_NUMBERED_STILLS
    ]


def _is_video(row: ClipRow) -> bool:
    return row["source_seconds"] is not None


def _sound_of(row: ClipRow) -> Mapping[str, Any]:
    """Return the facts of a clip's sound track; none of a picture or without a track."""
    if not _is_video(row):
        return {}
    return row["sound"] or {}


def _lacks_sound(row: ClipRow) -> bool:
    codec = _sound_of(row).get("codec")
    return _is_video(row) and codec is None


def _has_sound(row: ClipRow) -> bool:
    sound = _sound_of(row)
    is_read = sound.get("codec") is not None
    problem = sound.get("problem")
    return is_read and not problem


def _is_silent(row: ClipRow) -> bool:
    sound = _sound_of(row)
    is_read = sound.get("codec") is not None
    problem = sound.get("problem")
    return is_read and bool(problem)


def _is_clipped(row: ClipRow) -> bool:
    clipped_share = _sound_of(row).get("clipped") or 0
    return _has_sound(row) and clipped_share > CLIPPED_SHARE


def _is_short(row: ClipRow) -> bool:
    sound = _sound_of(row)
    length = sound.get("seconds")
    if not _has_sound(row) or length is None:
        return False
    start = sound.get("start") or 0.0
    seconds = row["source_seconds"]
    end = min(start + length, seconds)
    covered = max(0.0, end - max(start, 0.0))
    return bool(seconds - covered > MISSING_SECONDS)


def _drops_sound(row: ClipRow) -> bool:
    windows = row["windows"] or 0
    windows_with_sound = _sound_of(row).get("windows", 0)
    return _has_sound(row) and windows_with_sound < windows


def _has_several_lines(row: ClipRow) -> bool:
    return "\n" in row["caption"]


def _has_mask(row: ClipRow) -> bool:
    return bool(row.get("mask"))


def _has_reference(row: ClipRow) -> bool:
    return bool(row.get("reference") or row.get("control"))


SUBJECTS: Mapping[str, Subject] = {
    "upscaled": Subject(
        "enlarged",
        _with_warning("upscaled"),
    ),
    "slow_clips": Subject(
        "repeats frames",
        _with_warning("repeated_frames"),
    ),
    "caption_lines": Subject(
        "several lines",
        _where(_has_several_lines),
    ),
    "captions_alike": Subject(
        "the same caption",
        _with_commonest_caption,
    ),
    "numbered_stills": Subject(
        "numbered",
        _numbered_stills,
    ),
    "no_sound": Subject(
        "no sound",
        _where(_lacks_sound),
    ),
    "silent_sound": Subject(
        "silent",
        _where(_is_silent),
    ),
    "clipped_sound": Subject(
        "overdriven sound",
        _where(_is_clipped),
    ),
    "short_sound": Subject(
        "short sound",
        _where(_is_short),
    ),
    "sound_dropped": Subject(
        "sound left out",
        _where(_drops_sound),
    ),
    "unused_sound": Subject(
        "has sound",
        _where(_has_sound),
    ),
    "unused_masks": Subject(
        "has a mask",
        _where(_has_mask),
    ),
    "unused_references": Subject(
        "has a reference",
        _where(_has_reference),
    ),
}
"""By the code of a note that counts clips."""

VALUES: Mapping[str, Any] = {
    "about": ABOUT,
    "subjects": SUBJECTS,
    "line_about": line_about,
}
"""What the templates need."""
