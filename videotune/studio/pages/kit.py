"""What the pages are made of: parts that the script keeps up to date, and buttons that ask the server for something."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr

from videotune.errors import VideotuneError
from videotune.studio.actions import ACTIONS
from videotune.studio.jobs import Job, log_tail, why
from videotune.studio.markup import NOTHING, Html, element, paragraph, text

FIRST = "(...values) => videotune.first(...values)"
"""Puts the project of the address into the first input of an event."""

THEN = "() => { videotune.refresh(); }"


def live(part: str, seconds: float = 0) -> gr.HTML:
    """A place for a part of the page, kept up to date every so many seconds (0: only after something was done)."""
    every = f' data-every="{int(seconds * 1000)}"' if seconds else ""
    return gr.HTML(f'<div class="vt" data-live="{part}"{every}></div>')


def button(
    words: str, action: str, body: Mapping[str, Any], *, confirm: str = "", css: str = "", title: str = ""
) -> Html:
    """A button that asks for an action, after a question where it takes something away."""
    given: dict[str, object] = {"type": "button", "data-ask": action, "data-body": json.dumps(dict(body))}
    given |= {"data-confirm": confirm} if confirm else {}
    given |= {"title": title} if title else {}
    return element("button", text(words), css=css, attributes=given)


def link(words: str, css: str = "", **query: str) -> Html:
    """A link to another page or run of the studio."""
    where = "&".join(f"{key}={quote(value)}" for key, value in query.items())
    return element("a", text(words), css=css, attributes={"href": f"?{where}"})


def tip(words: str, help: str) -> Html:
    """A word with its explanation, for the mouse and for the keyboard."""
    return element("abbr", text(words), attributes={"title": help, "tabindex": "0"})


def entry(name: str, label: str, value: str = "", kind: str = "text", help: str = "", wide: bool = False) -> Html:
    """A labelled input of a small form."""
    given = {"name": name, "type": kind, "value": value, "title": help} | ({"size": "40"} if wide else {})
    return element("label", element("span", text(label)), element("input", attributes=given), css="entry")


def log(job: Job | None, lines: int = 25) -> Html:
    """What a job has said, to be opened."""
    if job is None:
        return NOTHING
    said = "\n".join(log_tail(job, lines)) or "nothing yet"
    return element(
        "details",
        element("summary", text("What it said")),
        element("pre", text(said)),
        attributes={"id": f"log-{job.folder.name}"},
    )


def at_work(job: Job | None, what: str, kind: str = "") -> Html:
    """A line on a job that is at work, or that ended badly."""
    if job is None or job.state == "done":
        return NOTHING
    if job.running:
        last = (log_tail(job, 1) or [""])[-1]
        stop = button("stop", "stop-job", {"kind": kind}) if kind else NOTHING
        return element(
            "p",
            element("span", css="spin"),
            text(f"{what} … {last}"),
            stop,
            css="working",
            attributes={"role": "status"},
        )
    return element(
        "div", paragraph(text(f"{what} ended: {why(job)}"), css="care" if job.state == "stopped" else "bad"), log(job)
    )


def facts(pairs: Mapping[str, object]) -> Html:
    """Figures, each with its name below it."""
    shown = [
        element("div", element("b", text(value)), element("span", text(name)))
        for name, value in pairs.items()
        if value is not None
    ]
    return element("div", *shown, css="facts")


def bar(share: float, css: str = "good", label: str = "") -> Html:
    """A bar that is filled so far."""
    whole = max(0.0, min(1.0, share))
    inner = element("i", attributes={"style": f"width:{whole:.1%}"})
    given = {"role": "progressbar", "aria-valuenow": f"{whole:.0%}", "aria-label": label, "title": label}
    return element("div", inner, css=f"meter {css}", attributes=given)


def empty(*inside: Html) -> Html:
    """What stands where there is nothing yet, with what to do."""
    return element("div", *inside, css="empty")


def asking(root: Path, action: str, names: tuple[str, ...]) -> Callable[..., str]:
    """A Gradio event's function: its inputs are the project and the named words; it answers with a line of HTML."""

    def answer(*values: Any) -> str:
        return said(lambda: ACTIONS[action](root, dict(zip(("project", *names), values, strict=True))))

    return answer


def said(act: Callable[[], Mapping[str, str | bool]]) -> str:
    """The answer of an action, or the person's mistake, as a line of HTML."""
    try:
        answer = act()
    except VideotuneError as error:
        return element("p", text(error), css="vt bad", attributes={"role": "alert"})
    go = {"data-go": str(answer["go"])} if "go" in answer else {}
    return element("p", text(answer.get("say", "")), css="vt good", attributes={"role": "status", **go})
