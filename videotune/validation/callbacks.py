"""The callbacks of a run: saving, validation, previews and sample metrics."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from videotune.console import echo
from videotune.job.context_checks import refuse_unequal_shape
from videotune.job.job import Job
from videotune.latent_cache.cache_items import CacheItems
from videotune.models.base import DiffusersModel
from videotune.runs.stop_signals import Interrupted
from videotune.sampling.given_files import GivenFiles
from videotune.sampling.given_latents import encode_given, read_given
from videotune.sampling.picture_faults import remark_at
from videotune.sampling.picture_measure import measure_picture
from videotune.sampling.pipeline import RenderedSample, SampleSettings, file_name
from videotune.sampling.sample_files import measure_sound, write_sample
from videotune.trainer.build import plain_batch
from videotune.trainer.cache_filling import reads_of
from videotune.trainer.loop import base_guidance
from videotune.trainer.saving import Saving, best_step, save
from videotune.trainer.text_encoders import encode_live_text
from videotune.trainer.trainer import Callback, Trainer, due
from videotune.types import Batch, ClipShape, LatentDistribution, Window
from videotune.validation import selection
from videotune.validation.decoding import (
    SamplingCallback,
    broadcast_from_main,
    updates_of,
)
from videotune.validation.forgetting_callback import ForgettingCallback
from videotune.validation.overfitting import (
    MIN_READINGS,
    OVERFITTING,
    count_latest,
    judge,
    readings_of,
    too_few_readings,
)
from videotune.validation.overhead import decide_spacings, planned_forgetting
from videotune.validation.part_movement import PartMovement
from videotune.validation.sample_metrics import SampleMetricsCallback
from videotune.validation.sample_metrics_plan import sample_metrics_plan
from videotune.validation.selection import PreviewRequest
from videotune.validation.to_come import validations_to_come
from videotune.validation.validation_loss import (
    ValidationLoss,
    expert_by_quantile,
    read_validation,
    relative_to_first,
)
from videotune.validation.validation_set import FrozenSet, freeze_validation_set
from videotune.validation.verdict_words import shown_word, step_of_change

ValidationReading = Mapping[str, Any]
"""The result of ``read_validation``: "held_out" (None if no clip is), "train", …"""


def callbacks_of(job: Job) -> list[Callback]:
    """Return the callbacks of a run in the order in which they run."""
    # A run's job has all of them already; a job that was opened alone has not.
    job = decide_spacings(job)
    callbacks = [
        PartMovement(job),  # before a checkpoint, so a kill cannot lose its reading
        Saving(job.config.save_every),
        Validation(job),
        Previews(job),
    ]
    plan = sample_metrics_plan(job)
    if plan is not None:
        callbacks.append(SampleMetricsCallback(job, plan))
    planned = planned_forgetting(job)
    if planned is not None:
        callbacks.append(ForgettingCallback(job, *planned))
    return callbacks


def cache_items_of(job: Job) -> CacheItems:
    """Return what a run with these callbacks reads from the cache."""
    prompts: list[str] = []
    windows: list[Window] = []
    for callback in callbacks_of(job):
        prompts.extend(callback.prompts())
        windows.extend(callback.windows())
    return reads_of(job, prompts, windows)


class Validation(Callback):
    """Measure the validation loss every ``validate_every`` steps and give a verdict."""

    def __init__(self, job: Job) -> None:
        self.every = job.config.validate_every or 0
        self._job = job
        held_out, training = selection.validation_windows(job)
        self.loss = ValidationLoss(held_out, training, job.config.seed)
        self._shown_verdict = ""
        self._set: FrozenSet | None = None

    def windows(self) -> Sequence[Window]:
        """Return the training windows that it reads, and all held-out ones."""
        return (*self.loss.train, *self._job.library.held_out_windows)

    def name(self, trainer: Trainer) -> str:
        """Return the name of the validation set."""
        return self._frozen_set(trainer).name

    def _frozen_set(self, trainer: Trainer) -> FrozenSet:
        """Return the validation set; the first call freezes it."""
        if self._set is None:
            self._set = freeze_validation_set(trainer, self.loss)
        return self._set

    def status(self) -> str:
        """Return the word for the verdict, empty without one."""
        return self._shown_verdict

    def before(self, trainer: Trainer) -> None:
        """Validate before the first step, or where a killed process did not.

        The main process knows what the journal lacks. If all processes must run the
        network together, it tells the others.
        """
        if not self.every:
            return
        step = trainer.first_step - 1
        is_main = trainer.dist.is_main
        if broadcast_from_main(trainer, is_main and self.is_lacking(trainer, step)):
            self.run(trainer, step)
        elif is_main:
            # A reading may have been made before a kill, without its verdict.
            self._shown_verdict = write_verdict(
                trainer, validations_to_come(trainer, step)
            )
        if is_main:
            self._warn_of_other_clips(trainer, step)
            self._note_too_few(trainer, step)

    def _warn_of_other_clips(self, trainer: Trainer, step: int) -> None:
        """Say that from here on other training clips are measured, if they are."""
        frozen = self._frozen_set(trainer)
        if frozen.goes_on:
            trainer.journal.warn(
                step,
                f"{frozen.difference} changed, which validation measures: the error on "
                f"training clips up to step {step} is that of the earlier ones. Clips kept "
                "aside compare as before",
            )

    def _note_too_few(self, trainer: Trainer, step: int) -> None:
        """Print at the beginning if the run will end without a verdict, because it
        validates too rarely. Without held-out clips another note says it.
        """
        to_come = validations_to_come(trainer, step)
        if not to_come or not trainer.job.library.held_out_windows:
            return
        readings_so_far = readings_of(trainer.journal.history.events)
        if len(readings_so_far) + len(to_come) < MIN_READINGS:
            echo(f"note: {too_few_readings(len(readings_so_far), to_come)}")

    def is_lacking(self, trainer: Trainer, step: int) -> bool:
        """Whether a validation of ``step`` is due and missing."""
        if not self.every:
            return False
        name = self.name(trainer)
        lines = trainer.journal.history.of_kind("validation")
        steps_read = {line["step"] for line in lines if line.get("validation") == name}
        if step in steps_read:
            return False

        # A set that changed on a resume is read before the first step: later readings
        # are compared with this one.
        return due(step, self.every, trainer.job.steps) or not steps_read

    def run(self, trainer: Trainer, step: int) -> None:
        """Measure relative to the set's first reading, unless the user interrupts."""
        trainer.heartbeat.set("measuring", step)
        started = time.perf_counter()
        is_main = trainer.dist.is_main
        name = self.name(trainer) if is_main else ""
        live = None
        try:
            # In this order, the weights are restored even after an interruption.
            with trainer.averaged(), trainer.interruptible():
                reading = self.read(trainer)
            with trainer.interruptible():
                if trainer.job.config.ema.decay is not None:
                    live = self.read(trainer)
        except Interrupted:
            return

        if is_main:
            self._write(
                trainer, step, name=name, reading=reading, live=live, started=started
            )
        if trainer.job.config.early_stopping is not None:
            self._save_if_best(trainer, step)

    def _save_if_best(self, trainer: Trainer, step: int) -> None:
        """Save the best step of a run that may stop early, so it can be recommended."""
        lines = trainer.journal.history.events
        steps = {line["step"] for line in lines if line["kind"] == "validation"}
        is_best = trainer.dist.is_main and step > 0 and best_step(lines, steps) == step
        if broadcast_from_main(trainer, is_best):
            save(trainer, step, "backup")

    def read(self, trainer: Trainer) -> dict[str, Any]:
        """Measure {"held_out", "train"} with the current weights of the network."""

        def batch_of(window: Window) -> Batch:
            batch = plain_batch(trainer.source, window)
            return encode_live_text(trainer.family, trainer.text, batch)

        return read_validation(
            self.loss,
            trainer.family,
            trainer.pool,
            trainer.source.objective,
            batch_of,
            base_guidance(trainer),
        )

    def _write(
        self,
        trainer: Trainer,
        step: int,
        *,
        name: str,
        reading: ValidationReading,
        live: ValidationReading | None,
        started: float,
    ) -> None:
        """Write a reading and its verdict to the journal.

        Args:
            trainer: the run.
            step: the step.
            name: name of the validation set.
            reading: of the average of the weights, if there is one.
            live: of the weights themselves; None without an average.
            started: when the measurement began, by ``time.perf_counter``.
        """
        lines = trainer.journal.history.of_kind("validation")
        same_set = [line for line in lines if line.get("validation") == name]
        first = same_set[0] if same_set else reading
        if lines and not same_set:
            difference = self._frozen_set(trainer).difference
            details = f" ({difference} differ)" if difference else ""
            trainer.journal.warn(
                step,
                f"the validation set changed{details}: validation losses from "
                f"step {step} on can only be compared with each other",
            )

        experts = expert_by_quantile(trainer.family, trainer.source.objective)
        fields: dict[str, Any] = _relative_parts(reading, first, experts)
        if live is not None:
            fields["live"] = _relative_parts(live, first, experts)
        seconds = round(time.perf_counter() - started, 3)
        trainer.journal.event(
            "validation", step=step, validation=name, **fields, seconds=seconds
        )
        trainer.write_exposure(step)
        self._shown_verdict = write_verdict(trainer, validations_to_come(trainer, step))

    def stops(self, trainer: Trainer) -> bool:
        """Whether the latest ``early_stopping`` readings all say OVERFITTING."""
        patience = trainer.job.config.early_stopping
        if patience is None or not trainer.dist.is_main:
            return False
        return count_latest(trainer.journal.history.events, OVERFITTING) >= patience

    def on_end(self, trainer: Trainer, step: int) -> None:
        """Print the verdict."""
        if self.every:
            to_come = validations_to_come(trainer, step)
            write_verdict(trainer, to_come, at_the_end=True)


def _relative_parts(
    reading: ValidationReading, first: Mapping[str, Any], experts: Sequence[str]
) -> dict[str, Any]:
    relative: dict[str, Any] = {}
    for part, value in reading.items():
        if part in ("sound", "plain"):
            first_value = first.get(part) or value
            relative[part] = _relative_parts(value, first_value, experts)
        else:
            relative[part] = relative_to_first(value, first[part], experts)
    return relative


class Previews(SamplingCallback):
    """Sample the prompts every ``sample_after`` steps and write videos."""

    control_key = "sample"
    title = "previews"
    heartbeat_state = "sampling"
    failure_prefix = "the preview at step {} failed"

    def __init__(self, job: Job) -> None:
        self.every = job.config.sample_after or 0
        self._job = job
        self._prompts = selection.preview_prompts(job)
        self._given: dict[tuple[GivenFiles, ClipShape], LatentDistribution] = {}

    def prompts(self) -> Sequence[str]:
        """Return the prompts and negative prompts, each once."""
        run_negative = self._job.config.sample.negative
        texts = []
        for prompt in self._prompts:
            texts.append(prompt.prompt)
            texts.append(prompt.negative or run_negative)
        return [text for text in dict.fromkeys(texts) if text]

    def check(self, family: DiffusersModel, *, takes_part: bool) -> None:
        """Raise VideotuneError if the model cannot sample a preview as it is asked for."""
        if not self.every:
            return
        requests = selection.preview_requests(self._job)
        for settings in dict.fromkeys(request.settings for request in requests):
            updates_of(family, self._job.config, settings)
            refuse_unequal_shape(self._job, settings.shape, "samples")
        for request in requests:
            read_given(request.files, request.settings.shape, "samples")

    def encode(self, family: DiffusersModel) -> None:
        """Encode the files that previews are conditioned on."""
        if not self.every:
            return
        requests = {
            (request.files, request.settings.shape): None
            for request in selection.preview_requests(self._job)
            if request.files
        }
        if requests:
            encoded = encode_given(family, list(requests), self._job.config, "samples")
            self._given = dict(zip(requests, encoded, strict=True))

    def _conditions_of(
        self,
        trainer: Trainer,
        request: PreviewRequest,
        windows: Mapping[PreviewRequest, Window],
    ) -> LatentDistribution | None:
        """Return what a preview is conditioned on, or None."""
        if request.files:
            return self._given[request.files, request.settings.shape]
        window = windows.get(request)
        if window is None:
            return None
        if trainer.job.spec.has_conditioning_modality:
            return trainer.source.conditioning_modality(window)
        return trainer.source.plain_latents_with_conditions(window)

    def windows(self) -> Sequence[Window]:
        """Return the windows that the conditions of previews are taken from."""
        if not self.every:
            return ()
        return tuple(dict.fromkeys(selection.preview_windows(self._job).values()))

    def _finished(self, trainer: Trainer, step: int) -> set[tuple[str, int]]:
        """Return (prompt, seed) of the previews of ``step`` that are written."""
        lines = trainer.journal.history.of_kind("sample")
        return {
            (line["prompt"], line["seed"]) for line in lines if line.get("step") == step
        }

    def is_lacking(self, trainer: Trainer, step: int) -> bool:
        """Whether previews of ``step`` are due and missing."""
        is_due = due(step, self.every, trainer.job.steps)
        if not is_due or self.has_failed(trainer, step):
            return False
        wanted = selection.preview_keys(trainer.job)
        return not self._finished(trainer, step).issuperset(wanted)

    def run(self, trainer: Trainer, step: int) -> None:
        """Sample the previews that are missing; those with equal settings together."""
        with self.failures_as_warnings(trainer, step):
            finished = set[tuple[str, int]]()
            if trainer.dist.is_main:
                finished = self._finished(trainer, step)
            finished = broadcast_from_main(trainer, finished)

            windows = selection.preview_windows(trainer.job)
            by_settings: dict[SampleSettings, list[PreviewRequest]] = {}
            for request in selection.preview_requests(trainer.job):
                if (request.prompt, request.seed) not in finished:
                    by_settings.setdefault(request.settings, []).append(request)

            for settings, requests in by_settings.items():
                started = time.perf_counter()
                samples = [(request.prompt, request.seed) for request in requests]
                conditions = [
                    self._conditions_of(trainer, request, windows)
                    for request in requests
                ]
                rendered = self.samples(trainer, step, settings, samples, conditions)

                # Only the main process has samples.
                seconds = (time.perf_counter() - started) / max(1, len(rendered))
                if rendered:
                    _write_previews(
                        trainer, step, requests, rendered, round(seconds, 3)
                    )


def _write_previews(
    trainer: Trainer,
    step: int,
    requests: Sequence[PreviewRequest],
    rendered: Sequence[RenderedSample],
    seconds: float,
) -> None:
    for request, sample in zip(requests, rendered, strict=True):
        name = file_name(step, request.prompt, request.seed)
        path = trainer.run / "samples" / name
        write_sample(path, sample, request.settings.shape.fps)
        fields: dict[str, Any] = {}
        if sample.sound is not None:
            fields["sound"] = measure_sound(sample.sound)
        trainer.journal.event(
            "sample",
            step=step,
            prompt=request.prompt,
            seed=request.seed,
            path=path.relative_to(trainer.run).as_posix(),
            picture=measure_picture(sample.frames, trainer.family.spec.rules),
            seconds=seconds,
            **fields,
        )
    remark = remark_at(trainer.journal.history.of_kind("sample"), step)
    if remark and step > 0:
        echo(f"step {step}: {remark}")


def write_verdict(
    trainer: Trainer, to_come: Sequence[int] = (), *, at_the_end: bool = False
) -> str:
    """Judge the readings so far and write the verdict to the journal, once per reading.

    It is printed when its label changes, and at the end of the run unless it was
    printed for the same reading. Returns the word for it, empty if there is none yet.

    Args:
        trainer: the run.
        to_come: the next steps at which it will validate.
        at_the_end: whether the run has ended.
    """
    lines = trainer.journal.history.events
    verdict = judge(lines, to_come)
    if verdict is None:
        return ""
    past = [line for line in lines if line["kind"] == "verdict"]
    last: Mapping[str, Any] = past[-1] if past else {}

    is_new_label = verdict.label != last.get("verdict")
    reading = (verdict.step, verdict.validation)
    is_new_reading = reading != (last.get("step"), last.get("validation"))
    fields = verdict.to_json()
    word = shown_word(fields, step_of_change(readings_of(lines)))
    if is_new_label or is_new_reading:
        trainer.journal.event("verdict", **fields, shown=word)

    # At the end only a label is printed that an earlier reading had already: a new one was
    # printed with its reading.
    earlier = [line["verdict"] for line in past if line["step"] < verdict.step]
    is_old_label = earlier[-1:] == [verdict.label]
    has_changed = is_new_label and verdict.label is not None
    has_held_out = bool(trainer.job.library.held_out_windows)  # else a note said it
    if has_changed or (at_the_end and is_old_label and verdict.label is not None):
        told = word if word == verdict.label else f"verdict {word}"
        echo(f"{told} at step {verdict.step}: {verdict.reason}")
    elif at_the_end and verdict.label is None and has_held_out:
        echo(f"no verdict yet: {verdict.reason}")
    return word if verdict.label is not None else ""
