"""The row of one clip in a project's table: its files, its caption, and what the last check said of it."""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.data.captions import lint_caption, read_caption
from videotune.data.clip_file import ClipFile
from videotune.data.file_checks import ClipProblem
from videotune.data.remarks import code_of, with_codes
from videotune.studio.clip_companions import companions_of, shown_path
from videotune.studio.clip_history import MovedFile
from videotune.studio.projects import CLIPS, HELD_OUT, Project, texts
from videotune.studio.records import CheckedClip
from videotune.text import reason_words

LONG_CLIP_SECONDS = 20.0
"""From this length on, a clip is a long video that should be cut into scenes."""


TOKENS_PER_WORD = 1.3
"""Rough number of text-encoder tokens per word of a caption."""


ORDINARY = frozenset(["cropped", "fast_clip", "in_no_window", "upscaled"])
"""Codes of a check's warnings that need no action of the user; they are shown as notes."""


CAPTION_REASONS = ("missing_caption", "empty_caption", "undecodable_caption")
"""Reasons to skip a clip that a caption removes."""


OF_MODEL = frozenset([
    "beyond_max_duration", "borders", "cropped", "cuts", "damaged", "distorted",
    "fast_clip", "frame_count", "in_no_window", "mixed_rates", "repeated_frames",
    "single_frames", "slow_clips", "some_in_no_window", "unfilled_count", "upscaled",
])  # fmt: skip
"""Codes of warnings and notes that depend on the model."""


ClipRow = dict[str, Any]


UNKNOWN: ClipRow = {
    "reason": None,
    "source_seconds": None,
    "source_fps": None,
    "source_frames": None,
    "sound": None,
    "width": None,
    "shape": None,
    "windows": None,
    "spans": None,
    "state": "new",
    "why": "not checked yet",
    "warned": [],
    "notes": [],
    "hints": [],
    "long": False,
    "part": "",
    "picture": "",
    "mask_picture": "",
    "companions": (),
    "tokens": 0,
    "changed": 0,
    "seconds_cut": 0,
}
"""The row of a clip that no check has seen."""


def changed_ns(*paths: Path | None) -> int:
    """Return the latest time of change, in nanoseconds; 0 if no path exists."""
    times = [0]
    for path in filter(None, paths):
        with suppress(OSError):
            file_stat = os.stat(path)
            times.append(file_stat.st_mtime_ns)
            # A file that was moved here keeps its modification time.
            if not path.is_dir():
                times.append(file_stat.st_ctime_ns)
    return max(times)


def needs_caption(row: ClipRow) -> bool:
    """Return whether a caption is all that a clip lacks, as far as is known."""
    is_unusable = row["state"] == "skipped" and row["reason"] not in CAPTION_REASONS
    return bool(row["part"]) and not row["caption"] and not is_unusable


def state_of(row: ClipRow) -> str:
    """Return the state of a clip as the filter, the cards and the counts name it: used,
    held out, without (a caption), unusable or new.
    """
    if row["state"] in ("used", "held out"):
        return str(row["state"])
    if needs_caption(row):
        return "without"
    if row["state"] != "skipped":
        # Where a clip is decides that it is not trained on, and no check changes that.
        return "held out" if row["part"] == HELD_OUT else "new"
    is_without_caption = row["reason"] in ("missing_caption", "empty_caption")
    return "without" if is_without_caption else "unusable"


def is_drawn(row: ClipRow) -> bool:
    """Return whether a clip of the project was kept aside by the check, not by the user."""
    return bool(row["part"] == CLIPS and row["state"] == "held out")


def is_aside(row: ClipRow) -> bool:
    """Return whether a clip is kept aside, by its folder or by the check."""
    return bool(row["part"] == HELD_OUT or row["state"] == "held out")


def row_of_clip(
    project: Project,
    part: str,
    clip: ClipFile,
    checked_row: CheckedClip | None,
    checked_since: float,
    moved: Mapping[Path, MovedFile],
) -> ClipRow:
    """Build the row of a clip.

    Args:
        project: the project.
        part: folder of the project that the clip is in.
        clip: the clip.
        checked_row: its row in the last check, if it has one.
        checked_since: when that check started.
        moved: the files that the page has moved since then.
    """
    companion_paths = [path for _, path in clip.companions]
    files = [clip.path, *filter(None, [clip.caption_file]), *companion_paths]
    caption = caption_of(clip)
    row = dict(UNKNOWN)
    if checked_row:
        row = row_of_check(checked_row["path"], checked_row)
        # A check that looked while the page moved the files found the clip alone.
        was_alone = bool(caption) and row["reason"] == "missing_caption"
        is_newer = any(
            _is_newer(path, checked_since, moved.get(path)) for path in files
        )
        if was_alone or is_newer:
            row |= {"state": "new", "why": "changed since the last check"}
        elif clip.path in moved:
            row |= _state_in_part(row, part, str(project.folder / part))

    start_image = checked_row.get("start_image") if checked_row else None
    loss_mask = dict(clip.companions).get("loss_mask")
    words_per_variant = [len(line.split()) for line in caption.split("\n")]
    return row | {
        "path": clip.path.relative_to(project.folder).as_posix(),
        "name": clip.path.relative_to(project.folder / part).as_posix(),
        "clip": clip,
        "picture": _picture_of(project, clip),
        "mask_picture": shown_path(project, loss_mask),
        "companions": companions_of(project, clip, start_image),
        "part": part,
        "caption": caption,
        "changed": changed_ns(*files),
        "tokens": round(max(words_per_variant, default=0) * TOKENS_PER_WORD),
        "hints": lint_caption(caption, clip.path.stem) if caption else [],
        "fixed": _fixed_reason(clip),
        "caption_fixed": clip.metadata_texts is not None,
    }


def _is_newer(path: Path, checked_since: float, moved_file: MovedFile | None) -> bool:
    """Return whether a file has changed since a check, other than by the page's move."""
    if moved_file is None:
        return changed_ns(path) / 1e9 > checked_since
    is_rewritten = _modified(path) > checked_since
    return is_rewritten or changed_ns(path) / 1e9 > moved_file.moved_at


def _modified(path: Path) -> float:
    """Return when the content of a file changed last, in seconds; 0 if it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _state_in_part(row: ClipRow, part: str, folder: str) -> ClipRow:
    """Return the state of a checked clip in the part that it was moved to."""
    is_in_place = Path(row["path"]).is_relative_to(folder)
    if is_in_place or row["state"] not in ("used", "held out"):
        return {}
    return {"state": "held out" if part == HELD_OUT else "used"}


def _picture_of(project: Project, clip: ClipFile) -> str:
    """Return the path within the project of the image that stands for a clip whose
    frames are images; "" for a file, which a player shows.
    """
    if not clip.frames:
        return ""
    middle = clip.frames[len(clip.frames) // 2]
    return middle.relative_to(project.folder).as_posix()


def _fixed_reason(clip: ClipFile) -> str:
    """Return why the clip cannot be moved here, nor its caption edited if the row has it;
    empty if it is in no list.
    """
    if not clip.metadata_row:
        return ""
    if clip.metadata_texts is None:
        return f"{clip.metadata_row} lists it: move it there"
    return f"its caption is in {clip.metadata_row}: change it there"


def caption_of(clip: ClipFile) -> str:
    """Return a clip's caption as it is on disk now, one variant per line."""
    if clip.metadata_texts is not None or clip.caption_file is None:
        return "\n".join(clip.metadata_captions or ())
    return _read_caption(clip.caption_file, changed_ns(clip.caption_file))


@lru_cache(maxsize=20_000)
def _read_caption(path: Path, changed: int) -> str:
    """Return the text of a caption file as of ``changed``, one variant per line."""
    try:
        return "\n".join(read_caption(path))
    except ClipProblem as problem:
        if problem.reason == "undecodable_caption":
            return path.read_bytes().decode("latin-1")
        return ""


def without_model(row: ClipRow) -> ClipRow:
    """Return a row without what depends on a model, while none is chosen."""
    return row | {
        "shape": None,
        "windows": None,
        "spans": None,
        "notes": [],
        "warned": [line for line in row["warned"] if code_of(line) not in OF_MODEL],
    }


def row_of_check(path: str, checked_row: CheckedClip) -> ClipRow:
    """Return the row of a clip with what a check reported about it."""
    warnings = with_codes(checked_row["warnings"], checked_row.get("warning_codes", []))
    notes = with_codes(checked_row["notes"], checked_row.get("note_codes", []))
    serious_warnings = [line for line in warnings if code_of(line) not in ORDINARY]
    ordinary_warnings = [line for line in warnings if code_of(line) in ORDINARY]
    seconds = checked_row["source_seconds"]

    return {
        **UNKNOWN,
        **checked_row,
        "state": _checked_state(checked_row),
        "why": _skip_reason(path, checked_row),
        "warned": serious_warnings,
        "notes": [*ordinary_warnings, *notes],
        "caption": "\n".join(checked_row["captions"]),
        "long": seconds is not None and seconds >= LONG_CLIP_SECONDS,
    }


def _checked_state(checked_row: CheckedClip) -> str:
    if checked_row["held_out"]:
        return "held out"
    return "used" if checked_row["used"] else "skipped"


def _skip_reason(path: str, checked_row: CheckedClip) -> str:
    reason = checked_row["reason"]
    if not reason:
        return ""
    label = texts()["reasons"].get(reason) or reason_words(reason)
    return f"{label}: {checked_row['detail']}".replace(f"{Path(path).parent}/", "")
