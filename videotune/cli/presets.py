"""``videotune presets`` and ``videotune config``: presets, and every key of a config."""

import json
from typing import Annotated

import typer

from videotune.cli.options import Arg, AsJson
from videotune.config.base_models import download_size
from videotune.config.nested_keys import flatten
from videotune.console import echo, print_json, print_table, tell
from videotune.presets.recipes import display_name
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

METHODS = {"FINE_TUNE": "all weights", "EMBEDDING": "new tokens"}


@presets_app.command("list")
def list_presets() -> None:
    """List presets: names, models, and memory of the cards that they are for."""
    rows = []
    for name in preset_names():
        settings = read_preset(name)
        card = preset_card(name)
        method = METHODS.get(settings.get("training_method", ""), "LoRA")
        rows.append([name, display_name(name), method, f"{card} GB" if card else "any"])
    print_table("presets", ["preset", "model", "trains", "card"], rows)
    tell("Memory is calculated, see `videotune plan`.")
    tell("`videotune presets show NAME`: every setting, and why.")


@presets_app.command("show")
def show_preset(name: Annotated[str, Arg(help="the preset")]) -> None:
    """Print a preset as a config file; the reasons for its values go to standard error."""
    print_json(read_preset(name))
    values = flatten(read_preset(name))
    reasons = preset_reasons(name)
    echo(f"{preset_named(name)}: {preset_about(name)}")
    download = download_size(str(read_preset(name)["base_model_name"]))
    if download is not None:
        echo(f"base model: {download} to download, once")
    for key, value in values.items():
        echo(f"  {key} {json.dumps(value)}: {reasons.get(key, 'no reason is given')}")


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
