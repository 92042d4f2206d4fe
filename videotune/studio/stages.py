"""The path of a project from clips to a result: what is done, what stands in the way,
and the one next step. All pages and ``videotune status`` show the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from videotune.config.nested_keys import flatten
from videotune.errors import VideotuneError
from videotune.queue.entries import QueueEntry
from videotune.queue.jobs import QueuedJob
from videotune.reporter.outcome import (
    FINISHED_STATES,
    is_result_next,
    recommended_checkpoint,
)
from videotune.reporter.previews import exports_of_step
from videotune.reporter.read import Run, mapping
from videotune.studio import clips, gpu, projects, run_states
from videotune.studio.clip_stages import captions_stage, clips_stage
from videotune.studio.data_changes import changes_since
from videotune.studio.failures import open_failure
from videotune.studio.form import inherited_values
from videotune.studio.project_plan import plan_answer
from videotune.studio.projects import Project
from videotune.studio.run_settings import changed_settings
from videotune.studio.run_states import BUSY_STATUSES
from videotune.studio.settings_version import settings_version
from videotune.studio.stage import Stage, StageState
from videotune.studio.status import process_progress
from videotune.studio.sweep_records import runs_of_sweeps
from videotune.studio.trained_model import trained_model
from videotune.studio.verdict import plan_verdict
from videotune.studio.web import PageContext, Regions, render
from videotune.studio.whole_settings import has_import
from videotune.text import counted, duration, plain, time_left

StateOfRun = tuple[Run, QueueEntry | None, QueuedJob | None, str]
"""What ``run_states.run_state`` returns."""

RESULT_WORDS = {"FINE_TUNE": "model", "EMBEDDING": "new word"}
"""What a run that trains no LoRA has written."""

CHANGE_TOLERANCE = 1.0
"""Seconds by which a change of the settings must be later than the start of a run."""


def stages(page: PageContext) -> list[Stage]:
    """Return the stages of the open project, in their order."""
    project = page.current_project
    rows = list(clips.table(project).rows.values())
    return [
        *_import_stages(project),
        clips_stage(project, rows),
        captions_stage(project, rows),
        _model_stage(project),
        *_run_stages(page),
    ]


def next_stage(all_stages: list[Stage]) -> Stage | None:
    """Return the stage at which the user goes on; None if all is done.

    What a run is busy with comes first: nothing else needs to be done meanwhile.
    """
    for stage in all_stages:
        if stage.name == "run" and stage.state == "busy":
            return stage
    return next((stage for stage in all_stages if stage.state != "done"), None)


def _import_stages(project: Project) -> Iterator[Stage]:
    """Yield the stage of another trainer's config that waits to be applied."""
    if has_import(project):
        action = "Apply the import"
        yield Stage("import", "open", "not applied", "setup", action, part="import")


def _model_stage(project: Project) -> Stage:
    if not project.has_model:
        has_card = project.facts.get("card") or project.facts.get("vram")
        action = "Choose a model" if has_card else "Choose a model and a card"
        return Stage("model", "open", "none chosen", "setup", action, part="model")

    facts = project.facts
    card = facts.get("card") or (facts.get("vram") and f"{facts['vram']:g} GB")
    if not card and (gpus := gpu.list_gpus()):
        card = gpus[0].name
    model = trained_model(project)
    text = f"{model}, {card}" if card else str(model)
    return Stage("model", "done", text, "setup")


def _run_stages(page: PageContext) -> Iterator[Stage]:
    """Yield the stages of the plan, of the newest run, and of its result."""
    names = run_states.run_names(page.current_project, page.root)
    plan = _plan_stage(page)
    if not names:
        yield plan
        yield Stage("run", "open", "none yet", "setup", "Start training", part="start")
        yield Stage("result", "open", "after the run", "results")
        return

    name = run_states.run_to_follow(page, names)
    state = run_states.run_state(page, name)
    failure = open_failure(page.current_project, state[1])
    if failure and state[3] not in BUSY_STATUSES:
        yield from _stages_of_failure(name, state[0], plan, failure)
        return
    if has_changed_since(page.current_project, state):
        run_of_now = run_with_settings_of_now(page, name)
        if run_of_now is None:
            yield plan
            text = f"settings changed since {name}"
            belongs_to = "older settings"
            if name in runs_of_sweeps(page.current_project):
                text = f"{name} has values of a sweep"
                belongs_to = "values of a sweep"
            yield Stage("run", "open", text, "setup", "Start training", part="start")
            yield _older_result(name, state[0], belongs_to)
            return
        name = run_of_now.name
        state = run_of_now.state
    if clip_changes(page.current_project, state):
        yield plan
        text = f"clips changed since {name}"
        yield Stage("run", "open", text, "setup", "Start training", part="start")
        yield _older_result(name, state[0], "older clips")
        return

    # A run makes its own plan at its start, so nobody waits for this one.
    text = f"that of {name}"
    if plan.state == "done":
        text = plan.text
    elif state[3] == "queued":
        text = f"{name} makes its own when it starts"
    yield Stage("plan", "done", text, plan.page)
    yield from _stages_of_run(name, state)


def _stages_of_failure(
    name: str, run: Run, plan: Stage, reason: str
) -> Iterator[Stage]:
    """Yield the stages of a run whose last process has failed."""
    plan_text = plan.text if plan.state == "done" else f"that of {name}"
    yield Stage("plan", "done", plan_text, plan.page)

    text = f"{name} failed: {reason}"
    action = "See why it failed"
    yield Stage("run", "blocked", text, "train", action, name, part="r-run")

    if run.exports:
        yield Stage(
            "result", "done", f"of {name}, before it failed", "results", run=name
        )
    else:
        yield Stage("result", "open", "after the run", "results", run=name)


def _older_result(name: str, run: Run, belongs_to: str) -> Stage:
    """Return the stage of a result whose settings or clips are not those of the project
    any more.
    """
    if not run.exports:
        return Stage("result", "open", "after the next run", "results", run=name)
    text = f"of {name}, with {belongs_to}"
    return Stage("result", "done", text, "results", run=name)


def has_changed_since(project: Project, state: StateOfRun) -> bool:
    """Return whether the settings have changed since a run ended, or are of another
    model.
    """
    run, _, _, code = state
    if code in BUSY_STATUSES:
        return False
    if _is_of_another_model(project, run):
        return True

    settings_changed = settings_version(project) / 1e6
    is_later = settings_changed <= _settings_taken(state) + CHANGE_TOLERANCE
    # A run of a sweep has other settings from its beginning.
    if is_later and run.folder.name not in runs_of_sweeps(project):
        return False
    return run.config is None or _values_differ(project, run)


def resumes_other_settings(project: Project, state: StateOfRun) -> bool:
    """Return whether a resume would use other settings than the project has now; False if
    the project's cannot be read.
    """
    try:
        return has_changed_since(project, state)
    except VideotuneError:  # the page Setup reports the damaged file
        return False


def clip_changes(project: Project, state: StateOfRun) -> str:
    """Return how the clips have changed since a run that is done; empty if they have not.

    A run that has not done all of its steps can go on with the changed clips.
    """
    run, _, _, code = state
    return changes_since(project, run) if code == "done" else ""


@dataclass(frozen=True)
class RunOfNow:
    """A run that was given the project's present settings."""

    name: str
    state: StateOfRun

    @property
    def is_busy(self) -> bool:
        """Whether it trains or waits."""
        return self.state[3] in BUSY_STATUSES

    @property
    def is_finished(self) -> bool:
        """Whether it has come to its end."""
        return self.state[3] in FINISHED_STATES

    @property
    def sentence(self) -> str:
        """How it stands, after a sentence about these settings."""
        if self.is_busy:
            return f"{self.name} trains with those."
        if self.is_finished:
            return f"{self.name} was trained with those."
        return f"{self.name} was trained with those, and {_stopped_text(self.state)}."


def _stopped_text(state: StateOfRun) -> str:
    """Return that a run has stopped, and where: "stopped at step 5 of 10"."""
    run, _, job, code = state
    text = _badge_text(code)
    done = process_progress(run, job)
    if done.total:
        text += f" at step {plain(done.done)} of {plain(done.total)}"
    return text


def _badge_text(code: str) -> str:
    return str(projects.texts()["train_badges"].get(code, [code])[0])


def run_with_settings_of_now(page: PageContext, name: str) -> RunOfNow | None:
    """Return the run that is not ``name`` and that has the project's present settings: one
    that trains or waits, else the newest one that is done or can be resumed; None if none
    has them.
    """
    project = page.current_project
    runs = []
    for run_name in run_states.run_names(project, page.root):
        if run_name == name:
            continue
        state = run_states.run_state(page, run_name)
        is_usable = state[3] != "failed" and not clip_changes(project, state)
        if is_usable and _has_settings_of_now(project, state):
            runs.append(RunOfNow(run_name, state))
    busy_runs = [run for run in runs if run.is_busy]
    return next(iter([*busy_runs, *runs]), None)


def _has_settings_of_now(project: Project, state: StateOfRun) -> bool:
    """Return whether a run was given the project's present settings."""
    run, _, _, code = state
    if _is_of_another_model(project, run):
        return False
    settings_changed = settings_version(project) / 1e6
    is_later = settings_changed <= _settings_taken(state) + CHANGE_TOLERANCE
    if code in BUSY_STATUSES and is_later:
        return True

    # A run of a sweep, or one from a checkpoint, is later than the settings and has others.
    begins_elsewhere = bool(run.setting("init_from"))
    is_known = run.config is not None and not begins_elsewhere
    return is_known and not _values_differ(project, run)


def _settings_taken(state: StateOfRun) -> float:
    """Return when a run took the settings of the project, in seconds since 1970: as it was
    queued first, or began in a terminal. A resume takes those of the run.
    """
    run, entry, job, _ = state
    moments = []
    if entry is not None:
        moments.append(entry.first_added)
    starts = run.of_kind("start")
    if starts:
        moments.append(float(starts[0].get("time") or 0.0))
    if not moments and job is not None:
        moments.append(job.started)
    return min(moments, default=0.0)


def _values_differ(project: Project, run: Run) -> bool:
    """Return whether a setting of the project has another value than in a run; False
    where a change was taken back.
    """
    inherited = inherited_values(project.preset)
    values = {
        key: value
        for key, value in flatten(projects.draft(project)).items()
        if value != inherited.get(key)
    }
    return values != flatten(changed_settings(project, run.folder))


def _is_of_another_model(project: Project, run: Run) -> bool:
    """Return whether a run trained another model than the settings name, or trained it
    with another method; False as far as either is not known.
    """
    if not project.has_model:
        return False
    values = {**inherited_values(project.preset), **flatten(projects.draft(project))}
    return any(
        run.setting(key) is not None and run.setting(key) != values.get(key)
        for key in ("base_model_name", "training_method")
    )


def _plan_stage(page: PageContext) -> Stage:
    """Return how the plan for the settings of this moment stands."""
    project = page.current_project
    answer = plan_answer(page)
    action = "See the plan"
    if not answer:
        text = "after the model" if projects.datasets(project) else "after the clips"
        return Stage("plan", "open", text, "setup")
    if answer["computing"]:
        text = "being calculated"
        return Stage("plan", "busy", text, "setup", action, part="r-plan")
    if not answer["current"]:
        return Stage("plan", "open", "not calculated", "setup", action, part="r-plan")
    if answer.get("code"):
        action = "See why it cannot start"
        return Stage("plan", "blocked", "cannot start", "setup", action, part="r-plan")

    plan: Mapping[str, Any] = answer.get("plan") or {}
    hours = (plan.get("hours") or 0.0) + (plan.get("hours_beside") or 0.0)
    time_text = f", {duration(hours * 3600)}" if hours > 1 / 60 else ""
    verdict = plan_verdict(project, plan)
    if verdict is None:
        return Stage("plan", "busy", "being calculated", "setup", action, part="r-plan")
    if verdict.can_run:
        return Stage("plan", "done", f"{verdict.word}{time_text}", "setup")
    if verdict.colour == "quiet":
        action = "Choose a card"
        return Stage("plan", "open", verdict.word, "setup", action, part="presets")
    action = (
        "See what makes it fit" if verdict.colour == "bad" else "Take it to the card"
    )
    state: StageState = "blocked" if verdict.colour == "bad" else "open"
    part = "r-plan" if verdict.colour == "bad" else "elsewhere"
    return Stage("plan", state, verdict.word, "setup", action, part=part)


def _stages_of_run(name: str, state: StateOfRun) -> Iterator[Stage]:
    """Yield how a run and its result stand."""
    run, _, job, code = state
    done = process_progress(run, job)
    text = f"{name}: {_badge_text(code)}"

    if code in BUSY_STATUSES:
        if done.total and code != "queued":
            text += f", step {plain(done.done)} of {plain(done.total)}"
        if done.left and code == "running" and mapping(run.life)["state"] == "training":
            text += f", {time_left(done.left)} left"
        yield Stage("run", "busy", text, "train", "Watch it train", name, part="r-run")
        yield Stage("result", "open", "after the run", "results", run=name)
        return

    latest = run.last("verdict")
    step, _ = recommended_checkpoint(run, latest)
    if not is_result_next(code, latest, step):
        action = "See why it failed" if code == "failed" else f"Go to Resume of {name}"
        if code != "failed":
            text = f"{name}: {_stopped_text(state)}"
        yield Stage("run", "open", text, "train", action, name, part="r-run")
        yield Stage("result", "open", "after the run", "results", run=name)
        return

    if code not in FINISHED_STATES:
        text = f"{name}: {_stopped_text(state)}, more steps make it worse"
    yield Stage("run", "done", text, "train", run=name)
    yield _stage_of_result(name, run, step)


def _stage_of_result(name: str, run: Run, step: int | None) -> Stage:
    """Return how the files of the recommended checkpoint stand."""
    file_count = len(exports_of_step(run, step))
    if file_count:
        text = f"{counted(file_count, 'file')} written"
        method = str(run.setting("training_method"))
        action = f"Go to the {RESULT_WORDS.get(method, 'LoRA')}"
        return Stage("result", "done", text, "results", action, name, part="r-result")

    text = "no file" if step is None else f"no file of step {plain(step)}"
    action = "Write the file"
    return Stage("result", "open", text, "results", action, name, part="r-result")


def no_run(page: PageContext) -> str:
    """Render what stands in the place of a run while the project has none."""
    # Without a run there is a next step: the run itself at the latest.
    step = next_stage(stages(page))
    return render("train_none", project=page.current_project, step=step)


def path(page: PageContext) -> str:
    """Render the path of the open project; nothing on pages of no project."""
    if page.project is None or page.project.damage:
        return ""
    try:
        all_stages = stages(page)
    except (VideotuneError, OSError):
        return ""  # the page itself reports what it cannot read

    step = next_stage(all_stages)
    return render("path", project=page.project, stages=all_stages, step=step)


REGIONS: Regions = {"path": path}
