"""What tests of data share: a model's rules, configs of datasets, and the media info of
clips that are not on the disk.
"""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.support.clips import RATES, write_clip
from videotune.config.schema import Config
from videotune.data.dataset import scan
from videotune.data.file_checks import ClipProblem
from videotune.data.library import Library
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.latent_cache.batch_source import BatchSource
from videotune.model_spec import VideoRules

RULES = VideoRules(4, 1, 16, 16.0, 8, 4)


def filmed(path: Path, frames: np.ndarray, fps: float = 24, **how: Any) -> MediaInfo:
    """The media info of a clip that is written now."""
    return probe(write_clip(path, frames, fps, **how))


def problem_of(path: Path) -> ClipProblem:
    """Why a file is no clip."""
    with pytest.raises(ClipProblem) as caught:
        probe(path)
    return caught.value


def silence() -> av.AudioFrame:
    """A frame of sound."""
    frame = av.AudioFrame.from_ndarray(
        np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
    )
    frame.sample_rate = 44100
    return frame


def info_of(frames: int, fps: float, keyframes: tuple[int, ...] = (0,)) -> MediaInfo:
    """A clip at a constant rate."""
    rate = RATES.get(fps, Fraction(fps))
    last = float(frames / rate) - (frames - 1) * rate.denominator / rate.numerator
    base = (rate.denominator, rate.numerator)
    return MediaInfo(
        "a.mp4",
        "h264",
        96,
        64,
        tuple(range(frames)),
        last,
        float(rate),
        keyframes,
        "mov",
        base,
    )


def config_of(
    *datasets: Path | Mapping[str, Any],
    video: Mapping[str, Any] | None = None,
    **values: Any,
) -> Config:
    """A config of these datasets (a folder, or a section of the config)."""
    sections = [
        dict(one) if isinstance(one, Mapping) else {"path": str(one)}
        for one in datasets
    ]
    values = {"resolution": 64, "missing_caption": "empty", **values}
    return Config.model_validate(
        {"datasets": sections, "video_config": dict(video or {}), **values}
    )


def scanned(
    *datasets: Path | Mapping[str, Any],
    rules: VideoRules = RULES,
    index: Path | None = None,
    **values: Any,
) -> Library:
    """The library of these datasets; ``values`` of the config."""
    return scan(config_of(*datasets, **values), rules, index)


def with_config(
    source: BatchSource, video: Mapping[str, Any] | None = None, **keys: Any
) -> BatchSource:
    """The source under other keys of the config; ``video``: those of video_config."""
    section = source.config.video_config.model_copy(update=dict(video or {}))
    return replace(
        source,
        config=source.config.model_copy(update={**keys, "video_config": section}),
    )
