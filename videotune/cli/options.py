"""The options that commands share, as Typer reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Argument as Arg
from typer import Option as Opt

from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from videotune.trainer.resolve_config import Overrides


def _offline(asked: bool) -> bool:
    if asked:
        from videotune.models.base_model import go_offline

        go_offline()
    return asked


Preset = Annotated[str | None, Opt("--preset", help="a preset by name; `videotune presets list` shows them")]
ConfigFile = Annotated[Path | None, Opt("--config", help="a JSON or YAML file with the config's keys")]
FamilyName = Annotated[str | None, Opt("--family", help="the model family, if no base model is named")]
Data = Annotated[str | None, Opt("--data", help="a folder of clips, a zip or tar, or a Hub dataset")]
Folder = Annotated[str | None, Arg(help="the clips; the same as --data")]
Base = Annotated[str | None, Opt("--base", help="the base model: a folder, Hub id, or file (see base_parts)")]
Sets = Annotated[list[str] | None, Opt("--set", help="key.sub=value; may be repeated")]
Skips = Annotated[str | None, Opt("--allow-skips", help="continue although N (or all) clips are skipped")]
CachePlace = Annotated[Path, Arg(help="a cache folder, or the dataset folder that holds one")]
Offline = Annotated[bool, Opt("--offline", callback=_offline, help="no network requests; use the Hub's cache")]
AsJson = Annotated[bool, Opt("--json", help="print JSON")]


def takes_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the options that say what config it works on, which it gets as ``overrides``."""
    known = {"Overrides": Any}  # read from the config, which --help does not need
    hints = get_type_hints(command, None, known, True) | get_type_hints(_overrides, None, known, True)
    shared = signature(_overrides).parameters
    own = [one for name, one in signature(command).parameters.items() if name != "overrides"]

    def run(**options: Any) -> Any:
        overrides = _overrides(**{name: options.pop(name) for name in shared})
        return command(overrides=overrides, **options)

    # in --help what is needed comes first, and the command's other options last
    order = sorted((*shared.values(), *own), key=lambda one: one.default is not one.empty)
    every = [one.replace(kind=one.KEYWORD_ONLY, annotation=hints[one.name]) for one in order]
    run.__name__, run.__doc__, run.__signature__ = command.__name__, command.__doc__, Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in every}
    return run


def _overrides(
    preset: Preset = None,
    config: ConfigFile = None,
    family: FamilyName = None,
    base: Base = None,
    data: Data = None,
    sets: Sets = None,
    offline: Offline = False,
) -> Overrides:
    """What --preset, --config, --family, --base, --data and each --set say."""
    from videotune.trainer.resolve_config import Overrides

    return Overrides(preset, config, family, data, tuple(sets or ()), base)


def with_clips(overrides: Overrides, folder: str | None) -> Overrides:
    """The overrides with the clips that a command's argument names; VideotuneError where --data names some too."""
    if folder and overrides.data:
        raise VideotuneError(f"which clips: {folder}, or --data {overrides.data}? Name one.")
    return replace(overrides, data=folder or overrides.data)
