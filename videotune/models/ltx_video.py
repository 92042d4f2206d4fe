"""LTX-Video 0.9.x, 2B and 13B (HaCohen et al. 2024, arXiv 2501.00103).

Flow matching, T5 text, and a VAE that compresses 32 x 32 x 8. From text, and from a
first frame that is fed clean. Positions in time are in seconds, so fps counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch
from videotune.model_spec import ModelSpec, VideoRules
from videotune.models import ltx_tiny
from videotune.models.base import DiffusersModel
from videotune.models.given_frames import vae_with_results, with_given_cells
from videotune.models.ltx_conditions import (
    CONDITIONS,
    GivenFrames,
    frames_at_the_end,
    given_to_pipeline,
    pipeline_arguments,
    tokens_of,
    video_coords,
    with_tokens_in_front,
)
from videotune.models.ltx_configs import is_095_or_later, shifts_of, stride_of
from videotune.models.model_files import read_config
from videotune.models.pipelines import (
    FLOW_SCHEDULERS,
    initial_latents,
    least_steps_of,
    load_scheduler,
    vae_stand_in,
    without_shift_warning,
)
from videotune.models.position_cache import cached_positions
from videotune.models.token_plans import video_token_plan
from videotune.rng import generator_for, torch_seed
from videotune.types import (
    Batch,
    ClipShape,
    Conditioning,
    FillFn,
    Networks,
    SampleRequest,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

SIZES = {(2048, 28): "2B", (4096, 48): "13B"}
"""(width, blocks) of the published transformers."""

LICENCE = "LTXV Open Weights License"
"""Licence of all 13B.

2B from 0.9.5 on has OpenRAIL-M first, then this one; no config has it.
"""


DECODE_TIMESTEP = 0.05
"""Timestep with which a VAE with timestep conditioning decodes, as its authors do."""

DECODE_NOISE = 0.025
"""Share of noise that is added to the latents before such a VAE decodes them."""

NEWER_TOKENS = 256
"""Tokens of a caption in the pipeline of 0.9.5 and newer."""


class LTXVideo(DiffusersModel):
    """An LTX-Video checkpoint."""

    # The spec's shift is that of 2560 tokens, half way between the two of
    # ``shift_by_tokens``.
    series = "LTX-Video 0.9"
    spec = ModelSpec(
        name="ltx_video",
        aliases=(
            "LTXPipeline",
            "LTXImageToVideoPipeline",
            "LTXConditionPipeline",
            "ltx",
            "ltxv",
            "ltx-video",
            "LTX_VIDEO",
            "LTXV_2B",
            "LTXV_13B",
        ),
        title="LTX-Video 0.9.0 2B",
        prediction="flow",
        rules=VideoRules(
            frame_step=8,
            frame_rest=1,
            side_multiple=32,
            fps=25.0,
            spatial_stride=32,
            temporal_stride=8,
            most_frames=257,
        ),
        text_tokens=128,
        blocks=("transformer_blocks",),
        lora_targets={
            "attention": (
                r"transformer_blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)",
            ),
            "feed_forward": (r"transformer_blocks\.\d+\.ff\.(net\.0\.proj|net\.2)",),
            "linear": (
                r"transformer_blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)",
                r"transformer_blocks\.\d+\.ff\.(net\.0\.proj|net\.2)",
            ),
            "all": (r"transformer_blocks\..+",),
            "self_attention": (
                r"transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)",
            ),
            "cross_attention": (
                r"transformer_blocks\.\d+\.attn2\.(to_q|to_k|to_v|to_out\.0)",
            ),
        },
        splits_tokens=True,
        attention_heads=32,
        default_resolution=600,
        timestep_shift=4.48,
        sample_steps=50,
        caches_first_block=True,
        least_steps=2,
        sample_guidance=3.0,
        licence="LTX-Video RAIL-M licence",
        authors_read_otherwise=True,
        latent_channels=128,
        patch=(1, 1, 1),
        image_conditioning="replace",
        first_frame_probability=0.1,
        sample_shape=(161, 512, 704),
        schedulers=FLOW_SCHEDULERS,
        rescales_guidance=True,
        takes_frame_rate=True,
        keeps_variance=True,
        shift_by_tokens=(1024.0, 0.95, 4096.0, 2.05),
    )
    variants = ("0.9.0", "0.9.1", "0.9.7")
    transformer_class = "LTXVideoTransformer3DModel"
    vae_class = "AutoencoderKLLTXVideo"
    embedding_names = {"text_encoder": "t5xxl"}
    original_names = (
        (r"^proj_in\.", "patchify_proj."),
        (r"^time_embed\.", "adaln_single."),
        (r"\.norm_q\.", ".q_norm."),
        (r"\.norm_k\.", ".k_norm."),
    )
    config_defaults = {"patch_size": 1, "patch_size_t": 1}
    tiny_parts = ltx_tiny.PARTS
    tiny_variants = ltx_tiny.VARIANTS

    @cached_property
    def is_newer(self) -> bool:
        """Whether it is a checkpoint of 0.9.5 or later."""
        return is_095_or_later(self.folder)

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """Read the spec of a checkpoint.

        Raises:
            VideotuneError: for a checkpoint that is not a published LTX-Video.
        """
        configs = cls.read_configs(folder)
        net = configs.transformer
        vae = configs.vae
        if (net.get("patch_size", 1), net.get("patch_size_t", 1)) != (1, 1):
            raise VideotuneError(
                f"{folder}: a token covers more than one latent; no published LTX-Video does that"
            )

        width = net["num_attention_heads"] * net["attention_head_dim"]
        size = SIZES.get((width, net["num_layers"]), "")
        newer = is_095_or_later(folder)
        if newer:
            version = "0.9.5+"
            text_tokens = NEWER_TOKENS
            licence = LICENCE if size == "13B" else f"OpenRAIL-M or {LICENCE}"
        else:
            version = "0.9.1" if vae.get("timestep_conditioning") else "0.9.0"
            text_tokens = cls.spec.text_tokens
            licence = cls.spec.licence

        spatial = stride_of(vae, "spatial", 4)
        temporal = stride_of(vae, "temporal", 1)
        scheduler = read_config(folder / "scheduler" / "scheduler_config.json")
        return replace(
            cls.spec,
            title=f"LTX-Video {version} {size}".rstrip(),
            rules=replace(
                cls.spec.rules,
                frame_step=temporal,
                side_multiple=spatial,
                spatial_stride=spatial,
                temporal_stride=temporal,
            ),
            latent_channels=configs.latent_channels,
            text_tokens=text_tokens,
            text_width=net["caption_channels"],
            authors_read_otherwise=not newer,
            attention_heads=net["num_attention_heads"],
            licence=licence,
            further_conditions=CONDITIONS if newer else {},
            # The newer pipeline passes a timestep for each token.
            schedulers=FLOW_SCHEDULERS[:1] if newer else FLOW_SCHEDULERS,
            shift_by_tokens=shifts_of(scheduler),
            least_steps=least_steps_of(scheduler),
        )

    @classmethod
    def with_authors_text(cls, spec: ModelSpec) -> ModelSpec:
        """Return the spec with the authors' text: 256 tokens, the padding masked.

        Raises:
            VideotuneError: from 0.9.5 on, whose pipeline reads captions so too.
        """
        return replace(super().with_authors_text(spec), text_tokens=NEWER_TOKENS)

    def text_pipeline_class(self) -> Any:
        """Return the pipeline that reads captions: the newer one masks the padding."""
        if self.spec.authors_text:
            return diffusers.LTXConditionPipeline
        return self.pipeline_class()

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of a clip's states, with the mask of a full caption."""
        mask = torch.ones(self.spec.text_tokens, dtype=torch.bool)
        return super().blank_states(shape) | {"mask": mask}

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """Load a part; a VAE with timestep conditioning always gets the usual timestep."""
        net: Any = super().part(name, fill)
        if name == "vae" and net.config.timestep_conditioning:
            # A bound method would keep the network in memory until the garbage
            # collector runs.
            decode = type(net).decode
            weak_net = ref(net)

            def decode_at_usual_timestep(latents: Tensor, **arguments: Any) -> Any:
                timesteps = latents.new_full((len(latents),), DECODE_TIMESTEP)
                return decode(weak_net(), latents, timesteps, **arguments)

            net.decode = decode_at_usual_timestep
        return net

    def raw_latents(self, latents: Tensor) -> Tensor:
        """Return the VAE's latents, with a little constant noise for timestep
        conditioning.
        """
        raw = super().raw_latents(latents)
        if self.vae().config.timestep_conditioning:
            generator = generator_for(0, "decode noise")
            noise = torch.from_numpy(
                generator.standard_normal(tuple(raw.shape), "float32")
            )
            raw = (1 - DECODE_NOISE) * raw + DECODE_NOISE * noise.to(raw)
        return raw

    def decode(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Decode latents with a fixed seed: some VAEs draw from torch's global
        generators.

        The generators' states are restored.
        """
        devices = [] if self.device.type == "cpu" else [self.device]
        with (
            self.vae_lock,
            torch.random.fork_rng(devices, device_type=self.device.type),
        ):
            torch.default_generator.manual_seed(torch_seed(0, "decoder noise"))
            for device in devices:
                torch.get_device_module(device).manual_seed(
                    torch_seed(0, "decoder noise")
                )
            return super().decode(latents, tiled)

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v = noise - x0.

        The timestep input is 1000 · t in float32, and 0 for tokens of conditioning
        frames.
        """
        times = self.model_timesteps(x_t, t, batch)
        if self.is_newer and times.ndim == 1:
            times = times[:, None]
        tokens = _tokens(x_t.to(self.dtype))
        given = frames_at_the_end(
            batch.conditioning.extras, x_t.shape[2], self.spec.rules
        )
        if given:
            tokens, times = with_tokens_in_front(tokens, times, given)

        assert batch.conditioning.text_mask is not None
        output = net(
            hidden_states=tokens,
            encoder_hidden_states=batch.conditioning.text.to(self.dtype),
            timestep=times,
            encoder_attention_mask=batch.conditioning.text_mask,
            return_dict=False,
            **self._positions(batch.fps, x_t.shape[2:], given),
        )
        of_clip = output[0][:, -math.prod(x_t.shape[2:]) :]
        return of_clip.transpose(1, 2).reshape(x_t.shape).float()

    def token_plan(self, net: Any) -> Mapping[str, Any]:
        """Return diffusers' plan for the tokens of the video, with their timesteps.

        The captions' tokens, which diffusers' own plan also splits, stay whole, as for
        Wan: the backward pass of its attention takes as many keys as queries.
        """
        return video_token_plan(net, rope_dims=3, rope_tokens_dim=1)

    def _positions(
        self,
        fps: Tensor,
        size: Sequence[int],
        given: Sequence[GivenFrames],
    ) -> dict[str, Any]:
        """Return the tokens' positions in pixels and seconds, as the checkpoint's
        pipeline does.

        Up to 0.9.1 latent frame i is at frame 8i; from 0.9.5 on it is at its first
        frame, max(8i - 7, 0).

        Args:
            fps: frames a second of each sample (B,).
            size: latent frames, rows and columns.
            given: tokens in front of the clip's.
        """
        rules = self.spec.rules
        frames, rows, columns = size
        if not self.is_newer:
            seconds = (rules.temporal_stride / fps.float()).view(-1, 1, 1, 1, 1)
            return {
                "num_frames": frames,
                "height": rows,
                "width": columns,
                "rope_interpolation_scale": (
                    seconds,
                    rules.spatial_stride,
                    rules.spatial_stride,
                ),
            }

        frames_of_clip = frames
        parts = []
        for item in given:
            count = tokens_of(item).shape[2]
            parts.append(
                self._coords(count, rows, columns, fps.device, item.frame_index)
            )
            frames += count
        parts.append(self._coords(frames_of_clip, rows, columns, fps.device))
        coords = torch.cat(parts, dim=2) if given else parts[0]

        seconds = coords[:, :1] * (1 / fps.float()).view(-1, 1, 1)
        coords = torch.cat([seconds, coords[:, 1:].expand(len(fps), -1, -1)], dim=1)
        # The transformer ignores num_frames if it gets positions, but ``token_frames``
        # reads it.
        return {"num_frames": frames, "video_coords": coords}

    def _coords(
        self, frames: int, rows: int, columns: int, device: Any, frame_index: int = 0
    ) -> Tensor:
        """Return ``video_coords``, the same tensor at each call."""
        rules = self.spec.rules
        return cached_positions(
            self._loaded.setdefault("coords", {}),
            (frames, rows, columns, frame_index),
            device,
            lambda: video_coords(frames, rows, columns, rules, device, frame_index),
        )

    def token_frames(
        self,
        hidden_states: Tensor,
        num_frames: int | None = None,
        video_coords: Any = None,
        **_: Any,
    ) -> int:
        """Return the frames of the video tokens.

        A pipeline that passes positions passes no number of frames: tokens of the first
        frame are those with the first token's time.
        """
        if num_frames:
            return num_frames
        times = video_coords[0, 0]
        tokens_per_frame = int((times == times[0]).sum())
        return hidden_states.shape[1] // tokens_per_frame

    def pipeline_class(self) -> Any:
        """Return the pipeline of the version; the newer one works with and without an
        image.
        """
        return (
            diffusers.LTXConditionPipeline if self.is_newer else diffusers.LTXPipeline
        )

    def scheduler(self, shift: float | None) -> Any:
        """Load the scheduler.

        Raises:
            VideotuneError: for a ``shift`` from 0.9.5 on, whose pipeline has a fixed
                schedule.
        """
        if shift is not None and self.is_newer:
            raise VideotuneError(
                f"sample.shift: {self.spec.title} has a fixed schedule. Remove the key."
            )
        return load_scheduler(self.folder, shift, use_dynamic_shifting=False)

    def pipeline(
        self, nets: Networks, shift: float | None = None, cls: Any = None, **parts: Any
    ) -> Any:
        """Build the pipeline with a stand-in of the VAE, from which it reads the
        strides.
        """
        vae = vae_stand_in(self.spec, None, self.device)
        return super().pipeline(nets, shift, cls, **({"vae": vae} | parts))

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample latents. What samples are conditioned on is in ``request.first`` and
        ``request.known``, at their end also in the ``extras``.

        Up to 0.9.1 the image-to-video pipeline continues first frames. The newer pipeline
        adds noise to given frames while it samples; the result has those that were
        passed.
        """
        size = self.spec.rules.latent_size(request.shape)
        generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
        arguments: dict[str, Any] = {"generator": generators}
        pipeline_class = None
        if self.is_newer:
            given = given_to_pipeline(self.spec, conditioning, request)
            results = [frames.latents for frames in given]
            vae = vae_with_results(self.spec, results, self.device)
            arguments |= pipeline_arguments(given, request.shape, self.spec.rules)
        else:
            first = request.first
            vae = vae_stand_in(self.spec, first, self.device)
            if first is not None:
                pipeline_class = diffusers.LTXImageToVideoPipeline
                arguments["latents"] = _tokens(
                    initial_latents(first.float(), size, generators)
                )

        pipe = self.pipeline(nets, request.shift, pipeline_class, vae=vae)
        with without_shift_warning(pipe.scheduler):
            latents = self.run_pipeline(
                pipe, conditioning, unconditional, request, **arguments
            )

        if not self.is_newer:  # the older pipelines return tokens
            latents = latents.transpose(1, 2).unflatten(2, size)
        return with_given_cells(latents, request).float()

    def fingerprints(self) -> dict[str, str]:
        """Return the parts' hashes; T5's has whether its attention masks padding."""
        prints = super().fingerprints()
        if self.is_newer or self.spec.authors_text:
            prints["text_encoder"] = f"{prints['text_encoder']}-masked"
        return prints


def _tokens(latents: Tensor) -> Tensor:
    """Latents (B,C,F,H,W) -> tokens (B,F·H·W,C), as the transformer takes them."""
    return latents.flatten(2).transpose(1, 2)
