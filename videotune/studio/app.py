"""The studio as a server: pages, login, and access control."""

import os
import secrets
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
    folders_page,
    header,
    live,
    projects_page,
    queue_page,
    results_page,
    series,
    settings_page,
    setup_page,
    stages,
    train_page,
)
from videotune.studio.default_root import other_root
from videotune.studio.field_errors import FieldError
from videotune.studio.projects import clear_leftovers
from videotune.studio.security import (
    ATTEMPT_WINDOW,
    SESSION_COOKIE,
    Guard,
    LoginLimiter,
    check_host,
    is_local,
)
from videotune.studio.terms import in_studio_terms
from videotune.studio.web import (
    STATIC,
    UNEXPECTED,
    Changes,
    CurrentPage,
    FormData,
    PageContext,
    PostedForm,
    describe_unexpected,
    page_response,
    render,
    reply,
)
from videotune.text import as_argument

PASSWORD_VARIABLE = "VIDEOTUNE_STUDIO_PASSWORD"
"""Environment variable of the password; an option would show in the list of processes.
"""

LOGIN_NAME = "studio"
MAX_MESSAGE_LETTERS = 2000

header.REGIONS |= stages.REGIONS  # they read what the pages of a project show

PAGES = {
    "projects": projects_page,
    "data": data_page,
    "setup": setup_page,
    "train": train_page,
    "results": results_page,
    "queue": queue_page,
    "settings": settings_page,
}
"""The modules of the pages: each has ``routes`` and ``REGIONS``."""


def serve(root: Path, host: str, port: int) -> int:
    """Run the studio until Ctrl-C.

    Args:
        root: folder of the projects.
        host: host to listen on.
        port: port to listen on.

    Returns:
        The exit code.

    Raises:
        VideotuneError: if the host needs a password, or the port is taken.
    """
    password = os.environ.pop(PASSWORD_VARIABLE, None)  # so that no job inherits it
    check_host(host, password)
    root.mkdir(parents=True, exist_ok=True)
    app = make_app(root.resolve(), host, password)
    _check_port(host, port)

    # uvicorn first ends the server and then passes the signal on.
    signal.signal(signal.SIGINT, _exit)
    signal.signal(signal.SIGTERM, _exit)

    address = f"[{host}]" if ":" in host else host
    print(
        f"The studio runs at http://{address}:{port}  (Ctrl-C ends it; trainings continue)"
    )
    print(f"Projects are in {root.resolve()}  (--root names another folder)")
    home_root = other_root(root)
    if home_root is not None:
        print(
            f"There are also projects in {home_root}: videotune studio --root {as_argument(home_root)}"
        )
    sys.stdout.flush()

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=3,
        # The login limit counts by address, so that must be the connection's own.
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    app.state.is_ending = lambda: server.should_exit
    server.run()
    return DONE


def _exit(number: int, frame: object) -> None:
    print("\nThe studio has ended; trainings continue.", flush=True)
    sys.exit(DONE)


def _check_port(host: str, port: int) -> None:
    """Raise VideotuneError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise VideotuneError(
                f"{host}:{port} is not available ({error.strerror}): use another --port"
            ) from error


def make_app(root: Path, host: str, password: str | None) -> FastAPI:
    """Build the server.

    Args:
        root: folder of the projects.
        host: host to listen on.
        password: password of the login; None for no login.
    """
    clear_leftovers(root)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.root = root
    app.state.local = is_local(host)
    app.state.changes = Changes()
    app.state.is_ending = lambda: False
    app.state.locked = password is not None

    sessions: set[str] = set()
    app.add_middleware(
        Guard,
        host=host,
        sessions=sessions if password is not None else None,
        changes=app.state.changes,
    )
    _add_login(app, sessions, password)

    @app.get("/design")
    def design(page: CurrentPage) -> Response:
        return page_response(page, "design", header.REGIONS, "Components")

    for kind in {OSError, *UNEXPECTED}:
        app.add_exception_handler(kind, error_response)
    app.mount("/static", StaticFiles(directory=STATIC))
    _add_pages(app)
    return app


def _add_login(app: FastAPI, sessions: set[str], password: str | None) -> None:
    """Add login and logout; ``sessions`` holds the names in the cookies of logged-in
    users.
    """
    limiter = LoginLimiter()

    @app.get("/login")
    def login() -> Response:
        return HTMLResponse(render("login", wrong=False))

    @app.post("/login")
    def log_in(request: Request, form: PostedForm) -> Response:
        address = request.client.host if request.client else ""
        if not limiter.begin(address):
            return PlainTextResponse(
                f"Too many wrong passwords: wait {ATTEMPT_WINDOW:g} seconds and try again.",
                429,
            )

        # Both are always compared, so the time does not reveal which one is wrong.
        is_name_right = _equals(form["username"], LOGIN_NAME)
        is_password_right = _equals(form["password"], str(password))
        if not is_name_right & is_password_right:
            return HTMLResponse(render("login", wrong=True), 400)

        limiter.forget(address)
        session = secrets.token_urlsafe(32)
        sessions.add(session)
        response = RedirectResponse("/", 303)
        response.set_cookie(SESSION_COOKIE, session, httponly=True, samesite="strict")
        return response

    @app.post("/logout")
    def log_out(request: Request) -> Response:
        sessions.discard(request.cookies.get(SESSION_COOKIE, ""))
        return reply(redirect="/login")


def _equals(text: str, secret: str) -> bool:
    return secrets.compare_digest(text.encode(), secret.encode())


def _add_pages(app: FastAPI) -> None:
    """Add the routes of all pages, and their stream of regions."""
    regions_by_page = {"design": header.REGIONS, "error": header.REGIONS}
    for name, module in PAGES.items():
        app.include_router(module.routes)
        regions_by_page[name] = header.REGIONS | module.REGIONS

    app.include_router(downloads.routes)
    app.include_router(series.routes)
    app.include_router(folders_page.routes)
    app.include_router(live.router(regions_by_page))


def error_response(request: Request, error: Exception) -> Response:
    """Report an error of the user, or a value that no file system or text can hold.

    Such values are lone surrogates and very long names, for example.
    """
    message = _error_message(error)
    if request.headers.get("hx-request"):
        field = error.field if isinstance(error, FieldError) else ""
        response = reply(message, is_error=True, field=field, status=422)
        response.body = message.encode()
        response.headers["Content-Length"] = str(len(response.body))
        return response
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(message, 400)

    state = request.app.state
    page = PageContext(
        root=state.root,
        is_local=state.local,
        project=None,
        query=FormData({}),
        has_password=state.locked,
    )
    return page_response(
        page, "error", header.REGIONS, "Not found", status=404, words=message
    )


def _error_message(error: Exception) -> str:
    """Return the message of an error, as far as a page can show it."""
    if isinstance(error, OSError):
        message = str(error.strerror or error)
    elif isinstance(error, ValueError):
        message = str(error)
    else:
        message = describe_unexpected(error)
    message = in_studio_terms(message[:MAX_MESSAGE_LETTERS])
    return message.encode("utf-8", "backslashreplace").decode()
