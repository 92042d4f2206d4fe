"""Candidates: files of datasets on their way to clips, or the reason why one is
skipped.

A candidate gets media info and content scan first, then size, windows and captions.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from videotune.config.data_schema import Dataset, VideoConfig
from videotune.config.schema import Config
from videotune.data.caption_variants import trained_captions
from videotune.data.captions import (
    join_lines,
    read_caption_text,
    split_variants,
)
from videotune.data.clip_file import ClipFile, Role, repeats_of
from videotune.data.clip_sizes import Size, SizeChoices, choose_size
from videotune.data.companion_files import FOLDER_OF_ROLE
from videotune.data.companions import Companion, alpha_mask, check_companion
from videotune.data.content_scan import ContentScan
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_counts import shrink_factor
from videotune.data.frame_sampling import (
    WindowPlacement,
    place_windows,
    without_randomness,
)
from videotune.data.locations import Location
from videotune.data.media_info import MediaInfo
from videotune.data.mirroring import word_against_mirroring
from videotune.data.sound_scan import SoundScan
from videotune.data.sound_windows import mark_sound
from videotune.data.tone_mapping import id_of_pixels
from videotune.errors import VideotuneError
from videotune.model_spec import VideoRules
from videotune.text import counted
from videotune.types import Clip, Pacing


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
    """Captions as they are written; with ``caption_lines`` "variants" each line is one
    of the variants."""

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
        problem = self.problem
        has_windows = bool(self.placement.windows)
        return bool(problem and problem.reason.endswith("_caption") and has_windows)

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

    def place_windows(self, config: Config, rules: VideoRules) -> None:
        """Set the size and the windows; nothing is random for a held-out clip.

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

        height, width = self.size
        companions = sorted(
            (role, companion.file_id) for role, companion in self.companions.items()
        )
        windows = []
        for window in placement.windows:
            shape = replace(window.shape, height=height, width=width)
            windows.append(
                replace(
                    window,
                    clip_id=self.clip_id,
                    shape=shape,
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


def prepare_candidates(
    candidates: Sequence[Candidate], config: Config, rules: VideoRules
) -> None:
    """Set each candidate's size, windows and captions, or its problem.

    Raises:
        VideotuneError: if captions are missing and the config does not allow that.
    """
    first_by_content: dict[str, Candidate] = {}
    for candidate in _originals_first(candidates, config):
        try:
            _prepare(candidate, first_by_content, config, rules)
        except ClipProblem as problem:
            candidate.problem = problem
        else:
            first_by_content[candidate.content_id] = candidate

    without_caption = []
    for candidate in candidates:
        problem_of_file = candidate.problem
        if problem_of_file and problem_of_file.reason.endswith("_caption"):
            without_caption.append(candidate)
    if without_caption and config.missing_caption != "skip":
        others = [
            candidate
            for candidate in candidates
            if candidate.problem is not None
            and not candidate.problem.reason.endswith("_caption")
        ]
        raise VideotuneError(
            caption_message(
                _with_details(without_caption),
                _with_details(others),
                clip_count=len(candidates),
                example=without_caption[0].file.expected_caption,
            )
        )


def _originals_first(
    candidates: Sequence[Candidate], config: Config
) -> list[Candidate]:
    """Return the candidates with the original of several copies before them.

    The original is the copy in the earliest dataset; there, one with a caption; of
    these, the one with the shortest name: "kitten.mp4", not "kitten (1).mp4".
    """
    datasets = list(dict.fromkeys(id(candidate.dataset) for candidate in candidates))
    counts = Counter(candidate.content_id for candidate in candidates)

    def preference(candidate: Candidate) -> tuple[int, bool, int]:
        if counts[candidate.content_id] == 1:
            return datasets.index(id(candidate.dataset)), False, 0
        has_caption = False
        with suppress(ClipProblem):
            has_caption = any(_captions_of(candidate.file, config).texts)
        name_length = len(candidate.relative.name)
        return datasets.index(id(candidate.dataset)), not has_caption, name_length

    return sorted(candidates, key=preference)


def _prepare(
    candidate: Candidate,
    first_by_content: dict[str, Candidate],
    config: Config,
    rules: VideoRules,
) -> None:
    """Set one candidate's companions, size, windows and captions.

    Args:
        candidate: has media info and content scan, or a problem.
        first_by_content: usable candidates before it, by the hash of their bytes.
        config: the run's config.
        rules: frames and sizes that the model accepts.

    Raises:
        ClipProblem: if the candidate cannot be used.
    """
    _refuse_unusable(candidate, first_by_content, config)
    _attach_and_check_companions(candidate, config)
    _fill(candidate, config, rules)


def _refuse_unusable(
    candidate: Candidate, first_by_content: dict[str, Candidate], config: Config
) -> None:
    """Raise ClipProblem for a missing file, a copy, and a file with a problem."""
    if not candidate.file.exists:
        raise ClipProblem(
            "missing_file",
            f"{candidate.file.metadata_row} lists it, but it does not exist",
        )

    # A copy is reported as a duplicate even if it has another problem. Without media
    # info (unreadable under its own suffix) its own problem is reported.
    original = first_by_content.get(candidate.content_id)
    if original is not None and candidate.info is not None:
        raise _duplicate_problem(candidate, original, config)
    if candidate.problem is not None:
        raise candidate.problem


def _attach_and_check_companions(candidate: Candidate, config: Config) -> None:
    """Attach the mask of an alpha channel; raise ClipProblem if a companion that the run
    needs is missing or cannot be used.
    """
    has_mask_file = "loss_mask" in candidate.companions
    if config.loss_mask.is_used and candidate.media.transparent and not has_mask_file:
        mask = alpha_mask(candidate.clip_id, candidate.media)
        candidate.companions["loss_mask"] = mask
    for companion in candidate.companions.values():
        check_companion(companion, candidate.media)
    for role, folder in FOLDER_OF_ROLE.items():
        if role in config.condition_types and role not in candidate.companions:
            raise ClipProblem(
                f"no_{role}",
                f"the run learns from {folder}, but {folder}/ beside videos/ has no file of its name, "
                "and no metadata file names one",
            )


def _fill(candidate: Candidate, config: Config, rules: VideoRules) -> None:
    """Set size, windows and captions of a candidate without a problem so far."""
    candidate.place_windows(config, rules)
    damaged_at = candidate.scan.damaged_at if candidate.scan is not None else None
    if damaged_at is not None and damaged_at < max(candidate.placement.shown_until):
        raise ClipProblem(
            "decode_error",
            f"its frames are damaged from {damaged_at:.2f} s on, within its windows",
        )
    candidate.media.release()
    candidate.captions, candidate.caption_texts = _captions_of(candidate.file, config)


def _duplicate_problem(
    candidate: Candidate, original: Candidate, config: Config
) -> ClipProblem:
    """Build the problem of a file with the same bytes as an earlier one."""
    detail = f"has the same bytes as {original.relative}"
    # Without a caption of its own there is nothing to compare.
    with suppress(ClipProblem):
        captions = _captions_of(candidate.file, config).variants
        if not set(captions) <= set(original.captions):
            detail += (
                ", whose captions are used; its own captions differ and are not used"
            )
    return ClipProblem("duplicate", detail)


class _Captions(NamedTuple):
    """A clip's caption."""

    variants: tuple[str, ...]
    """What a sample may read: it draws one of them."""
    texts: tuple[str, ...]
    """What was written, of which the variants were made."""


def _captions_of(file: ClipFile, config: Config) -> _Captions:
    """Read the variants of a clip's caption, or the config's substitute for a missing
    one.

    Raises:
        ClipProblem: if there is no caption and the config does not allow that.
    """
    try:
        texts = _read_texts(file)
    except ClipProblem as problem:
        is_missing = problem.reason in ("missing_caption", "empty_caption")
        if is_missing and config.missing_caption == "text":
            return _Captions((config.missing_caption_text or "",), ())
        if is_missing and config.missing_caption == "empty":
            return _Captions(("",), ())
        raise

    if config.caption_lines == "join":
        return _Captions(tuple(join_lines(text) for text in texts), texts)
    return _Captions(split_variants("\n".join(texts)), texts)


def _read_texts(file: ClipFile) -> tuple[str, ...]:
    """Read captions from the metadata file if it lists the clip, else from its text
    file.
    """
    if file.metadata_texts is not None:
        if not file.metadata_texts:
            raise ClipProblem(
                "empty_caption", f"{file.metadata_row} has no text for it"
            )
        return file.metadata_texts

    if file.caption_file is None:
        raise ClipProblem("missing_caption", file.missing_detail)
    return (read_caption_text(file.caption_file),)


def caption_message(
    without_caption: Sequence[tuple[str, str]],
    others: Sequence[tuple[str, str]] = (),
    *,
    clip_count: int,
    example: Path,
) -> str:
    """Describe the clips without a usable caption, and what to do.

    Args:
        without_caption: (path, what is wrong with it) of each.
        others: those that would be skipped for another reason.
        clip_count: how many clips there are in all.
        example: the text file that one of them lacks.
    """
    count = len(without_caption)
    lines = ["1 clip has no usable caption:"]
    if count > 1:
        lines = [f"{count} clips have no usable caption:"]
    lines += _listed(without_caption)
    if others:
        lines.append(f"{counted(len(others), 'other file')} cannot be used either:")
        lines += _listed(others)

    skipped = count + len(others)
    lines.append(caption_advice(example))
    if skipped < clip_count:
        lines.append(f"Or go on without these files: --allow-skips {skipped}.")
    lines.append(
        "With --set missing_caption=empty clips without a caption are trained with no words."
    )
    return "\n".join(lines)


def caption_advice(example: Path) -> str:
    """Return how captions get written, with the text file that a clip lacks."""
    return (
        f'Write one for each, in UTF-8: a text file such as {example} with the line "a '
        'kitten walks on grass", or let `videotune caption` write them.'
    )


def _with_details(candidates: Sequence[Candidate]) -> list[tuple[str, str]]:
    """Return the path of each candidate, and what is wrong with it."""
    rows = []
    for candidate in candidates:
        assert candidate.problem is not None
        rows.append((str(candidate.path), candidate.problem.detail))
    return rows


def _listed(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each of the first ten."""
    lines = [f"  {path}: {detail}" for path, detail in rows[:10]]
    if len(rows) > 10:
        lines.append(f"  … and {len(rows) - 10} more")
    return lines
