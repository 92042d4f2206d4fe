"""What a sample is given clean: parts of its clip, encoded so that they know nothing of
the rest.

The latents of a whole clip know hidden pixels: a VAE mixes frames and neighbourhoods.
Latents cut out of them would show a network in training what it never gets when it
samples. How a condition enters differs between networks (``ModelSpec.conditions``):

In place: its latents replace those of the sample. The last frame, a suffix and a masked
region are encoded on their own, with the hidden pixels replaced: before a suffix its
first frame is repeated, and a hole is grey. Only those cells of a region count that no
hidden pixel reaches. A first frame and a prefix are cut out of the clip's latents, because
the VAE is causal: they depend on no later frame.

Appended ("context"): its latents are further tokens. References, and in LTX-Video the
last frame and a suffix, are encoded by themselves.

On channels: channels of the network show latents of the clip with grey in the place of
all that is hidden, and a mask, as its pipeline makes them.

A mask without a file hides a drawn box, a rectangle of the picture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from videotune.config.schema import Config
from videotune.config.sections import Condition
from videotune.data.media_info import MediaInfo
from videotune.diffusion.regions import cells_without
from videotune.files import digest
from videotune.latent_cache.clip_ends import (
    REFERENCE,
    latents_of_end,
    latents_of_reference,
    pixels_of_end,
)
from videotune.latent_cache.entry import TensorForm
from videotune.latent_cache.keys import SCHEMA, CacheKeys
from videotune.model_spec import ModelSpec, VideoRules
from videotune.models.base import DiffusersModel
from videotune.rng import generator_for
from videotune.types import ConditionPixels, FrameSample, Window

ENCODED_ALONE = ("last_frame", "suffix", "mask")
"""Conditions, in place or appended, that are encoded by themselves into a cache entry of
their own. First frames and prefixes are cut out of the clip's latents.
"""

CHANNELS = "channels"
"""Type of a ``SeparateCondition`` of all conditions that channels show together."""

SOUND = "sound"
"""Type of a ``SeparateCondition`` of the clip's sound."""

LATENTS = "latents"
KNOWN = "known"
"""Names of the tensors of an encoded condition."""

SMALLEST_BOX = 0.3
LARGEST_BOX = 0.7
"""Sides of a drawn box, as shares of the picture's."""


@dataclass(frozen=True)
class SeparateCondition:
    """A condition of a window's variant, which is encoded on its own."""

    window: Window
    variant: int
    type: str
    latent_frames: int = 1
    box: int = 0
    """Number of a drawn box, for a mask of a clip without a mask file."""
    on_channels: tuple[tuple[str, int], ...] = ()
    """For "channels", the types of the conditions, sorted, with the latent frames of
    each.
    """

    @property
    def text(self) -> str:
        """What it shows, for messages."""
        return ", ".join(name for name, _ in self.on_channels) or self.type

    @property
    def hides(self) -> bool:
        """Whether a mask hides a part of it."""
        return self.type == "mask" or "mask" in dict(self.on_channels)

    @property
    def draws_box(self) -> bool:
        """Whether it hides a drawn box."""
        return self.hides and self.window.companion("mask") is None


def condition_samples(
    window: Window, variant: int, condition: Condition, boxes: int, spec: ModelSpec
) -> list[SeparateCondition]:
    """Return the samples of a condition that are encoded on their own: none, one, or one
    for each box.

    A condition on channels has none here, see ``channel_samples``.
    """
    if condition.type == REFERENCE:
        count = latents_of_reference(condition.latent_frames, window.shape, spec)
        return [SeparateCondition(window, variant, REFERENCE, count)]
    is_still = window.shape.frames == 1
    if condition.type not in ENCODED_ALONE or is_still:
        return []
    latent_frames = condition.frames_given if condition.type == "suffix" else 1
    sample = SeparateCondition(window, variant, condition.type, latent_frames)
    return _with_boxes(sample, boxes)


def _with_boxes(sample: SeparateCondition, boxes: int) -> list[SeparateCondition]:
    """Return a sample once for each box that it may hide, or once if it draws none."""
    if not sample.draws_box:
        return [sample]
    return [replace(sample, box=number) for number in range(boxes)]


def num_boxes(config: Config) -> int:
    """Return how many boxes are drawn for a window's variant, of which each sample hides
    one: as many as a window has variants, since both say how much of the random parts is
    worth keeping.
    """
    return max(1, config.video_config.variants)


def channel_samples(
    window: Window,
    variant: int,
    shown_types: frozenset[str],
    config: Config,
    boxes: int,
) -> list[SeparateCondition]:
    """Return what channels show of a window: one sample, or one for each box.

    Args:
        window: the window.
        variant: the window's variant.
        shown_types: types of the conditions.
        config: gives the latent frames of a prefix or suffix.
        boxes: number of boxes of a clip without a mask file.
    """
    latent_frames: dict[str, int] = {
        item.type: item.frames_given for item in config.conditions
    }
    # A first frame is not among the config's conditions, and other types have no number.
    counts = tuple((name, latent_frames.get(name, 1)) for name in sorted(shown_types))
    return _with_boxes(
        SeparateCondition(window, variant, CHANNELS, on_channels=counts), boxes
    )


def shown_on_channels(
    condition_types: frozenset[str], window: Window, spec: ModelSpec
) -> frozenset[str]:
    """Return the types of the conditions that channels show of a window."""
    shown_types = frozenset(filter(spec.is_on_channels, condition_types))
    # Of a still, channels show only the conditions that are encoded together with its
    # latents, into one entry.
    is_still = window.shape.frames == 1
    return shown_types & spec.cached_with_latents if is_still else shown_types


def channel_sets(config: Config, spec: ModelSpec) -> list[frozenset[str]]:
    """Return the sets of conditions that channels may show together in a run and that
    are encoded on their own.
    """
    shares = config.condition_shares
    sets: list[frozenset[str]] = [frozenset()]
    for name in sorted(filter(spec.is_on_channels, shares)):
        sets_with_it = [types | {name} for types in sets]
        if shares[name] >= 1:
            sets = sets_with_it
        elif shares[name] > 0:
            sets += sets_with_it
    return [types for types in sets if spec.need_own_entry(types)]


def condition_key(keys: CacheKeys, sample: SeparateCondition) -> str:
    """Return the key of a condition in the cache."""
    frames = keys.frame_sample(sample.window, sample.variant)
    if sample.type == SOUND:
        return keys.sound_key(frames)
    # What decides the pixels in addition to the clip and the condition's type.
    made_with: list[object] = []
    if sample.draws_box:
        made_with = ["box", keys.seed, sample.window.id, sample.variant, sample.box]
    elif sample.hides:
        made_with = ["file", sample.window.companion("mask")]
    elif sample.type == REFERENCE:
        made_with = ["file", sample.window.companion("reference")]
    condition: list[object] = [sample.type, sample.latent_frames, made_with]
    if sample.type == CHANNELS:
        condition += [sample.on_channels, _control_of(sample)]
    if sample.type == CHANNELS and not sample.on_channels:
        # Grey of a shape, the same for all clips.
        shape = sample.window.shape
        condition += [shape.frames, shape.height, shape.width]
        return digest({"schema": SCHEMA, "condition": condition, "vae": keys.vae})
    content = {
        "schema": SCHEMA,
        "condition": condition,
        "latents": keys.latents_key(frames),
    }
    return digest(content)


def _control_of(sample: SeparateCondition) -> str | None:
    """Return the id of the control file that channels show, or None."""
    if "control" not in dict(sample.on_channels):
        return None
    return sample.window.companion("control")


def drawn_box(seed: int, sample: SeparateCondition) -> Tensor:
    """Return a box that a condition hides, as a mask of the picture: (1,H,W) float32.

    It is 1 inside of the box, in every frame alike.
    """
    shape = sample.window.shape
    random = generator_for(
        seed, "condition box", sample.window.id, sample.variant, sample.box
    )
    mask = torch.zeros(1, shape.height, shape.width)
    begins = []
    ends = []
    for side in (shape.height, shape.width):
        length = round(side * random.uniform(SMALLEST_BOX, LARGEST_BOX))
        begin = int(random.integers(side - length + 1))
        begins.append(begin)
        ends.append(begin + length)
    mask[:, begins[0] : ends[0], begins[1] : ends[1]] = 1
    return mask


def encode_condition(
    family: DiffusersModel,
    frames: Tensor,
    sample: SeparateCondition,
    hidden: Tensor,
    control: Tensor | None = None,
) -> dict[str, Tensor]:
    """Encode what a condition shows of a clip.

    Args:
        family: the base model.
        frames: (3,T,H,W) in [-1, 1]; only what is not hidden is read.
        sample: the condition.
        hidden: (T or 1,H,W), above 0 where a mask hides the picture; 0 everywhere if
            none does. Read for "mask" and for what channels show.
        control: (3,T,H,W) in [-1, 1], a control video that channels show.

    Returns:
        For a mask "latents" (C,F,H,W) and "known" (F,H,W), 1 in the cells that are known.
        For a last frame or suffix "latents" (C,n,H,W) of the clip's last frames. For what
        channels show, tensors by the family's own names.
    """
    rules = family.spec.rules
    if sample.type == CHANNELS:
        known = shown_pixels(dict(sample.on_channels), frames.shape[1], hidden, rules)
        return family.channel_states(ConditionPixels(frames, known, control))

    if sample.type == "mask":
        is_hidden = (hidden > 0).expand(frames.shape[1], -1, -1)
        # Grey is the value of a pixel of which nothing is known.
        grey = torch.where(is_hidden, torch.zeros_like(frames), frames)
        latents = family.encode_video(grey).mean
        known = known_cells(is_hidden.float(), rules, family.spec.patch)
        return {LATENTS: latents, KNOWN: known.to(torch.uint8)}

    shape = sample.window.shape
    pixel_count = pixels_of_end(sample.type, sample.latent_frames, shape, family.spec)
    first_shown = frames.shape[1] - pixel_count
    last_frames = frames[:, first_shown:]
    if family.spec.is_appended(sample.type):
        return {LATENTS: family.encode_video(last_frames.contiguous()).mean}

    repeated = last_frames[:, :1].expand(-1, first_shown, -1, -1)
    filled = torch.cat([repeated, last_frames], dim=1).contiguous()
    latents = family.encode_video(filled).mean
    latent_count = latents_of_end(sample.type, sample.latent_frames, shape, family.spec)
    return {LATENTS: latents[:, -latent_count:]}


def shown_pixels(
    latent_frames: Mapping[str, int], num_frames: int, hidden: Tensor, rules: VideoRules
) -> Tensor:
    """Return which pixels channels show of a clip, (T,H,W) bool.

    Args:
        latent_frames: latent frames of each condition, by its type.
        num_frames: pixel frames of the clip.
        hidden: (T or 1,H,W), above 0 where a mask hides the picture; also without a
            mask, since it has the picture's size.
        rules: strides of the latent grid.
    """
    known = torch.zeros(num_frames, *hidden.shape[1:], dtype=torch.bool)
    if "mask" in latent_frames:
        known |= hidden == 0
    for name, count in latent_frames.items():
        frames = pixel_frames(name, count, num_frames, rules)
        known[frames] = True
    # A clip that is shown as a whole would leave nothing to learn.
    return torch.zeros_like(known) if known.all() and num_frames > 1 else known


def pixel_frames(
    condition: str, latent_frames: int, num_frames: int, rules: VideoRules
) -> slice:
    """Return the pixel frames of a clip that a condition gives; none for a mask."""
    # The first latent frame of a clip is one pixel frame, each other one is a stride of
    # them. At least one is left to learn.
    most = (num_frames - 1) // rules.temporal_stride
    count = min(latent_frames, most)
    ranges = {
        "first_frame": slice(0, 1),
        "last_frame": slice(num_frames - 1, num_frames),
        "prefix": slice(0, max(0, count - 1) * rules.temporal_stride + 1),
        "suffix": slice(num_frames - count * rules.temporal_stride, num_frames),
    }
    return ranges.get(condition, slice(0))


def known_cells(
    hidden: Tensor, rules: VideoRules, patch: tuple[int, int, int]
) -> Tensor:
    """Return the cells that no hidden pixel reaches, (F,H,W) bool, in whole tokens.

    A cell counts as reached if a pixel of it or of a cell next to it is hidden.

    Args:
        hidden: (T,H,W) float32, above 0 where pixels are hidden.
        rules: strides of the latent grid.
        patch: cells of a token.
    """
    untouched = cells_without(hidden, rules).float()
    reached = torch.nn.functional.max_pool3d(
        1 - untouched[None, None], kernel_size=3, stride=1, padding=1
    )
    # A token is given clean as a whole.
    tokens = torch.nn.functional.max_pool3d(reached, kernel_size=patch, ceil_mode=True)
    cells = tokens[0, 0]
    for axis, size in enumerate(patch):
        cells = cells.repeat_interleave(size, dim=axis)
    frames, rows, columns = untouched.shape
    return cells[:frames, :rows, :columns] == 0


def condition_form(
    sample: SeparateCondition,
    channel_forms: Mapping[str, TensorForm],
    spec: ModelSpec,
) -> Mapping[str, TensorForm]:
    """Return the dtypes and sizes of the tensors that a condition is encoded to.

    Args:
        sample: the condition.
        channel_forms: dtypes and sizes of the tensors that channels show of its window.
        spec: the model's spec.
    """
    if sample.type == CHANNELS:
        return channel_forms
    shape = sample.window.shape
    if sample.type == SOUND:
        assert spec.sound is not None
        return {LATENTS: ("float32", (spec.sound.channels, spec.sound.latents(shape)))}

    frames, rows, columns = spec.rules.latent_size(shape)
    if sample.type == "mask":
        size = (spec.latent_channels, frames, rows, columns)
        return {
            LATENTS: ("float32", size),
            KNOWN: ("uint8", (frames, rows, columns)),
        }

    count = sample.latent_frames
    if sample.type in ENCODED_ALONE:
        count = latents_of_end(sample.type, count, shape, spec)
    return {LATENTS: ("float32", (spec.latent_channels, count, rows, columns))}


def companion_sample(
    sample: FrameSample, role: str, media: Mapping[str, MediaInfo]
) -> FrameSample:
    """Return the frames of a sample's companion: its file at the same times and crop."""
    file_id = sample.window.companion(role)
    assert file_id is not None, f"the window has no {role}"
    info = media[file_id]
    times = sample.times
    if not info.still:
        # A video may be a frame shorter than its clip.
        times = tuple(min(second, info.seconds) for second in times)
    return replace(sample, window=replace(sample.window, clip_id=file_id), times=times)


def conditions_of_most_samples(config: Config, spec: ModelSpec) -> frozenset[str]:
    """Return the types of the conditions that at least half of the samples have.

    Validation and previews draw no conditions, so their samples have all of these and no
    others.
    """
    return frozenset(
        name
        for name, share in config.condition_shares.items()
        if share >= 0.5 and name in spec.conditions
    )
