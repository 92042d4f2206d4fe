"""``train``: the one loop to read."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from videotune.adapters.lora import add_lora, load_lora, matching
from videotune.cache.batches import Source, stream
from videotune.cache.store import Store
from videotune.data.account import totals
from videotune.data.workers import close_default_workers
from videotune.errors import DONE, INTERRUPTED, VideotuneError
from videotune.memory.checkpointing import checkpoint_blocks
from videotune.memory.host import keep_freed_memory
from videotune.monitor.journal import Journal, cut_journal, read_journal
from videotune.monitor.probe import spread
from videotune.monitor.ruler import Ruler, normalised, read_ruler
from videotune.run.console import bar, clock, say
from videotune.run.export import check_formats, exactly, export_run
from videotune.run.folder import begin, look, only_process, read_run_config, refuse_run, run_settings, signals, versions
from videotune.run.job import Job, Words, open_job, refuse_skips, settle
from videotune.run.models import (
    dtype_name,
    fill_cache,
    lora_settings,
    make_objective,
    make_source,
    open_models,
    plain_batch,
)
from videotune.run.plan import make_plan
from videotune.run.previews import first_frames_of, prompts_of, sample_settings, usual_shape
from videotune.sampling.preview import decode, draw, file_name, write_video
from videotune.train.engine import run_steps
from videotune.train.optimizers import (
    OptimizerSettings,
    RateSettings,
    default_warmup,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
)
from videotune.train.state import complete_checkpoints, last_checkpoint, save_checkpoint
from videotune.train.step import StepRecord, StepSettings
from videotune.types import Family

KEPT_IN_MEMORY = 256 << 20
"""Bytes of the cache that stay in host memory while a run trains."""

MOST_SKIPPED = 5
"""So many non-finite steps in a row end the run."""


@dataclass
class Trainer:
    """Everything the loop holds: the models, what trains, where batches come from, and the run folder."""

    run: Path
    job: Job
    family: Family
    net: nn.Module
    parameters: dict[str, nn.Parameter]
    optimizer: Any
    source: Source
    ruler: Ruler
    prompts: list[str]
    captions: dict[str, tuple[str, ...]]
    journal: Journal
    first: int = 1
    skipped_in_a_row: int = 0


def train(words: Words, run: Path, *, resume: bool = False, allow_skips: str | None = None) -> int:
    """Train to the end, or until asked to stop; exit code 130 where it was interrupted and saved."""
    job = open_run(words, run, resume)
    close_default_workers()  # a training opens no more files for hours
    if not resume:  # a resume trains on exactly what was allowed at the start
        refuse_skips(job, allow_skips)
    with only_process(run):
        trainer = prepare(job, run, resume)
        try:
            why = loop(trainer)
            finish(trainer, why)
        finally:
            trainer.journal.close()
    return DONE if why == "done" else INTERRUPTED


def open_run(words: Words, run: Path, resume: bool) -> Job:
    """The job, from the words or, on a resume, from the run's own config.

    Raises VideotuneError where a resume would silently be another run.
    """
    if not resume:
        refuse_run(run)
        resolved, spec, base = settle(words)
    else:
        if words != Words():
            raise VideotuneError("--resume continues the run with its own config: leave the other options out")
        from videotune.config.resolve import resolve
        from videotune.families.find import place, spec_for

        settings = run_settings(run)
        base = place(settings["base_model_name"], weights=False)
        spec = spec_for(settings["family"], base)
        resolved = replace(resolve(settings, {}, spec), origins=read_run_config(run)["origins"])
    with bar("reading clips") as progress:
        job = open_job(resolved, spec, base, lambda done, total, path: progress.update(done, total, path))
    if resume and read_run_config(run)["data"] != job.data_digest():
        raise VideotuneError(
            f"the data of {run} has changed since it started: clips, captions or windows differ. "
            "Put them back as they were, or start a new run."
        )
    return job


def prepare(job: Job, run: Path, resume: bool) -> Trainer:
    """Fill the cache, load the denoiser, add the adapter, and on a resume put the saved state back."""
    config = job.config
    family = open_models(job.spec, job.base, config)
    prints = family.fingerprints()
    if resume and read_run_config(run)["base"]["fingerprints"] != prints:
        raise VideotuneError(
            f"the base model of {run} has changed since it started; it cannot be resumed on another one"
        )
    loss = make_objective(job.spec, config)
    prompts = prompts_of(job)
    check_formats(config.output_model_format, family)
    if config.sample_after:
        sample_settings(config, job.spec, usual_shape(job))  # a shape that cannot be drawn is said before any work
    for note in job.notes:
        say(f"note: {note}")
    if len(job.spec.experts) > 1:
        raise VideotuneError(f"{job.spec.title} has two experts, which cannot be trained yet")
    matching(family.skeleton(), job.spec, config.lora.targets)
    store = Store(job.cache, KEPT_IN_MEMORY)
    fill_cache(job, family, store, prompts)
    (expert,) = job.spec.experts
    net = family.denoiser(expert.name)
    family.isolate_frames(net, not config.video_config.use_temporal_attention)
    if next(net.parameters()).device.type == "cpu":
        keep_freed_memory()  # only now: what the encoders took has gone back
    parameters = add_lora(net, job.spec, lora_settings(config), config.seed)
    checkpoint_blocks(net, config.gradient_checkpointing)
    kind = config.optimizer
    optimizer = make_optimizer(
        {"transformer": list(parameters.values())},
        OptimizerSettings(kind.name, kind.beta1, kind.beta2, kind.weight_decay),
    )
    first = 1
    if resume:
        first = restore(run, parameters, optimizer) + 1
    else:
        begin(run, job, prints, make_plan(job), dtype_name(config))
    trainer = Trainer(
        run=run,
        job=job,
        family=family,
        net=net,
        parameters=parameters,
        optimizer=optimizer,
        source=make_source(job, family, store, loss),
        ruler=Ruler(spread(job.library.held_out_windows), spread(job.training_windows), config.seed),
        prompts=prompts,
        captions=captions_by_window(job),
        journal=Journal(run),
        first=first,
    )
    announce(trainer, resume)
    return trainer


def captions_by_window(job: Job) -> dict[str, tuple[str, ...]]:
    """Each training window's captions."""
    captions = {clip.id: clip.captions for clip in job.library.clips}
    return {window.id: captions[window.clip_id] for window in job.library.windows}


def restore(run: Path, parameters: dict[str, nn.Parameter], optimizer: Any) -> int:
    """Put the newest checkpoint back and cut the journal to it; returns its step.

    A run that was killed before it saved anything begins again at step 0: every draw is counted, so nothing differs.
    """
    if not complete_checkpoints(run) and not any(line["kind"] == "save" for line in read_journal(run)):
        cut_journal(run, 0)
        say("nothing was saved yet: starting from step 0")
        return 0
    checkpoint = last_checkpoint(run)
    adapter, moments, _ = checkpoint.load()
    load_lora(parameters, adapter, str(checkpoint.folder))
    try:
        load_optimizer_state(optimizer, parameters, moments)
    except ValueError as error:
        raise VideotuneError(f"checkpoint {checkpoint.folder} has no whole optimizer state: {error}") from error
    gone = cut_journal(run, checkpoint.step)
    say(f"resuming from step {checkpoint.step}" + (f"; {gone} journal lines after it are cut off" if gone else ""))
    return checkpoint.step


def announce(trainer: Trainer, resume: bool) -> None:
    """The journal's first line of this process, and the run in a sentence."""
    job, count = trainer.job, sum(p.numel() for p in trainer.parameters.values())
    if resume:
        trainer.journal.event("resume", from_step=trainer.first - 1, versions=versions())
    if not any(line["kind"] == "start" for line in read_journal(trainer.run)):
        trainer.journal.event(
            "start",
            steps=job.steps,
            effective_batch=job.effective_batch,
            device=str(next(trainer.net.parameters()).device),
            versions=versions(),
            clips=totals(job.library),
            windows=len(job.library.windows),
            buckets=[
                {"shape": str(shape), "windows": len(bucket), "tokens": job.spec.tokens(shape)}
                for shape, bucket in zip(job.shapes, job.buckets, strict=True)
            ],
            trainable_parameters=count,
            notes=list(job.notes),
        )
    if trainer.first > job.steps:
        say(f"all {job.steps} steps are done already: exporting again")
        return
    say(f"training {count:,} parameters on {next(trainer.net.parameters()).device}, into {trainer.run}")


def loop(trainer: Trainer) -> str:
    """Steps to the end. Records are read one step late; what has to happen between two steps happens here."""
    job, config, run = trainer.job, trainer.job.config, trainer.run
    before_training(trainer)
    records, late, why = make_records(trainer), None, "done"
    with signals() as asked, bar("training") as progress:
        for record in records:
            if late is not None:
                write_step(trainer, late, progress)
            late, step = record, record.step
            if step == trainer.first:  # the first one is shown at once: a sign of life is worth one wait
                write_step(trainer, late, progress)
                late = None
            control = look(run)
            end = step == job.steps
            stop = asked.stop or "stop" in control
            saves, samples, rules = (
                due(step, every, job.steps) for every in (config.save_every, config.sample_after, config.ruler_after)
            )
            if not (end or stop or saves or samples or rules or control):
                continue
            if late is not None:
                write_step(trainer, late, progress)
                late = None
            if end or stop or saves or "save" in control:
                save(trainer, step)
            if rules:
                measure(trainer, step)
            if (samples or "sample" in control) and (end or not stop):
                preview(trainer, step)
            if stop and not end:
                why = "interrupted" if asked.stop else "stopped"
                break
    return why


def make_records(trainer: Trainer) -> Iterator[StepRecord]:
    """The engine over the stream of batches, from the first step that is not done."""
    job, config = trainer.job, trainer.job.config
    warmup = default_warmup(job.steps) if config.warmup_steps is None else config.warmup_steps
    return run_steps(
        trainer.family,
        trainer.net,
        trainer.source.objective,
        stream(trainer.source, trainer.first, job.steps, config.dataloader_threads),
        list(trainer.parameters.values()),
        trainer.optimizer,
        StepSettings(
            config.gradient_accumulation_steps, config.max_grad_norm, config.seed if config.lora.dropout else None
        ),
        RateSettings(config.learning_rate, config.learning_rate_scheduler, warmup, job.steps),
    )


def before_training(trainer: Trainer) -> None:
    """Readings that belong to the first step, or to the step resumed from if it was killed before they were made."""
    config, step = trainer.job.config, trainer.first - 1
    lines = [line for line in read_journal(trainer.run) if line.get("step") == step]
    made = [line["kind"] for line in lines]
    if due(step, config.ruler_after, trainer.job.steps) and "ruler" not in made:
        measure(trainer, step)
    drawn = {line["prompt"] for line in lines if line["kind"] == "sample"}
    if (
        due(step, config.sample_after, trainer.job.steps)
        and not drawn.issuperset(trainer.prompts)
        and "warning" not in made
    ):
        preview(trainer, step, drawn)


def due(step: int, every: int, last: int) -> bool:
    """Whether what happens every so many steps (0: never) and at the last one happens at this one."""
    return every > 0 and (step % every == 0 or step == last)


def write_step(trainer: Trainer, record: StepRecord, progress: Any) -> None:
    """A step's line into the journal and the bar; too many non-finite steps in a row end the run."""
    line = record.read() | {"captions": caption_numbers(trainer, record)}
    trainer.journal.write(line)
    if line.get("skipped"):
        trainer.skipped_in_a_row += 1
        windows = ", ".join(record.window_ids)
        trainer.journal.event(
            "warning", step=record.step, text=f"loss or gradient not finite, step not applied: {windows}"
        )
        if trainer.skipped_in_a_row >= MOST_SKIPPED:
            raise VideotuneError(
                f"{MOST_SKIPPED} steps in a row had a loss or gradient that is not finite (the last: {windows}). The last "
                "checkpoint is good. A resume would meet the same steps: start anew with a lower learning_rate or FLOAT_32."
            )
    else:
        trainer.skipped_in_a_row = 0
    views = trainer.job.views_at(record.step)
    progress.update(record.step, trainer.job.steps, f"loss {line['loss']:.4f}  {views:.1f} views a window")


def caption_numbers(trainer: Trainer, record: StepRecord) -> list[int | None]:
    """Which of its clip's captions each sample was fed, in the order of check.json; None: the empty one, by dropout."""
    texts = [trainer.captions[name] for name in record.window_ids]
    return [own.index(text) if text in own else None for own, text in zip(texts, record.captions, strict=True)]


def step_of(trainer: Trainer) -> int:
    """The last step that is done."""
    steps = [line["step"] for line in read_journal(trainer.run) if line["kind"] == "step"]
    return max(steps, default=0)


def save(trainer: Trainer, step: int) -> None:
    """A checkpoint, and its line in the journal."""
    begun = time.perf_counter()
    trainer.journal.sync()
    state = {"seed": trainer.job.config.seed, "effective_batch": trainer.job.effective_batch}
    moments = optimizer_state(trainer.optimizer, trainer.parameters)
    saved = save_checkpoint(trainer.run, step, trainer.parameters, moments, state)
    seconds = round(time.perf_counter() - begun, 3)
    trainer.journal.event("save", step=step, path=saved.folder.relative_to(trainer.run).as_posix(), seconds=seconds)


def measure(trainer: Trainer, step: int) -> None:
    """Read the ruler; normalised by the run's first reading."""
    begun = time.perf_counter()
    reading = read_ruler(
        trainer.ruler,
        trainer.family,
        trainer.net,
        trainer.source.objective,
        lambda window: plain_batch(trainer.source, window),
    )
    before = next((line for line in read_journal(trainer.run) if line["kind"] == "ruler"), reading)
    for name, part in reading.items():
        if part is not None:
            part["normalised"] = normalised(part, before[name])
    trainer.journal.event("ruler", step=step, **reading, seconds=round(time.perf_counter() - begun, 3))


def preview(trainer: Trainer, step: int, drawn: Collection[str] = ()) -> None:
    """Draw the prompts (but those ``drawn`` already) and write them. One that fails is told and never ends the run."""
    config, begun = trainer.job.config, time.perf_counter()
    all_of_them = [(prompt, config.sample.seed + i) for i, prompt in enumerate(trainer.prompts)]
    wanted = [(prompt, seed) for prompt, seed in all_of_them if prompt not in drawn]
    try:
        settings = sample_settings(config, trainer.job.spec, usual_shape(trainer.job))
        told = first_frames_of(trainer.job)
        with bar(f"previews at step {step}") as progress:
            latents = draw(
                trainer.family,
                {trainer.job.spec.experts[0].name: trainer.net},
                settings,
                trainer.source.text,
                [prompt for prompt, _ in wanted],
                [seed for _, seed in wanted],
                on_done=lambda done: progress.update(done, len(wanted)),
                told=[trainer.source.plain(told[prompt]) for prompt, _ in wanted] if told else None,
                isolated=not config.video_config.use_temporal_attention,
            )
        videos = decode(trainer.family, latents)
        seconds = round((time.perf_counter() - begun) / max(1, len(videos)), 3)
        for (prompt, seed), frames in zip(wanted, videos, strict=True):
            path = trainer.run / "samples" / file_name(step, prompt, seed)
            write_video(path, frames, settings.shape.fps)
            place = path.relative_to(trainer.run).as_posix()
            trainer.journal.event("sample", step=step, prompt=prompt, seed=seed, path=place, seconds=seconds)
    except Exception as error:  # whatever a preview does wrong, hours of training must not be lost to it
        text = f"the preview at step {step} failed: {type(error).__name__}: {error}"
        trainer.journal.event("warning", step=step, text=text)
        say(f"warning: {text}")


def finish(trainer: Trainer, why: str) -> None:
    """Export what was trained, write the report, and say where everything is."""
    from videotune.report.html import write_report

    run = trainer.run
    if why == "done":
        for exported in export_run(run, trainer.family, trainer.parameters, trainer.job.steps, trainer.job.resolved):
            say(f"{exported.format} LoRA: {exported.path}  (read back by diffusers, ΔW {exactly(exported.max_error)})")
    else:
        say(f"{why} and saved; continue with: videotune train --out {run} --resume")
    trainer.journal.event("end", step=step_of(trainer), why=why)
    trainer.journal.sync()
    report = write_report(run)
    took = sum(sum(line["seconds"].values()) for line in read_journal(run) if line["kind"] == "step")
    say(f"report: {report}  ({clock(took)} of training)")
