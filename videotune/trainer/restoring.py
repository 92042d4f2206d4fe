"""Restore a run's state from a checkpoint bit for bit, and cut its journal to it."""

from collections.abc import Mapping
from typing import Any

from videotune.adapters.layers import load_weights
from videotune.console import echo
from videotune.data.dataset import to_json
from videotune.errors import VideotuneError
from videotune.files import write_bytes, write_json
from videotune.job.experts import of_expert
from videotune.job.job import with_views
from videotune.runs import run_dir
from videotune.runs.checkpoint import Checkpoint, sweep, why_not
from videotune.runs.rollback import (
    RUN_RECORDS,
    archive_steps,
    changed_after,
    kept_before,
)
from videotune.runs.step_sums import regularization
from videotune.trainer.loss_scale import without_loss_scale
from videotune.trainer.optimizer_state import load_optimizer_state
from videotune.trainer.resume import OpenedRun
from videotune.trainer.saving import rescue_message, write_saved
from videotune.trainer.trainer import Trainer


def restore(trainer: Trainer, opened: OpenedRun, branch: bool) -> None:
    """Restore the checkpoint, cut the journal to it, and let the trainer continue after
    it.

    A run that was killed before it saved anything begins again at step 0. Random draws
    depend on the seed and the step alone, so its steps are the same ones.

    Args:
        trainer: the run.
        opened: what ``open_run`` returned.
        branch: keep what came after the checkpoint as a branch.
    """
    checkpoint = opened.checkpoint
    step = checkpoint.step if checkpoint else 0
    if checkpoint is not None:
        restore_state(trainer, checkpoint)
    trainer.first_step = step + 1
    trainer.last_step = step

    if trainer.dist.is_main:
        _restore_journal(trainer, opened, branch)
    # Every process counts on from here, and all must end at the same step.
    skipped = trainer.journal.history.skipped_at_the_end
    trainer.skipped_in_a_row = trainer.dist.broadcast(skipped)


def _restore_journal(trainer: Trainer, opened: OpenedRun, branch: bool) -> None:
    """Cut the journal to the checkpoint, and print where the run continues.

    Args:
        trainer: the run.
        opened: what ``open_run`` returned.
        branch: keep what came after the checkpoint as a branch.
    """
    run = trainer.run
    checkpoint = opened.checkpoint
    step = checkpoint.step if checkpoint else 0

    sweep(run)
    if branch:
        archive = archive_steps(run, step, trainer.journal.history.largest_step)
        if archive:
            echo(f"what came after step {step} is kept in {archive}")
    steps_done = trainer.journal.history.last_step
    trainer.journal.cut(step)
    if checkpoint is not None:
        # A kill may have come between the checkpoint and its line.
        saved_steps = [line["step"] for line in trainer.journal.history.of_kind("save")]
        if step not in saved_steps:
            write_saved(trainer, checkpoint, None)
    if opened.changes:
        _write_changed_config(trainer)

    if checkpoint is None:
        echo("nothing was saved yet: starting from step 0")
    else:
        steps_lost = 0 if branch else max(0, steps_done - step)
        message = f"resuming from step {step}"
        if steps_lost:
            steps = "step" if steps_lost == 1 else "steps"
            message += (
                f"; {steps_lost} {steps} after it, not saved, will be trained again"
            )
        echo(message)


def restore_state(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Restore weights, optimizer and average.

    Raises VideotuneError if a part is missing, damaged or does not fit.
    """
    folder = str(checkpoint.folder)
    rows = trainer.shard_rows
    verify_share = (trainer.dist.rank, trainer.dist.size)
    weights = checkpoint.load("weights", rows, verify_share)
    optimizer_tensors = checkpoint.load("optimizer", rows, verify_share)
    without_state = checkpoint.state().get("without_state", ())
    averages = weights
    if checkpoint.has_ema:
        averages = checkpoint.load("ema", rows, verify_share)

    try:
        for expert, trainable in trainer.pool.trainables.items():
            prefix = trainer.prefix(expert)
            # A checkpoint has the parameters that the optimizer updates: the masters, if
            # there are any, from which the network's own ones are then rounded.
            load_weights(trainable.parameters, of_expert(weights, prefix), folder)
            if trainable.masters:
                trainable.masters.masters_to_model()

            without = [
                key for key in trainable.parameters if f"{prefix}{key}" in without_state
            ]
            optimizer_tensors_of_expert = of_expert(optimizer_tensors, prefix)
            if trainable.loss_scale is not None:
                trainable.loss_scale.load(optimizer_tensors_of_expert)
            load_optimizer_state(
                trainable.optimizer,
                trainable.parameters,
                without_loss_scale(optimizer_tensors_of_expert),
                without,
            )
            if trainable.ema:
                trainable.ema.load(of_expert(averages, prefix))
    except VideotuneError:
        raise  # it is a ValueError too, and names its reason already
    except ValueError as error:
        raise VideotuneError(
            f"checkpoint {folder} is not complete, and a run cannot continue without its optimizer state: {error}\n"
            f"{rescue_message(trainer.run)}{why_not(trainer.run)}"
        ) from error


def _write_changed_config(trainer: Trainer) -> None:
    """Write config.json, check.json and plan.json of the run from now on, and keep the
    old ones beside them.
    """
    run = trainer.run
    job = trainer.job
    old: Mapping[str, Any] = run_dir.read_run_config(run)
    step = trainer.first_step - 1

    # An earlier resume from this same step may have kept the old files already. Those
    # belong to the steps before; the files in the run folder are then that resume's own.
    is_kept_already = step in changed_after(run, step - 1)
    if not is_kept_already:
        # the config last: it says that all three are there
        for name in reversed(RUN_RECORDS):
            write_bytes(
                kept_before(run, name, step), (run / f"{name}.json").read_bytes()
            )

    account = with_views(job, to_json(job.library), job.steps)
    write_json(run / "check.json", account)
    # Curves of the loss leave out regularization clips.
    trainer.journal.history.steps.aside = frozenset(regularization(account))
    write_json(run / "plan.json", trainer.plan)

    settings = job.resolved.to_json()["settings"]
    # "asked": values such as "auto" before the start replaced them. A key that the user
    # has changed since has its new value.
    values_before_choice = {}
    for key, value in old.get("asked", {}).items():
        is_unchanged = settings[key] == old["settings"][key]
        values_before_choice[key] = value if is_unchanged else settings[key]
    run_dir.write_config(
        run,
        job,
        old["base"]["fingerprints"],
        old["settings"]["train_dtype"],
        values_before_choice,
        old.get("command"),
    )
