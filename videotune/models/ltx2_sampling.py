"""Samples of LTX-2, as diffusers' pipelines draw them."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from videotune.lazy import torch
from videotune.models.given_frames import vae_with_results, with_given_cells
from videotune.models.ltx2_conditions import pipeline_call
from videotune.models.ltx2_parts import audio_vae_stand_in, rotary_positions
from videotune.models.ltx2_sound import GivenNetworks, to_tokens
from videotune.models.ltx2_text import LTX2Text, captions_of, joined
from videotune.models.pipelines import (
    load_scheduler,
    vae_stand_in,
    without_shift_warning,
    without_warnings,
)
from videotune.types import Conditioning, Networks, SampleRequest

if TYPE_CHECKING:
    from torch import Tensor


class LTX2Sampling(LTX2Text):
    """An LTX-2 checkpoint, as far as samples are drawn with it."""

    @cached_property
    def _rope(self) -> Any:
        """The transformer's positions of video tokens."""
        return rotary_positions(self.config, self.spec.rules, "video")

    @cached_property
    def _audio_rope(self) -> Any:
        """The transformer's positions of sound tokens."""
        return rotary_positions(self.config, self.spec.rules, "audio")

    def scheduler(self, shift: float | None) -> Any:
        """Load the scheduler; with a ``shift``, the tokens have no effect on it."""
        return load_scheduler(self.folder, shift, use_dynamic_shifting=False)

    def pipeline(
        self, nets: Networks, shift: float | None = None, cls: Any = None, **parts: Any
    ) -> Any:
        """Build the pipeline with stand-ins of both VAEs, from which it reads sizes."""
        stand_ins = {
            "vae": vae_stand_in(self.spec, None, self.device),
            "audio_vae": audio_vae_stand_in(self.folder, self.config),
        }
        pipe = super().pipeline(nets, shift, cls, **(stand_ins | parts))
        pipe.transformer.rope = self._rope
        pipe.transformer.audio_rope = self._audio_rope
        return pipe

    def prompt(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """Return a conditioning as arguments of the pipeline; see ``_connectors_of``."""
        text = conditioning.text.to(self.device, self.dtype)
        mask = torch.ones(text.shape[:2], dtype=torch.int64, device=self.device)
        return {"prompt_embeds": text, "prompt_attention_mask": mask}

    def _connectors_of(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
    ) -> Any:
        """Return a function that stands in for the pipeline's connectors.

        Their results are cached, or those in the denoiser make them, with its adapter.
        """
        captions = captions_of(conditioning)
        if unconditional is not None:
            captions = joined(captions_of(unconditional), captions)
        captions = captions.map(lambda value: value.to(self.device))

        def connected(_: Tensor, mask: Tensor, **__: Any) -> Any:
            net = nets[self.spec.experts[0].name]
            text = self.text_for_video(net, captions)
            sound = self.text_for_sound(net, captions)
            return text, sound, mask

        return connected

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample latents of the video.

        Clean first frames come from ``request.first`` or ``request.known``, appended
        frames from the conditioning's ``extras``.
        """
        return self.sample_with_sound(nets, conditioning, unconditional, request)[0]

    def sample_with_sound(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> tuple[Tensor, Tensor]:
        """Sample latents of video and sound.

        A video that ``request.known`` gives as a whole and a sound that
        ``request.sound`` gives are fed clean, as in training.
        """
        connectors = self._connectors_of(nets, conditioning, unconditional)
        video = None
        remaining = request
        if request.known_mask is not None and bool(request.known_mask.all()):
            video = request.known
            remaining = replace(request, first=None, known=None, known_mask=None)
        if video is not None or request.sound is not None:
            tokens = [
                None if latents is None else to_tokens(latents.to(self.device))
                for latents in (video, request.sound)
            ]
            nets = GivenNetworks(nets, *tokens)

        call = pipeline_call(conditioning, remaining, self.spec.rules)
        pipe = self.pipeline(
            nets,
            request.shift,
            call.pipeline,
            vae=vae_with_results(self.spec, call.latents, self.device),
            connectors=connectors,
        )

        # Beside the guidance by the prompt the pipeline has two more passes a step: one
        # that skips self-attention in a block, and one without sound.
        guidance: dict[str, Any] = {"guidance_rescale": request.guidance_rescale}
        if unconditional is None:
            guidance = {"guidance_scale": 1.0, **self.spec.unguided_arguments}

        # The pipelines warn that they use one generator; the noise is drawn from all.
        with without_shift_warning(pipe.scheduler), without_warnings(type(pipe)):
            latents, sound = self.pipeline_results(
                pipe,
                conditioning,
                unconditional,
                remaining,
                **self.spec.pipeline_arguments,
                **call.arguments,
                **guidance,
            )

        # The pipeline's form is (B, channels, L, rows).
        sound = sound.transpose(2, 3).flatten(1, 2).float()
        if request.sound is not None:
            sound = request.sound.to(sound)
        return with_given_cells(latents, request).float(), sound
