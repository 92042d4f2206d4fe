"""LTX-Video 0.9.x, 2B and 13B (HaCohen et al. 2024, arXiv 2501.00103): flow matching, T5 text, a VAE of 32 x 32 x 8.

From text, and from a first frame that is fed clean; where a frame lies in time is told in seconds, so fps counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch
from videotune.models.base import DiffusersModel, key_names, spec_of
from videotune.models.model_files import read_config
from videotune.models.pipelines import known_latents, own_scheduler
from videotune.rng import generator_for, seed32
from videotune.types import (
    Batch,
    ClipShape,
    Conditioning,
    FillFn,
    ModelSpec,
    Networks,
    SampleRequest,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

SIZES = {(2048, 28): "2B", (4096, 48): "13B"}
"""(width, blocks) of the published transformers."""

LICENCE = "LTXV Open Weights License"
"""Of all 13B; 2B from 0.9.5 on has OpenRAIL-M first, then the latter, and no config tells which."""

SHIFTS = (1024.0, 0.95, 4096.0, 2.05)
"""(tokens, μ, tokens, μ) of the authors' trainer for every version; the schedulers up to 0.9.1 say the same."""

DECODE_TIMESTEP = 0.05
DECODE_NOISE = 0.025
"""What a VAE that is told a timestep decodes with, and the share of noise then laid on the latents: its authors' own."""

NEWER_TOKENS = 256
"""Of a caption, as the pipeline of 0.9.5 and newer reads it."""


class LTXVideo(DiffusersModel):
    """An LTX-Video checkpoint."""

    spec = spec_of(
        "ltx_video"
    )  # its one shift is that of 2560 tokens, half way between the two that the rule names
    variants = ("0.9.0", "0.9.1", "0.9.7")
    transformer_class = "LTXVideoTransformer3DModel"
    vae_class = "AutoencoderKLLTXVideo"
    embedding_names = {"text_encoder": "t5xxl"}
    original_names = key_names("ltx_video", "original")
    config_defaults = {"patch_size": 1, "patch_size_t": 1}

    @cached_property
    def newer(self) -> bool:
        """Whether it is a checkpoint of 0.9.5 or later."""
        return _newer(self.folder)

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """The spec of a checkpoint. Raises VideotuneError for one that only looks like one of these."""
        net, vae, latent, _ = cls.read_configs(folder)
        if (net.get("patch_size", 1), net.get("patch_size_t", 1)) != (1, 1):
            raise VideotuneError(
                f"{folder}: a token covers more than one latent; no published LTX-Video does that"
            )
        size = SIZES.get(
            (net["num_attention_heads"] * net["attention_head_dim"], net["num_layers"]), ""
        )
        spatial = _stride(vae, "spatial", 4)
        temporal = _stride(vae, "temporal", 1)
        strides: dict[str, Any] = {"spatial_stride": spatial, "temporal_stride": temporal}
        newer = _newer(folder)
        version = (
            "0.9.5+" if newer else "0.9.1" if vae.get("timestep_conditioning") else "0.9.0"
        )
        newer_licence = LICENCE if size == "13B" else f"OpenRAIL-M or {LICENCE}"
        return replace(
            cls.spec,
            title=f"LTX-Video {version} {size}".rstrip(),
            rules=replace(
                cls.spec.rules, frame_step=temporal, side_multiple=spatial, **strides
            ),
            latent_channels=latent,
            text_tokens=NEWER_TOKENS if newer else cls.spec.text_tokens,
            text_width=net["caption_channels"],
            licence=newer_licence if newer else cls.spec.licence,
            shift_by_tokens=_shifts(
                read_config(folder / "scheduler" / "scheduler_config.json")
            ),
        )

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """With the mask of a full caption."""
        return super().blank_states(shape) | {
            "mask": torch.ones(self.spec.text_tokens, dtype=torch.bool)
        }

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """A VAE that is told a timestep is told the usual one."""
        net: Any = super().part(name, fill)
        if name == "vae" and net.config.timestep_conditioning:
            # a bound method would keep the network in memory until the garbage collector runs
            decode = type(net).decode
            known = ref(net)
            net.decode = lambda latents, **words: decode(
                known(), latents, latents.new_full((len(latents),), DECODE_TIMESTEP), **words
            )
        return net

    def raw_latents(self, latents: Tensor) -> Tensor:
        """With a little noise for a VAE that is told a timestep, always the same."""
        raw = super().raw_latents(latents)
        if self.vae().config.timestep_conditioning:
            noise = torch.from_numpy(
                generator_for(0, "decode noise").standard_normal(tuple(raw.shape), "float32")
            )
            raw = (1 - DECODE_NOISE) * raw + DECODE_NOISE * noise.to(raw)
        return raw

    def decode(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Some VAEs draw inside from torch's own numbers: here always the same, and everyone else's are as they were."""
        devices = [] if self.device.type == "cpu" else [self.device]
        with self.vae_lock, torch.random.fork_rng(devices, device_type=self.device.type):
            torch.default_generator.manual_seed(seed32(0, "decoder noise"))
            for device in devices:
                torch.get_device_module(device).manual_seed(seed32(0, "decoder noise"))
            return super().decode(latents, tiled)

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """v = noise - x0; the network is told 1000 t, in float32, and 0 of tokens that are given."""
        times = self.model_timesteps(x_t, t, batch)
        assert batch.conditioning.text_mask is not None
        out = net(
            hidden_states=_tokens(x_t.to(self.dtype)),
            encoder_hidden_states=batch.conditioning.text.to(self.dtype),
            timestep=times[:, None] if self.newer and times.ndim == 1 else times,
            encoder_attention_mask=batch.conditioning.text_mask,
            return_dict=False,
            **self._positions(batch.fps, *x_t.shape[2:]),
        )
        return out[0].transpose(1, 2).reshape(x_t.shape).float()

    def _positions(self, fps: Tensor, frames: int, rows: int, columns: int) -> dict[str, Any]:
        """Where the tokens lie, in pixels and in seconds at each sample's fps (B,), as the checkpoint's pipeline tells it.

        Up to 0.9.1 latent frame i is at 8i frames; from 0.9.5 on at its first, max(8i - 7, 0).
        """
        rules = self.spec.rules
        if not self.newer:
            seconds = (rules.temporal_stride / fps.float()).view(-1, 1, 1, 1, 1)
            scale = seconds, rules.spatial_stride, rules.spatial_stride
            return {
                "num_frames": frames,
                "height": rows,
                "width": columns,
                "rope_interpolation_scale": scale,
            }
        places = self._loaded.setdefault("coords", {})
        key = (frames, rows, columns, fps.device)
        coords = places.get(key)
        if (
            coords is None or type(fps) is not torch.Tensor
        ):  # fake ones are not kept, and meet no real ones
            pipeline = diffusers.LTXConditionPipeline
            ids = pipeline._prepare_video_ids(1, frames, rows, columns, device=fps.device)
            coords = pipeline._scale_video_ids(
                ids, rules.spatial_stride, rules.temporal_stride, 0, fps.device
            ).float()
            if type(coords) is torch.Tensor:
                places[key] = (
                    coords  # the pipeline copies its factors to the device, for which the host would wait
                )
        seconds = coords[:, :1] * (1 / fps.float()).view(-1, 1, 1)
        # the count of frames is not read where positions are given, but by isolated frames
        coords = torch.cat([seconds, coords[:, 1:].expand(len(fps), -1, -1)], dim=1)
        return {"num_frames": frames, "video_coords": coords}

    def token_frames(
        self,
        hidden_states: Tensor,
        num_frames: int | None = None,
        video_coords: Any = None,
        **_: Any,
    ) -> int:
        """A pipeline that passes positions passes no count: tokens of a frame have the first one's time."""
        return num_frames or hidden_states.shape[1] // int(
            (video_coords[0, 0] == video_coords[0, 0, 0]).sum()
        )

    def pipeline_class(self) -> Any:
        """The newer one takes an image or none."""
        return diffusers.LTXConditionPipeline if self.newer else diffusers.LTXPipeline

    def scheduler(self, shift: float | None) -> Any:
        """Raises VideotuneError for a ``shift`` from 0.9.5 on, whose pipeline brings a schedule of its own."""
        if shift is not None and self.newer:
            raise VideotuneError(
                f"sample.shift: {self.spec.title} has a schedule of its own; leave it out"
            )
        return own_scheduler(self.folder, shift, use_dynamic_shifting=False)

    def pipeline(
        self, nets: Networks, shift: float | None = None, cls: Any = None, **parts: Any
    ) -> Any:
        """With a VAE, which the pipeline asks for its strides."""
        vae = known_latents(self.spec, None, self.device)
        return super().pipeline(nets, shift, cls, **({"vae": vae} | parts))

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """``request.first`` goes on from clean first frames.

        Up to 0.9.1 by the image-to-video pipeline, else by the one that takes conditions, which lays its own noise on them
        while it samples; they come back as they were given.
        """
        shape = request.shape
        first = request.first
        size = self.spec.rules.latent_size(request.shape)
        generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
        words: dict[str, Any] = {"generator": generators}
        cls = None
        if first is not None and self.newer:
            words["image"] = torch.zeros(
                1, 3, shape.height, shape.width
            )  # only its size is looked at
        elif first is not None:
            cls = diffusers.LTXImageToVideoPipeline
            words["latents"] = _tokens(_start(first.float(), size, generators))
        pipe = self.pipeline(
            nets, request.shift, cls, vae=known_latents(self.spec, first, self.device)
        )
        with _quiet_schedule(pipe.scheduler):
            latents = self.run_pipeline(pipe, conditioning, unconditional, request, **words)
        if not self.newer:  # tokens
            latents = latents.transpose(1, 2).unflatten(2, size)
        if first is not None:
            latents = torch.cat([first.to(latents), latents[:, :, 1:]], dim=2)
        return latents.float()

    def fingerprints(self) -> dict[str, str]:
        """T5 reads padding otherwise from 0.9.5 on."""
        prints = super().fingerprints()
        return (
            prints | {"text_encoder": f"{prints['text_encoder']}-masked"}
            if self.newer
            else prints
        )


def _newer(folder: Path) -> bool:
    """Whether it is a checkpoint of 0.9.5 or later, which the pipeline with conditions samples from.

    Its VAE tells, where its model_index.json names the older pipeline: positions in time begin otherwise in it.
    """
    kinds = read_config(folder / "vae" / "config.json").get("down_block_types") or ()
    index = read_config(folder / "model_index.json")
    return index.get("_class_name") == "LTXConditionPipeline" or any(
        "095" in kind for kind in kinds
    )


def _stride(vae: Mapping[str, Any], kind: str, patch: int) -> int:
    """How many pixels or frames a latent covers; older configs have it of the VAE's layers alone."""
    ratio = vae.get(f"{kind}_compression_ratio")
    own = vae.get("patch_size" if kind == "spatial" else "patch_size_t", patch)
    return int(ratio if ratio is not None else own * 2 ** sum(vae["spatio_temporal_scaling"]))


def _shifts(scheduler: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """The rule by which the shift grows with the tokens: the scheduler's own where it has one."""
    if not scheduler.get("use_dynamic_shifting"):
        return SHIFTS
    names = ("base_image_seq_len", "base_shift", "max_image_seq_len", "max_shift")
    first, low, second, high = (
        float(scheduler.get(name, SHIFTS[i])) for i, name in enumerate(names)
    )
    return first, low, second, high


def _tokens(latents: Tensor) -> Tensor:
    """Latents (B,C,F,H,W) -> tokens (B,F·H·W,C), as the transformer takes them."""
    return latents.flatten(2).transpose(1, 2)


def _start(
    first: Tensor, size: tuple[int, int, int], generators: Sequence[torch.Generator]
) -> Tensor:
    """What image-to-video begins with: the clean frames (B,C,1,H,W), and the noise that its pipeline would draw."""
    drawn = []
    for frame, generator in zip(first, generators, strict=True):
        torch.randn(
            frame[None].shape, generator=generator
        )  # the pipeline draws the image's latents first
        drawn.append(torch.randn((1, frame.shape[0], *size), generator=generator))
    return torch.cat([first, torch.cat(drawn).to(first)[:, :, 1:]], dim=2)


@contextmanager
def _quiet_schedule(scheduler: Any) -> Iterator[None]:
    """Without the warning that a schedule of timesteps may be shifted otherwise than its noise, where nothing shifts it."""
    config = scheduler.config
    logger = logging.getLogger(type(scheduler).__module__)
    level = logger.level
    if config.shift == 1 and not config.use_dynamic_shifting and not config.shift_terminal:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
