"""What a person sends in: looked at by its first bytes, named safely, and put into the project's folder of clips."""

import os
import re
import secrets
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from videotune.data.archives import unpack
from videotune.data.clip_file import CLIP_SUFFIXES
from videotune.data.file_checks import ARCHIVES, type_of_file
from videotune.errors import VideotuneError
from videotune.files import hash_file
from videotune.studio.projects import CLIPS, Project, inside

TEXT_SUFFIXES = (".txt", ".csv", ".jsonl")
"""Captions, and lists of captions."""

UPLOADS = ".uploads"
"""The folder of the root in which files lie while they are received."""

MOST = 20_000_000_000
MOST_TEXT = 20_000_000
"""Bytes of the largest file that is taken, and of the largest text."""


@dataclass(frozen=True)
class Taken:
    """What became of a file that was sent: whether it is in, and what is to be said."""

    name: str
    taken: bool
    reason: str
    files: int = 1


def sniff(path: Path) -> str:
    """video, image, archive, text, empty or unknown, by what the file begins with, whatever its name says."""
    with path.open("rb") as file:
        head = file.read(65536)
    kind = type_of_file(path)
    if kind in ("", "bz2") and head and b"\0" not in head:  # a text may begin with BZh
        return "text"
    return "archive" if kind in ARCHIVES else kind or ("unknown" if head else "empty")


def refusal(path: Path, name: str) -> str | None:
    """Why a file is not taken, in words; None where it may come in."""
    suffix = Path(name).suffix.lower()
    kind = sniff(path)
    if kind == "empty":
        return "the file is empty: it was cut off on its way, or never written; send it again"
    if suffix in CLIP_SUFFIXES:
        if kind in ("video", "image"):
            return None
        what = "text" if kind == "text" else "no video or picture"
        return f"it is named like a clip, but its content is {what}: export it again"
    if suffix in TEXT_SUFFIXES:
        if kind != "text":
            return "it is named like a text, but its content is none: save the caption as plain text (UTF-8)"
        long = path.stat().st_size > MOST_TEXT
        return f"a text of more than {MOST_TEXT // 10**6} MB is no caption" if long else None
    if kind == "archive":
        return None
    if kind in ("video", "image"):
        known = ", ".join(CLIP_SUFFIXES[:6])
        ending = suffix or "nothing"
        return f"it looks like a {kind}, but files ending in {ending} are not read; convert it ({known} …)"
    return "it is no video, picture, caption (.txt, .csv, .jsonl) or archive (.zip, .tar)"


def safe_name(name: str) -> str:
    """The last part of a name, without what file systems or readers stumble over.

    Raises VideotuneError where nothing is left.
    """
    last = unicodedata.normalize("NFC", name).replace("\\", "/").rpartition("/")[2]
    plain = (
        re.sub(r"[\x00-\x1f\x7f<>:\"|?*\u202a-\u202e\u2066-\u2069]", "_", last)
        .strip()
        .strip(".")
    )
    if not plain or (plain != plain.lstrip("._") and not plain.lstrip("._")):
        raise VideotuneError(f"{name!r} is not a valid file name")
    stem, suffix = os.path.splitext(plain.lstrip("."))
    return stem[:120] + suffix


@contextmanager
def incoming(root: Path, name: str) -> Iterator[Path]:
    """Where a file of that name is received, on the disk of the projects; removed at the end of the block."""
    folder = root / UPLOADS / secrets.token_hex(8)
    folder.mkdir(parents=True)
    try:
        yield folder / safe_name(name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def receive(request: Request, path: Path) -> None:
    """Write a request's body to a file; VideotuneError where it is longer than the largest file that is taken."""
    with path.open("wb") as file:
        async for part in request.stream():
            await run_in_threadpool(file.write, part)
            if file.tell() > MOST:
                raise VideotuneError(f"it has more than {MOST // 10**9} GB")


def accept(project: Project, paths: Iterable[Path], name: str = "") -> list[Taken]:
    """Put received files among the project's clips; an archive's files into a folder of its name.

    ``name``: what the file was sent as; the folders in it are kept, made safe, since lists of captions name files by them.

    A file that is there already is left; one of the same name and other content is refused, never written over.
    """
    folders = [part for part in name.replace("\\", "/").split("/")[:-1] if part.strip(". ")][:8]
    return [
        found for path in paths for found in _accept_one(project.folder / CLIPS, path, folders)
    ]


def _accept_one(clips: Path, path: Path, folders: Sequence[str]) -> list[Taken]:
    try:
        name = safe_name(path.name)
        why = refusal(path, name)
        if why is not None:
            return [Taken(name, False, why)]
        home = inside(clips, "/".join(map(safe_name, folders))) if folders else clips
        suffix = Path(name).suffix.lower()
        if sniff(path) == "archive" and suffix not in (*CLIP_SUFFIXES, *TEXT_SUFFIXES):
            return _accept_archive(
                path, name, home, clips.parent / f".unpacking-{secrets.token_hex(4)}"
            )
        return [_put(path, home / name, name)]
    except (VideotuneError, OSError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        return [Taken(path.name, False, str(why).replace(str(path), path.name))]


def _accept_archive(path: Path, name: str, home: Path, cache: Path) -> list[Taken]:
    """The files of an archive, each looked at as if it had been sent alone."""
    stem = re.sub(r"(\.tar)?\.\w+$", "", name) or "archive"
    try:
        folder = unpack(path, cache)
        refused = []
        taken = 0
        for file in sorted(
            one for one in folder.rglob("*") if one.is_file() and not one.name.startswith(".")
        ):
            relative = file.relative_to(folder)
            why = refusal(file, file.name)
            told = f"{name}: {relative}"
            if why is None and sniff(file) == "archive":
                why = "an archive within an archive is not unpacked"
            got = Taken(told, False, why) if why else _put(file, home / stem / relative, told)
            taken += got.taken
            refused += [] if got.taken else [got]
        return [
            Taken(name, taken > 0, f"{taken} files unpacked into {CLIPS}/{stem}", taken),
            *refused,
        ]
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _put(path: Path, target: Path, name: str) -> Taken:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        if target.is_file() and hash_file(target) == hash_file(path):
            return Taken(name, True, "was there already")
        return Taken(
            name,
            False,
            "another file of that name is there: remove that one first, or rename this one",
        )
    aside = target.with_name(f".coming-{os.getpid()}-{target.name}")
    shutil.move(str(path), aside)
    os.replace(aside, target)
    return Taken(name, True, "added")
