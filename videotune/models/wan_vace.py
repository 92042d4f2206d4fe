"""Wan VACE (2.1 1.3B and 14B, and 2.2 with two experts): a Wan with a second list of
blocks that reads what a clip shows: kept pixels, a control video, a mask, and a
reference image before the clip.

VACE: all-in-one video creation and editing (Jiang et al. 2025, arXiv 2503.07598).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch
from videotune.model_spec import ConditionSupport, ModelSpec
from videotune.models import wan_tiny
from videotune.models.frame_in_front import scattered
from videotune.models.model_files import read_config
from videotune.models.pipelines import bare_pipeline, network_stand_in, vae_stand_in
from videotune.models.single_samples import one_by_one
from videotune.models.wan import ORIGINAL_NAMES, Wan
from videotune.types import ClipShape, Conditioning, ConditionPixels

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from videotune.types import Batch, Networks, SampleRequest

CONDITIONS = {
    **dict.fromkeys(
        ("first_frame", "last_frame", "prefix", "suffix", "mask", "control"),
        ConditionSupport("channels"),
    ),
    "reference": ConditionSupport("context", is_image=True),
}
"""What channels show, and an image before the clip that is denoised with it."""


def _in_both_lists(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return patterns of modules in ``blocks`` so that they match ``vace_blocks``, too."""
    return tuple(rf"(vace_)?{pattern}" for pattern in patterns)


class WanVace(Wan):
    """A Wan VACE checkpoint."""

    series = "Wan VACE"
    spec = replace(
        Wan.spec,
        name="wan_vace",
        aliases=("WanVACEPipeline", "vace", "wan-vace"),
        title="Wan 2.1 VACE",
        blocks=("vace_blocks", "blocks"),
        lora_targets={
            name: _in_both_lists(patterns)
            for name, patterns in Wan.spec.lora_targets.items()
        },
        first_frame_probability=0.0,
        # What its second list of blocks gives would be added twice in a skipped step.
        caches_first_block=False,
        further_conditions=CONDITIONS,
        control_channels=96,
        splits_tokens=False,
    )
    variants = ("vace", "vace-a14b")
    transformer_class = "WanVACETransformer3DModel"
    pipelines = ("WanVACEPipeline",)
    original_names = (
        (r"^(vace_blocks\.\d+)\.proj_in\.", r"\1.before_proj."),
        (r"^(vace_blocks\.\d+)\.proj_out\.", r"\1.after_proj."),
        *(
            (rule.replace("^(blocks", "^((?:vace_)?blocks"), name)
            for rule, name in ORIGINAL_NAMES
        ),
    )
    tiny_parts = wan_tiny.VACE_PARTS
    tiny_variants = wan_tiny.VACE_VARIANTS

    @classmethod
    def read_spec(cls, folder: Path) -> ModelSpec:
        """Read the spec of a checkpoint.

        Raises:
            VideotuneError: for a Wan checkpoint of another kind.
        """
        net = read_config(folder / "transformer" / "config.json")
        spec = super().read_spec(folder)
        channels = net.get("vace_in_channels")
        expected = 2 * spec.latent_channels + spec.rules.spatial_stride**2
        if channels != expected or net.get("image_dim") is not None:
            raise VideotuneError(
                f"{folder}: its transformer reads {channels!r} control channels, two latents and a mask are "
                f"{expected}. Take both parts from one Wan VACE checkpoint"
            )

        version, _, kind_and_size = spec.title.removeprefix("Wan ").partition(" ")
        size = kind_and_size.partition(" ")[2]
        return replace(
            spec,
            title=f"Wan {version} VACE {size}".rstrip(),
            blocks=cls.spec.blocks,
            lora_targets=cls.spec.lora_targets,
            first_frame_probability=0.0,
            caches_first_block=cls.spec.caches_first_block,
            further_conditions=CONDITIONS,
            control_channels=expected,
            splits_tokens=cls.spec.splits_tokens,
        )

    def lora_formats(self) -> tuple[str, ...]:
        """Return the formats in which a LoRA is written.

        diffusers refuses ComfyUI's names of the second list of blocks.
        """
        return ("diffusers",)

    def _conditions_pipeline(self) -> Any:
        """Return the pipeline that encodes conditions, without a denoiser."""
        config = read_config(self.folder / "transformer" / "config.json")
        transformer = network_stand_in({}, "", config, self.dtype, self.device)
        pipe = bare_pipeline(
            diffusers.WanVACEPipeline, vae=self.vae(), transformer=transformer
        )
        pipe.vae_scale_factor_spatial = self.spec.rules.spatial_stride
        pipe.vae_scale_factor_temporal = self.spec.rules.temporal_stride
        return pipe

    def channel_states(self, pixels: ConditionPixels) -> dict[str, Tensor]:
        """Return what the pipeline makes of known pixels and of a control video, in the
        run's dtype.

        "control" (96,F,H,W): latents of what is kept, of what controls the rest, and
        the pipeline's mask.
        """
        unknown = torch.zeros(()) if pixels.control is None else pixels.control
        video = pixels.frames.where(pixels.known, unknown)[None].to(self.device)
        mask = (~pixels.known).float().expand(3, -1, -1, -1)[None].to(self.device)
        with self.vae_lock, torch.no_grad():
            pipe = self._conditions_pipeline()
            no_images: list[list[Tensor]] = [[]]
            latents = pipe.prepare_video_latents(
                video, mask, no_images, None, self.device
            )
            masks = pipe.prepare_masks(mask, no_images)
        control = torch.cat([latents, masks], dim=1)[0]
        return {"control": control.to(self.dtype).cpu()}

    def encode_reference_image(self, picture: np.ndarray, shape: ClipShape) -> Tensor:
        """Encode an image as the pipeline does, centred on white, to (C,1,H,W)."""
        from PIL import Image  # keeps the start light

        _, _, canvases = self._conditions_pipeline().preprocess_conditions(
            None,
            None,
            Image.fromarray(picture),
            1,
            shape.height,
            shape.width,
            1,
            torch.float32,
            self.device,
        )
        return self.encode_video(canvases[0][0][:, None].cpu()).mean

    def blank_channels(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of ``channel_states``."""
        size = (self.spec.control_channels, *self.spec.rules.latent_size(shape))
        return {"control": torch.zeros(size, dtype=self.dtype)}

    def fingerprints(self) -> dict[str, str]:
        """Return the parts' hashes; entries of conditions are in the denoiser's dtype."""
        prints = super().fingerprints()
        prints["vae"] = f"{prints['vae']}-control-{self.dtype}"
        return prints

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v = noise - x0. The timestep input is 1000 · t in float32.

        A reference stands before the clip, with as much noise. What the network says of
        it is left out.
        """
        layers = len(self.config["vace_layers"])
        control = batch.conditioning.extras["control"]
        reference = batch.conditioning.extras.get("reference")
        latents = x_t
        if reference is not None:
            level = t.float().view(-1, 1, 1, 1, 1)
            noise = x_t[:, :, :1] - (1 - level) * batch.x0[:, :, :1]
            noisy = (1 - level) * reference + scattered(noise)
            latents = torch.cat([noisy, x_t], dim=2)
            control = with_reference_shown(control, reference)
        output = net(
            hidden_states=latents.to(self.dtype),
            timestep=t.float() * 1000,
            encoder_hidden_states=batch.conditioning.text.to(self.dtype),
            control_hidden_states=control.to(self.dtype),
            control_hidden_states_scale=x_t.new_ones(layers, dtype=self.dtype),
            return_dict=False,
        )
        return output[0][:, :, -x_t.shape[2] :].float()

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample latents one by one, as the pipeline does; "control" of the ``extras``
        is what a sample shows, and nothing without it.
        """
        samples = []
        for positive, negative, single in one_by_one(
            conditioning, unconditional, request
        ):
            control = positive.extras.get("control")
            if control is None:
                control = self.unconditioned_states(request.shape)["control"][None]

            pipe = self.pipeline(nets, request.shift, diffusers.WanVACEPipeline)
            pipe.vae = vae_stand_in(self.spec, None, self.device)
            images = {}
            reference = positive.extras.get("reference")
            if reference is not None:
                control = with_reference_shown(control, reference.to(control))
                images["reference_images"] = blank_image(request.shape)
            give_control(pipe, control.to(self.device), 2 * self.spec.latent_channels)
            latents = self.run_pipeline(pipe, positive, negative, single, **images)
            frames, _, _ = self.spec.rules.latent_size(request.shape)
            samples.append(latents[:, :, -frames:])
        return torch.cat(samples).float()

    def unconditioned_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return the control channels of a sample without a condition, encoded."""
        size = (shape.frames, shape.height, shape.width)
        frames = torch.zeros(3, *size)
        nothing = torch.zeros(size, dtype=torch.bool)
        try:
            return self.channel_states(ConditionPixels(frames, nothing))
        finally:
            self.free("vae")


def with_reference_shown(control: Tensor, reference: Tensor) -> Tensor:
    """Put a reference before control channels (B,96,F,H,W), as the pipeline does: its
    latents as what is kept, nothing that controls, and a mask of 0.
    """
    states = reference.to(control)
    nothing = control.new_zeros(
        len(control), control.shape[1] - states.shape[1], *states.shape[2:]
    )
    return torch.cat([torch.cat([states, nothing], dim=1), control], dim=2)


def blank_image(shape: ClipShape) -> Any:
    """Return an image of which a pipeline only counts that it is there."""
    from PIL import Image  # keeps the start light

    return Image.new("RGB", (shape.width, shape.height))


def give_control(pipe: Any, control: Tensor, latent_channels: int) -> None:
    """Let a pipeline feed these control channels.

    Args:
        pipe: the pipeline.
        control: (1,96,F,H,W), see ``WanVace.channel_states``.
        latent_channels: how many of them are latents; the rest is the mask.
    """
    latents = control[:, :latent_channels].float()
    masks = control[:, latent_channels:].float()
    pipe.prepare_video_latents = lambda *_, **__: latents
    pipe.prepare_masks = lambda *_, **__: masks
