"""The callbacks of a run in their order, the two that look at the network (validation and previews), and the verdict."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from videotune.console import echo
from videotune.data.video_writer import write_video
from videotune.job.job import Job
from videotune.latent_cache.encode import CacheItems
from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.journal import readings_of
from videotune.runs.stop_signals import Interrupted
from videotune.sampling.pipeline import file_name
from videotune.trainer.build import plain_batch
from videotune.trainer.cache_filling import reads_of
from videotune.trainer.saving import Saving, best_step, save
from videotune.trainer.step import encode_live_text
from videotune.trainer.trainer import Callback, Trainer, due
from videotune.types import Batch, Window
from videotune.validation import selection
from videotune.validation.decoding import SamplingCallback, of_main
from videotune.validation.overfitting import OVERFITTING, Verdict, in_a_row, judge, recommend
from videotune.validation.overhead import planned
from videotune.validation.sample_metrics import SampleMetricsCallback
from videotune.validation.validation_loss import (
    ValidationLoss,
    freeze,
    owners,
    read_validation,
    related,
)

ValidationReading = Mapping[str, Any]
"""A validation's parts: "held_out" (None where nothing is) and "train"."""


def callbacks_of(job: Job) -> list[Callback]:
    """What a run does between its steps, in this order."""
    job = planned(job)
    config = job.config
    plan = selection.sample_metrics_plan(job)
    found = [Saving(config.save_every), Validation(job), Previews(job)]
    return found if plan is None else [*found, SampleMetricsCallback(job, plan)]


def reads_of_run(job: Job) -> CacheItems:
    """What a run with these callbacks reads from the cache."""
    callbacks = callbacks_of(job)
    prompts = [prompt for one in callbacks for prompt in one.prompts()]
    return reads_of(job, prompts, [window for one in callbacks for window in one.windows()])


class Validation(Callback):
    """The validation loss every ``validate_every`` steps, and the verdict on it."""

    def __init__(self, job: Job) -> None:
        config = job.config
        self.every = config.validate_every or 0
        self._job = job
        held_out, training = selection.validation_windows(job)
        self.loss = ValidationLoss(held_out, training, job.config.seed)
        self.verdict: Verdict | None = None
        self._name: str | None = None
        self._differs = ""

    def windows(self) -> Sequence[Window]:
        """Those of the training set that it reads, and all that are held out."""
        return (*self.loss.train, *self._job.library.held_out_windows)

    def name(self, trainer: Trainer) -> str:
        """The validation set's name; the first call freezes the set."""
        if self._name is None:
            self._name, self._differs = freeze(trainer, self.loss)
        return self._name

    def status(self) -> str:
        """The verdict's word."""
        return self.verdict.word or "" if self.verdict is not None else ""

    def before(self, trainer: Trainer) -> None:
        """The validation loss of the first step, or of the step resumed from if it was killed before it was made.

        The main process knows what the journal lacks; where all must run the network in step, it tells the others.
        """
        if not self.every:
            return
        step = trainer.first - 1
        dist = trainer.dist
        if of_main(trainer, dist.is_main and self._is_lacking(trainer, step)):
            self.run(trainer, step)
        elif dist.is_main:
            self.verdict = write_verdict(trainer)  # of a reading that was made before a kill

    def _is_lacking(self, trainer: Trainer, step: int) -> bool:
        name = self.name(trainer)
        lines = trainer.journal.history.of_kind("validation")
        read_at = {line["step"] for line in lines if line.get("validation") == name}
        # a set that is another one since the resume is read before anything is learnt: later readings compare with it
        return step not in read_at and (due(step, self.every, trainer.job.steps) or not read_at)

    def run(self, trainer: Trainer, step: int) -> None:
        """Measure, relative to the first reading of the same set; given up where the user asks to stop."""
        trainer.heartbeat.set("measuring", step)
        begun = time.perf_counter()
        name = self.name(trainer) if trainer.dist.is_main else ""
        try:
            with (
                trainer.averaged(),
                trainer.breaking(),
            ):  # in this order: weights are put back whatever is given up
                reading = self.read(trainer)
            with trainer.breaking():
                live = self.read(trainer) if trainer.job.config.ema.decay is not None else None
        except Interrupted:
            return
        if trainer.dist.is_main:  # the others have run the network in step with it
            self._write(trainer, step, name, reading, live, begun)
        if (
            trainer.job.config.early_stopping is not None
        ):  # the best checkpoint is kept, so that it can be recommended
            lines = trainer.journal.history.events
            steps = {line["step"] for line in lines if line["kind"] == "validation"}
            if of_main(
                trainer, trainer.dist.is_main and step > 0 and best_step(lines, steps) == step
            ):
                save(trainer, step, "backup")

    def read(self, trainer: Trainer) -> dict[str, Any]:
        """{"held_out", "train"} of the weights as the network has them now."""

        def batch_of(window: Window) -> Batch:
            return encode_live_text(
                trainer.family, trainer.text, plain_batch(trainer.source, window)
            )

        return read_validation(
            self.loss, trainer.family, trainer.pool, trainer.source.objective, batch_of
        )

    def _write(
        self,
        trainer: Trainer,
        step: int,
        name: str,
        reading: ValidationReading,
        live: ValidationReading | None,
        begun: float,
    ) -> None:
        lines = trainer.journal.history.of_kind("validation")
        before = next((line for line in lines if line.get("validation") == name), reading)
        if lines and before is reading:
            what = f"the validation set changed{f' ({self._differs} differ)' if self._differs else ''}"
            trainer.journal.warn(
                step,
                f"{what}: validation losses from step {step} on compare with each other alone",
            )
        whose = owners(trainer.family, trainer.source.objective)
        fields = {part: related(value, before[part], whose) for part, value in reading.items()}
        if live is not None:
            fields["live"] = {
                part: related(value, before[part], whose) for part, value in live.items()
            }
        seconds = round(time.perf_counter() - begun, 3)
        trainer.journal.event(
            "validation", step=step, validation=name, **fields, seconds=seconds
        )
        trainer.write_exposure(step)
        self.verdict = write_verdict(trainer)

    def stops(self, trainer: Trainer) -> bool:
        """Whether early_stopping readings in a row say OVERFITTING."""
        patience = trainer.job.config.early_stopping
        judged = trainer.dist.is_main
        return (
            judged
            and patience is not None
            and in_a_row(trainer.journal.history.events, OVERFITTING) >= patience
        )

    def on_end(self, trainer: Trainer, step: int) -> None:
        """Print the verdict."""
        if self.every:
            write_verdict(trainer, at_the_end=True)


class Previews(SamplingCallback):
    """Samples of the prompts every ``sample_after`` steps, written as videos."""

    word = "sample"
    what = "previews"
    state = "sampling"
    failure = "the preview at step {} failed"

    def __init__(self, job: Job) -> None:
        self.every = job.config.sample_after or 0
        self._job = job
        self._prompts = selection.prompts_of(job)

    def prompts(self) -> Sequence[str]:
        """The previews' prompts, and the negative ones."""
        negative = self._job.config.sample.negative
        given = [(one.prompt, one.negative or negative) for one in self._prompts]
        return [text for text in dict.fromkeys(text for pair in given for text in pair) if text]

    def check(self, takes_part: bool) -> None:
        """Raise VideotuneError for a shape that the model cannot sample."""
        if self.every:
            selection.previews_of(self._job)

    def windows(self) -> Sequence[Window]:
        """Those whose first frame a preview is conditioned on."""
        return (
            tuple(dict.fromkeys(selection.first_frames_of(self._job).values()))
            if self.every
            else ()
        )

    def _made(self, trainer: Trainer, step: int) -> set[tuple[str, int]]:
        """Prompts and seeds whose previews of ``step`` are there."""
        lines = trainer.journal.history.of_kind("sample")
        return {(line["prompt"], line["seed"]) for line in lines if line.get("step") == step}

    def is_lacking(self, trainer: Trainer, step: int) -> bool:
        """Whether some were not made before a kill."""
        wanted = due(step, self.every, trainer.job.steps) and not self.has_failed(trainer, step)
        return wanted and not self._made(trainer, step).issuperset(
            selection.names_of(trainer.job)
        )

    def run(self, trainer: Trainer, step: int) -> None:
        """Sample the prompts but those that are made, and write the videos; those of the same settings together."""
        with self.contained(trainer, step):
            made = of_main(
                trainer, self._made(trainer, step) if trainer.dist.is_main else set()
            )
            first = selection.first_frames_of(trainer.job)
            wanted = [
                one
                for one in selection.previews_of(trainer.job)
                if (one.prompt, one.seed) not in made
            ]
            for settings in dict.fromkeys(one.settings for one in wanted):
                begun = time.perf_counter()
                alike = [one for one in wanted if one.settings == settings]
                windows = [first[one] for one in alike] if first else []
                videos = self.frames(
                    trainer, step, settings, [(one.prompt, one.seed) for one in alike], windows
                )
                seconds = round((time.perf_counter() - begun) / max(1, len(videos)), 3)
                for one, frames in zip(alike if videos else (), videos, strict=True):
                    path = trainer.run / "samples" / file_name(step, one.prompt, one.seed)
                    write_video(path, frames, settings.shape.fps)
                    facts = {
                        "prompt": one.prompt,
                        "seed": one.seed,
                        "path": path.relative_to(trainer.run).as_posix(),
                    }
                    trainer.journal.event("sample", step=step, **facts, seconds=seconds)


def write_verdict(trainer: Trainer, at_the_end: bool = False) -> Verdict | None:
    """The verdict on the readings so far, into the journal once a reading; printed where its word is new, and at the end."""
    lines = trainer.journal.history.events
    found = judge(lines)
    if found is None:
        return None
    verdicts = [line for line in lines if line["kind"] == "verdict"]
    last: Mapping[str, Any] = verdicts[-1] if verdicts else {}
    is_new = found.word != last.get("verdict")
    if is_new or (found.step, found.validation) != (last.get("step"), last.get("validation")):
        trainer.journal.event("verdict", **found.to_json())
    # at the end it is printed again, unless its word became a new one at this very validation
    is_old = [line["verdict"] for line in verdicts if line["step"] < found.step][-1:] == [
        found.word
    ]
    if (is_new and found.word is not None) or (at_the_end and (is_old or found.word is None)):
        echo(f"{found.word or 'no verdict'} at step {found.step}: {found.reason}")
    return found


def recommended(trainer: Trainer, step: int) -> dict[str, Any]:
    """{"step", "why"}: the recommended checkpoint of a run that is at ``step``.

    The best one by the held-out clips where the run overfits, or has got worse; else the last one, since nothing speaks
    against it.
    """
    lines = trainer.journal.history.events
    found = judge(lines)
    there = [one.step for one in complete_checkpoints(trainer.run)]
    if found is None or not found.turned or not there:
        why = (
            found.reason
            if found is not None and found.word is None
            else "nothing speaks against the last step"
        )
        return {"step": max(there, default=step), "why": why}
    held_out = {
        int(one["step"]): float(one["held_out"]["normalised"]) for one in readings_of(lines)
    }
    best, why = recommend(held_out, found.best_step or 0, there)
    return {"step": best, "why": why or "held-out clips were best there"}
