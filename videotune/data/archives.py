"""Archives: a zip or tar of clips, unpacked once into the cache, with nothing of it landing anywhere else.

Members are written by this module, never by zipfile's or tarfile's own extraction: no link, device, owner or mode of an
archive reaches the disk, and bytes are counted as they come, whatever the headers say.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from videotune import files
from videotune.errors import VideotuneError

from .members import ARCHIVE_SUFFIXES, Member, archive_kind, declared_bytes, members_of

if TYPE_CHECKING:
    from .index import Progress

__all__ = ["ARCHIVE_SUFFIXES", "Unpacked", "archive_kind", "unpack"]

RATIO, MARGIN = 200, 10**9
"""An archive may hold at most RATIO times its own bytes, and MARGIN more; videos hardly shrink at all."""

RESERVE = 10**9
"""Bytes of the disk that stay free."""

MEMBERS = 1_000_000
"""An archive may hold so many members."""

_MARK = ".unpacked.json"
_ASIDE = ".unpacking-"


@dataclass(frozen=True)
class Unpacked:
    """The folder that holds an archive's files, and what is to be said about it."""

    folder: Path
    notes: tuple[str, ...]


@dataclass
class _Written:
    """What has been unpacked so far below ``root``: ``sizes`` of files and targets of ``links`` by name, and the names as
    a computer that does not tell cases apart sees them; ``limit`` is how many bytes may come, ``too_much`` what is said
    of more."""

    archive: Path
    root: Path
    limit: int
    too_much: str
    tell: Callable[[str], None]
    used: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    alike: dict[str, str] = field(default_factory=dict)
    guessed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def unpack(archive: Path, cache: Path, progress: Progress | None = None) -> Unpacked:
    """The files of an archive, in ``cache``/archives/HASH; unpacked now unless they lie there, whole.

    ``progress`` counts megabytes of the archive. VideotuneError where the archive is damaged, locked by a password, too
    big for the disk or for what it is, or has a member that leads out of its folder; nothing of it stays then.
    """
    home = cache / "archives"
    try:
        kind = archive_kind(archive)
        if kind in (None, "7z", "rar"):
            raise VideotuneError(
                f"{archive} is {'no' if kind is None else f'a {kind}'} archive; zip, tar, tar.gz, tar.bz2 and tar.xz are "
                "read. Unpack it and give the folder."
            )
        home.mkdir(parents=True, exist_ok=True)
        name = _remembered_hash(archive, home, progress)
        with _alone(home, progress):
            for left in home.glob(f"{_ASIDE}*"):  # a killed process's: no other is at work here now
                shutil.rmtree(left)
            notes = _notes_of(home / name)
            if notes is None:
                changed = (home / name).exists()
                notes = _unpack_aside(archive, str(kind), home / name, progress)
                notes += [f"{archive}: its unpacked files had been changed; it was unpacked again"] if changed else []
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise VideotuneError(
            f"{archive} could not be unpacked into {home}: {error.strerror or error}{where}."
        ) from error
    return Unpacked(home / name, tuple(notes))


def _remembered_hash(archive: Path, home: Path, progress: Progress | None) -> str:
    """The hash of the archive's bytes, remembered by path, size and time of change."""
    book, about = home / "seen.json", archive.stat()
    try:
        seen = files.read_json(book) if book.exists() else {}
    except (ValueError, RecursionError):  # torn by a crash: it holds nothing that is not found again
        seen = {}
    stamp = [about.st_size, about.st_mtime_ns]
    row = seen.get(str(archive.absolute())) if isinstance(seen, dict) else None
    if isinstance(row, list) and len(row) == 3 and row[:2] == stamp and re.fullmatch("[0-9a-f]{32}", str(row[2])):
        return str(row[2])
    if progress is not None:
        progress(0, _megabytes(about.st_size), f"reading {archive.name}")
    name = files.hash_file(archive)
    seen = {**(seen if isinstance(seen, dict) else {}), str(archive.absolute()): [*stamp, name]}
    files.write_json(book, seen, durable=False)
    return name


@contextmanager
def _alone(home: Path, progress: Progress | None) -> Iterator[None]:
    """Hold the folder of archives for this process alone; waits for another that is at work there, and says so."""
    with (home / ".lock").open("a+b") as lock:
        if not _locked(lock, wait=False):
            if progress is not None:
                progress(0, 1, "waiting for another process that unpacks an archive")
            while not _locked(lock, wait=True):
                pass
        yield


def _locked(lock: IO[bytes], *, wait: bool) -> bool:
    """Whether the lock was got; Windows gives up waiting after ten seconds."""
    if os.name == "nt":
        import msvcrt

        try:
            msvcrt.locking(lock.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _notes_of(folder: Path) -> list[str] | None:
    """The notes of an archive that was unpacked here, or None unless all its files are there in their sizes."""
    try:
        about = files.read_json(folder / _MARK)
        whole = all(os.stat(f"{folder}/{name}").st_size == size for name, size in about["files"].items())
        return list(map(str, about["notes"])) if whole else None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _unpack_aside(archive: Path, kind: str, folder: Path, progress: Progress | None) -> list[str]:
    """Unpack beside ``folder`` and rename, so that it is there whole or not at all; the notes."""
    aside = folder.with_name(f"{_ASIDE}{os.getpid()}-{folder.name}")
    try:
        with archive.open("rb") as raw:
            size = os.fstat(raw.fileno()).st_size

            def tell(name: str) -> None:
                if progress is not None:
                    progress(_megabytes(raw.tell()), _megabytes(size), f"unpacking {name}")

            written = _room(archive, size, declared_bytes(raw, kind), aside, tell)
            raw.seek(0)
            aside.mkdir()
            _write_all(members_of(archive, raw, kind), written)
        files.write_json(aside / _MARK, {"archive": archive.name, "notes": written.notes, "files": written.sizes})
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(aside, folder)
        files.sync_folder(folder.parent)
        return list(written.notes)
    except VideotuneError:
        raise
    except NotImplementedError as error:
        raise VideotuneError(
            f"{archive} uses a compression that is not read here ({error}). Unpack it and give the folder."
        ) from error
    except (OSError, EOFError, ValueError, RuntimeError, OverflowError, struct.error, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the archive's bytes
            raise
        raise _damaged(archive, error) from error
    except (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError) as error:
        raise _damaged(archive, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # what cannot go now, the next one sweeps


def _damaged(archive: Path, error: Exception) -> VideotuneError:
    said = str(error) or type(error).__name__
    return VideotuneError(f"{archive} is damaged or cut short ({said}). Fetch it or pack it again.")


def _room(archive: Path, size: int, declared: int, aside: Path, tell: Callable[[str], None]) -> _Written:
    """How many bytes may be unpacked; VideotuneError where what the archive says of itself is too much already."""
    free = shutil.disk_usage(aside.parent).free - RESERVE
    by_ratio = RATIO * size + MARGIN
    needed = f", {declared / 1e9:.1f} GB are needed" if declared > free else ""
    full = (
        f"{archive} does not fit on the disk of {aside.parent}: {max(0, free) / 1e9:.1f} GB can be used there{needed}. "
        "Make room, or set cache_dir to another disk."
    )
    bomb = (
        f"{archive} unpacks to more than {by_ratio / 1e9:.1f} GB, over {RATIO} times its size: no archive of clips does. "
        "If it is in order, unpack it and give the folder."
    )
    if max(declared, size) > free:
        raise VideotuneError(full)
    if declared > by_ratio:
        raise VideotuneError(bomb)
    return _Written(archive, aside, min(free, by_ratio), full if free < by_ratio else bomb, tell)


def _megabytes(num_bytes: int) -> int:
    return -(-num_bytes // 10**6)


def _write_all(members: Iterable[Member], written: _Written) -> None:
    """Write all files of an archive, then copies of those that its links stand for, and note what is odd about names."""
    for count, member in enumerate(members, start=1):
        if count > MEMBERS:
            raise VideotuneError(f"{written.archive} has more than {MEMBERS:,} members. Unpack it and give the folder.")
        _write_member(member, written)
    for name in written.links:
        with (written.root / _followed(name, written)).open("rb") as source:
            _copy(source, name, written)
    if written.guessed:
        written.notes.append(
            f"{written.archive}: the encoding of {len(written.guessed)} names is not declared; they were read as CP437 "
            f"({written.guessed[0]})"
        )


def _write_member(member: Member, written: _Written) -> None:
    name = _safe_name(member.name, written.archive)
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
    if not name or hidden or member.kind == "folder":  # a folder is made when a file needs it
        return
    if member.kind not in ("file", "link"):
        raise _refused(written.archive, member.name, f"is {member.kind}")
    if name in written.sizes or name in written.links:
        raise _refused(written.archive, member.name, "stands in it twice")
    same = written.alike.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
    if same != name:
        written.notes.append(
            f"{written.archive}: {same} and {name} differ only in case or in how accents are written; "
            "on Windows and macOS they are one file"
        )
    if member.guessed:
        written.guessed.append(name)
    if member.kind == "link":
        written.links[name] = _link_target(member, name, written.archive)
        return
    with member.open() as source:
        _copy(source, name, written)


def _copy(source: IO[bytes], name: str, written: _Written) -> None:
    """Write one file, counting its bytes before they reach the disk."""
    path = written.root / name
    try:
        os.makedirs(path.parent, exist_ok=True)
        target = path.open("xb")
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise _refused(written.archive, name, "is a file and a folder, or one file under two names") from error
    begin = written.used
    with target:
        written.tell(name)
        while chunk := source.read(1 << 22):
            written.used += len(chunk)
            if written.used > written.limit:
                raise VideotuneError(written.too_much)
            target.write(chunk)
            written.tell(name)
    written.sizes[name] = written.used - begin


def _refused(archive: Path, name: str, why: str) -> VideotuneError:
    return VideotuneError(
        f"{archive} is refused: its member {name!r} {why}. "
        "Pack the clips anew without it; or, if you trust it, unpack it yourself and give the folder."
    )


def _safe_name(name: str, archive: Path) -> str:
    """The member's path below the archive's folder, with / between its parts; VideotuneError where it leads out."""
    plain = name.replace("\\", "/")
    parts = [part for part in plain.split("/") if part not in ("", ".")]
    if plain.startswith("/") or re.match("[A-Za-z]:", plain):
        raise _refused(archive, name, "has an absolute path")
    if ".." in parts:
        raise _refused(archive, name, "leads out of its folder")
    if "\0" in plain:
        raise _refused(archive, name, "has a NUL in its name")
    try:
        plain.encode()
    except UnicodeEncodeError as error:
        raise _refused(archive, name, "has a name that is not UTF-8") from error
    return "/".join(parts)


def _link_target(member: Member, name: str, archive: Path) -> str:
    """Where a link leads, below the archive's folder; VideotuneError where it leads out."""
    plain = member.link.replace("\\", "/")
    parts = [] if member.hard else name.split("/")[:-1]
    out = plain.startswith("/") or re.match("[A-Za-z]:", plain) is not None
    for part in plain.split("/"):
        if part == "..":
            out = out or not parts
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    if out:
        raise _refused(archive, member.name, f"is a link out of its folder, to {member.link!r}")
    return "/".join(parts)


def _followed(name: str, written: _Written) -> str:
    """The file at the end of a chain of links."""
    target, steps = name, 0
    while target in written.links and steps < 40:
        target, steps = written.links[target], steps + 1
    if target not in written.sizes:
        raise _refused(written.archive, name, f"is a link to {target!r}, which is no file of it")
    return target
