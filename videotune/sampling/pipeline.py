"""Sample with the family's diffusers pipeline and the network that is training.

Sampling changes nothing of the training. Prompts are cached text states, so no text
encoder is loaded; the noise has its own seeds; the VAE is loaded after all transformer
passes and freed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from videotune.adapters.side_update import UpdatesByExpert, set_strength
from videotune.files import digest
from videotune.lazy import diffusers
from videotune.models.base import DiffusersModel
from videotune.types import ClipShape, LatentDistribution, SampleRequest

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class SampleSettings:
    """How a sample is drawn."""

    shape: ClipShape

    steps: int
    """Denoising steps."""

    guidance: float
    """Above 1, each step takes ``ModelSpec.sample_passes`` passes of the network."""

    shift: float | None = None
    """The scheduler's shift; None: its default."""

    guidance_2: float | None = None
    """Guidance of the second expert; None: the same."""

    temporal_attention: bool = True
    """False: frames do not attend to each other."""

    negative: str = ""
    """The negative prompt."""

    scheduler: str | None = None
    """A scheduler's class in diffusers; None: the checkpoint's own."""

    guidance_rescale: float = 0.0
    """How far guidance is scaled back to the deviation of the prompt's prediction."""

    strength: float = 1.0
    """Strength of the adapter that trains."""

    loras: tuple[tuple[str, float, str | None], ...] = ()
    """(file, strength, expert) of LoRA files that are added."""

    base_loras: bool = True
    """False: without the LoRA files under the training."""

    cache_threshold: float = 0.0
    """Share by which the first block's output must change for the blocks behind it to be
    computed. 0: they are computed in each step.
    """


class SampleLatents(NamedTuple):
    """What was drawn of a sample."""

    video: Tensor
    """(C,F,H,W)."""
    sound: Tensor | None = None
    """(C,L), or None without sound."""


class RenderedSample(NamedTuple):
    """A sample that can be seen and heard."""

    frames: np.ndarray
    """uint8 (T,H,W,3)."""
    sound: np.ndarray | None = None
    """float32 (2,n) in [-1, 1], or None without sound."""
    sound_rate: int = 0
    """Numbers of the sound a second."""


def draw(*args: Any, **keywords: Any) -> list[Tensor]:
    """Draw samples without sound: the latents (C,F,H,W) of their videos.

    It takes what ``draw_samples`` takes.
    """
    return [sample.video for sample in draw_samples(*args, **keywords)]


def draw_samples(
    family: DiffusersModel,
    nets: Mapping[str, nn.Module],
    settings: SampleSettings,
    text: Callable[[str], Mapping[str, Tensor]],
    samples: Sequence[tuple[str, int]],
    on_done: Callable[[int], object] | None = None,
    conditions: Sequence[LatentDistribution | None] | None = None,
    isolated: bool = False,
    updates: UpdatesByExpert | None = None,
) -> list[SampleLatents]:
    """Draw samples: their latents, with sound if the run reads it.

    Args:
        family: the model family.
        nets: network of each expert.
        settings: settings of all samples.
        text: returns the cached states of a prompt.
        samples: (prompt, seed) of each.
        on_done: called with the number of finished samples.
        conditions: what each sample is conditioned on, or None: an image or a clip, of
            which the first frame counts, or the ``known`` cells and the sound.
        isolated: whether the networks' frames are isolated now; they are again
            afterwards.
        updates: added to the networks' linear modules meanwhile, by expert.
    """
    latents: list[SampleLatents] = []
    eval_nets = _EvalNetworks(
        family,
        nets,
        isolated=isolated,
        updates=updates or {},
        settings=settings,
    )
    with torch.no_grad(), closing(eval_nets):
        for index, (prompt, seed) in enumerate(samples):
            condition = conditions[index] if conditions else None
            extras = {} if condition is None else condition.extras
            conditioning = family.collate_states([{**text(prompt), **extras}])
            unconditional = None
            if settings.guidance > 1:
                negative_states = text(settings.negative)
                unconditional = family.collate_states([{**negative_states, **extras}])
            request = _request(family, settings, seed, condition)

            arguments = (eval_nets, conditioning, unconditional, request)
            if family.spec.reads_sound:
                video, sound = family.sample_with_sound(*arguments)
                latents.append(SampleLatents(video[0], sound[0]))
            else:
                latents.append(SampleLatents(family.sample(*arguments)[0]))
            eval_nets.forget_sample()

            if on_done:
                on_done(len(latents))
    return latents


def _request(
    family: DiffusersModel,
    settings: SampleSettings,
    seed: int,
    condition: LatentDistribution | None,
) -> SampleRequest:
    """Return what to sample with a seed.

    Args:
        family: the model family.
        settings: settings of all samples.
        seed: of the noise.
        condition: what it is conditioned on, or None.
    """
    first_latent = None
    known = None
    known_mask = None
    sound = None
    if condition is not None:
        if condition.known is None:
            if family.spec.is_in_place("first_frame"):
                first_latent = condition.start
                if first_latent is None:
                    first_latent = condition.mean[:, :1]
        elif condition.known.any():
            known = condition.mean
            known_mask = condition.known[None]
        sound = condition.sound

    return SampleRequest(
        shape=settings.shape,
        steps=settings.steps,
        guidance=settings.guidance,
        seeds=(seed,),
        shift=settings.shift,
        guidance_2=settings.guidance_2,
        scheduler=settings.scheduler,
        guidance_rescale=settings.guidance_rescale,
        first=_as_batch(first_latent),
        known=_as_batch(known),
        known_mask=_as_batch(known_mask),
        sound=_as_batch(sound),
    )


def _as_batch(x: Tensor | None) -> Tensor | None:
    """Return a tensor of one sample as a batch of one."""
    return None if x is None else x[None]


class _EvalNetworks(Mapping[str, "nn.Module"]):
    """Networks that are in evaluation mode from their first look-up until ``close``.

    It keeps no network in memory, so ``nets`` may unload one.

    Args:
        family: the model family.
        nets: network of each expert.
        isolated: whether the networks' frames are isolated outside this mapping.
        updates: added to the networks' linear modules inside.
        settings: of the samples: whether frames are isolated inside, the strength of the
            networks' adapter, and whether blocks are skipped.
    """

    def __init__(
        self,
        family: DiffusersModel,
        nets: Mapping[str, nn.Module],
        *,
        isolated: bool,
        updates: UpdatesByExpert,
        settings: SampleSettings,
    ) -> None:
        self.family = family
        self.nets = nets
        self.isolated = isolated
        self.isolate = not settings.temporal_attention
        self.updates = updates
        self.strength = settings.strength
        self.cache_threshold = settings.cache_threshold
        self._changed: list[tuple[ref[nn.Module], bool]] = []
        """Networks that were looked up, and whether they were in training mode."""
        self._undo = ExitStack()

    def __getitem__(self, name: str) -> nn.Module:
        net = self.nets[name]
        if not any(reference() is net for reference, _ in self._changed):
            self._changed.append((ref(net), net.training))
            net.eval()
            if self.isolate != self.isolated:
                self.family.isolate_frames(net, self.isolate)
            self._undo.callback(set_strength(net, self.strength))
            for update in self.updates.get(name, ()):
                self._undo.callback(update.add_to(net))
            if self.cache_threshold:
                self._undo.callback(_skip_similar_steps(net, self.cache_threshold))
        return net

    def __iter__(self) -> Iterator[str]:
        return iter(self.nets)

    def __len__(self) -> int:
        return len(self.nets)

    def forget_sample(self) -> None:
        """Forget what the blocks of the sample before gave, so that the next sample
        begins with whole steps.
        """
        if not self.cache_threshold:
            return
        for reference, _ in self._changed:
            net: Any = reference()
            if net is not None:
                net._reset_stateful_cache()

    def close(self) -> None:
        """Restore the networks that are still in memory."""
        self._undo.close()
        for reference, was_training in self._changed:
            net = reference()
            if net is None:
                continue
            net.train(was_training)
            if self.isolate != self.isolated:
                self.family.isolate_frames(net, self.isolated)


def _skip_similar_steps(net: Any, threshold: float) -> Callable[[], None]:
    """Let a network skip the blocks behind its first while that one's output changes by
    less than ``threshold``. Return what ends this.
    """
    net.enable_cache(diffusers.FirstBlockCacheConfig(threshold=threshold))
    network = ref(net)

    def end() -> None:
        still_loaded: Any = network()
        if still_loaded is not None:
            still_loaded.disable_cache()

    return end


def decode(
    family: DiffusersModel, latents: Sequence[Tensor], tiled: bool = False
) -> list[np.ndarray]:
    """Decode latents to uint8 frames (T, H, W, 3), then free the VAE."""
    try:
        return [to_frames(family.decode(latent, tiled)) for latent in latents]
    finally:
        family.free("vae")


def render_samples(
    family: DiffusersModel, samples: Sequence[SampleLatents], tiled: bool = False
) -> list[RenderedSample]:
    """Decode samples, then free what decodes them: pictures first, sound after them."""
    videos = decode(family, [sample.video for sample in samples], tiled)
    rendered = []
    try:
        for sample, frames in zip(samples, videos, strict=True):
            if sample.sound is None:
                rendered.append(RenderedSample(frames))
                continue
            waveform, rate = family.decode_sound(sample.sound)
            rendered.append(RenderedSample(frames, waveform.numpy(), rate))
    finally:
        family.free("vae")
    return rendered


def to_frames(pixels: Tensor) -> np.ndarray:
    """Convert (3, T, H, W) in [-1, 1] to uint8 (T, H, W, 3).

    It rounds as diffusers' video processor does.
    """
    scaled = (pixels / 2 + 0.5).clamp(0, 1) * 255
    return scaled.round().byte().permute(1, 2, 3, 0).contiguous().numpy()


def file_name(step: int | None, content: str, seed: int) -> str:
    """Return the file name of a sample: its step, a hash, and its seed.

    Args:
        step: of the weights; None if they are a file whose step is not known.
        content: the prompt, or a text that says more of what was drawn.
        seed: of the noise.
    """
    name = f"{digest(content)[:8]}-seed{seed}.mp4"
    return name if step is None else f"step-{step:06d}-{name}"
