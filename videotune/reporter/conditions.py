"""The conditions that a run learnt, in words, and how a sample is given each."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from videotune.reporter.read import Fields, Run, at, items, mapping, number
from videotune.text import as_argument, counted

NAMES = {
    "first_frame": "first frame",
    "last_frame": "last frame",
    "prefix": "prefix: a clip that it continues",
    "suffix": "suffix: a clip that it leads to",
    "mask": "mask: a region that is painted anew",
    "reference": "reference: a clip or image that it follows",
    "control": "control: a clip or image that controls it",
}

OPTIONS = {
    "first_frame": "--image begin.png",
    "last_frame": "--last-frame end.png",
    "prefix": "--prefix before.mp4",
    "suffix": "--suffix after.mp4",
    "mask": "--video clip.mp4 --mask mask.png",
    "reference": "--reference subject.png",
    "control": "--control control.mp4",
}
"""By condition the options of ``videotune sample``."""

_TYPE = re.compile(r"[a-z_]{1,40}")

IN_DIFFUSERS = "sampled by diffusers"
IN_VIDEOTUNE = "sampled by videotune only"


@cache
def image_pipelines() -> dict[str, str]:
    """Return the code that makes a pipeline of text take a first frame, by the
    pipeline's class. It is empty if the pipeline takes one as it is.
    """
    path = Path(__file__).with_name("image_pipelines.json")
    pipelines: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return pipelines


def learnt(run: Run) -> list[Fields]:
    """Return the conditions of a run's plan that some samples have."""
    rows = []
    for item in items(at(run.plan, "conditions")):
        condition = mapping(item)
        is_type = _TYPE.fullmatch(str(condition["type"])) is not None
        if is_type and number(condition["probability"]):
            rows.append(condition)
    return rows


def conditions(run: Run, folder: str) -> list[dict[str, str]]:
    """Return each condition with its share, its grade and its command.

    Args:
        run: the run.
        folder: how the run is named in the commands.
    """
    rows = []
    for condition in learnt(run):
        condition_type = str(condition["type"])
        name = NAMES.get(condition_type, condition_type.replace("_", " "))
        latent_frames = number(condition["latent_frames"])
        if latent_frames is not None:
            name += f", {counted(latent_frames, 'latent frame')}"

        share = number(condition["probability"]) or 0.0
        in_diffusers = condition["in_diffusers"] is True
        options = OPTIONS.get(condition_type)
        command = ""
        if options is not None and not in_diffusers:
            command = f'videotune sample {as_argument(folder)} --prompt "…" {options}'
        rows.append(
            {
                "name": name,
                "share": f"{100 * share:.3g}% of the samples",
                "grade": IN_DIFFUSERS if in_diffusers else IN_VIDEOTUNE,
                "command": command,
            }
        )
    return rows


def takes_last_image(run: Run) -> bool:
    """Whether the run's pipeline of diffusers takes a last frame."""
    return _in_diffusers(run, "last_frame")


def _in_diffusers(run: Run, condition_type: str) -> bool:
    """Whether the run learnt a condition that diffusers samples with."""
    return any(
        condition["type"] == condition_type and condition["in_diffusers"] is True
        for condition in learnt(run)
    )


def with_first_frame(run: Run, lines: Sequence[str]) -> list[str] | None:
    """Return code that loads a pipeline which takes a first frame.

    Args:
        run: the run.
        lines: code that loads its pipeline of text.

    Returns:
        None if the run did not learn it, or its pipeline is not known.
    """
    if not _in_diffusers(run, "first_frame"):
        return None

    names = set(re.findall(r"\b[A-Z]\w*Pipeline\b", "\n".join(lines)))
    known_names = names & image_pipelines().keys()
    if len(known_names) != 1:
        return None
    conversion = image_pipelines()[known_names.pop()]
    return [*lines, conversion] if conversion else list(lines)
