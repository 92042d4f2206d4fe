"""What a zip or a tar holds, member by member, with damage told where the standard library is silent."""

from __future__ import annotations

import bz2
import gzip
import lzma
import stat
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from videotune.errors import VideotuneError

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.zst", ".tzst")
"""Names of archives (compared in lower case). What a file is, its bytes say."""

SPECIAL = "a device, pipe or socket"

_MAGIC = {
    b"PK\x03\x04": "zip", b"PK\x05\x06": "zip", b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zst", b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!": "rar",
}  # fmt: skip

_UNREAD = {9: "Deflate64, Windows' own for files beyond 2 GB", 93: "Zstandard", 95: "XZ", 98: "PPMd"}
"""Compressions of zips that people meet and the standard library does not read, by number."""


@dataclass(frozen=True)
class Member:
    """A member of an archive as it calls itself.

    ``kind`` is "file", "folder", "link" or ``SPECIAL``; ``open`` gives a file's bytes; ``link`` is where a link leads, from
    its own folder, or from the archive's where ``hard``; ``guessed``: the name's encoding is a guess.
    """

    name: str
    kind: str
    open: Callable[[], IO[bytes]]
    link: str = ""
    hard: bool = False
    guessed: bool = False


def archive_kind(path: Path) -> str | None:
    """What a file's first bytes say: "zip", "tar", a compression ("gz", "bz2", "xz", "zst"), "7z", "rar", or None."""
    with path.open("rb") as file:
        head = file.read(512)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    old_tar = path.name.lower().endswith(".tar") and bool(head)  # before 1988 tars had no magic
    return "tar" if head[257:262] == b"ustar" or old_tar else None


def members_of(archive: Path, raw: IO[bytes], kind: str) -> Iterator[Member]:
    """The members in their order, read from the archive's opened file ``raw``; read each before asking for the next.

    VideotuneError for what cannot be read here; for damage whatever the standard library raises.
    """
    return _zip_members(archive, raw) if kind == "zip" else _tar_members(archive, raw, kind)


def declared_bytes(raw: IO[bytes], kind: str) -> int:
    """How many bytes an archive says that it unpacks to: a zip's table of contents knows, a tar's own size is about that."""
    if kind == "zip":
        with zipfile.ZipFile(raw) as opened:
            return sum(info.file_size for info in opened.infolist())
    return raw.seek(0, 2) if kind == "tar" else 0


def _zip_members(archive: Path, raw: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(raw) as opened:
        for info in opened.infolist():
            if info.flag_bits & 1:
                raise VideotuneError(f"{archive} is locked by a password. Unpack it and give the folder.")
            name, guessed = _zip_name(info)
            if info.compress_type in _UNREAD and not (info.compress_type == 93 and sys.version_info >= (3, 14)):
                raise NotImplementedError(_UNREAD[info.compress_type])
            kind = "folder" if name.endswith(("/", "\\")) else _zip_kind(info)
            link = opened.open(info).read(4096).decode(errors="surrogateescape") if kind == "link" else ""
            yield Member(name, kind, lambda info=info: opened.open(info), link, guessed=guessed)  # type: ignore[misc]


def _zip_kind(info: zipfile.ZipInfo) -> str:
    mode = info.external_attr >> 16 if info.create_system == 3 else 0  # only Unix writes modes there
    kinds = {0: "file", stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), SPECIAL)


def _zip_name(info: zipfile.ZipInfo) -> tuple[str, bool]:
    """The name, and whether its encoding is a guess.

    A zip that does not declare UTF-8 should hold CP437; macOS and many tools write UTF-8 all the same.
    """
    name = info.orig_filename
    if info.flag_bits & 0x800 or name.isascii():
        return name, False
    try:
        return name.encode("cp437").decode(), False
    except UnicodeError:
        return name, True


class _Tape:
    """A tar's bytes, which remembers the block that was read last.

    tarfile takes a damaged or missing header for the end of the archive, and would leave out all that follows
    (python/cpython#120740); the true end is a block of zeros.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        self.last = self._file.read(size)
        return self.last

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _tar_members(archive: Path, raw: IO[bytes], kind: str) -> Iterator[Member]:
    with _decompressed(archive, raw, kind) as plain:
        tape = _Tape(plain)
        try:
            opened = tarfile.TarFile(fileobj=cast(IO[bytes], tape), mode="r")
        except tarfile.ReadError as error:
            hint = "" if kind == "tar" else f"; what is .{kind} must hold a tar"
            raise VideotuneError(
                f"{archive} is no tar archive ({error}{hint}). Unpack it and give the folder."
            ) from error
        with opened:
            while (info := opened.next()) is not None:
                opened.members.clear()  # type: ignore[attr-defined]  # it would keep a million
                yield _tar_member(opened, info)
        if tape.last != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("a header is damaged, or the end is missing")
        while kind != "tar" and plain.read(1 << 20):
            pass  # to the end, where the checksum stands


def _tar_member(opened: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    kind = SPECIAL
    if info.isdir():
        kind = "folder"
    elif info.issym() or info.islnk():
        kind = "link"
    elif info.isreg():
        kind = "file"
    return Member(info.name, kind, lambda: cast(IO[bytes], opened.extractfile(info)), info.linkname, info.islnk())


@contextmanager
def _decompressed(archive: Path, raw: IO[bytes], kind: str) -> Iterator[IO[bytes]]:
    """The bytes of a tar that may be compressed."""
    openers: Mapping[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    if kind == "tar":
        yield raw
    elif kind in openers:
        with openers[kind](raw) as plain:
            yield plain
    else:
        try:
            from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # Python 3.14
        except ImportError as error:
            raise VideotuneError(
                f"{archive} is compressed with zstd, which Python reads from 3.14 on. Unpack it and give the folder."
            ) from error
        with zstd.open(raw) as plain:
            yield plain
