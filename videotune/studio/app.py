"""The studio as a program: its pages, the login, and who may ask, on one server."""

import os
import secrets
import shutil
import signal
import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

from videotune.errors import DONE, VideotuneError
from videotune.studio import (
    data_page,
    downloads,
    header,
    live,
    projects_page,
    queue_page,
    results_page,
    series,
    setup_page,
    train_page,
)
from videotune.studio.security import SESSION_COOKIE, ATTEMPT_WINDOW, Guard, LoginLimiter, check_host, is_local
from videotune.studio.uploads import UPLOADS
from videotune.studio.web import STATIC, Changes, CurrentPage, PageContext, PostedForm, render, page_response, reply

PASSWORD_VARIABLE = "VIDEOTUNE_STUDIO_PASSWORD"
"""Where the password is looked for: an environment variable, so that no list of processes shows it."""

LOGIN_NAME = "studio"
"""The name to log in with."""

PAGES = {
    "projects": projects_page, "data": data_page, "setup": setup_page, "train": train_page, "results": results_page,
    "queue": queue_page,
}  # fmt: skip
"""The modules of pages: each has ``routes`` and ``REGIONS``."""


def serve(root: Path, host: str, port: int) -> int:
    """Run the studio until Ctrl-C.

    Raises VideotuneError where the host needs a password, or the port is taken.
    """
    password = os.environ.pop(PASSWORD_VARIABLE, None)  # no job inherits it
    check_host(host, password)
    root.mkdir(parents=True, exist_ok=True)
    app = make_app(root.resolve(), host, password)
    _refuse_taken(host, port)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # uvicorn ends the server first, and then hands them on
        signal.signal(number, _ended)
    address = f"[{host}]" if ":" in host else host
    print(
        f"The studio is at http://{address}:{port}  (Ctrl-C ends it; trainings go on)",
        flush=True,
    )
    # the password's limit counts by address, so the address is the connection's own, never one that a header names
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=3,
            proxy_headers=False,
        )
    )
    app.state.is_ending = lambda: server.should_exit
    server.run()
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
            raise VideotuneError(
                f"{host}:{port} is not free ({error.strerror}): give another --port"
            ) from error


def make_app(root: Path, host: str, password: str | None) -> FastAPI:
    """The whole program; whoever has logged in holds a session's name in a cookie."""
    shutil.rmtree(
        root / UPLOADS, ignore_errors=True
    )  # what a server that was killed had half received
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.root = root
    app.state.local = is_local(host)
    app.state.changes = Changes()
    app.state.is_ending = lambda: False
    app.state.locked = password is not None
    sessions = set[str]()
    wrong = LoginLimiter()
    app.add_middleware(
        Guard,
        host=host,
        sessions=sessions if password is not None else None,
        changes=app.state.changes,
    )

    @app.get("/login")
    def login() -> Response:
        return HTMLResponse(render("login", wrong=False))

    @app.post("/login")
    def log_in(request: Request, form: PostedForm) -> Response:
        address = request.client.host if request.client else ""
        if not wrong.begin(address):
            return PlainTextResponse(
                f"Too many wrong passwords: wait {ATTEMPT_WINDOW:g} seconds and try again.", 429
            )
        right = secrets.compare_digest(form["username"].encode(), LOGIN_NAME.encode())
        if not right & secrets.compare_digest(
            form["password"].encode(), str(password).encode()
        ):
            return HTMLResponse(render("login", wrong=True), 400)
        wrong.forget(address)
        sessions.add(session := secrets.token_urlsafe(32))
        answer = RedirectResponse("/", 303)
        answer.set_cookie(SESSION_COOKIE, session, httponly=True, samesite="strict")
        return answer

    @app.post("/logout")
    def log_out(request: Request) -> Response:
        sessions.discard(request.cookies.get(SESSION_COOKIE, ""))
        return reply(go="/login")

    @app.get("/design")
    def design(asked: CurrentPage) -> Response:
        return page_response(asked, "design", header.REGIONS, "Components")

    for kind in (ValueError, OSError, RecursionError):
        app.add_exception_handler(kind, error_response)
    app.mount("/static", StaticFiles(directory=STATIC))
    for module in PAGES.values():
        app.include_router(module.routes)
    app.include_router(downloads.routes)
    app.include_router(series.routes)
    shown = {name: {**header.REGIONS, **module.REGIONS} for name, module in PAGES.items()}
    app.include_router(
        live.router({"design": header.REGIONS, "error": header.REGIONS, **shown})
    )
    return app


def error_response(request: Request, error: Exception) -> Response:
    """A mistake of the user's, or a value that no file system or text can hold (a lone surrogate, a very long name)."""
    told = f"{error.strerror or error}" if isinstance(error, OSError) else str(error)
    told = told[:2000].encode("utf-8", "backslashreplace").decode()
    if request.headers.get("hx-request"):
        answer = reply(told, bad=True, status=422)
        answer.body = told.encode()
        answer.headers["Content-Length"] = str(len(answer.body))
        return answer
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(told, 400)
    state = request.app.state
    nothing = PageContext(state.root, state.local, None, {}, state.locked)
    return page_response(nothing, "error", header.REGIONS, "Not found", 404, words=told)
