"""The studio as a program: Gradio's pages and our routes on one server, behind the guard."""

import inspect
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from videotune.errors import DONE, VideotuneError
from videotune.studio.security import Guard, check_host, is_local

PASSWORD = "VIDEOTUNE_STUDIO_PASSWORD"
"""Where the password is looked for: an environment variable, so that no list of processes shows it."""

NAME = "studio"
"""The name to log in with."""

LOOK = 0.1
"""Seconds between two looks into Gradio's queue, and so the longest that a button of its own waits."""

PAGES = ("project", "data", "setup", "train", "samples", "export")


def serve(root: Path, host: str, port: int) -> int:
    """Run the studio until Ctrl-C.

    Raises VideotuneError where the host needs a password, the port is taken, or Gradio is not installed.
    """
    password = os.environ.pop(PASSWORD, None)  # no job inherits it
    check_host(host, password)
    root.mkdir(parents=True, exist_ok=True)
    app = make_app(root.resolve(), host, port, password)
    import uvicorn

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
    import socket

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise VideotuneError(
                f"{host}:{port} cannot be listened on ({error.strerror}): give another --port"
            ) from error


def make_app(root: Path, host: str, port: int, password: str | None) -> Any:
    """The whole program as an ASGI app."""
    prepare_gradio(root)
    try:
        with without_stubs():
            import gradio as gr
        from fastapi import FastAPI, Request
        from fastapi.responses import FileResponse, PlainTextResponse
    except ImportError as error:
        raise VideotuneError(f"the studio needs Gradio ({error}): pip install 'videotune[studio]'") from error
    from videotune.studio import routes, style, uploads

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    holder: list[Any] = []

    def may(request: Request) -> bool:
        if password is None:
            return True
        gradio_app = holder[0]
        names = (f"access-token-{gradio_app.cookie_id}", f"access-token-unsecure-{gradio_app.cookie_id}")
        return any(request.cookies.get(name) in gradio_app.tokens for name in names if request.cookies.get(name))

    @app.get("/studio.js")
    def script() -> FileResponse:
        return FileResponse(
            routes.STATIC / "studio.js", media_type="text/javascript", headers={"Cache-Control": "no-cache"}
        )

    app.include_router(routes.router(root, may))

    def refused(request: Request, error: Exception) -> PlainTextResponse:
        """A mistake of the user's, or a value that no file system or text can hold (a lone surrogate, a very long name)."""
        return PlainTextResponse(str(error)[:2000].encode("utf-8", "backslashreplace"), 400)

    for kind in (ValueError, OSError, RecursionError):
        app.add_exception_handler(kind, refused)

    @app.middleware("http")
    async def only_after_login(request: Request, call_next: Any) -> Any:
        """Gradio answers some addresses to everybody; before the login the studio gives out its login page alone."""
        if request.url.path.startswith(("/gradio_api", "/openapi.json", "/monitoring")) and not may(request):
            return PlainTextResponse("log in first", 401)
        return await call_next(request)

    def login(name: str, word: str) -> bool:
        return secrets.compare_digest(name.encode(), NAME.encode()) & secrets.compare_digest(
            word.encode(), str(password).encode()
        )

    pages = blocks(root, is_local(host))
    pages.has_launched = (
        True  # else Gradio copies any path of this computer that a request names; mounting does not set it
    )
    app = gr.mount_gradio_app(
        app,
        pages,
        path="/",
        server_name=host,
        server_port=port,
        footer_links=[],
        auth=login if password else None,
        auth_message="The videotune studio: log in as studio." if password else None,
        max_file_size=uploads.MOST,
        ssr_mode=False,
        theme=style.theme(),
        css=style.css(),
        head='<script src="/studio.js" defer></script><meta name="viewport" content="width=device-width, initial-scale=1">',
    )
    holder.append(next(route.app for route in reversed(app.routes) if hasattr(getattr(route, "app", None), "tokens")))
    rest(holder[0])
    return Guard(app, host)


def rest(gradio_app: Any) -> None:
    """Gradio looks into its queue a thousand times a second also where nobody asks for anything; ten times are enough."""
    queue = gradio_app.get_blocks()._queue
    if not (hasattr(queue, "sleep_when_free") and hasattr(queue, "progress_update_sleep_when_free")):
        raise VideotuneError("this Gradio is not the one that the studio knows: pip install 'videotune[studio]'")
    queue.sleep_when_free = queue.progress_update_sleep_when_free = LOOK


def prepare_gradio(root: Path) -> None:
    """Gradio keeps uploads below the root, where they can be renamed into a project, and tells nobody anything."""
    from videotune.studio.uploads import UPLOADS

    os.environ["GRADIO_TEMP_DIR"] = str(root / UPLOADS)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"


@contextmanager
def without_stubs() -> Iterator[None]:
    """Gradio imported within this writes no stub files (.pyi) beside its own source.

    It does so for every component at every start, which is half of the time of its start, and useful to editors alone. It
    leaves it where a class says that it is in no file, so that is what its own classes say meanwhile.
    """
    plain = inspect.getfile

    def getfile(thing: Any) -> str:
        if isinstance(thing, type) and thing.__module__.startswith("gradio."):
            raise OSError("not asked for")
        return plain(thing)

    inspect.getfile = getfile  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getfile = plain


def blocks(root: Path, local: bool) -> Any:
    """The six pages, in the order of the data."""
    import gradio as gr

    from videotune.studio.pages import data, export, project, samples, setup, train

    with gr.Blocks(title="videotune studio", analytics_enabled=False, delete_cache=(3600, 86400)) as made:
        chosen = gr.Textbox(visible=False)
        gr.HTML('<div class="vt head" data-live="head" data-every="5000"></div>')
        with gr.Tabs(overflow_behavior="wrap", elem_id="pages"):
            for number, name in enumerate(PAGES, 1):
                with gr.Tab(f"{number} {name.capitalize()}", id=name, elem_id=f"page-{name}"):
                    page = {
                        "project": project,
                        "setup": setup,
                        "train": train,
                        "samples": samples,
                        "export": export,
                    }.get(name)
                    if page is None:
                        data.build(root, chosen, local)
                    else:
                        page.build(root, chosen)
    return made
