"""Projects: one folder each below the root, with its facts, its settings and safe
paths.
"""

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock, RLock
from typing import Any, cast

from pydantic import ValidationError

from videotune.config.base_models import starting_keys
from videotune.config.data_schema import Dataset
from videotune.data.clip_file import CAPTION_SUFFIX, CAPTION_SUFFIXES
from videotune.errors import VideotuneError
from videotune.files import (
    checked,
    is_left_behind,
    read_json,
    sync_folder,
    write_json,
)
from videotune.presets.shipped import read_preset
from videotune.studio.clip_keys import (
    CLIP_KEYS,
    VALIDATION_CLIP_KEYS,
    keys_of_source,
)
from videotune.studio.project_names import clean_title, free_folder, free_title
from videotune.studio.records import ProjectFacts, read_record

CONFIG = "config.json"
"""The keys that the user has set."""

PROJECT_FILE = "project.json"
"""The file that makes a folder a project."""

CLIPS = "clips"
"""Folder of the clips to train on."""

HELD_OUT = "held-out"
"""Folder of the validation clips."""

REMOVED = "removed"
"""Folder in which earlier versions kept removed clips."""

ORIGINALS = "originals"
"""Folder in which earlier versions kept videos that were cut into scenes."""

MANAGED_KEYS = ("cache_dir", "output_model_destination")
"""Config keys that the studio sets itself, so that files go into the project."""

NEUTRAL_PRESET = "toy"
"""Preset with which clips are checked while no model is chosen; what it says of its own
sizes is not shown.
"""


NEW_PREFIX = ".new-"
"""Beginning of the name of a project that is being made."""

UPLOADS = ".uploads"
"""Folder of the root that holds files while they are received."""

UNPACKING_PREFIX = ".unpacking-"
"""Beginning of the name of a folder into which an uploaded archive is unpacked."""

COMING_PREFIX = ".coming-"
"""Beginning of the name of a clip that is being moved to its place."""

DELETED_PREFIX = ".deleted-"
"""Beginning of the name of an item of the bin that is being deleted."""

PROJECT_REMEDY = "fix it, or remove it and create the project again"

_locks: dict[Path, RLock] = {}
_locks_lock = Lock()


@cache
def texts() -> Mapping[str, Any]:
    """Return the page texts of codes (texts.json): reasons, states, formats, form
    sections.
    """
    return read_json(Path(__file__).with_name("texts.json"))


@dataclass(frozen=True)
class Project:
    """A project."""

    folder: Path

    facts: ProjectFacts
    """The content of ``project.json``."""

    damage: str = ""
    """What is wrong with ``project.json``; then ``facts`` has only the rest of it."""

    @property
    def name(self) -> str:
        """Its name in addresses, the name of its folder."""
        return self.folder.name

    @property
    def title(self) -> str:
        """The name that the user gave it."""
        return str(self.facts.get("title") or self.name)

    @property
    def preset(self) -> str:
        """The preset of its runs; empty until the user has chosen one."""
        return str(self.facts.get("preset", ""))

    @property
    def has_model(self) -> bool:
        """Whether the user has chosen what to train: a preset, or a base model in the
        settings.
        """
        if self.preset:
            return True
        try:
            return bool(draft(self).get("base_model_name"))
        except VideotuneError:  # the page Setup reports the damaged file
            return False


def inside(folder: Path, relative: str) -> Path:
    """Return the path of ``relative`` below ``folder``.

    Raises:
        VideotuneError: if it is absolute, hidden, or leads outside, also through a
            link.
    """
    posix_path = relative.replace("\\", "/")
    parts = [part for part in posix_path.split("/") if part not in ("", ".")]
    has_drive = re.match("[A-Za-z]:", posix_path) is not None
    is_invalid = (
        posix_path.startswith("/") or has_drive or "\0" in posix_path or not parts
    )
    if is_invalid or any(part.startswith(".") for part in parts):
        raise VideotuneError(f"{relative!r} is not a path inside {folder.name}")

    path = folder.joinpath(*parts)
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
    except RuntimeError:  # a link that leads to itself
        is_inside = False
    if not is_inside:
        raise VideotuneError(f"{relative!r} leads out of {folder.name}")
    return path


def find_project(root: Path, name: str) -> Project:
    """Return the project of that name.

    Raises:
        VideotuneError: if there is none.
    """
    is_plain_name = bool(name) and "/" not in name and "\\" not in name
    if not is_plain_name or not (inside(root, name) / PROJECT_FILE).is_file():
        raise VideotuneError(
            f"there is no project {name!r}: choose one on the page Projects"
        )

    folder = inside(root, name)
    path = folder / PROJECT_FILE
    try:
        return Project(folder, read_record(path, ProjectFacts, PROJECT_REMEDY))
    except VideotuneError as error:
        values = read_record(path, dict[str, Any], PROJECT_REMEDY)
        return Project(folder, _valid_facts(values), damage=str(error))


def _valid_facts(values: Mapping[str, Any]) -> ProjectFacts:
    """Return the facts that have their type."""
    facts: dict[str, Any] = {}
    for key, value in values.items():
        with suppress(ValueError):
            facts |= checked(ProjectFacts, {key: value})
    return cast(ProjectFacts, facts)


def list_projects(root: Path) -> list[Project]:
    """Return all projects, newest first; other folders are ignored."""
    projects = [
        _project_or_placeholder(path.parent)
        for path in root.glob(f"*/{PROJECT_FILE}")
        if not path.parent.name.startswith(".")
    ]
    return sorted(
        projects,
        key=lambda project: (-project.facts.get("created", 0.0), project.name),
    )


def _project_or_placeholder(folder: Path) -> Project:
    """Return the project of a folder; with a damaged file, a placeholder that reports
    it.
    """
    try:
        return find_project(folder.parent, folder.name)
    except (VideotuneError, OSError) as error:
        return Project(folder, {"title": folder.name}, damage=str(error))


def lock_of(folder: Path) -> RLock:
    """Return the lock of a project, or of the root.

    Whoever reads a file, changes it and writes it again holds it meanwhile.
    """
    with _locks_lock:
        return _locks.setdefault(folder, RLock())


@contextmanager
def editing(project: Project) -> Iterator[Project]:
    """Hold the lock of a project, and yield the project as it is on disk now.

    Raises:
        VideotuneError: if its file is damaged; a change would lose what is wrong in it.
    """
    with lock_of(project.folder):
        current = find_project(project.folder.parent, project.folder.name)
        if current.damage:
            raise VideotuneError(current.damage)
        yield current


def create(root: Path, title: str, **facts: Any) -> Project:
    """Create a project with its folders; its name is the title in plain letters.

    Args:
        root: folder of the projects.
        title: title of the project.
        **facts: what is chosen already, such as the preset and the card.

    Raises:
        VideotuneError: if the title is empty or too long.
    """
    all_facts = cast(ProjectFacts, {**new_facts(title), **facts})
    preset = all_facts.get("preset")
    keys = starting_keys(str(read_preset(preset)["base_model_name"])) if preset else {}
    with new_folder(root) as folder:
        if keys:
            write_json(folder / CONFIG, keys)
        return place(root, folder, all_facts)


def new_facts(title: str) -> ProjectFacts:
    """Return the facts of a new project.

    Raises:
        VideotuneError: if the title is empty or too long.
    """
    return {
        "title": clean_title(title),
        "created": round(time.time(), 3),
        "archived": False,
    }


@contextmanager
def new_folder(root: Path) -> Iterator[Path]:
    """Yield a hidden folder to make a project in; after an error nothing of it stays."""
    folder = root / f"{NEW_PREFIX}{secrets.token_hex(4)}"
    try:
        for name in (CLIPS, "runs", "jobs"):
            (folder / name).mkdir(parents=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place(
    root: Path,
    folder: Path,
    facts: ProjectFacts,
    prepare: Callable[[Path], object] = lambda final_folder: None,
) -> Project:
    """Give a finished folder the name of a project, as the last act of its making.

    Args:
        root: folder of the projects.
        folder: the folder that ``new_folder`` yielded.
        facts: the facts of the project.
        prepare: called with the final folder, before the folder is there.
    """
    with lock_of(root):
        titles = {project.title for project in list_projects(root)}
        own_facts: ProjectFacts = {**facts, "title": free_title(facts["title"], titles)}
        final_folder = free_folder(root, own_facts["title"])
        prepare(final_folder)
        write_json(folder / PROJECT_FILE, own_facts)
        os.rename(folder, final_folder)
    sync_folder(root)
    return Project(final_folder, own_facts)


def clear_leftovers(root: Path) -> None:
    """Remove what a killed studio has left: uploads, and folders that it was making."""
    shutil.rmtree(root / UPLOADS, ignore_errors=True)
    for path in (*root.glob(f"{NEW_PREFIX}*"), *root.glob(f"bin/{DELETED_PREFIX}*")):
        shutil.rmtree(path, ignore_errors=True)

    for project_file in root.glob(f"[!.]*/{PROJECT_FILE}"):
        folder = project_file.parent
        for pattern in (f"{UNPACKING_PREFIX}*", f"bin/{DELETED_PREFIX}*"):
            for path in folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        for part in ("", CLIPS, HELD_OUT):
            _clear_temporary_files(folder / part, recursive=bool(part))


def _clear_temporary_files(folder: Path, *, recursive: bool) -> None:
    for parent, folder_names, file_names in os.walk(folder):
        if not recursive:
            folder_names.clear()
        for name in file_names:
            path = Path(parent, name)
            if name.startswith(COMING_PREFIX) or is_left_behind(path):
                path.unlink(missing_ok=True)


def update(project: Project, **facts: Any) -> Project:
    """Change some facts of a project, also on disk; None removes a fact."""
    with editing(project) as current:
        merged = {**current.facts, **facts}
        new_facts = {key: value for key, value in merged.items() if value is not None}
        write_json(project.folder / PROJECT_FILE, new_facts)
    return Project(project.folder, cast(ProjectFacts, new_facts))


def draft(project: Project) -> dict[str, Any]:
    """Return the keys that the user has set (the project's ``config.json``)."""
    path = project.folder / CONFIG
    if not path.is_file():
        return {}
    remedy = "fix it, or remove it to start again"
    keys: dict[str, Any] = read_record(path, dict[str, Any], remedy)
    return keys


def save_draft(project: Project, keys: Mapping[str, Any]) -> None:
    """Write the keys that the user has set."""
    write_json(project.folder / CONFIG, dict(keys))


def datasets(
    project: Project, keys: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the datasets of the project: its clips, then other folders and Hub
    datasets.

    The settings of clips hold for all datasets, except for those that a dataset has
    itself, and for regularization. How files are read holds for the project's own clips; if
    it has none, for its other datasets.

    Args:
        project: the project.
        keys: the settings; None: those of the project.
    """
    clip_keys = _clip_keys(project, keys)
    shared_keys = {
        key: value for key, value in clip_keys.items() if key in VALIDATION_CLIP_KEYS
    }
    has_clips = has_visible_files(project.folder / CLIPS)
    rows: list[dict[str, Any]] = []
    if has_clips:
        rows.append({"path": str(project.folder / CLIPS), **clip_keys})
    if has_visible_files(project.folder / HELD_OUT):
        path = str(project.folder / HELD_OUT)
        rows.append({"path": path, "kind": "validation", **shared_keys})

    for source in project.facts.get("sources", []):
        kind = source.get("kind", "train")
        row = {key: value for key, value in source.items() if key != "settings"}
        row |= keys_of_source(clip_keys, kind, is_only_place=not has_clips)
        rows.append({**row, **source.get("settings", {})})
    return rows


def _clip_keys(project: Project, keys: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of the clips, by the names of a dataset's keys."""
    if keys is None:
        try:
            keys = draft(project)
        except VideotuneError:  # the page Setup reports the damaged file
            keys = {}
    clip_keys = keys.get("datasets")
    if not isinstance(clip_keys, Mapping):
        return {}
    return {key: value for key, value in clip_keys.items() if key in CLIP_KEYS}


def clip_settings(project: Project) -> Dataset:
    """Return the settings of the project's own clips; the defaults if they cannot be
    used.
    """
    keys = _clip_keys(project, None)
    try:
        dataset = Dataset.model_validate({"path": CLIPS, **keys})
    except ValidationError:  # the check of the clips reports it
        return Dataset(path=CLIPS)
    if dataset.caption_extension.lower() not in CAPTION_SUFFIXES:
        return dataset.model_copy(update={"caption_extension": CAPTION_SUFFIX})
    return dataset


def clip_setting_arguments(project: Project) -> list[str]:
    """Return the arguments with which a command reads the project's own clips as a run
    does.
    """
    keys = clip_settings(project).model_dump(mode="json", exclude_defaults=True)
    keys.pop("path")
    arguments = []
    for key, value in keys.items():
        if key in VALIDATION_CLIP_KEYS:
            arguments += ["--set", f"datasets.{key}={json.dumps(value)}"]
    return arguments


def visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files at any depth that are not hidden and not in a hidden folder."""
    for parent, folder_names, file_names in os.walk(folder):
        folder_names[:] = [name for name in folder_names if not name.startswith(".")]
        for name in file_names:
            if not name.startswith("."):
                yield Path(parent, name)


def has_visible_files(folder: Path) -> bool:
    """Return whether a folder holds a file that is not hidden."""
    return any(True for _ in visible_files(folder))


def command_arguments(project: Project) -> list[str]:
    """Write ``command.json`` and return the arguments for the project's preset and
    settings.

    Raises:
        VideotuneError: if the project has no clips, or its file is damaged.
    """
    if project.damage:
        raise VideotuneError(project.damage)
    rows = datasets(project)
    if not rows:
        raise VideotuneError("there are no clips yet: add some on the page Data")

    config_path = project.folder / "command.json"
    write_json(config_path, {**draft(project), "datasets": rows})
    arguments = ["--config", str(config_path)]
    if not project.has_model:
        return ["--preset", NEUTRAL_PRESET, *arguments]
    return [*preset_arguments(project), *arguments]


def preset_arguments(project: Project) -> list[str]:
    """Return the arguments that name the project's preset, if it has one."""
    return ["--preset", project.preset] if project.preset else []


def skip_arguments(project: Project) -> list[str]:
    """Return the arguments that allow skipped clips, if the user has agreed to that."""
    return ["--allow-skips", "all"] if project.facts.get("allow_skips") else []
