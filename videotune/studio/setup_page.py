"""The page Setup: a preset, the settings, and the plan that follows from them."""

import os
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from videotune.config.load import (
    checked_keys,
    flatten,
    merge,
    preset_about,
    preset_named,
    preset_names,
    read_preset,
    unflatten,
)
from videotune.config.resolve import parse
from videotune.errors import VideotuneError
from videotune.files import read_json, write_json
from videotune.reporter.curves import COLOURS
from videotune.studio import gpu, header, plan_server, projects, queue_page, trash
from videotune.studio.form import (
    fields,
    format_value,
    inactive_reasons,
    inherited_values,
    set_key,
)
from videotune.studio.projects import (
    CLIPS,
    HELD_OUT,
    MANAGED_KEYS,
    Project,
    draft,
    inside,
)
from videotune.studio.records import OwnPreset, read_record
from videotune.studio.uploads import receive, safe_name, temporary_upload
from videotune.studio.web import (
    CurrentPage,
    PageContext,
    PostedForm,
    Regions,
    json_reply,
    page_response,
    render,
    reply,
)
from videotune.text import duration

routes = APIRouter()

PRESETS_FOLDER = "presets"
"""Folder of the user's presets: each a file with ``preset`` and ``keys``."""

MAX_CONFIG_BYTES = 20_000_000
"""Size limit of an uploaded config."""

PRESET_REMEDY = "fix it, or remove it"

HOURS_TIMEOUT = 9000.0
"""Seconds that the hours of all presets may take."""


def plan_question(project: Project, what: str, **extra: Any) -> dict[str, Any]:
    """Return a question for the plan server: settings, clips and GPU of a project."""
    facts = project.facts
    card = facts.get("card")
    vram = facts.get("vram")

    gpus = gpu.list_gpus()
    own_gpu = None
    if gpus and not card and not vram:
        own_gpu = [gpus[0].name, gpus[0].memory_total]

    clip_folders = [project.folder / name for name in (CLIPS, HELD_OUT)]
    return {
        "what": what,
        "preset": project.preset,
        "config": {**draft(project), "datasets": projects.datasets(project)},
        "allow_skips": "all" if facts.get("allow_skips") else None,
        "card": card,
        "vram": vram,
        "gpu": own_gpu,
        # Times of change, so a change of the clips gives another question.
        "seen": [folder.stat().st_mtime for folder in clip_folders if folder.is_dir()],
        **extra,
    }


def plan(page: PageContext) -> str:
    """Render the plan; it is computed again whenever the settings have changed."""
    project = page.current_project
    answer: dict[str, Any] = {}
    if projects.datasets(project):
        question = plan_question(project, "plan")
        answer = plan_server.request_answer(_studio_file(project, "plan"), question)

    current_plan = answer.get("plan") or {}
    remedies = [(text, _settings_in(text)) for text in current_plan.get("remedies", ())]
    return render(
        "setup_plan",
        project=project,
        answer=answer,
        plan=current_plan,
        remedies=remedies,
        duration=duration,
        colours=COLOURS,
    )


def _settings_in(text: str) -> list[tuple[str, str]]:
    """Return the settings that a text names as ``key=value``."""
    keys = {field.key for field in fields()}
    pairs = re.findall(r"([a-z_.]+)=([\w.]+)", text)
    return [(key, value) for key, value in pairs if key in keys]


def settings(page: PageContext) -> str:
    """Render every setting with its value."""
    project = page.current_project
    own = flatten(draft(project))
    inherited = inherited_values(project.preset)
    return render(
        "setup_fields",
        project=project,
        own=own,
        below=inherited,
        inactive=inactive_reasons({**inherited, **own}),
        fields={field.key: field for field in fields()},
        shown=format_value,
    )


def gallery(page: PageContext) -> str:
    """Render the presets, the user's own first, and the GPU of the plan."""
    project = page.current_project
    own_presets = {}
    damaged_presets = []
    for path in sorted((page.root / PRESETS_FOLDER).glob("*.json")):
        try:
            own_presets[path.stem] = read_record(path, OwnPreset, PRESET_REMEDY)
        except VideotuneError as error:
            damaged_presets.append(str(error))
    last_plan = plan_server.read_answer(_studio_file(project, "plan")).get("plan") or {}
    device = last_plan.get("device") or {}

    return render(
        "setup_presets",
        project=project,
        own=own_presets,
        damaged=damaged_presets,
        presets=presets(),
        hours=plan_server.read_answer(_studio_file(project, "hours")),
        found=gpu.list_gpus(),
        gb=(device.get("vram_bytes") or 0) / 1e9,
    )


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the text, base model, GPU memory and facts (presets.json) of each preset."""
    facts_by_model = read_json(Path(__file__).with_name("presets.json"))
    presets_by_name = {}
    for name in preset_names():
        about = preset_about(name)
        base_model = str(read_preset(name).get("base_model_name"))
        card_memory = re.search(r"cards of (\d+) GB", about)
        presets_by_name[name] = {
            "about": about,
            "base": base_model,
            "gb": card_memory and int(card_memory[1]),
            **facts_by_model.get(base_model, {}),
        }
    return presets_by_name


def import_region(page: PageContext) -> str:
    """Render what another trainer's config becomes, before it is applied."""
    project = page.current_project
    files = sorted(_foreign_folder(project).glob("*"))
    if not files:
        return ""

    question = {
        "what": "import",
        "files": [str(path) for path in files],
        "seen": [path.stat().st_mtime for path in files],
        "within": str(page.root) if page.path_rule.is_restricted else None,
    }
    answer = plan_server.request_answer(_studio_file(project, "imported"), question)
    return render(
        "setup_import", project=project, files=files, answer=answer, shown=format_value
    )


def _studio_file(project: Project, name: str) -> Path:
    return project.folder / ".studio" / f"{name}.json"


def _foreign_folder(project: Project) -> Path:
    """Return the folder of the uploaded config of another trainer."""
    return project.folder / ".studio" / "theirs"


REGIONS: Regions = {
    "plan": plan,
    "settings": settings,
    "gallery": gallery,
    "imported": import_region,
}


@routes.get("/p/{project}/setup")
def show(page: CurrentPage) -> Response:
    """Show preset, settings and plan."""
    sweepable_kinds = ("whole", "number", "choice", "json")
    keys = [field.key for field in fields() if field.kind in sweepable_kinds]
    return page_response(page, "setup", header.REGIONS | REGIONS, "Setup", keys=keys)


@routes.post("/p/{project}/setup/set")
def put(page: CurrentPage, form: PostedForm) -> Response:
    """Save one setting; HTTP 409 if its value is no longer the one shown (``was``)."""
    project = page.current_project
    key = form["key"]
    with projects.lock_of(project.folder):
        keys = draft(project)
        current_value = format_value(flatten(keys).get(key))
        if "was" in form and current_value != form["was"].replace("\r\n", "\n"):
            conflict = {"key": key, "now": current_value, "yours": form["value"]}
            return json_reply(conflict, 409)

        keys = set_key(keys, key, form["value"], project.preset)
        new_value = flatten(keys).get(key)
        page.path_rule.check_config({key: new_value})
        projects.save_draft(project, keys)
    return json_reply({"key": key, "now": format_value(new_value)})


@routes.post("/p/{project}/setup/fact")
def fact(page: CurrentPage, form: PostedForm) -> Response:
    """Save a fact of the project that is not in the config: preset, GPU, or skipped
    clips.
    """
    key = form["key"]
    value = form["value"].strip()
    projects.update(page.current_project, **_facts_of(key, value))
    return reply()


def _facts_of(key: str, value: str) -> dict[str, Any]:
    """Return the facts that a typed value sets; a card and a memory size exclude each
    other.
    """
    if key == "preset":
        return {"preset": preset_named(value)}
    if key == "allow_skips":
        return {"allow_skips": value == "true"}

    facts: dict[str, Any]
    if key == "card":
        facts = {"card": value[:60] or None}
        excluded_key = "vram"
    elif key == "vram":
        facts = {"vram": _parse_gb(value)}
        excluded_key = "card"
    else:
        raise VideotuneError(f"{key!r} is not a setting of a project")

    if value:
        facts[excluded_key] = None
    return facts


def _parse_gb(value: str) -> float | None:
    if value and not re.fullmatch(r"\d{1,4}([.,]\d{1,3})?", value):
        raise VideotuneError(f"vram: {value!r} is not a number of GB, such as 24")
    return float(value.replace(",", ".")) if value else None


@routes.post("/p/{project}/setup/preset/{act}")
def own_preset(act: str, page: CurrentPage, form: PostedForm) -> Response:
    """Save the settings as a preset, apply a preset, or move one to the bin."""
    project = page.current_project
    name = safe_name(form["name"].strip() + ".json")
    path = inside(page.root / PRESETS_FOLDER, name)

    if act == "save":
        with projects.lock_of(page.root):
            path.parent.mkdir(exist_ok=True)
            if path.exists():
                raise VideotuneError(
                    f"the preset {path.stem} already exists: use another name"
                )
            write_json(path, {"preset": project.preset, "keys": draft(project)})
        return reply("Preset saved")

    if not path.is_file():
        raise VideotuneError(f"there is no preset {path.stem}: reload the page")
    if act == "use":
        preset = read_record(path, OwnPreset, PRESET_REMEDY)
        _apply_settings(page, preset["preset"], preset["keys"])
        return reply("Preset applied")

    with projects.lock_of(page.root):
        trash.move_to_trash(page.root, "preset", path.stem, [path])
    return reply("Preset moved to the bin")


def _apply_settings(page: PageContext, preset: str, keys: Mapping[str, Any]) -> None:
    """Replace the settings of a project.

    Raises:
        VideotuneError: if one of them is invalid, or a path that the user may not name.
    """
    project = page.current_project
    allowed_keys = {
        key: value
        for key, value in flatten(keys).items()
        if key.partition(".")[0] not in MANAGED_KEYS
    }
    nested_keys = unflatten(allowed_keys)
    nested_keys.pop("datasets", None)
    nested_keys = checked_keys(nested_keys, "the settings")
    parse(merge(read_preset(preset_named(preset)), nested_keys))
    page.path_rule.check_config(nested_keys)

    with projects.lock_of(project.folder):
        projects.save_draft(project, nested_keys)
        projects.update(project, preset=preset)


@routes.post("/p/{project}/setup/import")
async def receive_config(page: CurrentPage, name: str, request: Request) -> Response:
    """Receive another trainer's config."""
    folder = _foreign_folder(page.current_project)
    with temporary_upload(page.root, name) as path:
        await receive(request, path, MAX_CONFIG_BYTES)
        folder.mkdir(parents=True, exist_ok=True)
        os.replace(path, folder / path.name)
    return reply()


@routes.post("/p/{project}/setup/{act}")
def change(act: str, page: CurrentPage, form: PostedForm) -> Response:
    """Start a run, apply or discard an imported config, compute hours, or reset
    settings.
    """
    project = page.current_project
    if act == "start":
        run = queue_page.queue_run(page.root, project, form["run"].strip())
        address = f"/p/{quote(project.name)}/train?run={quote(run)}"
        return reply(f"{run} is queued", redirect=address)

    if act == "apply":
        _apply_imported(page)
        shutil.rmtree(_foreign_folder(project), ignore_errors=True)
    elif act == "forget":
        shutil.rmtree(_foreign_folder(project), ignore_errors=True)
    elif act == "hours":
        _request_hours(project)
    elif act == "reset":
        with projects.lock_of(project.folder):
            projects.save_draft(project, {})
    else:
        raise VideotuneError(f"the page Setup has no action {act[:40]}")
    return reply()


def _apply_imported(page: PageContext) -> None:
    """Apply the imported config, with a preset of its base model if there is one."""
    project = page.current_project
    answer = plan_server.read_answer(_studio_file(project, "imported"))
    config = answer.get("config")
    if config is None:
        raise VideotuneError("there is no imported config: drop its file on the page")
    base_model = config.get("base_model_name")
    matching = [
        name for name, preset in presets().items() if preset["base"] == base_model
    ]

    preset = project.preset
    if matching and preset not in matching:
        preset = matching[0]
    _apply_settings(page, preset, config)


def _request_hours(project: Project) -> None:
    """Start computing the hours of all presets."""
    out = _studio_file(project, "hours")
    write_json(out, {"presets": {}, "part": "known"})
    question = plan_question(
        project,
        "hours",
        presets=list(presets()),
        config={"datasets": projects.datasets(project)},
        longest=HOURS_TIMEOUT,
    )
    plan_server.request_answer(out, question)
