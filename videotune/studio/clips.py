"""The clips of a project as a table: the files on disk, with the results of the last
check.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from videotune.data.clip_file import ClipFile
from videotune.data.layouts import read_folder
from videotune.data.metadata_files import Columns
from videotune.errors import VideotuneError
from videotune.queue.jobs import QueuedJob, all_jobs, latest, restart, result
from videotune.studio import clip_history, projects
from videotune.studio.clip_row import (
    ClipRow,
    changed_ns,
    is_drawn,
    needs_caption,
    row_of_check,
    row_of_clip,
    state_of,
    without_model,
)
from videotune.studio.clip_subjects import ABOUT, clips_about
from videotune.studio.outside_clips import (
    is_outside,
    missing_sources,
    short_name,
    stopping_clips,
)
from videotune.studio.projects import CLIPS, HELD_OUT, Project, has_visible_files
from videotune.studio.records import CheckAccount, CheckedClip

QUIET_SECONDS = 2.0
"""Seconds without a change before a check starts."""

CLIP_REASONS = frozenset(
    ["unreadable", "empty", "not_a_video", "no_video_stream", "decode_error"]
)
"""Reasons to skip a file of which there may be no picture."""


SHARED_FEWEST = 3
SHARED_PART = 0.5
"""A warning of at least so many clips, and of this part of all, concerns the set."""


@dataclass(frozen=True)
class SharedWarning:
    """A warning that most clips have, with other numbers perhaps."""

    text: str
    """As the first of these clips has it."""

    names: tuple[str, ...]
    """The clips that have it."""

    paths: tuple[str, ...] = ()
    """Those of them that are in the project, by their paths within it."""


@dataclass(frozen=True)
class ClipTable:
    """The clips of a project at one moment."""

    rows: Mapping[str, ClipRow]
    """By their paths within the project."""

    folders: Mapping[Path, int]
    """When each folder changed last; another time makes the table out of date."""

    basis: tuple[Any, ...]
    """The check, the minute, the settings of clips, the size of the history and the folders
    that are missing; other values make the table out of date.
    """

    shared: tuple[SharedWarning, ...]
    """Warnings that concern most clips; the rows do not repeat them."""

    changed: float
    """When a clip or a caption changed last."""

    version: str
    """Differs whenever a row differs."""


_tables: dict[Path, ClipTable] = {}


def table(project: Project) -> ClipTable:
    """Return the clips.

    They are read again only after a folder or the last check has changed, and once a
    minute.
    """
    cached = _tables.get(project.folder)
    check = latest_check(project)
    settings = projects.clip_settings(project)
    basis = (
        check and check[0].folder.name,
        int(time.time() / 60),
        settings,
        clip_history.size(project),
        tuple(missing_sources(project)),
    )

    if cached is not None and cached.basis == basis:
        folders = {path: changed_ns(path) for path in cached.folders}
        if folders == cached.folders:
            return cached

    current = _read_table(project, basis, cached)
    _tables[project.folder] = current
    return current


def _read_table(
    project: Project, basis: tuple[Any, ...], previous: ClipTable | None
) -> ClipTable:
    check = latest_check(project)
    # The folders' times are taken first, so a change during the reading is not missed.
    folders = {path: changed_ns(path) for path in _folders(project)}
    rows = _read_rows(project, check)
    shared = _take_shared_warnings(rows)
    return ClipTable(
        rows=rows,
        shared=shared,
        folders=folders,
        basis=basis,
        changed=_last_change(project, rows, folders, previous),
        version=blake2b(repr(rows).encode(errors="replace"), digest_size=8).hexdigest(),
    )


def _folders(project: Project) -> list[Path]:
    """Return the project's folder and all visible folders of clips."""
    folders = [project.folder]
    for part in (CLIPS, HELD_OUT):
        for folder, *_ in os.walk(project.folder / part):
            relative = folder[len(str(project.folder)) :]
            if "/." not in relative:
                folders.append(Path(folder))
    return folders


def _read_rows(
    project: Project, check: tuple[QueuedJob, CheckAccount] | None
) -> dict[str, ClipRow]:
    checked_rows: dict[str, CheckedClip] = {}
    checked_since = 0.0
    if check is not None:
        checked_rows = {row["path"]: row for row in check[1]["clips"]}
        checked_since = check[0].started

    # What the check said of a file counts until the next one, also where the page has
    # moved the file since.
    moved = clip_history.moved_files(project, since=checked_since) if check else {}
    place_by_original = {str(file.original): str(path) for path, file in moved.items()}

    # As the check saw them: whether an image is a start image depends on the model.
    start_images = {row.get("start_image") for row in checked_rows.values()}
    rows: dict[str, ClipRow] = {}
    for part, clip in _clip_files(project):
        checked_path = moved[clip.path].original if clip.path in moved else clip.path
        if str(checked_path) in start_images:
            continue
        if str(clip.path) in checked_rows:
            checked_path = clip.path
        checked_row = checked_rows.pop(str(checked_path), None)
        if checked_row is not None:
            checked_row = _with_moved_start_image(checked_row, place_by_original)
        row = row_of_clip(project, part, clip, checked_row, checked_since, moved)
        rows[row["path"]] = row

    # The check draws clips only where none lies in the folder of those kept aside.
    if any(row["part"] == HELD_OUT for row in rows.values()):
        for row in filter(is_drawn, rows.values()):
            row["state"] = "used"

    # The other rows of the check: datasets outside the project, as far as they are there.
    absent = missing_sources(project)
    for path, checked_row in checked_rows.items():
        is_absent = any(Path(path).is_relative_to(folder) for folder in absent)
        if not Path(path).is_relative_to(project.folder) and not is_absent:
            row = row_of_check(path, checked_row)
            rows[path] = row | {
                "path": path,
                "name": short_name(project, path),
                "fixed": "it is in another folder",
                "caption_fixed": True,
            }
    if not project.has_model:
        return {path: without_model(row) for path, row in rows.items()}
    return rows


def _with_moved_start_image(
    checked_row: CheckedClip, place_by_original: Mapping[str, str]
) -> CheckedClip:
    """Return the row of a check with its start image where it is now."""
    moved_path = place_by_original.get(checked_row.get("start_image") or "")
    if not moved_path:
        return checked_row
    return {**checked_row, "start_image": moved_path}


def _take_shared_warnings(rows: Mapping[str, ClipRow]) -> tuple[SharedWarning, ...]:
    """Remove the warnings that most clips have from the rows, and return them."""
    rows_by_kind: dict[str, list[tuple[ClipRow, str]]] = {}
    for row in rows.values():
        for line in row["warned"]:
            rows_by_kind.setdefault(_warning_kind(line), []).append((row, line))

    shared = []
    for entries in rows_by_kind.values():
        if len(entries) < max(SHARED_FEWEST, SHARED_PART * len(rows)):
            continue
        names = tuple(row["name"] for row, _ in entries)
        paths = tuple(row["path"] for row, _ in entries if row.get("part"))
        shared.append(SharedWarning(entries[0][1], names, paths))
        for row, line in entries:
            row["warned"] = [other for other in row["warned"] if other != line]
    return tuple(shared)


def _warning_kind(line: str) -> str:
    """Return a warning without its numbers."""
    return re.sub(r"\d[\d.,]*", "#", line)


def _last_change(
    project: Project,
    rows: Mapping[str, ClipRow],
    folders: Mapping[Path, int],
    previous: ClipTable | None,
) -> float:
    """Return when a clip, a caption or the settings changed last, in seconds."""
    changed_by_path = {path: row["changed"] for path, row in rows.items()}
    previous_changed = None
    if previous is not None:
        previous_changed = {path: row["changed"] for path, row in previous.rows.items()}

    if previous is not None and changed_by_path == previous_changed:
        # A check writes its cache into a folder of clips; that is not a change of the
        # clips.
        clips_changed = previous.changed
    else:
        folder_times = list(folders.values())[1:]  # without the project's own folder
        clips_changed = max([0, *folder_times, *changed_by_path.values()]) / 1e9

    settings = [
        project.folder / name for name in (projects.CONFIG, projects.PROJECT_FILE)
    ]
    return max(clips_changed, changed_ns(*settings) / 1e9)


def has_own(project: Project) -> bool:
    """Return whether a clip is in the project's own folders."""
    return any(not is_outside(row) for row in table(project).rows.values())


def unusable_clips(project: Project) -> list[ClipRow]:
    """Return the clips that a training would stop at, as far as a check has seen them."""
    if project.facts.get("allow_skips"):
        return []
    rows = table(project).rows.values()
    own_rows = [row for row in rows if not is_outside(row)]
    unusable = [row for row in own_rows if state_of(row) == "unusable"]
    if projects.draft(project).get("missing_caption") in (None, "error"):
        unusable += [row for row in own_rows if needs_caption(row)]
    return [*unusable, *stopping_clips(project, rows)]


def latest_check(project: Project) -> tuple[QueuedJob, CheckAccount] | None:
    """Return the newest ended check that has a result, and the result; None if none."""
    for job in all_jobs(project.folder, "check"):
        if not job.is_running:
            check_result = _check_result(job)
            if check_result is not None:
                return job, check_result
    return None


@lru_cache(maxsize=16)
def _check_result(job: QueuedJob) -> CheckAccount | None:
    """Return the JSON that an ended check printed; it does not change any more."""
    account: CheckAccount | None = result(job, CheckAccount)
    return account


def start_check(project: Project) -> bool:
    """Start a check if the clips changed since the last one; return whether one is due.

    None is while a folder of the project is missing: the check would fail.
    """
    if missing_sources(project):
        return False
    changed = table(project).changed
    job = latest(project.folder, "check")
    is_outdated = job is None or changed > job.started
    is_due = bool(projects.datasets(project)) and is_outdated

    if is_due and time.time() - changed > QUIET_SECONDS:
        check_again(project)
    return is_due


def check_again(project: Project) -> None:
    """Start a check of the clips, in place of one that runs."""
    arguments = ["check", "--json", *projects.command_arguments(project)]
    restart(project.folder, "check", arguments)


def _clip_files(project: Project) -> Iterator[tuple[str, ClipFile]]:
    """Yield every clip on disk with the part of the project that it is in."""
    settings = projects.clip_settings(project)
    for part in (CLIPS, HELD_OUT):
        folder = project.folder / part
        if folder.is_dir() and has_visible_files(folder):
            # the folder holds only texts; the check reports it
            with suppress(VideotuneError):
                clips, _ = read_folder(
                    folder,
                    caption_suffix=settings.caption_extension,
                    frame_folders=settings.frame_folder_fps is not None,
                    columns=Columns(settings.file_column, settings.caption_column),
                )
                for clip in clips:
                    yield part, clip


def neighbours(project: Project, path: str, query: Mapping[str, str]) -> dict[str, str]:
    """Return the clips before and after one, of those that a filter selects.

    The clip itself may have left the filter, as a captioned one does.
    """
    selected = {row["path"] for row in select(project, query)}
    paths = list(table(project).rows)
    position = paths.index(path)
    before = [other for other in paths[:position] if other in selected]
    after = [other for other in paths[position + 1 :] if other in selected]
    return {
        "before": before[-1] if before else "",
        "after": after[0] if after else "",
        "number": str(len(before) + 1),
        "count": str(len(before) + len(after) + 1),
    }


def find_clip(rows: Mapping[str, ClipRow], path: str) -> ClipRow:
    """Return the clip of that path; VideotuneError if there is none."""
    if path not in rows:
        raise VideotuneError(f"{path[:200]} no longer exists")
    return rows[path]


def select(project: Project, query: Mapping[str, str]) -> list[ClipRow]:
    """Return the clips that a filter selects.

    Args:
        project: the project.
        query: the filter; ``state`` is a state or "about CODE", ``q`` a text of the name or the
            caption, ``stay`` the paths, one a line, of clips that are selected anyway,
            as they were captioned under this filter.
    """
    state = query.get("state", "")
    text = query.get("q", "").strip().casefold()
    staying_paths = set(query.get("stay", "").split("\n"))
    rows = table(project).rows
    if state.startswith(ABOUT):
        code = state.removeprefix(ABOUT)
        chosen_paths = {row["path"] for row in clips_about(rows.values(), code)}
    else:
        chosen_paths = {path for path, row in rows.items() if _has_state(row, state)}
    return [
        row
        for path, row in rows.items()
        if path in staying_paths or (path in chosen_paths and _has_text(row, text))
    ]


def _has_state(row: ClipRow, state: str) -> bool:
    if state == "warned":
        return bool(row.get("warned"))
    if state == "without":
        return needs_caption(row)
    if state == "skipped":
        return bool(row["state"] == "skipped")
    return state in ("", state_of(row))


def _has_text(row: ClipRow, text: str) -> bool:
    return text in row["name"].casefold() or text in row["caption"].casefold()
