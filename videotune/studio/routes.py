"""What the studio's script asks for: parts of pages, the table of clips, files, uploads, and actions."""

import hashlib
import json
import mimetypes
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from videotune.errors import VideotuneError
from videotune.studio import clips, pages, run_pages, uploads
from videotune.studio.actions import ACTIONS, Action, perform, source
from videotune.studio.downloads import is_exported, zipped
from videotune.studio.projects import CLIPS, HELD_OUT, inside, named

STATIC = Path(__file__).parent / "static"


PARTS: Mapping[str, Callable[[Path, Any, Mapping[str, str]], str]] = {
    "head": pages.head, "project": pages.project_part, "data": pages.data_part, "setup": pages.setup_part,
    "plan": pages.plan_part, "train": run_pages.train_part, "charts": run_pages.charts_part,
    "samples": run_pages.samples_part, "tries": run_pages.tries_part, "export": run_pages.export_part,
}  # fmt: skip

_FIRST = pages.html("empty", words="Choose or make a project first, on the page Project.")
WITHOUT_PROJECT = dict.fromkeys(("plan", "charts", "tries"), "")
WITHOUT_PROJECT |= dict.fromkeys(("data", "setup", "train", "samples", "export"), _FIRST)
"""What stands in a part of a page that needs a project while none is open."""


OPEN = (CLIPS, HELD_OUT, "sheet", "runs", "tries")
"""Folders of a project whose files are given out."""

SHOWN = (".mp4", ".webm", ".mov", ".m4v", ".jpg", ".jpeg", ".png", ".gif", ".webp", ".html")
GIVEN = (*SHOWN, ".safetensors", ".json", ".zip", ".mkv", ".avi")
SANDBOX = {"Content-Security-Policy": "sandbox; default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'"}
"""Endings of files that a browser shows, and that it may download."""


def router(root: Path, may: Callable[[Request], bool], local: bool) -> APIRouter:
    """All routes below /studio; ``may`` says whether a request comes from someone who has logged in.

    ``local``: only this computer reaches the studio, so a request may name its folders.
    """
    known: dict[str, Action] = {**ACTIONS, "source": partial(source, local=local)}

    def allowed(request: Request) -> None:
        if not may(request):
            raise HTTPException(401, "log in first")

    routes = APIRouter(prefix="/studio", dependencies=[Depends(allowed)])

    @routes.get("/part/{name}")
    def part(name: str, request: Request) -> Response:
        if name not in PARTS:
            raise HTTPException(404, "there is no such part of a page")
        query = dict(request.query_params)
        chosen = named(root, query["project"]) if query.get("project") else None
        empty = WITHOUT_PROJECT.get(name) if chosen is None else None
        text = PARTS[name](root, chosen, query) if empty is None else empty
        return _tagged(request, text.encode(), "text/html; charset=utf-8")

    @routes.get("/clips")
    def table(project: str, request: Request) -> Response:
        return _tagged(request, json.dumps(clips.rows(named(root, project))).encode(), "application/json")

    @routes.get("/thumb")
    def thumb(project: str, id: str) -> Response:
        if not id.isalnum():
            raise HTTPException(404)
        for place in ("middle", "first"):
            path = _path(root, project, f"sheet/clips/{id}-{place}.jpg")
            if path.is_file():
                return FileResponse(path, headers={"Cache-Control": "private, max-age=86400"})
        raise HTTPException(404)

    @routes.get("/file")
    def file(project: str, path: str) -> Response:
        found = _path(root, project, path)
        suffix = found.suffix.lower()
        if path.split("/")[0] not in OPEN or suffix not in GIVEN or not found.is_file():
            raise HTTPException(404, "no such file")
        kind = mimetypes.guess_type(found.name)[0] or "application/octet-stream"
        if suffix == ".html":
            return _page(found, project)
        if suffix in SHOWN:
            return FileResponse(found, media_type=kind)
        return FileResponse(found, media_type=kind, filename=found.name, headers=SANDBOX)

    @routes.get("/folder")
    def folder(project: str, path: str) -> Response:
        found = _path(root, project, path)
        if not is_exported(found, root / project):
            raise HTTPException(404, "no such folder")
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.name)}.zip"}
        return StreamingResponse(zipped(found), media_type="application/zip", headers=headers)

    @routes.post("/do/{action}")
    async def do(action: str, request: Request) -> JSONResponse:
        if action not in known:
            return JSONResponse({"error": "there is no such thing to ask for"}, 404)
        kind = request.headers.get("content-type", "")
        if not kind.startswith("application/json"):  # no form of another site sends it
            return JSONResponse({"error": "ask in JSON"}, 415)
        try:
            words = await request.json()
        except (ValueError, RecursionError):
            return JSONResponse({"error": "ask in JSON"}, 400)
        return JSONResponse(await run_in_threadpool(_answer, root, known[action], words))

    @routes.post("/upload")
    async def upload(project: str, name: str, request: Request) -> list[uploads.Taken]:
        home = named(root, project)
        with uploads.incoming(root, name) as path:
            with path.open("wb") as file:
                async for part in request.stream():
                    await run_in_threadpool(file.write, part)
                    if file.tell() > uploads.MOST:
                        return [uploads.Taken(name, False, f"it has more than {uploads.MOST // 10**9} GB")]
            return await run_in_threadpool(uploads.accept, home, [path])

    return routes


def _answer(root: Path, action: Action, words: Any) -> dict[str, Any]:
    if not isinstance(words, dict):
        return {"error": "ask with an object"}
    try:
        return dict(perform(action, root, words))
    except OSError as error:
        return {"error": f"{error.strerror or error} ({str(error.filename)[:200]})" if error.filename else str(error)}
    except UnicodeError:
        return {"error": "this text holds a character that cannot be written to a file"}
    except ValueError as error:  # a VideotuneError, or a value that a file system does not take
        return {"error": str(error)[:2000]}


def _path(root: Path, project: str, relative: str) -> Path:
    """A path within a project; 404 where it is none."""
    try:
        return inside(named(root, project).folder, relative)
    except VideotuneError as error:
        raise HTTPException(404, str(error)) from error


def _tagged(request: Request, body: bytes, kind: str) -> Response:
    """The body with its tag, or nothing where the script has it already."""
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, media_type=kind, headers={"ETag": tag, "Cache-Control": "no-store"})


def _page(path: Path, project: str) -> Response:
    """A page that a command has written, whose pictures are asked for by the same address; no script of it runs."""
    begin = f"/studio/file?project={quote(project)}&amp;path={path.parent.name}/clips/"
    text = path.read_text(encoding="utf-8").replace('src="clips/', f'src="{begin}')
    return Response(text, media_type="text/html; charset=utf-8", headers=SANDBOX)
