"""HTML put together from elements, so that text from a file cannot become markup.

``Html`` is text that is markup already. ``text`` (which escapes) and ``element`` make it, and ``element`` takes nothing
else inside; the type checker holds the rest of the studio to that, whose only other ``Html`` are the report's chapters.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NewType

Html = NewType("Html", str)

NOTHING = Html("")
VOID = ("img", "input")
"""Elements written without an end tag."""


def text(value: object) -> Html:
    """Any value as visible text; what UTF-8 cannot carry becomes a question mark."""
    return Html(html.escape(str(value).encode("utf-8", "replace").decode("utf-8")))


def element(
    name: str, *inside: Html, css: str = "", attributes: Mapping[str, object] | None = None, flags: str = ""
) -> Html:
    """``<name class=css …>inside</name>``; attribute values are escaped, ``flags`` are attributes without a value."""
    given = ({"class": css} if css else {}) | dict(attributes or {})
    written = "".join(f' {key}="{text(value)}"' for key, value in given.items()) + (f" {flags}" if flags else "")
    if name in VOID:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{''.join(inside)}</{name}>")


def join(parts: Iterable[Html]) -> Html:
    """The parts one after the other."""
    return Html("".join(parts))


def paragraph(*inside: Html, css: str = "") -> Html:
    """A paragraph."""
    return element("p", *inside, css=css)


def bullets(entries: Sequence[Html], css: str = "") -> Html:
    """A list."""
    return element("ul", *(element("li", entry) for entry in entries), css=css) if entries else NOTHING


def table(head: Sequence[str], rows: Iterable[Sequence[Html]], css: str = "") -> Html:
    """A table that scrolls sideways by itself; with css "cards" each row becomes a card where there is little room."""
    top = element("tr", *(element("th", text(name)) for name in head))
    body = [
        element(
            "tr", *(element("td", cell, attributes={"data-label": name}) for name, cell in zip(head, row, strict=True))
        )
        for row in rows
    ]
    whole = element("table", element("thead", top), element("tbody", *body), css=css)
    return element("div", whole, css="scroll")


def badge(word: str, css: str) -> Html:
    """A word in a coloured frame."""
    return element("span", text(word), css=f"badge {css}")


def details(summary: str, *inside: Html) -> Html:
    """A part that opens on a click."""
    return element("details", element("summary", text(summary)), *inside)
