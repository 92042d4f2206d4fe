"""Projects: a folder each below the root; what a person calls it, and paths that cannot leave it."""

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

BOOK = "project.json"
"""What a folder must hold to be a project."""

CLIPS = "clips"
HELD_OUT = "held-out"
REMOVED = "removed"
ORIGINALS = "originals"
"""Folders of a project: clips to train on, clips to measure with, clips taken out, videos that were cut into scenes."""

ELSEWHERE = ("cache_dir", "output_model_destination")
"""Keys that the studio sets itself: files go into the project."""

PRESET = "toy"
"""What a new project begins with: the one preset that runs anywhere."""


@cache
def texts() -> Mapping[str, Any]:
    """What codes are called on the pages (texts.json): reasons, states, formats, parts of the form."""
    return read_json(Path(__file__).with_name("texts.json"))


@dataclass(frozen=True)
class Project:
    """A project's folder, its name in addresses (the folder's own), and what its ``project.json`` says."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What addresses call it."""
        return self.folder.name

    @property
    def title(self) -> str:
        """What the person calls it."""
        return str(self.facts.get("title") or self.name)

    @property
    def preset(self) -> str:
        """The preset that its runs begin with."""
        return str(self.facts.get("preset") or PRESET)


def inside(folder: Path, relative: str) -> Path:
    """The path of ``relative`` below ``folder``.

    Raises VideotuneError where it is absolute, climbs out, is hidden, or is led out by a link.
    """
    plain = relative.replace("\\", "/")
    parts = [part for part in plain.split("/") if part not in ("", ".")]
    odd = plain.startswith("/") or re.match("[A-Za-z]:", plain) or "\0" in plain or not parts
    if odd or any(part.startswith(".") for part in parts):
        raise VideotuneError(f"{relative!r} is not a path within {folder.name}")
    path = folder.joinpath(*parts)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise VideotuneError(f"{relative!r} leads out of {folder.name}")
    return path


def named(root: Path, name: str) -> Project:
    """The project of that name.

    Raises VideotuneError where there is none.
    """
    if not name or "/" in name or "\\" in name or not (inside(root, name) / BOOK).is_file():
        raise VideotuneError(f"there is no project {name!r}: choose one on the page Projects")
    folder = inside(root, name)
    facts = load_json(folder / BOOK, "fix it, or remove it and create it again")
    return Project(folder, facts if isinstance(facts, dict) else {})


def projects(root: Path) -> list[Project]:
    """All projects, the one last made first; folders that are none are passed over."""
    found = [
        _listed(path.parent)
        for path in root.glob(f"*/{BOOK}")
        if not path.parent.name.startswith(".")
    ]
    return sorted(found, key=lambda one: (-float(one.facts.get("created") or 0), one.name))


def _listed(folder: Path) -> Project:
    """The project in a folder; one whose file is damaged is listed by that, so that the others can be opened."""
    try:
        return named(folder.parent, folder.name)
    except VideotuneError:
        return Project(folder, {"title": f"{folder.name} ({BOOK} is damaged)"})


def create(root: Path, title: str) -> Project:
    """A new project with its folders; its name is its title in plain letters.

    Raises VideotuneError for a title that says nothing.
    """
    title = clean_title(title)
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    stem = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")[:40].strip("-") or "project"
    for number in range(1, 1000):
        folder = root / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            for part in (CLIPS, "runs", "jobs"):
                (folder / part).mkdir()
            facts = {
                "title": title,
                "created": round(time.time(), 3),
                "archived": False,
                "preset": PRESET,
            }
            return change(Project(folder, facts))
    raise VideotuneError(f"there are too many projects called {title!r}: give another name")


def duplicate(root: Path, project: Project) -> Project:
    """A new project with another's clips, captions and settings; clips are hard links where the disk has them."""
    copy = create(root, f"{project.title[:72]} (copy)")
    for part in (CLIPS, HELD_OUT, "config.json"):
        if (source := project.folder / part).is_dir():
            shutil.copytree(source, copy.folder / part, copy_function=_link, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, copy.folder / part)
    return change(
        copy,
        **{
            key: value
            for key, value in project.facts.items()
            if key not in ("title", "created")
        },
    )


def _link(source: str, target: str) -> None:
    """The same file by another name: nothing writes into a clip or a caption, new content comes as a new file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


NOT_MOVED = ("bin", "jobs", ".studio", ".unpacking")
"""Folders of a project that its export leaves out: the bin, the processes of this computer, what can be made again."""


def is_exported(relative: Path) -> bool:
    """Whether a file of a project belongs into its export."""
    return relative.parts[0] not in NOT_MOVED and not any(
        part.startswith(".") for part in relative.parts
    )


def import_project(root: Path, archive: Path) -> Project:
    """The project in a zip that was exported, under a name that is free; its runs name its clips where they lie now.

    Raises VideotuneError where the archive holds no project.
    """
    place = root / f".import-{secrets.token_hex(4)}"
    try:
        folder = unpack(archive, place)
        books = [path for path in folder.glob(f"*/{BOOK}") if path.is_file()]
        if len(books) != 1:
            raise VideotuneError(
                f"{archive.name} is no project: one folder with a {BOOK} is wanted"
            )
        facts = load_json(books[0], "export the project again")
        if not isinstance(facts, dict):
            raise VideotuneError(
                f"{archive.name}: its {BOOK} is damaged: export the project again"
            )
        new = create(root, str(facts.get("title") or books[0].parent.name)[:80])
        shutil.copytree(
            books[0].parent, new.folder, dirs_exist_ok=True, copy_function=shutil.move
        )
        moved = change(Project(new.folder, facts), title=new.title, folder=None, sources=None)
        save_draft(
            moved, {key: value for key, value in draft(moved).items() if key not in ELSEWHERE}
        )
        for path in moved.folder.glob("runs/*/*.json"):
            _rename_root(path, str(facts.get("folder") or ""), str(moved.folder))
        return moved
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _rename_root(path: Path, old: str, new: str) -> None:
    """Replace a project's former folder at the begin of every text of a JSON file."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(one) for key, one in value.items()}
        if isinstance(value, list):
            return [moved(one) for one in value]
        return (
            new + value[len(old) :]
            if isinstance(value, str) and value.startswith((old + "/", old + "\\"))
            else value
        )

    if old:
        with suppress(VideotuneError):  # a damaged file stays as it is; the run's page says so
            write_json(path, moved(load_json(path, "")))


def clean_title(title: str) -> str:
    """A title without the blanks around it; VideotuneError where nothing is left, or too much."""
    title = " ".join(title.split())
    if not title:
        raise VideotuneError("a project needs a name: type one")
    if len(title) > 80:
        raise VideotuneError(
            f"a project's name has at most 80 letters, this one has {len(title)}"
        )
    return title


def change(project: Project, **facts: Any) -> Project:
    """The project with some of its facts changed, on disk too; None takes a fact away."""
    kept = {
        key: value for key, value in {**project.facts, **facts}.items() if value is not None
    }
    write_json(project.folder / BOOK, kept)
    return Project(project.folder, kept)


def draft(project: Project) -> dict[str, Any]:
    """The person's own keys, as they stand in the project's ``config.json``; empty where there is none yet."""
    path = project.folder / "config.json"
    value = load_json(path, "fix it, or remove it to start again") if path.is_file() else {}
    return value if isinstance(value, dict) else {}


def save_draft(project: Project, keys: Mapping[str, Any]) -> None:
    """Write the person's own keys."""
    write_json(project.folder / "config.json", dict(keys))


def datasets(project: Project) -> list[dict[str, Any]]:
    """What the project trains on: its own clips, those held out, and other folders or Hub datasets that it names."""
    rows: list[dict[str, Any]] = []
    if any_file(project.folder / CLIPS):
        rows.append({"path": str(project.folder / CLIPS)})
    if any_file(project.folder / HELD_OUT):
        rows.append({"path": str(project.folder / HELD_OUT), "kind": "validation"})
    return rows + [dict(row) for row in project.facts.get("sources", ())]


def seen_files(folder: Path) -> Iterator[Path]:
    """Files at any depth that are not hidden and lie in no hidden folder, as the trainer's cache does."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in files if not name.startswith("."))


def any_file(folder: Path) -> bool:
    """Whether a folder holds a file that is not hidden."""
    return any(True for _ in seen_files(folder))


def words(project: Project) -> list[str]:
    """The words of the command line that mean this project's preset, settings and clips; writes ``command.json``.

    Raises VideotuneError where it has no clips yet.
    """
    rows = datasets(project)
    if not rows:
        raise VideotuneError("there are no clips yet: add some on the page Data")
    write_json(project.folder / "command.json", {**draft(project), "datasets": rows})
    return ["--preset", project.preset, "--config", str(project.folder / "command.json")]


def skips(project: Project) -> list[str]:
    """The words that let a run begin although clips are skipped, where the person has agreed to that."""
    return ["--allow-skips", "all"] if project.facts.get("allow_skips") else []
