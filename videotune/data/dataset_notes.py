"""Notes on a dataset as a whole: what its clips have in common, or lack."""

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

import numpy as np

from videotune.config.data_schema import VideoConfig
from videotune.config.schema import Config
from videotune.data.candidates import Candidate
from videotune.data.captions import SharedCaptions, has_paragraphs
from videotune.data.clip_accounts import UPSCALE_LIMIT
from videotune.data.clip_sizes import upscale_factor
from videotune.data.frame_counts import (
    frame_interval,
    frames_in,
    planned_frames,
    sample_fps,
    split_by_frame_count,
)
from videotune.data.long_clips import LongClips
from videotune.data.packed_texts import PackedTexts, TextNumbers
from videotune.data.remarks import Remark
from videotune.data.sound_notes import SoundNotes
from videotune.model_spec import VideoRules
from videotune.text import counted, counted_are
from videotune.types import Clip

FEWEST_NUMBERED_STILLS = 16
"""Images numbered without a gap, and equal in size, from which on a note asks whether
they are the frames of a video.
"""

LARGEST_NUMBER = int(np.iinfo(np.int64).max)
"""A larger number at the end of an image's name is no number of a frame."""

_NUMBERED = re.compile(r"(.*?)(\d+)")


class ClipNotes:
    """Collects notes on a dataset as a whole, one usable clip after the other.

    They are on sound, repeats by folder names, changed frame counts, windows that no clip
    fills, frame rates, captions of several lines or that do not differ, images that look
    like the frames of a video, and clips that are enlarged.

    Args:
        config: the run's config.
        rules: frames and sizes that the model accepts.
    """

    def __init__(self, config: Config, rules: VideoRules) -> None:
        self._sound = SoundNotes(config)
        self._repeats: set[tuple[str, int]] = set()
        self._frame_counts = _FrameCounts(config.video_config, rules)
        self._frame_rates = _FrameRates(sample_fps(config.video_config, rules))
        self._long_clips = LongClips()
        self._caption_lines = _CaptionLines()
        self._numbered_stills = _NumberedStills()
        self._flips = _Flips()
        self._shared_captions = SharedCaptions()
        self._enlarged = _EnlargedClips(rules)

    def add(self, candidate: Candidate) -> None:
        """Add a usable clip."""
        self._sound.add(candidate)
        if candidate.folder_repeats[0]:
            self._repeats.add(candidate.folder_repeats)
        if candidate.media.still:
            self._numbered_stills.add(candidate)
        else:
            self._frame_counts.add(candidate)
            self._frame_rates.add(candidate)
            self._long_clips.add(candidate)
        self._caption_lines.add(candidate)
        self._flips.add(candidate)
        self._shared_captions.add(candidate.captions)
        self._enlarged.add(candidate)

    def notes(self, captions_of: Callable[[int], Iterable[str]]) -> list[str]:
        """Return the notes, without that on enlarged clips.

        Args:
            captions_of: returns the captions of a clip that was added, by its number.
        """
        return [
            *self._sound.notes(),
            *self._repeats_notes(),
            *self._frame_counts.notes(),
            *self._frame_rates.notes(),
            *self._long_clips.notes(),
            *self._caption_lines.notes(),
            *self._numbered_stills.notes(),
            *self._flips.notes(),
            *self._shared_captions.hints(captions_of),
        ]

    def notes_on_enlarged(self) -> list[str]:
        """Return a note on clips that are enlarged by more than ``UPSCALE_LIMIT``."""
        return self._enlarged.notes()

    def _repeats_notes(self) -> list[str]:
        if not self._repeats:
            return []
        count_by_folder = dict(sorted(self._repeats))
        folders = [
            f"{name} {count}" for name, count in list(count_by_folder.items())[:5]
        ]
        if len(count_by_folder) > 5:
            folders.append("…")
        return [f"repeats by folder names: {', '.join(folders)}"]


class _EnlargedClips:
    """Clips that are enlarged by more than ``UPSCALE_LIMIT``: a run then pays for pixels
    that nobody filmed.
    """

    def __init__(self, rules: VideoRules) -> None:
        self._rules = rules
        self._clips = 0
        self._enlarged = 0
        self._largest_factor = 0.0
        self._largest_size = (0, 0)
        """Width and height of the enlarged clip that has most pixels."""
        self._sizes: set[tuple[int, int]] = set()
        """Width and height of all clips, at most two."""

    def add(self, candidate: Candidate) -> None:
        """Add a usable clip."""
        self._clips += 1
        media = candidate.media
        if len(self._sizes) < 2:
            self._sizes.add((media.width, media.height))
        resize = candidate.placement.windows[0].resize
        factor = upscale_factor(media.width, media.height, candidate.size, resize)
        if factor <= UPSCALE_LIMIT:
            return
        self._enlarged += 1
        self._largest_factor = max(self._largest_factor, factor)
        if media.width * media.height > math.prod(self._largest_size):
            self._largest_size = (media.width, media.height)

    def notes(self) -> list[str]:
        """Return a note on these clips."""
        if not self._enlarged:
            return []
        clips = f"{self._enlarged} of {counted(self._clips, 'clip')}"
        verb = "is" if self._enlarged == 1 else "are"
        width, height = self._largest_size
        text = (
            f"{clips} {verb} enlarged, up to {self._largest_factor:.2g}x: the largest of them is "
            f"{width}x{height}"
        )
        resolution = self._fitting_resolution()
        if resolution is not None:
            text += (
                f". --set resolution={resolution} is its own size, and takes less time"
            )
        elif self._enlarged < self._clips:
            text += ". The model learns their blur: leave them out, or use larger files"
        return [Remark("upscaled", text)]

    def _fitting_resolution(self) -> str | None:
        """Return the resolution that has the pixels of the largest of these clips, and crops
        no other one; None if there is none, or some clips are large enough for the run's.
        """
        # A model of one size only has no other to recommend.
        if self._enlarged < self._clips or self._rules.size is not None:
            return None
        width, height = self._largest_size
        multiple = self._rules.side_multiple
        if len(self._sizes) > 1:
            # One number is an area, which each clip has in its own shape.
            side = math.isqrt(width * height) // multiple * multiple
            return str(side) if side else None

        fitting_height = height // multiple * multiple
        fitting_width = width // multiple * multiple
        if fitting_height and fitting_width:
            return f"{fitting_height}x{fitting_width}"
        return None


class _FrameCounts:
    """Frame counts that the model changes, or that no clip has.

    Args:
        video: the config's frames and windows.
        rules: frames that the model accepts.
    """

    def __init__(self, video: VideoConfig, rules: VideoRules) -> None:
        self._video = video
        self._rules = rules
        self._windows: Counter[int] = Counter()
        """Windows of videos by their frames."""
        self._longest_clip = 0.0
        self._video_of_first: VideoConfig | None = None
        """Frames and windows of the first video's dataset."""

    def add(self, candidate: Candidate) -> None:
        """Add a usable video."""
        if self._video_of_first is None:
            self._video_of_first = candidate.video
        self._longest_clip = max(self._longest_clip, candidate.media.seconds)
        for window in candidate.placement.windows:
            self._windows[window.shape.frames] += 1

    def notes(self) -> list[str]:
        """Return notes on these counts."""
        video = self._video
        plans = [
            planned_frames(settings, self._rules)
            for settings in split_by_frame_count(video)
        ]

        notes = []
        # A default that the model changes needs no note.
        is_configured = (
            video.frames is not None
            or video.max_frames != VideoConfig().max_frames
            or frame_interval(video, self._rules) > 1
        )
        if is_configured and self._video_of_first is not None:
            notes += [note for _, note in plans if note]
        return notes + self._unfilled_count_notes([frames for frames, _ in plans])

    def _unfilled_count_notes(self, counts: Sequence[int]) -> list[str]:
        """Return notes on configured frame counts of which no clip has a window.

        Args:
            counts: frame counts, the largest first.
        """
        if not self._windows:
            return []

        unfilled = [count for count in counts if count not in self._windows]
        notes: list[str] = []
        for count in unfilled:
            notes.append(Remark("unfilled_count", self._unfilled_count_note(count)))
        singles = self._windows[1]
        total = self._windows.total()
        if len(counts) > 1 and singles > total / 2:
            text = (
                f"{singles} of {total} windows of videos are single frames, since "
                'frames has 1: each frame of a clip is one; windows "head" takes one a clip'
            )
            notes.append(Remark("single_frames", text))
        return notes

    def _unfilled_count_note(self, count: int) -> str:
        """Return why no clip has a window of a frame count."""
        video = self._video_of_first
        assert video is not None
        interval = frame_interval(video, self._rules)
        base_fps = sample_fps(video, self._rules) * interval
        longest_window = max(self._windows)
        usable_seconds = min(self._longest_clip, video.max_duration)

        if frames_in(self._longest_clip, base_fps, interval) < count:
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


class _FrameRates:
    """Mixed frame rates, and rates below that of samples.

    Args:
        fps: frame rate of samples.
    """

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._rates = array("d")
        self._rounded: Counter[float] = Counter()

    def add(self, candidate: Candidate) -> None:
        """Add a usable video."""
        self._rates.append(candidate.media.fps)
        self._rounded[round(candidate.media.fps, 2)] += 1

    def notes(self) -> list[str]:
        """Return notes on these rates."""
        notes: list[str] = []
        rates = self._rounded
        if len(rates) > 1:
            counts = ", ".join(
                f"{rate:g} fps ({count})" for rate, count in rates.most_common(5)
            )
            if len(rates) > 5:
                counts += f" and {len(rates) - 5} more"
            text = (
                f"{len(rates)} frame rates are mixed: {counts}; "
                f"all are sampled at {self._fps:g} fps, at their true speed"
            )
            notes.append(Remark("mixed_rates", text))

        if rates:
            usual = float(np.median(np.frombuffer(self._rates)))
            if usual < 0.8 * self._fps:
                notes.append(Remark("slow_clips", _slow_note(usual, self._fps)))
        return notes


def _slow_note(usual: float, fps: float) -> str:
    """Return the note on clips that are mostly slower than the training, with what helps."""
    return (
        f"most clips are slower than the {fps:g} fps of training: frames are repeated, so motion "
        f"keeps its speed and is less smooth. Use clips of {fps:g} fps if you have them; or "
        f"--set video_config.target_fps={usual:.4g} trains each frame once, and the model "
        f"then plays motion {fps / usual:.3g} times as fast"
    )


class _CaptionLines:
    """Captions whose lines became variants."""

    def __init__(self) -> None:
        self._clips = 0
        self._first: PurePosixPath | None = None
        self._prose = 0
        """Clips whose caption has paragraphs."""

    def add(self, candidate: Candidate) -> None:
        """Add a usable clip."""
        if not len(candidate.captions) > len(candidate.caption_texts) > 0:
            return
        self._clips += 1
        self._first = self._first or candidate.relative
        self._prose += any(has_paragraphs(text) for text in candidate.caption_texts)

    def notes(self) -> list[str]:
        """Return a note on these captions."""
        if not self._clips:
            return []

        count = f"{self._clips} captions have"
        if self._clips == 1:
            count = "1 caption has"

        note = (
            f"{count} several lines (such as that of {self._first}); each line is a "
            'variant, of which a sample gets one; caption_lines "join" makes one caption of them'
        )
        if self._prose == 1:
            note += ": 1 of them has paragraphs, so it looks like one text"
        elif self._prose:
            note += (
                f": {self._prose} of them have paragraphs, so they look like one text"
            )
        return [Remark("caption_lines", note)]


class VariantNotes:
    """Collects notes on datasets whose captions have variants: how many texts are
    encoded.
    """

    def __init__(self) -> None:
        self._written: dict[str, TextNumbers] = {}
        self._texts: dict[str, TextNumbers] = {}

    def add(self, candidate: Candidate, clip: Clip) -> None:
        """Count the captions of a clip."""
        dataset = candidate.dataset
        if not dataset.varies_captions:
            return
        written = self._written.setdefault(dataset.path, TextNumbers())
        for caption in candidate.captions:
            written.add(caption)
        texts = self._texts.setdefault(dataset.path, TextNumbers())
        for caption in clip.captions:
            texts.add(caption)

    def notes(self) -> list[str]:
        """Return a note on each such dataset."""
        return [
            f"{path}: {counted(captions.count(), 'caption')} give "
            f"{counted(self._texts[path].count(), 'text')} (caption_variants); each is encoded "
            "once and cached"
            for path, captions in self._written.items()
        ]


class _Flips:
    """Clips that are mirrored, and those that are not because of their captions."""

    def __init__(self) -> None:
        self._mirrored = 0
        self._against = 0
        self._first_against = ""

    def add(self, candidate: Candidate) -> None:
        """Add a usable clip."""
        self._mirrored += candidate.placement.windows[0].flip
        if not candidate.word_against_flip:
            return
        if not self._against:
            self._first_against = (
                f'{candidate.relative}: "{candidate.word_against_flip}"'
            )
        self._against += 1

    def notes(self) -> list[str]:
        """Return a note on how many clips are mirrored."""
        if not self._mirrored and not self._against:
            return []
        note = (
            f"flip: {counted_are(self._mirrored, 'clip')} mirrored in every second view"
        )
        if self._against:
            note += (
                f"; {counted_are(self._against, 'clip')} not, since the caption speaks of left, "
                f"right or writing (such as {self._first_against}); "
                'flip "always" mirrors them too'
            )
        return [note]


def number_of_still(path: PurePosixPath) -> tuple[str, int] | None:
    """Return an image's name before the number at its end, and the number; None without
    one.
    """
    match = _NUMBERED.fullmatch(path.stem)
    if match is None or int(match[2]) > LARGEST_NUMBER:
        return None
    return match[1], int(match[2])


class _NumberedStills:
    """Folders of images that look like the frames of a video."""

    def __init__(self) -> None:
        self._series = TextNumbers()
        self._numbers = array("q")
        self._names = PackedTexts()
        """Folder with the name before the number, and size, of each series' image."""

    def add(self, candidate: Candidate) -> None:
        """Add a usable image."""
        numbered = number_of_still(candidate.relative)
        if numbered is None:
            return
        prefix, number = numbered
        name = candidate.relative.parent / prefix
        size = f"{candidate.media.width}x{candidate.media.height}"
        self._series.add(f"{candidate.relative.parent}\0{prefix}\0{size}")
        self._numbers.append(number)
        self._names.append(f"{name}\0{size}")

    def notes(self) -> list[str]:
        """Return notes on these folders."""
        series_of_image, first_images = self._series.number_all()
        order = np.argsort(series_of_image, kind="stable")
        numbers = np.frombuffer(self._numbers, np.int64)[order]
        ends = np.cumsum(np.bincount(series_of_image)).tolist()

        notes: list[str] = []
        for series, (begin, end) in enumerate(pairwise([0, *ends])):
            present = np.unique(numbers[begin:end])
            first = int(present[0])
            last = int(present[-1])
            is_gapless = last - first + 1 == len(present)
            if len(present) < FEWEST_NUMBERED_STILLS or not is_gapless:
                continue
            name, size = self._names[int(first_images[series])].split("\0")
            text = (
                f"{len(present)} images {name}{first} to {last} "
                f"are numbered without a gap and all {size}; each is a clip of "
                "one frame. If they are the frames of a video, put them into a folder of "
                "their own and set datasets.frame_folder_fps"
            )
            notes.append(Remark("numbered_stills", text))
        return notes
