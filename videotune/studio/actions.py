"""What a user can ask for on any page: functions of a project and some words, which answer in a sentence."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import RLock
from typing import Any
from urllib.parse import quote

from videotune.data.file_checks import ARCHIVES, type_of_file
from videotune.errors import VideotuneError
from videotune.files import life, write_json
from videotune.queue import jobs
from videotune.studio import clips, projects
from videotune.studio.projects import Project, inside, named

Answer = Mapping[str, str | bool]
"""``say``: a sentence; ``go``: an address to go to; ``reload``: whether the form changes."""

_one_at_a_time = RLock()


class Words(dict[str, Any]):
    """What is asked for: texts, and true or false; what is missing is an empty text."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        super().__init__({key: value if isinstance(value, bool) else str(value) for key, value in words.items()})

    def __missing__(self, key: str) -> str:
        return ""

    def number(self, key: str, whole: bool = True) -> str:
        """A number as it was typed, in so many digits that a command takes it; empty where there is none."""
        value = str(self[key]).strip()
        if value and not re.fullmatch(r"[0-9]{1,18}" if whole else r"[0-9]{1,6}(\.[0-9]{1,6})?", value):
            raise VideotuneError(f"{key}: a {'whole ' * whole}number, not {value[:40]!r}")
        return value


Action = Callable[..., Answer]
"""A function of the project (``create``: of the root) and of the words."""


def perform(act: Action, root: Path, words: Mapping[str, Any]) -> Answer:
    """Do what is asked for, one at a time: two fields that are left within a moment must not write over each other.

    ``words`` name the project, as ``of`` where it need not be the open one.
    """
    asked = Words(words)
    with _one_at_a_time:
        return act(root if act is create else named(root, asked["of"] or asked["project"]), asked)


def run_folder(project: Project, name: str) -> Path:
    """The folder of a project's run.

    Raises VideotuneError for a name that is none.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", name):
        raise VideotuneError(f"{name!r} is not a valid name for a run: use letters, digits, - and _")
    return inside(project.folder, f"runs/{name}")


def create(root: Path, words: Words) -> Answer:
    """A new project, and on to its data."""
    project = projects.create(root, words["title"])
    return {"say": f"{project.title} is made", "go": f"?project={quote(project.name)}&tab=data"}


def rename(project: Project, words: Words) -> Answer:
    """Another title."""
    title = projects.clean_title(words["title"])
    return {"say": f"now called {projects.change(project, title=title).title}"}


def archive(project: Project, words: Words) -> Answer:
    """Put a project aside, or take it back; nothing of it is deleted."""
    away = bool(words["archived"])
    if away and any(job.running for job in jobs.all_jobs(project.folder)):
        raise VideotuneError(f"{project.title} has a running job: stop it first")
    projects.change(project, archived=away)
    return {"say": f"{project.title} is {'archived: it lies below the list' if away else 'back in the list'}"}


def check(project: Project, words: Words) -> Answer:
    """Look at every clip again, with pictures."""
    start_check(project)
    return {"say": "looking at the clips"}


def start_check(project: Project) -> None:
    """Start a check unless there is nothing to look at."""
    if not projects.datasets(project):
        return
    sheet = ["--contact-sheet", str(project.folder / "sheet")]
    jobs.restart(project.folder, "check", ["check", "--json", *sheet, *projects.words(project)])


def caption(project: Project, words: Words) -> Answer:
    """Save a caption."""
    return {"say": clips.save_caption(project, words["path"], words["text"])}


def move(project: Project, words: Words) -> Answer:
    """Hold a clip out, take it back, or out of the data."""
    return {"say": clips.move(project, words["path"], words["to"])}


def source(project: Project, words: Words, local: bool = True) -> Answer:
    """Take another folder of this computer, or a dataset of the Hub, into the project's data."""
    path = words["path"].strip()
    if not path:
        raise VideotuneError("which one? Type the path of a folder, or the name of a dataset such as user/name")
    place = Path(path).expanduser()
    if place.is_absolute() or path.startswith((".", "~")):
        if not local and not place.resolve().is_relative_to(project.folder.parent.resolve()):
            raise VideotuneError("folders elsewhere on the server can be named only by someone who sits at it")
        if not place.exists():
            raise VideotuneError(f"there is no {path} on the computer that the studio runs on")
        if place.is_file() and type_of_file(place) not in ARCHIVES:
            raise VideotuneError(f"{path} is a file: name the folder that holds the clips, or an archive of them")
        path = str(place.resolve())
    elif not re.fullmatch(r"(hf://datasets/)?[\w.-]+/[\w.-]+(@.+)?", path):
        raise VideotuneError(f"{path!r} is neither a whole path (/home/me/clips) nor a dataset of the Hub (user/name)")
    kind = words["kind"] or "train"
    rows = [row for row in project.facts.get("sources", ()) if row["path"] != path]
    row = {"path": path} | ({} if kind == "train" else {"kind": kind})
    start_check(projects.change(project, sources=[*rows, row]))
    return {"say": f"{path} belongs to the data now; it stays where it is"}


def drop_source(project: Project, words: Words) -> Answer:
    """Name a folder or dataset no longer; its files stay."""
    rows = [row for row in project.facts.get("sources", ()) if row["path"] != words["path"]]
    start_check(projects.change(project, sources=rows))
    return {"say": "it is no part of the data any more; its files are untouched"}


def split(project: Project, words: Words) -> Answer:
    """Cut a long clip into its scenes: the original goes aside, the scenes among the clips."""
    _, clip = clips.find(project, words["path"])
    aside = project.folder / projects.ORIGINALS / clip.path.name
    aside.parent.mkdir(exist_ok=True)
    if aside.exists():
        raise VideotuneError(f"{clip.path.name} was cut already; its original lies in {projects.ORIGINALS}")
    put_back = {str(aside): str(clip.path)}
    if clip.caption is not None:
        put_back[str(aside.with_suffix(".txt"))] = str(clip.caption)
    for new, old in put_back.items():
        shutil.move(old, new)
    out = project.folder / projects.CLIPS / f"{clip.path.stem}-scenes"
    jobs.start(project.folder, "split", ["dataset", "split", str(aside), "--out", str(out)], clip.path.name, put_back)
    return {"say": f"cutting {clip.path.name} into scenes; its original is kept in {projects.ORIGINALS}"}






def train(project: Project, words: Words) -> Answer:
    """Begin a run."""
    run = run_folder(project, words["run"].strip() or next_name(project))
    if (run / "config.json").exists():
        raise VideotuneError(f"there is a run {run.name} already: give another name, or resume that one")
    _refuse_running(project, run)
    keep = project.folder / "runs" / f".{run.name}.json"  # the draft may change while the run goes on
    args = projects.words(project)
    write_json(keep, {**projects.draft(project), "datasets": projects.datasets(project)})
    args[args.index("--config") + 1] = str(keep)
    jobs.start(project.folder, "train", ["train", *args, *projects.skips(project), "--out", str(run)], run.name)
    return {"say": f"{run.name} begins", "go": _address(project, run)}


def next_name(project: Project) -> str:
    """run-1, run-2 …: the first name that is free."""
    home = project.folder / "runs"
    taken = {path.name for path in home.iterdir()} | {job.about for job in jobs.all_jobs(project.folder, "train")}
    return next(name for number in range(1, 100000) if (name := f"run-{number}") not in taken)


def resume(project: Project, words: Words) -> Answer:
    """Go on with a run, from its newest checkpoint or an earlier one; with more steps where they are named."""
    run = run_folder(project, words["run"])
    _refuse_running(project, run)
    jobs.start(project.folder, "train", resume_words(run, words), run.name)
    return {"say": f"{run.name} goes on", "go": _address(project, run)}


def resume_words(run: Path, words: Words) -> list[str]:
    """The command that goes on with a run as the form says."""
    step, steps = words.number("from"), words.number("steps")
    args = ["train", "--out", str(run), "--resume"]
    args += ["--from", step] if step else []
    # the rate's schedule is of another length then, and that was asked for
    return args + (["--set", f"steps={steps}", "--override"] if steps else [])


def _address(project: Project, run: Path) -> str:
    return f"?project={quote(project.name)}&tab=train&run={quote(run.name)}"


def _refuse_running(project: Project, run: Path) -> None:
    job = jobs.latest(project.folder, "train", run.name)
    if (job is not None and job.running) or (life(run) or {}).get("alive"):
        raise VideotuneError(f"{run.name} is running: stop it first")


def stop(project: Project, words: Words) -> Answer:
    """Ask a run to save and stop after its step; before its first step it is ended at once."""
    run = run_folder(project, words["run"])
    pulse, job = life(run) or {}, jobs.latest(project.folder, "train", run.name)
    if pulse.get("alive") and pulse.get("state") not in ("starting", "encoding", "loading"):
        write_json(run / "control.json", {"stop": True})
        return {"say": "it finishes its step, saves and stops"}
    if job is not None and job.running and jobs.stop(job):
        return {"say": "it had not begun to train yet and is stopped"}
    raise VideotuneError(f"{run.name} is not running")


def control(project: Project, words: Words) -> Answer:
    """Ask a run for a checkpoint or for previews now."""
    run, word = run_folder(project, words["run"]), words["word"]
    if word not in ("save", "sample"):
        raise VideotuneError(f"a run can be asked to save or to sample, not to {word!r}")
    if not (life(run) or {}).get("alive"):
        raise VideotuneError(f"{run.name} is not running")
    write_json(run / "control.json", {word: True})
    return {"say": "after this step it draws previews" if word == "sample" else "after this step it saves"}


def stop_job(project: Project, words: Words) -> Answer:
    """End a job that is not a run."""
    job = jobs.latest(project.folder, words["kind"])
    if job is None or not job.running or not jobs.stop(job):
        raise VideotuneError("no job is running there")
    return {"say": "stopped"}


def doctor(project: Project, words: Words) -> Answer:
    """Let the doctor look at a run."""
    run = run_folder(project, words["run"])
    jobs.restart(project.folder, "doctor", ["doctor", str(run), "--json"], run.name)
    return {"say": "looking at the run"}


def draw(project: Project, words: Words) -> Answer:
    """Try a prompt with a run's checkpoint."""
    prompt = words["prompt"].strip()
    run = run_folder(project, words["run"])
    if not prompt:
        raise VideotuneError("type what the video should show")
    args = ["sample", str(run), "--prompt", prompt, "--out", str(project.folder / "tries" / run.name)]
    for key, option in (("step", "--step"), ("seed", "--seed"), ("strength", "--strength")):
        value = words.number(key, whole=key != "strength")
        args += [option, value] if value and (key != "strength" or float(value) != 1.0) else []
    jobs.start(project.folder, "sample", args, run.name)
    return {"say": "drawing; it appears below when it is done"}


def export(project: Project, words: Words) -> Answer:
    """Write what a run has learnt for other programs."""
    run, step = run_folder(project, words["run"]), words.number("step")
    formats = [name for name in ("diffusers", "comfyui", "peft") if words[name] is True]
    if not formats and not words["merge"]:
        raise VideotuneError("choose at least one format")
    args = ["export", str(run), *[part for name in formats for part in ("--format", name)]]
    args += ["--step", step] if step else []
    args += ["--merge"] if words["merge"] is True else []
    jobs.start(project.folder, "export", args, run.name)
    return {"say": "writing the files and reading them back"}


ACTIONS: Mapping[str, Action] = {
    "create": create, "rename": rename, "archive": archive, "check": check, "caption": caption, "move": move,
    "drop-source": drop_source, "split": split, "train": train,
    "resume": resume, "stop": stop, "control": control, "stop-job": stop_job, "doctor": doctor, "draw": draw,
    "export": export,
}  # fmt: skip
"""Every action by its name in an address but ``source``, which has to know who asks."""
