"""Stand-ins for the networks of diffusers' pipelines, and the checkpoint's scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch
from videotune.model_spec import ModelSpec
from videotune.models import loading, model_files
from videotune.types import Networks

if TYPE_CHECKING:
    from torch import Tensor, nn


FLOW_SCHEDULERS = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "UniPCMultistepScheduler",
)
"""Schedulers for flow matching that take the arguments of most pipelines."""


def bare_pipeline(cls: Any, **parts: Any) -> Any:
    """Build a pipeline of these components; other required components are None."""
    required = [
        name
        for name, parameter in signature(cls).parameters.items()
        if parameter.default is Parameter.empty
    ]
    return cls(**(dict.fromkeys(required) | parts))


def network_stand_in(
    nets: Networks,
    name: str,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Build a module that a pipeline holds in place of a network and that calls
    ``nets[name]``.

    ``nets`` is read at each call and never before the first, so it may load a network
    when its steps begin, and release another one.

    Args:
        nets: denoisers by expert name.
        name: name of the expert.
        config: config of the network, which pipelines read.
        dtype: dtype of the network.
        device: device of the network.
    """

    class StandIn(torch.nn.Module):
        """Look the network up at every call."""

        def __init__(self) -> None:
            super().__init__()
            self.config = diffusers.configuration_utils.FrozenDict(config)
            self.dtype = dtype
            self.device = device

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return nets[name](*args, **kwargs)

        def cache_context(self, *args: Any, **kwargs: Any) -> Any:
            return nets[name].cache_context(*args, **kwargs)  # type: ignore[operator]

    return StandIn()


def vae_stand_in(spec: ModelSpec, latents: Tensor | None, device: torch.device) -> Any:
    """Build a module that a pipeline holds in place of the VAE and that "encodes" to
    ``latents``.

    Its statistics are 0 and 1, so the pipeline passes the latents on unchanged. Where
    the pipeline samples from the VAE's distribution, as many numbers are drawn from the
    generators, so the noise that is drawn afterwards stays the same.

    Args:
        spec: gives the strides and the number of latent channels.
        latents: normalised latents (B,C,F,H,W) of the image, or None if nothing is
            encoded.
        device: device of the VAE.
    """
    zeros = [0.0] * spec.latent_channels
    ones = [1.0] * spec.latent_channels

    def sample(generator: list[torch.Generator]) -> Tensor:
        assert latents is not None
        diffusers.utils.torch_utils.randn_tensor(latents.shape, list(generator))
        return latents

    class StandIn(torch.nn.Module):
        """A VAE that encodes any input to the latents."""

        def __init__(self) -> None:
            super().__init__()
            self.dtype = torch.float32
            self.device = device
            self.config = diffusers.configuration_utils.FrozenDict(
                z_dim=spec.latent_channels,
                latent_channels=spec.latent_channels,
                latents_mean=zeros,
                latents_std=ones,
                scaling_factor=1.0,
                spatial_compression_ratio=spec.rules.spatial_stride,
                temporal_compression_ratio=spec.rules.temporal_stride,
            )
            self.latents_mean = torch.tensor(zeros)
            self.latents_std = torch.tensor(ones)
            self.spatial_compression_ratio = spec.rules.spatial_stride
            self.temporal_compression_ratio = spec.rules.temporal_stride

        def encode(self, pixels: Tensor) -> Any:
            distribution = SimpleNamespace(mode=lambda: latents, sample=sample)
            return SimpleNamespace(latent_dist=distribution)

    return StandIn()


def without_logits(net: nn.Module) -> nn.Module:
    """Return a language model that computes the logits of one token, which nothing
    reads, instead of those of all tokens.
    """

    def keep_last(_: Any, arguments: Any, keywords: Any) -> Any:
        return arguments, keywords | {"logits_to_keep": 1}

    net.register_forward_pre_hook(keep_last, with_kwargs=True)
    return net


def load_scheduler(folder: Path, shift: float | None = None, **settings: Any) -> Any:
    """Load the checkpoint's scheduler.

    Args:
        folder: the checkpoint.
        shift: timestep shift. None: as in the scheduler's config.
        settings: further keys of the config that are set together with a ``shift``.

    Raises:
        VideotuneError: if diffusers has no such scheduler, or its config is damaged.
    """
    index_path = folder / "model_index.json"
    config_path = folder / "scheduler" / "scheduler_config.json"
    parts = model_files.model_parts(model_files.read_config(index_path))
    _, name = parts.get("scheduler", ("", ""))
    cls = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if cls is None:
        raise VideotuneError(f"{index_path}: diffusers has no scheduler {name!r}")

    config = dict(model_files.read_config(config_path))
    if shift is not None:
        key = "flow_shift" if "flow_shift" in config else "shift"
        config |= {key: shift} | settings
    with loading.explained(f"{config_path} is not a valid config of {name}"):
        return cls.from_config(config)


def least_steps_of(scheduler: Mapping[str, Any]) -> int:
    """Return the denoising steps that a scheduler needs, by its config.

    One whose last noise level is set divides by its distance from the first.
    """
    return 2 if scheduler.get("shift_terminal") else 1


def replace_scheduler(
    pipe: Any, name: str, prediction: str, generators: Sequence[torch.Generator]
) -> None:
    """Give a pipeline another scheduler of diffusers, with the schedule of its own.

    Args:
        pipe: the pipeline.
        name: class of the scheduler.
        prediction: what the network predicts, see ``ModelSpec.prediction``.
        generators: draw the noise of schedulers that add some at each step.
    """
    cls: Any = getattr(diffusers, name)
    settings = dict(pipe.scheduler.config)
    if prediction == "flow":
        # Schedulers for flow matching and for both kinds name the shift differently.
        shift = settings.get("flow_shift", settings.get("shift", 1.0))
        settings |= {"flow_shift": shift, "shift": shift, "use_flow_sigmas": True}
        settings["prediction_type"] = "flow_prediction"
    accepted = signature(cls.__init__).parameters
    scheduler = cls.from_config(
        {key: value for key, value in settings.items() if key in accepted}
    )
    if "generator" in signature(scheduler.step).parameters:
        scheduler.step = partial(scheduler.step, generator=list(generators))
    pipe.scheduler = scheduler


def join_encoders(
    encoders: Mapping[str, nn.Module], main: str, *, all_layers: bool
) -> nn.Module:
    """Join text encoders to one network that is called as the main one.

    Args:
        encoders: the text encoders by their folders' names.
        main: name of the encoder that is called.
        all_layers: return the states of every layer, (layers,B,L,D).
    """
    main_encoder: Any = encoders[main]

    class Encoders(torch.nn.ModuleDict):
        """Hold the parameters of all encoders; a call goes to the main one."""

        def get_input_embeddings(self) -> Any:
            return main_encoder.get_input_embeddings()

        def forward(self, **kwargs: Any) -> Any:
            if not all_layers:
                return main_encoder(**kwargs)
            output = main_encoder(**kwargs, output_hidden_states=True)
            return (torch.stack(output.hidden_states[1:]),)

    return Encoders(encoders)


@contextmanager
def in_tiles(vae: Any, tiled: bool) -> Iterator[None]:
    """Let a VAE work in overlapping tiles within the block, if ``tiled``."""
    if tiled:
        vae.enable_tiling()
    try:
        yield
    finally:
        vae.disable_tiling()


@contextmanager
def without_shift_warning(scheduler: Any) -> Iterator[None]:
    """Hide the warning about custom timesteps that are shifted, if nothing shifts them."""
    config = scheduler.config
    is_shifted = (
        config.shift != 1 or config.use_dynamic_shifting or config.shift_terminal
    )
    if is_shifted:
        yield
        return
    with without_warnings(type(scheduler)):
        yield


@contextmanager
def without_warnings(cls: type) -> Iterator[None]:
    """Hide the warnings of the module of a class of diffusers, which do not apply."""
    logger = logging.getLogger(cls.__module__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def initial_latents(
    first: Tensor, size: tuple[int, int, int], generators: Sequence[torch.Generator]
) -> Tensor:
    """Return the latents with which image-to-video begins.

    Args:
        first: clean first frames (B,C,1,H,W).
        size: (F, H, W) of the result.
        generators: one per sample; the rest is the noise that the pipeline would draw
            from them.
    """
    noise = []
    for frame, generator in zip(first, generators, strict=True):
        # The pipeline draws the image's latents first.
        torch.randn(frame[None].shape, generator=generator)
        noise.append(torch.randn((1, frame.shape[0], *size), generator=generator))
    return torch.cat([first, torch.cat(noise).to(first)[:, :, 1:]], dim=2)
