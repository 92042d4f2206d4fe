"""The pages Project, Data and Setup as HTML, and the top of every page: each a function of a project and the address."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.queue.jobs import all_jobs, latest, log_tail, why
from videotune.reporter.build import environment, fill
from videotune.reporter.read import mapping
from videotune.studio import actions, clips
from videotune.studio.projects import CLIPS, Project, datasets, projects, seen_files
from videotune.text import plain, shape_words

TEMPLATES = environment("videotune.studio", "videotune.reporter")
TEMPLATES.globals |= {"log_tail": log_tail, "why": why}


def html(template: str, /, **data: Any) -> str:
    """A template of the studio, or of the report, filled in."""
    return fill(TEMPLATES, f"{template}.html.j2", data)


def head(root: Path, project: Project | None, query: Mapping[str, str]) -> str:
    """The top of every page: which project is open, and what is at work in it."""
    busy = [job for job in all_jobs(project.folder)[:8] if job.running] if project else []
    return html("head", project=project, busy=busy)


def project_part(root: Path, project: Project | None, query: Mapping[str, str]) -> str:
    """The list of projects."""
    cards: dict[bool, list[Any]] = {False: [], True: []}
    for one in projects(root):
        files = sum(1 for path in seen_files(one.folder / CLIPS) if path.suffix not in (".txt", ".csv", ".jsonl"))
        runs = len(list((one.folder / "runs").glob("*/config.json")))
        busy, away = [job for job in all_jobs(one.folder)[:12] if job.running], bool(one.facts.get("archived"))
        chosen = not away and project is not None and one.name == project.name
        cards[away].append((one, files, runs, busy, chosen))
    return html("project", open=cards[False], archived=cards[True])


def data_part(root: Path, project: Project, query: Mapping[str, str]) -> str:
    """The account of the clips in figures, with what is at work; the table below it is the script's."""
    cut, job, last = latest(project.folder, "split"), latest(project.folder, "check"), clips.last_account(project)
    if cut is not None and cut.state == "done" and (job is None or job.started < (cut.ended or 0)):
        actions.start_check(project)  # the scenes are new clips
        job = latest(project.folder, "check")
    check, account = last or (None, {})
    return html(
        "data",
        project=project,
        check=check,
        account=mapping(account),
        checking=None if check == job else job,
        cutting=cut,
        any_clips=bool(datasets(project)),
        sources=[mapping(row) for row in project.facts.get("sources", ())],
        sizes=[(shape_words(row["shape"]), plain(row["windows"])) for row in account.get("buckets", ())],
        sheet=(project.folder / "sheet" / "index.html").is_file(),
    )
