"""The options that commands share, as Typer reads them, and ``--json`` for commands that have none of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import replace
from inspect import Parameter, Signature, signature
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer import Argument as Arg
from typer import Option as Opt

from videotune import console
from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from videotune.job.overrides import Overrides


def _offline(asked: bool) -> bool:
    if asked:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for the rest of this process and those it starts
    return asked


Preset = Annotated[
    str | None, Opt("--preset", help="a preset by name; `videotune presets list` shows them")
]
ConfigOption = Annotated[
    Path | None, Opt("--config", help="a JSON or YAML file with the config's keys")
]
FamilyOption = Annotated[
    str | None, Opt("--family", help="the model family, if no base model is named")
]
Data = Annotated[
    str | None, Opt("--data", help="a folder of clips, a zip or tar, or a Hub dataset")
]
Folder = Annotated[str | None, Arg(help="the clips; the same as --data")]
BaseOption = Annotated[
    str | None, Opt("--base", help="the base model: a folder, Hub id, or file (see base_parts)")
]
Sets = Annotated[list[str] | None, Opt("--set", help="key.sub=value; may be repeated")]
Skips = Annotated[
    str | None, Opt("--allow-skips", help="continue although N (or all) clips are skipped")
]
CachePlace = Annotated[Path, Arg(help="a cache folder, or the dataset folder that holds one")]
Offline = Annotated[
    bool, Opt("--offline", callback=_offline, help="no network requests; use the Hub's cache")
]
AsJson = Annotated[bool, Opt("--json", help="print JSON")]


def takes_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the options that say what config it works on, which it gets as ``overrides``."""
    known = {"Overrides": Any}  # read from the config, which --help does not need
    hints = get_type_hints(command, None, known, True) | get_type_hints(
        _overrides, None, known, True
    )
    shared = signature(_overrides).parameters
    own = [one for name, one in signature(command).parameters.items() if name != "overrides"]

    def run(**options: Any) -> Any:
        overrides = _overrides(**{name: options.pop(name) for name in shared})
        return command(overrides=overrides, **options)

    # in --help what is needed comes first, and the command's other options last
    order = sorted((*shared.values(), *own), key=lambda one: one.default is not one.empty)
    return as_command(run, command, order, hints)


def as_command(
    run: Callable[..., Any],
    command: Callable[..., Any],
    options: Iterable[Parameter],
    hints: dict[str, Any],
) -> Callable[..., Any]:
    """``run`` in the place of ``command`` as Typer sees it: with its name and its words, and these options."""
    every = [one.replace(kind=one.KEYWORD_ONLY, annotation=hints[one.name]) for one in options]
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in every}
    return run


def _overrides(
    preset: Preset = None,
    config: ConfigOption = None,
    family: FamilyOption = None,
    base: BaseOption = None,
    data: Data = None,
    sets: Sets = None,
    offline: Offline = False,
) -> Overrides:
    """What --preset, --config, --family, --base, --data and each --set say."""
    from videotune.job.overrides import Overrides

    return Overrides(preset, config, family, data, tuple(sets or ()), base)


def with_clips(overrides: Overrides, folder: str | None) -> Overrides:
    """The overrides with the clips that a command's argument names; VideotuneError where --data names some too."""
    if folder and overrides.data:
        raise VideotuneError(f"which clips: {folder}, or --data {overrides.data}? Name one.")
    return replace(overrides, data=folder or overrides.data)


def with_json(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with ``--json``; one that has the option already stays as it is.

    The object holds the exit code, the lines and the tables that the command printed, and what it returned: keys of its
    own, its exit code among them where that is not 0.
    """
    parameters = signature(command).parameters
    if "as_json" in parameters:
        return command
    hints = get_type_hints(command, include_extras=True) | {"as_json": AsJson}

    def run(as_json: bool = False, **options: Any) -> None:
        if not as_json:
            if code := (command(**options) or {}).get("exit_code", 0):
                raise typer.Exit(code)
            return
        code = 0
        value = None
        with redirect_stdout(StringIO()) as printed, console.recorded_tables() as tables:
            try:
                value = command(**options)
            except typer.Exit as ended:
                code = ended.exit_code
        text = {
            "exit_code": code,
            "lines": printed.getvalue().splitlines(),
            "tables": tables,
        } | (value or {})
        console.print_json(text)
        raise typer.Exit(text["exit_code"])

    added = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False)
    return as_command(run, command, (*parameters.values(), added), hints)
