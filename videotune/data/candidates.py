"""Files of datasets on their way to clips: media info, content scan, windows, size and captions, or why one is skipped."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from videotune.config.data_schema import Dataset, VideoConfig
from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.files import digest
from videotune.types import Clip, VideoRules, Window

from .buckets import Choices, Size, choose_size
from .captions import read_caption, with_trigger
from .content_scan import ContentScan
from .decode import TONE_MAPPING_VERSION
from .file_checks import ClipProblem
from .frame_sampling import FrameSampling, sample_frames, shrink_factor, without_randomness
from .layouts import ClipFile, repeats_of
from .locations import Location
from .media_info import MediaInfo


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
        return repeats_of(self.location.root, self.file.path) if self.dataset.kind != "validation" else ("", 1)

    @property
    def media(self) -> MediaInfo:
        """The media info of a candidate without a problem."""
        assert self.info is not None
        return self.info

    @property
    def clip_id(self) -> str:
        """Names the clip's pixels: the hash of its bytes, and where they are tone-mapped how."""
        own = self.content_id
        return own if self.media.hdr is None else digest([own, "tone-mapped", TONE_MAPPING_VERSION])

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
            target="base" if dataset.kind == "regularization" and dataset.prior_preservation is not False else "clip",
            still=self.media.still,
        )

    def sample(self, config: Config, rules: VideoRules) -> None:
        """Choose the size and the windows, random ones only if it is not held out; ClipProblem where none has room."""
        info, shrink = self.media, shrink_factor(self.video, rules)
        video = without_randomness(self.video) if self.held_out else self.video
        resize = "center" if self.held_out and config.resize == "random" else config.resize
        self.size = choose_size(info.width, info.height, self.choices, rules, shrink)
        cuts: tuple[float, ...] = ()
        if video.frame_sample_strategy == "keyframe" and video.keyframe_source == "scenes" and self.scan is not None:
            cuts = self.scan.cuts
        sampling = sample_frames(info, video, rules, cuts)
        self.sampling = replace(sampling, windows=tuple(self._own(window, resize) for window in sampling.windows))

    def _own(self, window: Window, resize: str) -> Window:
        shape = replace(window.shape, height=self.size[0], width=self.size[1])
        return replace(window, clip_id=self.clip_id, shape=shape, resize=resize)


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


def _examine(candidate: Candidate, first: dict[str, Candidate], config: Config, rules: VideoRules) -> None:
    """``first`` are the candidates so far that can be used, by the hash of their bytes."""
    if not candidate.file.exists:
        raise ClipProblem("missing_file", f"{candidate.file.listed} names it, but it does not exist")
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
        raise ClipProblem("decode_error", f"its pictures are damaged at {damaged:.2f} s, inside what would be used")
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
        if problem.reason in ("missing_caption", "empty_caption") and config.missing_caption in ("empty", "text"):
            return (config.missing_caption_text or "",) if config.missing_caption == "text" else ("",)
        raise


def _caption_message(refused: Sequence[Candidate]) -> str:
    lines = [f"  {one.path}: {one.problem.detail}" for one in refused[:10] if one.problem is not None]
    lines += [f"  … and {len(refused) - 10} more"] if len(refused) > 10 else []
    clips = "1 clip has" if len(refused) == 1 else f"{len(refused)} clips have"
    remedy = 'Write them in UTF-8, or set missing_caption to "skip", "empty" or "text" (missing_caption_text).'
    return "\n".join([f"{clips} no usable caption:", *lines, remedy])
