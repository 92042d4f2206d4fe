"""The ``cache`` commands: encode ahead of a training, and look after what was encoded."""

from __future__ import annotations

from typing import Annotated

import typer

from videotune import commands
from videotune.cli.overrides import (
    AsJson,
    Base,
    CachePlace,
    ConfigFile,
    Data,
    FamilyName,
    Offline,
    Preset,
    Sets,
    Skips,
    overrides_from,
)
from videotune.errors import VideotuneError

cache_app = typer.Typer(help="Encode clips and captions ahead of a training; list, verify, prune what is encoded.")


@cache_app.callback(invoke_without_command=True)
def cache(
    context: typer.Context,
    preset: Preset = None,
    config: ConfigFile = None,
    family: FamilyName = None,
    base: Base = None,
    data: Data = None,
    sets: Sets = None,
    allow_skips: Skips = None,
    offline: Offline = False,
) -> None:
    """Encode clips and captions ahead of a training; or look after what was encoded."""
    if context.invoked_subcommand is not None:
        if preset or config or family or base or data or sets or allow_skips or offline:
            raise VideotuneError(f"options go after the word: videotune cache {context.invoked_subcommand} …")
        return

    raise typer.Exit(
        commands.cache.cache(overrides_from(preset, config, family, data, sets, base), allow_skips=allow_skips)
    )


@cache_app.command("ls")
def cache_ls(
    place: CachePlace,
    as_json: AsJson = False,
    every: Annotated[bool, typer.Option("--all", help="a row for each entry")] = False,
) -> None:
    """List what a cache holds: clips, captions, sizes, and what made them."""
    raise typer.Exit(commands.cache.list_cache(place, as_json=as_json, every=every))


@cache_app.command("verify")
def cache_verify(place: CachePlace) -> None:
    """Read every entry again; damaged ones are dropped, and the next run makes them anew (exit code 2)."""
    raise typer.Exit(commands.cache.verify_cache(place))


@cache_app.command("prune")
def cache_prune(
    preset: Preset = None,
    config: ConfigFile = None,
    family: FamilyName = None,
    base: Base = None,
    data: Data = None,
    sets: Sets = None,
    yes: Annotated[bool, typer.Option("--yes", help="do it; without this it is only said what would go")] = False,
    offline: Offline = False,
) -> None:
    """Remove what a run of these words would not read."""
    raise typer.Exit(commands.cache.prune_cache(overrides_from(preset, config, family, data, sets, base), yes=yes))
