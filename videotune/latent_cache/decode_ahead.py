"""Decode the frames of samples in worker processes, ahead of the encoder."""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from videotune.data.companions import ALPHA
from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.media_index import SLOWEST_DECODER
from videotune.data.media_info import MediaInfo
from videotune.data.workers import DecoderCrash, Workers
from videotune.errors import VideotuneError
from videotune.types import FrameSample

DECODE_AHEAD_BYTES = 512 * 2**20
"""Bytes of the frames that may be decoded and wait for the encoder.

A single group may be larger.
"""

GROUP_BYTES = 96 * 2**20
"""Bytes of the frames that are decoded in one pass over a file.

A sample larger than that is a group of its own.
"""


def decode_arguments(group: Sequence[FrameSample], media: MediaInfo) -> dict[str, Any]:
    """Return the arguments of a worker's task "decode" for samples of one clip that are
    cropped alike.
    """
    first = group[0]
    times: list[float] = []
    for sample in group:
        times += sample.times
    return {
        "info": media,
        "times": tuple(times),
        "height": first.window.shape.height,
        "width": first.window.shape.width,
        "resize": first.window.resize,
        "crop_position": first.crop_position,
        "alpha": first.window.clip_id.endswith(ALPHA),
    }


@dataclass
class _PendingGroup:
    """Samples whose frames are being decoded in one pass."""

    samples: list[FrameSample]
    clip: MediaInfo
    future: Future[Any] | None
    """The worker's result. None: this process decodes them when they are needed."""


def decode_ahead(
    samples: Iterable[FrameSample],
    media: Mapping[str, MediaInfo],
    workers: Workers | None,
) -> Generator[tuple[FrameSample, np.ndarray, float], None, None]:
    """Yield each sample, in order, with its frames and the seconds waited for them.

    Workers decode ahead, within DECODE_AHEAD_BYTES. Samples of one clip are decoded
    together: clips of a few seconds mostly have one keyframe, so windows that are decoded
    one by one would each decode everything before them again.
    """
    pending: deque[_PendingGroup] = deque()
    max_pending = 4 * workers.count if workers else 1
    try:
        for group in _groups(samples):
            # Make room: finish the oldest groups first.
            while pending:
                has_slot = len(pending) < max_pending
                pending_bytes = sum(_frame_bytes(item.samples) for item in pending)
                has_memory = pending_bytes + _frame_bytes(group) <= DECODE_AHEAD_BYTES
                if has_slot and has_memory:
                    break
                yield from _finish(pending.popleft())

            clip = media[group[0].window.clip_id]
            future = _submit(group, clip, workers)
            pending.append(_PendingGroup(group, clip, future))

        while pending:
            yield from _finish(pending.popleft())
    finally:
        for unfinished in pending:
            if unfinished.future is not None:
                unfinished.future.cancel()


def _submit(
    group: Sequence[FrameSample], clip: MediaInfo, workers: Workers | None
) -> Future[Any] | None:
    """Start decoding a group in a worker, with a time limit that grows with the
    position in the clip.
    """
    if workers is None:
        return None
    last_second = max(max(sample.times) for sample in group)
    limit = workers.limit + SLOWEST_DECODER * last_second
    return workers.submit("decode", decode_arguments(group, clip), limit)


def _finish(group: _PendingGroup) -> Iterator[tuple[FrameSample, np.ndarray, float]]:
    """Wait for a group's frames and yield each sample with its frames. The seconds waited
    are yielded with the first sample, and 0 with the others.
    """
    begun = time.monotonic()
    frames = frames_of(group.samples, group.clip, group.future)
    group.future = None  # it would keep the frames
    waited = time.monotonic() - begun

    for sample in group.samples:
        count = len(sample.times)
        yield sample, frames[:count], waited
        frames = frames[count:]
        waited = 0.0


def _groups(samples: Iterable[FrameSample]) -> Iterator[list[FrameSample]]:
    """Join neighbouring samples of one clip that are cropped alike, up to GROUP_BYTES.

    A sample larger than that is a group of its own.
    """
    group: list[FrameSample] = []
    for sample in samples:
        if group:
            is_alike = _clip_size_and_crop(group[0]) == _clip_size_and_crop(sample)
            is_too_large = _frame_bytes([*group, sample]) > GROUP_BYTES
            if not is_alike or is_too_large:
                yield group
                group = []
        group.append(sample)
    if group:
        yield group


def _clip_size_and_crop(sample: FrameSample) -> tuple[Any, ...]:
    """Return what two samples must share to be decoded together."""
    window = sample.window
    return (
        window.clip_id,
        window.shape.height,
        window.shape.width,
        window.resize,
        sample.crop_position,
    )


def frames_of(
    group: Sequence[FrameSample], clip: MediaInfo, future: Future[Any] | None
) -> np.ndarray:
    """Return the frames of all samples of a group, one sample after the other, uint8
    (T,H,W,3).

    Args:
        group: samples of one clip.
        clip: facts of the clip.
        future: the worker's result; None decodes the frames here and now.

    Raises:
        VideotuneError: if the clip cannot be decoded; it names the clip.
    """
    try:
        if future is None:
            frames = decode(**decode_arguments(group, clip))
        else:
            frames = future.result()
    except ClipProblem as problem:
        if isinstance(problem, DecoderCrash):
            remedy = "Start again; if it fails again, take the clip out of the dataset."
        else:
            remedy = (
                "Its frames were counted but cannot be decoded, so the file is damaged. "
                "Repair it or take it out of the dataset."
            )
        raise VideotuneError(
            f"{clip.path}: {problem}\n{remedy} Everything encoded so far is kept."
        ) from problem

    first = 0
    for sample in group:
        last = first + len(sample.times)
        if sample.flipped:
            frames[first:last] = frames[first:last, :, ::-1].copy()
        first = last
    return frames


def _frame_bytes(group: Sequence[FrameSample]) -> int:
    shapes = [sample.window.shape for sample in group]
    return sum(3 * shape.frames * shape.height * shape.width for shape in shapes)
