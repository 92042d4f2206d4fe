"""The ``presets`` and ``config`` commands: what there is to choose from."""

from __future__ import annotations

from typing import Annotated

import typer

from videotune import commands
from videotune.cli.overrides import AsJson

presets_app = typer.Typer(help="The presets that come with videotune, and every key.", no_args_is_help=True)
config_app = typer.Typer(help="What a config may say.", no_args_is_help=True)


@presets_app.command("list")
def presets_list() -> None:
    """The presets' names and purposes."""
    raise typer.Exit(commands.presets.list_presets())


@presets_app.command("show")
def presets_show(name: Annotated[str, typer.Argument(help="the preset")]) -> None:
    """A preset as a config file."""
    raise typer.Exit(commands.presets.show_preset(name))


@presets_app.command("keys")
def presets_keys() -> None:
    """Every key of the config with its default and its meaning."""
    raise typer.Exit(commands.presets.list_keys())


@config_app.command("schema")
def config_schema() -> None:
    """The JSON Schema of a config file, for editors."""
    raise typer.Exit(commands.options.show_schema())


@config_app.command("explain")
def config_explain(
    key: Annotated[str, typer.Argument(help="a key, such as learning_rate or lora.rank, or a section")],
    as_json: AsJson = False,
) -> None:
    """A key's meaning, unit, bounds, default and its reason, and what the guide advises."""
    raise typer.Exit(commands.options.explain_key(key, as_json=as_json))
