"""Downloads: files of a project, and folders as a zip that is built while it is sent."""

import io
import mimetypes
import re
from collections.abc import Callable, Iterator
from html import escape, unescape
from pathlib import Path
from urllib.parse import quote
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import FileResponse, HTMLResponse, StreamingResponse

from videotune.errors import VideotuneError
from videotune.studio import project_names
from videotune.studio.form import fields
from videotune.studio.projects import CLIPS, HELD_OUT, Project, inside
from videotune.studio.setting_names import in_page_words
from videotune.studio.web import CurrentPage

CHUNK_BYTES = 1 << 20

SERVED_FOLDERS = (CLIPS, HELD_OUT, "scenes", "sheet", "runs", "tries")
"""Folders of a project whose files may be requested."""

INLINE_SUFFIXES = (
    ".mp4",
    ".webm",
    ".mov",
    ".m4v",
    ".jpg",
    ".jpeg",
    ".png",
    ".gif",
    ".webp",
)
"""Suffixes that a browser shows by itself."""

SERVED_SUFFIXES = (
    *INLINE_SUFFIXES,
    ".html",
    ".safetensors",
    ".json",
    ".jsonl",
    ".md",
    ".zip",
    ".mkv",
    ".avi",
)

SANDBOX_HEADERS = {
    "Content-Security-Policy": "sandbox allow-same-origin; default-src 'none'; "
    "img-src 'self' data:; media-src 'self' data:; style-src 'unsafe-inline'"
}
"""A page that a command has written may show its pictures, but runs no script."""

EXPORTED = re.compile(r"runs/[^/]+/(?:branches/[^/]+/)?export/[^/]+\.safetensors")
"""Paths of exported files."""

CONTACT_SHEET = "sheet/index.html"

COMPARISON = "runs/comparison.html"
"""The page that compares runs of a project, perhaps with those of another one."""

_LINK_TO_PROJECT = re.compile(r'(href|src)="\.\./\.\./([^/"]+)/(?=runs/)')
"""A link of that page to a file of another project."""

REPORT = re.compile(r"runs/[^/]+/report\.html")
"""Paths of the reports of runs."""

_COLUMN = re.compile(r'(<th\b[^>]*>|data-label=")([^<"]+)')
"""The name of a column, at its head and at its cells."""

_SHEET_NOTES = re.compile(r'<ul class="notes">.*?</ul>', re.DOTALL)
_TEXT = re.compile(r">([^<]+)<")

_REPORT_CHAPTERS = (
    "verdict|warnings|validation|forgetting|parts|loss|samples|metrics|exposure|clips"
)
"""Chapters of a report whose notes are translated; the others name settings and
commands on purpose.
"""

_REPORT_CHAPTER = re.compile(
    rf'<section id="(?:{_REPORT_CHAPTERS})">.*?</section>', re.DOTALL
)
_FOLDER_LINK = re.compile(r'<a href="[^":#?]*/[^"./]*">(.*?)</a>')
"""A link to a folder beside the report, which a browser shows of a disk alone."""

_REPORT_NOTE = re.compile(r"<(li|p)\b[^>]*>[^<]*</\1>")
"""A note is a text without parts of its own. So the commands of the outcome, beside
which the report names the studio's button, stay.
"""

routes = APIRouter(prefix="/p/{project}")


# The form with the path in the address serves pages whose pictures have relative names.
@routes.get("/file/{path:path}")
@routes.get("/file")
def file(page: CurrentPage, path: str) -> Response:
    """Send a file of the project, inline if a browser can show it, else as a download."""
    target = _path(page.current_project, path)
    suffix = target.suffix.lower()
    is_served = path.split("/")[0] in SERVED_FOLDERS and suffix in SERVED_SUFFIXES
    if not is_served or not target.is_file():
        raise HTTPException(404, "no such file")

    media_type = mimetypes.guess_type(target.name)[0] or "application/octet-stream"
    if suffix not in (*INLINE_SUFFIXES, ".html"):
        name = target.name
        if EXPORTED.fullmatch(path):
            name = download_name(page.current_project, target)
        return FileResponse(
            target, media_type=media_type, filename=name, headers=SANDBOX_HEADERS
        )

    headers = {"Cache-Control": "private, no-cache"}
    if suffix == ".html":
        headers |= SANDBOX_HEADERS
    translate = _translation_of(path)
    if translate is not None:
        written = target.read_text(encoding="utf-8", errors="replace")
        return HTMLResponse(translate(written), headers=headers)
    return FileResponse(target, media_type=media_type, headers=headers)


def file_stem(project: Project) -> str:
    """Return what the names of a project's files begin with outside of it."""
    return project_names.file_stem(project.name, project.title)


def download_name(project: Project, path: Path) -> str:
    """Return the name that an exported file or folder gets outside of its project: the
    project's name comes first, since every project has a run-1.
    """
    prefix = f"{file_stem(project)}-"
    return path.name if path.name.startswith(prefix) else prefix + path.name


def _translation_of(path: str) -> Callable[[str], str] | None:
    """Return what makes a page that a command has written name the studio's places
    instead of commands; None if it stays as it is.

    The file itself stays, for a terminal.
    """
    if path == CONTACT_SHEET:
        return notes_in_page_words
    if path == COMPARISON:
        return comparison_in_page_words
    return report_in_page_words if REPORT.fullmatch(path) else None


def comparison_in_page_words(comparison: str) -> str:
    """Return a comparison with the studio's names of settings and its addresses."""
    return with_links_to_projects(with_names_of_settings(comparison))


def with_names_of_settings(comparison: str) -> str:
    """Return a comparison of runs whose columns name settings as the page Setup does."""
    names = {field.key: field.name for field in fields()}

    def rename(header: re.Match[str]) -> str:
        return header[1] + escape(names.get(unescape(header[2]), unescape(header[2])))

    return _COLUMN.sub(rename, comparison)


def with_links_to_projects(comparison: str) -> str:
    """Return a comparison whose links to files of other projects lead to where the
    studio serves them.
    """
    return _LINK_TO_PROJECT.sub(r'\1="/p/\2/file/', comparison)


def notes_in_page_words(sheet: str) -> str:
    """Return a contact sheet with notes in the studio's words; captions stay."""
    return _SHEET_NOTES.sub(lambda notes: _TEXT.sub(_in_page_words, notes[0]), sheet)


def report_in_page_words(report: str) -> str:
    """Return a run's report with notes in the studio's words; captions and prompts
    stay.
    """

    def translate(chapter: re.Match[str]) -> str:
        return _REPORT_NOTE.sub(
            lambda note: _TEXT.sub(_in_page_words, note[0]), chapter[0]
        )

    without_folders = _FOLDER_LINK.sub(r"<code>\1</code>", report)
    return _REPORT_CHAPTER.sub(translate, without_folders)


def _in_page_words(match: re.Match[str]) -> str:
    return f">{escape(in_page_words(unescape(match[1])))}<"


@routes.get("/folder")
def folder(page: CurrentPage, path: str) -> Response:
    """Send a model or a checkpoint that a run has written, as one zip."""
    target = _path(page.current_project, path)
    parts = target.relative_to(page.current_project.folder).parts
    is_run_output = (
        len(parts) == 4 and parts[0] == "runs" and parts[2] in ("export", "checkpoints")
    )
    if not is_run_output or not target.is_dir():
        raise HTTPException(404, "no such folder")
    if parts[2] == "export":
        return send_zip(target, download_name(page.current_project, target))
    name = f"{file_stem(page.current_project)}-{parts[1]}-{target.name}"
    return send_zip(target, name, inner_name=target.name)


def send_zip(
    folder: Path,
    name: str,
    keep: Callable[[Path], bool] = lambda path: True,
    *,
    inner_name: str = "",
) -> Response:
    """Send a folder as a zip.

    Args:
        folder: the folder.
        name: name of the zip.
        keep: chooses the files, by their paths relative to the folder.
        inner_name: name of the folder inside it; empty for that of the zip.
    """
    return StreamingResponse(
        stream_zip(folder, inner_name or name, keep),
        media_type="application/zip",
        headers={
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}.zip"
        },
    )


def stream_zip(
    folder: Path, name: str, keep: Callable[[Path], bool] = lambda path: True
) -> Iterator[bytes]:
    """Yield a zip in chunks, uncompressed, since weights and videos do not shrink."""
    buffer = _DrainableBuffer()
    with ZipFile(buffer, "w", ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            if not path.is_file() or path.is_symlink() or not keep(relative):
                continue

            info = ZipInfo.from_file(path, f"{name}/{relative.as_posix()}")
            with (
                path.open("rb") as source,
                archive.open(info, "w", force_zip64=True) as entry,
            ):
                while chunk := source.read(CHUNK_BYTES):
                    entry.write(chunk)
                    yield buffer.drain()

    # The directory at the end of the archive.
    yield buffer.drain()


def _path(project: Project, relative: str) -> Path:
    """Return a path inside the project; HTTP 404 if it leads outside."""
    try:
        return inside(project.folder, relative)
    except VideotuneError as error:
        raise HTTPException(404, str(error)) from error


class _DrainableBuffer(io.RawIOBase):
    """A write-only file whose content is taken out while it is written."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, chunk: bytes) -> int:  # type: ignore[override]
        self._chunks.append(bytes(chunk))
        return len(chunk)

    def drain(self) -> bytes:
        """Return what was written since the last call."""
        content = b"".join(self._chunks)
        self._chunks = []
        return content
