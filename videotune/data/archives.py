"""Archives: unpack a zip or tar of clips once into the cache, and write nothing outside
of it.

Files are written by this module under names that it has checked: no link, device, owner
or mode of an archive reaches the disk. Both formats yield no more bytes of a member
than its header declares, so the declared sizes are the limit.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from filelock import FileLock, Timeout

from videotune import files
from videotune.bounds import require_file
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
"""Suffixes of archives, in lower case.

The type of a file is determined by its bytes.
"""

RATIO = 200
MARGIN = 10**9
"""An archive may unpack to RATIO times its own bytes plus MARGIN.

Videos hardly compress at all.
"""

RESERVE = 10**9
"""Bytes of the disk that must stay free."""

MAX_MEMBERS = 300_000
"""Most members of an archive. Creating more files than this takes minutes on any disk."""

_HAS_ZSTD = sys.version_info >= (3, 14)
_READ_TYPES = ("zip", "tar", "gz", "bz2", "xz", *(("zst",) if _HAS_ZSTD else ()))
_ZIP_COMPRESSIONS = (0, 8, 12, 14, *((93,) if _HAS_ZSTD else ()))
"""Numbers of the zip format: stored, deflate, bzip2, LZMA, Zstandard."""

_SIZES_NAME = ".unpacked.json"
"""File in an unpacked folder with the size of each file."""

_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    lzma.LZMAError,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    OverflowError,
)
"""Errors that a damaged archive can raise."""

FileProgressFn = Callable[[int, int, str], None]
"""Called with (amount done, total, current item)."""


def silent(done: int, total: int, text: str) -> None:
    """Report no progress."""


class _Member(NamedTuple):
    """A member of an archive."""

    name: str
    size: int
    is_folder: bool

    fault: str
    """Why the member is refused; "" if it is not."""

    open: Callable[[], Any]


def unpack(archive: Path, cache: Path, progress: FileProgressFn = silent) -> Path:
    """Unpack an archive into a folder below ``cache``/archives, unless it already is
    there.

    Args:
        archive: zip or tar, compressed or not.
        cache: the dataset's cache folder.
        progress: called with (megabytes of the archive read, megabytes in all, current
            file).

    Returns:
        The folder.

    Raises:
        VideotuneError: if the archive is damaged, locked by a password, too large for
            the disk or for its own size, or has a member that is a link or leads out of
            its folder. Nothing of it is left then.
    """
    home = cache / "archives"
    try:
        archive_type = type_of_file(archive)
        status = archive.stat()
        if archive_type not in _READ_TYPES:
            description = f"a {archive_type} file" if archive_type else "not an archive"
            raise VideotuneError(
                f"{archive} is {description}; zip, tar, gz, bz2 and xz are read "
                "(zst from Python 3.14 on). Unpack it and give the folder."
            )

        folder_name = files.digest(
            [str(archive.absolute()), status.st_size, status.st_mtime_ns]
        )
        folder = home / folder_name
        home.mkdir(parents=True, exist_ok=True)
        with locked_folder(home, progress):
            # Left by a killed process: no other works here while the lock is held.
            for stale_folder in home.glob(".part-*"):
                shutil.rmtree(stale_folder)

            if not _is_complete(folder):
                with files.whole_folder(folder) as temporary_folder:
                    _unpack_into(archive, archive_type, temporary_folder, progress)
                files.sync_folder(home)
    except OSError as error:
        cause = f"{error.strerror or error}"
        if error.filename:
            cause += f" ({error.filename})"
        raise VideotuneError(
            f"{archive} could not be unpacked into {home}: {cause}."
        ) from error
    return folder


def unpack_shards(
    shards: Sequence[Path], cache: Path, progress: FileProgressFn = silent
) -> Path:
    """Unpack several archives, each into a folder of its name, below one folder of
    ``cache``/archives, unless they already are there.

    Args:
        shards: the archives, with different names.
        cache: the dataset's cache folder.
        progress: as of ``unpack``.

    Returns:
        The folder of all of them.

    Raises:
        VideotuneError: as ``unpack`` does, of each archive; nothing is left then.
    """
    home = cache / "archives"
    try:
        stamps = []
        for shard in shards:
            require_file(shard)
            status = shard.stat()
            stamps.append([str(shard.absolute()), status.st_size, status.st_mtime_ns])

        folder = home / files.digest(stamps)
        home.mkdir(parents=True, exist_ok=True)
        with locked_folder(home, progress):
            if not all(_is_complete(folder / shard.name) for shard in shards):
                with files.whole_folder(folder) as temporary_folder:
                    for shard in shards:
                        shard_folder = temporary_folder / shard.name
                        shard_folder.mkdir()
                        shard_type = type_of_file(shard)
                        _unpack_into(shard, shard_type, shard_folder, progress)
                files.sync_folder(home)
    except OSError as error:
        raise VideotuneError(
            f"{shards[0].parent}: its archives could not be unpacked into {home}: "
            f"{error.strerror or error}."
        ) from error
    return folder


def locked_folder(
    home: Path,
    progress: FileProgressFn,
    waiting: str = "waiting for another process that unpacks an archive",
) -> Any:
    """Acquire a folder's lock; report by this text if another process has it."""
    lock = FileLock(home / ".lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        progress(0, 1, waiting)
        return lock.acquire()


def _is_complete(folder: Path) -> bool:
    """Return whether an unpacked folder has all its files in their sizes."""
    try:
        sizes = files.read_json(folder / _SIZES_NAME)
        return all(
            os.stat(f"{folder}/{name}").st_size == size for name, size in sizes.items()
        )
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
        AttributeError,
        RecursionError,
    ):
        return False


def _unpack_into(
    archive: Path, archive_type: str, folder: Path, progress: FileProgressFn
) -> None:
    """Write all files of an archive.

    Raises:
        VideotuneError: for any fault of the archive.
        OSError: for a fault of the disk.
    """
    try:
        with archive.open("rb") as raw:
            archive_size = os.fstat(raw.fileno()).st_size

            def report(name: str) -> None:
                # In megabytes, rounded up.
                progress(
                    -(-raw.tell() // 10**6),
                    -(-archive_size // 10**6),
                    f"unpacking {name}",
                )

            if archive_type == "zip":
                members = _zip_members(raw)
            else:
                members = _tar_members(raw, archive_type)
            sizes = _write_members(archive, members, folder, archive_size, report)
        files.write_json(folder / _SIZES_NAME, sizes)
    except VideotuneError:
        raise
    except _TooManyMembers as error:
        raise VideotuneError(_limit_message(archive, archive_size)) from error
    except _DAMAGE as error:
        # An error number comes from the disk, not from the archive's bytes.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        hint = ""
        if archive_type not in ("zip", "tar"):
            hint = f", or the .{archive_type} does not contain a tar"
        cause = str(error) or type(error).__name__
        raise VideotuneError(
            f"{archive} is damaged or cut short{hint} ({cause}). Download or pack it again."
        ) from error


def _write_members(
    archive: Path,
    members: Iterator[_Member],
    folder: Path,
    archive_size: int,
    report: Callable[[str], None],
) -> dict[str, int]:
    """Write the files of an archive, within the limits.

    Args:
        archive: path of the archive, for messages.
        members: its members in order.
        folder: where they are written.
        archive_size: bytes of the archive, which limit those of its files.
        report: called with the name of the current file.

    Returns:
        Sizes by name.
    """
    free_bytes = max(0, shutil.disk_usage(folder).free - RESERVE)
    sizes: dict[str, int] = {}
    declared_bytes = 0
    for count, member in enumerate(members, start=1):
        name = _checked_name(archive, member)
        declared_bytes += member.size
        if declared_bytes > free_bytes:
            raise VideotuneError(
                f"{archive} does not fit: {free_bytes / 1e9:.1f} GB are free on the disk of "
                f"{folder.parent}. Free some space, or set cache_dir to another disk."
            )
        _check_limits(archive, archive_size, declared_bytes, count)

        # Folders are created when a file needs them.
        is_hidden = any(
            part.startswith(".") or part == "__MACOSX" for part in name.split("/")
        )
        if not member.is_folder and not is_hidden and name:
            report(name)
            sizes[name] = _write_member(archive, member, name, folder, report)
    return sizes


class _TooManyMembers(Exception):
    """Raised before the first member of a zip that has more than ``MAX_MEMBERS``."""


def _check_limits(
    archive: Path, archive_size: int, declared_bytes: int, count: int
) -> None:
    """Raise VideotuneError if an archive unpacks to far more than its own size."""
    most_bytes = RATIO * archive_size + MARGIN
    if declared_bytes > most_bytes or count > MAX_MEMBERS:
        raise VideotuneError(_limit_message(archive, archive_size))


def _limit_message(archive: Path, archive_size: int) -> str:
    most_bytes = RATIO * archive_size + MARGIN
    return (
        f"{archive} unpacks to more than {most_bytes / 1e9:.1f} GB, over {RATIO} times its "
        f"size, or {MAX_MEMBERS:,} files. If you trust it, unpack it yourself."
    )


def _write_member(
    archive: Path,
    member: _Member,
    name: str,
    folder: Path,
    report: Callable[[str], None],
) -> int:
    """Write one file of an archive and return its size."""
    path = f"{folder}/{name}"
    size = 0
    try:
        target = _create(path)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise _refused(
            archive, name, "occurs twice, or is a file and a folder"
        ) from error

    with target, member.open() as source:
        while True:
            chunk = source.read(1 << 22)
            if not chunk:
                break
            target.write(chunk)
            size += len(chunk)
            report(name)
    return size


def _create(path: str) -> IO[bytes]:
    """Create a file, and the folders above it if they are missing."""
    # Most folders are there already: asking for each file would take its time.
    try:
        return open(path, "xb")
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, "xb")


def _checked_name(archive: Path, member: _Member) -> str:
    """Return a member's path in the archive's folder, with / between its parts.

    Raises:
        VideotuneError: if the member is refused.
    """
    name = member.name.replace("\\", "/")
    parts = [part for part in name.split("/") if part not in ("", ".")]

    fault = member.fault
    if name.startswith("/") or re.match("[A-Za-z]:", name) or ".." in parts:
        fault = "leads out of its folder"
    elif "\0" in name:
        fault = "has a NUL in its name"
    elif any("\ud800" <= char <= "\udfff" for char in name):
        fault = "has a name that is not UTF-8"
    if fault:
        raise _refused(archive, member.name, fault)
    return "/".join(parts)


def _refused(archive: Path, name: str, fault: str) -> VideotuneError:
    return VideotuneError(
        f"{archive} is refused: its member {name!r} {fault}. Pack the clips again; or, if you "
        "trust it, unpack it yourself and give the folder."
    )


def _zip_members(raw: IO[bytes]) -> Iterator[_Member]:
    """Yield the members of a zip file."""
    with zipfile.ZipFile(raw) as archive:
        infos = archive.infolist()
        # The number is known before anything is written.
        if len(infos) > MAX_MEMBERS:
            raise _TooManyMembers
        for info in infos:
            # Only archives from Unix have file modes.
            mode = (
                stat.S_IFMT(info.external_attr >> 16) if info.create_system == 3 else 0
            )

            fault = ""
            if info.flag_bits & 1:
                fault = "is locked by a password"
            if info.compress_type not in _ZIP_COMPRESSIONS:
                names = zipfile.compressor_names  # type: ignore[attr-defined]
                compression = names.get(info.compress_type)
                fault = f"has a compression that is not supported ({compression})"
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                fault = "is a link or a device"

            name = info.orig_filename
            is_marked_utf8 = info.flag_bits & 0x800
            if not is_marked_utf8:
                # By the format it is CP437; macOS and many tools write UTF-8 all the
                # same.
                with suppress(UnicodeError):
                    name = name.encode("cp437").decode()

            yield _Member(
                name=name,
                size=info.file_size,
                is_folder=name.endswith(("/", "\\")) or mode == stat.S_IFDIR,
                fault=fault,
                open=partial(archive.open, info),
            )


class _StrictTarInfo(tarfile.TarInfo):
    """Tar header that raises an error if it is damaged or missing.

    tarfile takes either for the archive's end, and would skip all that follows
    (python/cpython#120740); the true end is a block of zeros.
    """

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


def _tar_members(raw: IO[bytes], archive_type: str) -> Iterator[_Member]:
    """Yield the members of a tar file, compressed or not."""
    mode: Any = "r:" if archive_type == "tar" else f"r:{archive_type}"
    with tarfile.open(fileobj=raw, mode=mode, tarinfo=_StrictTarInfo) as archive:
        while True:
            info = archive.next()
            if info is None:
                break
            # tarfile would keep the headers of a million members.
            archive.members.clear()  # type: ignore[attr-defined]
            is_regular = info.isreg() or info.isdir()
            yield _Member(
                name=info.name,
                size=info.size,
                is_folder=info.isdir(),
                fault="" if is_regular else "is a link or a device",
                open=partial(archive.extractfile, info),
            )

        # Read to the end, where the checksum of a compressed file is.
        while archive.fileobj.read(1 << 20):
            pass
