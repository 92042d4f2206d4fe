"""What a sample is given clean: parts of its clip, encoded so that they know nothing of
the rest.

The latents of a whole clip know hidden pixels: a VAE mixes frames and neighbourhoods.
Latents cut out of them would show a network in training what it never gets when it
samples. So the last frame, a suffix and a masked region are encoded on their own, with
the hidden pixels replaced: before a suffix its first frame is repeated, a hole is grey,
and of a region only cells count that no hidden pixel reaches. A first frame and a prefix
are cut out of the clip's latents, because the VAE is causal: they depend on no later
frame.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from videotune.config.schema import Config
from videotune.config.sections import Condition
from videotune.data.media_info import MediaInfo
from videotune.diffusion.regions import cells_without
from videotune.files import digest
from videotune.latent_cache.entry import TensorForm
from videotune.latent_cache.keys import SCHEMA, CacheKeys
from videotune.model_spec import ModelSpec, VideoRules
from videotune.models.base import DiffusersModel
from videotune.rng import generator_for
from videotune.types import ClipShape, FrameSample, LatentDistribution, Window

ENCODED_ALONE = ("last_frame", "suffix", "mask")
"""Conditions with an encoding of their own."""

LATENTS = "latents"
KNOWN = "known"
"""Names of the tensors of an entry."""

SMALLEST_BOX = 0.3
LARGEST_BOX = 0.7
"""Sides of a drawn box, as shares of the picture's."""


@dataclass(frozen=True)
class ConditionSample:
    """A condition of a window's variant, which is encoded on its own."""

    window: Window
    variant: int
    type: str
    latent_frames: int = 1
    box: int = 0
    """Number of a drawn box, for a mask of a clip without a mask file."""

    @property
    def draws_box(self) -> bool:
        """Whether it hides a drawn box."""
        return self.type == "mask" and self.window.companion("mask") is None


def condition_samples(
    window: Window, variant: int, condition: Condition, boxes: int
) -> list[ConditionSample]:
    """Return what of a condition is encoded on its own: nothing, one or several boxes."""
    is_still = window.shape.frames == 1
    if condition.type not in ENCODED_ALONE or is_still:
        return []
    latent_frames = condition.latent_frames if condition.type == "suffix" else 1
    sample = ConditionSample(window, variant, condition.type, latent_frames)
    if not sample.draws_box:
        return [sample]
    return [replace(sample, box=number) for number in range(boxes)]


def condition_key(keys: CacheKeys, sample: ConditionSample) -> str:
    """Return the name of a condition's entry."""
    frames = keys.sample(sample.window, sample.variant)
    hidden: list[object] = []
    if sample.draws_box:
        hidden = ["box", keys.seed, sample.window.id, sample.variant, sample.box]
    elif sample.type == "mask":
        hidden = ["file", sample.window.companion("mask")]
    content = {
        "schema": SCHEMA,
        "condition": [sample.type, sample.latent_frames, hidden],
        "latents": keys.latents(frames),
    }
    return digest(content)


def drawn_box(seed: int, sample: ConditionSample) -> Tensor:
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
    family: DiffusersModel, frames: Tensor, sample: ConditionSample, hidden: Tensor
) -> dict[str, Tensor]:
    """Encode what a condition shows of a clip.

    Args:
        family: the base model.
        frames: (3,T,H,W) in [-1, 1]; only what is not hidden is read.
        sample: the condition.
        hidden: (T or 1,H,W), above 0 where a mask hides the picture. Only for "mask".

    Returns:
        "latents": of a mask (C,F,H,W), else of its last latent frames (C,n,H,W); of a
        mask also "known" (F,H,W), 1 in the cells that are known.
    """
    rules = family.spec.rules
    if sample.type == "mask":
        is_hidden = (hidden > 0).expand(frames.shape[1], -1, -1)
        # Grey, the value of a pixel of which nothing is known.
        grey = torch.where(is_hidden, torch.zeros_like(frames), frames)
        latents = family.encode_video(grey).mean
        known = known_cells(is_hidden.float(), rules, family.spec.patch)
        return {LATENTS: latents, KNOWN: known.to(torch.uint8)}

    num_frames = frames.shape[1]
    latent_frames = given_frames(sample.latent_frames, sample.window.shape, rules)
    begin = num_frames - 1
    if sample.type == "suffix":
        begin = num_frames - latent_frames * rules.temporal_stride

    repeated = frames[:, begin : begin + 1].expand(-1, begin, -1, -1)
    filled = torch.cat([repeated, frames[:, begin:]], dim=1).contiguous()
    latents = family.encode_video(filled).mean
    return {LATENTS: latents[:, -latent_frames:]}


def given_frames(latent_frames: int, shape: ClipShape, rules: VideoRules) -> int:
    """Return how many latent frames of a prefix or suffix are given: one at least is
    left to learn.
    """
    return min(latent_frames, rules.latent_size(shape)[0] - 1)


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


def has_condition_form(
    forms: Mapping[str, TensorForm], spec: ModelSpec, shape: ClipShape
) -> bool:
    """Return whether an entry's tensors have the form of a condition of a window."""
    frames, rows, columns = spec.rules.latent_size(shape)
    dtype, size = forms.get(LATENTS, ("", ()))
    if dtype != "float32" or len(size) != 4 or not 1 <= size[1] <= frames:
        return False
    if (size[0], *size[2:]) != (spec.latent_channels, rows, columns):
        return False
    known_form = ("uint8", (frames, rows, columns))
    has_mask = forms.get(KNOWN) == known_form and size[1] == frames
    return has_mask or forms.keys() == {LATENTS}


def companion_sample(
    sample: FrameSample, role: str, media: Mapping[str, MediaInfo]
) -> FrameSample:
    """Return the frames of a sample's companion: its file at the same times and crop."""
    file_id = sample.window.companion(role)
    assert file_id is not None, f"the window has no {role}"
    info = media[file_id]
    times = sample.times
    if not info.still:
        # It may be a frame shorter than its clip.
        times = tuple(min(second, info.seconds) for second in times)
    return replace(sample, window=replace(sample.window, clip_id=file_id), times=times)


def put_conditions(
    x0: Tensor,
    condition_types: frozenset[str],
    prefix_frames: int,
    entries: Mapping[str, Mapping[str, Tensor]],
) -> Tensor:
    """Write what a sample is given into its latents, in place.

    Args:
        x0: latents (C,F,H,W).
        condition_types: conditions of the sample.
        prefix_frames: latent frames of a prefix.
        entries: of each condition that is encoded on its own, its tensors.

    Returns:
        (F,H,W) bool: the cells that are given.
    """
    frames = x0.shape[1]
    conditioned = x0.clone()
    known = torch.zeros(x0.shape[1:], dtype=torch.bool)
    # Given clean, a still would leave nothing to learn.
    if frames == 1:
        return known

    if "mask" in condition_types:
        entry = entries["mask"]
        # Somebody else's cache may hold another condition under this name.
        cells = entry.get(KNOWN, torch.zeros_like(known)).bool()
        conditioned[:, cells] = entry[LATENTS][:, cells]
        known |= cells
    for name in ("suffix", "last_frame"):
        if name in condition_types:
            latents = entries[name][LATENTS]
            count = min(latents.shape[1], frames - 1)
            conditioned[:, -count:] = latents[:, -count:]
            known[-count:] = True
    if "prefix" in condition_types:
        count = min(prefix_frames, frames - 1)
        conditioned[:, :count] = x0[:, :count]
        known[:count] = True
    if "first_frame" in condition_types:
        conditioned[:, 0] = x0[:, 0]
        known[0] = True

    # So would a clip of which all is given.
    if known.all():
        return torch.zeros_like(known)
    x0.copy_(conditioned)
    return known


def put_start_images(
    spec: ModelSpec,
    x0: Tensor,
    latents: Sequence[LatentDistribution],
    condition_types: Sequence[frozenset[str]],
) -> None:
    """Put start images in the place of the first latent frames that are fed clean."""
    for clip_latents, sample, types in zip(x0, latents, condition_types, strict=True):
        is_in_place = "first_frame" in types and spec.is_in_place("first_frame")
        if is_in_place and sample.start is not None and clip_latents.shape[1] > 1:
            clip_latents[:, :1] = sample.start


def as_mask(known: Sequence[Tensor]) -> Tensor:
    """Return the cells (F,H,W) that samples are given as one mask: (B,1,F,1,1), or
    (B,1,F,H,W) if one of them is given a part of a frame.
    """
    cells = torch.stack(list(known))[:, None]
    whole_frames = cells.flatten(3).all(3)
    if torch.equal(cells.flatten(3).any(3), whole_frames):
        return whole_frames[..., None, None]
    return cells


def usual_conditions(config: Config, spec: ModelSpec) -> frozenset[str]:
    """Return the types of the conditions that at least half of the samples have."""
    shares = {condition.type: condition.probability for condition in config.conditions}
    shares["first_frame"] = config.first_frame_probability or 0.0
    return frozenset(
        name
        for name, share in shares.items()
        if share >= 0.5 and name in spec.conditions
    )
