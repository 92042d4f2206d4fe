"""How a VAE's latents are normalised, by its config: one scale, or a mean and a deviation
for each channel.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def channel_statistics(
    vae: Any, folder: Path, channels: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return mean and deviation of the latents, (C,1,1,1) each.

    Args:
        vae: the VAE.
        folder: the base model, for errors.
        channels: channels of the latents.
        device: device of the result.

    Returns:
        None if the config has one scale for all channels.

    Raises:
        VideotuneError: for values that are not numbers, one for each channel.
    """
    statistics = []
    for name in ("latents_mean", "latents_std"):
        values = vae._buffers.get(name, vae.config.get(name))
        if values is None:
            return None
        statistics.append(_per_channel(folder, name, values, channels).to(device))
    mean, std = statistics
    if not bool((std > 0).all()):
        raise _fault(folder, "latents_std", "numbers above 0")
    has_scale = vae.config.get("scaling_factor") is not None
    return mean, std / (scale_of(vae, folder) if has_scale else 1.0)


def scale_of(vae: Any, folder: Path) -> float:
    """Return the factor of a VAE's latents, for all channels.

    Raises:
        VideotuneError: if the VAE's config has no valid one.
    """
    value = vae.config.get("scaling_factor")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise _fault(folder, "scaling_factor", "a number above 0")
    return float(value)


def shift_of(vae: Any, folder: Path) -> float:
    """Return what is subtracted from a VAE's latents; 0 if its config names nothing.

    Raises:
        VideotuneError: if it is not a number.
    """
    value = vae.config.get("shift_factor")
    if value is None:
        return 0.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise _fault(folder, "shift_factor", "a number")
    return float(value)


def _per_channel(folder: Path, name: str, values: Any, channels: int) -> Tensor:
    expected = f"{channels} numbers"
    try:
        numbers = torch.as_tensor(values).float().flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _fault(folder, name, expected) from error
    if len(numbers) != channels or not bool(numbers.isfinite().all()):
        raise _fault(folder, name, expected)
    return numbers.view(-1, 1, 1, 1)


def _fault(folder: Path, key: str, expected: str) -> VideotuneError:
    return VideotuneError(
        f"{folder / 'vae' / 'config.json'}: {key} must be {expected}."
        " Take the file that comes with the checkpoint"
    )
