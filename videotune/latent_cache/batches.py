"""Make the batch of a step from the cache: samples, noise levels and noise, as a pure
function of the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from videotune.config.schema import Config
from videotune.data.window_table import earlier_copies
from videotune.diffusion.loss import Objective
from videotune.diffusion.timesteps import TimestepSampler, shift_of_tokens
from videotune.latent_cache.condition_reader import ConditionReader, SampleConditions
from videotune.latent_cache.conditions import (
    LATENTS,
    SOUND,
    ConditionSample,
    appended_latents,
    as_mask,
    condition_key,
    num_boxes,
    put_start_images,
)
from videotune.latent_cache.frame_dropout import drop_frames
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.picture_mask import picture_mask
from videotune.latent_cache.sampler import (
    ExpertSchedule,
    Schedule,
    bucket_of,
    sample_indices,
)
from videotune.latent_cache.sound_batch import attach_sound, draw_sound_noise
from videotune.latent_cache.step_batch import (
    StepBatch,
    StepDraws,
    draw_noise,
    samples_to_run,
    uniforms,
)
from videotune.latent_cache.store import LatentCache
from videotune.model_spec import ModelSpec
from videotune.rng import generator_for
from videotune.types import (
    DETERMINISTIC_VARIANT,
    Batch,
    Clip,
    Conditioning,
    LatentDistribution,
    Window,
)

KEYS_IN_MEMORY = 200_000
"""Entries of the cache, at most, whose keys are made before the first step."""


@dataclass(frozen=True)
class BatchSource:
    """Where batches come from: the cache, the clips, and the schedule over their
    windows.
    """

    config: Config
    spec: ModelSpec
    store: LatentCache
    keys: CacheKeys
    collate_states: Callable[[Sequence[Mapping[str, Tensor]]], Conditioning]
    """Joins the cached states of samples; the family's own function."""
    clips: Mapping[str, Clip]
    """Clips by id."""
    sizes: Mapping[str, tuple[int, int]]
    """(width, height) in pixels of each clip, by id."""
    buckets: tuple[Sequence[Window], ...]
    """The schedule's buckets, most expensive first.

    A window of a clip with ``repeats`` r is r times in its bucket.
    """
    schedule: Schedule
    objective: Objective
    encode: Callable[[Window, int], LatentDistribution] | None = None
    """Makes the latents of a sample where no variants are cached
    (``video_config.variants`` 0).
    """
    read_mask: Callable[[Window, int], Tensor] | None = None
    """Makes the loss mask of such a sample, (F,H,W): the share of each cell."""
    expert_schedule: ExpertSchedule | None = None
    pin: bool = False
    """Whether the batches of steps are put into pinned memory."""
    encode_condition: Callable[[ConditionSample], dict[str, Tensor]] | None = None
    """Makes a condition of such a sample, see ``encode_condition_sample``."""
    _encode_lock: Lock = field(
        default_factory=Lock, init=False, repr=False, compare=False
    )

    def timesteps_of(self, step: int, modality: str = "video") -> TimestepSampler:
        """Return the noise levels that a step draws from: with its bucket's shift,
        within its expert's range.

        Args:
            step: the step.
            modality: "video", or "sound", whose shift is that of its own tokens.
        """
        timesteps = self.objective.timesteps

        shift_rule = self.spec.shift_by_tokens
        if self.config.timestep_shift == "resolution" and shift_rule is not None:
            shape = self.buckets[bucket_of(self.schedule, step)][0].shape
            tokens = self.spec.video_tokens(shape)
            if modality == "sound":
                assert self.spec.sound is not None
                tokens = self.spec.sound.latents(shape)
            shift = shift_of_tokens(tokens, shift_rule)
            timesteps = replace(timesteps, shift=shift)

        if self.expert_schedule is not None:
            name = self.expert_schedule.at(step)
            expert = next(expert for expert in self.spec.experts if expert.name == name)
            timesteps = timesteps.within(expert.t_lo, expert.t_hi)
        return timesteps

    def text_states(self, caption: str) -> dict[str, Tensor]:
        """Return a caption's cached states."""
        key = self.text_keys.get(caption) or self.keys.text_key(caption)
        return self.store.get("text", key)

    def draw_latents(
        self, window: Window, variant: int, random_name: tuple[str | int, ...]
    ) -> LatentDistribution:
        """Return a window's latents as a mean without variance.

        If the family caches a variance, the latents are drawn by the counted generator
        that is named ``random_name``.
        """
        distribution = self._distribution(window, variant)
        if distribution.logvar is None:
            return distribution

        generator = generator_for(self.keys.seed, "posterior", *random_name)
        noise = torch.from_numpy(
            generator.standard_normal(distribution.mean.shape, "float32")
        )
        drawn = distribution.mean + torch.exp(0.5 * distribution.logvar) * noise
        return replace(distribution, mean=drawn, logvar=None)

    def plain_latents(self, window: Window) -> LatentDistribution:
        """Return a window without random frames, crop or image noise, as validation and
        previews read it.
        """
        return self.draw_latents(window, DETERMINISTIC_VARIANT, (window.id,))

    def plain_latents_with_conditions(self, window: Window) -> LatentDistribution:
        """Return a plain window with the usual conditions, as previews read it."""
        latents = self.plain_latents(window)
        reader = self.condition_reader
        sample = SampleConditions(window, DETERMINISTIC_VARIANT, reader.usual)
        encoded = reader.encoded_conditions(sample)
        states = reader.channel_states(sample, latents.extras)
        latents = replace(latents, extras=states | appended_latents(encoded, self.spec))
        # The sampler takes a first frame from the latents by itself: without ``known``, it
        # is given that frame at most.
        if set(filter(self.spec.is_in_place, reader.usual)) == {"first_frame"}:
            return latents
        x0 = latents.mean.clone()
        if latents.start is not None and "first_frame" in reader.usual:
            x0[:, :1] = latents.start
        known = reader.write_given_cells(x0, sample, encoded)
        return replace(latents, mean=x0, known=known)

    def given_modality(self, window: Window) -> LatentDistribution:
        """Return a window's video or sound that is given to a sample of the other modality.

        If only sound is learnt it is the whole video, with all cells known; if only video
        is learnt, the usual conditions and the clip's sound.
        """
        if "video" not in self.spec.generates:
            latents = self.plain_latents(window)
            everything = torch.ones(latents.mean.shape[1:], dtype=torch.bool)
            return replace(latents, known=everything)
        latents = self.plain_latents_with_conditions(window)
        sound = ConditionSample(window, DETERMINISTIC_VARIANT, SOUND)
        return replace(latents, sound=self.condition_tensors(sound)[LATENTS])

    @cached_property
    def condition_reader(self) -> ConditionReader:
        """What samples are given of their clips."""
        return ConditionReader(self.config, self.spec, self.condition_tensors)

    def condition_tensors(self, sample: ConditionSample) -> dict[str, Tensor]:
        """Return the tensors of what is encoded on its own."""
        if self.is_encoded_in_step(sample.window, sample.variant):
            assert self.encode_condition is not None, "an encoder is needed"
            with self._encode_lock:
                return self.encode_condition(sample)
        return self.store.get("conditions", condition_key(self.keys, sample))

    @property
    def variants(self) -> int:
        """How many variants of a window that varies are cached."""
        return self.config.video_config.variants

    def varies(self, window: Window) -> bool:
        """Whether the variants of a window differ."""
        return window.varies or self.keys.image_noise

    def is_encoded_in_step(self, window: Window, variant: int) -> bool:
        """Whether a sample is encoded in its step, because no variants are cached."""
        is_plain = variant == DETERMINISTIC_VARIANT
        return self.variants == 0 and not is_plain and self.varies(window)

    def variant(self, bucket: int, position: int, epoch: int) -> int:
        """Return which variant the window at ``position`` of a bucket shows in epoch
        ``epoch``.
        """
        window = self.buckets[bucket][position]
        if not self.varies(window):
            return 0

        # A window with r repeats is seen r times an epoch, each time in its next
        # variant.
        repeats = self.clips[window.clip_id].repeats
        views_before = epoch * repeats
        if repeats > 1:
            views_before += int(self._earlier_copies[bucket][position])
        return views_before % self.variants if self.variants else views_before

    @cached_property
    def latents_keys(self) -> dict[tuple[Window, int], str]:
        """Keys of the latents that steps read, by window and variant.

        Empty for a large dataset, whose steps make the keys that they need.
        """
        if not self._keys_fit_memory:
            return {}
        keys: dict[tuple[Window, int], str] = {}
        for bucket in self.buckets:
            for window in dict.fromkeys(bucket):
                variants = range(self.variants) if self.varies(window) else (0,)
                for variant in variants:
                    sample = self.keys.frame_sample(window, variant)
                    keys[window, variant] = self.keys.latents_key(sample)
        return keys

    @cached_property
    def text_keys(self) -> dict[str, str]:
        """Keys of the text states that steps read, by caption. Empty for a large
        dataset.
        """
        if not self._keys_fit_memory:
            return {}
        captions = {""}
        if not self.text_in_step:
            for clip in self.clips.values():
                captions.update(clip.captions)
        return {caption: self.keys.text_key(caption) for caption in captions}

    @property
    def _keys_fit_memory(self) -> bool:
        num_windows = sum(len(bucket) for bucket in self.buckets)
        return num_windows * max(1, self.variants) <= KEYS_IN_MEMORY

    @cached_property
    def text_in_step(self) -> bool:
        """Whether captions are encoded in the step. Then no text states are cached."""
        return self.config.text_in_step

    @cached_property
    def _earlier_copies(self) -> tuple[NDArray[np.int64], ...]:
        """For each position of each bucket, how many positions before it have the same
        window.
        """
        return tuple(earlier_copies(bucket) for bucket in self.buckets)

    def _distribution(self, window: Window, variant: int) -> LatentDistribution:
        """Return a window's cached latents, or encode them if its variants are not
        cached.
        """
        if self.is_encoded_in_step(window, variant):
            assert self.encode is not None, (
                "without cached variants an encoder is needed"
            )
            with self._encode_lock:
                return self.encode(window, variant)

        key = self.latents_keys.get((window, variant))
        if key is None:
            key = self.keys.latents_key(self.keys.frame_sample(window, variant))
        tensors = dict(self.store.get("latents", key))
        mean = tensors.pop("mean")
        logvar = tensors.pop("logvar", None)
        start = tensors.pop("start", None)
        return LatentDistribution(mean, logvar, extras=tensors, start=start)

    def mask_weight(self, window: Window, variant: int) -> Tensor | None:
        """Return the loss's weight in each cell of a sample, (F,H,W), or None if its
        clip has no mask.
        """
        key = self.keys.mask_key(self.keys.frame_sample(window, variant))
        if key is None:
            return None

        if self.is_encoded_in_step(window, variant):
            assert self.read_mask is not None, "without cached variants masks are read"
            share = self.read_mask(window, variant)
        else:
            share = self.store.get("masks", key)["share"].clamp(0, 1)
        settings = self.config.loss_mask
        return settings.outside + (settings.inside - settings.outside) * share


def draws_of(source: BatchSource, step: int) -> StepDraws:
    """Draw for a step, counted from 1.

    Each draw belongs to (seed, purpose, step, index of the sample).
    """
    seed = source.keys.seed
    config = source.config
    bucket, indices = sample_indices(source.schedule, step)
    samples = tuple(
        (source.buckets[bucket][position], source.variant(bucket, position, epoch))
        for position, epoch in indices
    )
    captions = tuple(
        _draw_caption(source, window, step, index)
        for index, (window, _) in enumerate(samples)
    )

    learnt: tuple[str, ...] = ("video",)
    if source.buckets[bucket][0].shape.sound:
        learnt = source.spec.generates
    levels = []
    for modality in learnt:
        purpose = "t" if modality == "video" else "t sound"
        numbers = uniforms(
            seed, step, len(samples), config.timestep_stratified, purpose
        )
        levels.append(source.timesteps_of(step, modality).draw(numbers))

    condition_types = tuple(
        _draw_conditions(source, step, index) for index in range(len(samples))
    )
    boxes = []
    for index in range(len(samples) if "mask" in config.condition_types else 0):
        generator = generator_for(seed, "condition box", step, index)
        boxes.append(int(generator.integers(num_boxes(config))))
    return StepDraws(
        samples=samples,
        captions=captions,
        condition_types=condition_types,
        boxes=tuple(boxes),
        t=levels[0],
        sound_t=levels[1] if len(levels) > 1 else None,
    )


def _draw_conditions(source: BatchSource, step: int, index: int) -> frozenset[str]:
    """Draw the conditions of a sample, each independently of the others."""
    seed = source.keys.seed
    probability = source.config.first_frame_probability or 0.0
    condition_types = set()
    if generator_for(seed, "first frame", step, index).random() < probability:
        condition_types.add("first_frame")
    for condition in source.config.conditions:
        # Appended tokens change the length of the sequence: all samples of a step have
        # them, or none.
        is_of_step = source.spec.is_appended(condition.type)
        numbers = (step,) if is_of_step else (step, index)
        generator = generator_for(seed, f"condition {condition.type}", *numbers)
        if generator.random() < condition.probability:
            condition_types.add(condition.type)
    return frozenset(condition_types)


def _draw_caption(source: BatchSource, window: Window, step: int, index: int) -> str:
    """Draw the caption of a sample: one of its clip's, or none if the caption is
    dropped.
    """
    clip = source.clips[window.clip_id]
    generator = generator_for(source.keys.seed, "caption", step, index)
    dropout = source.config.caption_dropout
    if clip.caption_dropout is not None:
        dropout = clip.caption_dropout
    if generator.random() < dropout:
        return ""

    weights = clip.caption_weights[: len(clip.captions)]
    total = sum(weights)
    if not total:
        return clip.captions[int(generator.integers(len(clip.captions)))]
    probabilities = [weight / total for weight in weights]
    return clip.captions[int(generator.choice(len(weights), p=probabilities))]


def make_step_batch(
    source: BatchSource,
    step: int,
    rank_and_size: tuple[int, int] = (0, 1),
    pad_empty_share: bool = False,
) -> StepBatch:
    """Return what a process trains on in a step.

    Args:
        source: where batches come from.
        step: the step, counted from 1.
        rank_and_size: this process and the number of processes, see ``share_of``.
        pad_empty_share: see ``samples_to_run``.
    """
    draws = draws_of(source, step)
    windows = [window for window, _ in draws.samples]
    begin, end, is_padding = samples_to_run(
        rank_and_size, len(windows), pad_empty_share=pad_empty_share
    )

    batch = None
    noise = torch.empty(0)
    if begin < end:
        batch = _batch_of_process(source, step, draws, begin, end)
        noise = draw_noise(batch.x0, source.keys.seed, step, begin)

    prior_samples = [
        number for number, window in enumerate(windows) if _is_prior(source, window)
    ]
    prepared = StepBatch(
        step=step,
        window_ids=tuple(window.id for window in windows),
        captions=draws.captions,
        t=draws.t,
        first_sample=begin,
        batch=batch,
        noise=noise,
        prior_samples=tuple(prior_samples),
        sound_t=draws.sound_t,
        is_padding=is_padding,
    )
    return prepared.pinned() if source.pin else prepared


def _batch_of_process(
    source: BatchSource, step: int, draws: StepDraws, begin: int, end: int
) -> Batch:
    """Return the samples ``begin`` to ``end`` of a step, with dropped frames and the
    noise of their sound.
    """
    samples = draws.samples[begin:end]
    latents = []
    for number, (window, variant) in enumerate(samples, start=begin):
        latents.append(source.draw_latents(window, variant, (step, number)))

    batch = assemble(
        source,
        [window for window, _ in samples],
        draws.captions[begin:end],
        latents,
        draws.condition_types[begin:end],
        variants=[variant for _, variant in samples],
        boxes=draws.boxes[begin:end],
    )
    batch = drop_frames(
        batch,
        source.config.video_config.frame_dropout_probability,
        source.spec.patch[0],
        seed=source.keys.seed,
        step=step,
        first=begin,
    )
    # If only sound is learnt, t is that of the sound.
    sound_t = draws.t if draws.sound_t is None else draws.sound_t
    return draw_sound_noise(batch, sound_t[begin:end], source.keys.seed, step, begin)


def _is_prior(source: BatchSource, window: Window) -> bool:
    return source.clips[window.clip_id].prior_preservation


def assemble(
    source: BatchSource,
    windows: Sequence[Window],
    captions: Sequence[str],
    latents: Sequence[LatentDistribution],
    condition_types: Sequence[frozenset[str]],
    variants: Sequence[int] | None = None,
    boxes: Sequence[int] = (),
) -> Batch:
    """Build a batch on the CPU from windows of one bucket. No frame is dropped.

    A condition enters in the way that ``spec.conditions`` names: "in_place" feeds its
    latent cells clean and leaves them out of the loss, "channels" shows it on channels of
    the network, and "context" appends its latents, as tokens, to the clip's.

    Args:
        source: where batches come from.
        windows: the samples' windows.
        captions: the samples' captions.
        latents: means of the samples, with the other states of their clips' entries.
        condition_types: the conditions of each sample.
        variants: variant of each window. None: the one without random parts.
        boxes: which of the drawn rectangles is masked in each sample (condition "mask"
            without a file). Empty: the first.
    """
    x0 = torch.stack([sample.mean for sample in latents])
    if variants is None:
        variants = [DETERMINISTIC_VARIANT] * len(windows)

    put_start_images(source.spec, x0, latents, condition_types)
    known = []
    extras = []
    for index, (window, variant) in enumerate(zip(windows, variants, strict=True)):
        box = boxes[index] if boxes else 0
        sample = SampleConditions(window, variant, condition_types[index], box)
        encoded = source.condition_reader.encoded_conditions(sample)
        # Writes the given cells into x0 in place, and returns where they are: (F,H,W).
        known.append(
            source.condition_reader.write_given_cells(x0[index], sample, encoded)
        )
        states_of_clip = latents[index].extras
        states = source.condition_reader.channel_states(sample, states_of_clip)
        extras.append(states | appended_latents(encoded, source.spec))
    conditioning_mask = as_mask(known)

    loss_mask = picture_mask(windows, source.sizes, x0)
    loss_mask = _with_masks(source, windows, variants, loss_mask, x0)

    clips = [source.clips[window.clip_id] for window in windows]
    batch = Batch.of(
        x0,
        _conditioning(source, captions, extras),
        conditioning_mask=conditioning_mask,
        loss_mask=loss_mask * ~conditioning_mask,
        loss_weight=torch.tensor(
            [clip.loss_weight for clip in clips], dtype=torch.float32
        ),
        captions=tuple(captions),
        window_ids=tuple(window.id for window in windows),
        fps=torch.tensor([window.shape.fps for window in windows]),
        prior_preservation=tuple(clip.prior_preservation for clip in clips),
        has_clean_frames=bool(conditioning_mask.any()),
    )
    return attach_sound(batch, windows, variants, source.spec, source.condition_tensors)


def _conditioning(
    source: BatchSource, captions: Sequence[str], extras: Sequence[dict[str, Tensor]]
) -> Conditioning:
    """Return what samples are conditioned on: cached text and extras, or only extras if
    text is encoded in the step.
    """
    if not source.text_in_step:
        states = []
        for caption, sample_extras in zip(captions, extras, strict=True):
            states.append(source.text_states(caption) | sample_extras)
        return source.collate_states(states)

    names = extras[0].keys() if extras else ()
    stacked = {}
    for name in names:
        stacked[name] = torch.stack([sample_extras[name] for sample_extras in extras])
    return Conditioning(torch.empty(len(extras), 0, 0), None, stacked)


def _with_masks(
    source: BatchSource,
    windows: Sequence[Window],
    variants: Sequence[int],
    cell_weights: Tensor,
    x0: Tensor,
) -> Tensor:
    """Return the weights of the cells times those of the clips' loss masks."""
    if not any(window.companion("loss_mask") for window in windows):
        return cell_weights

    weights = cell_weights.expand(-1, -1, -1, *x0.shape[-2:]).clone()
    for weight, window, variant in zip(weights, windows, variants, strict=True):
        mask_weight = source.mask_weight(window, variant)
        if mask_weight is not None:
            weight *= mask_weight
    return weights
