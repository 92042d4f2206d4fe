"""Folders as one file to download, made while it is sent: nothing of it lies in memory or on the disk."""

import io
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, ZipInfo

PIECE = 1 << 20
"""Bytes that are read at a time."""


def is_exported(folder: Path, project: Path) -> bool:
    """Whether a folder is a model that a run of the project has exported."""
    parts = folder.relative_to(project).parts
    return folder.is_dir() and len(parts) == 4 and parts[0] == "runs" and parts[2] == "export"


def zipped(folder: Path) -> Iterator[bytes]:
    """A zip archive of a folder's files below its name, in pieces; weights do not shrink, so nothing is compressed."""
    sink = _Sink()
    with ZipFile(sink, "w", ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.is_symlink():
                continue
            info = ZipInfo.from_file(path, f"{folder.name}/{path.relative_to(folder).as_posix()}")
            with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as entry:
                while piece := source.read(PIECE):
                    entry.write(piece)
                    yield sink.taken()
    yield sink.taken()


class _Sink(io.RawIOBase):
    """A file that can only be written to, and that hands on what was written."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, part: bytes) -> int:  # type: ignore[override]
        self._parts.append(bytes(part))
        return len(part)

    def taken(self) -> bytes:
        parts, self._parts = b"".join(self._parts), []
        return parts
