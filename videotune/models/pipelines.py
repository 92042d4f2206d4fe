"""What diffusers' pipelines hold in place of networks: stand-ins, the checkpoint's scheduler, an image's known latents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch
from videotune.models.config_file import read_config
from videotune.models.parts import model_parts
from videotune.models.pretrained import explained

if TYPE_CHECKING:
    from torch import Tensor, nn

    from videotune.types import ModelSpec


def bare_pipeline(cls: Any, **parts: Any) -> Any:
    """A pipeline of these components; others that its class asks for are None."""
    asked = signature(cls.__init__).parameters.values()
    needed = [one.name for one in asked if one.default is Parameter.empty and one.name != "self"]
    return cls(**(dict.fromkeys(needed) | parts))


def stand_in(
    nets: Mapping[str, nn.Module], name: str, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> Any:
    """What a pipeline holds in place of a network: its facts, and its answers from ``nets[name]``.

    ``nets`` is asked at each call and never before the first, so it may load a network when its steps come, and let
    another one go.
    """

    class StandIn(torch.nn.Module):
        """The network, looked up at every call."""

        def __init__(self) -> None:
            super().__init__()
            self.config, self.dtype, self.device = diffusers.configuration_utils.FrozenDict(config), dtype, device

        def forward(self, *words: Any, **named: Any) -> Any:
            return nets[name](*words, **named)

        def cache_context(self, *words: Any, **named: Any) -> Any:
            return nets[name].cache_context(*words, **named)  # type: ignore[operator]

    return StandIn()


def known_latents(spec: ModelSpec, latents: Tensor | None, device: torch.device) -> Any:
    """What a pipeline holds in place of the VAE: its strides, and an image's normalised latents (B,C,F,H,W), known already.

    Its statistics are 0 and 1, so that the pipeline hands the latents on as they are. Where the pipeline would draw from
    the VAE's distribution, as many numbers are drawn from the generators, for the noise that comes later.
    """
    zeros, ones = [0.0] * spec.latent_channels, [1.0] * spec.latent_channels

    def draw(generators: list[torch.Generator]) -> Tensor:
        assert latents is not None
        diffusers.utils.torch_utils.randn_tensor(latents.shape, list(generators))
        return latents

    class Known(torch.nn.Module):
        """A VAE that encodes whatever it is given to known latents."""

        def __init__(self) -> None:
            super().__init__()
            self.dtype, self.device = torch.float32, device
            self.config = diffusers.configuration_utils.FrozenDict(
                z_dim=spec.latent_channels, latents_mean=zeros, latents_std=ones
            )
            self.latents_mean, self.latents_std = torch.tensor(zeros), torch.tensor(ones)
            self.spatial_compression_ratio = spec.rules.spatial_stride
            self.temporal_compression_ratio = spec.rules.temporal_stride

        def encode(self, pixels: Tensor) -> Any:
            return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents, sample=draw))

    return Known()


def own_scheduler(folder: Path, shift: float | None = None, **beside: Any) -> Any:
    """The checkpoint's own scheduler; a ``shift`` in the place of what its config says, and what is set ``beside`` it."""
    name = model_parts(read_config(folder / "model_index.json")).get("scheduler", ("", ""))[1]
    cls = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if cls is None:
        raise VideotuneError(f"{folder / 'model_index.json'}: diffusers has no scheduler {name!r}")
    config = dict(read_config(folder / "scheduler" / "scheduler_config.json"))
    if shift is not None:
        config |= {"flow_shift" if "flow_shift" in config else "shift": shift} | beside
    with explained(f"{folder / 'scheduler' / 'scheduler_config.json'} describes no {name}"):
        return cls.from_config(config)


@contextmanager
def in_tiles(vae: Any, tiled: bool) -> Iterator[None]:
    """An autoencoder that works in overlapping tiles, or whole; afterwards whole."""
    if tiled:
        vae.enable_tiling()
    try:
        yield
    finally:
        vae.disable_tiling()
