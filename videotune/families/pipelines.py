"""What families share where they hand their networks to diffusers' pipelines: stand-ins, the scheduler, strides, tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.families.parts import model_parts, read_config
from videotune.families.pretrained import explained

if TYPE_CHECKING:
    import torch
    from torch import nn

    from videotune.types import VideoRules


def stand_in(
    nets: Mapping[str, nn.Module], name: str, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> Any:
    """What a pipeline holds in place of a network: its facts, and its answers from ``nets[name]``.

    ``nets`` is asked at each call and never before the first, so it may load a network when its steps come, and let
    another one go.
    """
    from diffusers.configuration_utils import FrozenDict
    from torch import nn

    class StandIn(nn.Module):
        """The network, looked up at every call."""

        def __init__(self) -> None:
            super().__init__()
            self.config, self.dtype, self.device = FrozenDict(config), dtype, device

        def forward(self, *words: Any, **named: Any) -> Any:
            return nets[name](*words, **named)

        def cache_context(self, *words: Any, **named: Any) -> Any:
            return nets[name].cache_context(*words, **named)  # type: ignore[operator]

    return StandIn()


def own_scheduler(folder: Path, shift: float | None = None, **beside: Any) -> Any:
    """The checkpoint's own scheduler; a ``shift`` in the place of what its config says, and what is set ``beside`` it."""
    import diffusers

    name = model_parts(read_config(folder / "model_index.json")).get("scheduler", ("", ""))[1]
    cls = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if cls is None:
        raise VideotuneError(f"{folder / 'model_index.json'}: diffusers has no scheduler {name!r}")
    config = dict(read_config(folder / "scheduler" / "scheduler_config.json"))
    if shift is not None:
        config |= {"flow_shift" if "flow_shift" in config else "shift": shift} | beside
    with explained(f"{folder / 'scheduler' / 'scheduler_config.json'} describes no {name}"):
        return cls.from_config(config)


def without_vae(pipe: Any, rules: VideoRules) -> Any:
    """A pipeline that has no VAE to ask for its strides, told them, and quiet."""
    pipe.vae_scale_factor_spatial = rules.spatial_stride
    pipe.vae_scale_factor_temporal = rules.temporal_stride
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextmanager
def in_tiles(vae: Any, tiled: bool) -> Iterator[None]:
    """An autoencoder that works in overlapping tiles, or whole; afterwards whole."""
    if tiled:
        vae.enable_tiling()
    try:
        yield
    finally:
        vae.disable_tiling()
