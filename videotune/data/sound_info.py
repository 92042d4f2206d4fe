"""The sound track of a clip: which one it is, and what its first packets tell of it."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Interval

from videotune.files import REVALIDATED, Number
from videotune.lazy import av

LOWEST_RATE = 2_000
HIGHEST_RATE = 768_000
"""Samples a second of a usable track. Damaged headers declare others."""

MAX_CHANNELS = 64
"""Most channels that FFmpeg mixes down."""

FIRST_PACKETS = 64
"""Packets without a frame, after which a track counts as one that cannot be decoded.

The first packets of AAC and Opus hold only what decoders need to begin.
"""


@dataclass(frozen=True)
class SoundInfo:
    """The sound track of a clip. It can be decoded, and has times."""

    __pydantic_config__ = REVALIDATED

    codec: str

    sample_rate: Annotated[int, Interval(ge=LOWEST_RATE, le=HIGHEST_RATE)]
    """Samples a second, as they are decoded."""

    channels: Annotated[int, Interval(ge=1, le=MAX_CHANNELS)]

    start: Annotated[float, Interval(gt=-math.inf, lt=math.inf)]
    """Second of the clip at which the track begins; below 0 if it begins before the
    first frame.
    """

    seconds: Number
    """Duration of the track, up to the length of a packet."""

    @property
    def end(self) -> float:
        """Second of the clip at which the track ends."""
        return self.start + self.seconds

    def missing_seconds(self, clip_seconds: float) -> float:
        """Return for how long a clip has no sound, at its beginning and end together."""
        covered = min(self.end, clip_seconds) - max(self.start, 0.0)
        return clip_seconds - max(covered, 0.0)


def sound_stream(container: Any) -> Any:
    """Return the sound track that a player plays: the default one, else the first.

    None: there is none.
    """
    streams = list(container.streams.audio)
    default = int(av.stream.Disposition.default)
    for stream in streams:
        if int(stream.disposition) & default:
            return stream
    return streams[0] if streams else None


class SoundProbe:
    """Finds out what the sound track of an open container is, from the packets of it
    that are read anyway.

    Args:
        container: the open container.
    """

    def __init__(self, container: Any) -> None:
        self._stream = sound_stream(container)
        self._first_frame: Any = None
        self._packets = 0

    @property
    def index(self) -> int:
        """Index of the track's stream; -1 if there is none."""
        return -1 if self._stream is None else int(self._stream.index)

    def add(self, packet: Any) -> None:
        """Decode a packet of the track, until there is a frame."""
        has_decoder = self._stream.codec_context is not None
        if self._first_frame is not None or self._packets >= FIRST_PACKETS:
            return

        self._packets += 1
        # A damaged packet is no reason to give up the clip, or its sound.
        frames: list[Any] = []
        if has_decoder and packet.size:
            try:
                frames = packet.decode()
            except (av.FFmpegError, ValueError, ArithmeticError):
                frames = []
        if frames:
            self._first_frame = frames[0]

    def result(
        self, begin: float, end: float | None, *, has_times: bool
    ) -> tuple[SoundInfo | None, str]:
        """Return the track, or None with the reason why it cannot be used; the reason is ""
        if there is no track.

        Args:
            begin: second at which the first picture is shown, in the container's time.
            end: second at which the track ends, in the container's time.
            has_times: whether the pictures have times, of one clock.
        """
        if self._stream is None:
            return None, ""
        if not has_times:
            return None, "the times of its pictures are not those of its sound"

        frame = self._first_frame
        if frame is None:
            return None, "its sound cannot be decoded"
        time_base = frame.time_base or self._stream.time_base
        if frame.pts is None or not time_base or end is None:
            return None, "its sound has no times"

        rate = frame.sample_rate
        if not LOWEST_RATE <= rate <= HIGHEST_RATE:
            return None, f"its sound has {rate} samples a second"
        channels = frame.layout.nb_channels
        if not 1 <= channels <= MAX_CHANNELS:
            return None, f"its sound has {channels} channels"

        start = float(frame.pts * time_base) - begin
        sound = SoundInfo(
            codec=self._stream.codec_context.name,
            sample_rate=rate,
            channels=channels,
            start=start,
            seconds=max(0.0, end - begin - start),
        )
        return sound, ""
