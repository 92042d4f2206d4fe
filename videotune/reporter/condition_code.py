"""Code that calls diffusers' pipelines with what a run learnt to be given."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from videotune.reporter.conditions import learnt
from videotune.reporter.read import Run, number

ORDER = (
    "control",
    "mask",
    "prefix",
    "suffix",
    "first_frame",
    "last_frame",
    "reference",
)
"""Types of conditions, those first that others are written over."""

MOST_FRAMES = 1000
"""Latent frames of a prefix or suffix, at most."""


@dataclass(frozen=True)
class ConditionCode:
    """Code around the call of a pipeline."""

    imports: list[str]
    lines: list[str]
    """Before the call."""
    arguments: list[str]
    """Of the call."""


@cache
def _pipelines() -> dict[str, Any]:
    """Return the parts of such code by the class of the pipeline."""
    path = Path(__file__).with_name("condition_code.json")
    pipelines: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return pipelines


def condition_code(
    run: Run, pipelines: Sequence[str], shape: Sequence[int] | None
) -> ConditionCode | None:
    """Return code that gives a pipeline all that the run learnt.

    Args:
        run: the run.
        pipelines: classes of the pipelines that its code loads.
        shape: (frames, height, width) of a sample, or None if it is not known.

    Returns:
        None if one of them is not known, or the run learnt nothing that needs more than
        an argument of the pipeline.
    """
    known_names = set(pipelines) & _pipelines().keys()
    if shape is None or len(known_names) != 1:
        return None
    parts = _pipelines()[known_names.pop()]
    latent_frames: dict[str, int | None] = {}
    for condition in learnt(run):
        if condition["in_diffusers"] is True:
            count = number(condition["latent_frames"])
            if count is not None:
                count = int(min(max(count, 1), MOST_FRAMES))
            latent_frames[str(condition["type"])] = count
    is_argument = parts["has_image_argument"] and latent_frames.keys() == {
        "first_frame"
    }
    if not latent_frames or is_argument:
        return None

    stride = parts["temporal_stride"]
    frames, height, width = shape
    of_reference = latent_frames.get("reference")
    numbers = {
        "frames": frames,
        "height": height,
        "width": width,
        "beginning": ((latent_frames.get("prefix") or 1) - 1) * stride + 1,
        "end": (latent_frames.get("suffix") or 1) * stride
        + parts["further_end_frames"],
        # A reference has as many frames as the clip unless the run says another number.
        "reference": (of_reference - 1) * stride + 1 if of_reference else frames,
    }
    lines = list(parts["begin"])
    types = [name for name in ORDER if name in latent_frames and name in parts]
    for name in types:
        lines += parts[name]
    arguments = dict(parts["arguments"])
    if "reference" in latent_frames:
        arguments |= parts["reference_arguments"]
    return ConditionCode(
        imports=parts["imports"],
        lines=[line.format(**numbers) for line in lines],
        arguments=[f"{name}={value}" for name, value in arguments.items()],
    )
