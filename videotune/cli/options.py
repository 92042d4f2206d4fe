"""The options that commands share, as Typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from videotune.trainer.resolve_config import Overrides


def _offline(asked: bool) -> bool:
    if asked:
        from videotune.models.hub import go_offline

        go_offline()
    return asked


Preset = Annotated[str | None, typer.Option("--preset", help="a preset by name; `videotune presets list` shows them")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="a JSON or YAML file with the config's keys")]
FamilyName = Annotated[str | None, typer.Option("--family", help="the model family, where no base model says it")]
Data = Annotated[str | None, typer.Option("--data", help="a folder of clips, a zip or tar, or a Hub dataset")]
Folder = Annotated[str | None, typer.Argument(help="the clips; --data says the same")]
Base = Annotated[str | None, typer.Option("--base", help="the base model: a folder in diffusers layout, or a Hub id")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="key.sub=value; may be given many times")]
Skips = Annotated[str | None, typer.Option("--allow-skips", help="go on although N (or all) clips are skipped")]
CachePlace = Annotated[Path, typer.Argument(help="a cache folder, or the dataset folder that holds one")]
Offline = Annotated[
    bool, typer.Option("--offline", callback=_offline, help="ask no network; use what the Hub's cache holds")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def one_of(folder: str | None, data: str | None) -> str | None:
    """The clips, named by a command's argument or by --data; VideotuneError where both name some."""
    if folder and data:
        raise VideotuneError(f"which clips: {folder}, or --data {data}? Name one.")
    return folder or data


def overrides_from(
    preset: str | None,
    config: Path | None,
    family: str | None,
    data: str | None,
    sets: list[str] | None,
    base: str | None = None,
) -> Overrides:
    """What --preset, --config, --family, --data, each --set and --base say."""
    from videotune.trainer.resolve_config import Overrides

    return Overrides(preset, config, family, data, tuple(sets or ()), base)
