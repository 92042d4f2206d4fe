"""``videotune presets`` and ``videotune config``: presets, and every key of a config."""

import json
from typing import Annotated, Any

import typer

from videotune.cli.options import Arg, AsJson, Opt
from videotune.config.base_models import (
    DOWNLOAD_NOTE,
    download_size,
    published_licence,
)
from videotune.config.nested_keys import flatten
from videotune.console import echo, print_json, print_table, tell
from videotune.presets.recipes import display_name, motion_notes
from videotune.presets.shipped import (
    preset_about,
    preset_card,
    preset_named,
    preset_names,
    preset_reasons,
    read_preset,
)

presets_app = typer.Typer(
    help="List presets, and every key of a config.", no_args_is_help=True
)
config_app = typer.Typer(
    help="Explain keys, and print the JSON Schema of a config.", no_args_is_help=True
)

PresetCard = Annotated[
    str | None,
    Opt(
        "--card",
        help="mark which presets fit this card, by its name or memory, those first",
    ),
]


@presets_app.command("ls", hidden=True)
@presets_app.command("list")
def list_presets(card: PresetCard = None) -> dict[str, Any] | None:
    """List presets: names, models, and memory of the cards that they are for."""
    if card is not None:
        return _list_for_card(card)
    rows = []
    for name in preset_names():
        memory = preset_card(name)
        card_memory = f"{memory} GB" if memory else "any"
        rows.append([name, display_name(name), card_memory, _download(name)])
    print_table("presets", ["preset", "model", "card", "download"], rows)
    tell(
        "The card is the one that a preset is made for; it may fit a smaller one. Memory is "
        "calculated, see `videotune plan`. Finetune trains all weights, Embedding new tokens, "
        f"the others a LoRA. {DOWNLOAD_NOTE}"
    )
    for note in motion_notes(preset_names()):
        tell(note)
    tell("`videotune presets list --card NAME`: which of them fit your card.")
    tell("`videotune presets show NAME`: every setting, and why.")
    return None


def _list_for_card(text: str) -> dict[str, Any]:
    """Print the presets with their fit on a card, those that fit first."""
    from videotune.planner.gpus import memory_or_card
    from videotune.planner.preset_fits import (
        FIT_BASIS,
        TIGHT_MEANING,
        fit_of,
        fit_words,
        rank_of,
    )

    card = memory_or_card(text)
    gigabytes = card if isinstance(card, float) else card.vram / 2**30
    name = f"{card:g} GB" if isinstance(card, float) else card.name
    fits = {preset: fit_of(preset, gigabytes) for preset in preset_names()}
    presets = sorted(fits, key=lambda preset: rank_of(fits[preset]))

    rows = []
    for preset in presets:
        fit = fits[preset]
        time = fit.time if fit else ""
        rows.append([preset, fit_words(fit), time, _download(preset)])
    own_hours = "For your clips"
    if not isinstance(card, float):
        own_hours = f"Those of the {name} alone, for your clips"
    columns = ["preset", f"on {round(gigabytes)} GB cards", "hours", "download"]
    print_table("presets", columns, rows)
    tell(
        f'"fits" is {FIT_BASIS}; "is tight": {TIGHT_MEANING}. Hours are from the '
        f"quickest to the slowest known card of {round(gigabytes)} GB. {own_hours}: videotune plan "
        f'CLIPS --preset NAME --card "{name}". {DOWNLOAD_NOTE}'
    )
    for note in motion_notes(presets):
        tell(note)
    fit_by_preset = {preset: fit_words(fit) for preset, fit in fits.items()}
    return {"card": name, "fits": fit_by_preset}


def _download(preset: str) -> str:
    size = download_size(str(read_preset(preset)["base_model_name"]))
    return "" if size is None else size.cell()


@presets_app.command("show")
def show_preset(
    name: Annotated[str, Arg(help="the preset")],
) -> dict[str, Any]:
    """Print a preset as a config file; the reasons for its values go to standard error."""
    settings = read_preset(name)
    reasons = preset_reasons(name)
    print_json(settings)

    echo(f"{preset_named(name)}: {preset_about(name)}")
    base_model = str(settings["base_model_name"])
    download = download_size(base_model)
    if download is not None:
        echo(f"base model: {download} to download, once")
    licence = published_licence(base_model)
    if licence:
        echo(f"licence of the base model: {licence}")
    for key, value in flatten(settings).items():
        echo(f"  {key} {json.dumps(value)}: {reasons.get(key, 'no reason is given')}")

    return {
        "preset": preset_named(name),
        "about": preset_about(name),
        "settings": settings,
        "reasons": reasons,
    }


@presets_app.command("keys")
def list_keys() -> None:
    """List every key of a config with its default and meaning."""
    from videotune.config.schema import leaves

    rows = []
    for name, field in leaves().items():
        default = (
            "required"
            if field.is_required()
            else field.get_default(call_default_factory=True)
        )
        rows.append([name, "" if default is None else default, field.description])
    print_table("keys", ["key", "default", "meaning"], rows)


@config_app.command("schema")
def show_schema() -> None:
    """Print the JSON Schema of a config file, for editors."""
    from videotune.config.explain import json_schema

    print_json(json_schema())


@config_app.command("explain")
def explain_key(
    key: Annotated[
        str, Arg(help="a key, such as learning_rate or lora.rank, or a section")
    ],
    as_json: AsJson = False,
) -> None:
    """Explain a key: meaning, unit, bounds, default with its reason, and advice."""
    from videotune.config.explain import explain

    facts = explain(key)
    if as_json:
        print_json({"key": key} | dict(facts))
        return

    print(key)
    columns = max(len(label) for label, _ in facts)
    for label, text in facts:
        tell(f"  {label:<{columns}}  {text}", indent=" " * (columns + 4))
