"""A job with its models: the family on its device, the cache filled, and where batches come from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from videotune.adapters.lora import LoraSettings
from videotune.cache.batches import Source, assemble
from videotune.cache.encode import FillReport, Todo, cut_captions, encode_take, fill, fits_of, missing
from videotune.cache.expert_schedule import ExpertSchedule
from videotune.cache.store import Store
from videotune.config.schema import Config
from videotune.console import bar, clock, echo
from videotune.data.workers import Workers
from videotune.diffusion.objective import Objective, objective
from videotune.diffusion.timesteps import Timesteps, shift_of_tokens
from videotune.errors import DoesNotFit, VideotuneError
from videotune.families.find import find, part_files, place
from videotune.families.loading import text_encoders_streamed
from videotune.train.run_spec import Job
from videotune.train.samples import captions_of, takes_of, texts_of
from videotune.train.step import of_memory
from videotune.train.text_encoders import cut_prompts, in_loop, live_text
from videotune.types import BasePlace, Batch, ClipShape, Family, FamilySpec, WeightDtypes, Window

DTYPES = {"FLOAT_32": torch.float32, "BFLOAT_16": torch.bfloat16}


def device_and_dtype(config: Config) -> tuple[torch.device, torch.dtype]:
    """CUDA where there is one, else the CPU; and the train dtype."""
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    return device, dtype_of(dtype_name(config))


def dtype_of(name: str) -> torch.dtype:
    """torch's name of a config's dtype."""
    return DTYPES[name]


def dtype_name(config: Config) -> str:
    """The train dtype as the config says, or what suits the device: on a CPU bf16 is some twelve times slower."""
    return config.train_dtype or ("BFLOAT_16" if torch.cuda.is_available() else "FLOAT_32")


def weights_of(config: Config, dtype: str) -> WeightDtypes:
    """How the frozen weights of each part are kept where the run is in ``dtype``."""

    def kept(own: str) -> str | None:
        asked = config.weight_dtype if own == "auto" else own
        return None if asked in ("auto", dtype) else asked

    return WeightDtypes(kept(config.transformer.weight_dtype), kept(config.text_encoder.weight_dtype))


def open_models(spec: FamilySpec, base: BasePlace | None, config: Config) -> Family:
    """The family over its base model.

    Raises VideotuneError where no base model is named.
    """
    if base is None:
        raise VideotuneError(f"base_model_name: which {spec.title}? Give a folder in diffusers layout or a Hub id.")
    folder = place(base.name, files=part_files(config.transformer.file, spec)).folder
    return find(spec.name).open_family(folder, *device_and_dtype(config), weights_of(config, dtype_name(config)))


def lora_settings(config: Config) -> LoraSettings:
    """The adapter's part of the config."""
    lora = config.lora
    return LoraSettings(lora.rank, lora.alpha, lora.dropout, lora.targets, lora.variant)


def make_objective(spec: FamilySpec, config: Config) -> Objective:
    """The loss that the config and the family name."""
    weight = config.video_config.temporal_consistency_weight
    return objective(
        spec.path,
        spec.path_constants,
        make_timesteps(spec, config),
        config.loss_weighting,
        weight,
        config.loss_weighting_gamma,
    )


def make_timesteps(spec: FamilySpec, config: Config) -> Timesteps:
    """The noise levels that the config and the family name.

    Of a shift by resolution it is the family's fixed one, which the ruler keeps to; each bucket's own is ``shift_of``'s.
    """
    asked = config.timestep_shift
    fixed = spec.timestep_shift if asked is None or isinstance(asked, str) else asked
    levels = Timesteps(config.timestep_distribution or spec.timestep_distribution, fixed)
    given = {
        "mean": config.timestep_mean,
        "std": config.timestep_std,
        "alpha": config.timestep_alpha,
        "beta": config.timestep_beta,
        "mode_scale" if levels.distribution == "MODE" else "scale": config.timestep_scale,
    }
    numbers: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(levels, **numbers)


def shift_of(spec: FamilySpec, config: Config) -> Callable[[ClipShape], float] | None:
    """The shift of each bucket by its tokens, where the config asks for one; None: all have the same."""
    rule = spec.shift_by_tokens
    if config.timestep_shift != "resolution" or rule is None:
        return None
    return lambda shape: shift_of_tokens(spec.tokens(shape), rule)


Tell = Callable[[str, int, int], None]


def fill_cache(
    job: Job, family: Family, store: Store, extra: Sequence[str] = (), own: Todo | None = None, tell: Tell | None = None
) -> None:
    """``fill_once``; where the device has no room for the text encoder, once more with its blocks streamed from the host.

    Raises DoesNotFit where there is none then either, or none for the autoencoder.
    """
    try:
        fill_once(job, family, store, extra, own, tell)
    except (MemoryError, RuntimeError) as error:
        if not of_memory(error):
            raise
        echo("note: the device has no room for an encoder; the blocks of the text encoder now come from host memory")
        family.free("text_encoder")
        family.free("vae")
        try:
            with text_encoders_streamed(echo):
                fill_once(job, family, store, extra, own, tell)
        except (MemoryError, RuntimeError) as again:
            if not of_memory(again):
                raise
            raise DoesNotFit(
                f"the device has no room to encode {job.shapes[0]} pixels: fewer frames (video_config.frames) or a lower "
                "resolution would help, or a larger card for this part alone (videotune cache)"
            ) from again


def lacks(job: Job, family: Family, store: Store, extra: Sequence[str] = ()) -> Todo:
    """What the cache does not have of what a run reads: every caption, the empty one, ``extra`` prompts, every take."""
    prints, tokens, seed = family.fingerprints(), job.spec.text_tokens, job.config.seed
    fits = fits_of(family, job.shapes[0])
    return missing(store, prints, tokens, captions_of(job, extra), takes_of(job), seed, job.spec.image_noise, fits)


def fill_once(
    job: Job, family: Family, store: Store, extra: Sequence[str] = (), own: Todo | None = None, tell: Tell | None = None
) -> None:
    """Encode what the cache lacks; of several processes its ``own`` part of that, under a lock that another one holds.

    ``tell``: called with what is encoded and how fast, how many are done, and how many there are.
    """
    prints, tokens, seed = family.fingerprints(), job.spec.text_tokens, job.config.seed
    captions, todo = captions_of(job, extra), lacks(job, family, store, extra) if own is None else own
    if todo:
        threads = job.config.dataloader_threads

        def told(what: str, done: int, total: int) -> None:
            progress.update(done, total, what)
            if tell is not None:
                tell(what, done, total)

        with bar("encoding") as progress, Workers(threads) if threads else nullcontext() as workers:
            report = fill(
                family,
                store,
                todo,
                job.library.media,
                seed,
                workers,
                told,
                own is not None,
            )
        if own is None:
            echo(f"encoded {report.captions} captions and {report.takes} windows into {store.folder} {waiting(report)}")
    if own is not None:
        return
    for note in store.notes:
        echo(f"note: {note}")
    echo_truncated(job, [text for text in cut_captions(store, prints["text_encoder"], tokens, captions) if text])


def echo_truncated_live(job: Job, family: Family, extra: Sequence[str] = ()) -> None:
    """The same where text is encoded in the step and none is in the cache."""
    live = live_text(job.config)
    if live is not None:
        echo_truncated(job, cut_prompts(family, live, texts_of(job, extra)))


def echo_truncated(job: Job, cut: Sequence[str]) -> None:
    """Say which texts are longer than the model reads."""
    tokens = job.spec.text_tokens
    if cut:
        echo(
            f"warning: {len(cut)} captions are longer than the {tokens} tokens that {job.spec.title} reads and are cut,"
        )
        echo(f"  the first begins {cut[0][:60]!r}")


def waiting(report: FillReport) -> str:
    """How long it took, and whether it waited for frames; dataloader_threads is the remedy."""
    text = f"in {clock(report.seconds)}"
    if report.seconds > 5 and report.waited > 0.2 * report.seconds:
        return (
            f"{text}; {report.waited / report.seconds:.0%} of it waiting for frames: more dataloader_threads would help"
        )
    return text


def make_source(
    job: Job, family: Family, store: Store, loss: Objective, expert_schedule: ExpertSchedule | None = None
) -> Source:
    """Where the run's batches come from."""
    return Source(
        store=store,
        prints=family.fingerprints(),
        tokens=job.spec.text_tokens,
        condition=family.condition,
        clips={clip.id: clip for clip in job.library.clips},
        buckets=job.buckets,
        schedule=job.schedule,
        objective=loss,
        caption_dropout=job.config.caption_dropout,
        variants=job.config.video_config.variants,
        frame_dropout=job.config.video_config.frame_dropout_probability,
        patch_frames=job.spec.patch[0],
        sizes={name: (facts.width, facts.height) for name, facts in job.library.media.items()},
        encode=lambda take: encode_take(family, take, job.library.media, job.config.seed),
        given=job.spec.given,
        first_frame=job.config.first_frame_probability or 0.0,
        image_noise=job.spec.image_noise,
        text_in_step=in_loop(job.config),
        expert_schedule=expert_schedule,
        stratified=job.config.timestep_stratified,
        shift_of=shift_of(job.spec, job.config),
        ranges={expert.name: (expert.t_lo, expert.t_hi) for expert in job.spec.experts}
        if len(job.spec.experts) > 1
        else {},
    )


def plain_batch(source: Source, window: Window) -> Batch:
    """A window alone with its first caption, nothing drawn or dropped: what the ruler reads."""
    caption = source.clips[window.clip_id].captions[0]
    return assemble(source, [window], [caption], [source.plain(window)], [source.conditions_on_first_frame])
