"""What the pages share: their templates, parts that the script keeps up to date, and the actions behind Gradio's events."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from videotune.errors import VideotuneError
from videotune.reporter.build import environment, fill
from videotune.studio.actions import ACTIONS, perform
from videotune.studio.jobs import log_tail, why

TEMPLATES = environment("videotune.studio", "videotune.reporter")
TEMPLATES.globals |= {"log_tail": log_tail, "why": why}

FIRST = "(...values) => videotune.first(...values)"
"""Puts the project of the address into the first input of an event."""


def html(template: str, /, **data: Any) -> str:
    """A template of the studio, or of the report, filled in."""
    return fill(TEMPLATES, f"{template}.html.j2", data)


def live(part: str, seconds: float = 0) -> gr.HTML:
    """A place for a part of the page, kept up to date every so many seconds (0: only after something was done)."""
    every = f' data-every="{int(seconds * 1000)}"' if seconds else ""
    return gr.HTML(f'<div class="vt" data-live="{part}"{every}></div>')


def on(event: Any, act: Callable[..., Any], inputs: Sequence[Any], outputs: Any, js: str = FIRST) -> None:
    """Let an event of a Gradio component call ``act``, and the page refresh after it."""
    done = event(act, list(inputs), outputs, js=js, show_progress="hidden", api_visibility="private")
    done.then(None, js="() => { videotune.refresh(); }")


def asking(root: Path, action: str, *names: str) -> Callable[..., str]:
    """A Gradio event's function: its inputs are the project and the named words; it answers with a line of HTML."""

    def answer(*values: Any) -> str:
        words = dict(zip(("project", *names), values, strict=True))
        return answered(lambda: perform(ACTIONS[action], root, words))

    return answer


def answered(act: Callable[[], Mapping[str, Any]]) -> str:
    """The answer of an action, or the user's mistake, as a line of HTML."""
    try:
        answer = act()
    except VideotuneError as error:
        return html("answer", error=error, refused=())
    return html("answer", error="", words=answer["say"], go=answer.get("go"), refused=answer.get("refused"))
