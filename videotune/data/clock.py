"""Continue the times of a stream whose clock restarts within the file.

MPEG recordings and DVD parts that were joined byte by byte have such a clock: two of
their frames claim the same time. Here the time of each part continues where the part
before it ended.
"""

from typing import Any

FALL_SECONDS = 0.1
"""At a keyframe, a clock that falls back by more has restarted; the ffmpeg program uses the
same bound.
"""

LONG_FALL_SECONDS = 1.0
"""At any other frame it must fall back by more than this: Matroska has no decoding times, and those
that FFmpeg makes up for it after a joint fall by a few frames within each group.
"""

JUMP_SECONDS = 10.0
"""A clock that jumps ahead by more has restarted too, in formats whose clock is that of a
broadcast.
"""

BROADCAST_FORMATS = ("mpeg", "mpegts")


class StreamClock:
    """Continues the times of one stream's packets over all restarts of its clock.

    Feed it every packet of the stream from the beginning of the file, in order: the
    media info and the frames then have the same times.

    Args:
        container: the open container.
        stream: the stream of it whose packets are read.
    """

    def __init__(self, container: Any, stream: Any) -> None:
        self.restarts = 0
        """How often the clock has restarted."""

        self.dropped = 0
        """Packets that nothing can decode, since they refer to the part before."""

        formats = container.format.name.split(",")
        self._has_clock = "avi" not in formats
        """False for AVI, which only numbers its packets."""

        self._may_jump = any(name in BROADCAST_FORMATS for name in formats)
        """Whether a jump ahead by more than JUMP_SECONDS is a restart."""

        self._tick_seconds = float(stream.time_base)
        self._offset = 0
        self._last_time: int | None = None
        self._duration = 0
        self._end = 0
        """Tick at which the last frame ends, on the continued clock."""

        self._awaits_keyframe = False
        self._part_begins: int | None = None
        """Presentation time of the keyframe with which the current part begins."""

    def admit(self, packet: Any) -> bool:
        """Set a packet's times to those of the continued clock.

        Returns:
            Whether to decode the packet: not before the first keyframe of a part, and
            not if it is presented before that keyframe.
        """
        time = packet.pts if packet.dts is None else packet.dts
        if not self._has_clock or time is None:
            return True

        if self._last_time is None:
            # The first part begins where its clock does, which may be below 0.
            self._end = time
        elif self._has_restarted(packet, time, self._last_time):
            self.restarts += 1
            self._awaits_keyframe = True
        self._note_duration(packet, time)

        presented = time if packet.pts is None else packet.pts
        if self._awaits_keyframe:
            if not packet.is_keyframe:
                self.dropped += 1
                return False
            self._awaits_keyframe = False
            self._offset = self._end - presented
            self._part_begins = presented
        elif self._part_begins is not None and presented < self._part_begins:
            self.dropped += 1
            return False

        if packet.pts is not None:
            packet.pts += self._offset
        if packet.dts is not None:
            packet.dts += self._offset
        self._end = max(self._end, presented + self._offset + self._duration)
        return True

    def _has_restarted(self, packet: Any, time: int, last_time: int) -> bool:
        """Return whether the clock has fallen back, or jumped ahead, since the packet
        before, which had ``last_time``.
        """
        fall_seconds = (last_time - time) * self._tick_seconds
        shortest_fall = FALL_SECONDS if packet.is_keyframe else LONG_FALL_SECONDS
        if fall_seconds > shortest_fall:
            return True
        silence_seconds = -fall_seconds - self._duration * self._tick_seconds
        return self._may_jump and silence_seconds > JUMP_SECONDS

    def _note_duration(self, packet: Any, time: int) -> None:
        """Remember how long a frame lasts: as declared, or as the last step was."""
        if packet.duration:
            self._duration = packet.duration
        elif self._last_time is not None and time > self._last_time:
            step = time - self._last_time
            if step * self._tick_seconds <= JUMP_SECONDS:
                self._duration = step
        self._last_time = time
