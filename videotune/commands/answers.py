"""Plans and translated configs for a program that asks again and again: ``python -m videotune.commands.answers``.

All libraries are imported once. A line on standard input names a JSON file with a question; its answer is written to the
file that it names. Each question is answered in a fork, which is ended when a newer one about the same comes, so an error, a
hang or a crash of one touches no other.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from videotune import lazy
from videotune.errors import DONE, FAILED, VideotuneError
from videotune.files import read_json, write_json

LONGEST = 120.0
"""Seconds of an answer, unless the question allows more."""

LIBRARIES = (
    *("torch", "transformers", "peft", "diffusers", "diffusers.models.transformers", "diffusers.models.autoencoders"),
    *("transformers.models.auto.modeling_auto", "videotune.commands.plan", "videotune.commands.import_config"),
)
MEASURED = ("fits", "hours", "hours_beside", "seconds_a_step", "device", "host", "chosen", "micro_batch", "remedies")
"""Keys of a plan that need a measured step."""


def plan(question: Mapping[str, Any], known: bool = False, **other: Any) -> dict[str, Any]:
    """The plan of a question: ``preset``, ``config``, ``allow_skips``, ``card`` and ``vram``, or a ``gpu`` as [name, bytes].

    Raises VideotuneError as ``videotune plan`` does.
    """
    from videotune.commands.plan import plan as planned
    from videotune.planner.cards import known_card

    asked = {"preset": None, "allow_skips": None, "card": None, "vram": None} | dict(question) | other
    if asked.get("gpu"):
        found = known_card(*asked["gpu"])
        asked["card"] = found and f"{found.name} {found.vram >> 30}GB"
        asked["vram"] = asked["gpu"][1] / 1e9
    words = {key: asked[key] for key in ("preset", "allow_skips", "card", "vram")}
    return planned(asked["config"], known=known, **words).plan


def answer(question: Mapping[str, Any]) -> None:
    """Write the answer to a question (``what``: plan, hours or import) with its ``key``, in parts as they are there.

    An error is an answer: its code and words. A plan is written twice where its step has to be measured, first with the
    figures of before for what that measures.
    """
    out = Path(question["out"])
    before = read_json(out) if out.is_file() else {}
    facts: dict[str, Any] = {"key": question["key"], "code": DONE, "words": ""}
    try:
        if question["what"] == "plan":
            old = facts["plan"] = before.get("plan") or {}  # stays in sight beside an error
            found = plan(question, known=True)
            if found["device"] is None:
                kept = {key: old[key] for key in MEASURED if key in old}
                write_json(out, facts | {"plan": found | kept, "part": "known"}, durable=False)
                found = plan(question)
            facts["plan"] = found
        elif question["what"] == "hours":
            facts["presets"] = before.get("presets", {}) if before.get("key") == facts["key"] else {}
            for name in question["presets"]:
                if name not in facts["presets"]:
                    facts["presets"][name] = _hours(question, name)
                    write_json(out, facts | {"part": "known"}, durable=False)
        else:
            from videotune.commands.import_config import import_config

            facts |= asdict(import_config([Path(file) for file in question["files"]]))
    except (VideotuneError, OSError) as error:
        facts |= {"code": getattr(error, "exit_code", FAILED), "words": str(error)}
    except Exception as error:
        traceback.print_exc()
        facts |= {"code": FAILED, "words": f"{type(error).__name__}: {error}"}
    write_json(out, json.loads(json.dumps(facts | {"part": "full"}, default=str)), durable=False)


def _hours(question: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """Whether a preset fits the card and how long it takes, or why that cannot be said."""
    try:
        found = plan(question, preset=preset)
    except VideotuneError as error:
        return {"words": str(error)}
    need = found["device"] and found["device"]["need_bytes"]
    hours = None if found["hours"] is None else found["hours"] + (found["hours_beside"] or 0)
    return {"fits": found["fits"], "hours": hours, "need_bytes": need}


def main() -> None:
    """Answer until standard input ends."""
    lazy.imports_stay = True
    for name in LIBRARIES:
        import_module(name)
    import_module("torch").set_num_threads(1)  # a fork has no threads but its own
    lines = sys.stdin.buffer.raw  # type: ignore[union-attr]  # unbuffered, so that select sees what is left
    at_work: dict[str, tuple[int, float, dict[str, Any]]] = {}
    while True:
        if select.select([lines], [], [], 0.1 if at_work else None)[0]:
            if not (line := lines.readline()):
                break
            with suppress(OSError, ValueError):  # a question that was replaced or taken away meanwhile
                question = read_json(Path(os.fsdecode(line.rstrip(b"\n"))))
                if question["out"] in at_work:
                    _end(at_work.pop(question["out"])[0])
                at_work[question["out"]] = (
                    _fork(question),
                    time.monotonic() + question.get("longest", LONGEST),
                    question,
                )
        for out, (process, end, question) in list(at_work.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended or time.monotonic() > end:
                del at_work[out]
                if not ended:
                    _end(process)
                if status or not ended:
                    _failed(
                        question,
                        f"was killed (status {status})"
                        if ended
                        else f"took more than {question.get('longest', LONGEST):g} s",
                    )
    for process, _, _ in at_work.values():
        _end(process)


def _failed(question: Mapping[str, Any], why: str) -> None:
    out = Path(question["out"])
    before = read_json(out) if out.is_file() else {}
    words = {"key": question["key"], "code": FAILED, "words": f"the calculation {why}", "part": "full"}
    write_json(out, before | words, durable=False)


def _fork(question: dict[str, Any]) -> int:
    if process := os.fork():
        return process
    try:
        answer(question)
        os._exit(0)
    finally:
        os._exit(1)


def _end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


if __name__ == "__main__":
    main()
