"""Read a clip's sound: float stereo, whose first sample is at an exact second of the clip.

A track is placed by its presentation times, on the clock on which the first picture is
at 0. What a track has no samples for is silence.
"""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.object_files import local_copy
from videotune.data.probe import OPEN_OPTIONS, packets_of
from videotune.data.sound_info import (
    HIGHEST_RATE,
    LOWEST_RATE,
    SoundInfo,
    sound_stream,
)
from videotune.lazy import av

SOUND_OPTIONS = {
    **OPEN_OPTIONS,
    "format_whitelist": f"{OPEN_OPTIONS['format_whitelist']},wav,mp3,flac,aac,aiff",
}
"""Containers of videos, and of sound alone."""

Waveform = NDArray[np.float32]
"""Samples (2, n), left and right, in [-1, 1]."""

SOUND_VERSION = 1
"""Increase it when the samples of any clip change, so that older latents are encoded
again.
"""

PREROLL_SECONDS = 0.5
"""Reading begins so long before a window, since the first frames after a seek depend on
frames before them (Opus: 80 ms; MP3 and HE-AAC: a few frames).
"""

FILTER_SECONDS = 0.05
"""Sound on both sides of a window that its resampling reads."""

JOINT_SECONDS = 0.001
"""A frame continues the one before if its time differs by less than this, or by less
than two ticks of the container's clock.

Matroska rounds each time to 1 ms; the samples themselves have no gap there.
"""

MOST_DAMAGED = 0.05
"""Share of the packets that may be damaged. They become silence, as in a player."""

FEW_DAMAGED = 5
"""So many packets may be damaged in any track."""

MAX_PERIOD = 1000
"""Source samples, at most, that are tried as the beginning of resampling (see
``_read_resampled``). The period of unusual rates is longer; the nearest of these is close
enough.
"""

OVERLAP_SECONDS = 10.0
"""A track may have this many seconds of samples more than its times have room for."""


def read_sound(info: MediaInfo, start: float, seconds: float, rate: int) -> Waveform:
    """Read a part of a clip's sound.

    Mono is on both sides; more than two channels are mixed down by FFmpeg.

    Args:
        info: media info of the clip, which has a sound track.
        start: second of the clip at which the first sample is, as
            ``MediaInfo.timestamps`` counts; exact to half a sample.
        seconds: duration.
        rate: samples a second of the result.

    Returns:
        float32 (2, round(seconds · rate)).

    Raises:
        ClipProblem: "decode_error", with the file's name.
    """
    sound = info.sound
    assert sound is not None, "the clip has no sound track"
    count = round(seconds * rate)
    try:
        if rate == sound.sample_rate:
            return _read_track(info, sound, round(start * rate), count)
        return _read_resampled(info, sound, start, rate, count)
    except ClipProblem as problem:
        name = Path(info.path).name
        raise ClipProblem(problem.reason, f"{name}: {problem.detail}") from problem


def read_beginning(path: Path, seconds: float, rate: int) -> Waveform:
    """Read the beginning of a file's sound, also of one without a video.

    Args:
        path: the file.
        seconds: duration; what the file has no sound for is silence.
        rate: samples a second of the result.

    Returns:
        float32 (2, round(seconds · rate)).

    Raises:
        ClipProblem: "no_sound" without a track, "decode_error" if it cannot be decoded.
    """
    count = round(seconds * rate)
    with local_copy(path) as local:
        return _read_beginning(local, seconds, rate, count)


def _read_beginning(path: Path, seconds: float, rate: int, count: int) -> Waveform:
    """Read the beginning of the sound of a file on this disk."""
    out = np.zeros((2, count), np.float32)
    converter = _StereoConverter()
    parts: list[Waveform] = []
    track_rate = rate
    try:
        # A relative name with a colon would be taken for a protocol.
        with av.open(
            os.path.abspath(path), options=SOUND_OPTIONS, metadata_errors="replace"
        ) as container:
            stream = sound_stream(container)
            if stream is None:
                raise ClipProblem("no_sound", "it has no sound track")
            missing_seconds = seconds + FILTER_SECONDS
            for frame in container.decode(stream):
                track_rate = frame.sample_rate
                if not LOWEST_RATE <= track_rate <= HIGHEST_RATE:
                    detail = f"its rate is {track_rate} a second"
                    raise ClipProblem("decode_error", detail)
                parts.append(converter.convert(frame))
                missing_seconds -= parts[-1].shape[1] / track_rate
                if missing_seconds <= 0:
                    break
    except (av.FFmpegError, ValueError) as error:
        raise ClipProblem("decode_error", f"its sound is damaged: {error}") from error

    if parts:
        samples = np.concatenate(parts, axis=1)
        if track_rate != rate:
            samples = resample(samples, track_rate, rate)
        out[:, : samples.shape[1]] = samples[:, :count]
    return out


def _read_resampled(
    info: MediaInfo, sound: SoundInfo, start: float, rate: int, count: int
) -> Waveform:
    """Read samples at another rate than the track's.

    Args:
        info: media info of the clip.
        sound: its track.
        start: second of the first sample.
        rate: samples a second of the result.
        count: samples.
    """
    # Resampling starts at a source sample whose time is also that of an output sample. The
    # pattern repeats after ``period`` samples; at most MAX_PERIOD are tried, and the nearest
    # is taken.
    period = sound.sample_rate // math.gcd(sound.sample_rate, rate)
    period = min(period, MAX_PERIOD)
    latest = math.floor((start - FILTER_SECONDS) * sound.sample_rate)
    first = latest
    smallest_distance = 1.0
    for candidate in range(latest - period + 1, latest + 1):
        steps = (start - candidate / sound.sample_rate) * rate
        distance = abs(steps - round(steps))
        if distance < smallest_distance - 1e-9:
            smallest_distance = distance
            first = candidate

    skipped = round((start - first / sound.sample_rate) * rate)
    needed_seconds = (skipped + count) / rate + FILTER_SECONDS
    samples = _read_track(
        info, sound, first, math.ceil(needed_seconds * sound.sample_rate)
    )
    return resample(samples, sound.sample_rate, rate)[:, skipped : skipped + count]


def _read_track(info: MediaInfo, sound: SoundInfo, first: int, count: int) -> Waveform:
    """Read samples at the track's own rate; 0 where there are none.

    Args:
        info: media info of the clip.
        sound: its track.
        first: number of the first sample; 0 is at the clip's first picture.
        count: samples.
    """
    out = np.zeros((2, count), np.float32)
    start = first / sound.sample_rate
    end = (first + count) / sound.sample_rate
    for position, samples in track_samples(info, start, end):
        begin = max(position, first)
        stop = min(position + samples.shape[1], first + count)
        if begin < stop:
            part = samples[:, begin - position : stop - position]
            out[:, begin - first : stop - first] = part
    return out


def track_samples(
    info: MediaInfo, start: float, end: float
) -> Iterator[tuple[int, Waveform]]:
    """Yield the samples of a clip's track in order, at the track's own rate.

    Args:
        info: media info of the clip, which has a sound track.
        start: second of the clip at which to begin; earlier samples may come first.
        end: second of the clip at which to end.

    Yields:
        The number of the first sample (0 is at the clip's first picture), and the
        samples. No two parts overlap; between them may be gaps.

    Raises:
        ClipProblem: "decode_error" if the track cannot be decoded.
    """
    assert info.sound is not None
    if start >= end:
        return

    # Only in MP4 and MOV are times after a seek as exact as before it.
    seeks_to = start - PREROLL_SECONDS
    may_seek = "mov" in info.container.split(",") and seeks_to > info.sound.start
    reader = _TrackReader(info, end)
    with closing(reader):
        parts = reader.read(None)
        if may_seek:
            sought_parts = reader.read(seeks_to)
            first_part = None
            with suppress(ClipProblem):
                first_part = next(sought_parts, None)
            # Where the seek led past the window, the file is read from its beginning.
            if first_part and first_part[0] <= start * info.sound.sample_rate:
                yield first_part
                parts = sought_parts
        yield from parts


class _TrackReader:
    """Decodes the sound track of a file. Close it.

    Args:
        info: media info of the clip.
        end: second of the clip at which reading ends.
    """

    def __init__(self, info: MediaInfo, end: float) -> None:
        assert info.sound is not None
        self._info = info
        self._rate = info.sound.sample_rate
        self._end = math.ceil(end * self._rate)
        self._container: Any = None
        self._local_copy = ExitStack()
        """Holds the file of a clip that is on an object store."""
        self._to_stereo = _StereoConverter()

        numerator, denominator = info.time_base
        self._begin = info.ticks[0] * numerator / denominator
        """Second of the first picture, in the container's time."""

    def close(self) -> None:
        """Close the file."""
        if self._container is not None:
            self._container.close()
        self._container = None
        self._local_copy.close()

    def read(self, second: float | None) -> Iterator[tuple[int, Waveform]]:
        """Yield parts as ``track_samples`` does, from a second of the clip on.

        Args:
            second: where to begin. None: at the beginning of the file.
        """
        self.close()
        local = self._local_copy.enter_context(local_copy(self._info.path))
        try:
            self._container = av.open(
                os.path.abspath(local),
                options=OPEN_OPTIONS,
                metadata_errors="replace",
            )
            stream = sound_stream(self._container)
            if stream is None or stream.codec_context is None:
                raise self._problem("is not there any more")
            if second is not None:
                tick = round((second + self._begin) / stream.time_base)
                self._container.seek(tick, stream=stream, backward=True)
            yield from self._place(self._frames(stream), stream)
        except (av.FFmpegError, OSError, ValueError, ArithmeticError) as error:
            detail = getattr(error, "strerror", None) or str(error)
            raise self._problem(f"cannot be read ({detail})") from error

    def _frames(self, stream: Any) -> Iterator[Any]:
        """Yield decoded frames; leave out damaged packets.

        Raises:
            ClipProblem: "decode_error" if too many are.
        """
        packets = 0
        damaged = 0
        for packet in packets_of(self._container, stream):
            packets += 1
            try:
                frames = packet.decode()
            except av.FFmpegError as error:
                damaged += 1
                if damaged > FEW_DAMAGED and damaged > MOST_DAMAGED * packets:
                    raise self._problem(
                        f"is damaged: {damaged} of {packets} packets"
                    ) from error
                continue
            yield from frames

    def _place(
        self, frames: Iterator[Any], stream: Any
    ) -> Iterator[tuple[int, Waveform]]:
        """Yield the samples of frames with their positions, until the end is reached."""
        timeline = _SoundTimeline(self._begin, self._rate, float(stream.time_base))
        most_samples = None
        decoded = 0
        for frame in frames:
            if frame.sample_rate != self._rate:
                raise self._problem(
                    f"changes from {self._rate} to {frame.sample_rate} samples a second"
                )

            span = timeline.place(frame)
            if span.position >= self._end:
                return
            if most_samples is None:
                slack = round(OVERLAP_SECONDS * self._rate)
                most_samples = self._end - span.position + slack
            decoded += frame.samples
            if decoded > most_samples:
                raise self._problem("has more samples than its times have room for")

            if span.overlap < frame.samples:
                samples = self._to_stereo.convert(frame)
                yield span.position, samples[:, span.overlap :]

    def _problem(self, fault: str) -> ClipProblem:
        return ClipProblem("decode_error", f"its sound {fault}")


class _FrameSpan(NamedTuple):
    """Where the samples of a frame are."""

    position: int
    """Number of its first sample that is used; 0 is at the clip's first picture."""
    overlap: int
    """Samples at its beginning that the frame before has too."""


class _SoundTimeline:
    """Finds at which samples of a clip's sound its decoded frames begin.

    A frame is placed by its time. Times are rounded, so a frame whose time is about the
    end of the frame before continues it without a gap or an overlap.

    Args:
        begin: second of the clip's first picture, in the container's time.
        rate: samples a second.
        tick_seconds: resolution of the container's times.
    """

    def __init__(self, begin: float, rate: int, tick_seconds: float) -> None:
        self._begin = begin
        self._rate = rate
        self._tick_seconds = tick_seconds
        self._tolerance = max(JOINT_SECONDS, 2 * tick_seconds) * rate
        self._next: int | None = None
        """Number of the sample after those that were placed."""

    def place(self, frame: Any) -> _FrameSpan:
        """Return where a frame's samples are. Frames never go back."""
        position = self._by_time(frame)
        following = self._next
        if following is not None and abs(position - following) <= self._tolerance:
            position = following

        overlap = 0
        if following is not None and position < following:
            overlap = min(following - position, frame.samples)
        self._next = max(position + frame.samples, following or 0)
        if following is None:
            self._next = position + frame.samples
        return _FrameSpan(position + overlap, overlap)

    def _by_time(self, frame: Any) -> int:
        """Return the sample that a frame begins with, by its time; a frame without one
        continues the one before.
        """
        if frame.pts is None:
            return self._next or 0
        tick_seconds = float(frame.time_base or self._tick_seconds)
        return round((frame.pts * tick_seconds - self._begin) * self._rate)


class _StereoConverter:
    """Makes float stereo of decoded frames, at their own rate."""

    def __init__(self) -> None:
        self._resampler: Any = None
        self._form: tuple[str, str, int] | None = None
        """Sample format, layout and rate of the frames that the resampler takes."""

    def convert(self, frame: Any) -> Waveform:
        """Return the samples of a frame, float32 (2, n)."""
        is_mixed = frame.layout.nb_channels > 2
        form = (frame.format.name, frame.layout.name, frame.sample_rate)
        if form != self._form:
            # FFmpeg lowers the channels that it adds up only if the sum must fit into
            # integers; float sums would exceed 1.
            self._resampler = av.AudioResampler(
                format="s32p" if is_mixed else "fltp",
                layout="stereo" if is_mixed else frame.layout,
                rate=frame.sample_rate,
            )
            self._form = form

        # Times are no business of the resampler, which would fill gaps in them.
        frame.pts = None
        arrays = [part.to_ndarray() for part in self._resampler.resample(frame)]
        samples = np.concatenate(arrays, axis=1)
        if is_mixed:
            samples = samples / np.float32(2**31)
        if len(samples) == 1:
            samples = np.repeat(samples, 2, axis=0)
        return np.nan_to_num(
            samples.astype(np.float32, copy=False), nan=0.0, posinf=1.0, neginf=-1.0
        )


def resample(samples: Waveform, from_rate: int, to_rate: int) -> Waveform:
    """Resample float stereo (2, n); the first sample keeps its time."""
    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(samples), format="fltp", layout="stereo"
    )
    frame.sample_rate = from_rate
    resampler = av.AudioResampler(format="fltp", layout="stereo", rate=to_rate)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([part.to_ndarray() for part in parts], axis=1)
