"""Write a control clip for each clip of a folder: at the same place, with the same name,
size, number of frames and times.

The clips are read, and their controls written, by the worker processes.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from videotune import files
from videotune.bounds import RECORD_BYTES, require_file
from videotune.data.archives import FileProgressFn, silent
from videotune.data.clip_file import CLIP_FOLDERS, CLIP_SUFFIXES, ClipFile, is_video
from videotune.data.companion_files import CompanionSettings
from videotune.data.control_filters import ControlSettings
from videotune.data.file_checks import ClipProblem
from videotune.data.layouts import read_folder
from videotune.data.media_index import LONGEST_SCAN, MediaIndex
from videotune.data.media_info import MediaInfo
from videotune.data.object_files import refuse_object_store
from videotune.data.workers import Call, default_workers
from videotune.errors import VideotuneError
from videotune.text import counted

DEFAULT_FOLDER = "controls"
"""Name of the folder of control clips, unless the user names another."""

COMPANION_FOLDERS = ("controls", "references")
"""Names of folders in a dataset whose files belong to clips and are none themselves."""

JOURNAL = ".videotune-derive.jsonl"
"""File in a folder of control clips that records how each of them is made, so that a
stopped run can continue and files of other origin are not overwritten.
"""

SECONDS_PER_MEGAPIXEL = 5.0
"""Time limit for a million pixels of a frame. Edges take the longest, about 0.1 s."""

JournalRow = dict[str, Any]


@dataclass
class ControlClip:
    """The control clip of one clip."""

    file: ClipFile
    """The clip."""

    name: str
    """The clip's path in the source."""

    folder: Path
    """The folder of control clips."""

    path: Path
    """The control clip, in ``folder``."""

    row: JournalRow = field(default_factory=dict)
    """Its line of the journal."""

    info: MediaInfo | None = None
    """Media info of the clip, if its control is still to be written."""

    is_complete: bool = False
    """Whether an earlier run wrote the control."""

    problem: ClipProblem | None = None
    """Why there is no control."""


def plan_controls(
    source: Path,
    settings: ControlSettings,
    out: Path | None = None,
    progress: FileProgressFn = silent,
) -> list[ControlClip]:
    """List the control clips of a folder of clips, and read the clips that still lack
    one.

    A clip in a folder ``videos`` or ``images`` has its control at the same place below
    the folder ``controls`` beside it; any other clip below ``controls`` in the source.
    Nothing is written.

    Args:
        source: a folder of clips, or a clip.
        settings: what is made of each picture.
        out: folder of the control clips instead of ``controls``.
        progress: called with (clips done, clips in all, current clip).

    Returns:
        One control per clip, in path order. A clip that cannot be read has a problem.

    Raises:
        VideotuneError: if there are no clips, or if the controls would be clips of the
            dataset, or would replace files or each other.
    """
    for path in (source, out):
        if path is not None:
            refuse_object_store(path, "control clips are files beside the clips, and")
    source = Path(os.path.abspath(source))
    root = source if source.is_dir() else source.parent
    if out is not None:
        out = Path(os.path.abspath(out))
        _check_output_folder(out, root)

    controls = [_control_of(file, root, out) for file in _list_clips(source, root, out)]
    _check_names(controls)
    _check_links(controls, out)
    _find_complete(controls, settings)
    _read_clips(controls, settings, root, progress)
    return controls


def write_controls(
    controls: Sequence[ControlClip],
    settings: ControlSettings,
    progress: FileProgressFn = silent,
) -> None:
    """Write the planned controls that do not exist yet; each is complete or absent.

    A clip that cannot be decoded gets a problem.

    Args:
        controls: result of ``plan_controls``.
        settings: the same as there.
        progress: called with (clips done, clips in all, current clip).

    Raises:
        OSError: if a control cannot be written.
    """
    planned = [control for control in controls if control.info is not None]
    for folder in {control.path.parent for control in planned}:
        _delete_left_behind(folder)

    pool = default_workers()
    calls = _calls(planned, settings, pool.limit)
    with closing(pool.map(calls)) as answers:
        for count, control in enumerate(planned):
            progress(count, len(planned), control.name)
            answer = next(answers)
            if isinstance(answer, ClipProblem):
                control.problem = answer
            elif "error" in answer:
                raise OSError(*answer["error"])
    progress(len(planned), len(planned), "")


def _calls(
    controls: Sequence[ControlClip], settings: ControlSettings, limit: float
) -> Iterator[Call]:
    """Yield a worker's task for each control; record it in the journal first."""
    for control in controls:
        assert control.info is not None
        _record(control)

        info = control.info
        megapixels = info.width * info.height / 1e6
        seconds = len(info.ticks) * (1 + megapixels) * SECONDS_PER_MEGAPIXEL
        arguments = {"info": info, "path": str(control.path), **asdict(settings)}
        yield "derive", arguments, limit + seconds


def _check_output_folder(out: Path, root: Path) -> None:
    """Raise VideotuneError if the controls cannot be written to a folder.

    Args:
        out: the folder that the user named.
        root: folder of the clips.
    """
    if out.exists() and not out.is_dir():
        raise VideotuneError(f"{out} is a file. Give a folder for the control clips.")

    dataset = root.parent if root.name in CLIP_FOLDERS else root
    if not out.resolve().is_relative_to(dataset.resolve()):
        return
    names = out.relative_to(dataset).parts if out.is_relative_to(dataset) else ()
    if not set(names) & set(COMPANION_FOLDERS):
        raise VideotuneError(
            f"The control clips in {out} would be clips of {dataset}. "
            f"Call their folder {' or '.join(COMPANION_FOLDERS)}, or give one elsewhere."
        )


def _list_clips(source: Path, root: Path, out: Path | None) -> list[ClipFile]:
    """List the clips of a folder, without controls of an earlier run; or one clip."""
    if source.is_file():
        if not source.name.lower().endswith(CLIP_SUFFIXES):
            raise VideotuneError(
                f"{source} is neither a video nor an image: its suffix is not one of "
                f"{' '.join(CLIP_SUFFIXES)}. Give a clip or a folder of clips."
            )
        return [ClipFile(source, None, source.with_suffix(".txt"))]

    @cache
    def has_controls(folder: Path) -> bool:
        if folder == root:
            return False
        is_output = folder == out or os.path.lexists(folder / JOURNAL)
        return is_output or has_controls(folder.parent)

    companions = CompanionSettings(start_images=True)
    clip_files = read_folder(source, companions=companions)[0]
    clips = [file for file in clip_files if not has_controls(file.path.parent)]
    if not clips:
        raise VideotuneError(
            f"{root} has control clips only. Give the folder of the clips."
        )
    return clips


def _control_of(file: ClipFile, root: Path, out: Path | None) -> ControlClip:
    """Return the control of a clip, at its place."""
    clip_folder = _clip_folder_of(file.path, root)
    if clip_folder is None:
        dataset = root
        relative_path = file.path.relative_to(root)
    else:
        dataset = clip_folder.parent
        relative_path = file.path.relative_to(clip_folder)

    folder = dataset / DEFAULT_FOLDER
    if out is not None:
        folder = out
        if dataset.is_relative_to(root):
            relative_path = dataset.relative_to(root) / relative_path

    suffix = ".mp4" if is_video(file.path) else ".png"
    path = (folder / relative_path).with_suffix(suffix)
    return ControlClip(file, str(file.path.relative_to(root)), folder, path)


def _clip_folder_of(path: Path, root: Path) -> Path | None:
    """Return the nearest folder ``videos`` or ``images`` of a clip, up to the root."""
    for folder in path.parents:
        if folder.name in CLIP_FOLDERS:
            return folder
        if folder == root:
            break
    return None


def _check_names(controls: Sequence[ControlClip]) -> None:
    """Raise VideotuneError if two clips would have controls of one name.

    Suffixes make no difference: a companion is found by its name without suffix.
    """
    name_by_path: dict[str, str] = {}
    for control in controls:
        key = str(control.path.with_suffix("")).casefold()
        conflicting_name = name_by_path.setdefault(key, control.name)
        if conflicting_name != control.name:
            raise VideotuneError(
                f"The control clips of {conflicting_name} and {control.name} would have "
                "the same name. Rename one of the clips."
            )


def _check_links(controls: Sequence[ControlClip], out: Path | None) -> None:
    """Raise VideotuneError if a link leads out of the dataset, or of the folder that
    the user named.
    """
    outer_by_folder = {
        control.path.parent: out or control.folder.parent for control in controls
    }
    for folder, outer in outer_by_folder.items():
        if not folder.resolve().is_relative_to(outer.resolve()):
            raise VideotuneError(
                f"{folder} leads out of {outer} by a link. "
                "Give the folder that it leads to as --out."
            )


def _read_journal(folder: Path) -> list[JournalRow]:
    """Read the journal in a folder of controls, which may have come with a dataset."""
    journal = folder / JOURNAL
    if journal.is_symlink():
        raise VideotuneError(f"{journal} is a link. Delete it.")
    require_file(journal)
    if journal.is_file() and journal.stat().st_size > RECORD_BYTES:
        raise VideotuneError(
            f"{journal} has more than {RECORD_BYTES:,} bytes. "
            "Delete it with the control clips beside it."
        )
    return files.read_lines(journal)


def _find_complete(controls: Sequence[ControlClip], settings: ControlSettings) -> None:
    """Mark the controls that an earlier run wrote with the same settings.

    Raises:
        VideotuneError: if other files have the names of controls.
    """
    row_by_path: dict[Path, JournalRow] = {}
    for folder in {control.folder for control in controls}:
        for row in _read_journal(folder):
            row_by_path[folder / str(row.get("key"))] = row

    output_folders = {control.path.parent for control in controls}
    names_by_folder = {folder: _media_by_stem(folder) for folder in output_folders}
    unknown_files: list[Path] = []
    for control in controls:
        names = names_by_folder[control.path.parent].get(control.path.stem.casefold())
        if names is None:
            continue
        row = row_by_path.get(control.path, {})
        if names == [control.path.name] and _is_made_so(control, row, settings):
            control.is_complete = True
        elif control.problem is None:
            unknown_files.append(control.path.with_name(names[0]))

    if unknown_files:
        others = len(unknown_files) - 1
        like_it = f", like {counted(others, 'other file')}" if others else ""
        raise VideotuneError(
            f"{unknown_files[0]}: it was not made of its clip with these options{like_it}. "
            "Delete it, or give another folder as --out."
        )


def _media_by_stem(folder: Path) -> dict[str, list[str]]:
    """Return the videos and images in a folder by their name without suffix."""
    media: dict[str, list[str]] = {}
    if folder.is_dir():
        for name in sorted(os.listdir(folder)):
            stem, suffix = os.path.splitext(name)
            if suffix.lower() in CLIP_SUFFIXES and not name.startswith("."):
                media.setdefault(stem.casefold(), []).append(name)
    return media


def _is_made_so(
    control: ControlClip, row: Mapping[str, Any], settings: ControlSettings
) -> bool:
    """Return whether a row of the journal has these settings and the clip as it is now.

    A clip that cannot be read gets a problem.
    """
    if not asdict(settings).items() <= row.items():
        return False
    try:
        return row.get("id") == files.hash_file(control.file.path)
    except OSError as error:
        control.problem = ClipProblem("unreadable", error.strerror or str(error))
        return False


def _read_clips(
    controls: Sequence[ControlClip],
    settings: ControlSettings,
    root: Path,
    progress: FileProgressFn,
) -> None:
    """Set the media info of the clips that lack a control, or their problem."""
    missing = [
        control
        for control in controls
        if not control.is_complete and control.problem is None
    ]
    paths = [control.file.path for control in missing]
    index = MediaIndex(None, progress)

    examined_clips = index.examine(paths, [root], until=LONGEST_SCAN)
    for control, examined in zip(missing, examined_clips, strict=True):
        key = control.path.relative_to(control.folder).as_posix()
        control.row = {"key": key, "id": examined.id, **asdict(settings)}
        control.problem = examined.problem
        if examined.problem is None:
            control.info = examined.info


def _record(control: ControlClip) -> None:
    """Append a control's row to the journal."""
    journal = control.folder / JOURNAL
    row = json.dumps(control.row, ensure_ascii=False)
    control.folder.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file:
        # The line break comes first: a killed run may have left half a line.
        if file.tell() > 0:
            file.write("\n")
        file.write(row)
    files.sync_file(journal)


def _delete_left_behind(folder: Path) -> None:
    """Delete the temporary files of workers that were killed."""
    for part in folder.glob(".part-*"):
        if files.is_left_behind(part):
            part.unlink(missing_ok=True)
