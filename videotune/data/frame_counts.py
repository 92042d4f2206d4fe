"""Frame counts: which ones a model accepts, and which one the config leads to."""

import math
from bisect import bisect_left, bisect_right

from videotune.config.data_schema import VideoConfig
from videotune.data.remarks import Remark
from videotune.errors import VideotuneError
from videotune.model_spec import VideoRules

MAX_COUNT = 1 << 31
"""Upper bound of a window's frames, for models without a limit of their own."""


def frame_interval(video: VideoConfig, rules: VideoRules) -> int:
    """Return k if the config keeps every k-th frame, 1 if it keeps all.

    Raises:
        VideotuneError: if ``temporal_compression_ratio`` is not a multiple of the VAE's.
    """
    return _multiple_of(
        "temporal", video.temporal_compression_ratio, rules.temporal_stride
    )


def shrink_factor(video: VideoConfig, rules: VideoRules) -> int:
    """Return k if the config makes clips k times smaller, 1 if it keeps their size.

    Raises:
        VideotuneError: if the VAE cannot have the configured spatial compression ratio.
    """
    return _multiple_of(
        "spatial", video.spatial_compression_ratio, rules.spatial_stride
    )


def _multiple_of(dimension: str, ratio: int | None, vae_ratio: int) -> int:
    """Return how many times ``vae_ratio`` goes into the configured ``ratio``."""
    if ratio is None:
        return 1

    if ratio < vae_ratio or ratio % vae_ratio:
        key = f"video_config.{dimension}_compression_ratio"
        raise VideotuneError(
            f"{key} is {ratio}, which is not a multiple of this VAE's {vae_ratio}. "
            f"Leave it out, or set it to {2 * vae_ratio}."
        )
    return ratio // vae_ratio


def sample_fps(video: VideoConfig, rules: VideoRules) -> float:
    """Return the frame rate of samples: the target rate over the frame interval."""
    target_fps = rules.fps if video.target_fps is None else video.target_fps
    return target_fps / frame_interval(video, rules)


def snap_frames(requested: int, rules: VideoRules) -> int:
    """Return the valid frame count nearest to ``requested``; ties go up (4n+1: 19 ->
    21).
    """
    neighbours = (valid_at_least(requested, rules), valid_at_most(requested, rules))
    candidates = [count for count in neighbours if count is not None]
    return min(candidates, key=lambda count: abs(count - requested))


def _valid_counts(rules: VideoRules) -> range:
    """Return all frame counts that the model accepts, ascending."""
    if rules.frame_step == 0:
        return range(rules.frame_rest, rules.frame_rest + 1)

    smallest = rules.frame_rest or rules.frame_step
    largest = rules.most_frames or MAX_COUNT
    return range(smallest, largest + 1, rules.frame_step)


def valid_at_most(frames: int, rules: VideoRules) -> int | None:
    """Return the largest valid count up to ``frames``, or None if there is none."""
    counts = _valid_counts(rules)
    index = bisect_right(counts, frames)
    return counts[index - 1] if index else None


def valid_at_least(frames: int, rules: VideoRules) -> int | None:
    """Return the smallest valid count from ``frames`` on, or None if there is none."""
    counts = _valid_counts(rules)
    index = bisect_left(counts, frames)
    return counts[index] if index < len(counts) else None


def planned_frames(video: VideoConfig, rules: VideoRules) -> tuple[int, str | None]:
    """Return how many frames a window has.

    The configured count includes skipped frames. The number of kept frames is changed
    to the nearest valid count.

    Returns:
        The frames of a window, and a note if that is not the configured count.

    Raises:
        VideotuneError: if ``strict_frames`` forbids the change, or if settings
            contradict each other.
    """
    requested = _requested_frames(video)
    _refuse_contradictions(video, rules, requested)

    interval = frame_interval(video, rules)
    frames = snap_frames(round((requested - 1) / interval + 1), rules)
    return frames, _frame_count_note(video, rules, requested, frames)


def _requested_frames(video: VideoConfig) -> int:
    """Return the configured count, skipped frames included; of several, the largest."""
    if isinstance(video.frames, list):
        return max(video.frames)
    return video.max_frames if video.frames is None else video.frames


def _refuse_contradictions(
    video: VideoConfig, rules: VideoRules, requested: int
) -> None:
    """Raise VideotuneError for settings that contradict each other or the model."""
    if video.stretch and video.frame_sample_strategy == "keyframe":
        raise VideotuneError(
            "video_config.stretch: spans the whole clip, so windows cannot begin at keyframes. "
            "Leave out stretch, or choose another frame_sample_strategy."
        )

    # The default of max_frames is no wish for several frames.
    is_explicit = video.frames is not None
    if rules.most_frames == 1 and is_explicit and requested > 1:
        raise VideotuneError(
            f"video_config.frames is {requested}, but this model takes single frames. "
            "Set it to 1."
        )


def _frame_count_note(
    video: VideoConfig, rules: VideoRules, requested: int, frames: int
) -> str | None:
    """Return a note if a window does not have the configured frames.

    Args:
        video: settings of the dataset.
        rules: frame counts that the model accepts.
        requested: the configured count, skipped frames included.
        frames: frames of a window.

    Raises:
        VideotuneError: if ``strict_frames`` forbids the change.
    """
    interval = frame_interval(video, rules)
    spanned_frames = (frames - 1) * interval + 1

    rule = f"this model takes {frame_rule(rules)}"
    interval_note = None
    if interval > 1:
        interval_note = f"one in {interval} of {spanned_frames} frames is kept, so a window has {frames}"
        rule += f", and one frame in {interval} is kept (temporal_compression_ratio)"

    if spanned_frames == requested:
        return interval_note
    key = "max_frames" if video.frames is None else "frames"
    if video.strict_frames:
        raise VideotuneError(
            f"video_config.{key} is {requested}, but {rule}. Set it to {spanned_frames}."
        )
    note = f"{key} {requested} becomes {spanned_frames}: {interval_note or rule}"
    return Remark("frame_count", note)


def frame_rule(rules: VideoRules) -> str:
    """Describe the frame counts that a model accepts, such as "4n+1 frames, at most
    81".
    """
    if rules.frame_step:
        limit = "" if rules.most_frames is None else f", at most {rules.most_frames}"
        return f"{rules.frame_step}n+{rules.frame_rest} frames{limit}"

    if rules.frame_rest == 1:
        return "single frames"
    return f"exactly {rules.frame_rest} frames"


def split_by_frame_count(video: VideoConfig) -> list[VideoConfig]:
    """Return the settings once for each frame count in ``frames``, the largest first."""
    if not isinstance(video.frames, list):
        return [video]
    counts = sorted(set(video.frames), reverse=True)
    return [video.model_copy(update={"frames": count}) for count in counts]


def smallest_window(video: VideoConfig, rules: VideoRules) -> int:
    """Return the fewest frames that the window of a short clip may have.

    This is ``min_frames``, or the smallest valid count from 5 on; the model's smallest of
    all (``frame_rest``) if it has none from there on.

    Raises:
        VideotuneError: if ``min_frames`` is more than a window has.
    """
    planned, _ = planned_frames(video, rules)
    if video.min_frames is None:
        return min(planned, valid_at_least(5, rules) or rules.frame_rest)

    if video.min_frames > planned:
        raise VideotuneError(
            f"video_config.min_frames is {video.min_frames}, but a window has {planned} "
            f"frames. Set it to at most {planned}."
        )
    return valid_at_least(video.min_frames, rules) or rules.frame_rest


def frames_in(seconds: float, fps: float, interval: int = 1) -> int:
    """Return how many frames fill ``seconds`` at ``fps`` if every ``interval``-th is
    kept.
    """
    return (math.floor(seconds * fps + 1e-6) - 1) // interval + 1
