"""What every page of the studio shares: who asks for what, the templates, and the forms of an answer."""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import Depends, HTTPException, Request, Response
from fastapi.responses import HTMLResponse
from markupsafe import Markup

from videotune.errors import VideotuneError
from videotune.queue.jobs import log_tail, why
from videotune.reporter.build import environment, fill
from videotune.studio.projects import Project, named, texts

STATIC = Path(__file__).parent / "static"
LONGEST_FORM = 4_000_000
"""Bytes of what a form sends; files are uploaded apart."""


@dataclass(frozen=True)
class PageContext:
    """A request as pages see it: the studio's folder of projects, the open project, and the words of the address.

    ``local``: only this computer reaches the studio, so a request may name its folders.
    """

    root: Path
    local: bool
    project: Project | None
    query: Mapping[str, str]
    locked: bool = False

    @property
    def home(self) -> Project:
        """The open project; VideotuneError where none is open."""
        if self.project is None:
            raise VideotuneError("choose a project first")
        return self.project


def asked(request: Request) -> PageContext:
    """The request as pages see it; VideotuneError where it names a project that is not there."""
    state = request.app.state
    query = dict(request.query_params)
    name = request.path_params.get("project") or query.get("project")
    return PageContext(
        state.root, state.local, named(state.root, name) if name else None, query, state.locked
    )


class FormData(dict[str, str]):
    """The fields of a form; one that is missing is an empty text."""

    lists: Mapping[str, list[str]]

    def __init__(self, lists: Mapping[str, list[str]]) -> None:
        super().__init__({key: values[-1] for key, values in lists.items()})
        self.lists = lists

    def __missing__(self, key: str) -> str:
        return ""

    def all(self, key: str) -> list[str]:
        """Every value of a field that may occur several times."""
        return self.lists.get(key, [])

    def number(self, key: str, whole: bool = True) -> str:
        """A number as it was typed, in so many digits that a command takes it; empty where there is none."""
        value = self[key].strip()
        if value and not re.fullmatch(
            r"[0-9]{1,18}" if whole else r"[0-9]{1,6}(\.[0-9]{1,6})?", value
        ):
            raise VideotuneError(f"{key}: a {'whole ' * whole}number, not {value[:40]!r}")
        return value


async def words(request: Request) -> FormData:
    """The body of a form; 413 where it is too long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_FORM:
            raise HTTPException(413, "too long")
    return FormData(
        parse_qs(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=20_000)
    )


In = Annotated[PageContext, Depends(asked)]
PostedForm = Annotated[FormData, Depends(words)]
Regions = dict[str, Callable[[PageContext], str]]
"""Parts of a page that stay up to date, by name: each is HTML, made anew about once a second while the page is open."""

TEMPLATES = environment("videotune.studio", "videotune.reporter")
TEMPLATES.globals |= {"log_tail": log_tail, "why": why, "texts": texts()}
TEMPLATES.filters |= {
    "q": lambda value: quote(str(value), safe=""),
    "iso": lambda seconds: iso(seconds),
}


def iso(seconds: float) -> str:
    """Seconds since 1970 as ``<time datetime>`` takes them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def html(template: str, /, **data: Any) -> str:
    """A template of the studio, or of the report, filled in."""
    return fill(TEMPLATES, f"{template}.html.j2", data)


def fragment(text: str) -> Response:
    """A part of a page."""
    return HTMLResponse(text, headers={"Cache-Control": "no-store"})


def tag(text: str) -> str:
    """A short hash of a region, by which a page says what it shows already."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=6).hexdigest()


def made(regions: Regions, name: str, asked: PageContext) -> str:
    """A region; one that cannot be made says why, and the others stay."""
    try:
        return regions[name](asked)
    except (VideotuneError, OSError) as error:
        return html("notice", words=str(error))


def page(
    asked: PageContext, name: str, regions: Regions, title: str, status: int = 200, **data: Any
) -> Response:
    """A whole page; its template places each region by ``{{ region("name") }}``."""

    def region(part: str) -> Markup:
        text = made(regions, part, asked)
        return Markup(f'<div id="r-{part}" class="region" data-tag="{tag(text)}">{text}</div>')

    given = {
        "asked": asked,
        "page": name,
        "region": region,
        "title": title,
        "project": asked.project,
    }
    return HTMLResponse(
        html(name, **given, **data), status, headers={"Cache-Control": "no-store"}
    )


def say(
    words: str = "", bad: bool = False, go: str = "", status: int = 204, **events: Any
) -> Response:
    """The answer to a button: a line to be shown, an address to go to, or events for the page's script."""
    told: dict[str, Any] = {**events} | (
        {"toast": {"words": words[:2000], "bad": bad}} if words else {}
    )
    headers = {"HX-Trigger": json.dumps(told)} if told else {}
    return Response(status_code=status, headers=headers | ({"HX-Redirect": go} if go else {}))


class Changes:
    """Wakes the open pages as soon as anybody has changed something."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """Wake all that wait."""
        before = self._next
        self._next = asyncio.Event()
        before.set()

    def ticket(self) -> asyncio.Event:
        """What will be set at the next change: taken before a page is made, so that no change is missed."""
        return self._next
