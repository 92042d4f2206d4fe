"""What the benchmarks of conditions on the toy share: their runs, how far a shape is from
where it should be, and what a run costs the base model.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.commands.demo import train_or_resume
from videotune.commands.sample import open_sampler, render
from videotune.commands.sample_options import SampleOptions
from videotune.files import write_json
from videotune.job.overrides import Overrides
from videotune.toy.detection import detect, find_blob
from videotune.toy.shapes import KNOWN, Look, caption

Clip = NDArray[np.uint8]
"""(T, H, W, 3)."""

Path2d = NDArray[np.float64]
"""(T, 2): column and row of the centre in each frame."""

SIDE = 64
"""Pixels of a picture's side."""

AS_THE_TOY_IS_SAMPLED = ("sample.guidance=2", "sample.steps=20")


def train_toy_run(
    run: Path,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    sample_steps: int,
    content: Mapping[str, Any],
) -> None:
    """Train a run of the toy without previews and validation, or continue it.

    Args:
        run: the folder of the run; its config is written beside it.
        steps: of the run.
        batch: samples of a step.
        learning_rate: which falls to 0.
        sample_steps: of samples that are drawn from it.
        content: what else the config has.
    """
    usual = {
        "steps": steps,
        "warmup_steps": steps // 20,
        # What is given decides most where the rest is noise.
        "timestep_distribution": "UNIFORM",
        "learning_rate": learning_rate,
        "batch_size": batch,
        # Set here, so that no plan is made of what surely fits.
        "micro_batch_size": batch,
        "gradient_checkpointing": "OFF",
        "layer_offload_fraction": 0.0,
        "save_every": 0,
        "sample_after": 0,
        "validate_every": 0,
        "sample_metrics": {"budget": 0},
        "sample": {"steps": sample_steps, "guidance": 1.0},
    }
    config = run.with_suffix(".json")
    write_json(config, usual | dict(content))
    if not train_or_resume(Overrides(preset="toy", config=config), run):
        raise SystemExit("stopped; the same command continues")


def path_error(clip: Clip, path: Path2d) -> float:
    """Return how far the shape is from a path in pixels, as a mean over frames. A frame
    without a shape counts as the picture's side.
    """
    distances = []
    for frame, centre in zip(clip, path, strict=True):
        blob = find_blob(frame.astype(np.float32))
        error = float(SIDE)
        if blob is not None:
            error = float(np.linalg.norm(blob.centre - centre))
        distances.append(error)
    return statistics.fmean(distances)


def path_of(clip: Clip) -> Path2d:
    """Return the path that the shape of a drawn clip takes."""
    centres = []
    for frame in clip:
        blob = find_blob(frame.astype(np.float32))
        assert blob is not None, "a drawn clip shows its shape"
        centres.append(blob.centre)
    return np.stack(centres)


def share_drawn_right(clips: Sequence[Clip], looks: Sequence[Look]) -> float:
    """Return the share of clips that show their colour, shape and direction."""
    right = 0
    for clip, look in zip(clips, looks, strict=True):
        detected = detect(clip)
        right += (detected.colour, detected.shape, detected.direction) == look
    return round(right / len(clips), 4)


def measure_knowledge(run: Path, captions: int) -> dict[str, Any]:
    """Return the share of the base model's captions that are drawn right without a
    condition, before and after a run.

    Args:
        run: the folder of the run.
        captions: how many of the captions that the base model was taught are drawn.
    """
    looks = KNOWN[:captions]
    prompts = [caption(*look) for look in looks]
    seeds = [5000 + index for index in range(len(looks))]

    shares = {}
    for name, step in (("before", 0), ("after", None)):
        sampler = open_sampler(
            SampleOptions(("",), run=run, step=step, sets=AS_THE_TOY_IS_SAMPLED)
        )
        clips = render(sampler, prompts, seeds, title="")
        shares[name] = share_drawn_right(clips, looks)
    return {**shares, "captions": len(looks)}
