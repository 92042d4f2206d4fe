"""The page Setup: a preset, the settings, and the plan that follows from them."""

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from videotune.config.nested_keys import flatten
from videotune.data.remarks import SERIOUS, with_codes
from videotune.errors import VideotuneError
from videotune.presets.shipped import preset_named, preset_reasons
from videotune.reporter.read import mapping, number
from videotune.reporter.times_seen import COLOURS
from videotune.studio import (
    clip_subjects,
    clip_words,
    clips,
    gpu,
    header,
    model_choices,
    plan_server,
    preset_hours,
    projects,
    queue_page,
    run_cards,
    run_states,
)
from videotune.studio.base_model_problem import (
    BaseModelProblem,
    problem_of,
    problem_of_run,
)
from videotune.studio.far_values import unusual_values, with_usual_of_preset
from videotune.studio.field_errors import at_field
from videotune.studio.field_kinds import PATH_KEYS
from videotune.studio.first_model import first_model
from videotune.studio.form import (
    condition_rows,
    fields,
    format_value,
    inactive_reasons,
    inherited_values,
    parse_value,
    replaced_lengths,
    set_key,
)
from videotune.studio.frame_sizes import trained_sizes, turned_resolution
from videotune.studio.imported_data import foreign_folder
from videotune.studio.kept_values import (
    confirm_values,
    kept_values,
    use_usual_values,
    values_before_change,
)
from videotune.studio.licences import accept_licence, open_licence
from videotune.studio.memory_bar import memory_parts
from videotune.studio.outside_clips import lacks_caption, missing_sources
from videotune.studio.own_presets import (
    discard_own_preset,
    preset_path,
    read_own_preset,
    read_own_presets,
    save_own_preset,
)
from videotune.studio.preview_outlook import count_captions
from videotune.studio.project_plan import plan_answer, plan_file
from videotune.studio.projects import Project, draft
from videotune.studio.setting_values import describe_values
from videotune.studio.settings_version import settings_version
from videotune.studio.sound_settings import base_model_of, prompt_files, shown_fields
from videotune.studio.start_questions import ask_before_start
from videotune.studio.starting_values import follow_model, reset, starting_values
from videotune.studio.this_computer import (
    card_elsewhere,
    hours_here,
    notes_on_this_computer,
)
from videotune.studio.trained_model import (
    replaced_base_model,
    trained_model,
    trains_anywhere,
)
from videotune.studio.uploads import receive, temporary_upload
from videotune.studio.verdict import plan_verdict
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
from videotune.studio.whole_settings import (
    MAX_CONFIG_BYTES,
    apply_imported,
    apply_settings,
    import_region,
    studio_file,
    take_config,
)
from videotune.text import disk_size, time_span

routes = APIRouter()

VERDICT_NOTES = ("none_held_out", "few_held_out", "few_validations")
"""Codes of the plan's notes that say why a run ends without a verdict; those that hold
stand open together, since mending one of them alone gives none.
"""

UNFOLDED_NOTES = frozenset([*SERIOUS, "frame_count"]) - frozenset(VERDICT_NOTES)
"""Codes of the plan's other notes that stand open on the page: those that ask for a
decision. The rest is folded.
"""

VERSION_HEADER = "VT-Settings"
"""Header of an answer: the version of the settings that it has made."""


def plan(page: PageContext) -> str:
    """Render the plan; it is computed again whenever the settings have changed."""
    project = page.current_project
    version = settings_version(project)
    answer = plan_answer(page)
    if answer:
        clips.start_check(project)

    current_plan: dict[str, Any] = {}
    if answer.get("current") or answer.get("measuring"):
        current_plan = answer.get("plan") or {}
    remedies = [(text, _settings_in(text)) for text in current_plan.get("remedies", ())]
    notes = with_codes(
        current_plan.get("notes", ()), current_plan.get("note_codes", ())
    )
    own_values = flatten(draft(project))
    inherited = inherited_values(project.preset)
    return render(
        "setup_plan",
        project=project,
        model=trained_model(project),
        version=version,
        answer=answer,
        plan=current_plan,
        unusable=[
            row | {"uncaptioned": lacks_caption(row)}
            for row in clips.unusable_clips(project)
        ],
        missing=missing_sources(project),
        has_own=clips.has_own(project),
        runs_anywhere=trains_anywhere(project),
        kept=kept_values(project),
        here=notes_on_this_computer(project, current_plan),
        hours_here=hours_here(project, current_plan),
        card_elsewhere=card_elsewhere(project),
        verdict=plan_verdict(project, current_plan),
        remedies=remedies,
        notes=with_usual_of_preset(notes, own_values, inherited),
        unfolded_notes=UNFOLDED_NOTES,
        verdict_notes=VERDICT_NOTES,
        names_of={field.key: field.name for field in fields()},
        busy=bool(header.running_work(page.root)),
        licence=open_licence(answer),
        remedy_of=clip_words.remedy_of,
        about=clip_subjects.ABOUT,
        subjects=clip_subjects.SUBJECTS,
        memory_parts=memory_parts,
        colours=COLOURS,
        turned=turned_resolution(answer),
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
    takes = conditions_taken(project, own, inherited)
    starting = starting_values(project)
    problem = _base_model_problem(page, base_model_of(own, inherited))
    notes = unusual_values(own, inherited, _costs(page))
    if problem is not None:
        notes["base_model_name"] = problem.sentence

    return render(
        "setup_fields",
        project=project,
        model=trained_model(project),
        replaced=replaced_base_model(project),
        own=own,
        starting=starting,
        set_by_user=[key for key in own if key not in starting],
        below=inherited,
        inactive={
            **inactive_reasons({**inherited, **own}),
            **replaced_lengths(own, inherited),
        },
        unusual=notes,
        turned=turned_resolution(plan_answer(page)),
        clip_count=count_captions(project),
        trained_sizes=trained_sizes(plan_answer(page)),
        problem=problem,
        reasons=preset_reasons(project.preset) if project.preset else {},
        card=model_choices.chosen_card(project.facts),
        fields=shown_fields(own, base_model_of(own, inherited)),
        shown=format_value,
        describe_values=describe_values,
        path_keys=PATH_KEYS,
        takes=takes,
        prompt_files=prompt_files(takes, {**inherited, **own}.get("generate")),
        conditions=condition_rows(
            own.get("conditions", inherited.get("conditions")), takes
        ),
    )


def _base_model_problem(page: PageContext, model: str) -> BaseModelProblem | None:
    """Return why the base model of the settings cannot be had, as the plan or the newest
    run has found; None if nothing is known against it.
    """
    answer = plan_answer(page)
    if answer.get("current") and answer.get("code"):
        return problem_of(str(answer.get("words", "")), model)
    names = run_states.run_names(page.current_project, page.root)
    if not names:
        return None
    return problem_of_run(*run_states.run_state(page, names[0]), model)


def _costs(page: PageContext) -> str:
    """Return the time and the disk that the settings take, as a sentence; empty while
    the plan is not calculated.
    """
    answer = plan_answer(page)
    plan_now = mapping(answer.get("plan") if answer.get("current") else None)
    hours = (number(plan_now["hours"]) or 0.0) + (
        number(plan_now["hours_beside"]) or 0.0
    )
    run_bytes = number(mapping(plan_now["disk"])["run_bytes"])
    if not hours or run_bytes is None:
        return ""
    return f"All settings together take {time_span(hours)} and {disk_size(run_bytes)} of disk."


def conditions_taken(
    project: Project, own: Mapping[str, Any], inherited: Mapping[str, Any]
) -> list[str] | None:
    """Return the types of the conditions that the project's model takes; None if they
    are not known (yet).

    Args:
        project: the project.
        own: the user's values, by dotted name.
        inherited: the values of the preset, by dotted name.
    """
    base = base_model_of(own, inherited)
    known = model_choices.conditions_of(base)
    if known is not None:
        return known

    # The plan knows a model of the user's own, once it is calculated for it.
    answer = plan_server.read_answer(plan_file(project))
    latest_plan = mapping(answer.get("plan"))
    planned_base = mapping(latest_plan["settings"])["base_model_name"]
    takes: list[str] | None = latest_plan["takes"]
    return takes if planned_base == base else None


def gallery(page: PageContext) -> str:
    """Render the models by family, the user's own presets, and the card."""
    project = page.current_project
    own_presets, damaged_presets = read_own_presets(page.root)
    card = model_choices.chosen_card(project.facts)
    rows = clips.table(project).rows.values()
    lengths = [row["source_seconds"] for row in rows if row["source_seconds"]]
    first = first_model(card, lengths)
    families = model_choices.families_for(card, project.preset, first.preset)
    hours = plan_server.read_answer(studio_file(project, "hours"))
    return render(
        "setup_presets",
        project=project,
        own=own_presets,
        damaged=damaged_presets,
        families=families,
        has_too_large=model_choices.has_too_large(families, card),
        first=first,
        card=card,
        card_groups=model_choices.card_groups(),
        found=gpu.list_gpus(),
        hours=hours if hours.get("card") == card.name else {},
        progress=preset_hours.progress(project, card, hours),
        unusable=clips.unusable_clips(project),
    )


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
    sweepable = [field for field in fields() if field.kind in sweepable_kinds]
    return page_response(
        page,
        "setup",
        header.REGIONS | REGIONS,
        "Setup",
        sweepable=sweepable,
        gpu_choices=run_cards.choices(),
    )


@routes.post("/p/{project}/setup/set")
def put(page: CurrentPage, form: PostedForm) -> Response:
    """Save one setting; HTTP 409 if its value is neither one that the page shows or has
    sent before (``was``), nor the new one.
    """
    project = page.current_project
    key = form["key"]
    with projects.lock_of(project.folder):
        keys = draft(project)
        current_value = flatten(keys).get(key)
        new_keys = set_key(keys, key, form["value"], project.preset)
        new_value = flatten(new_keys).get(key)

        shown_values = _shown_values(key, form.all("was"))
        current_text = format_value(current_value)
        is_expected = current_text in shown_values or current_value == new_value
        if shown_values and not is_expected:
            conflict = {"key": key, "now": current_text, "yours": form["value"]}
            return json_reply(conflict, 409)

        page.path_rule.check_config({key: new_value})
        if current_value != new_value:
            projects.save_draft(project, new_keys)
    result = json_reply({"key": key, "now": format_value(new_value)})
    return _with_version(result, project)


@routes.post("/p/{project}/setup/licence")
def accept(page: CurrentPage, form: PostedForm) -> Response:
    """Keep that the user has accepted the base model's licence."""
    accept_licence(page.current_project, form["terms"])
    return reply("The licence is accepted")


def _shown_values(key: str, texts: list[str]) -> list[str]:
    """Return values that a page has shown or sent, also as they read once saved."""
    values = [text.replace("\r\n", "\n") for text in texts]
    (field,) = (field for field in fields() if field.key == key)
    for text in texts:
        with suppress(VideotuneError):
            values.append(format_value(parse_value(field, text)))
    return values


def _with_version(response: Response, project: Project) -> Response:
    """Tell the page from which version of the settings on a plan belongs to them."""
    response.headers[VERSION_HEADER] = str(settings_version(project))
    return response


@routes.post("/p/{project}/setup/fact")
def fact(page: CurrentPage, form: PostedForm) -> Response:
    """Save a fact of the project that is not in the config: preset, GPU, or skipped
    clips; HTTP 409 as for a setting.
    """
    project = page.current_project
    key = form["key"]
    value = form["value"].strip()
    new_facts = _facts_of(key, value)
    with projects.editing(project) as current:
        current_text = _fact_text(current.facts.get(key))
        new_text = _fact_text(new_facts[key])
        shown_values = form.all("was")
        if shown_values and current_text not in (*shown_values, new_text):
            conflict = {"key": key, "now": current_text, "yours": new_text}
            return json_reply(conflict, 409)
        if key == "preset" and new_text != current_text:
            new_facts["earlier_values"] = values_before_change(current)
            follow_model(current, new_facts["preset"])
        projects.update(current, **new_facts)
    return _with_version(json_reply({"key": key, "now": new_text}), project)


def _fact_text(value: Any) -> str:
    """Return a fact as its field shows it."""
    if isinstance(value, float):
        return f"{value:g}"
    return format_value(value or None)


def _facts_of(key: str, value: str) -> dict[str, Any]:
    """Return the facts that a typed value sets; a card and a memory size exclude each
    other.

    Raises:
        VideotuneError: if the value is no such preset, card or size.
    """
    if key == "preset":
        return {"preset": preset_named(value)}
    if key == "allow_skips":
        return {"allow_skips": value == "true"}
    if key in ("card", "vram"):
        return model_choices.card_facts(value)
    raise VideotuneError(f"{key!r} is not a setting of a project")


@routes.post("/p/{project}/setup/preset/{act}")
def own_preset(
    act: Literal["save", "use", "remove"], page: CurrentPage, form: PostedForm
) -> Response:
    """Save the settings as a preset, apply a preset, or move one to the bin."""
    project = page.current_project
    with at_field("name"):
        path = preset_path(page.root, form["name"])
        if act == "save":
            save_own_preset(page.root, project, path)
            return reply("Preset saved")

    if not path.is_file():
        raise VideotuneError(f"there is no preset {path.stem}: reload the page")
    if act == "use":
        preset = read_own_preset(path)
        apply_settings(page, preset["preset"], preset["keys"])
        return reply("Preset applied")

    discard_own_preset(page.root, path)
    return reply("Preset moved to the bin")


@routes.post("/p/{project}/setup/import")
async def receive_config(page: CurrentPage, name: str, request: Request) -> Response:
    """Receive another trainer's config."""
    with temporary_upload(page.root, name) as path:
        await receive(request, path, MAX_CONFIG_BYTES)
        take_config(page.current_project, path)
    return reply()


@routes.post("/p/{project}/setup/{act}")
def change(act: str, page: CurrentPage, form: PostedForm) -> Response:
    """Start a run, apply or discard an imported config, compute hours, decide on values
    that were set for an earlier model, or reset settings.
    """
    project = page.current_project
    if act == "start":
        questions = ask_before_start(project, form)
        if questions is not None:
            return questions
        cards = run_cards.cards_from(form)
        title = form["title"].strip()
        run = queue_page.queue_run(page.root, project, title, cards=cards)
        address = f"/p/{quote(project.name)}/train?run={quote(run)}"
        return reply(f"{run} is queued", redirect=address)

    message = ""
    if act == "apply":
        message = apply_imported(page)
        shutil.rmtree(foreign_folder(project), ignore_errors=True)
    elif act == "forget":
        shutil.rmtree(foreign_folder(project), ignore_errors=True)
    elif act == "hours":
        preset_hours.request(project)
    elif act == "stop-hours":
        plan_server.stop(studio_file(project, "hours"))
    elif act == "keep-values":
        confirm_values(project)
    elif act == "usual-values":
        use_usual_values(project)
    elif act == "replan":
        plan_file(project).unlink(missing_ok=True)
    elif act == "reset":
        reset(project)
    else:
        raise VideotuneError(f"the page Setup has no action {act[:40]}")
    return _with_version(reply(message), project)
