"""LTX-2, LTX-2.3 and LTX-2.5: video with sound.

Flow matching over tokens of video and of sound in one transformer, each with a noise
level of its own. Captions go through Gemma and two connectors, one for each kind of
token. Positions in time are in seconds, so fps counts.

Without sound, a step runs the video alone (``isolate_modalities``): no video token sees
sound. Samples are drawn by diffusers' pipeline, which always draws both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import torch
from videotune.model_spec import ModelSpec, SoundRules, VideoRules
from videotune.models import ltx2_tiny
from videotune.models.ltx2_conditions import (
    CONDITIONS,
    AppendedFrames,
    appended_frames,
    last_frame_coords,
    with_tokens_behind,
)
from videotune.models.ltx2_configs import (
    CONNECTORS,
    TEXT_ENCODERS,
    connector_widths,
    strides_of,
    text_encoder_class,
    version_of,
)
from videotune.models.ltx2_connectors import (
    AUTHORS_NAMES,
    connector_rules,
    rules_of_checkpoint,
)
from videotune.models.ltx2_sampling import LTX2Sampling
from videotune.models.ltx2_sound import (
    AUDIO_VAE,
    CROSS_MODAL_TARGETS,
    SOUND_PATHS,
    SOUND_TARGETS,
    TARGETS_WITH_SOUND,
    VOCODER,
    decode_waveform,
    encode_waveform,
    idle_paths,
    load_audio_vae,
    load_vocoder,
    sound_rules,
    to_tokens,
)
from videotune.models.model_files import read_config
from videotune.models.pipelines import (
    FLOW_SCHEDULERS,
    least_steps_of,
)
from videotune.models.position_cache import cached_positions
from videotune.models.token_plans import sound_attention_plan, video_token_plan
from videotune.types import (
    Batch,
    ClipShape,
    FillFn,
    Velocity,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

SIZES = {"2": "19B", "2.3": "22B", "2.5": "22B"}
"""Published sizes of a transformer of ``WIDTH`` and ``BLOCKS``, by version."""

WIDTH = 4096
BLOCKS = 48

FIRST_VERSION_ARGUMENTS = {
    "use_cross_timestep": False,
    "spatio_temporal_guidance_blocks": [29],
}
"""Arguments of a pipeline's call for LTX-2; diffusers' defaults fit LTX-2.3 and 2.5."""

UNGUIDED = {
    "audio_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_rescale": 0.0,
}
"""Arguments with which a step of a pipeline is one pass, beside a guidance of 1."""

VIDEO_ATTENTION = r"transformer_blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)"
VIDEO_FEED_FORWARD = r"transformer_blocks\.\d+\.ff\.(net\.0\.proj|net\.2)"


class LTX2(LTX2Sampling):
    """An LTX-2 checkpoint."""

    series = "LTX-2"
    spec = ModelSpec(
        name="ltx2",
        aliases=(
            "LTX2Pipeline",
            "LTX2ImageToVideoPipeline",
            "LTX2ConditionPipeline",
            "LTX2InContextPipeline",
            "ltx-2",
            "ltx-2.3",
            "ltx-2.5",
            "LTX_2",
        ),
        title="LTX-2.3 22B",
        prediction="flow",
        rules=VideoRules(
            frame_step=8,
            frame_rest=1,
            side_multiple=32,
            fps=24.0,
            spatial_stride=32,
            temporal_stride=8,
        ),
        text_tokens=1024,
        text_numbers=1024 * 2048,
        blocks=("transformer_blocks",),
        lora_targets={
            "attention": (VIDEO_ATTENTION,),
            "feed_forward": (VIDEO_FEED_FORWARD,),
            "linear": (VIDEO_ATTENTION, VIDEO_FEED_FORWARD),
            "all": (r"transformer_blocks\..+",),
            "self_attention": (
                r"transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)",
            ),
            "cross_attention": (
                r"transformer_blocks\.\d+\.attn2\.(to_q|to_k|to_v|to_out\.0)",
            ),
            "video": (VIDEO_ATTENTION, VIDEO_FEED_FORWARD),
            "sound": SOUND_TARGETS,
            "cross_modal": CROSS_MODAL_TARGETS,
        },
        idle_paths=(SOUND_PATHS,),
        sound=SoundRules(
            sample_rate=16000,
            latents_per_second=25.0,
            channels=128,
            lora_targets=TARGETS_WITH_SOUND,
            modules=(SOUND_PATHS,),
            idle_paths=idle_paths(BLOCKS),
        ),
        connectors=connector_rules(1024, 4096, 2048),
        splits_tokens=True,
        attention_heads=32,
        default_resolution=627,
        timestep_distribution="STRETCHED_LOGIT_NORMAL",
        timestep_shift=4.48,
        shifts_in_training=True,
        shift_by_tokens=(1024.0, 0.95, 4096.0, 2.05),
        sample_steps=30,
        least_steps=2,
        sample_guidance=3.0,
        sample_passes=4,
        sample_rescale=0.7,
        licence="LTX-2.x Community License, whose terms pass to adapters",
        licence_terms="https://github.com/Lightricks/LTX-2/blob/main/LICENSE",
        latent_channels=128,
        patch=(1, 1, 1),
        image_conditioning="replace",
        further_conditions=CONDITIONS,
        first_frame_probability=0.1,
        sample_shape=(121, 512, 768),
        # The pipelines copy their scheduler for the sound, and read its noise levels.
        schedulers=FLOW_SCHEDULERS[:1],
        rescales_guidance=True,
        takes_frame_rate=True,
        unguided_arguments=UNGUIDED,
    )
    variants = ("2.3", "2.0", "2.5")
    transformer_class = "LTX2VideoTransformer3DModel"
    vae_class = "AutoencoderKLLTX2Video"
    text_encoders = {"text_encoder": TEXT_ENCODERS[0]}
    pipelines = ("LTX2Pipeline",)
    comfyui_names = AUTHORS_NAMES
    original_names = (
        *AUTHORS_NAMES,
        (r"^proj_in\.", "patchify_proj."),
        (r"^audio_proj_in\.", "audio_patchify_proj."),
        (r"^time_embed\.", "adaln_single."),
        (r"^audio_time_embed\.", "audio_adaln_single."),
        (r"^prompt_adaln\.", "prompt_adaln_single."),
        (r"^audio_prompt_adaln\.", "audio_prompt_adaln_single."),
        (r"^av_cross_attn_(\w+)_scale_shift\.", r"av_ca_\1_scale_shift_adaln_single."),
        (r"^av_cross_attn_video_a2v_gate\.", "av_ca_a2v_gate_adaln_single."),
        (r"^av_cross_attn_audio_v2a_gate\.", "av_ca_v2a_gate_adaln_single."),
        (
            r"\.(video|audio)_a2v_cross_attn_scale_shift_table$",
            r".scale_shift_table_a2v_ca_\1",
        ),
        (r"\.norm_q\.", ".q_norm."),
        (r"\.norm_k\.", ".k_norm."),
    )
    config_defaults = {"patch_size": 1, "patch_size_t": 1}
    tiny_parts = ltx2_tiny.PARTS
    tiny_variants = ltx2_tiny.VARIANTS

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """Read the spec of a checkpoint.

        Raises:
            VideotuneError: for a checkpoint that is not a published LTX-2.
        """
        configs = cls.read_configs(folder)
        net = configs.transformer
        text_encoder_class(folder)
        if (net.get("patch_size", 1), net.get("patch_size_t", 1)) != (1, 1):
            raise VideotuneError(
                f"{folder}: a token covers more than one latent; no published LTX-2 does that"
            )
        spatial, temporal = strides_of(folder, configs.vae)

        version = version_of(net)
        width = net["num_attention_heads"] * net["attention_head_dim"]
        is_published = (width, net["num_layers"]) == (WIDTH, BLOCKS)
        size = SIZES[version] if is_published else ""
        connectors = read_config(folder / CONNECTORS / "config.json")
        text_width, sound_width = connector_widths(folder, connectors, net)
        return replace(
            cls.spec,
            title=f"LTX-{version} {size}".rstrip(),
            rules=replace(
                cls.spec.rules,
                frame_step=temporal,
                side_multiple=spatial,
                spatial_stride=spatial,
                temporal_stride=temporal,
            ),
            latent_channels=configs.latent_channels,
            text_width=text_width,
            attention_heads=net["num_attention_heads"],
            text_numbers=cls.spec.text_tokens * sound_width,
            sound=sound_rules(folder, net),
            connectors=rules_of_checkpoint(folder, cls.spec.text_tokens),
            least_steps=least_steps_of(
                read_config(folder / "scheduler" / "scheduler_config.json")
            ),
            pipeline_arguments=FIRST_VERSION_ARGUMENTS if version == "2" else {},
        )

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """Load a part.

        Raises:
            VideotuneError: for a VAE without statistics of its latents, which diffusers
                would take for 0 and 1.
        """
        net: Any = super().part(name, fill)
        if name == "vae" and fill is None:
            is_default = not net.latents_mean.any() and bool(
                (net.latents_std == 1).all()
            )
            if is_default:
                raise VideotuneError(
                    f"{self.folder / 'vae'}: its weights lack latents_mean and latents_std, which "
                    "normalise the latents. Take the file that comes with the checkpoint"
                )
        return net

    def check_shape(self, frames: int, height: int, width: int) -> None:
        """Raise VideotuneError for a side of one latent, if the VAE cannot decode it.

        LTX-2's decoder mirrors the latents at their border.
        """
        config = read_config(self.folder / "vae" / "config.json")
        mirrors = config.get("decoder_spatial_padding_mode", "reflect") == "reflect"
        least = 2 * self.spec.rules.spatial_stride
        if mirrors and min(height, width) < least:
            raise VideotuneError(
                f"resolution: the VAE of {self.spec.title} decodes at least {least} pixels a side, "
                f"not {height}x{width}"
            )

    # the denoiser

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v = noise - x0 of the video, which sees no sound."""
        output = net(
            **self._video_inputs(net, x_t, t, batch),
            **self._one_silent_token(net, x_t, batch),
            isolate_modalities=True,
            return_dict=False,
        )
        return _velocity_of(output[0], x_t)

    def predict_with_sound(
        self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch, sound_x_t: Tensor
    ) -> Velocity:
        """Return v of the video and of the sound, which see each other."""
        assert batch.sound is not None
        sigma = batch.sound.t.float() * 1000
        length = sound_x_t.shape[2]
        coords = self._audio_coords(length, x_t.device)
        output = net(
            **self._video_inputs(net, x_t, t, batch),
            audio_hidden_states=to_tokens(sound_x_t.to(self.dtype)),
            audio_encoder_hidden_states=self.text_for_sound(net, batch.conditioning),
            audio_num_frames=length,
            audio_coords=coords.expand(len(x_t), -1, -1, -1),
            audio_timestep=sigma,
            audio_sigma=sigma,
            return_dict=False,
        )
        return Velocity(
            _velocity_of(output[0], x_t), _velocity_of(output[1], sound_x_t)
        )

    def _video_inputs(
        self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch
    ) -> dict[str, Any]:
        """Return the transformer's inputs of the video.

        The timestep input is 1000 · t in float32, and 0 for tokens that are given. The
        transformer also takes the noise level of the sample as such.
        """
        appended = appended_frames(batch.conditioning.extras)
        tokens = to_tokens(x_t.to(self.dtype))
        timestep = self.model_timesteps(x_t, t, batch)
        if appended:
            tokens, timestep = with_tokens_behind(tokens, timestep, appended)

        frames, rows, columns = x_t.shape[2:]
        return {
            "hidden_states": tokens,
            "encoder_hidden_states": self.text_for_video(net, batch.conditioning),
            "timestep": timestep,
            "sigma": t.float() * 1000,
            "num_frames": frames,
            "height": rows,
            "width": columns,
            "video_coords": self._video_coords(batch.fps, x_t, appended),
            "use_cross_timestep": self.spec.pipeline_arguments.get(
                "use_cross_timestep", True
            ),
        }

    def token_plan(self, net: Any) -> Mapping[str, Any]:
        """Return diffusers' plan for the tokens of the video, with their timesteps.

        Its positions are of two forms, of which diffusers' own plan knows the older.
        The captions stay whole, as for LTX-Video, and so does the sound of samples.
        """
        if net.config.rope_type == "split":
            # (B, heads, tokens, width)
            plan = video_token_plan(net, rope_dims=4, rope_tokens_dim=2)
        else:
            plan = video_token_plan(net, rope_dims=3, rope_tokens_dim=1)
        return plan | sound_attention_plan(plan["rope"][0])

    def _one_silent_token(
        self, net: nn.Module, x_t: Tensor, batch: Batch
    ) -> dict[str, Any]:
        """Return the least sound that the transformer runs with."""
        samples = len(x_t)
        width = self.config.get("audio_in_channels", 128)
        coords = self._audio_coords(1, x_t.device)
        return {
            "audio_hidden_states": x_t.new_zeros(samples, 1, width, dtype=self.dtype),
            "audio_encoder_hidden_states": self.blank_text_for_sound(
                net, batch.conditioning
            ),
            "audio_num_frames": 1,
            "audio_coords": coords.expand(samples, -1, -1, -1),
            # As for a sound that is given clean.
            "audio_timestep": x_t.new_zeros(samples, dtype=torch.float32),
            "audio_sigma": x_t.new_zeros(samples, dtype=torch.float32),
        }

    def _audio_coords(self, length: int, device: Any) -> Tensor:
        return cached_positions(
            self._loaded.setdefault("coords", {}),
            ("audio", length),
            device,
            lambda: self._audio_rope.prepare_audio_coords(1, length, device),
        )

    def _video_coords(
        self, fps: Tensor, x_t: Tensor, appended: list[AppendedFrames]
    ) -> Tensor:
        """Return the bounds of the tokens (B,3,tokens,2), in seconds and pixels.

        Args:
            fps: frames a second of each sample (B,).
            x_t: latents of the clip.
            appended: tokens behind the clip's.
        """
        frames, rows, columns = x_t.shape[2:]
        rules = self.spec.rules
        cache: dict[object, Tensor] = self._loaded.setdefault("coords", {})

        def of_grid(count: int) -> Tensor:
            return cached_positions(
                cache,
                (count, rows, columns),
                x_t.device,
                lambda: self._rope.prepare_video_coords(
                    1, count, rows, columns, x_t.device, fps=1.0
                ),
            )

        parts = [of_grid(frames)]
        for item in appended:
            if item.name == "reference":
                parts.append(of_grid(item.latents.shape[2]))
                continue
            of_last = cached_positions(
                cache,
                ("last frame", frames, rows, columns),
                x_t.device,
                lambda: last_frame_coords(frames, rows, columns, rules, x_t.device),
            )
            parts.append(of_last)

        coords = torch.cat(parts, dim=2) if appended else parts[0]
        seconds = coords[:, :1] / fps.float().view(-1, 1, 1, 1)
        return torch.cat([seconds, coords[:, 1:].expand(len(fps), -1, -1, -1)], dim=1)

    def token_frames(
        self, hidden_states: Tensor, height: int = 1, width: int = 1, **_: Any
    ) -> int:
        """Return the frames of the video tokens, appended ones included."""
        return hidden_states.shape[1] // (height * width)

    # sound

    def encode_sound(self, waveform: Tensor, shape: ClipShape) -> Tensor:
        """Encode a waveform (2,n) to normalised latents (C,L), on the CPU."""
        assert self.spec.sound is not None
        with self.vae_lock, torch.no_grad():
            latents = encode_waveform(
                self._audio_vae(), waveform.to(self.device), self.spec.sound, shape
            )
        return latents.cpu().contiguous()

    def decode_sound(self, latents: Tensor) -> tuple[Tensor, int]:
        """Decode normalised latents (C,L) to a waveform and its numbers a second."""
        with self.vae_lock, torch.no_grad():
            vocoder = self._load_once(
                VOCODER, lambda: load_vocoder(self.folder, self.device)
            )
            waveform = decode_waveform(
                self._audio_vae(), vocoder, latents.to(self.device)
            )
        return waveform.cpu(), int(vocoder.config.output_sampling_rate)

    def _audio_vae(self) -> Any:
        """Return the sound's VAE in float32."""
        return self._load_once(
            AUDIO_VAE, lambda: load_audio_vae(self.folder, self.device)
        )


def _velocity_of(tokens: Tensor, x_t: Tensor) -> Tensor:
    """Return the transformer's output (B,S,C) in the form of its latents, float32; the
    outputs of appended tokens are dropped.
    """
    of_latents = tokens[:, : math.prod(x_t.shape[2:])]
    return of_latents.transpose(1, 2).reshape(x_t.shape).float()
