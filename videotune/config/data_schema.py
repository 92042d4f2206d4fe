"""The sections of the config that say which clips are used, and which of their frames."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from videotune.config.fields import (
    CaptionExtension,
    CaptionSuffix,
    DatasetKind,
    FrameCount,
    Layout,
    Resolution,
    Share,
    data,
    fatal,
    override,
)
from videotune.text import unwrapped


class Section(BaseModel):
    """A part of the config: unknown keys are errors, and so are NaN and infinity.

    A field's docstring is its help.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        strict=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        """Make one line of each field's help: its docstring is wrapped in the code."""
        super().__pydantic_init_subclass__(**keywords)
        for field in cls.model_fields.values():
            if field.description:
                field.description = unwrapped(field.description)
        cls.model_rebuild(force=True)


READ_ALIKE = (
    "trigger",
    "caption_prefix",
    "caption_suffix",
    "caption_extension",
    "file_column",
    "caption_column",
    "frame_folder_fps",
    "resolution",
    "windows",
)
"""Keys of training clips with which validation clips beside them are read too."""


class Dataset(Section):
    """One source of clips."""

    path: str = data()
    """a folder, a zip or tar, a .csv, .jsonl or .parquet of rows, a Hub dataset's id, or
    s3://BUCKET/FOLDER: videos/ + captions/, side-car .txt, metadata
    """
    kind: DatasetKind = data("train")
    """train, validation (measured, never trained) or regularization"""
    repeats: int = data(1, ge=1, le=1_000_000)
    """how often each window of the dataset is shown in an epoch"""
    probability: float = data(1.0, gt=0, le=1)
    """how often its windows are shown beside those of other datasets; 0.5: half as often,
    not mixed with others in a step; times repeats
    """
    file_column: str | None = data(None, min_length=1, max_length=200)
    """the column of the clips' paths in metadata.csv, .jsonl or .parquet or a file of rows,
    or of the clips themselves in Parquet files (default: file_name; of a file of rows also
    video_path, media_path and the like)
    """
    caption_column: str | None = data(None, min_length=1, max_length=200)
    """the column of the captions there (default: text, caption or prompt)"""
    frame_folder_fps: float | None = data(None, gt=0, le=240)
    """a folder of images that are numbered without a gap is a clip, at this frame rate
    (default: each image is a clip of one frame)
    """
    loss_masks: str | None = data(None, min_length=1)
    """the folder of its clips' masks, by the names of the clips (default: the columns
    loss_mask or mask of a metadata file, loss_masks or masks beside videos, or the alpha
    channel); see loss_mask
    """
    max_clips: int | None = data(None, ge=1, le=10**9)
    """most clips of the dataset, chosen evenly in path order (default: all)"""
    from_step: int = data(1, ge=1, le=10**9)
    """the first step that trains on it"""
    until_step: int | None = data(None, ge=1, le=10**9)
    """the last step that trains on it (default: the last of the run)"""
    batch_size: int | None = data(None, ge=1, le=65_536)
    """samples of one forward pass instead of the run's batch_size; not mixed with others
    """
    caption_dropout: Share | None = data(None)
    """its own share of samples with the empty caption, instead of the run's"""
    trigger: str | None = data(None)
    """a word added once to every caption that does not have it"""
    flip: Literal["never", "safe", "always"] = data("never")
    """mirror every second view of a clip; safe: not where its caption speaks of left,
    right or writing; always: all
    """
    caption_prefix: str | None = data(None, min_length=1, max_length=2000)
    """text in front of every caption, after which a space is put if it lacks one"""
    caption_suffix: CaptionSuffix | None = data(None)
    """text behind every caption; a space is put between, unless it begins with one or
    with punctuation
    """
    caption_extension: CaptionExtension = data(".txt")
    """ending of the files that hold the captions, such as .caption or .tags"""
    caption_shuffle: bool = data(False)
    """put the tags of a caption into other orders; see caption_variants"""
    caption_tag_dropout: Annotated[float, Field(ge=0, lt=1)] = data(0.0)
    """share of the tags that are left out of a caption, drawn for each of its variants
    """
    caption_keep_tokens: int = data(0, ge=0, le=1000)
    """caption_shuffle, caption_tag_dropout: number of first tags that stay where they
    are
    """
    caption_separator: str = data(",", min_length=1, max_length=16)
    """what is between the tags of a caption"""
    caption_wildcards: bool = data(False)
    """a caption's {red|blue} becomes one of the texts between the bars, a name between
    double underscores a line of wildcards/NAME.txt in the dataset's folder
    """
    caption_variants: int = data(8, ge=2, le=256)
    """texts that caption_shuffle, caption_tag_dropout and caption_wildcards make of each
    caption, the first without chance; each is encoded once
    """
    caption_weights: (
        Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] | None
    ) = data(None)
    """of several captions of a clip, how often the first, second, … is drawn, the
    others never; a clip with fewer captions draws among those it has (default: alike)
    """
    resolution: Resolution | None = data(None)
    """its own resolution instead of the run's"""
    windows: Layout | None = data(None)
    """its own video_config.windows"""
    loss_weight: float = data(1.0, ge=0)
    """factor of the loss of its samples; 0: the dataset is left out"""
    prior_preservation: bool | None = data(None)
    """regularization: true (default): learn what the base model predicts; false: the
    clips themselves
    """

    @property
    def varies_captions(self) -> bool:
        """Whether several texts are made of a caption."""
        return (
            self.caption_shuffle
            or self.caption_tag_dropout > 0
            or self.caption_wildcards
        )


class VideoConfig(Section):
    """Which frames of a clip are used."""

    max_frames: FrameCount = data(16)
    """most frames of a training window; rounded to the nearest count that the model
    takes
    """
    frames: FrameCount | Annotated[list[FrameCount], Field(min_length=1)] | None = data(
        None
    )
    """frames of a training window, instead of max_frames; a list: windows of every
    count that a clip is long enough for
    """
    strict_frames: bool = data(False)
    """a frame count that the model cannot take is an error, not snapped"""
    min_frames: int | None = data(None, ge=1, le=100_000)
    """shorter clips are skipped (default: the model's smallest count from 5 up)"""
    pad_short: Literal["freeze"] | None = data(None)
    """freeze: clips shorter than a window hold their last frame (default: shorter
    windows)
    """
    frame_sample_strategy: Literal["uniform", "random", "keyframe"] = data("uniform")
    """windows evenly spaced, from random starts, or from keyframes; frames always
    evenly in time
    """
    keyframe_source: Literal["container", "scenes"] = data("container")
    """what a keyframe is: the file's own, or a cut between scenes"""
    windows: Layout = data("chunks")
    """chunks: side by side; head: the first only; slide: overlapping"""
    window_stride: int | None = data(None, ge=1, le=100_000)
    """slide: frames from one window's start to the next (default: half a window)"""
    stretch: bool = data(False)
    """squeeze the whole clip into one window: motion plays faster"""
    target_fps: float | None = data(None, gt=0, le=240)
    """clips are resampled to this rate (default: the model's own)"""
    max_duration: float = data(10.0, gt=0)
    """seconds of each clip that are used, at most"""
    spatial_compression_ratio: int | None = data(None, ge=1, le=1024)
    """pixels per latent cell; k times the VAE's own shrinks clips by k (default: the
    VAE's)
    """
    temporal_compression_ratio: int | None = data(None, ge=1, le=1024)
    """frames per latent frame; k times the VAE's own keeps every k-th (default: the
    VAE's)
    """
    video_batch_size_multiplier: float = fatal(0.5, gt=0, le=10**6)
    """where images and videos are mixed, video steps take batch_size times this"""
    temporal_augmentation: bool = data(False)
    """windows begin up to half their length off, and neighbouring frames swap (p = 0.1)
    """
    variants: int = data(4, ge=0, le=10_000)
    """encoded variants kept of each window that is augmented; 0: the VAE stays loaded
    and encodes each sample in its step
    """
    use_temporal_attention: bool = override(True)
    """false: while training, frames attend only to themselves and the text; less time a
    step
    """
    frame_dropout_probability: float = override(0.0, ge=0, le=0.3)
    """share of latent frames, never the first, fed as noise and left out of the loss"""
    temporal_consistency_weight: float = override(0.0, ge=0, le=2)
    """weight of the error's change from frame to frame in the loss"""
