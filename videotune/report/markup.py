"""HTML put together from elements, so that text from a file cannot become markup.

``Html`` is text that is markup already. ``text`` (which escapes) and ``element`` make it, and ``element`` takes nothing
else inside; the type checker holds the rest of the room to that, whose only other ``Html`` is its own style sheet.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NewType
from urllib.parse import quote

Html = NewType("Html", str)

NOTHING = Html("")
VOID = ("meta", "img", "path", "line", "rect")
"""Elements written without an end tag; the ones of SVG close themselves."""


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


def join(parts: Iterable[Html], between: str = "") -> Html:
    """The parts one after the other, with plain text in between."""
    return Html(text(between).join(parts))


def paragraph(*inside: Html, css: str = "") -> Html:
    """A paragraph."""
    return element("p", *inside, css=css)


def section(anchor: str, title: str, *inside: Html) -> Html:
    """A titled part of the page."""
    return element("section", element("h2", text(title)), *inside, attributes={"id": anchor})


def missing(what: str) -> Html:
    """What stands where a file or a record is not there yet."""
    return paragraph(text(f"Not there yet: {what}."), css="missing")


def switched_off(key: str) -> Html:
    """What stands where the run was told not to make something."""
    return paragraph(text(f"Switched off ({key} is 0)."), css="missing")


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


def local_link(path: str) -> str | None:
    """A path relative to the page as a URL, or None where it leads out of the page's folder."""
    parts = path.replace("\\", "/").split("/")
    if not path or parts[0] == "" or parts[0].endswith(":") or ".." in parts:
        return None
    return quote("/".join(parts).encode("utf-8", "replace"), safe="/")


def plain(value: float | None, digits: int = 4) -> str:
    """A number for reading: whole ones with thousands marked, others to ``digits`` significant ones; a dash for None."""
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def counted(value: float | None, thing: str) -> str:
    """'1 clip', '2 clips'."""
    return f"{plain(value)} {thing}{'' if value == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time span for reading."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def moment(when: Any) -> str:
    """A time of the journal, seconds since 1970 or a text, for reading."""
    if isinstance(when, (int, float)) and not isinstance(when, bool):
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(when))
    return str(when)


def value_text(value: Any) -> str:
    """A value of a setting or a record for reading."""
    if isinstance(value, str):
        return value
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:.12g}"
    if isinstance(value, list):
        return ", ".join(value_text(entry) for entry in value) or "none"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {value_text(entry)}" for key, entry in value.items()) + "}"
    return str(value)
