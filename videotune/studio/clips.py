"""The clips of a project as a table: what lies on the disk, and what the last check said of each."""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from videotune.data.captions import lint_caption, read_caption
from videotune.data.clip_file import ClipFile
from videotune.data.file_checks import ClipProblem
from videotune.data.layouts import read_folder
from videotune.errors import VideotuneError
from videotune.queue.jobs import QueuedJob, all_jobs, latest, restart, result
from videotune.studio import projects, trash
from videotune.studio.projects import CLIPS, HELD_OUT, Project, any_file, texts

LONG = 20.0
QUIET = 2.0
"""Seconds from which on a clip is a long video, to be cut into scenes; seconds without a change before a check begins."""

ORDINARY = re.compile(
    r"the crop keeps|upscaled|[\d.]+ of [\d.]+ s are in no window|[\d.]+ fps is far above"
)
"""Warnings of a check about which a person need not do anything: they are shown as notes."""

ClipRow = dict[str, Any]
UNKNOWN: ClipRow = dict.fromkeys(
    (
        "reason",
        "source_seconds",
        "source_fps",
        "source_frames",
        "width",
        "shape",
        "windows",
        "spans",
    )
)
UNKNOWN |= {
    "state": "new",
    "why": "not checked yet",
    "warned": [],
    "notes": [],
    "hints": [],
    "long": False,
    "part": "",
}
UNKNOWN |= {"tokens": 0, "changed": 0, "seconds_cut": 0}
"""What stands in a row as long as no check has said it."""


@dataclass(frozen=True)
class Table:
    """The clips by their paths within the project, as they were when ``folders`` had these times of change.

    ``changed``: when a clip or a caption changed last; ``version`` differs where anything of a clip does.
    """

    rows: Mapping[str, ClipRow]
    folders: Mapping[Path, int]
    basis: tuple[Any, ...]
    changed: float
    version: str


_tables: dict[Path, Table] = {}


def table(project: Project) -> Table:
    """The clips; read again only where a folder or the last check has changed, and once a minute."""
    kept = _tables.get(project.folder)
    last = last_account(project)
    basis = last and last[0].folder.name, int(time.time() / 60)
    if (
        kept is None
        or kept.basis != basis
        or kept.folders != {path: _changed(path) for path in kept.folders}
    ):
        kept = _tables[project.folder] = _read(project, basis, kept)
    return kept


def _changed(*paths: Path | None) -> int:
    """When the newest of some files or folders has changed, in nanoseconds; 0 where none of them is there."""
    times = [0]
    for path in filter(None, paths):
        with suppress(OSError):
            about = os.stat(path)
            times.append(
                about.st_mtime_ns
                if path.is_dir()
                else max(about.st_mtime_ns, about.st_ctime_ns)
            )
    return max(times)


def _read(project: Project, basis: tuple[Any, ...], before: Table | None) -> Table:
    last = last_account(project)
    walks = [os.walk(project.folder / part) for part in (CLIPS, HELD_OUT)]
    places = [
        project.folder,
        *(
            Path(at)
            for walk in walks
            for at, *_ in walk
            if "/." not in at[len(str(project.folder)) :]
        ),
    ]
    folders = {path: _changed(path) for path in places}
    checked = {row["path"]: row for row in last[1]["clips"]} if last else {}
    rows: dict[str, ClipRow] = {}
    for part, clip in _files(project):
        row = _row(
            project,
            part,
            clip,
            checked.pop(str(clip.path), None),
            last[0].started if last else 0.0,
        )
        rows[row["path"]] = row
    for path, about in checked.items():
        if not Path(path).is_relative_to(project.folder):
            rows[path] = _of_account(path, about) | {
                "path": path,
                "name": path,
                "fixed": "it lies elsewhere",
            }
    files = {path: row["changed"] for path, row in rows.items()}
    if before is not None and files == {
        path: row["changed"] for path, row in before.rows.items()
    }:
        newest = before.changed  # a check's cache in a folder of clips is no change of them
    else:
        newest = max([0, *list(folders.values())[1:], *files.values()]) / 1e9
    newest = max(
        newest,
        _changed(*(project.folder / name for name in ("config.json", projects.BOOK))) / 1e9,
    )
    return Table(
        rows,
        folders,
        basis,
        newest,
        blake2b(repr(rows).encode(errors="replace"), digest_size=8).hexdigest(),
    )


def last_account(project: Project) -> tuple[QueuedJob, Mapping[str, Any]] | None:
    """The newest check that gave an account of the clips, with that; None where there was none yet."""
    ended = (job for job in all_jobs(project.folder, "check") if not job.running)
    return next(
        ((job, account) for job in ended if (account := _account(job)) is not None), None
    )


@lru_cache(maxsize=16)
def _account(job: QueuedJob) -> Mapping[str, Any] | None:
    """What an ended check printed, which does not change."""
    value = result(job)
    return value if isinstance(value, dict) and "clips" in value else None


def start_check(project: Project) -> bool:
    """Start a check where something has changed since the last one began, and nothing for a while; whether one is due."""
    changed = table(project).changed
    job = latest(project.folder, "check")
    due = bool(projects.datasets(project)) and (job is None or changed > job.started)
    if due and time.time() - changed > QUIET:
        restart(project.folder, "check", ["check", "--json", *projects.words(project)])
    return due


def _files(project: Project) -> Iterator[tuple[str, ClipFile]]:
    """Every clip on the disk with the part of the project that it lies in."""
    for part in (CLIPS, HELD_OUT):
        folder = project.folder / part
        if folder.is_dir() and any_file(folder):
            with suppress(VideotuneError):  # it holds texts alone, so far; the check says so
                yield from ((part, clip) for clip in read_folder(folder)[0])


def found(rows: Mapping[str, ClipRow], path: str) -> ClipRow:
    """The clip of that path; VideotuneError where there is none."""
    if path not in rows:
        raise VideotuneError(f"{path[:200]} is not there any more")
    return rows[path]


def _row(
    project: Project, part: str, clip: ClipFile, checked: Mapping[str, Any] | None, since: float
) -> ClipRow:
    changed = _changed(clip.path, clip.caption_file)
    caption = caption_of(clip)
    row = _of_account(str(clip.path), checked) if checked else UNKNOWN
    if checked and changed / 1e9 > since:
        row |= {"state": "new", "why": "changed since the last check"}
    return row | {
        "path": clip.path.relative_to(project.folder).as_posix(),
        "name": clip.path.relative_to(project.folder / part).as_posix(),
        "clip": clip,
        "part": part,
        "caption": caption,
        "changed": changed,
        "tokens": round(
            max((len(line.split()) for line in caption.split("\n")), default=0) * 1.3
        ),
        "hints": lint_caption(caption, clip.path.stem) if caption else [],
        "fixed": f"its caption stands in {clip.metadata_row}: change it there"
        if clip.metadata_row
        else "",
    }


def caption_of(clip: ClipFile) -> str:
    """A clip's caption as it is on the disk now, a variant a line."""
    if clip.metadata_row or clip.caption_file is None:
        return "\n".join(clip.metadata_captions or ())
    return _caption(clip.caption_file, _changed(clip.caption_file))


@lru_cache(maxsize=20_000)
def _caption(path: Path, changed: int) -> str:
    """A caption's text, a variant a line, as it is since ``changed``."""
    try:
        return "\n".join(read_caption(path))
    except ClipProblem as problem:
        return (
            path.read_bytes().decode("latin-1")
            if problem.reason == "undecodable_caption"
            else ""
        )


def _of_account(path: str, row: Mapping[str, Any]) -> ClipRow:
    warned = [line for line in row["warnings"] if not ORDINARY.match(line)]
    named = texts()["reasons"].get(row["reason"], row["reason"])
    return {
        **UNKNOWN,
        **row,
        "state": "held out" if row["held_out"] else "used" if row["used"] else "skipped",
        "why": (f"{named}: {row['detail']}" if row["reason"] else "").replace(
            str(Path(path).parent) + "/", ""
        ),
        "warned": warned,
        "notes": [*(line for line in row["warnings"] if line not in warned), *row["notes"]],
        "caption": "\n".join(row["captions"]),
        "long": row["source_seconds"] is not None and row["source_seconds"] >= LONG,
    }


def select(project: Project, words: Mapping[str, str]) -> list[ClipRow]:
    """The clips in a state (``state``) whose name or caption holds a text (``q``)."""
    state = words.get("state", "")
    text = words.get("q", "").strip().casefold()
    tests = {"warned": lambda row: row.get("warned"), "without": lambda row: not row["caption"]}
    test = tests.get(state, lambda row: state in ("", row["state"]))
    rows = (row for row in table(project).rows.values() if test(row))
    return [
        row
        for row in rows
        if text in row["name"].casefold() or text in row["caption"].casefold()
    ]


def move(project: Project, paths: Sequence[str], to: str) -> None:
    """Move clips with their captions to another part of the project: for training, for validation, or to the bin.

    Raises VideotuneError, and moves nothing, where one is named in a list, or its place is taken.
    """
    rows = [found(table(project).rows, path) for path in paths]
    if listed := [row["name"] for row in rows if row["fixed"]]:
        raise VideotuneError(
            f"{listed[0]} is named in a list of clips, or lies elsewhere: take it out there"
        )
    files = list(
        dict.fromkeys(
            path
            for row in rows
            for path in (row["clip"].path, row["clip"].caption_file)
            if path
        )
    )
    if to == trash.BIN:
        trash.throw(
            project.folder,
            "clip",
            rows[0]["name"] if len(rows) == 1 else f"{len(rows)} clips",
            files,
        )
        return
    if to not in (CLIPS, HELD_OUT):
        raise VideotuneError(
            f"clips are moved to {CLIPS}, {HELD_OUT} or {trash.BIN}, not to {to[:40]!r}"
        )
    home = project.folder
    pairs = [(path, home.joinpath(to, *path.relative_to(home).parts[1:])) for path in files]
    if there := [target for path, target in pairs if target != path and target.exists()]:
        raise VideotuneError(
            f"{there[0].relative_to(home)} is there already: rename one of the two"
        )
    for path, target in pairs:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
