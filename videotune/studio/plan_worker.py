"""Computes answers for the studio: plans, hours of presets, imported configs.

Each runs in a fork of a process that has imported this module and with it all
libraries, so an error, a hang or a crash of one answer affects no other.
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
from videotune.files import write_json
from videotune.planner.gpus import known_card
from videotune.studio.plan_server import read_answer

HOURS_NICENESS = 14
"""How much further the hours of presets stand back than a plan."""


def write_answer(question: Mapping[str, Any]) -> None:
    """Write the answer to a question, part by part as it is computed.

    An error is an answer too, with its exit code and its message.

    Args:
        question: ``what`` is plan, hours or import; ``out`` the file to write; ``key``
            the key that the answer repeats.
    """
    studio = parent_process()
    if studio:
        _limit_worker(studio)

    out = Path(question["out"])
    previous = read_answer(out)
    answer: dict[str, Any] = {"key": question["key"], "code": DONE, "words": ""}
    try:
        if question["what"] == "plan":
            _answer_plan(question, answer, out)
        elif question["what"] == "hours":
            os.nice(HOURS_NICENESS)  # a plan that somebody waits for goes first
            _answer_hours(question, answer, previous, out)
        else:
            answer |= _import_answer(question)
    except (VideotuneError, OSError) as error:
        answer["code"] = getattr(error, "exit_code", FAILED)
        answer["words"] = str(error)
    except Exception as error:
        traceback.print_exc()
        answer["code"] = FAILED
        answer["words"] = f"{type(error).__name__}: {error}"

    answer["part"] = "full"
    write_json(out, json.loads(json.dumps(answer, default=str)), durable=False)


def _import_answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an uploaded config becomes.

    Raises:
        VideotuneError: if it cannot be imported; the uploaded files are named without
            their folder on the server.
    """
    files = [Path(file) for file in question["files"]]
    within = question.get("within")
    try:
        imported = import_config(files, within=within and Path(within))
    except (VideotuneError, OSError) as error:
        message = str(error)
        for file in files:
            message = message.replace(str(file), file.name)
        raise VideotuneError(message) from error
    return asdict(imported.for_studio())


def _limit_worker(studio: BaseProcess) -> None:
    """End with the studio, use no GPU memory, and leave the CPU to trainings."""
    Thread(target=_exit_with, args=(studio,), daemon=True).start()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.nice(5)
    torch.set_num_threads(1)


def _exit_with(studio: BaseProcess) -> None:
    studio.join()
    os._exit(FAILED)


def _answer_plan(
    question: Mapping[str, Any],
    answer: dict[str, Any],
    out: Path,
) -> None:
    """Add the plan to the answer.

    If its step has to be measured, first write what is known without it.
    """
    new_plan = plan(question, known=True)
    if new_plan["device"] is None:
        preliminary = answer | {"plan": new_plan, "part": "known"}
        write_json(out, preliminary, durable=False)
        new_plan = plan(question)
    answer["plan"] = new_plan


def _answer_hours(
    question: Mapping[str, Any],
    answer: dict[str, Any],
    previous: Mapping[str, Any],
    out: Path,
) -> None:
    """Add the hours of each preset to the answer, and write it after each."""
    is_same_question = previous.get("key") == answer["key"]
    answer["presets"] = previous.get("presets", {}) if is_same_question else {}
    answer["card"] = question["card_name"]
    answer["total"] = len(question["presets"])
    write_json(out, answer | {"part": "known"}, durable=False)
    for name in question["presets"]:
        if name not in answer["presets"]:
            answer["presets"][name] = _hours(question, name)
            write_json(out, answer | {"part": "known"}, durable=False)


def plan(
    question: Mapping[str, Any], *, known: bool = False, preset: str | None = None
) -> dict[str, Any]:
    """Return the plan of a question, with ``cpu_hours`` of its steps on this CPU.

    Args:
        question: ``config``, and optionally ``preset``, ``allow_skips``, ``card`` and
            ``vram``, or a ``gpu`` as [name, bytes].
        known: whether to use only known measurements.
        preset: replaces the preset of the question.

    Raises:
        VideotuneError: as ``videotune plan`` does.
    """
    card = question.get("card")
    vram = question.get("vram")
    if question.get("gpu"):
        name, memory_bytes = question["gpu"]
        known_gpu = known_card(name, memory_bytes)
        card = known_gpu and f"{known_gpu.name} {known_gpu.vram >> 30}GB"
        vram = memory_bytes / 2**30

    result = make_plan(
        question["config"],
        known=known,
        preset=preset or question.get("preset"),
        allow_skips=question.get("allow_skips"),
        card=card,
        vram=vram,
    )
    cpu_seconds = result.cpu_seconds or result.cpu_seconds_without_card
    if cpu_seconds is not None:
        result.plan["cpu_hours"] = cpu_seconds / 3600
    return result.plan


def _hours(question: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """Return whether a preset fits the GPU and how long it takes, or the error."""
    try:
        preset_plan = plan(question, preset=preset)
    except VideotuneError as error:
        return {"words": str(error)}

    hours = preset_plan["hours"]
    if hours is not None:
        hours += preset_plan["hours_beside"] or 0
    device = preset_plan["device"]
    return {
        "fits": preset_plan["fits"],
        "verdict": preset_plan["verdict"],
        "hours": hours,
        "examples": preset_plan["examples"],
        "need_bytes": device and device["need_bytes"],
    }
