"""The studio as a program: its page, the login, and the routes of its parts on one server."""

import os
import secrets
import shutil
import signal
import socket
import sys
from pathlib import Path
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware.base import RequestResponseEndpoint

import videotune.reporter
from videotune.errors import DONE, VideotuneError
from videotune.studio.pages import html
from videotune.studio.routes import STATIC, router
from videotune.studio.security import HEADERS, WHILE, WrongPasswords, check_host, is_local, refusal
from videotune.studio.uploads import UPLOADS

PASSWORD = "VIDEOTUNE_STUDIO_PASSWORD"
"""Where the password is looked for: an environment variable, so that no list of processes shows it."""

NAME = "studio"
"""The name to log in with."""

COOKIE = "videotune-studio"

LONGEST_LOGIN = 4096
"""Bytes of a name and a password."""


def serve(root: Path, host: str, port: int) -> int:
    """Run the studio until Ctrl-C.

    Raises VideotuneError where the host needs a password, or the port is taken.
    """
    password = os.environ.pop(PASSWORD, None)  # no job inherits it
    check_host(host, password)
    root.mkdir(parents=True, exist_ok=True)
    app = make_app(root.resolve(), host, password)
    _refuse_taken(host, port)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn ends the server first, and then hands them on
        signal.signal(number, _ended)
    address = f"[{host}]" if ":" in host else host
    print(f"The studio is at http://{address}:{port}  (Ctrl-C ends it; trainings go on)", flush=True)
    # the password's limit counts by address, so the address is the connection's own, never one that a header names
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=3, proxy_headers=False)
    return DONE


def _ended(number: int, frame: object) -> None:
    print("\nThe studio has ended; trainings go on.", flush=True)
    sys.exit(DONE)


def _refuse_taken(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise VideotuneError(f"{host}:{port} is not free ({error.strerror}): give another --port") from error


def make_app(root: Path, host: str, password: str | None) -> FastAPI:
    """The whole program; whoever has logged in holds a session's name in a cookie."""
    shutil.rmtree(root / UPLOADS, ignore_errors=True)  # what a server that was killed had half received
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    sessions, wrong = set[str](), WrongPasswords()

    def may(request: Request) -> bool:
        return password is None or request.cookies.get(COOKIE) in sessions

    @app.middleware("http")
    async def guarded(request: Request, call_next: RequestResponseEndpoint) -> Response:
        why = refusal(request.method, request.headers, host)
        answer = await call_next(request) if why is None else PlainTextResponse(why, 403)
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    @app.get("/")
    def page(request: Request) -> Response:
        return HTMLResponse(html("page")) if may(request) else RedirectResponse("/login", 303)

    @app.get("/login")
    def login() -> Response:
        return HTMLResponse(html("login", wrong=False))

    @app.post("/login")
    async def log_in(request: Request) -> Response:
        address, body = request.client.host if request.client else "", b""
        async for part in request.stream():
            body += part
            if len(body) > LONGEST_LOGIN:
                return PlainTextResponse("too long", 413)
        if not wrong.begin(address):
            return PlainTextResponse(f"Too many wrong passwords: wait {WHILE:g} seconds and try again.", 429)
        words = {key: values[0] for key, values in parse_qs(body.decode(errors="replace")).items()}
        right = secrets.compare_digest(words.get("username", "").encode(), NAME.encode())
        if not right & secrets.compare_digest(words.get("password", "").encode(), str(password).encode()):
            return HTMLResponse(html("login", wrong=True), 400)
        wrong.forget(address)
        sessions.add(session := secrets.token_urlsafe(32))
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, session, httponly=True, samesite="strict")
        return answer

    @app.get("/report.css")
    def report_style() -> FileResponse:
        return FileResponse(Path(videotune.reporter.__file__).parent / "templates" / "report.css")

    def refused(request: Request, error: Exception) -> PlainTextResponse:
        """A mistake of the user's, or a value that no file system or text can hold (a lone surrogate, a very long name)."""
        return PlainTextResponse(str(error)[:2000].encode("utf-8", "backslashreplace"), 400)

    for kind in (ValueError, OSError, RecursionError):
        app.add_exception_handler(kind, refused)
    app.mount("/static", StaticFiles(directory=STATIC))
    app.include_router(router(root, may, is_local(host)))
    return app
