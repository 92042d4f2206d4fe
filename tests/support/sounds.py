"""Videos with sound of which every sample is known."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.support.clips import numbered, write_clip, write_image
from videotune.data.library import Library

CHANNEL_LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}


def tone(rate: int, seconds: float, hertz: float, start: float = 0.0) -> np.ndarray:
    """Return a sine of amplitude 0.5, float64 (n,), whose phase is 0 at second 0."""
    times = start + np.arange(round(seconds * rate)) / rate
    return 0.5 * np.sin(2 * np.pi * hertz * times)


def clicks(rate: int, seconds: float, at: list[float]) -> np.ndarray:
    """Return silence with bursts of 1 ms at these seconds, float64 (n,)."""
    out = np.zeros(round(seconds * rate))
    for second in at:
        first = round(second * rate)
        out[first : first + max(2, rate // 1000)] = 0.8
    return out


def write_sounding(
    path: Path,
    sound: np.ndarray,
    rate: int,
    *,
    codec: str,
    channels: int = 1,
    frames: int = 48,
    video_codec: str = "libx264",
    sound_at: float = 0.0,
    video_at: float = 0.0,
    gap: tuple[float, float] | None = None,
    pictures: np.ndarray | None = None,
) -> Path:
    """Write numbered frames at 24 fps with sound, in the order of their times.

    Args:
        path: the file; its suffix chooses the container.
        sound: float64 (n,) for all channels, or (channels, n).
        rate: samples a second.
        codec: encoder of the sound.
        channels: how many.
        frames: frames of the video; the sound may be longer or shorter.
        video_codec: encoder of the video.
        sound_at: time of the first sample.
        video_at: time of the first frame.
        gap: second of the sound, and seconds by which all from there on is later.
        pictures: uint8 (frames,H,W,3). None: numbered ones.
    """
    samples = np.broadcast_to(sound, (channels, sound.shape[-1]))
    with av.open(str(path), "w") as container:
        video: Any = container.add_stream(video_codec, rate=24)
        if pictures is None:
            pictures = numbered(frames)
        video.height, video.width = pictures.shape[1:3]
        video.pix_fmt = "yuv420p"
        track: Any = container.add_stream(
            codec, rate=rate, layout=CHANNEL_LAYOUTS[channels]
        )

        def write_picture(index: int) -> None:
            picture = av.VideoFrame.from_ndarray(pictures[index], format="rgb24")
            picture.time_base = Fraction(1, 24000)
            picture.pts = index * 1000 + round(video_at * 24000)
            container.mux(video.encode(picture))

        written = 0
        for begin in range(0, samples.shape[1], 960):
            chunk = samples[:, begin : begin + 960]
            delay = sound_at
            if gap and begin >= gap[0] * rate:
                delay += gap[1]
            while written < frames and video_at + written / 24 <= delay + begin / rate:
                write_picture(written)
                written += 1
            container.mux(
                track.encode(_sound_frame(chunk, rate, channels, begin, delay))
            )
        container.mux(track.encode())
        for index in range(written, frames):
            write_picture(index)
        container.mux(video.encode())
    return path


def _sound_frame(
    chunk: np.ndarray, rate: int, channels: int, begin: int, delay: float
) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(chunk, np.float32),
        format="fltp",
        layout=CHANNEL_LAYOUTS[channels],
    )
    frame.sample_rate = rate
    frame.time_base = Fraction(1, rate)
    frame.pts = begin + round(delay * rate)
    return frame


def sounding(path: Path, *, level: float = 1.0, **options: Any) -> Path:
    """Write 2 s of pictures with a sine of 2 s."""
    sine = level * tone(44100, options.pop("seconds", 2.0), 440)
    return write_sounding(path, sine, 44100, codec="pcm_s16le", **options)


def write_sounding_folder(folder: Path) -> Path:
    """Write clips with sound, with a silent track, without a track, and an image."""
    folder.mkdir()
    sounding(folder / "loud.mov")
    sounding(folder / "silent.mov", level=1e-4)
    write_clip(folder / "none.mov", numbered(48)[::-1])
    write_image(folder / "still.png", numbered(3)[2])
    return folder


def sounds_by_clip(library: Library) -> dict[str, set[bool]]:
    """Return whether the windows of each clip have sound, by the file's name."""
    names = {clip.id: Path(clip.path).name for clip in library.clips}
    sounds: dict[str, set[bool]] = {}
    for window in library.windows:
        sounds.setdefault(names[window.clip_id], set()).add(window.shape.sound)
    return sounds
