"""Sound scan: one pass over a clip's sound for its loudness, silence, clipping and shape."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.data.media_info import MediaInfo
from videotune.data.sound import Waveform, track_samples
from videotune.files import REVALIDATED, Number, checked

SILENT_PEAK = 1e-3
"""Peak below which sound is silent: -60 dBFS. Dither and the noise of an open input
without a microphone are below.
"""

CLIPPED_LEVEL = 0.999
"""Level from which on a sample counts as clipped."""

BLOCKS_PER_SECOND = 100
"""Blocks whose peaks decide what is silent."""

MAX_BLOCKS = 1 << 20
"""Most blocks of a clip: of one longer than three hours they are longer."""

ENVELOPE_POINTS = 200
"""Peaks of an envelope, at most."""

LOWEST_DECIBELS = -120.0
"""Loudness of digital silence, which has none."""


@dataclass(frozen=True)
class SoundScan:
    """Result of scanning the sound of a clip's first seconds."""

    __pydantic_config__ = REVALIDATED

    until: Number
    """Seconds of the clip that were scanned."""

    rms: Number = 0.0
    """Root of the mean square of the track's samples; a sine of full scale has 0.707."""

    peak: Number = 0.0
    """Largest sample; 1 is full scale."""

    clipped: Number = 0.0
    """Share of the track's samples at full scale."""

    silent: Number = 1.0
    """Share of the clip's time without sound, or with sound below ``SILENT_PEAK``."""

    envelope: tuple[Number, ...] = ()
    """Peaks of equal parts of the clip, in order."""

    problem: str = ""
    """Why the track cannot be decoded; nothing else is then known."""

    @property
    def is_silent(self) -> bool:
        """Whether nothing can be heard."""
        return self.peak < SILENT_PEAK

    @property
    def loudness(self) -> float:
        """Loudness in dBFS: 0 is a square wave of full scale."""
        if not self.rms:
            return LOWEST_DECIBELS
        return max(LOWEST_DECIBELS, 20 * math.log10(self.rms))

    def to_json(self) -> dict[str, Any]:
        """Return about 1.5 KB of JSON from which ``from_json`` restores an equal scan."""
        return vars(self) | {"envelope": list(self.envelope)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "SoundScan":
        """Restore what ``to_json`` wrote, with all values checked.

        Raises:
            KeyError, TypeError, ValueError: if the value is anything else.
        """
        fields = value | {"envelope": tuple(value["envelope"])}
        scan: SoundScan = checked(SoundScan, SoundScan(**fields))
        if len(scan.envelope) > ENVELOPE_POINTS:
            raise ValueError("the envelope has too many points")
        return scan


def scan_sound(info: MediaInfo, until: float) -> SoundScan:
    """Scan the sound of a clip's first seconds.

    Args:
        info: media info of the clip, which has a sound track.
        until: seconds to scan.

    Raises:
        ClipProblem: "decode_error" if the sound cannot be decoded.
    """
    assert info.sound is not None
    seconds = min(until, info.seconds)
    last = round(seconds * info.sound.sample_rate)
    statistics = _SoundStatistics(info.sound.sample_rate, last)
    for position, samples in _joined(info, seconds):
        first_used = max(0, -position)
        part = samples[:, first_used : max(0, last - position)]
        if part.shape[1]:
            statistics.add(position + first_used, part)

    count = max(1, statistics.count)
    silent_blocks = statistics.block_peaks < SILENT_PEAK
    return SoundScan(
        until=until,
        rms=round(math.sqrt(statistics.square_sum / count), 6),
        peak=round(statistics.peak, 6),
        clipped=round(statistics.clipped / count, 6),
        silent=round(float(silent_blocks.mean()), 4),
        envelope=_envelope(statistics.block_peaks),
    )


def _joined(info: MediaInfo, seconds: float) -> Iterator[tuple[int, Waveform]]:
    """Yield the samples of a track in parts of about a second: frames are short, and
    each step over one takes time.
    """
    assert info.sound is not None
    first = 0
    following = 0
    pending: list[Waveform] = []
    for position, samples in track_samples(info, 0.0, seconds):
        is_gap = position != following
        if pending and (is_gap or following - first >= info.sound.sample_rate):
            yield first, np.concatenate(pending, axis=1)
            pending = []
        if not pending:
            first = position
        pending.append(samples)
        following = position + samples.shape[1]
    if pending:
        yield first, np.concatenate(pending, axis=1)


class _SoundStatistics:
    """Statistics over the samples of a clip.

    Args:
        rate: samples a second.
        last: samples of the clip.
    """

    def __init__(self, rate: int, last: int) -> None:
        self.count = 0
        """Numbers that were added, of both sides."""

        self.square_sum = 0.0
        self.peak = 0.0
        self.clipped = 0

        shortest_block = max(1, rate // BLOCKS_PER_SECOND)
        self._block_length = max(shortest_block, math.ceil(last / MAX_BLOCKS))
        blocks = max(1, math.ceil(last / self._block_length))
        self.block_peaks = np.zeros(blocks, np.float32)
        """Peak of each block of the clip; 0 where it has no sound."""

    def add(self, position: int, samples: Waveform) -> None:
        """Add samples (2, n), of which the first has this number in the clip."""
        levels = np.abs(samples)
        self.count += levels.size
        self.square_sum += float(np.square(levels, dtype=np.float64).sum())
        self.peak = max(self.peak, float(levels.max()))
        self.clipped += int((levels >= CLIPPED_LEVEL).sum())

        # Whole blocks: silence is added on both sides.
        before = position % self._block_length
        after = -(before + levels.shape[1]) % self._block_length
        padded = np.pad(levels.max(axis=0), (before, after))
        peaks = padded.reshape(-1, self._block_length).max(axis=1)
        first_block = position // self._block_length
        current = self.block_peaks[first_block : first_block + len(peaks)]
        np.maximum(current, peaks[: len(current)], out=current)


def _envelope(block_peaks: NDArray[np.float32]) -> tuple[float, ...]:
    """Return the largest peak of each of at most ENVELOPE_POINTS equal parts."""
    points = min(ENVELOPE_POINTS, len(block_peaks))
    starts = np.arange(points) * len(block_peaks) // points
    peaks = np.maximum.reduceat(block_peaks, starts)
    return tuple(round(float(peak), 3) for peak in peaks)
