"""Make the batch of a step from the cache: samples, noise levels and noise, as a pure
function of the step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from videotune.latent_cache.batch_source import BatchSource
from videotune.latent_cache.condition_reader import DrawnConditions
from videotune.latent_cache.conditioning_cells import (
    appended_latents,
    as_mask,
)
from videotune.latent_cache.conditions import num_boxes
from videotune.latent_cache.frame_dropout import drop_frames
from videotune.latent_cache.picture_mask import picture_mask
from videotune.latent_cache.sampler import sample_indices
from videotune.latent_cache.sound_batch import attach_sound, draw_sound_noise
from videotune.latent_cache.step_batch import (
    StepBatch,
    StepDraws,
    draw_noise,
    samples_to_run,
    uniforms,
)
from videotune.rng import generator_for
from videotune.types import (
    DETERMINISTIC_VARIANT,
    Batch,
    Conditioning,
    LatentDistribution,
    Window,
)


def draws_of(source: BatchSource, step: int) -> StepDraws:
    """Draw for a step, counted from 1.

    Each draw belongs to (seed, purpose, step, index of the sample).
    """
    seed = source.keys.seed
    config = source.config
    bucket, indices = sample_indices(source.schedule, step)
    samples = tuple(
        (
            source.buckets[bucket][position],
            source.variant_in_epoch(bucket, position, epoch),
        )
        for position, epoch in indices
    )
    captions = tuple(
        _draw_caption(source, window, step, index)
        for index, (window, _) in enumerate(samples)
    )

    video_t = None
    sound_t = None
    has_sound = source.buckets[bucket][0].shape.sound
    if not has_sound or "video" in source.spec.generates:
        video_t = _draw_noise_levels(source, step, len(samples), "video")
    if has_sound and "sound" in source.spec.generates:
        sound_t = _draw_noise_levels(source, step, len(samples), "sound")
    # If only the sound is learnt, its noise levels take the place of the video's.
    t = sound_t if video_t is None else video_t
    assert t is not None, "a model generates video, sound or both"

    condition_types = tuple(
        _draw_conditions(source, step, index) for index in range(len(samples))
    )
    boxes = []
    if "mask" in config.condition_types:
        for index in range(len(samples)):
            generator = generator_for(seed, "condition box", step, index)
            boxes.append(int(generator.integers(num_boxes(config))))
    return StepDraws(
        samples=samples,
        captions=captions,
        condition_types=condition_types,
        boxes=tuple(boxes),
        t=t,
        sound_t=None if video_t is None else sound_t,
    )


def _draw_noise_levels(
    source: BatchSource, step: int, samples: int, modality: str
) -> Tensor:
    """Draw the noise levels (B,) of the video or of the sound of a step."""
    purpose = "t" if modality == "video" else "t sound"
    numbers = uniforms(
        source.keys.seed, step, samples, source.config.timestep_stratified, purpose
    )
    return source.timesteps_of(step, modality).draw(numbers)


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
    # A batch without sound is returned as it is. If only sound is learnt, t is its own.
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

    known = []
    extras = []
    for index, (window, variant) in enumerate(zip(windows, variants, strict=True)):
        box = boxes[index] if boxes else 0
        sample = DrawnConditions(window, variant, condition_types[index], box)
        encoded = source.condition_reader.encoded_conditions(sample)
        # Writes the given cells into x0 in place, and returns where they are: (F,H,W).
        known.append(
            source.condition_reader.write_conditioning_cells(
                x0[index], sample, encoded, latents[index].start
            )
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
