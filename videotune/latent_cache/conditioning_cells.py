"""Write what a sample is given clean into its latents, and say which cells those are.

``conditions`` encodes it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from videotune.latent_cache.conditions import KNOWN, LATENTS
from videotune.model_spec import APPENDED_OF_SUFFIX, ModelSpec


def put_conditions(
    x0: Tensor,
    spec: ModelSpec,
    condition_types: frozenset[str],
    prefix_frames: int,
    encoded: Mapping[str, Mapping[str, Tensor]],
    start: Tensor | None = None,
) -> Tensor:
    """Write what a sample is given into its latents, in place.

    A still is given nothing, and so is a clip whose cells would all be given: nothing
    would be left to learn. Its latents then stay as they are.

    Args:
        x0: latents (C,F,H,W).
        spec: the model's spec. Conditions that it takes on channels are left out.
        condition_types: conditions of the sample.
        prefix_frames: latent frames of a prefix.
        encoded: tensors of each condition that is encoded on its own, by type.
        start: latents (C,1,H,W) of a start image, which takes the place of the first
            frame where that is given. None: it is the clip's own.

    Returns:
        (F,H,W) bool: the cells that are given.
    """
    frames = x0.shape[1]
    conditioned = x0.clone()
    known = torch.zeros(x0.shape[1:], dtype=torch.bool)
    if frames == 1:
        return known

    in_place = frozenset(filter(spec.is_in_place, condition_types))
    # Where conditions overlap, the later one counts: the clip's own latents last, and
    # above all its first frame.
    if "mask" in in_place:
        box = encoded["mask"]
        cells = box[KNOWN].bool()
        conditioned[:, cells] = box[LATENTS][:, cells]
        known |= cells
    for name in ("suffix", "last_frame"):
        latents = _latents_replacing_the_end(name, spec, encoded)
        if latents is not None and name in condition_types:
            count = min(latents.shape[1], frames - 1)
            conditioned[:, -count:] = latents[:, -count:]
            known[-count:] = True
    if "prefix" in in_place:
        count = min(prefix_frames, frames - 1)
        conditioned[:, :count] = x0[:, :count]
        known[:count] = True
    if "first_frame" in in_place:
        conditioned[:, :1] = x0[:, :1] if start is None else start
        known[0] = True

    if known.all():
        return torch.zeros_like(known)
    x0.copy_(conditioned)
    return known


def _latents_replacing_the_end(
    condition: str, spec: ModelSpec, encoded: Mapping[str, Mapping[str, Tensor]]
) -> Tensor | None:
    """Return the latents (C,n,H,W) of a suffix or last frame that replace the clip's last
    ones; None if the sample does not have that condition, or if it replaces nothing.

    For an in-place condition these are all its latents. For an appended suffix they are
    those after its first ``APPENDED_OF_SUFFIX``, which are tokens of their own. An appended
    last frame replaces nothing.
    """
    if condition not in encoded:
        return None
    latents = encoded[condition][LATENTS]
    if spec.is_in_place(condition):
        return latents
    has_more = condition == "suffix" and latents.shape[1] > APPENDED_OF_SUFFIX
    return latents[:, APPENDED_OF_SUFFIX:] if has_more else None


def appended_latents(
    encoded: Mapping[str, Mapping[str, Tensor]], spec: ModelSpec
) -> dict[str, Tensor]:
    """Return the latents (C,n,H,W) of what is appended to a sample, by type. A batch has
    them under the same names.

    Args:
        encoded: tensors of each condition that is encoded on its own, by type.
        spec: the model's spec.
    """
    return {
        name: tensors[LATENTS]
        for name, tensors in encoded.items()
        if spec.is_appended(name)
    }


def as_mask(known: Sequence[Tensor]) -> Tensor:
    """Join the masks (F,H,W) of what each sample is given into one: (B,1,F,1,1), or
    (B,1,F,H,W) if a sample is given only a part of a frame.
    """
    cells = torch.stack(list(known))[:, None]
    whole_frames = cells.flatten(3).all(3)
    if torch.equal(cells.flatten(3).any(3), whole_frames):
        return whole_frames[..., None, None]
    return cells
