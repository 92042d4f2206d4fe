"""The pages Project, Data and Setup as HTML, and the top of every page: each a function of a project and the address."""

import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.config.load import flatten, preset_about, preset_names
from videotune.queue.jobs import all_jobs, latest, log_tail, result, why
from videotune.reporter.build import environment, fill
from videotune.reporter.curves import COLOURS
from videotune.reporter.read import mapping
from videotune.studio import actions, clips, form
from videotune.studio.projects import BOOK, CLIPS, Project, datasets, draft, projects, seen_files, texts
from videotune.text import duration, plain, shape_words

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


@lru_cache(maxsize=1)
def found_card() -> tuple[str, float] | None:
    """Name and GB of this computer's first card, as its driver says; None where it has none."""
    ask = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
        name, memory = printed.strip().splitlines()[0].rsplit(",", 1)
        return name.strip(), round(float(memory) * 2**20 / 1e9, 1)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def setup_part(root: Path, project: Project, query: Mapping[str, str]) -> str:
    """The form."""
    keys, below = flatten(draft(project)), form.standing(project.preset)
    rows = {one.key: _row(one, keys.get(one.key), below.get(one.key)) for one in form.fields()}
    others: dict[str, list[dict[str, Any]]] = {}
    for key, row in rows.items():
        if key not in texts()["basic"]:
            others.setdefault(row["field"].section, []).append(row)
    last = clips.last_account(project)
    return html(
        "setup",
        project=project,
        presets=preset_names(),
        about=preset_about(project.preset),
        card=found_card(),
        skipped=last[1]["skipped"] if last else 0,
        basic=[rows[key] for key in texts()["basic"]],
        others=others,
        titles=texts()["titles"],
    )


def _row(one: form.Field, own: Any, below: Any) -> dict[str, Any]:
    """A key of the form with the user's own value, the one that holds without it, and its explanation."""
    value, unit = form.shown(own), one.unit and f"unit: {one.unit}"
    options = one.choices or ("true", "false") if one.kind in ("choice", "switch") else ()
    return {
        "field": one,
        "own": own is not None,
        "value": value,
        "holds": form.shown(below).replace("\n", ", "),
        "options": options,
        "chosen": next((name for name in options if name.lower() == value.lower()), value),
        "title": "\n".join(filter(None, (f"{one.key}: {one.values}", unit, f"default: {one.default}", one.guide))),
    }


def plan_part(root: Path, project: Project, query: Mapping[str, str]) -> str:
    """What the plan says: whether it fits, how often each clip is seen, how long, how much disk."""
    job = latest(project.folder, "plan")
    found = None if job is None or job.running else result(job)
    plan = found if isinstance(found, dict) else {}
    kept = [path for name in ("config.json", BOOK) if (path := project.folder / name).is_file()]
    hours = (plan.get(key) for key in ("hours", "hours_beside"))
    steps, beside = (None if time is None else duration(time * 3600) for time in hours)
    return html(
        "plan",
        job=job,
        plan=plan,
        stale=job is not None and any(path.stat().st_mtime > job.started for path in kept),
        hours=steps,
        hours_beside=beside,
        disk=sum(plan.get("disk", {}).get(key, 0) for key in ("latent_bytes", "text_bytes_at_most", "run_bytes")),
        colours=COLOURS,
    )
