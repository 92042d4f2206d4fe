"""Uploads: checked by their first bytes, named safely, and moved to the project's
clips.
"""

import os
import re
import secrets
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from videotune.data.archives import unpack
from videotune.data.clip_file import CAPTION_SUFFIXES, CLIP_SUFFIXES
from videotune.data.file_checks import ARCHIVES, type_of_file
from videotune.errors import VideotuneError
from videotune.files import hash_file, size_text
from videotune.studio.projects import (
    CLIPS,
    COMING_PREFIX,
    UNPACKING_PREFIX,
    UPLOADS,
    Project,
    inside,
)

TEXT_SUFFIXES = (*CAPTION_SUFFIXES, ".csv", ".jsonl")

PHONE_PICTURES = (".heic", ".heif", ".avif")
"""Suffixes of pictures whose content begins as that of a video does."""
"""Captions, and lists of captions."""

MAX_BYTES = 20_000_000_000
"""Size limit of an upload."""

MAX_TEXT_BYTES = 20_000_000
"""Size limit of a text."""

MAX_FOLDER_DEPTH = 8
_placing = Lock()
"""Held from the check that a name is free until the file has it."""

UNSAFE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f<>:\"|?*\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class UploadResult:
    """The result of an upload."""

    name: str

    taken: bool
    """Whether the file is in the project."""

    reason: str
    """The message to show."""

    files: int = 1


def content_kind(path: Path) -> str:
    """Return video, image, archive, text, empty or unknown, by the content, not the
    name.
    """
    with path.open("rb") as file:
        head = file.read(65536)
    if not head:
        return "empty"

    kind = type_of_file(path)
    # A text may begin with BZh, the mark of bzip2.
    if kind in ("", "bz2") and b"\0" not in head:
        return "text"
    if kind in ARCHIVES:
        return "archive"
    return kind or "unknown"


def rejection_reason(path: Path, name: str) -> str | None:
    """Return why a file is rejected, or None if it is accepted."""
    suffix = Path(name).suffix.lower()
    kind = content_kind(path)
    if kind == "empty":
        return "the file is empty: the upload was cut off, or it was never written; send it again"
    if suffix in CLIP_SUFFIXES:
        return _clip_rejection(kind)
    if suffix in TEXT_SUFFIXES:
        return _text_rejection(path, kind)
    if kind == "archive":
        return None

    if kind in ("video", "image"):
        is_picture = kind == "image" or suffix in PHONE_PICTURES
        content = "picture" if is_picture else "video"
        supported = "a .png or .jpg" if is_picture else "an .mp4 or .mov"
        ending = f"files ending in {suffix}" if suffix else "files without a suffix"
        return (
            f"it looks like a {content}, but {ending} are not supported; "
            f"save it as {supported} file"
        )
    return "it is not a video, picture, caption (.txt, .csv, .jsonl) or archive (.zip, .tar)"


def _clip_rejection(kind: str) -> str | None:
    if kind in ("video", "image"):
        return None
    content = "text" if kind == "text" else "not a video or picture"
    return f"its name is that of a clip, but its content is {content}: export it again"


def _text_rejection(path: Path, kind: str) -> str | None:
    if kind != "text":
        return (
            "its name is that of a text, but its content is not: "
            "save the caption as plain text (UTF-8)"
        )
    if path.stat().st_size > MAX_TEXT_BYTES:
        return f"the text is larger than {MAX_TEXT_BYTES // 10**6} MB, too large for captions"
    return None


def safe_name(name: str) -> str:
    """Return the last part of a name, without characters that file systems reject.

    Raises:
        VideotuneError: if nothing is left.
    """
    last_part = unicodedata.normalize("NFC", name).replace("\\", "/").rpartition("/")[2]
    cleaned = UNSAFE_CHARACTERS.sub("_", last_part).strip().strip(".")
    if not cleaned.lstrip("._"):
        raise VideotuneError(f"{name!r} is not a valid file name")

    stem, suffix = os.path.splitext(cleaned.lstrip("."))
    return stem[:120] + suffix


@contextmanager
def temporary_upload(root: Path, name: str) -> Iterator[Path]:
    """Yield a path to receive a file at, on the disk of the projects; removed at the
    end.
    """
    folder = root / UPLOADS / secrets.token_hex(8)
    folder.mkdir(parents=True)
    try:
        yield folder / safe_name(name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def receive(request: Request, path: Path, max_bytes: int = MAX_BYTES) -> None:
    """Write the body of a request to a file.

    Raises:
        VideotuneError: if it is larger than the limit.
    """
    with path.open("wb") as file:
        async for chunk in request.stream():
            await run_in_threadpool(file.write, chunk)
            if file.tell() > max_bytes:
                raise VideotuneError(f"it has more than {size_text(max_bytes)}")


def accept(
    project: Project, paths: Iterable[Path], name: str = ""
) -> list[UploadResult]:
    """Add received files to the project's clips; archives are unpacked into a folder.

    An identical file stays as it is. A file with the name of another is rejected, never
    written over it.

    Args:
        project: the project.
        paths: the received files.
        name: name under which they were sent; its folders are kept, since lists of
            captions name files by them.
    """
    parts = name.replace("\\", "/").split("/")[:-1]
    folders = [part for part in parts if part.strip(". ")][:MAX_FOLDER_DEPTH]

    results = []
    for path in paths:
        results += _accept_file(project.folder / CLIPS, path, folders)
    return results


def _accept_file(clips: Path, path: Path, folders: Sequence[str]) -> list[UploadResult]:
    try:
        name = safe_name(path.name)
        reason = rejection_reason(path, name)
        if reason is not None:
            return [UploadResult(name, False, reason)]

        target = clips
        if folders:
            target = inside(clips, "/".join(map(safe_name, folders)))

        is_named_archive = Path(name).suffix.lower() not in (
            *CLIP_SUFFIXES,
            *TEXT_SUFFIXES,
        )
        if is_named_archive and content_kind(path) == "archive":
            temporary = clips.parent / f"{UNPACKING_PREFIX}{secrets.token_hex(4)}"
            return _accept_archive(path, name, target, temporary)
        return [_add(path, target / name, name)]
    except (VideotuneError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.strerror:
            message = error.strerror
        return [UploadResult(path.name, False, message.replace(str(path), path.name))]


def _accept_archive(
    path: Path, name: str, target: Path, temporary: Path
) -> list[UploadResult]:
    """Add the files of an archive, each checked as if it had been sent by itself."""
    stem = re.sub(r"(\.tar)?\.\w+$", "", name) or "archive"
    try:
        folder = unpack(path, temporary)
        files = [
            file
            for file in folder.rglob("*")
            if file.is_file() and not file.name.startswith(".")
        ]
        results = []
        for file in sorted(files):
            relative = file.relative_to(folder)
            results.append(
                _accept_member(file, target / stem / relative, f"{name}: {relative}")
            )

        rejected = [result for result in results if not result.taken]
        count = len(results) - len(rejected)
        summary = UploadResult(
            name, count > 0, f"{count} files unpacked into {CLIPS}/{stem}", count
        )
        return [summary, *rejected]
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _accept_member(file: Path, target: Path, label: str) -> UploadResult:
    reason = rejection_reason(file, file.name)
    if reason is None and content_kind(file) == "archive":
        reason = "archives inside archives are not unpacked"
    if reason:
        return UploadResult(label, False, reason)
    return _add(file, target, label)


def _add(path: Path, target: Path, name: str) -> UploadResult:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return _result_beside(path, target, name)

    # The move may cross file systems; the second move makes the file appear complete.
    temporary = target.with_name(f"{COMING_PREFIX}{secrets.token_hex(4)}-{target.name}")
    shutil.move(str(path), temporary)
    if not _place(temporary, target):  # another window was faster
        result = _result_beside(temporary, target, name)
        temporary.unlink()
        return result
    return UploadResult(name, True, "added")


def _result_beside(path: Path, target: Path, name: str) -> UploadResult:
    """Return the result of a file whose name is taken."""
    if target.is_file() and hash_file(target) == hash_file(path):
        return UploadResult(name, True, "was there already")
    return UploadResult(
        name,
        False,
        "another file already has this name: remove that file, or rename this one",
    )


def _place(temporary: Path, target: Path) -> bool:
    """Give a file its name unless that is taken; return whether it was free."""
    with _placing:
        if os.path.lexists(target):
            return False
        os.replace(temporary, target)
        return True
