"""Candidates: files of datasets on their way to clips, or the reason why one is
skipped.

A candidate gets media info and content scan first, then size, windows and captions.
"""

from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from videotune.config.data_schema import Dataset, VideoConfig
from videotune.config.schema import Config
from videotune.data.caption_variants import trained_captions
from videotune.data.clip_file import ClipFile, Role, repeats_of
from videotune.data.clip_sizes import Size, SizeChoices, choose_size
from videotune.data.companions import Companion
from videotune.data.content_scan import ContentScan
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_counts import shrink_factor
from videotune.data.locations import Location
from videotune.data.media_info import MediaInfo
from videotune.data.mirroring import word_against_mirroring
from videotune.data.sound_scan import SoundScan
from videotune.data.sound_windows import mark_sound
from videotune.data.tone_mapping import id_of_pixels
from videotune.data.window_placement import (
    WindowPlacement,
    place_windows,
    without_randomness,
)
from videotune.model_spec import VideoRules
from videotune.types import Clip, ClipShape, Pacing


@dataclass(slots=True)
class Candidate:
    """A file of a dataset that becomes a clip if it has no problem."""

    file: ClipFile
    dataset: Dataset
    location: Location

    size_choices: SizeChoices
    """The dataset's resolution."""

    video: VideoConfig
    """The dataset's frames and windows."""

    content_id: str = ""
    """Hash of the file's bytes, or of those of a folder's frames."""

    info: MediaInfo | None = None
    scan: ContentScan | None = None
    sound: SoundScan | None = None
    """Scan of its sound, if the run reads sound and there is a track."""

    problem: ClipProblem | None = None

    companions: dict[Role, Companion] = field(default_factory=dict)
    """The files that belong to it and that the config uses, by their role."""

    captions: tuple[str, ...] = ()
    """Variants of the caption, without the trigger."""

    caption_texts: tuple[str, ...] = ()
    """Captions as they are written, for notes only; with ``caption_lines`` "variants"
    each line is one of the variants."""

    size: Size = (1, 1)
    placement: WindowPlacement = field(default_factory=WindowPlacement)

    source: str = ""
    """Name of the video that the clip was cut from."""

    held_out: bool = False

    word_against_flip: str = ""
    """A word of its captions because of which it is not mirrored."""

    looks_like: str | None = None
    """Path of another clip that looks nearly the same. That is only a warning: both
    stay in training.
    """

    @property
    def alpha_is_mask(self) -> bool:
        """Whether the clip's alpha channel is its loss mask."""
        mask = self.companions.get("loss_mask")
        return mask is not None and mask.is_alpha

    @property
    def lacks_only_caption(self) -> bool:
        """Whether it would be used if it had a caption."""
        return lacks_only_caption(self.problem, bool(self.placement.windows))

    @property
    def path(self) -> str:
        """File path."""
        return str(self.file.path)

    @property
    def relative(self) -> PurePosixPath:
        """File path in its dataset."""
        return PurePosixPath(self.file.path.relative_to(self.location.root).as_posix())

    @property
    def folder_repeats(self) -> tuple[str, int]:
        """Folder whose name sets the repeats, and the number (see ``repeats_of``)."""
        if self.dataset.kind == "validation":
            return "", 1
        return repeats_of(self.location.root, self.file.path)

    @property
    def media(self) -> MediaInfo:
        """Media info of a candidate without a problem."""
        assert self.info is not None
        return self.info

    @property
    def sound_problem(self) -> str:
        """Why a run that reads sound cannot use this clip's; "" if it can."""
        if self.media.still:
            return "an image has no sound"
        if self.media.sound is None:
            return self.media.unusable_sound or "it has no sound track"
        if self.sound is None:
            return "its sound was not read"
        if self.sound.problem:
            return self.sound.problem
        return "its sound track is silent" if self.sound.is_silent else ""

    @property
    def clip_id(self) -> str:
        """Id of the clip's pixels."""
        return id_of_pixels(self.content_id, self.media)

    def to_clip(self, seed: int) -> Clip:
        """Build the clip of a candidate without a problem; the seed is the run's."""
        dataset = self.dataset
        captions, caption_weights = trained_captions(
            self.captions,
            dataset,
            seed,
            fixed=self.held_out or dataset.kind == "validation",
            wildcards=self.location.wildcards,
        )
        preserves_prior = (
            dataset.kind == "regularization" and dataset.prior_preservation is not False
        )

        return Clip(
            id=self.clip_id,
            path=self.path,
            source=self.source,
            captions=captions,
            held_out=self.held_out,
            kind=dataset.kind,
            repeats=dataset.repeats * self.folder_repeats[1],
            loss_weight=dataset.loss_weight,
            caption_weights=caption_weights,
            caption_dropout=dataset.caption_dropout,
            pacing=Pacing(
                batch_size=dataset.batch_size or 0,
                probability=dataset.probability,
                from_step=dataset.from_step,
                until_step=dataset.until_step or 0,
            ),
            target="base" if preserves_prior else "clip",
            still=self.media.still,
        )

    def set_size_and_windows(self, config: Config, rules: VideoRules) -> None:
        """Set the size and the windows; nothing is random for a held-out clip.

        Called when a candidate is prepared, before any clip is held out, and again for those
        that are (``compare_clips``).

        Raises:
            ClipProblem: "too_short" if no window fits; "no_sound" or "sound_speed" if
                the run needs a sound that the clip does not have.
        """
        video = self.video
        resize = config.resize
        if self.held_out:
            video = without_randomness(video)
            if resize == "random":
                resize = "center"

        self.size = choose_size(
            self.media.width,
            self.media.height,
            choices=self.size_choices,
            rules=rules,
            shrink=shrink_factor(video, rules),
        )

        samples_scenes = (
            video.frame_sample_strategy == "keyframe"
            and video.keyframe_source == "scenes"
        )
        cuts = self.scan.cuts if samples_scenes and self.scan else ()
        placement = place_windows(self.media, video, rules, cuts)
        if config.reads_sound:
            placement = mark_sound(placement, config, self.sound_problem)

        # The placed windows have neither the clip's id nor its size yet.
        height, width = self.size
        companions = sorted(
            (role, companion.file_id) for role, companion in self.companions.items()
        )
        windows = []
        shapes: dict[ClipShape, ClipShape] = {}  # windows of one shape share the object
        for window in placement.windows:
            if window.shape not in shapes:
                shape = replace(window.shape, height=height, width=width)
                shapes[window.shape] = shape
            windows.append(
                replace(
                    window,
                    clip_id=self.clip_id,
                    shape=shapes[window.shape],
                    resize=resize,
                    companions=tuple(companions),
                )
            )
        self.placement = replace(placement, windows=tuple(windows))

    def mirror(self) -> None:
        """Let every second variant of the windows be mirrored, if the dataset wants it
        and the captions allow it.
        """
        if self.dataset.flip == "never" or self.held_out:
            return
        if self.dataset.flip == "safe":
            self.word_against_flip = word_against_mirroring(self.captions)
        if not self.word_against_flip:
            windows = [replace(window, flip=True) for window in self.placement.windows]
            self.placement = replace(self.placement, windows=tuple(windows))


def lacks_only_caption(problem: ClipProblem | None, has_windows: bool) -> bool:
    """Return whether a file would be used if it had a caption."""
    return bool(problem and problem.reason.endswith("_caption") and has_windows)
