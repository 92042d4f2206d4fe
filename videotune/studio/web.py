"""What all pages share: the request as pages see it, posted forms, templates and
responses.
"""

import asyncio
import hashlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import Depends, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import TemplateError
from markupsafe import Markup
from typing_extensions import TypedDict

from videotune.errors import VideotuneError, printable
from videotune.files import size_text
from videotune.queue.jobs import describe_outcome, log_tail
from videotune.reporter.build import environment, fill
from videotune.studio.base_model_problem import plain_reason
from videotune.studio.field_errors import FieldError
from videotune.studio.memory_bar import gigabytes
from videotune.studio.model_choices import FIT_MEANINGS
from videotune.studio.paths import PathRule
from videotune.studio.projects import Project, find_project, texts
from videotune.studio.setting_names import (
    in_page_words,
    linked_sentence,
    with_setting_links,
    with_value_words,
)
from videotune.studio.terms import in_studio_terms, of_other_folders
from videotune.text import capitalized, without_thousands_marks

STATIC = Path(__file__).parent / "static"

MAX_FORM_BYTES = 4_000_000
"""Size limit of a posted form; files have an upload route of their own."""

MAX_FORM_FIELDS = 20_000
MAX_TOAST_LETTERS = 500
MAX_HEADER_LETTERS = 8000
"""Size limit of the events in a header; some clients read no more."""

INTEGER = re.compile(r"[0-9]{1,18}")
DECIMAL = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
NOT_CACHED = {"Cache-Control": "no-store"}


class FormData(dict[str, str]):
    """The fields of a form, posted or in an address; a missing field reads as an empty
    text.
    """

    lists: Mapping[str, list[str]]
    """Every value of each field, for fields that occur more than once."""

    def __init__(self, lists: Mapping[str, list[str]]) -> None:
        super().__init__({key: values[-1] for key, values in lists.items()})
        self.lists = lists

    def __missing__(self, key: str) -> str:
        return ""

    def all(self, key: str) -> list[str]:
        """Return every value of a field that may occur more than once."""
        return self.lists.get(key, [])

    def number(self, key: str, *, decimal: bool = False) -> str:
        """Return a number as typed, safe to pass to a command; empty if the field is
        empty.

        Raises:
            FieldError: if the text is not a number.
        """
        value = self[key].strip()
        if not decimal:
            value = without_thousands_marks(value)
        pattern = DECIMAL if decimal else INTEGER
        if value and not pattern.fullmatch(value):
            expected = "a number" if decimal else "a whole number"
            raise FieldError(f"{key}: {value[:40]!r} is not {expected}", key)
        return value


@dataclass(frozen=True)
class PageContext:
    """A request as the pages see it."""

    root: Path
    """The folder of all projects."""

    is_local: bool
    """Whether only this computer can reach the studio; then a request may name any
    folder.
    """

    project: Project | None
    """The project that the address names."""

    query: FormData
    """The query parameters of the address."""

    has_password: bool = False

    name: str = ""
    """The name of the page that is rendered; empty if it is none."""

    shared: dict[str, Any] = field(default_factory=dict, compare=False)
    """What the parts of one rendering have worked out for each other."""

    @property
    def path_rule(self) -> PathRule:
        """What the user may name: with a password, only what is below the root."""
        is_restricted = self.has_password or not self.is_local
        return PathRule(self.root, is_restricted)

    @property
    def current_project(self) -> Project:
        """The open project; VideotuneError if none is open."""
        if self.project is None:
            raise VideotuneError("choose a project first")
        return self.project


def page_context(request: Request) -> PageContext:
    """Return the request as pages see it; VideotuneError if it names an unknown
    project.
    """
    state = request.app.state
    parameters = request.query_params
    query = FormData({key: parameters.getlist(key) for key in parameters})
    name = request.path_params.get("project") or query.get("project")

    return PageContext(
        root=state.root,
        is_local=state.local,
        project=find_project(state.root, name) if name else None,
        query=query,
        has_password=state.locked,
    )


async def read_form(request: Request) -> FormData:
    """Read a posted form; HTTP 413 if it is too long."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise HTTPException(413, "too long")

    text = body.decode(errors="replace")
    lists = parse_qs(text, keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS)
    return FormData(lists)


CurrentPage = Annotated[PageContext, Depends(page_context)]
PostedForm = Annotated[FormData, Depends(read_form)]

Regions = dict[str, Callable[[PageContext], str]]
"""Parts of a page by name, each a function that returns HTML.

An open page refreshes them about once a second.
"""

TEMPLATES = environment("videotune.studio", "videotune.reporter")
TEMPLATES.globals |= {
    "fit_meanings": FIT_MEANINGS,
    "log_tail": log_tail,
    "why": lambda job: plain_reason(describe_outcome(job)),
    "texts": texts(),
}
TEMPLATES.filters |= {
    "terms": in_studio_terms,
    "of_other_folders": of_other_folders,
    "capitalized": capitalized,
    "plain_reason": plain_reason,
    "gigabytes": gigabytes,
    "page_words": in_page_words,
    "setting_links": with_setting_links,
    "linked_sentence": linked_sentence,
    "size_text": size_text,
    "value_words": with_value_words,
    "q": lambda value: quote(str(value), safe=""),
    "iso": lambda seconds: isoformat(seconds),
}


def isoformat(seconds: float) -> str:
    """Return seconds since 1970 in the format of ``<time datetime>``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def render(template: str, /, **data: Any) -> str:
    """Fill in a template of the studio or of the report."""
    return fill(TEMPLATES, f"{template}.html.j2", data)


def fragment(text: str) -> Response:
    """Return a part of a page as a response."""
    return HTMLResponse(text, headers=NOT_CACHED)


def content_tag(text: str) -> str:
    """Return a short hash of a region, with which a page reports what it shows already."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=6).hexdigest()


UNEXPECTED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TemplateError,
    TypeError,
    ValueError,
)
"""Errors by a value that a part of a page does not expect in a file that it shows."""


def render_region(regions: Regions, name: str, page: PageContext) -> str:
    """Render a region; on an error its place shows the message, so the others still
    render.
    """
    try:
        text = regions[name](page)
        text.encode()  # half a letter (a lone surrogate) cannot be sent
        return text
    except (VideotuneError, OSError) as error:
        return render("notice", words=in_studio_terms(printable(str(error))))
    except UNEXPECTED as error:
        return render("notice", words=describe_unexpected(error))


def describe_unexpected(error: Exception) -> str:
    """Return the message of an error that no reader of a file has foreseen; print its
    traceback, since that is a fault of the studio.
    """
    traceback.print_exception(error, file=sys.stderr)
    return printable(
        "This part cannot be shown: a file of the project or of its runs holds a value "
        f"that was not expected ({type(error).__name__}: {str(error)[:300]}). "
        "The terminal of the studio shows where it was read."
    )


def page_response(
    page: PageContext,
    name: str,
    regions: Regions,
    title: str,
    status: int = 200,
    **data: Any,
) -> Response:
    """Render a full page.

    Args:
        page: the request.
        name: name of the template and of the page.
        regions: regions that the template places with ``{{ region("name") }}``.
        title: title of the page.
        status: HTTP status.
        **data: further variables of the template.
    """
    page = replace(page, name=name)

    def region(part: str) -> Markup:
        text = render_region(regions, part, page)
        tag = content_tag(text)
        return Markup(
            f'<div id="r-{part}" class="region" data-tag="{tag}">{text}</div>'
        )

    shared = {
        "context": page,
        "page": name,
        "region": region,
        "title": title,
        "project": page.project,
    }
    return HTMLResponse(render(name, **shared, **data), status, headers=NOT_CACHED)


class ToastAction(TypedDict):
    """A button beside the message of an answer."""

    words: str
    post: str
    values: dict[str, str]


def reply(
    message: str = "",
    *,
    is_error: bool = False,
    field: str = "",
    action: ToastAction | None = None,
    redirect: str = "",
    status: int = 204,
    **events: Any,
) -> Response:
    """Answer a button.

    Args:
        message: line to show on the page.
        is_error: whether the line reports an error.
        field: name of the field of the sent form that the error is about.
        action: a button beside the line.
        redirect: address to go to.
        status: HTTP status.
        **events: events for the script of the page.
    """
    triggers: dict[str, Any] = {**events}
    if message:
        toast: dict[str, Any] = {
            "words": message[:MAX_TOAST_LETTERS],
            "bad": is_error,
        }
        if field:
            toast["field"] = field
        if action is not None:
            toast["action"] = action
        triggers["toast"] = toast

    headers = {}
    if triggers:
        header = json.dumps(triggers)
        if len(header) > MAX_HEADER_LETTERS:
            raise ValueError(f"events of {len(header)} letters do not fit a header")
        headers["HX-Trigger"] = header
    if redirect:
        headers["HX-Redirect"] = redirect
    return Response(status_code=status, headers=headers)


def json_reply(value: Mapping[str, Any], status: int = 200) -> Response:
    """Answer a script of the page with values, which may be too long for a header."""
    return JSONResponse(value, status, headers={"HX-Reswap": "none"})


class Changes:
    """Wakes the open pages as soon as a request has changed something."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting pages."""
        event = self._next
        self._next = asyncio.Event()
        event.set()

    def next_change(self) -> asyncio.Event:
        """Return the event of the next change; take it before rendering, to miss no
        change.
        """
        return self._next
