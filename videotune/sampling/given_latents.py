"""Latents of the files that samples are conditioned on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from videotune.bounds import require_file
from videotune.config.schema import Config
from videotune.data.decode import decode, whole_picture
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.data.sound import read_beginning
from videotune.errors import VideotuneError
from videotune.latent_cache.clip_ends import (
    REFERENCE,
    appended_sizes,
    given_frames,
    pixels_of_end,
)
from videotune.latent_cache.conditioning_cells import appended_latents, put_conditions
from videotune.latent_cache.conditions import (
    KNOWN,
    SeparateCondition,
    encode_condition,
    pixel_frames,
    shown_pixels,
)
from videotune.latent_cache.mask_reading import mask_pixels
from videotune.latent_cache.pixels import to_model
from videotune.models.base import DiffusersModel
from videotune.sampling.given_files import GivenFiles
from videotune.types import ClipShape, ConditionPixels, LatentDistribution, Window

SOME_RATE = 16000
"""Numbers a second with which a sound is read that is only to be checked."""


def read_given(files: GivenFiles, shape: ClipShape, key: str) -> None:
    """Raise VideotuneError, with the key, if any of the files cannot be read, or is what
    a picture cannot begin or end with.
    """
    _refuse_for_picture(files, shape, key)
    one_frame = ClipShape(1, shape.height, shape.width, shape.fps)
    for field in fields(files):
        path = getattr(files, field.name)
        if path is not None and field.name == "sound":
            _read_sound(Path(path), 1 / shape.fps, SOME_RATE, key)
        elif path is not None:
            _read(Path(path), one_frame, f"{key}: {field.name}")


def _refuse_for_picture(files: GivenFiles, shape: ClipShape, key: str) -> None:
    """Raise VideotuneError for what only a sample of several frames can be given."""
    of_videos = sorted(files.types & {"last_frame", "prefix", "suffix"})
    if shape.frames == 1 and of_videos:
        raise VideotuneError(
            f"{key}: a picture has no {of_videos[0].replace('_', ' ')}. Sample more frames, or leave "
            "it out"
        )


def encode_given(
    family: DiffusersModel,
    requests: Sequence[tuple[GivenFiles, ClipShape]],
    config: Config,
    key: str,
) -> list[LatentDistribution]:
    """Encode what samples of these shapes are conditioned on, then free the VAE.

    Raises VideotuneError, with the key, for a file that cannot be read.
    """
    try:
        return [_encode(family, files, shape, config, key) for files, shape in requests]
    finally:
        family.free("vae")


def _encode(
    family: DiffusersModel,
    files: GivenFiles,
    shape: ClipShape,
    config: Config,
    key: str,
) -> LatentDistribution:
    """Encode what a sample is conditioned on."""
    _refuse_for_picture(files, shape, key)
    if files.sound is not None:
        without_sound = replace(files, sound=None)
        distribution = _encode(family, without_sound, shape, config, key)
        return replace(
            distribution, sound=_encode_sound(family, files.sound, shape, key)
        )
    if family.spec.has_conditioning_video:
        return _encode_whole_video(family, files, shape, key)
    if files.reference is None:
        return _encode_shown(family, files, shape, config, key)
    reference = _encode_reference(family, Path(files.reference), shape, config, key)
    distribution = _encode_shown(
        family, replace(files, reference=None), shape, config, key
    )
    extras = {**distribution.extras, REFERENCE: reference}
    return replace(distribution, extras=extras)


def _encode_whole_video(
    family: DiffusersModel, files: GivenFiles, shape: ClipShape, key: str
) -> LatentDistribution:
    """Encode the video whose sound is drawn."""
    assert files.video is not None
    frames = _read(Path(files.video), shape, f"{key}: video")
    distribution = family.encode_video(to_model(frames))
    everything = torch.ones(distribution.mean.shape[1:], dtype=torch.bool)
    return replace(distribution, known=everything)


def _encode_sound(
    family: DiffusersModel, path: str, shape: ClipShape, key: str
) -> Tensor:
    """Encode the beginning of a file's sound (C,L)."""
    assert family.spec.sound is not None
    seconds = shape.frames / shape.fps
    waveform = _read_sound(Path(path), seconds, family.spec.sound.sample_rate, key)
    return family.encode_sound(torch.from_numpy(waveform), shape)


def _encode_reference(
    family: DiffusersModel, path: Path, shape: ClipShape, config: Config, key: str
) -> Tensor:
    """Encode a reference (C,n,H,W) as training does."""
    where = f"{key}: reference"
    if family.spec.has_reference_image:
        info = _probed(path, where)
        with _explained(path, where):
            picture = whole_picture(info, 0.0)
        return family.encode_reference_image(picture, shape)

    latent_frames, _, _ = appended_sizes(config, shape, family.spec)[REFERENCE]
    count = (latent_frames - 1) * family.spec.rules.temporal_stride + 1
    frames = _read(path, replace(shape, frames=count), where)
    return family.encode_video(to_model(frames)).mean


def _encode_shown(
    family: DiffusersModel,
    files: GivenFiles,
    shape: ClipShape,
    config: Config,
    key: str,
) -> LatentDistribution:
    """Encode what a sample is given in its own place."""
    is_alone = family.spec.cached_with_latents == {"first_frame"}
    is_alone |= family.spec.is_in_place("first_frame")
    if files.types == {"first_frame"} and is_alone:
        assert files.image is not None
        still = _read(Path(files.image), shape, f"{key}: image")
        return family.encode_video(to_model(still))

    if any(map(family.spec.is_on_channels, files.types)):
        return _encode_on_channels(family, files, shape, config, key)
    return _encode_in_place(family, files, shape, config, key)


def _encode_in_place(
    family: DiffusersModel,
    files: GivenFiles,
    shape: ClipShape,
    config: Config,
    key: str,
) -> LatentDistribution:
    """Encode what a sample is given clean among its latents, or appended to them."""
    rules = family.spec.rules
    frames_given = _frames_given(files, config)
    entries = {}
    for name in ("suffix", "last_frame"):
        path = getattr(files, name)
        if path is not None:
            count = frames_given[name]
            entries[name] = _encode_end(family, path, name, count, shape, key)
    if files.mask is not None:
        entries["mask"] = _encode_around_mask(family, files, shape, key)

    x0 = torch.zeros(family.spec.latent_channels, *rules.latent_size(shape))
    if files.prefix is not None:
        count = given_frames(frames_given["prefix"], shape, rules)
        num_frames = (count - 1) * rules.temporal_stride + 1
        beginning = _read_end(Path(files.prefix), shape, num_frames, f"{key}: prefix")
        x0[:, :count] = family.encode_video(to_model(beginning)).mean[:, :count]
    if files.image is not None:
        still = _read(Path(files.image), replace(shape, frames=1), f"{key}: image")
        x0[:, :1] = family.encode_video(to_model(still)).mean

    prefix_frames = frames_given.get("prefix", 0)
    known = put_conditions(x0, family.spec, files.types, prefix_frames, entries)
    appended = appended_latents(entries, family.spec)
    return LatentDistribution(x0, extras=appended, known=known)


def _encode_end(
    family: DiffusersModel,
    path: str,
    condition: str,
    latent_frames: int,
    shape: ClipShape,
    key: str,
) -> dict[str, Tensor]:
    """Encode a sample's last frames, which are the first ones of a file."""
    count = pixels_of_end(condition, latent_frames, shape, family.spec)
    frames = _blank_frames(shape)
    part = replace(shape, frames=count)
    frames[-count:] = _read(Path(path), part, f"{key}: {condition}")

    sample = _condition_sample(shape, condition, latent_frames)
    nothing = torch.zeros(1, shape.height, shape.width)
    return encode_condition(family, to_model(frames), sample, nothing)


def _encode_around_mask(
    family: DiffusersModel, files: GivenFiles, shape: ClipShape, key: str
) -> dict[str, Tensor]:
    """Encode what a mask leaves of a video."""
    frames, hidden = _read_video_and_mask(files, shape, key)
    sample = _condition_sample(shape, "mask", 1)
    entry = encode_condition(family, to_model(frames), sample, hidden)
    if not entry[KNOWN].any():
        raise _nothing_left(files, shape, key)
    return entry


def _condition_sample(
    shape: ClipShape, condition: str, latent_frames: int
) -> SeparateCondition:
    """Return a condition of a sample that is of no clip."""
    window = Window("", 0.0, shape.frames / shape.fps, shape)
    return SeparateCondition(window, 0, condition, latent_frames)


def _encode_on_channels(
    family: DiffusersModel,
    files: GivenFiles,
    shape: ClipShape,
    config: Config,
    key: str,
) -> LatentDistribution:
    """Encode what a sample is shown on channels of the network."""
    rules = family.spec.rules
    frames = _blank_frames(shape)
    hidden = torch.ones(1, shape.height, shape.width)
    if files.mask is not None:
        frames, hidden = _read_video_and_mask(files, shape, key)

    frames_given = _frames_given(files, config)
    paths = {
        "suffix": files.suffix,
        "last_frame": files.last_frame,
        "prefix": files.prefix,
        "first_frame": files.image,
    }
    for name, path in paths.items():
        if path is None:
            continue
        pixel_range = pixel_frames(name, frames_given[name], shape.frames, rules)
        count = pixel_range.stop - pixel_range.start
        where = f"{key}: {'image' if name == 'first_frame' else name}"
        if name == "prefix":
            frames[pixel_range] = _read_end(Path(path), shape, count, where)
        else:
            part = replace(shape, frames=count)
            frames[pixel_range] = _read(Path(path), part, where)

    if files.mask is not None and (hidden > 0).all():
        raise _nothing_left(files, shape, key)
    known = shown_pixels(frames_given, shape.frames, hidden, rules)
    control = None
    if files.control is not None:
        control = to_model(_read(Path(files.control), shape, f"{key}: control"))
    pixels = ConditionPixels(to_model(frames), known, control)
    states = family.channel_states(pixels)
    empty = torch.zeros(family.spec.latent_channels, *rules.latent_size(shape))
    return LatentDistribution(empty, extras=states)


def _frames_given(files: GivenFiles, config: Config) -> dict[str, int]:
    """Return the latent frames that each condition gives, as in the run's training."""
    frames_given: dict[str, int] = dict.fromkeys(files.types, 1)
    for condition in config.conditions:
        if condition.type in frames_given:
            frames_given[condition.type] = condition.frames_given
    return frames_given


def _blank_frames(shape: ClipShape) -> np.ndarray:
    return np.zeros((shape.frames, shape.height, shape.width, 3), np.uint8)


def _read_video_and_mask(
    files: GivenFiles, shape: ClipShape, key: str
) -> tuple[np.ndarray, Tensor]:
    """Return the frames of a video, uint8 (T,H,W,3), and its mask (T or 1,H,W), above 0
    where it hides them.
    """
    assert files.mask is not None
    assert files.video is not None
    hidden = mask_pixels(_read(Path(files.mask), shape, f"{key}: mask"))
    frames = _read(Path(files.video), shape, f"{key}: video").copy()
    return frames, hidden


def _read(path: Path, shape: ClipShape, key: str) -> np.ndarray:
    """Return the first frames of a clip, or an image as a still video, cropped as clips
    are: uint8 (T,H,W,3). The last frame of a clip that is too short is held.
    """
    info = _probed(path, key)
    times = [
        min(number / shape.fps, _last_second(info)) for number in range(shape.frames)
    ]
    return _decoded(info, times, shape, key)


def _read_sound(path: Path, seconds: float, rate: int, key: str) -> np.ndarray:
    """Return the beginning of a file's sound, float32 (2,n)."""
    where = f"{key}: sound"
    require_file(path, where)
    with _explained(path, where):
        return read_beginning(path, seconds, rate)


def _read_end(path: Path, shape: ClipShape, frames: int, key: str) -> np.ndarray:
    """Return the last frames of a clip at the rate of a shape: uint8 (frames,H,W,3). The
    first frame of a clip that is too short is held.
    """
    info = _probed(path, key)
    times = [
        max(0.0, _last_second(info) - number / shape.fps)
        for number in reversed(range(frames))
    ]
    return _decoded(info, times, shape, key)


def _probed(path: Path, key: str) -> MediaInfo:
    require_file(path, key)
    with _explained(path, key):
        return probe(path)


def _decoded(
    info: MediaInfo, times: Sequence[float], shape: ClipShape, key: str
) -> np.ndarray:
    with _explained(Path(info.path), key):
        return decode(info, times, shape.height, shape.width)


def _nothing_left(files: GivenFiles, shape: ClipShape, key: str) -> VideotuneError:
    return VideotuneError(
        f"{key}: mask {files.mask}: at {shape.width}x{shape.height} nothing of the video is left: a cell is "
        "given only if the mask is black there and in the cells around it. Use a smaller "
        "white part, or a larger size"
    )


@contextmanager
def _explained(path: Path, key: str) -> Iterator[None]:
    """Raise VideotuneError, with the key, for a file that cannot be read."""
    try:
        yield
    except (ClipProblem, OSError) as problem:
        reason = getattr(problem, "detail", None) or problem
        raise VideotuneError(f"{key} {path}: {reason}") from problem


def _last_second(info: MediaInfo) -> float:
    """Return the time of the last frame; 0 for an image."""
    return 0.0 if info.still else info.timestamps[-1]
