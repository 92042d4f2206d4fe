"""Projects: one folder each below the root, with its facts, its settings and safe
paths.
"""

import os
import re
import secrets
import shutil
import time
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from videotune.data.archives import unpack
from videotune.errors import VideotuneError
from videotune.files import read_json, write_json
from videotune.runs.schemas import load_json

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

DEFAULT_PRESET = "toy"
"""Preset of a new project: the only one that runs on any computer."""

MAX_TITLE_LENGTH = 80
MAX_NAME_LENGTH = 40

NOT_EXPORTED = ("bin", "jobs", ".studio", ".unpacking")
"""Folders that an export leaves out: the bin, local processes, and what can be
recomputed.
"""


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

    facts: Mapping[str, Any]
    """The content of ``project.json``."""

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
        """The preset of its runs."""
        return str(self.facts.get("preset") or DEFAULT_PRESET)


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
    if not path.resolve().is_relative_to(folder.resolve()):
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
    facts = load_json(folder / PROJECT_FILE, "fix it, or remove it and create it again")
    return Project(folder, facts if isinstance(facts, dict) else {})


def list_projects(root: Path) -> list[Project]:
    """Return all projects, newest first; other folders are ignored."""
    projects = [
        _project_or_placeholder(path.parent)
        for path in root.glob(f"*/{PROJECT_FILE}")
        if not path.parent.name.startswith(".")
    ]
    return sorted(
        projects,
        key=lambda project: (-float(project.facts.get("created") or 0), project.name),
    )


def _project_or_placeholder(folder: Path) -> Project:
    """Return the project of a folder; with a damaged file, a placeholder that reports
    it.
    """
    try:
        return find_project(folder.parent, folder.name)
    except VideotuneError:
        return Project(folder, {"title": f"{folder.name} ({PROJECT_FILE} is damaged)"})


def create(root: Path, title: str) -> Project:
    """Create a project with its folders; its name is the title in plain letters.

    Raises:
        VideotuneError: if the title is empty or too long.
    """
    title = clean_title(title)
    stem = _folder_name(title)

    for number in range(1, 1000):
        folder = root / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            for subfolder in (CLIPS, "runs", "jobs"):
                (folder / subfolder).mkdir()

            facts = {
                "title": title,
                "created": round(time.time(), 3),
                "archived": False,
                "preset": DEFAULT_PRESET,
            }
            return update(Project(folder, facts))
    raise VideotuneError(
        f"there are too many projects called {title!r}: use another name"
    )


def _folder_name(title: str) -> str:
    ascii_title = (
        unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    )
    name = re.sub(r"[^a-z0-9]+", "-", ascii_title.lower()).strip("-")
    return name[:MAX_NAME_LENGTH].strip("-") or "project"


def duplicate(root: Path, project: Project) -> Project:
    """Create a project with another's clips, captions and settings.

    Clips become hard links where the file system supports them.
    """
    copy = create(root, f"{project.title[:72]} (copy)")
    for name in (CLIPS, HELD_OUT, "config.json"):
        source = project.folder / name
        target = copy.folder / name
        if source.is_dir():
            shutil.copytree(
                source, target, copy_function=_link_or_copy, dirs_exist_ok=True
            )
        elif source.is_file():
            shutil.copyfile(source, target)

    facts = {
        key: value
        for key, value in project.facts.items()
        if key not in ("title", "created")
    }
    return update(copy, **facts)


def _link_or_copy(source: str, target: str) -> None:
    """Link a file.

    That is safe, since clips and captions are replaced, never written into.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def is_exported(relative: Path) -> bool:
    """Return whether a file of a project belongs into its export."""
    is_hidden = any(part.startswith(".") for part in relative.parts)
    return relative.parts[0] not in NOT_EXPORTED and not is_hidden


def import_project(root: Path, archive: Path) -> Project:
    """Create a project from an exported zip; its runs then refer to its new paths.

    Raises:
        VideotuneError: if the archive holds no project.
    """
    temporary = root / f".import-{secrets.token_hex(4)}"
    try:
        source, facts = _unpack_project(archive, temporary)
        new_project = create(
            root, str(facts.get("title") or source.name)[:MAX_TITLE_LENGTH]
        )
        shutil.copytree(
            source, new_project.folder, dirs_exist_ok=True, copy_function=shutil.move
        )

        project = update(
            Project(new_project.folder, facts),
            title=new_project.title,
            folder=None,
            sources=None,
        )
        keys = draft(project)
        save_draft(project, {key: keys[key] for key in keys if key not in MANAGED_KEYS})

        old_folder = str(facts.get("folder") or "")
        if old_folder:
            for path in project.folder.glob("runs/*/*.json"):
                _replace_folder_in_file(path, old_folder, str(project.folder))
        return project
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack_project(archive: Path, target: Path) -> tuple[Path, dict[str, Any]]:
    """Unpack an exported project; return its folder and its facts."""
    folder = unpack(archive, target)
    project_files = [
        path for path in folder.glob(f"*/{PROJECT_FILE}") if path.is_file()
    ]
    if len(project_files) != 1:
        raise VideotuneError(
            f"{archive.name} is not an exported project: "
            f"it must hold one folder with a {PROJECT_FILE}"
        )

    facts = load_json(project_files[0], "export the project again")
    if not isinstance(facts, dict):
        raise VideotuneError(
            f"{archive.name}: its {PROJECT_FILE} is damaged: export the project again"
        )
    return project_files[0].parent, facts


def _replace_folder_in_file(path: Path, old: str, new: str) -> None:
    """Replace a project's former folder at the start of every text of a JSON file."""
    with suppress(VideotuneError):  # a damaged file stays; the run's page reports it
        write_json(path, _replace_folder(load_json(path, ""), old, new))


def _replace_folder(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: _replace_folder(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_folder(item, old, new) for item in value]
    if isinstance(value, str) and value.startswith((old + "/", old + "\\")):
        return new + value[len(old) :]
    return value


def clean_title(title: str) -> str:
    """Return a title with its white space normalized.

    Raises:
        VideotuneError: if it is empty or too long.
    """
    title = " ".join(title.split())
    if not title:
        raise VideotuneError("a project needs a name: type one")
    if len(title) > MAX_TITLE_LENGTH:
        raise VideotuneError(
            f"the project name has {len(title)} characters: use at most {MAX_TITLE_LENGTH}"
        )
    return title


def update(project: Project, **facts: Any) -> Project:
    """Change some facts of a project, also on disk; None removes a fact."""
    merged = {**project.facts, **facts}
    new_facts = {key: value for key, value in merged.items() if value is not None}
    write_json(project.folder / PROJECT_FILE, new_facts)
    return Project(project.folder, new_facts)


def draft(project: Project) -> dict[str, Any]:
    """Return the keys that the user has set (the project's ``config.json``)."""
    path = project.folder / "config.json"
    if not path.is_file():
        return {}
    keys = load_json(path, "fix it, or remove it to start again")
    return keys if isinstance(keys, dict) else {}


def save_draft(project: Project, keys: Mapping[str, Any]) -> None:
    """Write the keys that the user has set."""
    write_json(project.folder / "config.json", dict(keys))


def datasets(project: Project) -> list[dict[str, Any]]:
    """Return the datasets of the project: its clips, then other folders and Hub
    datasets.
    """
    rows: list[dict[str, Any]] = []
    if has_visible_files(project.folder / CLIPS):
        rows.append({"path": str(project.folder / CLIPS)})
    if has_visible_files(project.folder / HELD_OUT):
        rows.append({"path": str(project.folder / HELD_OUT), "kind": "validation"})

    sources = project.facts.get("sources", ())
    return rows + [dict(source) for source in sources]


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
        VideotuneError: if the project has no clips.
    """
    rows = datasets(project)
    if not rows:
        raise VideotuneError("there are no clips yet: add some on the page Data")

    config_path = project.folder / "command.json"
    write_json(config_path, {**draft(project), "datasets": rows})
    return ["--preset", project.preset, "--config", str(config_path)]


def skip_arguments(project: Project) -> list[str]:
    """Return the arguments that allow skipped clips, if the user has agreed to that."""
    return ["--allow-skips", "all"] if project.facts.get("allow_skips") else []
