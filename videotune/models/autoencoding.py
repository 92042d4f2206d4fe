"""Clips, images and sound in latents: how a checkpoint's autoencoders are called."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from videotune.lazy import torch
from videotune.models.checkpoint import Checkpoint
from videotune.models.latent_scaling import channel_statistics, scale_of, shift_of
from videotune.models.pipelines import in_tiles
from videotune.types import LatentDistribution

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from videotune.types import ClipShape, ConditionPixels


class AutoencodingCheckpoint(Checkpoint):
    """A checkpoint whose autoencoders encode and decode."""

    # latents

    def check_shape(self, frames: int, height: int, width: int) -> None:
        """Raise VideotuneError if the checkpoint does not take a shape in pixels."""

    def latent_statistics(self) -> tuple[Tensor, Tensor] | None:
        """Return mean and deviation of the VAE's latents, (C,1,1,1) each.

        None: its config has one scale for all channels.
        """
        return channel_statistics(
            self.vae(), self.folder, self.spec.latent_channels, self.device
        )

    def latent_scale(self) -> float:
        """Return the factor of the VAE's latents, for all channels."""
        return scale_of(self.vae(), self.folder)

    def _normalised(self, mean: Tensor, logvar: Tensor) -> tuple[Tensor, Tensor]:
        statistics = self.latent_statistics()
        if statistics is not None:
            latent_mean, latent_std = statistics
            normalised_mean = (mean - latent_mean) / latent_std
            normalised_logvar = logvar - 2 * latent_std.log()
            return normalised_mean, normalised_logvar

        scale = self.latent_scale()
        shift = shift_of(self.vae(), self.folder)
        normalised_mean = (mean - shift) * scale
        normalised_logvar = logvar + 2 * math.log(scale)
        return normalised_mean, normalised_logvar

    def raw_latents(self, latents: Tensor) -> Tensor:
        """Return the VAE's latents for normalised latents."""
        statistics = self.latent_statistics()
        if statistics is not None:
            latent_mean, latent_std = statistics
            return latents * latent_std + latent_mean
        scale = self.latent_scale()
        shift = shift_of(self.vae(), self.folder)
        return latents / scale + shift

    def image_states(
        self, frames: Tensor, random: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Encode the conditioning image, the first of the frames (3,T,H,W), for
        ``collate_states``.

        Args:
            frames: the clip in [-1, 1].
            random: source of the image's noise. None: no noise.
        """
        return {}

    def channel_states(self, pixels: ConditionPixels) -> dict[str, Tensor]:
        """Encode what a sample is shown on channels of the network, for ``collate_states``."""
        raise NotImplementedError

    def encode_reference_image(self, picture: np.ndarray, shape: ClipShape) -> Tensor:
        """Encode a reference that is fitted into the picture to latents (C,1,H,W).

        Args:
            picture: uint8 (rows, columns, 3), of any size.
            shape: of the sample.
        """
        raise NotImplementedError

    def blank_channels(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of ``channel_states`` and ``image_states``."""
        return {}

    def unconditioned_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return the states of a sample that is shown nothing."""
        return self.blank_channels(shape)

    def encode_video(
        self,
        frames: Tensor,
        random: np.random.Generator | None = None,
        start_image: Tensor | None = None,
    ) -> LatentDistribution:
        """Encode one clip to normalised latents, on the CPU in float32.

        Args:
            frames: (3,T,H,W) in [-1, 1].
            random: source of this view's draws (``spec.image_noise``). None: without
                any draw.
            start_image: (3,1,H,W), the image that the clip is conditioned on. None: its
                own first frame.

        Returns:
            The mean, and the variance unless the authors train on the mean only.
        """
        self.check_shape(*frames.shape[1:])
        with self.vae_lock, torch.no_grad():
            mean, logvar = self._encoded(frames)
            conditioning_frames = frames
            if start_image is not None:
                later = frames[:, 1:]
                conditioning_frames = torch.cat([start_image, later], dim=1)
            extras = self.image_states(conditioning_frames, random)

            start = None
            first_frame = start_image
            if first_frame is None and self.spec.encodes_first_frame:
                first_frame = frames[:, :1]
            if first_frame is not None and self.spec.is_in_place("first_frame"):
                first_mean, _ = self._encoded(first_frame)
                start = first_mean.float().cpu()

        kept_logvar = None
        if self.spec.keeps_variance:
            kept_logvar = logvar.float().cpu()
        return LatentDistribution(mean.float().cpu(), kept_logvar, extras, start)

    def _encoded(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised mean and logarithm of the variance of a clip (3,T,H,W)."""
        clip = frames[None].to(self.device)
        distribution = self.vae().encode(clip).latent_dist
        return self._normalised(distribution.mean[0], distribution.logvar[0])

    def decode(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Decode normalised latents (C,F,H,W) to pixels (3,T,H,W) in [-1, 1], on the
        CPU.

        ``tiled`` needs less memory; the tiles' seams are blended.
        """
        with self.vae_lock, torch.no_grad(), in_tiles(self.vae(), tiled):
            raw = self.raw_latents(latents.to(self.device))
            clips = self.vae().decode(raw[None], return_dict=False)[0]
            pixels = clips[0]
        return pixels.clamp(-1, 1).float().cpu()

    # sound

    def encode_sound(self, waveform: Tensor, shape: ClipShape) -> Tensor:
        """Encode the sound of a sample to normalised latents (C,L), on the CPU in
        float32.

        Args:
            waveform: (2,n) in [-1, 1], ``spec.sound.sample_rate`` numbers a second.
            shape: of the sample.
        """
        raise NotImplementedError

    def decode_sound(self, latents: Tensor) -> tuple[Tensor, int]:
        """Decode normalised latents (C,L) to a waveform (2,n) in [-1, 1], on the CPU, and
        its numbers a second.
        """
        raise NotImplementedError
