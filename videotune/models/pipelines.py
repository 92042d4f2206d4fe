"""What diffusers' pipelines hold in place of networks: stand-ins, the checkpoint's scheduler, an image's known latents.

Also attention that stays within each latent frame, for a run that trains on frames alone: diffusers' own attention runs
whole; its one product of queries, keys and values is taken frame by frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch
from videotune.models import loading, model_files
from videotune.types import ModelSpec, Networks

if TYPE_CHECKING:
    from torch import Tensor, nn


def bare_pipeline(cls: Any, **parts: Any) -> Any:
    """A pipeline of these components; others that its class asks for are None."""
    needed = [
        name
        for name, one in signature(cls).parameters.items()
        if one.default is Parameter.empty
    ]
    return cls(**(dict.fromkeys(needed) | parts))


def stand_in(
    nets: Networks,
    name: str,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """What a pipeline holds in place of a network: its facts, and its answers from ``nets[name]``.

    ``nets`` is asked at each call and never before the first, so it may load a network when its steps come, and let
    another one go.
    """

    class StandIn(torch.nn.Module):
        """The network, looked up at every call."""

        def __init__(self) -> None:
            super().__init__()
            self.config = diffusers.configuration_utils.FrozenDict(config)
            self.dtype = dtype
            self.device = device

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
    zeros = [0.0] * spec.latent_channels
    ones = [1.0] * spec.latent_channels

    def draw(generators: list[torch.Generator]) -> Tensor:
        assert latents is not None
        diffusers.utils.torch_utils.randn_tensor(latents.shape, list(generators))
        return latents

    class Known(torch.nn.Module):
        """A VAE that encodes whatever it is given to known latents."""

        def __init__(self) -> None:
            super().__init__()
            self.dtype = torch.float32
            self.device = device
            self.config = diffusers.configuration_utils.FrozenDict(
                z_dim=spec.latent_channels, latents_mean=zeros, latents_std=ones
            )
            self.latents_mean = torch.tensor(zeros)
            self.latents_std = torch.tensor(ones)
            self.spatial_compression_ratio = spec.rules.spatial_stride
            self.temporal_compression_ratio = spec.rules.temporal_stride

        def encode(self, pixels: Tensor) -> Any:
            return SimpleNamespace(
                latent_dist=SimpleNamespace(mode=lambda: latents, sample=draw)
            )

    return Known()


def own_scheduler(folder: Path, shift: float | None = None, **beside: Any) -> Any:
    """The checkpoint's own scheduler; a ``shift`` in the place of what its config says, and what is set ``beside`` it."""
    name = model_files.model_parts(model_files.read_config(folder / "model_index.json")).get(
        "scheduler", ("", "")
    )[1]
    cls = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if cls is None:
        raise VideotuneError(
            f"{folder / 'model_index.json'}: diffusers has no scheduler {name!r}"
        )
    config = dict(model_files.read_config(folder / "scheduler" / "scheduler_config.json"))
    if shift is not None:
        config |= {"flow_shift" if "flow_shift" in config else "shift": shift} | beside
    with loading.explained(
        f"{folder / 'scheduler' / 'scheduler_config.json'} describes no {name}"
    ):
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


def isolate(
    net: nn.Module,
    attentions: Sequence[Any],
    on: bool,
    frames_of: Callable[..., int],
    text_first: bool = False,
) -> None:
    """Let video tokens see their own frame and the text, and text see text alone, until switched off.

    ``frames_of``: from what the network is called with to the count of frames that tokens lie in; a block that is computed
    again for its gradients goes by the last call. ``text_first``: the text's tokens stand in front of the video's.
    """
    inside = [attn for attn in attentions if isinstance(attn.processor, FrameProcessor)]
    if on and not inside:
        seen = SimpleNamespace(frames=0)

        def look(_: Any, words: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.frames = frames_of(**({"hidden_states": words[0]} if words else {}), **named)

        handle = net.register_forward_pre_hook(look, with_kwargs=True)
        for attn in attentions:
            attn.set_processor(FrameProcessor(attn.processor, seen, text_first, handle))
    if not on:
        for attn in inside:
            attn.processor.handle.remove()
            attn.set_processor(attn.processor.own)


class FrameProcessor:
    """An attention processor around diffusers' ``own``."""

    def __init__(self, own: Any, seen: SimpleNamespace, text_first: bool, handle: Any) -> None:
        self.own = own
        self.seen = seen
        self.text_first = text_first
        self.handle = handle

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """What ``own`` gives of video tokens (B,S,D), and of text (B,L,D) where the attention is over both."""
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        with _product_by_frame()(self.seen.frames, text, self.text_first) as product:
            out = self.own(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        assert product.calls == 1, "this attention takes another way than torch's own product"
        return out


@cache
def _product_by_frame() -> Any:
    class ByFrame(torch.overrides.TorchFunctionMode):
        """In this block of this thread torch's attention product is taken frame by frame."""

        def __init__(self, frames: int, text: int, text_first: bool) -> None:
            super().__init__()
            self.frames = frames
            self.text = text
            self.text_first = text_first
            self.calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is not torch.nn.functional.scaled_dot_product_attention:
                return func(*args, **(kwargs or {}))
            self.calls += 1
            return self.attend(func, *args, **(kwargs or {}))

        def attend(
            self,
            product: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Any = None,
            **named: Any,
        ) -> Tensor:
            """Queries, keys and values (B,h,S,d), of which the mask (B,1,1,S) shows a part of the text."""
            video, text = zip(*map(self.split, (query, key, value)), strict=True)
            q, k, v = (
                x.unflatten(2, (self.frames, -1)).transpose(1, 2).flatten(0, 1) for x in video
            )  # (B·F,h,n,d)
            k, v = (
                self.join(x, y.repeat_interleave(self.frames, 0))
                for x, y in zip((k, v), text[1:], strict=True)
            )
            shown = wide = None
            if attn_mask is not None:
                shown = attn_mask[..., video[0].shape[2] :]
                wide = torch.cat([shown.new_ones(*shown.shape[:3], q.shape[2]), shown], 3)
                wide = wide.repeat_interleave(self.frames, 0)
            out = (
                product(q, k, v, attn_mask=wide, **named)
                .unflatten(0, (len(query), -1))
                .transpose(1, 2)
                .flatten(2, 3)
            )
            return (
                self.join(out, product(*text, attn_mask=shown, **named)) if self.text else out
            )

        def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
            """Of the video, and of the text."""
            cut = self.text if self.text_first else x.shape[2] - self.text
            return (
                (x[:, :, cut:], x[:, :, :cut])
                if self.text_first
                else (x[:, :, :cut], x[:, :, cut:])
            )

        def join(self, video: Tensor, text: Tensor) -> Tensor:
            """Both again."""
            return torch.cat([text, video] if self.text_first else [video, text], dim=2)

    return ByFrame
