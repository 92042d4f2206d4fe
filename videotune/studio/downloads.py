"""Files of a project that a browser may have, and folders as one file, made while it is sent."""

import io
import mimetypes
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import FileResponse, StreamingResponse

from videotune.errors import VideotuneError
from videotune.studio.projects import CLIPS, HELD_OUT, Project, inside
from videotune.studio.web import In

PIECE = 1 << 20
"""Bytes that are read at a time."""

OPEN = (CLIPS, HELD_OUT, "scenes", "sheet", "runs", "tries")
"""Folders of a project whose files are given out."""

SHOWN = (".mp4", ".webm", ".mov", ".m4v", ".jpg", ".jpeg", ".png", ".gif", ".webp")
GIVEN = (*SHOWN, ".html", ".safetensors", ".json", ".jsonl", ".md", ".zip", ".mkv", ".avi")
SANDBOX = {
    "Content-Security-Policy": "sandbox allow-same-origin; default-src 'none'; "
    "img-src 'self' data:; media-src 'self' data:; style-src 'unsafe-inline'"
}
"""A page that a command has written shows its pictures, and runs no script."""

routes = APIRouter(prefix="/p/{project}")


@routes.get(
    "/file/{path:path}"
)  # pages that a command has written name their pictures relative to themselves
@routes.get("/file")
def file(asked: In, path: str) -> Response:
    """A file of the project: shown where a browser can show it, else downloaded."""
    found = _path(asked.home, path)
    suffix = found.suffix.lower()
    if path.split("/")[0] not in OPEN or suffix not in GIVEN or not found.is_file():
        raise HTTPException(404, "no such file")
    kind = mimetypes.guess_type(found.name)[0] or "application/octet-stream"
    if suffix in (*SHOWN, ".html"):
        held = SANDBOX if suffix == ".html" else {}
        return FileResponse(
            found, media_type=kind, headers={"Cache-Control": "private, no-cache", **held}
        )
    return FileResponse(found, media_type=kind, filename=found.name, headers=SANDBOX)


@routes.get("/folder")
def folder(asked: In, path: str) -> Response:
    """A folder that a run has written, a model or a checkpoint, as one zip."""
    found = _path(asked.home, path)
    parts = found.relative_to(asked.home.folder).parts
    if not (
        found.is_dir()
        and len(parts) == 4
        and parts[0] == "runs"
        and parts[2] in ("export", "checkpoints")
    ):
        raise HTTPException(404, "no such folder")
    return send_zip(found, found.name)


def send_zip(
    folder: Path, name: str, keep: Callable[[Path], bool] = lambda path: True
) -> Response:
    """A folder's files below ``name`` as a download; ``keep`` chooses among them."""
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}.zip"}
    return StreamingResponse(
        zipped(folder, name, keep), media_type="application/zip", headers=headers
    )


def zipped(
    folder: Path, name: str, keep: Callable[[Path], bool] = lambda path: True
) -> Iterator[bytes]:
    """A zip archive in pieces; weights and videos do not shrink, so nothing is compressed."""
    sink = _Sink()
    with ZipFile(sink, "w", ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.is_symlink() or not keep(path.relative_to(folder)):
                continue
            info = ZipInfo.from_file(path, f"{name}/{path.relative_to(folder).as_posix()}")
            with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as entry:
                while piece := source.read(PIECE):
                    entry.write(piece)
                    yield sink.taken()
    yield sink.taken()


def _path(project: Project, relative: str) -> Path:
    """A path within a project; 404 where it is none."""
    try:
        return inside(project.folder, relative)
    except VideotuneError as error:
        raise HTTPException(404, str(error)) from error


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
        parts = b"".join(self._parts)
        self._parts = []
        return parts
