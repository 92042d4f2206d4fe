"""What the keys about clips, frames and captions do to the frames that are encoded and to the batches that are trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import noise, numbered, read_numbers, write_dataset
from effects_kit import Lab, in_cache, job_of, pixels, source_of, text_of, trainer_of

from videotune.cache.batches import prepare
from videotune.errors import DoesNotFit, VideotuneError
from videotune.monitor.journal import read_journal
from videotune.run.train import measure


@pytest.fixture
def counted(lab: Lab, request: pytest.FixtureRequest) -> Any:
    """A function: the numbers painted into the frames of each window of one clip, given its frames, its fps and knobs."""

    def read(frames: int, fps: float, **knobs: Any) -> list[list[int]]:
        folder = write_dataset(lab.tmp / f"{frames}@{fps}", {"clip.mp4": numbered(frames, 48, 48)}, {}, fps)
        settings = {"resolution": "48x48", "video_config.frames": None}
        settings |= {f"video_config.{name}": value for name, value in knobs.items()}
        return [read_numbers(clip) for clip in pixels(job_of(lab, settings, folder)).values()]

    return read


def test_the_clips_are_those_of_the_folders(lab: Lab) -> None:
    """Red clips in one folder, blue ones in another: the frames that are encoded have the folder's colour."""
    for name, channel in (("red", 0), ("blue", 2)):
        frames = np.zeros((9, 32, 32, 3), np.uint8)
        frames[..., channel] = 200
        write_dataset(lab.tmp / name, {f"{name}.mp4": frames}, {}, fps=16)
    rows = {name: {"path": str(lab.tmp / name)} for name in ("red", "blue")}

    def channels(*names: str) -> list[int]:
        seen = pixels(job_of(lab, {"datasets": [rows[name] for name in names]}))
        return [int(frames.mean((0, 1, 2)).argmax()) for frames in seen.values()]

    assert channels("red") == [0]
    assert channels("blue") == [2]
    assert channels("red", "blue") == [0, 2]


test_the_clips_are_those_of_the_folders = pytest.mark.effect("datasets.path")(test_the_clips_are_those_of_the_folders)
