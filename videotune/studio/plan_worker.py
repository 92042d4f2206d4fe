"""Answers for the studio's pages: plans, hours of presets, translated configs. Each runs in a fork of a process that has
imported this module, and with it all libraries, so an error, a hang or a crash of one touches no other.
"""

import json
import os
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

import diffusers.models.autoencoders
import diffusers.models.transformers  # noqa: F401
import peft  # noqa: F401
import torch
import transformers.models.auto.modeling_auto  # noqa: F401

from videotune.commands.import_config import import_config
from videotune.commands.plan import plan as make_plan
from videotune.errors import DONE, FAILED, VideotuneError
from videotune.files import read_json, write_json
from videotune.planner.gpus import known_card

MEASURED_KEYS = (
    "fits",
    "hours",
    "hours_beside",
    "seconds_a_step",
    "device",
    "host",
    "chosen",
    "micro_batch",
    "remedies",
)
"""Keys of a plan that need a measured step."""


def write_answer(question: Mapping[str, Any]) -> None:
    """Write the answer to a question (``what``: plan, hours or import) with its ``key``, in parts as they are there.

    An error is an answer: its code and words. A plan is written twice where its step has to be measured, first with the
    figures of before for what that measures.
    """
    if studio := parent_process():
        Thread(target=_end_with, args=(studio,), daemon=True).start()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it takes none of the card's memory
        os.nice(5)  # a training goes first
        torch.set_num_threads(1)
    out = Path(question["out"])
    before = read_json(out) if out.is_file() else {}
    facts: dict[str, Any] = {"key": question["key"], "code": DONE, "words": ""}
    try:
        if question["what"] == "plan":
            old = facts["plan"] = before.get("plan") or {}  # stays in sight beside an error
            found = plan(question, known=True)
            if found["device"] is None:
                kept = {key: old[key] for key in MEASURED_KEYS if key in old}
                write_json(out, facts | {"plan": found | kept, "part": "known"}, durable=False)
                found = plan(question)
            facts["plan"] = found
        elif question["what"] == "hours":
            facts["presets"] = (
                before.get("presets", {}) if before.get("key") == facts["key"] else {}
            )
            for name in question["presets"]:
                if name not in facts["presets"]:
                    facts["presets"][name] = _hours(question, name)
                    write_json(out, facts | {"part": "known"}, durable=False)
        else:
            facts |= asdict(import_config([Path(file) for file in question["files"]]))
    except (VideotuneError, OSError) as error:
        facts |= {"code": getattr(error, "exit_code", FAILED), "words": str(error)}
    except Exception as error:
        traceback.print_exc()
        facts |= {"code": FAILED, "words": f"{type(error).__name__}: {error}"}
    write_json(
        out, json.loads(json.dumps(facts | {"part": "full"}, default=str)), durable=False
    )


def _end_with(studio: BaseProcess) -> None:
    studio.join()
    os._exit(FAILED)


def plan(question: Mapping[str, Any], known: bool = False, **other: Any) -> dict[str, Any]:
    """The plan of a question: ``preset``, ``config``, ``allow_skips``, ``card`` and ``vram``, or a ``gpu`` as [name, bytes].

    Raises VideotuneError as ``videotune plan`` does.
    """
    asked = (
        {"preset": None, "allow_skips": None, "card": None, "vram": None}
        | dict(question)
        | other
    )
    if asked.get("gpu"):
        found = known_card(*asked["gpu"])
        asked["card"] = found and f"{found.name} {found.vram >> 30}GB"
        asked["vram"] = asked["gpu"][1] / 1e9
    words = {key: asked[key] for key in ("preset", "allow_skips", "card", "vram")}
    return make_plan(asked["config"], known=known, **words).plan


def _hours(question: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """Whether a preset fits the card and how long it takes, or why that cannot be said."""
    try:
        found = plan(question, preset=preset)
    except VideotuneError as error:
        return {"words": str(error)}
    need = found["device"] and found["device"]["need_bytes"]
    hours = None if found["hours"] is None else found["hours"] + (found["hours_beside"] or 0)
    return {"fits": found["fits"], "hours": hours, "need_bytes": need}
