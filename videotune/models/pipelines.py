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
from videotune.models.model_files import model_parts, read_config
from videotune.models.pretrained import explained
from videotune.types import Nets

if TYPE_CHECKING:
    from torch import Tensor, nn

    from videotune.types import ModelSpec


def bare_pipeline(cls: Any, **parts: Any) -> Any:
    """A pipeline of these components; others that its class asks for are None."""
    needed = [name for name, one in signature(cls).parameters.items() if one.default is Parameter.empty]
    return cls(**(dict.fromkeys(needed) | parts))


def stand_in(nets: Nets, name: str, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
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


def joined(encoders: Mapping[str, nn.Module], main: str, all_layers: bool) -> nn.Module:
    """Several text encoders as one network that reads as the main one, as they are in memory together.

    ``all_layers``: it gives the states of every layer, (layers,B,L,D).
    """
    reader: Any = encoders[main]

    class Encoders(torch.nn.ModuleDict):
        """Called as the main one; its parameters are those of all."""

        def get_input_embeddings(self) -> Any:
            return reader.get_input_embeddings()

        def forward(self, **named: Any) -> Any:
            if not all_layers:
                return reader(**named)
            return (torch.stack(reader(**named, output_hidden_states=True).hidden_states[1:]),)

    return Encoders(encoders)


@contextmanager
def in_tiles(vae: Any, tiled: bool) -> Iterator[None]:
    """An autoencoder that works in overlapping tiles, or whole; afterwards whole."""
    if tiled:
        vae.enable_tiling()
    try:
        yield
    finally:
        vae.disable_tiling()
