"""The verdict on a plan: one word, one colour, and the reasons. It counts the memory of
the card, the memory and the disks of this computer, and whether the card is here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from videotune.reporter.read import mapping, number
from videotune.studio import gpu
from videotune.studio.memory_bar import gigabytes
from videotune.studio.projects import Project
from videotune.studio.this_computer import (
    DiskNeed,
    card_elsewhere,
    disk_needs,
    needs_a_card,
)
from videotune.studio.trained_model import trains_anywhere
from videotune.text import about_time_span, disk_size

Colour = Literal["good", "care", "bad", "quiet"]

LONG_CPU_HOURS = 24.0
"""Hours on the CPU from which a training is not one to start by mistake."""


@dataclass(frozen=True)
class Verdict:
    """Whether a training can run on this computer as it is planned."""

    word: str
    """What the badge says."""

    colour: Colour

    reasons: tuple[str, ...] = ()
    """Why, in sentences; the first one decides the word."""

    obstacles: tuple[str, ...] = ()
    """The reasons for which a training would fail."""

    @property
    def can_run(self) -> bool:
        """Whether nothing stands in the way of a training here."""
        return self.colour == "good" or self.word == "tight"


def plan_verdict(project: Project, plan: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict on a plan; None if its memory is not known yet.

    Args:
        project: the project.
        plan: the plan of its present settings.
    """
    device = mapping(plan.get("device"))
    if not device:
        return None

    problems = sorted(_problems(project, plan), key=lambda problem: problem[1] != "bad")
    if problems:
        word, colour, _ = problems[0]
        reasons = tuple(reason for _, _, reason in problems)
        obstacles = tuple(reason for _, kind, reason in problems if kind == "bad")
        return Verdict(word, colour, reasons, obstacles)
    return _verdict_without_problems(project, plan)


def _verdict_without_problems(project: Project, plan: Mapping[str, Any]) -> Verdict:
    device = mapping(plan.get("device"))
    if plan.get("fits") is None:
        if trains_anywhere(project):
            return Verdict("any computer", "good")
        return Verdict("no card chosen", "quiet")

    if plan.get("verdict") == "tight":
        reason = (
            f"It takes {_gigabytes(device['need_bytes'])} of "
            f"{_gigabytes(device['vram_bytes'])}: close other programs that use the card."
        )
        return Verdict("tight", "care", (reason,))
    if device["memory_from"] == "preset":
        memory = (number(device["vram_bytes"]) or 0.0) / 2**30
        return Verdict(f"fits {memory:g} GB cards", "good")
    return Verdict("fits", "good")


Problem = tuple[str, Colour, str]
"""The word, the colour and the sentence of something that stands in the way."""


def _problems(project: Project, plan: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what stands in the way of a training on this computer."""
    device = mapping(plan.get("device"))
    if plan.get("fits") is False:
        have = _gigabytes(device["vram_bytes"])
        need = _gigabytes(device["need_bytes"])
        reason = f"The card has {have}, and the training needs {need} of it."
        yield "does not fit", "bad", reason

    if needs_a_card(project):
        yield from _problems_elsewhere(project, plan)
    else:
        yield from _problem_of_host_memory(plan)

    for disk in disk_needs(project, plan):
        if disk.short_bytes:
            yield "not enough disk", "bad", describe_short_disk(disk)


def _problem_of_host_memory(plan: Mapping[str, Any]) -> Iterator[Problem]:
    host = mapping(plan.get("host"))
    need = number(host["need_bytes"]) or 0.0
    total = number(host["total_bytes"]) or 0.0
    if total and need > total:
        reason = (
            f"This computer has {_gigabytes(total)} of memory beside the card, and the "
            f"training needs {_gigabytes(need)} of it."
        )
        yield "too little memory", "bad", reason


def _problems_elsewhere(project: Project, plan: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield that the card of the plan is not in this computer, and what a training here
    would mean.
    """
    if not plan.get("fits"):
        return
    device = mapping(plan.get("device"))
    memory = (number(device["vram_bytes"]) or 0.0) / 2**30
    card = card_elsewhere(project) or f"cards of {memory:g} GB"
    reason = f"It fits {card}, and this computer has no NVIDIA card. A training here would use the CPU"
    hours = number(plan.get("cpu_hours"))
    reason += f" and take {about_time_span(hours)}." if hours else ", which takes days."

    host = mapping(plan.get("host"))
    if number(host["need_bytes"]):
        need = _gigabytes(host["need_bytes"])
        reason += f" The computer with the card needs {need} of memory beside it."
    yield "not on this computer", "care", reason


def describe_short_disk(disk: DiskNeed) -> str:
    """Return that a disk is too small, with the figures and what to do."""
    return (
        f"{disk_size(disk.short_bytes)} of disk are missing: a training writes "
        f"{disk_size(disk.needed_bytes)} to {disk.folder}, where "
        f"{disk_size(disk.free_bytes)} are free. Free some space, or move the studio's "
        "folder to a larger disk."
    )


def trains_on_cpu_for_long(project: Project, plan: Mapping[str, Any]) -> bool:
    """Return whether a training here would use the CPU for a day or more."""
    if gpu.list_gpus():
        return False
    hours = number(plan.get("cpu_hours"))
    return needs_a_card(project) if hours is None else hours >= LONG_CPU_HOURS


def _gigabytes(count: Any) -> str:
    return gigabytes(number(count) or 0.0)
