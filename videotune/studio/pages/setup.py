"""The page Setup: a preset, the card, the settings with their help, and what the plan says of all that."""

from __future__ import annotations

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
from videotune.studio.jobs import latest, result, why
from videotune.studio.markup import NOTHING, Html, badge, bullets, details, element, join, paragraph, text
from videotune.studio.pages.data import choose
from videotune.studio.pages.kit import at_work, bar, button, facts, live, log, tip
from videotune.studio.projects import BOOK, Project, draft
from videotune.text import counted, duration, plain

COLOURS = {name: css for _, name, css in BANDS}


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
        said = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
        name, memory = said.strip().splitlines()[0].rsplit(",", 1)
        return name.strip(), round(float(memory) * 2**20 / 1e9, 1)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def part(root: Path, project: Project | None, query: Mapping[str, str]) -> Html:
    """The form."""
    if project is None:
        return choose()
    keys, below = flatten(draft(project)), form.standing(project.preset)
    known = form.fields()
    basic = [_field(one, keys, below) for key in form.BASIC for one in known if one.key == key]
    others: dict[str, list[Html]] = {}
    for one in known:
        if one.key not in form.BASIC:
            others.setdefault(one.section, []).append(_field(one, keys, below))
    parts = [
        element(
            "details",
            element("summary", text(f"{form.TITLES.get(name, name)} ({len(rows)})")),
            element("div", *rows, css="fields"),
            css="keys",
            attributes={"id": f"keys-{name}"},
        )
        for name, rows in others.items()
    ]
    words = "find a setting"
    find = element("input", attributes={"type": "search", "data-find": "1", "placeholder": words, "aria-label": words})
    question = "Set all settings back to the preset's? What you have typed here is lost."
    return join(
        [
            element("h2", text("Model and card")),
            element("div", *_project_fields(project), css="fields"),
            element("h2", text("Settings")),
            paragraph(
                text("An empty field means the value in grey. Everything is saved as you leave a field."), css="soft"
            ),
            element("div", *basic, css="fields"),
            element("h3", text("All settings")),
            find,
            *parts,
            element("p", button("back to the preset", "reset", {}, confirm=question), css="row"),
        ]
    )


def _project_fields(project: Project) -> list[Html]:
    options = [_option(name, project.preset, name) for name in preset_names()]
    card, vram = str(project.facts.get("card") or ""), project.facts.get("vram")
    here = found_card()
    told = (
        f"this computer has: {here[0]}, {here[1]:g} GB"
        if here
        else "no NVIDIA card was found on this computer; type the one that you mean"
    )
    agreed = "checked" if project.facts.get("allow_skips") else ""
    last = last_account(project)
    num = last[1]["skipped"] if last else 0
    return [
        _labelled(
            "preset",
            "Preset",
            element("select", *options, attributes={"data-key": "preset", "data-do": "fact", "id": "f-preset"}),
            preset_about(project.preset),
            "A preset is a model with settings that are known to go together.",
        ),
        _labelled(
            "card",
            "Card",
            _input("card", card, here[0] if here else "such as RTX 4090", "fact"),
            told,
            "The graphics card: whether the run fits it, and how long it takes.",
        ),
        _labelled(
            "vram",
            "or its memory in GB",
            _input("vram", "" if vram is None else f"{vram:g}", f"{here[1]:g}" if here else "such as 24", "fact"),
            "",
            "Memory of the graphics card (VRAM).",
        ),
        _labelled(
            "allow_skips",
            f"Go on without the skipped clips ({num} now)",
            Html(f'<input type="checkbox" id="f-allow_skips" data-key="allow_skips" data-do="fact" {agreed}>'),
            "Otherwise a run does not begin while clips are skipped.",
            "Clips that cannot be used are left out; the page Data says why.",
        ),
    ]


def _labelled(key: str, label: str, control: Html, below: str, help: str) -> Html:
    name = element("label", text(label), attributes={"for": f"f-{key}", "title": help})
    return element(
        "div",
        name,
        control,
        element("small", text(below)),
        element("span", css="said", attributes={"role": "status"}),
        css="field",
    )


def _input(key: str, value: str, placeholder: str, do: str) -> Html:
    given = {"id": f"f-{key}", "data-key": key, "data-do": do, "value": value, "placeholder": placeholder}
    return element("input", attributes=given)


def _option(value: str, chosen: str, words: str) -> Html:
    return element("option", text(words), attributes={"value": value}, flags="selected" if value == chosen else "")


def _field(one: form.Field, keys: Mapping[str, Any], below: Mapping[str, Any]) -> Html:
    """A key's label with its help, its control, and the help's line."""
    own, holds = keys.get(one.key), form.shown(below.get(one.key)).replace("\n", ", ")
    value = form.shown(own)
    given: dict[str, object] = {"id": f"f-{one.key}", "data-key": one.key}
    if one.kind in ("choice", "switch"):
        names = one.choices or ("true", "false")
        given_name = next((name for name in names if name.lower() == value.lower()), value)
        shown = [
            _option("", given_name, f"({holds or 'chosen for you'})"),
            *(_option(name, given_name, name) for name in names),
        ]
        control = element("select", *shown, attributes=given)
    elif one.kind == "json" or "\n" in value:
        control = element(
            "textarea",
            text(value),
            attributes=given | {"rows": 3 if one.key == "samples" else 1, "placeholder": holds or "chosen for you"},
        )
    else:
        given |= {
            "value": value,
            "placeholder": holds or "chosen for you",
            "inputmode": "decimal" if one.kind in ("whole", "number") else "text",
        }
        control = element("input", attributes=given)
    title = "\n".join(
        part
        for part in (f"{one.key}: {one.values}", one.unit and f"unit: {one.unit}", f"default: {one.default}", one.guide)
        if part
    )
    unit = element("em", text(f" {one.unit}")) if one.unit else NOTHING
    name = element("label", text(one.label), unit, attributes={"for": f"f-{one.key}", "title": title})
    help_ = element(
        "small",
        text(f"{one.help} "),
        element("abbr", text("?"), attributes={"title": title, "tabindex": "0", "aria-label": title}),
    )
    return element(
        "div",
        name,
        control,
        help_,
        element("span", css="said", attributes={"role": "status"}),
        css="field own" if own is not None else "field",
    )


def plan_part(root: Path, project: Project | None, query: Mapping[str, str]) -> Html:
    """What the plan says: whether it fits, how often each clip is seen, how long, how much disk."""
    if project is None:
        return NOTHING
    job = latest(project.folder, "plan")
    head = element("h2", text("Plan"))
    again = element("p", button("calculate the plan", "plan", {}), css="row")
    if job is None:
        return join(
            [
                head,
                paragraph(
                    text(
                        "Change a setting, or ask for the plan: it says whether the run fits your card, and what it will do."
                    ),
                    css="soft",
                ),
                again,
            ]
        )
    if job.running:
        return join([head, at_work(job, "calculating", "plan")])
    plan = result(job)
    if not isinstance(plan, dict):
        return join(
            [
                head,
                element(
                    "div",
                    paragraph(text("It cannot begin like this:")),
                    paragraph(text(why(job))),
                    css="bad",
                    attributes={"role": "alert"},
                ),
                log(job),
                again,
            ]
        )
    kept = [path for name in ("config.json", BOOK) if (path := project.folder / name).is_file()]
    old = any(path.stat().st_mtime > job.started for path in kept)
    stale = paragraph(text("Settings have changed since: calculate it again."), css="care") if old else NOTHING
    return join([head, stale, *_told(plan), again])


def _told(plan: Mapping[str, Any]) -> list[Html]:
    fits = plan["fits"]
    word = (
        badge("fits", "good")
        if fits
        else badge("no card named", "quiet")
        if fits is None
        else badge("does not fit", "bad")
    )
    views = plan["views"]["per_window"]
    hours, beside = (
        duration(plan[key] * 3600) if plan.get(key) is not None else None for key in ("hours", "hours_beside")
    )
    disk = sum(plan["disk"].get(key, 0) for key in ("latent_bytes", "text_bytes_at_most", "run_bytes"))
    shown = {
        "steps": plain(plan["steps"]),
        "clips used": plan["clips"]["used"],
        "held out": plan["clips"]["held_out"],
        "windows": plan["windows"],
        "time of the steps": hours or "name a card",
        "readings and previews beside": beside,
        "disk": f"{disk / 1e9:.2f} GB",
    }
    band = tip(
        "views",
        "How often each piece of a clip is shown by the end. Below 10 little is learnt; from 100 on the model is likely to "
        "copy your clips.",
    )
    seen = f" of each window: {views['min']} to {views['max']}, "
    return [
        paragraph(word, css="state"),
        _memory(plan.get("device")),
        facts(shown),
        paragraph(band, text(seen), badge(views["band"], COLOURS.get(views["band"], "calm"))),
        paragraph(text(plan["views"]["advice"]), css="soft"),
        element("div", element("h3", text("What would help")), bullets([text(one) for one in plan["remedies"]]))
        if plan["remedies"]
        else NOTHING,
        details(counted(len(plan["notes"]), "note"), bullets([text(note) for note in plan["notes"]]))
        if plan["notes"]
        else NOTHING,
    ]


def _memory(device: Mapping[str, Any] | None) -> Html:
    if not device:
        return NOTHING
    need, have = device["need_bytes"], device["vram_bytes"]
    name = tip("Memory of the card", f"What the run needs at its worst time ({device['phase']}), calculated.")
    if have is None:
        return paragraph(name, text(f": {need / 1e9:.1f} GB needed"))
    parts = ", ".join(
        f"{part} {size / 1e9:.2f} GB"
        for part, size in sorted(device["parts"].items(), key=lambda pair: -pair[1])
        if size
    )
    told = f"{need / 1e9:.1f} of {have / 1e9:.1f} GB"
    return join(
        [
            paragraph(name, text(f": {told}")),
            bar(need / have, "good" if need <= have else "bad", told),
            paragraph(text(parts), css="soft"),
        ]
    )
