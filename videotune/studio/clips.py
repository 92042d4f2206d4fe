"""The clips of a project as a table: what lies on the disk, and what the last check said of each."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.data.captions import lint, read_caption, variants
from videotune.data.file_checks import ClipProblem
from videotune.data.layouts import ClipFile, read_folder
from videotune.errors import VideotuneError
from videotune.files import write_text
from videotune.queue.jobs import Job, all_jobs, result
from videotune.studio.projects import CLIPS, HELD_OUT, REMOVED, Project, any_file, inside, texts


def last_account(project: Project) -> tuple[Job, Mapping[str, Any]] | None:
    """The newest check that gave an account of the clips, with that; None where there was none yet."""
    ended = (job for job in all_jobs(project.folder, "check") if not job.running)
    return next(((job, account) for job in ended if (account := _account(job)) is not None), None)


@lru_cache(maxsize=16)
def _account(job: Job) -> Mapping[str, Any] | None:
    """What an ended check printed, which does not change."""
    value = result(job)
    return value if isinstance(value, dict) and "clips" in value else None


def files(project: Project) -> list[tuple[str, ClipFile]]:
    """Every clip on the disk with the part of the project that it lies in."""
    found: list[tuple[str, ClipFile]] = []
    for part in (CLIPS, HELD_OUT):
        folder = project.folder / part
        if folder.is_dir() and any_file(folder):
            with suppress(VideotuneError):  # it holds texts alone, so far; the check says so
                found += [(part, clip) for clip in read_folder(folder)[0]]
    return found


def find(project: Project, relative: str) -> tuple[str, ClipFile]:
    """The clip of that path within the project.

    Raises VideotuneError where there is none.
    """
    path = inside(project.folder, relative)
    for part, clip in files(project):
        if clip.path == path:
            return part, clip
    raise VideotuneError(f"{relative} is not there any more: load the page again")


def rows(project: Project) -> list[dict[str, Any]]:
    """The table: each clip with its state (used, warned, held out, skipped, new), why, caption, picture and size."""
    last = last_account(project)
    checked = {row["path"]: row for row in last[1]["clips"]} if last else {}
    since = last[0].started if last else 0.0
    out, seen = [], set()
    for part, clip in files(project):
        seen.add(str(clip.path))
        out.append(_row(project, part, clip, checked.get(str(clip.path)), since))
    for path, row in checked.items():
        if path not in seen and not Path(path).is_relative_to(project.folder):
            out.append(_of_account(path, row) | {"path": path, "fixed": "it is elsewhere: change it there", "part": ""})
    return out


def _row(
    project: Project, part: str, clip: ClipFile, checked: Mapping[str, Any] | None, since: float
) -> dict[str, Any]:
    caption, odd = caption_of(clip)
    row = _of_account(str(clip.path), checked) if checked else {"state": "new", "why": "not checked yet"}
    if checked and _changed(clip, since):
        row |= {"state": "new", "why": "changed since the last check"}
    fixed = f"its caption stands in {clip.listed}: change it there" if clip.listed else odd
    return row | {
        "path": str(clip.path.relative_to(project.folder)),
        "caption": caption,
        "fixed": fixed,
        "part": part,
        "hints": lint(caption, clip.path.stem) if caption else [],
    }


def _changed(clip: ClipFile, since: float) -> bool:
    try:
        found = [os.stat(path) for path in filter(None, (clip.path, clip.caption))]
    except OSError:
        return True
    return any(max(about.st_mtime, about.st_ctime) > since for about in found)


def caption_of(clip: ClipFile) -> tuple[str, str]:
    """A clip's caption, a variant a line, and why it cannot be edited, where that is so."""
    if clip.text is not None or clip.caption is None:
        return "\n".join(clip.text or ()), ""
    try:
        return "\n".join(read_caption(clip.caption)), ""
    except ClipProblem as problem:
        undecodable = problem.reason == "undecodable_caption"
        return clip.caption.read_bytes().decode("latin-1") if undecodable else "", ""


def _of_account(path: str, row: Mapping[str, Any]) -> dict[str, Any]:
    warned = list(row["warnings"])
    state = "held out" if row["held_out"] else "used" if row["used"] else "skipped"
    state = "warned" if state == "used" and warned else state
    named = texts()["reasons"].get(row["reason"], row["reason"])
    why = f"{named}: {row['detail']}" if row["reason"] else "; ".join(warned)
    return {
        "state": state,
        "why": why.replace(str(Path(path).parent) + "/", ""),
        "caption": "\n".join(row["captions"]),
        "id": (row["id"] or "")[:16],
        "seconds": row["source_seconds"],
        "size": f"{row['width']}×{row['height']}" if row["width"] else "",
        "shape": row["shape"],
        "windows": row["windows"],
        "views": row["views"],
        "hints": [],
    }


def save_caption(project: Project, relative: str, text: str) -> str:
    """Write a clip's caption, a variant a line; returns what is to be said of it.

    Raises VideotuneError where the caption stands in a list.
    """
    _, clip = find(project, relative)
    if clip.listed:
        raise VideotuneError(f"the caption of {relative} stands in {clip.listed}: change it there")
    lines = variants(text.replace("\0", ""))
    if not lines:
        raise VideotuneError("an empty caption was not saved: say what the clip shows")
    write_text(clip.caption or clip.expected, "\n".join(lines) + "\n")
    hints = [hint for line in lines for hint in lint(line, clip.path.stem)]
    return "caption saved" + (f"; {'; '.join(hints)}" if hints else "")


def move(project: Project, relative: str, to: str) -> str:
    """Move a clip with its caption to another part of the project: held out, back to the clips, or out of the data."""
    part, clip = find(project, relative)
    if clip.listed:
        raise VideotuneError(f"{relative} is listed in {clip.listed}: take it out of the list, and move it yourself")
    if to not in (CLIPS, HELD_OUT, REMOVED):
        raise VideotuneError(f"clips are moved to {CLIPS}, {HELD_OUT} or {REMOVED}, not to {to!r}")
    if to == part:
        return f"{clip.path.name} is there already"
    targets = []
    for path in filter(None, (clip.path, clip.caption)):
        target = project.folder / to / path.relative_to(project.folder / part)
        if to == REMOVED and target.exists():
            target = target.with_name(f"{int(time.time())}-{target.name}")
        if target.exists():
            raise VideotuneError(f"{target.relative_to(project.folder)} is there already: rename one of the two")
        targets.append((path, target))
    for path, target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
        os.utime(target)  # the last check has not seen it here
    return {
        CLIPS: f"{clip.path.name} is trained on again",
        HELD_OUT: f"{clip.path.name} is held out: it is measured with, never trained on",
        REMOVED: f"{clip.path.name} was taken out; it lies in the project's folder {REMOVED}",
    }[to]
