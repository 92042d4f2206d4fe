"""The page Setup: a preset, the settings, and beside them the plan that follows from them."""

import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from videotune.config.load import flatten, preset_about, preset_named, preset_names, read_preset
from videotune.errors import VideotuneError
from videotune.files import read_json, write_json
from videotune.reporter.curves import COLOURS
from videotune.studio import form, gpu, header, plan_server, projects, queue_page, trash
from videotune.studio.projects import CLIPS, MANAGED_KEYS, HELD_OUT, Project, draft, inside
from videotune.studio.uploads import receive, safe_name
from videotune.studio.web import CurrentPage, PageContext, PostedForm, Regions, render, page_response, reply
from videotune.text import duration

routes = APIRouter()
PRESETS_FOLDER = "presets"
"""The folder of own presets, beside the projects: each a file with its ``preset`` and its ``keys``."""

_one_at_a_time = RLock()
"""Two fields that are left within a moment must not write over each other."""


def plan_question(project: Project, what: str, **other: Any) -> dict[str, Any]:
    """What the plan server is asked of a project: its settings, its clips as they stand, and the card."""
    facts = project.facts
    own = gpu.list_gpus()
    named = {"card": facts.get("card"), "vram": facts.get("vram")}
    seen = [
        path.stat().st_mtime
        for name in (CLIPS, HELD_OUT)
        if (path := project.folder / name).is_dir()
    ]
    found = [own[0].name, own[0].memory_total] if own and not any(named.values()) else None
    skips = "all" if facts.get("allow_skips") else None
    config = {**draft(project), "datasets": projects.datasets(project)}
    return {"what": what, "preset": project.preset, "config": config, "allow_skips": skips, **named, "gpu": found,
            "seen": seen, **other}  # fmt: skip


def plan(asked: PageContext) -> str:
    """What the plan says; asked for anew wherever its settings are others."""
    project = asked.current_project
    answer = dict[str, Any]()
    if projects.datasets(project):
        answer = plan_server.request_answer(_place(project, "plan"), plan_question(project, "plan"))
    found = answer.get("plan") or {}
    known = {one.key for one in form.fields()}
    words = [(text, [pair for pair in re.findall(r"([a-z_.]+)=([\w.]+)", text) if pair[0] in known])
             for text in found.get("remedies", ())]  # fmt: skip
    return render(
        "setup_plan",
        project=project,
        answer=answer,
        plan=found,
        remedies=words,
        duration=duration,
        colours=COLOURS,
    )


def settings(asked: PageContext) -> str:
    """Every setting with its value."""
    project = asked.current_project
    own = flatten(draft(project))
    below = form.inherited_values(project.preset)
    fields = {one.key: one for one in form.fields()}
    return render(
        "setup_fields", project=project, own=own, below=below, fields=fields, shown=form.format_value
    )


def gallery(asked: PageContext) -> str:
    """The presets, the person's own first, and for which card the plan is made."""
    project = asked.current_project
    device = (plan_server.read_answer(_place(project, "plan")).get("plan") or {}).get("device") or {}
    return render(
        "setup_presets",
        project=project,
        own={path.stem: read_json(path) for path in sorted((asked.root / PRESETS_FOLDER).glob("*.json"))},
        presets=presets(),
        hours=plan_server.read_answer(_place(project, "hours")),
        found=gpu.list_gpus(),
        gb=(device.get("vram_bytes") or 0) / 1e9,
    )


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Of each preset its text, the GB of its card, and what presets.json says of its base model."""
    facts = read_json(Path(__file__).with_name("presets.json"))
    found = {}
    for name in preset_names():
        about = preset_about(name)
        base = str(read_preset(name).get("base_model_name"))
        gb = re.search(r"cards of (\d+) GB", about)
        found[name] = {
            "about": about,
            "base": base,
            "gb": gb and int(gb[1]),
            **facts.get(base, {}),
        }
    return found


def import_region(asked: PageContext) -> str:
    """What another trainer's config becomes, before it is applied."""
    files = sorted(_place(asked.current_project, "theirs").with_suffix("").glob("*"))
    if not files:
        return ""
    asking = {
        "what": "import",
        "files": [str(path) for path in files],
        "seen": [path.stat().st_mtime for path in files],
    }
    answer = plan_server.request_answer(_place(asked.current_project, "imported"), asking)
    return render(
        "setup_import", project=asked.current_project, files=files, answer=answer, shown=form.format_value
    )


def _place(project: Project, name: str) -> Path:
    return project.folder / ".studio" / f"{name}.json"


REGIONS: Regions = {
    "plan": plan,
    "settings": settings,
    "gallery": gallery,
    "imported": import_region,
}


@routes.get("/p/{project}/setup")
def show(asked: CurrentPage) -> Response:
    """Preset, settings and plan."""
    keys = [
        one.key for one in form.fields() if one.kind in ("whole", "number", "choice", "json")
    ]
    return page_response(asked, "setup", {**header.REGIONS, **REGIONS}, "Setup", keys=keys)


@routes.post("/p/{project}/setup/set")
def put(asked: CurrentPage, words: PostedForm) -> Response:
    """Save one setting, unless it is another by now than ``was``."""
    with _one_at_a_time:
        key = words["key"]
        keys = draft(asked.current_project)
        now = form.format_value(flatten(keys).get(key))
        if "was" in words and now != words["was"].replace("\r\n", "\n"):
            return reply(status=409, conflict={"key": key, "now": now, "yours": words["value"]})
        projects.save_draft(
            asked.current_project, keys := form.set_key(keys, key, words["value"], asked.current_project.preset)
        )
    return reply(saved={"key": key, "now": form.format_value(flatten(keys).get(key))})


@routes.post("/p/{project}/setup/fact")
def fact(asked: CurrentPage, words: PostedForm) -> Response:
    """Save what belongs to the project and not to the config: preset, card, whether skipped clips may be left out."""
    key = words["key"]
    value = words["value"].strip()
    kept: Any = {
        "preset": preset_named,
        "card": lambda text: text[:60] or None,
        "vram": _gb,
        "allow_skips": "true".__eq__,
    }
    if key not in kept:
        raise VideotuneError(f"{key!r} is not a setting of a project")
    other: dict[str, Any] = (
        {"card": {"vram": None}, "vram": {"card": None}}.get(key, {}) if value else {}
    )
    with _one_at_a_time:
        projects.update(asked.current_project, **{**other, key: kept[key](value)})
    return reply()


def _gb(value: str) -> float | None:
    if value and not re.fullmatch(r"\d{1,4}([.,]\d{1,3})?", value):
        raise VideotuneError(f"the card's memory is a number of GB, such as 24, not {value!r}")
    return float(value.replace(",", ".")) if value else None


@routes.post("/p/{project}/setup/preset/{act}")
def own_preset(act: str, asked: CurrentPage, words: PostedForm) -> Response:
    """Save the settings as a preset, use one, or move one to the bin."""
    name = safe_name(words["name"].strip() + ".json")
    project = asked.current_project
    path = inside(asked.root / PRESETS_FOLDER, name)
    if act == "save":
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            raise VideotuneError(f"there is a preset {path.stem} already: give another name")
        write_json(path, {"preset": project.preset, "keys": draft(project)})
    elif act == "use":
        found = read_json(path)
        _use(project, str(found["preset"]), found["keys"])
    else:
        trash.move_to_trash(asked.root, "preset", path.stem, [path])
    return reply(
        {"save": "Preset saved", "use": "Preset applied"}.get(act, "Preset moved to the bin")
    )


def _use(project: Project, preset: str, keys: Mapping[str, Any]) -> None:
    """Replace the project's settings; VideotuneError where one of them cannot be."""
    nested = form.unflatten(
        {
            key: one
            for key, one in flatten(keys).items()
            if key.partition(".")[0] not in MANAGED_KEYS
        }
    )
    nested.pop("datasets", None)
    form.parse(form.merge(read_preset(preset_named(preset)), nested))
    with _one_at_a_time:
        projects.save_draft(project, nested)
        projects.update(project, preset=preset)


@routes.post("/p/{project}/setup/import")
async def take(asked: CurrentPage, name: str, request: Request) -> Response:
    """Receive another trainer's config."""
    folder = _place(asked.current_project, "theirs").with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    await receive(request, folder / safe_name(name))
    return reply()


@routes.post("/p/{project}/setup/{act}")
def change(act: str, asked: CurrentPage, words: PostedForm) -> Response:
    """Apply or forget another trainer's config, calculate the presets' hours, reset all settings, or start a run."""
    project = asked.current_project
    theirs = _place(asked.current_project, "theirs").with_suffix("")
    if act == "start":
        run = queue_page.queue_run(asked.root, project, words["run"].strip())
        return reply(f"{run} is queued", go=f"/p/{quote(project.name)}/train?run={quote(run)}")
    if act == "apply":
        config = read_json(_place(project, "imported"))["config"]
        same = [
            name
            for name, one in presets().items()
            if one["base"] == config.get("base_model_name")
        ]
        _use(project, project.preset if project.preset in same or not same else same[0], config)
    if act in ("apply", "forget"):
        shutil.rmtree(theirs, ignore_errors=True)
    elif act == "hours":
        write_json(_place(project, "hours"), {"presets": {}, "part": "known"})
        asking = {
            "presets": list(presets()),
            "config": {"datasets": projects.datasets(project)},
            "longest": 9000.0,
        }
        plan_server.request_answer(_place(project, "hours"), plan_question(project, "hours", **asking))
    elif act == "reset":
        projects.save_draft(project, {})
    return reply()
