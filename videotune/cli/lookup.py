"""The ``presets`` and ``config`` commands: what there is to choose from."""

from __future__ import annotations

from typing import Annotated

import typer

from videotune.cli.overrides import AsJson

presets_app = typer.Typer(help="The presets that come with videotune, and every key.", no_args_is_help=True)
config_app = typer.Typer(help="What a config may say.", no_args_is_help=True)


@presets_app.command("list")
def presets_list() -> None:
    """The presets' names and purposes."""
    from videotune.commands.presets import list_presets

    raise typer.Exit(list_presets())


@presets_app.command("show")
def presets_show(name: Annotated[str, typer.Argument(help="the preset")]) -> None:
    """A preset as a config file."""
    from videotune.commands.presets import show_preset

    raise typer.Exit(show_preset(name))


@presets_app.command("keys")
def presets_keys() -> None:
    """Every key of the config with its default and its meaning."""
    from videotune.commands.presets import list_keys

    raise typer.Exit(list_keys())


@config_app.command("schema")
def config_schema() -> None:
    """The JSON Schema of a config file, for editors."""
    from videotune.commands.options import show_schema

    raise typer.Exit(show_schema())


@config_app.command("explain")
def config_explain(
    key: Annotated[str, typer.Argument(help="a key, such as learning_rate or lora.rank, or a section")],
    as_json: AsJson = False,
) -> None:
    """A key's meaning, unit, bounds, default and its reason, and what the guide advises."""
    from videotune.commands.options import explain_key

    raise typer.Exit(explain_key(key, as_json=as_json))
