"""Notes on a dataset as a whole: what its clips have in common, or lack."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath
from statistics import median

from videotune.config.data_schema import VideoConfig
from videotune.config.schema import Config
from videotune.data.candidates import Candidate
from videotune.data.captions import has_paragraphs, lint_captions
from videotune.data.clip_accounts import UPSCALE_LIMIT
from videotune.data.clip_sizes import upscale_factor
from videotune.data.frame_counts import (
    frame_interval,
    frames_in,
    planned_frames,
    sample_fps,
    split_by_frame_count,
)
from videotune.data.remarks import Remark
from videotune.data.sound_notes import notes_on_sound
from videotune.model_spec import VideoRules
from videotune.text import counted, counted_are
from videotune.types import Clip

FEWEST_NUMBERED_STILLS = 16
"""Images numbered without a gap, and equal in size, from which on a note asks whether
they are the frames of a video.
"""


def notes_on_clips(
    candidates: Sequence[Candidate], config: Config, rules: VideoRules
) -> list[str]:
    """Return notes on the dataset as a whole.

    They are on sound, repeats by folder names, changed frame counts, windows that no clip
    fills, frame rates, captions of several lines or that do not differ, and images that
    look like the frames of a video.

    Args:
        candidates: all usable files.
        config: the run's config.
        rules: frames and sizes that the model accepts.
    """
    video = config.video_config
    videos = [candidate for candidate in candidates if not candidate.media.still]
    captions = {candidate.path: candidate.captions for candidate in candidates}
    return [
        *notes_on_sound(candidates, config),
        *_repeats_notes(candidates),
        *_frame_count_notes(videos, video, rules),
        *_frame_rate_notes(videos, sample_fps(video, rules)),
        *_caption_line_notes(candidates),
        *_numbered_still_notes(candidates),
        *_flip_notes(candidates),
        *lint_captions(captions),
    ]


def notes_on_enlarged(candidates: Sequence[Candidate], rules: VideoRules) -> list[str]:
    """Return a note on clips that are enlarged by more than ``UPSCALE_LIMIT``: a run
    then pays for pixels that nobody filmed.

    Args:
        candidates: all usable files.
        rules: frames and sizes that the model accepts.
    """
    enlarged = []
    for candidate in candidates:
        media = candidate.media
        resize = candidate.placement.windows[0].resize
        factor = upscale_factor(media.width, media.height, candidate.size, resize)
        if factor > UPSCALE_LIMIT:
            enlarged.append((factor, media.width, media.height))
    if not enlarged:
        return []

    clips = f"{len(enlarged)} of {counted(len(candidates), 'clip')}"
    verb = "is" if len(enlarged) == 1 else "are"
    _, width, height = max(enlarged, key=lambda clip: clip[1] * clip[2])
    text = (
        f"{clips} {verb} enlarged, up to {max(enlarged)[0]:.2g}x: the largest of them is "
        f"{width}x{height}"
    )
    # A model of one size only has no other to recommend.
    multiple = rules.side_multiple
    fitting_height = height // multiple * multiple
    fitting_width = width // multiple * multiple
    if rules.size is None and fitting_height and fitting_width:
        resolution = f"{fitting_height}x{fitting_width}"
        text += f". --set resolution={resolution} is its own size, and takes less time"
    return [Remark("upscaled", text)]


def _repeats_notes(candidates: Sequence[Candidate]) -> list[str]:
    repeats = {
        candidate.folder_repeats
        for candidate in candidates
        if candidate.folder_repeats[0]
    }
    if not repeats:
        return []

    count_by_folder = dict(sorted(repeats))
    folders = [f"{name} {count}" for name, count in list(count_by_folder.items())[:5]]
    if len(count_by_folder) > 5:
        folders.append("…")
    return [f"repeats by folder names: {', '.join(folders)}"]


def _frame_count_notes(
    videos: Sequence[Candidate], video: VideoConfig, rules: VideoRules
) -> list[str]:
    """Return notes on frame counts that the model changes, or that no clip has."""
    plans = [
        planned_frames(settings, rules) for settings in split_by_frame_count(video)
    ]

    notes = []
    # A default that the model changes needs no note.
    is_configured = (
        video.frames is not None
        or video.max_frames != VideoConfig().max_frames
        or frame_interval(video, rules) > 1
    )
    if is_configured and videos:
        notes += [note for _, note in plans if note]

    return notes + _unfilled_count_notes(videos, [frames for frames, _ in plans], rules)


def _unfilled_count_notes(
    videos: Sequence[Candidate], counts: Sequence[int], rules: VideoRules
) -> list[str]:
    """Return notes on configured frame counts of which no clip has a window.

    Args:
        videos: the clips.
        counts: frame counts, the largest first.
        rules: frames that the model accepts.
    """
    frames: list[int] = []
    for candidate in videos:
        frames += [window.shape.frames for window in candidate.placement.windows]
    if not frames:
        return []

    unfilled = [count for count in counts if count not in frames]
    notes: list[str] = []
    for count in unfilled:
        text = _unfilled_count_note(count, videos, rules, longest_window=max(frames))
        notes.append(Remark("unfilled_count", text))
    singles = frames.count(1)
    if len(counts) > 1 and singles > len(frames) / 2:
        text = (
            f"{singles} of {len(frames)} windows of videos are single frames, since "
            'frames has 1: each frame of a clip is one; windows "head" takes one a clip'
        )
        notes.append(Remark("single_frames", text))
    return notes


def _unfilled_count_note(
    count: int, videos: Sequence[Candidate], rules: VideoRules, *, longest_window: int
) -> str:
    """Return why no clip has a window of a frame count."""
    video = videos[0].video
    interval = frame_interval(video, rules)
    base_fps = sample_fps(video, rules) * interval
    longest_clip = max(candidate.media.seconds for candidate in videos)
    usable_seconds = min(longest_clip, video.max_duration)

    if frames_in(longest_clip, base_fps, interval) < count:
        return (
            f"no clip is long enough for {count} frames: the longest window has "
            f"{longest_window} (pad_short freeze repeats the last frame instead)"
        )
    if frames_in(usable_seconds, base_fps, interval) < count:
        window_seconds = ((count - 1) * interval + 1) / base_fps
        return (
            f"no window has {count} frames: they take {window_seconds:.4g} s, and only "
            f"{video.max_duration:g} s of a clip are used (max_duration)"
        )
    return (
        f"no window has {count} frames: no clip has so many after a keyframe or between "
        f"two cuts; the longest window has {longest_window}"
    )


def _frame_rate_notes(videos: Sequence[Candidate], fps: float) -> list[str]:
    """Return notes on mixed frame rates, and on rates below the ``fps`` of samples."""
    notes: list[str] = []
    rates = Counter(round(candidate.media.fps, 2) for candidate in videos)
    if len(rates) > 1:
        counts = ", ".join(
            f"{rate:g} fps ({count})" for rate, count in rates.most_common(5)
        )
        if len(rates) > 5:
            counts += f" and {len(rates) - 5} more"
        text = (
            f"{len(rates)} frame rates are mixed: {counts}; "
            f"all are sampled at {fps:g} fps, at their true speed"
        )
        notes.append(Remark("mixed_rates", text))

    if rates:
        usual = median(candidate.media.fps for candidate in videos)
        if usual < 0.8 * fps:
            notes.append(Remark("slow_clips", _slow_note(usual, fps)))
    return notes


def _slow_note(usual: float, fps: float) -> str:
    """Return the note on clips that are mostly slower than the training, with what helps."""
    return (
        f"most clips are slower than the {fps:g} fps of training: frames are repeated, so motion "
        f"keeps its speed and is less smooth. Use clips of {fps:g} fps if you have them; or "
        f"--set video_config.target_fps={usual:.4g} trains each frame once, and the model "
        f"then plays motion {fps / usual:.3g} times as fast"
    )


def _caption_line_notes(candidates: Sequence[Candidate]) -> list[str]:
    """Return a note on captions whose lines became variants."""
    of_several_lines = [
        candidate
        for candidate in candidates
        if len(candidate.captions) > len(candidate.caption_texts) > 0
    ]
    if not of_several_lines:
        return []

    count = (
        "1 caption has"
        if len(of_several_lines) == 1
        else f"{len(of_several_lines)} captions have"
    )
    note = (
        f"{count} several lines (such as that of {of_several_lines[0].relative}); each line is a "
        'variant, of which a sample gets one; caption_lines "join" makes one caption of them'
    )
    prose = 0
    for candidate in of_several_lines:
        prose += any(has_paragraphs(text) for text in candidate.caption_texts)
    if prose == 1:
        note += ": 1 of them has paragraphs, so it looks like one text"
    elif prose:
        note += f": {prose} of them have paragraphs, so they look like one text"
    return [Remark("caption_lines", note)]


class VariantNotes:
    """Collects notes on datasets whose captions have variants: how many texts are
    encoded.
    """

    def __init__(self) -> None:
        self._written: dict[str, set[str]] = {}
        self._texts: dict[str, set[str]] = {}

    def add(self, candidate: Candidate, clip: Clip) -> None:
        """Count the captions of a clip."""
        dataset = candidate.dataset
        if dataset.varies_captions:
            self._written.setdefault(dataset.path, set()).update(candidate.captions)
            self._texts.setdefault(dataset.path, set()).update(clip.captions)

    def notes(self) -> list[str]:
        """Return a note on each such dataset."""
        return [
            f"{path}: {counted(len(captions), 'caption')} give "
            f"{counted(len(self._texts[path]), 'text')} (caption_variants); each is encoded "
            "once and cached"
            for path, captions in self._written.items()
        ]


def _flip_notes(candidates: Sequence[Candidate]) -> list[str]:
    """Return a note on how many clips are mirrored, and how many are not because of
    their captions.
    """
    mirrored = [c for c in candidates if c.placement.windows[0].flip]
    against = [c for c in candidates if c.word_against_flip]
    if not mirrored and not against:
        return []

    note = f"flip: {counted_are(len(mirrored), 'clip')} mirrored in every second view"
    if against:
        note += (
            f"; {counted_are(len(against), 'clip')} not, since the caption speaks of left, "
            f"right or writing (such as {against[0].relative}: "
            f'"{against[0].word_against_flip}"); flip "always" mirrors them too'
        )
    return [note]


def _numbered_still_notes(candidates: Sequence[Candidate]) -> list[str]:
    """Return notes on folders of images that look like the frames of a video."""
    numbers_by_series: dict[tuple[PurePosixPath, str, int, int], set[int]] = {}
    for candidate in candidates:
        match = re.fullmatch(r"(.*?)(\d+)", candidate.relative.stem)
        if candidate.media.still and match:
            series = (
                candidate.relative.parent,
                match[1],
                candidate.media.width,
                candidate.media.height,
            )
            numbers_by_series.setdefault(series, set()).add(int(match[2]))

    notes: list[str] = []
    for (folder, prefix, width, height), numbers in numbers_by_series.items():
        is_gapless = max(numbers) - min(numbers) + 1 == len(numbers)
        if len(numbers) >= FEWEST_NUMBERED_STILLS and is_gapless:
            text = (
                f"{len(numbers)} images {folder / prefix}{min(numbers)} to {max(numbers)} "
                f"are numbered without a gap and all {width}x{height}; each is a clip of "
                "one frame. If they are the frames of a video, put them into a folder of "
                "their own and set datasets.frame_folder_fps"
            )
            notes.append(Remark("numbered_stills", text))
    return notes
