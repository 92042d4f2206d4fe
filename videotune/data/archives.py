"""Archives: a zip or tar of clips, unpacked once into the cache, with nothing of it landing anywhere else.

Files are written by this module under names that it has checked: no link, device, owner or mode of an archive reaches
the disk. Both formats give no more bytes of a member than its header declares, so that the declared sizes are the limit.
"""

import lzma
import os
import re
import shutil
import stat
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from filelock import FileLock, Timeout

from videotune import files
from videotune.data.file_checks import type_of_file
from videotune.errors import VideotuneError

ARCHIVE_SUFFIXES = (
    ".zip",
    ".tar",
    ".tar.gz",
    ".tgz",
    ".tar.xz",
    ".txz",
    ".tar.bz2",
    ".tbz2",
    ".tar.zst",
    ".tzst",
)
"""Names of archives (compared in lower case). What a file is, its bytes say."""

RATIO = 200
MARGIN = 10**9
"""An archive may hold at most RATIO times its own bytes, and MARGIN more; videos hardly shrink at all."""

RESERVE = 10**9
"""Bytes of the disk that stay free."""

MAX_MEMBERS = 1_000_000
"""The most members that an archive may have."""

_READ = ("zip", "tar", "gz", "bz2", "xz", *(("zst",) if sys.version_info >= (3, 14) else ()))
_ZIP_READ = (0, 8, 12, 14, *((93,) if sys.version_info >= (3, 14) else ()))
_SIZES = ".unpacked.json"

FileProgressFn = Callable[[int, int, str], None]
"""Called with how much is done, of how much, and what comes next."""


def silent(done: int, total: int, text: str) -> None:
    """The progress that nobody wants to see."""


class _Member(NamedTuple):
    """A member of an archive; ``fault`` says why it is refused, or is empty."""

    name: str
    size: int
    is_folder: bool
    fault: str
    open: Callable[[], Any]


def unpack(archive: Path, cache: Path, progress: FileProgressFn = silent) -> Path:
    """The folder below ``cache``/archives with the archive's files; unpacked now unless they lie there, whole.

    ``progress`` counts megabytes of the archive. VideotuneError where the archive is damaged, locked by a password, too
    big for the disk or for what it is, or has a member that is a link or leads out of its folder; nothing of it stays.
    """
    home = cache / "archives"
    try:
        kind = type_of_file(archive)
        about = archive.stat()
        if kind not in _READ:
            what = f"a {kind} file" if kind else "no archive"
            read = "zip, tar, gz, bz2 and xz are read (zst from Python 3.14 on)"
            raise VideotuneError(f"{archive} is {what}; {read}. Unpack it and give the folder.")
        folder = home / files.digest(
            [str(archive.absolute()), about.st_size, about.st_mtime_ns]
        )
        home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(home / ".lock")
        try:
            alone = lock.acquire(timeout=0)
        except Timeout:
            progress(0, 1, "waiting for another process that unpacks an archive")
            alone = lock.acquire()
        with alone:
            for left in home.glob(
                ".part-*"
            ):  # a killed process's: no other is at work here now
                shutil.rmtree(left)
            if not _is_whole(folder):
                with files.whole_folder(folder) as aside:
                    _unpack(archive, kind, aside, progress)
                files.sync_folder(home)
    except OSError as error:
        why = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise VideotuneError(f"{archive} could not be unpacked into {home}: {why}.") from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether all files of an archive that was unpacked here are there in their sizes."""
    try:
        sizes = files.read_json(folder / _SIZES)
        return all(os.stat(f"{folder}/{name}").st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError, RecursionError):
        return False


def _unpack(archive: Path, kind: str, folder: Path, progress: FileProgressFn) -> None:
    """Write all files of an archive; VideotuneError for whatever an archive can do wrong, OSError of the disk."""
    try:
        with archive.open("rb") as raw:
            size = os.fstat(raw.fileno()).st_size

            def report(name: str) -> None:
                progress(-(-raw.tell() // 10**6), -(-size // 10**6), f"unpacking {name}")

            members = _zip_members(raw) if kind == "zip" else _tar_members(raw, kind)
            sizes = _write_all(archive, members, folder, size, report)
        files.write_json(folder / _SIZES, sizes)
    except VideotuneError:
        raise
    except (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, struct.error,
            OSError, EOFError, ValueError, RuntimeError, OverflowError) as error:  # fmt: skip
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # of the disk, not of the archive's bytes
            raise
        what = str(error) or type(error).__name__
        hint = "" if kind in ("zip", "tar") else f", or the .{kind} holds no tar"
        raise VideotuneError(
            f"{archive} is damaged or cut short{hint} ({what}). Fetch it or pack it again."
        ) from error


def _write_all(
    archive: Path,
    members: Iterator[_Member],
    folder: Path,
    size: int,
    report: Callable[[str], None],
) -> dict[str, int]:
    """Write the files of the members, within the limits; their sizes by name."""
    free = max(0, shutil.disk_usage(folder).free - RESERVE)
    most = RATIO * size + MARGIN
    sizes: dict[str, int] = {}
    used = 0
    for count, member in enumerate(members, start=1):
        name = _checked_name(archive, member)
        used += member.size
        if used > free:
            room = f"{free / 1e9:.1f} GB are free on the disk of {folder.parent}"
            raise VideotuneError(
                f"{archive} does not fit: {room}. Free some space, or set cache_dir to another disk."
            )
        if used > most or count > MAX_MEMBERS:
            limits = (
                f"{most / 1e9:.1f} GB, over {RATIO} times its size, or {MAX_MEMBERS:,} files"
            )
            raise VideotuneError(
                f"{archive} unpacks to more than {limits}. If you trust it, unpack it yourself."
            )
        hidden = any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
        if member.is_folder or hidden or not name:  # a folder is made when a file needs it
            continue
        report(name)
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            target = (folder / name).open("xb")
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise _refused(
                archive, name, "is there twice, or is a file and a folder"
            ) from error
        with target, member.open() as source:
            while chunk := source.read(1 << 22):
                target.write(chunk)
                report(name)
        sizes[name] = (folder / name).stat().st_size
    return sizes


def _checked_name(archive: Path, member: _Member) -> str:
    """The member's path below the archive's folder, with / between its parts; VideotuneError where it is refused."""
    plain = member.name.replace("\\", "/")
    parts = [part for part in plain.split("/") if part not in ("", ".")]
    fault = member.fault
    if plain.startswith("/") or re.match("[A-Za-z]:", plain) or ".." in parts:
        fault = "leads out of its folder"
    elif "\0" in plain or any("\ud800" <= char <= "\udfff" for char in plain):
        fault = "has a NUL in its name" if "\0" in plain else "has a name that is not UTF-8"
    if fault:
        raise _refused(archive, member.name, fault)
    return "/".join(parts)


def _refused(archive: Path, name: str, why: str) -> VideotuneError:
    remedy = "Pack the clips anew; or, if you trust it, unpack it yourself and give the folder."
    return VideotuneError(f"{archive} is refused: its member {name!r} {why}. {remedy}")


def _zip_members(raw: IO[bytes]) -> Iterator[_Member]:
    with zipfile.ZipFile(raw) as opened:
        for info in opened.infolist():
            # only Unix writes modes there
            mode = stat.S_IFMT(info.external_attr >> 16) if info.create_system == 3 else 0
            fault = "is locked by a password" if info.flag_bits & 1 else ""
            if info.compress_type not in _ZIP_READ:
                kind = zipfile.compressor_names.get(info.compress_type)  # type: ignore[attr-defined]
                fault = f"has a compression that is not read here ({kind})"
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                fault = "is a link or a device"
            name = info.orig_filename
            if (
                not info.flag_bits & 0x800
            ):  # CP437 by the format; macOS and many tools write UTF-8 all the same
                with suppress(UnicodeError):
                    name = name.encode("cp437").decode()
            is_folder = name.endswith(("/", "\\")) or mode == stat.S_IFDIR
            yield _Member(name, info.file_size, is_folder, fault, partial(opened.open, info))


class _StrictTarInfo(tarfile.TarInfo):
    """tarfile takes a damaged or missing header for the archive's end, and would leave out all that follows
    (python/cpython#120740); the true end is a block of zeros."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(
                f"a header is damaged, or the end is missing: {error}"
            ) from error


def _tar_members(raw: IO[bytes], kind: str) -> Iterator[_Member]:
    opening: Any = partial(tarfile.open, mode="r:" if kind == "tar" else f"r:{kind}")
    with opening(fileobj=raw, tarinfo=_StrictTarInfo) as opened:
        while (info := opened.next()) is not None:
            opened.members.clear()  # it would keep a million
            fault = "" if info.isreg() or info.isdir() else "is a link or a device"
            yield _Member(
                info.name, info.size, info.isdir(), fault, partial(opened.extractfile, info)
            )
        while opened.fileobj.read(1 << 20):
            pass  # to the end, where a compression's checksum stands
