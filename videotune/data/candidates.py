"""Files of datasets on their way to clips: media info, content scan, windows, size and captions, or why one is skipped.

And the account of a dataset: what became of every clip, and why; what to warn about.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Any

from videotune.config.data_schema import Dataset, VideoConfig
from videotune.config.schema import Config
from videotune.data.buckets import Choices, Size, choose_size, kept_share, upscale_factor
from videotune.data.captions import lint, lint_all, read_caption, with_trigger
from videotune.data.content_scan import ContentScan
from videotune.data.decode import TONE_MAPPING_VERSION
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_sampling import (
    FrameSampling,
    each_count,
    fps_of,
    keep_every,
    planned_frames,
    sample_frames,
    shrink_factor,
    without_randomness,
)
from videotune.data.layouts import ClipFile, repeats_of
from videotune.data.locations import Location
from videotune.data.media_info import MediaInfo
from videotune.errors import VideotuneError
from videotune.files import digest
from videotune.types import Clip, VideoRules


@dataclass
class Candidate:
    """A file of a dataset that may become a clip; ``problem`` says why it does not.

    ``choices`` and ``video`` are the dataset's resolution and frames; ``content_id`` hashes the file's bytes; ``written``
    are its captions without the trigger; ``source`` is the video it was cut from, ``duplicate`` the path of a clip that
    shows nearly the same.
    """

    file: ClipFile
    dataset: Dataset
    location: Location
    choices: Choices
    video: VideoConfig
    content_id: str = ""
    info: MediaInfo | None = None
    scan: ContentScan | None = None
    problem: ClipProblem | None = None
    written: tuple[str, ...] = ()
    size: Size = (1, 1)
    sampling: FrameSampling = field(default_factory=FrameSampling)
    source: str = ""
    held_out: bool = False
    duplicate: str | None = None

    @property
    def path(self) -> str:
        """Where the file lies."""
        return str(self.file.path)

    @property
    def relative(self) -> PurePosixPath:
        """The file's path in its dataset."""
        return PurePosixPath(self.file.path.relative_to(self.location.root).as_posix())

    @property
    def repeats(self) -> tuple[str, int]:
        """The folder whose name says how often the clip is repeated, and the number, as ``repeats_of`` does."""
        return (
            repeats_of(self.location.root, self.file.path)
            if self.dataset.kind != "validation"
            else ("", 1)
        )

    @property
    def media(self) -> MediaInfo:
        """The media info of a candidate without a problem."""
        assert self.info is not None
        return self.info

    @property
    def clip_id(self) -> str:
        """Names the clip's pixels: the hash of its bytes, and where they are tone-mapped how."""
        own = self.content_id
        return (
            own
            if self.media.hdr is None
            else digest([own, "tone-mapped", TONE_MAPPING_VERSION])
        )

    def clip(self) -> Clip:
        """What a candidate without a problem becomes."""
        dataset = self.dataset
        return Clip(
            id=self.clip_id,
            path=self.path,
            source=self.source,
            captions=tuple(with_trigger(caption, dataset.trigger) for caption in self.written),
            held_out=self.held_out,
            kind=dataset.kind,
            repeats=dataset.repeats * self.repeats[1],
            loss_weight=dataset.loss_weight,
            caption_weights=tuple(dataset.caption_weights or ()),
            target="base"
            if dataset.kind == "regularization" and dataset.prior_preservation is not False
            else "clip",
            still=self.media.still,
        )

    def sample(self, config: Config, rules: VideoRules) -> None:
        """Choose the size and the windows, random ones only if it is not held out; ClipProblem where none has room."""
        info = self.media
        shrink = shrink_factor(self.video, rules)
        video = without_randomness(self.video) if self.held_out else self.video
        resize = "center" if self.held_out and config.resize == "random" else config.resize
        self.size = choose_size(info.width, info.height, self.choices, rules, shrink)
        by_scenes = (
            video.frame_sample_strategy == "keyframe" and video.keyframe_source == "scenes"
        )
        sampling = sample_frames(
            info, video, rules, self.scan.cuts if by_scenes and self.scan else ()
        )
        high, wide = self.size
        own = (
            replace(
                one,
                clip_id=self.clip_id,
                shape=replace(one.shape, height=high, width=wide),
                resize=resize,
            )
            for one in sampling.windows
        )
        self.sampling = replace(sampling, windows=tuple(own))


def examine(candidates: Sequence[Candidate], config: Config, rules: VideoRules) -> None:
    """Give each candidate its size, windows and captions, or its problem.

    VideotuneError for all captions that the config does not allow to be missing.
    """
    first: dict[str, Candidate] = {}
    refused: list[Candidate] = []
    for candidate in candidates:
        try:
            _examine(candidate, first, config, rules)
            first[candidate.content_id] = candidate
        except ClipProblem as problem:
            candidate.problem = problem
            if problem.reason.endswith("_caption") and config.missing_caption != "skip":
                refused.append(candidate)
    if refused:
        raise VideotuneError(_caption_message(refused))


def _examine(
    candidate: Candidate, first: dict[str, Candidate], config: Config, rules: VideoRules
) -> None:
    """``first`` are the candidates so far that can be used, by the hash of their bytes."""
    if not candidate.file.exists:
        raise ClipProblem(
            "missing_file", f"{candidate.file.listed} names it, but it does not exist"
        )
    twin = first.get(candidate.content_id)
    if twin is not None and candidate.info is not None:
        detail = f"has the same bytes as {twin.relative}"
        with suppress(ClipProblem):  # it has no caption of its own
            if not set(_captions(candidate.file, config)) <= set(twin.written):
                detail += ", whose captions are used; its own differ and are not"
        raise ClipProblem("duplicate", detail)
    if candidate.problem is not None:
        raise candidate.problem
    candidate.sample(config, rules)
    damaged = candidate.scan.damaged_at if candidate.scan is not None else None
    if damaged is not None and damaged < max(candidate.sampling.ends):
        raise ClipProblem(
            "decode_error",
            f"its pictures are damaged at {damaged:.2f} s, inside what would be used",
        )
    candidate.written = _captions(candidate.file, config)


def _captions(file: ClipFile, config: Config) -> tuple[str, ...]:
    """The caption's variants; where none is there and that is allowed, the empty caption or the text for such clips."""
    try:
        if file.text is not None:
            if not any(text.strip() for text in file.text):
                raise ClipProblem("empty_caption", f"{file.listed} gives it no text")
            return file.text
        if file.caption is None:
            raise ClipProblem("missing_caption", file.missing)
        return read_caption(file.caption)
    except ClipProblem as problem:
        if problem.reason in (
            "missing_caption",
            "empty_caption",
        ) and config.missing_caption in ("empty", "text"):
            return (
                (config.missing_caption_text or "",)
                if config.missing_caption == "text"
                else ("",)
            )
        raise


def _caption_message(refused: Sequence[Candidate]) -> str:
    lines = [
        f"  {one.path}: {one.problem.detail}" for one in refused[:10] if one.problem is not None
    ]
    lines += [f"  … and {len(refused) - 10} more"] if len(refused) > 10 else []
    clips = "1 clip has" if len(refused) == 1 else f"{len(refused)} clips have"
    remedy = 'Write them in UTF-8, or set missing_caption to "skip", "empty" or "text" (missing_caption_text).'
    return "\n".join([f"{clips} no usable caption:", *lines, remedy])


REPEATS_LIMIT = 0.2
"""Above this share of repeated frames a clip is warned about."""

JITTER_LIMIT = 0.1
"""Above this share of uneven frames a clip counts as one of variable rate."""

CROP_LIMIT = 0.5
CROP_NOTE = 0.65
"""Below this share of the picture that a crop keeps, a clip is warned about, and it is noted."""

UPSCALE_LIMIT = 1.25
"""Above this a clip that is enlarged is warned about."""

CUT_LIMIT = 0.25
"""Above this share of its time that no window shows, a clip is warned about."""

STILL_LIMIT = 0.5
"""Above this share of frozen or black frames a clip is warned about."""


def account_of(candidate: Candidate, clip: Clip | None, rules: VideoRules) -> dict[str, Any]:
    """What becomes of one file, as ``check --json`` gives it; ``clip`` is what it became, None: it is skipped.

    ``id`` is the hash of its bytes, None where it is skipped. It is ``used`` for training, or ``held_out`` for validation,
    or neither and then ``reason`` (a code) and ``detail`` say why. ``model_frames`` are its frames at the rate of training
    (within max_duration); ``frames`` pixel frames an epoch are in ``windows`` of ``shape``, ``frames_cut`` and
    ``seconds_cut`` of the clip are in no window, ``spans`` are the seconds of each window; ``warnings`` ask for something to
    be done, ``notes`` do not; ``repeats_share`` of the frames repeat the one before; ``speed`` is how fast motion plays
    (1.0: as filmed); ``views_a_pass`` counts repeats; the caller sets ``views``, since it knows the number of steps. An
    image has no rate and no length.
    """
    info = candidate.info
    problem = candidate.problem
    moving = None if info is None or info.still else info
    sampling = (
        FrameSampling(seconds_cut=info.seconds if info else 0.0)
        if clip is None
        else candidate.sampling
    )
    warnings = list[str]()
    notes = list[str]()
    if clip is not None:
        _size_hints(candidate, warnings, notes)
        _time_hints(candidate, rules, warnings, notes)
        _content_hints(candidate, warnings, notes)
        name = Path(candidate.path).stem
        warnings += dict.fromkeys(
            hint for caption in candidate.written for hint in lint(caption, name)
        )
    return {
        "path": candidate.path,
        "id": clip and clip.id,
        "kind": clip and clip.kind,
        "source": clip and clip.source,
        "used": clip is not None and not clip.held_out,
        "held_out": clip is not None and clip.held_out,
        "reason": problem and problem.reason,
        "detail": problem and problem.detail,
        "source_fps": moving and moving.fps,
        "source_frames": info and len(info.ticks),
        "source_seconds": moving and moving.seconds,
        "width": info and info.width,
        "height": info and info.height,
        "model_frames": clip and sampling.frames,
        "windows": len(sampling.windows),
        "spans": [
            [window.start, end]
            for window, end in zip(sampling.windows, sampling.ends, strict=True)
        ],
        "frames": sum(window.shape.frames for window in sampling.windows),
        "shape": clip and str(sampling.windows[0].shape),
        "frames_cut": sampling.frames_cut,
        "seconds_cut": sampling.seconds_cut,
        "repeats_share": sampling.repeats_share,
        "speed": sampling.speed,
        "views_a_pass": 0
        if clip is None or clip.held_out
        else len(sampling.windows) * clip.repeats,
        "views": None,
        "captions": [] if clip is None else list(clip.captions),
        "warnings": warnings,
        "notes": notes,
    }


def _size_hints(candidate: Candidate, warnings: list[str], notes: list[str]) -> None:
    """Pictures that are enlarged, cropped away or distorted; a little of it goes to ``notes``."""
    (high, wide) = candidate.size
    resize = candidate.sampling.windows[0].resize
    width = candidate.media.width
    height = candidate.media.height
    factor = upscale_factor(width, height, candidate.size, resize)
    if factor > 1.005:
        hints = warnings if factor > UPSCALE_LIMIT else notes
        hints.append(f"upscaled {factor:.2g}x: {width}x{height} pixels to {wide}x{high}")
    kept = kept_share(width, height, candidate.size)
    hints = warnings if kept < CROP_LIMIT else notes
    if resize in ("center", "random") and kept < CROP_NOTE:
        hints.append(
            f"the crop keeps {kept:.0%} of the picture: {width}x{height} becomes {wide}x{high}"
        )
    if resize == "pad" and kept < CROP_NOTE:
        hints.append(
            f"black borders fill {1 - kept:.0%} of the frame: {width}x{height} in {wide}x{high}"
        )
    if resize == "stretch" and kept < 0.9:
        warnings.append(f"distorted: {width}x{height} becomes {wide}x{high}")


def _time_hints(
    candidate: Candidate, rules: VideoRules, warnings: list[str], notes: list[str]
) -> None:
    """Frames that repeat, are left out, or are cut; motion that plays at another speed; to ``notes`` what is as asked."""
    info = candidate.media
    sampling = candidate.sampling
    fps = fps_of(candidate.video, rules)
    first = sampling.windows[0]
    if sampling.repeats_share > REPEATS_LIMIT:
        slow = f"{info.fps:.4g} fps is slower than the {fps:.4g} fps of training"
        why = "the clip is shorter than a window" if first.sampling == "hold" else slow
        warnings.append(
            f"{sampling.repeats_share:.0%} of the frames repeat the one before: {why}"
        )
    if info.fps > 3 * fps and first.shape.frames > 1:  # of pictures nothing plays too fast
        warnings.append(
            f"{info.fps:.4g} fps is far above the {fps:.4g} fps of training: most frames are left out"
        )
    if abs(sampling.speed - 1) > 0.005:
        notes.append(f"stretch: motion plays {sampling.speed:.2g}x as fast as filmed")
    most = candidate.video.max_duration
    beyond = max(0.0, info.seconds - most)
    if beyond > 0:
        notes.append(f"{beyond:.2f} of {info.seconds:.2f} s lie beyond max_duration {most:g}")
    cut = sampling.seconds_cut - beyond
    if cut > CUT_LIMIT * (info.seconds - beyond):
        warnings.append(
            f"{cut:.2f} of {info.seconds:.2f} s are in no window; fewer frames or windows=slide show more"
        )
    elif cut * fps > 1 + 1e-6:
        notes.append(f"{cut:.2f} of {info.seconds:.2f} s are in no window")
    if info.unusable:
        notes.append(
            f"{info.unusable} frames before the first keyframe cannot be decoded and are left out"
        )


def _content_hints(candidate: Candidate, warnings: list[str], notes: list[str]) -> None:
    """What the content scan found: nothing moves, one tone, several scenes, the same as another clip."""
    info = candidate.media
    scan = candidate.scan
    if info.interlaced:
        warnings.append(
            "interlaced: each frame holds two moments, seen as combs on what moves; deinterlace it first"
        )
    if info.hdr is not None:
        notes.append(f"high dynamic range ({info.hdr}), tone-mapped to SDR (BT.709)")
    if info.transparent:
        warnings.append("the transparency is left out: what is hidden there will be seen")
    if candidate.duplicate is not None:
        warnings.append(f"shows nearly the same as {candidate.duplicate}")
    if scan is None or info.still:
        return
    if scan.black > STILL_LIMIT:
        warnings.append(f"{scan.black:.0%} of it is black or one flat colour")
    elif scan.frozen > STILL_LIMIT:
        warnings.append(f"{scan.frozen:.0%} of it is frozen: the picture does not change")
    windows = list(zip(candidate.sampling.windows, candidate.sampling.ends, strict=True))
    inside = [
        cut for cut in scan.cuts if any(window.start < cut < end for window, end in windows)
    ]
    if inside:
        at = ", ".join(f"{cut:.2f}" for cut in inside[:4]) + (", …" if len(inside) > 4 else "")
        cuts = "1 cut" if len(inside) == 1 else f"{len(inside)} cuts"
        warnings.append(
            f"{cuts} inside the windows (at {at} s): `videotune dataset split` makes a clip of each scene"
        )
    if scan.jitter > JITTER_LIMIT:
        notes.append(
            f"variable frame rate: {scan.jitter:.0%} of the frames are uneven; shown by their times"
        )
    if scan.damaged_at is not None:
        warnings.append(
            f"the pictures are damaged from {scan.damaged_at:.2f} s on; no window reaches there"
        )


def notes_on_clips(
    candidates: Sequence[Candidate], video: VideoConfig, rules: VideoRules
) -> list[str]:
    """Notes on all clips together: repeats by folders' names, a number of frames that is not the one that was asked for,
    windows that none fills, frame rates, captions that do not differ."""
    folders = dict(
        sorted({candidate.repeats for candidate in candidates if candidate.repeats[0]})
    )
    listed = ", ".join(f"{name} {count}" for name, count in list(folders.items())[:5])
    notes = (
        [f"repeats by folders' names: {listed}{', …' if len(folders) > 5 else ''}"]
        if folders
        else []
    )
    counts = [planned_frames(one, rules) for one in each_count(video)]
    planned = counts[0][0]
    default = VideoConfig().max_frames
    asked = (
        video.frames is not None or video.max_frames != default or keep_every(video, rules) > 1
    )
    moving = [candidate for candidate in candidates if not candidate.media.still]
    notes += [changed for _, changed in counts if changed and asked and moving]
    frames = [
        window.shape.frames for candidate in moving for window in candidate.sampling.windows
    ]
    if max(frames, default=planned) < planned:
        longest = f"the longest window has {max(frames)} (pad_short freeze holds the last frame instead)"
        notes.append(f"no clip is long enough for {planned} frames: {longest}")
    rates = Counter(round(candidate.media.fps, 2) for candidate in moving)
    fps = fps_of(video, rules)
    if len(rates) > 1:
        listed = ", ".join(f"{rate:g} fps ({count})" for rate, count in rates.most_common(5))
        listed += f" and {len(rates) - 5} more" if len(rates) > 5 else ""
        notes.append(
            f"{len(rates)} frame rates are mixed: {listed}; all are shown at {fps:g} fps, at their true speed"
        )
    if rates and median(candidate.media.fps for candidate in moving) < 0.8 * fps:
        notes.append(
            f"most clips are slower than the {fps:g} fps of training: frames are repeated"
        )
    return notes + lint_all({candidate.path: candidate.written for candidate in candidates})
