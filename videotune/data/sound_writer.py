"""The sound track of a video file that is being written: AAC, in WebM Opus.

The same samples give the same bytes.
"""

from fractions import Fraction
from typing import Any

import numpy as np

from videotune.data.sound import Waveform
from videotune.lazy import av

SOUND_BIT_RATE = 192_000
"""Bits a second of a sound track: no difference can be heard."""

FALLBACK_RATE = 48000
"""Samples a second of a sound track whose encoder does not take the rate of the sound."""


def sound_codec(kind: str) -> str:
    """Return the encoder of sound in a container, such as "mp4" or "webm"."""
    return "libopus" if kind == "webm" else "aac"


def encodable_rate(kind: str, rate: int) -> int:
    """Return a rate that the encoder takes: ``rate``, or else FALLBACK_RATE."""
    rates = av.Codec(sound_codec(kind), "w").audio_rates or ()
    return rate if rate in rates else FALLBACK_RATE


class SoundTrack:
    """A track to which samples are written in order; the first is at second 0.

    Make it before the first picture is written: a file's streams come first.

    Args:
        container: the open container.
        kind: its format.
        rate: samples a second, which the encoder takes.
    """

    def __init__(self, container: Any, kind: str, rate: int) -> None:
        self._container = container
        self._rate = rate
        self.written = 0
        """Samples that were written."""

        self._stream: Any = container.add_stream(
            sound_codec(kind), rate=rate, layout="stereo"
        )
        self._stream.bit_rate = SOUND_BIT_RATE
        # Else the encoder writes its version into the sound.
        self._stream.codec_context.flags |= int(av.codec.context.Flags.bitexact)

    def write(self, samples: Waveform) -> None:
        """Write the next samples (2, n); those beyond full scale are clipped."""
        if not samples.shape[1]:
            return
        levels = np.nan_to_num(np.clip(samples, -1.0, 1.0))
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(levels, np.float32), format="fltp", layout="stereo"
        )
        frame.sample_rate = self._rate
        frame.time_base = Fraction(1, self._rate)
        frame.pts = self.written
        self._container.mux(self._stream.encode(frame))
        self.written += samples.shape[1]

    def finish(self) -> None:
        """Write what the encoder holds back."""
        self._container.mux(self._stream.encode())
