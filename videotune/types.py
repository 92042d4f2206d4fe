"""The nouns of videotune, and the shape legend that every docstring uses.

Legend: **B** batch, **C** latent channels, **F** latent frames, **H W** latent rows and
columns, **T** pixel frames, **L** text tokens or latents of sound, **D** text width. Pixel frames are uint8
(T, H, W, 3) on the data side and float (B, 3, T, H, W) in [-1, 1] on the model side.
Latents are always normalised, (B, C, F, H, W), and float32 where losses are taken.

A run learns video, sound or both (the config's ``generate``). *Learnt* is what is noised
and has a loss; *given* is what the network is fed clean and without a loss: a video or a
sound that is not learnt, or cells of a video that is (a first frame, what a mask leaves).
Fields call it conditioning (``conditioning_mask``, ``is_conditioning``). *Shown* is what
the network reads on channels that it has in addition to its latents'. ``docs/glossary.md``
has the other words of this code.

``t`` lies in [0, 1]: 0 is data, 1 is noise. For v-prediction t is k / (K - 1) with an
integer timestep k; for flow matching it is the noise level itself. The timestep input
of the network (k, 1000 t, …) is the family's business, inside ``predict``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.lazy import torch

if TYPE_CHECKING:  # importing this module must not import torch
    from torch import Tensor, nn


Networks = Mapping[str, "nn.Module"]
"""Denoisers by expert name."""

LogFn = Callable[[str], None]
"""Prints a sentence for the user."""

FillFn = Callable[["nn.Module"], object] | None
"""Puts tensors in the place of a network's parameters, which are on the meta device.

None: read its weights.
"""


@dataclass(frozen=True, order=True)
class ClipShape:
    """The shape of one sample in pixels: frames × height × width, at fps frames a
    second. Each bucket has one.
    """

    frames: int
    height: int
    width: int
    fps: float
    sound: bool = False
    """Whether its samples have sound."""

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


@dataclass(frozen=True, order=True)
class Pacing:
    """How often and when the clips of a dataset are shown; their repeats come on top."""

    batch_size: int = 0
    """Samples of one forward pass. 0: the run's."""
    probability: float = 1.0
    """Factor of how often they are shown."""
    from_step: int = 1
    """The first step that may show them."""
    until_step: int = 0
    """The last step that may show them. 0: there is none."""


@dataclass(frozen=True, slots=True)
class Clip:
    """One file of the user's data."""

    id: str
    """Hash of the file's bytes and, if it is HDR, of the tone mapping's version."""
    path: str
    source: str
    """The video that it was cut from."""
    captions: tuple[str, ...]
    held_out: bool = False
    kind: str = "train"
    """Its dataset's: "train" (some may be held out), "validation" or "regularization"."""
    repeats: int = 1
    """How often each of its windows is in its bucket, so how often an epoch shows it."""
    loss_weight: float = 1.0
    """Factor of its loss."""
    target: str = "clip"
    """What a regularization clip is trained towards: "clip", or "base", the base
    model's own prediction.
    """
    still: bool = False
    """Whether it is an image."""
    caption_weights: tuple[float, ...] = ()
    """Weights of its captions, in their order. Empty: all alike."""
    caption_dropout: float | None = None
    """Share of its samples with the empty caption. None: the run's."""
    pacing: Pacing = Pacing()

    @property
    def prior_preservation(self) -> bool:
        """Whether the target of its samples is the base model's own prediction."""
        return self.kind == "regularization" and self.target == "base"


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a clip that samples are taken from; the unit of the schedule.

    Its random parts (start, frame times, crop) are settled by a ``FrameSample``.
    """

    clip_id: str
    start: float
    """First second of the window within the clip."""
    end: float
    """Second that bounds the frame times; what it means depends on ``sampling``.

    "even": frame i is at start + i · (end - start) / frames. "start": the start is drawn
    so that frames / fps end here at the latest. "frames": all random times lie before
    it. "hold": the time of the held frame. The second at which the last shown frame ends
    is in ``WindowPlacement.shown_until``.
    """
    shape: ClipShape
    """The shape of its samples."""
    sampling: str = "even"
    """How frame times are chosen: "even" (spread over the window), "hold" (at shape.fps
    from its start, the last frame held when the clip ends), "start" (at shape.fps from
    a random start), "frames" (random times, in order).
    """
    swaps: bool = False
    """Whether neighbouring frames may change places."""
    resize: str = "center"
    """How a frame gets its size: "center" or "random" crop, "pad" or "stretch"."""
    flip: bool = False
    """Whether every second variant is mirrored, left to right."""
    companions: tuple[tuple[str, str], ...] = ()
    """(role, id) of each file that belongs to the clip, such as its loss mask."""

    @property
    def id(self) -> str:
        """A short, stable, readable name: the clip, the second at which it starts, and
        the shape.
        """
        return f"{self.clip_id[:12]}@{self.start:.3f}+{self.shape}"

    def companion(self, role: str) -> str | None:
        """Return the id of the file in a role, or None if the clip has none."""
        return dict(self.companions).get(role)

    @property
    def keeps_time(self) -> bool:
        """Whether its samples run as filmed: frame after frame, at the clip's speed."""
        if self.swaps or self.sampling == "frames":
            return False
        seconds = self.shape.frames / self.shape.fps
        return self.sampling != "even" or abs(self.end - self.start - seconds) < 1e-3

    @property
    def varies(self) -> bool:
        """Whether two views of it can show different pixels."""
        return (
            self.swaps
            or self.flip
            or self.sampling in ("start", "frames")
            or self.resize == "random"
        )


DETERMINISTIC_VARIANT = -1
"""The variant without random frames or crop, which validation and sample metrics read.
"""


@dataclass(frozen=True)
class FrameSample:
    """The frames that one variant of a window shows. Together with the file it decides all
    pixels.
    """

    window: Window
    variant: int
    times: tuple[float, ...]
    """Seconds of the clip (T,), in the order shown."""
    crop_position: tuple[float, float] = (0.5, 0.5)
    """Position of a crop within the room that it has, (down, right), each in [0, 1]:
    (0.5, 0.5) is the centre.
    """
    flipped: bool = False
    """Whether the frames are mirrored, left to right."""


@dataclass(frozen=True)
class Conditioning:
    """What the denoiser reads in addition to the noisy latents."""

    text: Tensor
    """Text states (B,L,D)."""
    text_mask: Tensor | None = None
    """(B,L), or None if all tokens count."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs, by the family's own names."""
    text_lengths: tuple[int, ...] | None = None
    """Number of each sample's text states, if the network reads them without a mask; what
    follows them in ``text`` is padding. None: the network reads all of ``text``.
    """

    def map(self, fn: Callable[[Tensor], Tensor]) -> Conditioning:
        """Return the same conditioning with ``fn``, which keeps the samples and their
        order, applied to each tensor.
        """
        return replace(
            self,
            text=fn(self.text),
            text_mask=None if self.text_mask is None else fn(self.text_mask),
            extras={name: fn(tensor) for name, tensor in self.extras.items()},
        )

    def take(self, rows: Sequence[int]) -> Conditioning:
        """Return the conditioning of some samples, without padding that none of them
        needs.
        """
        taken = self.map(lambda x: take_rows(x, rows))
        if self.text_lengths is None:
            return taken
        lengths = tuple(self.text_lengths[row] for row in rows)
        text = taken.text[:, : max(lengths)]
        return replace(taken, text=text, text_lengths=lengths)


@dataclass(frozen=True)
class Sound:
    """The sound of samples, with what is drawn for it.

    Its latents have the form of a video's of one row and column, so that the same
    equations hold.
    """

    x0: Tensor
    """Clean latents (B,C,L,1,1)."""
    noise: Tensor
    """(B,C,L,1,1)."""
    t: Tensor
    """Noise levels (B,), 0 where it is given."""
    is_conditioning: bool = False
    """Whether it is fed clean and not learnt."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Sound:
        """Return the same sound with ``fn`` applied to each tensor."""
        return replace(self, x0=fn(self.x0), noise=fn(self.noise), t=fn(self.t))


@dataclass(frozen=True)
class Velocity:
    """The velocities of samples' video and sound."""

    video: Tensor
    """(B,C,F,H,W)."""
    sound: Tensor | None = None
    """(B,C,L,1,1), or None without sound."""


@dataclass(frozen=True)
class Batch:
    """Samples of one bucket."""

    x0: Tensor
    """Clean latents (B,C,F,H,W)."""
    conditioning_mask: Tensor
    """(B,1,F,1 or H,1 or W) bool: cells that are fed clean."""
    dropped_frames_mask: Tensor
    """(B,1,F,1,1) bool: frames that are fed as pure noise."""
    loss_mask: Tensor
    """(B,1,F,1 or H,1 or W): weight of each cell in the loss, 0 where it is
    conditioning, dropped or masked.
    """
    loss_weight: Tensor
    """(B,): factor of each sample's loss."""
    conditioning: Conditioning
    captions: tuple[str, ...]
    window_ids: tuple[str, ...]
    fps: Tensor
    """(B,)."""
    prior_preservation: tuple[bool, ...]
    """Samples whose target is the base model's own prediction."""
    has_clean_frames: bool = True
    """Whether ``conditioning_mask`` may hold True. False saves asking the device."""
    sound: Sound | None = None
    """None: the samples have no sound."""
    video_is_conditioning: bool = False
    """Whether the whole video is fed clean, and only the sound is learnt."""

    @classmethod
    def of(cls, x0: Tensor, conditioning: Conditioning, **fields: Any) -> Batch:
        """Build a batch whose frames are all noised and weighted alike, except for the
        ``fields`` that are passed.
        """
        samples = len(x0)
        no_frames = x0.new_zeros(samples, 1, x0.shape[2], 1, 1).bool()
        defaults: dict[str, Any] = {
            "fps": x0.new_ones(samples),
            "conditioning_mask": no_frames,
            "dropped_frames_mask": no_frames,
            "loss_mask": (~no_frames).float(),
            "loss_weight": x0.new_ones(samples),
            "captions": ("",) * samples,
            "window_ids": ("",) * samples,
            "prior_preservation": (False,) * samples,
        }
        return cls(x0=x0, conditioning=conditioning, **(defaults | fields))

    def __len__(self) -> int:
        return self.x0.shape[0]

    def map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """Return the same batch with ``fn``, such as a copy to a device, applied to each
        tensor; ``fn`` keeps the samples and their order.
        """
        return replace(
            self,
            x0=fn(self.x0),
            conditioning_mask=fn(self.conditioning_mask),
            dropped_frames_mask=fn(self.dropped_frames_mask),
            loss_mask=fn(self.loss_mask),
            loss_weight=fn(self.loss_weight),
            conditioning=self.conditioning.map(fn),
            fps=fn(self.fps),
            sound=None if self.sound is None else self.sound.map(fn),
        )

    def take(self, rows: Sequence[int]) -> Batch:
        """Return some of the samples, in the order of ``rows``."""
        taken = self.map(lambda x: take_rows(x, rows))
        return replace(
            taken,
            conditioning=self.conditioning.take(rows),
            captions=tuple(self.captions[row] for row in rows),
            window_ids=tuple(self.window_ids[row] for row in rows),
            prior_preservation=tuple(self.prior_preservation[row] for row in rows),
        )

    def split(self, size: int) -> list[Batch]:
        """Return micro-batches of at most ``size`` samples, in order."""
        if size >= len(self):
            return [self]
        count = len(self)
        begins = range(0, count, size)
        return [self.take(range(begin, min(begin + size, count))) for begin in begins]


def take_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows of a tensor; rows that follow each other share its memory."""
    begin = rows[0]
    if list(rows) == list(range(begin, begin + len(rows))):
        return x[begin : begin + len(rows)]
    # By plain numbers: an index tensor would make the host wait for the device.
    return torch.stack([x[row] for row in rows])


@dataclass(frozen=True)
class NoisePath:
    """The path x_t = alpha·x0 + sigma·noise and its velocity v = d_alpha·x0 +
    d_sigma·noise.

    Each is (B,1,1,1,1) float32, with alpha·d_sigma - sigma·d_alpha = 1.
    """

    alpha: Tensor
    sigma: Tensor
    d_alpha: Tensor
    d_sigma: Tensor


@dataclass(frozen=True)
class LossOutput:
    """The loss of a batch."""

    loss: Tensor
    """Mean of ``per_sample_loss`` (), with its graph."""
    mse: Tensor
    """Squared error between the predicted v and its target, averaged over the cells of
    each sample that count (B,), detached. Unlike the loss it has no weights of noise
    levels and samples, so that runs with other settings compare. Of the video; if only
    sound is learnt, of the sound.
    """
    per_sample_loss: Tensor
    """(B,), detached."""
    t: Tensor
    """Noise levels (B,) at which ``mse`` was taken."""
    sound_mse: Tensor | None = None
    """The same error of the sound (B,), if video and sound are learnt; else None."""


@dataclass(frozen=True)
class LatentDistribution:
    """A clip's latents as a Gaussian, normalised."""

    mean: Tensor
    """(C,F,H,W)."""
    logvar: Tensor | None = None
    """(C,F,H,W), or None if only the mean trains."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs that are encoded of the clip's pixels, by the family's own names.
    """
    start: Tensor | None = None
    """(C,1,H,W): latents of a start image, in the place of the clip's own first frame.
    """
    known: Tensor | None = None
    """(F,H,W) bool: cells of ``mean`` that a sample is given clean. None: at most the
    first frame.
    """
    sound: Tensor | None = None
    """(C,L): latents of the sound that a sample is given."""


@dataclass(frozen=True)
class ConditionPixels:
    """The pixels that a sample is shown of its clip."""

    frames: Tensor
    """(3,T,H,W) in [-1, 1]; only what is known is read."""
    known: Tensor
    """(T,H,W) bool."""
    control: Tensor | None = None
    """(3,T,H,W) in [-1, 1]: a video that guides the pixels that are not known."""


@dataclass(frozen=True)
class TextPart:
    """A text encoder in memory, frozen unless it is made to train, with its tokenizer."""

    tokenizer: Any
    encoder: nn.Module


@dataclass(frozen=True)
class WeightDtypes:
    """Quantization of frozen weights, by names of ``memory/quantization.py``.

    None: the run's dtype.
    """

    transformer: str | None = None
    text_encoder: str | None = None

    matmul: str | None = None
    """Dtype of the products of the transformer's blocks (``memory/eight_bit_matmul.py``)."""

    def of_text(self, dtype: torch.dtype) -> str:
        """Return a name for what a text encoder computes with; its states differ by it."""
        if not self.text_encoder:
            return str(dtype)
        return f"{dtype}-{self.text_encoder}"


PLAIN_WEIGHTS = WeightDtypes()


@dataclass(frozen=True)
class SampleRequest:
    """What to sample."""

    shape: ClipShape
    steps: int
    guidance: float
    seeds: tuple[int, ...]
    """One sample is drawn for each."""
    shift: float | None = None
    """Timestep shift. None: the checkpoint's own."""
    guidance_2: float | None = None
    """Guidance of the second expert. None: as of the first."""
    scheduler: str | None = None
    """A scheduler's class in diffusers. None: the checkpoint's own."""
    guidance_rescale: float = 0.0
    """How far guidance is scaled back to the deviation of the prompt's prediction."""
    first: Tensor | None = None
    """Clean first latent frames (B,C,1,H,W), in the place of noise."""
    known: Tensor | None = None
    """Latents (B,C,F,H,W) of which the cells of ``known_mask`` are given clean."""
    known_mask: Tensor | None = None
    """(B,1,F,H,W) bool."""
    sound: Tensor | None = None
    """Latents (B,C,L) of the sound that samples are given."""


@dataclass(frozen=True)
class BasePlace:
    """A base model on the disk."""

    name: str
    """The name by which the user asked for it."""
    folder: Path
    """Its folder in diffusers layout."""
