"""The page Setup: a preset, the card, the settings with their help, and what the plan says of all that."""

import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio as gr

from videotune.config.load import flatten, preset_about, preset_names
from videotune.reporter.curves import BANDS
from videotune.studio import form
from videotune.studio.clips import last_account
from videotune.studio.jobs import latest, result
from videotune.studio.pages.kit import html, live
from videotune.studio.projects import BOOK, Project, draft
from videotune.text import duration


def build(root: Path, project: gr.Textbox) -> None:
    """The page's blocks."""
    with gr.Row(elem_id="setup-row"):
        with gr.Column(scale=3, min_width=320):
            live("setup")
        with gr.Column(scale=2, min_width=300, elem_classes="side"):
            live("plan", 2)


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


def part(root: Path, project: Project, query: Mapping[str, str]) -> str:
    """The form."""
    keys, below = flatten(draft(project)), form.standing(project.preset)
    rows = {one.key: _row(one, keys.get(one.key), below.get(one.key)) for one in form.fields()}
    others: dict[str, list[dict[str, Any]]] = {}
    for key, row in rows.items():
        if key not in form.BASIC:
            others.setdefault(row["field"].section, []).append(row)
    last = last_account(project)
    return html(
        "setup",
        project=project,
        presets=preset_names(),
        about=preset_about(project.preset),
        card=found_card(),
        skipped=last[1]["skipped"] if last else 0,
        basic=[rows[key] for key in form.BASIC],
        others=others,
        titles=form.TITLES,
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
        colours={name: css for _, name, css in BANDS},
    )
