"""The timeline of a video stream: which of its frames can be shown, and when."""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

from videotune.data.file_checks import ClipProblem

SHORT_SHARE = 0.9
"""A file is cut short if all of its streams end before this share of the duration that
its header declares.
"""


@dataclass(frozen=True)
class FramePacket:
    """One frame as the demuxer gives it; times in ticks."""

    pts: int | None
    dts: int | None
    duration: int
    is_keyframe: bool
    is_displayed: bool


@dataclass
class Demuxed:
    """Everything that one pass over the packets of a file finds."""

    packets: list[FramePacket] = field(default_factory=list)
    """Packets of the video stream in decoding order."""

    first_frame: Any = None

    has_started: bool = False
    """Whether decoding can begin: a keyframe, or the end, has been reached."""

    last_tick: int = 0
    """Decoding time of the last packet, also of one that repeats a picture (AVI)."""

    ends: dict[int, float] = field(default_factory=dict)
    """Second at which each stream ends, by its index, in the container's time."""

    last_byte: int = 0
    """Position in the file at which the last packet of any stream ends."""

    is_cut_short: bool = False
    """Whether the last packet is incomplete."""

    restarts: int = 0
    """How often the stream's clock has restarted."""

    dropped: int = 0
    """Frames after a restart that refer to the part before."""


@dataclass(frozen=True)
class Timeline:
    """The decodable frames of a stream in presentation order."""

    ticks: list[int]
    """Presentation time of each frame, ascending."""

    time_base: Fraction
    """Length of a tick in seconds."""

    keyframes: tuple[int, ...]
    """Indices of frames at which decoding can start."""

    undecodable_frames: int
    """Displayed frames that nothing can decode, since they depend on a missing
    keyframe.
    """

    last_duration: int
    """Duration of the last frame in ticks; 0 if not declared."""

    @cached_property
    def timestamps(self) -> list[float]:
        """Presentation time of each frame in seconds, counted from the first one."""
        numerator, denominator = self.time_base.as_integer_ratio()
        first_tick = self.ticks[0]
        return [(tick - first_tick) * numerator / denominator for tick in self.ticks]


def build_timeline(demuxed: Demuxed, stream: Any, *, is_counted: bool) -> Timeline:
    """Sort frames by presentation time, without those before the first keyframe.

    Args:
        demuxed: all packets of the stream.
        stream: the video stream.
        is_counted: whether the dts number the frames, since the pts are missing or
            wrong.
    """
    packets = demuxed.packets
    keyframe_indices = (
        index for index, packet in enumerate(packets) if packet.is_keyframe
    )
    decodable = packets[next(keyframe_indices, 0) :]
    time_base: Fraction = stream.time_base

    if is_counted and any(packet.dts is None for packet in decodable):
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise ClipProblem(
                "unreadable", "it has neither timestamps nor a frame rate"
            )
        # Only their order is left: number them at the declared rate.
        decodable = [
            replace(packet, dts=index, duration=1)
            for index, packet in enumerate(decodable)
        ]
        time_base = 1 / rate

    # AVI numbers its packets in decoding order, whatever their pts are. Sorting the dts
    # below gives the k-th displayed frame the k-th number.
    timed: list[tuple[FramePacket, int]] = []
    for packet in decodable:
        tick = packet.dts if is_counted else packet.pts
        if tick is not None:
            timed.append((packet, tick))

    # A frame presented before the first keyframe refers to frames that are not in the
    # file.
    usable = [(packet, tick) for packet, tick in timed if packet.is_displayed]
    if timed and timed[0][0].is_keyframe:
        first_keyframe_tick = timed[0][1]
        usable = [
            (packet, tick) for packet, tick in usable if tick >= first_keyframe_tick
        ]

    # If several frames have the same time, one of them is displayed.
    ticks = sorted({tick for _, tick in usable})
    index_by_tick = {tick: index for index, tick in enumerate(ticks)}
    keyframes = {index_by_tick[tick] for packet, tick in usable if packet.is_keyframe}
    last_durations = [packet.duration for packet, tick in usable if tick == ticks[-1]]
    displayed_frames = sum(packet.is_displayed for packet in packets)
    return Timeline(
        ticks=ticks,
        time_base=time_base,
        keyframes=tuple(sorted(keyframes)),
        undecodable_frames=displayed_frames - len(usable) + demuxed.dropped,
        last_duration=max(last_durations, default=0),
    )


def last_frame_seconds(timeline: Timeline, stream: Any) -> float:
    """Return the duration of the last frame.

    If the timestamps are those of a constant rate, up to the container's rounding, the
    clip lasts exactly frames / rate: 60 frames at 24 fps are 2.5 s, not the 2.499 s of
    a Matroska file.
    """
    timestamps = timeline.timestamps
    tick_seconds = float(timeline.time_base)
    declared_seconds = timeline.last_duration * tick_seconds
    tolerance = 1.01 * tick_seconds
    for rate in (stream.guessed_rate, stream.average_rate):
        if not rate:
            continue
        is_constant = all(
            abs(timestamp - index / float(rate)) <= tolerance
            for index, timestamp in enumerate(timestamps)
        )
        fits_declared = declared_seconds == 0 or math.isclose(
            declared_seconds, 1 / rate, abs_tol=tolerance
        )
        seconds_left = float(len(timestamps) / rate) - timestamps[-1]
        # Coarse ticks fit a rate that is too high, whose end comes before the last frame.
        if is_constant and fits_declared and seconds_left >= 0:
            return seconds_left

    if declared_seconds > 0:
        return declared_seconds
    return median(following - time for time, following in pairwise(timestamps))


def check_complete(
    demuxed: Demuxed, *, stream: Any, container: Any, end: float
) -> None:
    """Check that the file has all frames that its header declares.

    Args:
        demuxed: all packets of the file.
        stream: the video stream.
        container: the open container.
        end: second at which the last frame ends, in the container's time.

    Raises:
        ClipProblem: "decode_error" if the file is truncated.
    """
    formats = container.format.name.split(",")
    present_frames = len(demuxed.packets) + demuxed.dropped
    # Entries of the index after the edit list. The header's count would include frames that
    # the edit list trims.
    declared_frames = len(stream.index_entries) if "mov" in formats else 0
    if demuxed.is_cut_short or declared_frames > present_frames:
        total = f" of {declared_frames}" if declared_frames > present_frames else ""
        raise ClipProblem(
            "decode_error",
            f"the file is cut short: it has {present_frames}{total} frames",
        )

    present_seconds = max([end, *demuxed.ends.values()])
    declared_seconds = present_seconds
    if "avi" in formats:
        present_seconds, declared_seconds = _avi_seconds(demuxed, stream)
    elif {"matroska", "flv"} & set(formats) and container.duration:
        # The duration is that of the longest stream.
        header_seconds = container.duration / 1e6
        if present_seconds < SHORT_SHARE * header_seconds:
            declared_seconds = header_seconds

    if declared_seconds > present_seconds:
        raise ClipProblem(
            "decode_error",
            f"the file is cut short: it has {present_seconds:.2f} of "
            f"{declared_seconds:.2f} s",
        )


def _avi_seconds(demuxed: Demuxed, stream: Any) -> tuple[float, float]:
    """Return how many seconds an AVI has, and how many its header declares.

    The header counts ticks, of which a picture may last many, and includes the empty
    packets that repeat a picture. The two are equal if they differ by less than half of
    a picture.
    """
    ticks = [packet.dts for packet in demuxed.packets if packet.dts is not None]
    steps = [following - tick for tick, following in pairwise(ticks)]
    ticks_per_frame = max(1, median(steps or [1]))
    present_ticks = demuxed.last_tick + ticks_per_frame
    missing_ticks = stream.frames - present_ticks
    declared_ticks = present_ticks
    if missing_ticks > ticks_per_frame / 2:
        declared_ticks = stream.frames
    tick_seconds = float(stream.time_base)
    return present_ticks * tick_seconds, declared_ticks * tick_seconds
