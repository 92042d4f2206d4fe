"""Resuming a run: what may differ, from which checkpoint, and restoring its state bit for bit."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from videotune.adapters.layers import load_weights
from videotune.config.config_changes import Change, drift, of_class
from videotune.config.load import merge
from videotune.config.resolve import Resolved, parse, resolve
from videotune.console import echo
from videotune.data.dataset import buckets, to_json
from videotune.errors import VideotuneError
from videotune.files import digest, write_bytes, write_json
from videotune.job.experts import of_expert
from videotune.job.job import Job, ViewHistory, make_schedule, open_job, with_views
from videotune.job.overrides import Overrides, preset_keys, resolve_config, user_keys
from videotune.models.base_model import place_of, spec_for
from videotune.runs import run_dir
from videotune.runs.checkpoint import (
    Checkpoint,
    listed,
    newest_checkpoint,
    pick,
    sweep,
    why_not,
)
from videotune.runs.journal import History
from videotune.runs.rollback import FACTS, archive_steps, changed_after, facts_at, kept_before
from videotune.runs.schemas import read_record
from videotune.runs.step_sums import regularization
from videotune.trainer.optimizers import load_optimizer_state
from videotune.trainer.saving import rescue_message, write_saved
from videotune.trainer.trainer import Trainer


@dataclass(frozen=True)
class Resume:
    """How to go on: the checkpoint's step (None: the newest), and what the person allows to differ.

    ``replan``: what was chosen of memory at the start is chosen anew.
    """

    step: int | None = None
    override: bool = False
    data_change: bool = False
    replan: bool = False


@dataclass(frozen=True)
class OpenedRun:
    """A run to train: its job; on a resume also its checkpoint (None: nothing was saved yet) and what differs, in words.

    ``history``: what its journal says.
    """

    job: Job
    checkpoint: Checkpoint | None = None
    changes: tuple[str, ...] = ()
    history: History | None = None


FitFn = Callable[[Job, bool], tuple[Job, Sequence[str]]]
"""(job, whether memory settings are chosen anew) -> the job with its memory settings chosen, and what changed, in words."""


def open_run(
    words: Overrides, run: Path, resume: Resume | None, fit: FitFn, processes: int = 1
) -> OpenedRun:
    """The job, from the overrides, or on a resume from the run's own config with the overrides on top.

    Raises VideotuneError where a resume would silently be another run.
    """
    if resume is None:
        run_dir.refuse_run(run)
        resolved, spec, base = resolve_config(words)
        run_dir.refuse_out_in_data(run, [dataset.path for dataset in resolved.config.datasets])
        return OpenedRun(fit(open_job(resolved, spec, base, processes=processes), False)[0])
    run_dir.read_run_config(run)  # a sentence where the folder holds no run
    history = History(run)
    checkpoint = checkpoint_of(run, resume.step, history)
    step = checkpoint.step if checkpoint else 0
    facts = facts_at(run, resume.step)
    kept = read_facts(run, facts)
    resolved, spec, base, changes = with_overrides(words, kept)
    check_changes(changes, run, resume.override)
    other = changed_around(run, kept, base, resume.override)
    for change in (*changes, *other):
        echo(f"changed: {change}")
    if checkpoint is not None and "init_from" in user_keys(words):
        echo(f"init_from is not read again: the weights are those of step {step}")
    job = open_job(resolved, spec, base, processes=kept.get("processes", 1))
    refuse_fewer_steps(job, run, step)
    refuse_other_batches(job, kept["settings"], changes, run)
    job = replace(job, past=ViewHistory(**kept.get("past", {})))
    told = [*map(str, changes), *other]
    job, replanned = fit(job, resume.replan)
    told += replanned
    if kept["data"] != job.data_digest():
        if not resume.data_change:
            raise VideotuneError(
                f"the data of {run} has changed since it started: {describe_change(facts['check'], job)}. "
                "Put it back as it was, start a new run, or continue with the changed data: --allow-data-change"
            )
        what = describe_change(facts["check"], job)
        views = Counter(
            name for line in history.read_steps(step) for name in line["window_ids"]
        )
        job = replace(job, past=ViewHistory(step, dict(views)))
        told.append(f"data: {what}")
        echo(
            f"the data has changed: {what}. From step {step + 1} on the new data is shown, in an order of its own"
        )
    return OpenedRun(job, checkpoint, tuple(told), history)


def refuse_fewer_steps(job: Job, run: Path, step: int) -> None:
    """Raise VideotuneError where the run would end before the checkpoint from which it is to go on."""
    if step > job.steps:
        raise VideotuneError(
            f"steps: {run} continues from step {step} and cannot end at step {job.steps}; "
            f"give more steps, or go back first with --from: {listed(run)}"
        )


def refuse_other_batches(
    job: Job, settings: Mapping[str, Any], changes: Sequence[Change], run: Path
) -> None:
    """Raise VideotuneError where another split of a step changes its samples: that of videos among images does."""
    if not any(change.key == "batch_size" for change in changes):
        return
    old, _ = make_schedule(parse(settings), buckets(job.library), job.library, job.processes)
    if old.batches != job.schedule.batches:
        raise VideotuneError(
            f"batch_size: images and videos are mixed in {run}, and with video_config.video_batch_size_multiplier a step "
            f"of each bucket would have {job.schedule.batches} samples instead of {old.batches}. Leave it as it was"
        )


def with_overrides(
    words: Overrides, kept: Mapping[str, Any]
) -> tuple[Resolved, Any, Any, list[Change]]:
    """The run's config (``kept``: as it once was) with the person's words on top, and what differs from what it was.

    Words that say what the run was begun with are no change, so its first command goes on with --resume added.
    """
    own = user_keys(words)
    preset = preset_keys(words)
    user = merge(preset, own)
    for name, other in (("epochs", "steps"), ("steps", "epochs")):
        if name in user and other not in user:
            user = {**user, other: None}
    user = {
        key: value for key, value in user.items() if f"{key}_epochs" not in user
    }  # it stands instead of the steps
    settings = merge(kept["settings"], user)
    base = place_of(settings)
    spec = spec_for(settings["family"], base)
    asked = {key: value for key, value in kept.get("asked", {}).items() if key in user}
    said = resolve(own, merge({**kept["settings"], **asked}, preset), spec).to_json()[
        "settings"
    ]
    if all(
        said[key] == value for key, value in asked.items()
    ):  # then they stay what they were frozen to
        settings |= {key: kept["settings"][key] for key in asked}
    resolved = resolve(settings, {}, spec)
    origins = {key: kept["origins"].get(key, "default") for key in resolved.origins}
    old = resolve(
        kept["settings"], {}, spec
    )  # keys that are new since the run began have their defaults on both sides
    changes = drift(old.config.model_dump(mode="json"), resolved.config.model_dump(mode="json"))
    origins |= {change.key: "user" for change in changes}
    return replace(resolved, origins=origins), spec, base, changes


def check_changes(changes: Sequence[Change], run: Path, override: bool) -> None:
    """Raise VideotuneError for changes under which the saved state means nothing, or which must be allowed."""
    fatal = of_class(changes, "fatal")
    if fatal:
        lines = "".join(f"\n  {change}" for change in fatal)
        raise VideotuneError(
            f"{run} cannot be resumed with another{lines}\n"
            "Leave it as it was, or start a new run; --init-from takes weights over"
        )
    asked = of_class(changes, "override")
    if asked and not override:
        lines = "".join(f"\n  {change}" for change in asked)
        raise VideotuneError(
            f"this changes what {run} learns from here on:{lines}\nIf that is meant, add --override"
        )


def read_facts(run: Path, facts: Mapping[str, Path]) -> dict[str, Any]:
    """The run's config.json; every file that is needed on the way is read, since a damaged one is to be told now."""
    for name, path in facts.items():
        read_record(path, name)
    if (run / "exports.json").is_file():
        read_record(run / "exports.json")
    return read_record(facts["config"], "config")


def changed_around(run: Path, kept: Mapping[str, Any], base: Any, override: bool) -> list[str]:
    """What is not as it was and no setting says: config.json itself, the base's scheduler, versions of libraries.

    Raises VideotuneError for the first two without ``override``.
    """
    found = []
    if kept["digest"] != digest(
        {name: value for name, value in kept.items() if name != "digest"}
    ):
        found.append("config.json was edited by hand: it is not what the run wrote")
    if base is not None and kept["base"].get("scheduler") != run_dir.scheduler_hash(base):
        found.append(
            f"the base model's {run_dir.SCHEDULER} is not the one that the run began with"
        )
    if found and not override:
        raise VideotuneError(
            f"{run}: {'; '.join(found)}. Undo that, and change settings with --set KEY=VALUE --override; "
            "or continue with them as they are: --override"
        )
    now = run_dir.versions()
    was = kept.get("versions", {})
    return found + [
        f"versions.{name}: {was[name]} -> {new}"
        for name, new in now.items()
        if was.get(name, new) != new
    ]


def checkpoint_of(run: Path, step: int | None, history: History) -> Checkpoint | None:
    """The checkpoint to go on from; None where the run has not saved anything yet.

    Raises VideotuneError that lists the complete ones where the one asked for, or the newest that was ever saved, is missing
    or incomplete: going back further would lose steps in silence; and where the journal does not reach it.
    """
    if step is None:
        found = newest_checkpoint(
            run, (line["step"] for line in history.of_kind("save")), "--from"
        )
    else:
        found = pick(run, step) if step else None
    if found is not None and history.newest < found.step:
        raise VideotuneError(
            f"{run / 'journal.jsonl'} says nothing of the steps from {history.newest + 1} to {found.step}, which are saved. "
            f"Restore a copy of it, or continue without them: videotune doctor {run} --repair-journal"
        )
    return found


def describe_change(account: Path, job: Job) -> str:
    """What has changed in the data since an account of it (a check.json) was written, in words."""
    was = {
        clip["id"]: clip
        for clip in read_record(account, "check")["clips"]
        if clip["used"] or clip["held_out"]
    }
    now = {clip.id: clip for clip in sorted(job.library.clips, key=lambda clip: clip.path)}
    both = [(clip, was[name]) for name, clip in now.items() if name in was]
    added = [clip.path for name, clip in now.items() if name not in was]
    places = {old["path"] for old in was.values()}
    gone = sorted(clip["path"] for name, clip in was.items() if name not in now)
    changes = {
        "added": [path for path in added if path not in places],
        "removed": [path for path in gone if path not in added],
        "with other bytes under the same name": [path for path in added if path in places],
        "renamed": [
            clip.path for clip, old in both if Path(clip.path).name != Path(old["path"]).name
        ],
        "with another caption": [
            clip.path for clip, old in both if list(clip.captions) != old.get("captions")
        ],
        "trained on before, now held out: the validation loss is no longer blind to them": [
            clip.path for clip, old in both if clip.held_out and old["used"]
        ],
        "no longer held out": [
            clip.path for clip, old in both if not clip.held_out and old["held_out"]
        ],
    }
    said = []
    for what, paths in changes.items():
        names = ", ".join(Path(path).name for path in paths[:3]) + (
            ", …" if len(paths) > 3 else ""
        )
        said += (
            [f"{'1 clip' if len(paths) == 1 else f'{len(paths)} clips'} {what} ({names})"]
            if paths
            else []
        )
    return "; ".join(said) or "clips, their windows or how they are shown differ"


def restore(trainer: Trainer, opened: OpenedRun, branch: bool) -> None:
    """Put the checkpoint back, cut the journal to it, and set the trainer's first step after it.

    A run that was killed before it saved anything begins again at step 0: every draw is counted, so nothing differs.
    """
    run = trainer.run
    checkpoint = opened.checkpoint
    step = checkpoint.step if checkpoint else 0
    if checkpoint is not None:
        restore_state(trainer, checkpoint)
    trainer.first = step + 1
    if not trainer.dist.is_main:
        return
    sweep(run)
    if branch:
        kept = archive_steps(run, step, trainer.journal.history.newest)
        if kept:
            echo(f"what came after step {step} is kept in {kept}")
    done = trainer.journal.history.last
    trainer.journal.cut(step)
    if checkpoint is not None and all(
        line["step"] != step for line in trainer.journal.history.of_kind("save")
    ):
        write_saved(trainer, checkpoint, None)  # a kill came between it and its line
    if opened.changes:
        _write_anew(trainer)
    lost = 0 if branch else max(0, done - step)
    again = (
        f"; {lost} step{'s' * (lost != 1)} after it, not saved, will be trained again"
        if lost
        else ""
    )
    echo(
        f"resuming from step {step}{again}"
        if checkpoint
        else "nothing was saved yet: starting from step 0"
    )
    trainer.skipped_in_a_row = trainer.journal.history.skipped_at_the_end


def restore_state(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Weights, optimizer and average as they were saved.

    Raises VideotuneError where a part is missing, damaged or does not fit.
    """
    where = str(checkpoint.folder)
    rows = trainer.rows
    share = (trainer.dist.rank, trainer.dist.size)
    weights = checkpoint.load("weights", rows, share)
    moments = checkpoint.load("optimizer", rows, share)
    without = checkpoint.state().get("without_state", ())
    averages = checkpoint.load("ema", rows, share) if checkpoint.has_ema else weights
    try:
        for name, trainable in trainer.pool.trainables.items():
            begin = trainer.prefix(name)
            load_weights(trainable.parameters, of_expert(weights, begin), where)
            if trainable.masters:
                trainable.masters.masters_to_model()
            none = [key for key in trainable.parameters if f"{begin}{key}" in without]
            load_optimizer_state(
                trainable.optimizer, trainable.parameters, of_expert(moments, begin), none
            )
            if trainable.ema:
                trainable.ema.load(of_expert(averages, begin))
    except VideotuneError:
        raise
    except ValueError as error:
        raise VideotuneError(
            f"checkpoint {where} is not whole, and a run cannot continue without its optimizer state: {error}\n"
            f"{rescue_message(trainer.run)}{why_not(trainer.run)}"
        ) from error


def _write_anew(trainer: Trainer) -> None:
    """config.json, check.json and plan.json say what the run is from now on; the old ones stay beside them."""
    run = trainer.run
    job = trainer.job
    kept: Mapping[str, Any] = run_dir.read_run_config(run)
    step = trainer.first - 1
    if step not in changed_after(
        run, step - 1
    ):  # what is kept of that step is true: nothing after it stayed
        for name in reversed(FACTS):  # the config last: it says that the three are there
            write_bytes(kept_before(run, name, step), (run / f"{name}.json").read_bytes())
    account = with_views(job, to_json(job.library), job.steps)
    write_json(run / "check.json", account)
    trainer.journal.history.steps.aside = frozenset(regularization(account))
    write_json(run / "plan.json", trainer.plan)
    asked = kept.get("asked", {})
    settings = job.resolved.to_json()["settings"]
    asked = {
        key: value if settings[key] == kept["settings"][key] else settings[key]
        for key, value in asked.items()
    }
    run_dir.write_config(
        run, job, kept["base"]["fingerprints"], kept["settings"]["train_dtype"], asked
    )
