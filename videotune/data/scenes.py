"""Where a clip's scenes begin, exactly: every frame decoded, cuts by PySceneDetect's adaptive detector, flashes left out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from fractions import Fraction
from typing import Any

from videotune.errors import VideotuneError

from .decode import Reader
from .facts import Facts
from .look import CUT_LIKENESS, Boundaries, shrunk

WIDTH = 256
"""Columns to which frames are shrunk, as PySceneDetect itself does."""

WINDOW = 2
"""Frames on either side that a change is compared with: PySceneDetect's own default."""

THRESHOLD = 3.0
"""How many times as much as the frames around it a cut changes the picture: PySceneDetect's own default."""


def scenes(facts: Facts, until: float, threshold: float | None = None, threads: int = 1) -> tuple[float, ...]:
    """Times of cuts within the first ``until`` seconds: each is the timestamp of the first frame after a cut.

    ``threshold`` (None: 3) is how many times as much as its neighbours a frame must change; higher finds fewer cuts. What
    comes back within a quarter of a second (a flash, a flicker) is no cut, whatever the detector says. ``threads`` decode,
    0 as many as there are CPUs. ClipProblem (decode_error) where a frame cannot be had; VideotuneError where PySceneDetect
    is not installed.
    """
    if threshold is not None and threshold <= 1:
        raise VideotuneError(f"The threshold for cuts is {threshold:g}; it must be greater than 1 (3 is usual).")
    detectors = _detectors(THRESHOLD if threshold is None else threshold)
    if facts.still:
        return ()
    count = max(1, bisect_left(facts.timestamps, until - 1e-6))
    return tuple(facts.timestamps[index] for index in _detect(facts, count, detectors, threads))


def _detectors(threshold: float) -> list[Any]:
    """One that sees colours and brightness, and one for brightness alone: in nearly grey films hues are noise."""
    try:
        from scenedetect.detectors import AdaptiveDetector
    except ImportError as error:
        raise VideotuneError(
            f'Finding scenes needs PySceneDetect ({error}). Install it: pip install "videotune[scenes]"'
        ) from error
    return [
        AdaptiveDetector(threshold, min_scene_len=0, window_width=WINDOW, luma_only=luma_only)
        for luma_only in (False, True)
    ]


def _detect(facts: Facts, count: int, detectors: Sequence[Any], threads: int) -> list[int]:
    """Indices of the first frames after cuts, of the first ``count`` frames."""
    from av.video.reformatter import VideoReformatter
    from scenedetect import FrameTimecode

    rate = Fraction(24)  # detectors count frames; times are ours
    width = min(WIDTH, max(16, facts.width))
    height = max(16, round(width * facts.height / facts.width))
    shrink, small = VideoReformatter(), VideoReformatter()
    boundaries = Boundaries(facts.timestamps)
    found: set[int] = set()
    number = 0

    def feed(picture: Any) -> None:
        nonlocal number
        for detector in detectors:
            cuts = detector.process_frame(FrameTimecode(number, rate), picture)
            found.update(cut.frame_num - WINDOW for cut in cuts)
        number += 1

    with closing(Reader(facts, threads)) as reader:
        for index, frame in reader.frames(range(count)):
            # the shape is that of the upright clip: a turned one is only squeezed, which cuts survive
            picture = shrink.reformat(frame, width, height, "bgr24", threads=1).to_ndarray()
            # the detectors need neighbours on both sides: the first picture and the last are held
            for _ in range(1 + WINDOW * (index == 0)):
                feed(picture)
            boundaries.add(index, shrunk(frame, small))
        for _ in range(WINDOW):
            feed(picture)
    return [index for index in sorted(found) if 0 < index < count and boundaries.alike[index] <= CUT_LIKENESS]
