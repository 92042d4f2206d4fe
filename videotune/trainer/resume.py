"""Open a run, new or resumed: what may differ, and from which checkpoint it goes on.

``restoring`` then brings the trainer to that checkpoint.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from videotune.config.config_changes import Change, drift, of_class
from videotune.config.load import in_one_unit, without_epochs_overridden
from videotune.config.nested_keys import merge
from videotune.config.resolve import Resolved, parse, resolve
from videotune.console import echo
from videotune.data.buckets import buckets
from videotune.errors import VideotuneError
from videotune.files import digest
from videotune.job.context_checks import groups_of, refuse_unequal_parts
from videotune.job.job import Job, ViewHistory, open_job
from videotune.job.overrides import (
    Overrides,
    as_configured,
    preset_keys,
    resolve_config,
    user_keys,
)
from videotune.job.schedule import make_schedule
from videotune.model_spec import ModelSpec
from videotune.models.base_model import place_of, spec_for
from videotune.models.licences import require_licence
from videotune.runs import run_dir
from videotune.runs.checkpoint import Checkpoint, listed, newest_checkpoint, pick
from videotune.runs.journal import History
from videotune.runs.rollback import record_paths_at
from videotune.runs.schemas import read_record
from videotune.text import as_argument
from videotune.trainer.data_change import describe_change
from videotune.trainer.optimizer_contract import refuse_failing_optimizer
from videotune.types import BasePlace

FitFn = Callable[[Job, bool], tuple[Job, Sequence[str]]]
"""Chooses memory settings: (job, whether to choose again) -> the job with its settings,
and what changed, in words.
"""


@dataclass(frozen=True)
class Resume:
    """How to resume, and what the user allows to differ."""

    step: int | None = None
    """Step of the checkpoint. None: the newest."""
    override: bool = False
    """Settings may change what the run learns."""
    data_change: bool = False
    """The data may have changed."""
    replan: bool = False
    """Choose memory settings again."""
    restarted: bool = False
    """Whether a launcher gave the run's command again."""


@dataclass(frozen=True)
class OpenedRun:
    """A run to train."""

    job: Job
    checkpoint: Checkpoint | None = None
    """Where to resume from. None: a new run, or one that has saved nothing yet."""
    changes: tuple[str, ...] = ()
    """What differs from before, in words."""
    history: History | None = None
    """The journal so far."""

    @property
    def first_step(self) -> int:
        """The first step to do."""
        return 1 if self.checkpoint is None else 1 + self.checkpoint.step


def open_run(
    overrides: Overrides,
    run: Path,
    resume: Resume | None,
    fit: FitFn,
    processes: int = 1,
) -> OpenedRun:
    """Open a run.

    Args:
        overrides: of the command. On a resume they lie on top of the run's own config.
        run: the run folder.
        resume: how to resume. None: begin a new run.
        fit: chooses memory settings.
        processes: how many processes train.

    Raises:
        VideotuneError: if a resume would silently be another run.
    """
    if resume is None:
        return _open_new_run(overrides, run, fit, processes)

    # 1. The run as it was.
    run_dir.read_run_config(run)  # raises a clear error if the folder holds no run
    history = History(run)
    checkpoint = checkpoint_of(run, resume.step, history)
    step = checkpoint.step if checkpoint else 0
    # config.json, check.json and plan.json as they were at the step that the user names; if
    # none is named, the present ones.
    record_paths = record_paths_at(run, resume.step)
    run_config = read_run_records(run, record_paths)

    # 2. What differs in the settings and around them.
    resolved, spec, base, setting_changes = with_overrides(overrides, run_config)
    check_changes(setting_changes, run, resume.override)
    refuse_failing_optimizer(resolved.config)
    other_changes = changed_around(run, run_config, base, resume.override)
    changes = [*map(str, setting_changes), *other_changes]
    for change in changes:
        echo(f"changed: {change}")
    if checkpoint is not None and "init_from" in user_keys(overrides):
        echo(f"init_from is not read again: the weights are those of step {step}")

    # 3. The job from here on.
    # A job counts processes that share the tokens of a sample as one.
    job = open_job(resolved, spec, base, processes=run_config.get("processes", 1))
    # The job keeps the number that the run began with, so that a step keeps its samples.
    # The present number only has to be a multiple of context_parallel.
    groups_of(resolved.config, processes)
    refuse_unequal_parts(job)
    refuse_fewer_steps(job, run, step)
    refuse_other_batches(job, run_config["settings"], setting_changes, run)
    job = _with_past(job, run_config, history)
    job, memory_changes = fit(job, resume.replan)
    changes += memory_changes

    if run_config["data"] != job.data_digest():
        data_change = describe_change(record_paths["check"], job)
        if not resume.data_change:
            raise VideotuneError(
                f"the data of {run} has changed since it started: {data_change}. "
                "Restore it, start a new run, or continue with the changed data: --allow-data-change"
            )
        job = replace(job, view_history=ViewHistory(step, count_views(history, step)))
        changes.append(f"data: {data_change}")
        echo(
            f"the data has changed: {data_change}. From step {step + 1} on the new data is shown, in an order of its own"
        )
    return OpenedRun(job, checkpoint, tuple(changes), history)


def _open_new_run(
    overrides: Overrides, run: Path, fit: FitFn, processes: int
) -> OpenedRun:
    """Open a run that begins."""
    run_dir.refuse_run(run)
    resolved, spec, base = resolve_config(overrides)
    require_licence(spec, overrides.accept_licence)
    refuse_failing_optimizer(resolved.config)
    run_dir.refuse_out_in_data(
        run, [dataset.path for dataset in resolved.config.datasets]
    )
    groups = groups_of(resolved.config, processes)
    job = open_job(resolved, spec, base, processes=groups)
    refuse_unequal_parts(job)
    job, _ = fit(job, False)
    return OpenedRun(job)


def _with_past(job: Job, run_config: Mapping[str, Any], history: History) -> Job:
    """Return a job with what its run has shown, and the newest prompt by seed of its
    previews.
    """
    return replace(
        job,
        view_history=ViewHistory(**run_config.get("past", {})),
        sampled_prompts=sampled_prompts(history),
    )


def sampled_prompts(history: History) -> dict[int, str]:
    """Return the newest prompt by seed of a run's previews; lines without a seed are left
    out.
    """
    prompts = {}
    for line in history.of_kind("sample"):
        seed = line.get("seed")
        if isinstance(seed, int):
            prompts[seed] = line["prompt"]
    return prompts


def count_views(history: History, step: int) -> dict[str, int]:
    """Count the views of each window in the journal's steps until ``step``."""
    views: Counter[str] = Counter()
    for line in history.read_steps(step):
        views.update(line["window_ids"])
    return dict(views)


def refuse_fewer_steps(job: Job, run: Path, step: int) -> None:
    """Raise VideotuneError if the run would end before the checkpoint that it resumes
    from.
    """
    if step > job.steps:
        raise VideotuneError(
            f"steps: {run} resumes from step {step} and cannot end at step {job.steps}. "
            f"Set more steps, or go back first with --from: {listed(run)}"
        )


def refuse_other_batches(
    job: Job, settings: Mapping[str, Any], changes: Sequence[Change], run: Path
) -> None:
    """Raise VideotuneError if another batch size would change the samples of a step, as
    it does where images are mixed in.
    """
    if not any(change.key == "batch_size" for change in changes):
        return
    old_schedule, _ = make_schedule(
        parse(settings), buckets(job.library), job.library, job.processes
    )
    if old_schedule.batch_sizes != job.schedule.batch_sizes:
        raise VideotuneError(
            f"batch_size: images and videos are mixed in {run}, and with video_config.video_batch_size_multiplier a step "
            f"of each bucket would have {job.schedule.batch_sizes} samples instead of {old_schedule.batch_sizes}. "
            "Leave it as it was"
        )


def with_overrides(
    overrides: Overrides, run_config: Mapping[str, Any]
) -> tuple[Resolved, ModelSpec, BasePlace, list[Change]]:
    """Put the user's overrides on top of the run's config.

    Overrides that repeat what the run was begun with are not a change, so its first
    command resumes it with --resume added.

    Args:
        overrides: what the command is called with.
        run_config: content of config.json.

    Returns:
        The config, the model, its place, and what differs from before.
    """
    old_settings = run_config["settings"]
    own_keys = user_keys(overrides)
    preset = preset_keys(overrides)
    # A length may be given in steps or in passes over the data. A layer in steps removes
    # the passes of the layers below (``without_epochs_overridden``); where one layer has both, the
    # passes decide and the steps are dropped (``in_one_unit``).
    user = in_one_unit(merge(without_epochs_overridden(preset, own_keys), own_keys))
    settings = merge(without_epochs_overridden(old_settings, user), user)
    base = place_of(settings)
    spec = spec_for(settings["family"], base)

    # Settings such as "auto" were replaced at the start by what was chosen, and the values
    # before that are in "asked". If the command resolves to these again, what was chosen
    # stays.
    values_before_choice = {
        key: value for key, value in run_config.get("asked", {}).items() if key in user
    }
    settings_before_choice = merge({**old_settings, **values_before_choice}, preset)
    requested = resolve(own_keys, settings_before_choice, spec).to_json()["settings"]
    requests_the_same = all(
        requested[key] == value for key, value in values_before_choice.items()
    )
    if requests_the_same:
        settings |= {key: old_settings[key] for key in values_before_choice}

    resolved = resolve(settings, {}, spec)
    # Keys that are new since the run began have their defaults on both sides.
    old_resolved = resolve(old_settings, {}, spec)
    changes = drift(
        old_resolved.config.model_dump(mode="json"),
        resolved.config.model_dump(mode="json"),
    )
    origins = {
        key: run_config["origins"].get(key, "default") for key in resolved.origins
    }
    origins |= {change.key: "user" for change in changes}
    configured = as_configured(spec, resolved.config)
    # Runs of earlier versions do not name their preset.
    resolved = replace(resolved, origins=origins, preset=run_config.get("preset"))
    return resolved, configured, base, changes


def check_changes(changes: Sequence[Change], run: Path, override: bool) -> None:
    """Raise VideotuneError for changes that make the saved state meaningless, or that
    must be allowed.
    """
    fatal = of_class(changes, "fatal")
    if fatal:
        lines = "".join(f"\n  {change}" for change in fatal)
        raise VideotuneError(
            f"{run} cannot be resumed with another{lines}\n"
            "Leave it as it was, or start a new run; --init-from starts from these weights"
        )
    must_allow = of_class(changes, "override")
    if must_allow and not override:
        lines = "".join(f"\n  {change}" for change in must_allow)
        raise VideotuneError(
            f"this changes what {run} learns from here on:{lines}\nIf you mean that, add --override"
        )


def read_run_records(run: Path, record_paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the run's config.json.

    Read every other file that the run needs, so that a damaged one is reported now.
    """
    for name, path in record_paths.items():
        read_record(path, name)
    exports = run / "exports.json"
    if exports.is_file():
        read_record(exports)
    return read_record(record_paths["config"], "config")


def changed_around(
    run: Path, run_config: Mapping[str, Any], base: BasePlace, override: bool
) -> list[str]:
    """Return what has changed outside of the settings: config.json itself, the base's
    scheduler, library versions.

    Raises VideotuneError for the first two without ``override``.
    """
    changes = []
    content = {name: value for name, value in run_config.items() if name != "digest"}
    if run_config["digest"] != digest(content):
        changes.append("config.json was edited by hand: it is not what the run wrote")
    scheduler = run_dir.scheduler_hash(base)
    if run_config["base"].get("scheduler") != scheduler:
        changes.append(
            f"the base model's {run_dir.SCHEDULER} is not the one that the run began with"
        )
    if changes and not override:
        raise VideotuneError(
            f"{run}: {'; '.join(changes)}. Undo that, and change settings with --set KEY=VALUE --override; "
            "or continue with them as they are: --override"
        )

    old_versions = run_config.get("versions", {})
    for name, version in run_dir.versions().items():
        old_version = old_versions.get(name, version)
        if old_version != version:
            changes.append(f"versions.{name}: {old_version} -> {version}")
    return changes


def checkpoint_of(run: Path, step: int | None, history: History) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None if the run has not saved anything
    yet.

    Args:
        run: the run folder.
        step: of the checkpoint. None: the newest.
        history: what the journal says.

    Raises:
        VideotuneError: if the checkpoint, or the newest that was ever saved, is missing
            or incomplete, because going back further would silently lose steps; it
            lists the complete ones. And if the journal does not reach it.
    """
    if step is None:
        saved_steps = (line["step"] for line in history.of_kind("save"))
        checkpoint = newest_checkpoint(run, saved_steps, "--from")
    else:
        checkpoint = pick(run, step) if step else None

    if checkpoint is not None and history.largest_step < checkpoint.step:
        raise VideotuneError(
            f"{run / 'journal.jsonl'} lacks the steps from {history.largest_step + 1} to {checkpoint.step}, which are saved. "
            f"Restore a copy of it, or continue without them: videotune doctor {as_argument(run)} --repair-journal"
        )
    return checkpoint
