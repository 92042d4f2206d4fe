"""Options that commands share, and ``--json`` for commands without one of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from inspect import Parameter, Signature, signature
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer import Argument as Arg
from typer import Option as Opt
from typer.core import TyperCommand
from typer.models import OptionInfo

from videotune import console
from videotune.errors import VideotuneError
from videotune.files import CONFIG_SUFFIXES

if TYPE_CHECKING:
    from videotune.job.overrides import Overrides


def _set_offline(is_offline: bool) -> bool:
    """Switch the Hub off for this process and those that it starts."""
    if is_offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["VIDEOTUNE_OFFLINE"] = "1"
    return is_offline


def _checked_skips(allow_skips: str | None) -> str | None:
    """Refuse what is neither a number nor "all", before any clip is read."""
    from videotune.job.overrides import check_allow_skips

    check_allow_skips(allow_skips)
    return allow_skips


Preset = Annotated[
    str | None,
    Opt("--preset", help="a preset by name; `videotune presets list` shows them"),
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
Source = Annotated[
    str | None,
    Arg(
        metavar="CLIPS|CONFIG",
        help="the clips, the same as --data; or a config file, the same as --config",
    ),
]
HeldOut = Annotated[
    str | None,
    Opt(
        "--held-out",
        metavar="FOLDER",
        help="clips kept aside for checking: measured and never trained, to see whether the model copies",
    ),
]
BaseOption = Annotated[
    str | None,
    Opt("--base", help="the base model: a folder, Hub id, or file (see base_parts)"),
]
ModelsFolder = Annotated[
    Path | None,
    Opt(
        "--models-folder",
        help="a folder, such as ComfyUI/models, whose files replace the base model's weights; remembered",
    ),
]
Sets = Annotated[list[str] | None, Opt("--set", help="key.sub=value; may be repeated")]
Skips = Annotated[
    str | None,
    Opt(
        "--allow-skips",
        callback=_checked_skips,
        help="continue although N (or all) clips are skipped",
    ),
]
CacheFolder = Annotated[
    Path,
    Arg(
        help="a cache folder, the dataset folder that holds one, or the s3:// address of a cache"
    ),
]
Offline = Annotated[
    bool,
    Opt(
        "--offline",
        callback=_set_offline,
        help="no network requests; use the Hub's cache",
    ),
]
Verbose = Annotated[bool, Opt("--verbose", help="print everything")]
AsJson = Annotated[bool, Opt("--json", help="print JSON")]


def takes_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the clips as an argument and the options that choose a config; the command
    gets them as ``overrides``.
    """
    return _with_overrides(command, signature(_read_overrides).parameters)


def takes_config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose a config, but no argument, to a command with
    subcommands.
    """
    parameters = dict(signature(_read_overrides).parameters)
    parameters.pop("source")
    return _with_overrides(command, parameters)


def _with_overrides(
    command: Callable[..., Any], shared: Mapping[str, Parameter]
) -> Callable[..., Any]:
    names = {"Overrides": Any}  # reads the config, which --help does not need
    hints = get_type_hints(command, None, names, True)
    hints |= get_type_hints(_read_overrides, None, names, True)
    own_options = [
        option
        for name, option in signature(command).parameters.items()
        if name != "overrides"
    ]

    def run(**options: Any) -> Any:
        overrides = _read_overrides(**{name: options.pop(name) for name in shared})
        return command(overrides=overrides, **options)

    # --help lists required options first, and the command's other options last
    order = sorted(
        (*shared.values(), *own_options),
        key=lambda option: option.default is not option.empty,
    )
    return as_command(run, command, order, hints)


def as_command(
    run: Callable[..., Any],
    command: Callable[..., Any],
    options: Iterable[Parameter],
    hints: dict[str, Any],
) -> Callable[..., Any]:
    """Make Typer see ``run`` as ``command``: its name, its docstring, and these
    options.
    """
    parameters = [
        option.replace(kind=option.KEYWORD_ONLY, annotation=hints[option.name])
        for option in options
    ]
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in parameters}
    return run


def _read_overrides(
    source: Source = None,
    preset: Preset = None,
    config: ConfigOption = None,
    family: FamilyOption = None,
    base: BaseOption = None,
    models_folder: ModelsFolder = None,
    data: Data = None,
    held_out: HeldOut = None,
    sets: Sets = None,
    offline: Offline = False,
) -> Overrides:
    """Return the values of the argument, --preset, --config, --family, --base,
    --models-folder, --data, --held-out and every --set, checked before a library of
    models is imported.
    """
    from videotune.job.overrides import Overrides, check_settings

    if models_folder is not None and not models_folder.is_dir():
        raise VideotuneError(f"--models-folder: no such folder: {models_folder}")
    overrides = Overrides(
        preset,
        config,
        family,
        data,
        held_out,
        tuple(sets or ()),
        base,
        models_folder,
    )
    overrides = _with_source(overrides, source)
    check_settings(overrides)
    return overrides


def _with_source(overrides: Overrides, source: str | None) -> Overrides:
    """Return the overrides with the clips, or the config, that a command's argument
    names.

    Raises:
        VideotuneError: an option names them too.
    """
    if source is None:
        return overrides
    if Path(source).suffix.lower() in CONFIG_SUFFIXES:
        if overrides.config is not None:
            raise VideotuneError(
                f"{source} and --config {overrides.config} both name a config. Name one."
            )
        return replace(overrides, config=Path(source))
    if overrides.data is not None:
        raise VideotuneError(
            f"{source} and --data {overrides.data} both name the clips. Name them once."
        )
    return replace(overrides, data=source)


def with_json(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` to a command that lacks it.

    The printed object has the exit code, the lines and tables that the command printed,
    and the keys of the dict that it returned. A command returns "exit_code" if it is
    not 0.
    """
    parameters = signature(command).parameters
    if "as_json" in parameters:
        return command
    hints = get_type_hints(command, include_extras=True) | {"as_json": AsJson}

    def run(as_json: bool = False, **options: Any) -> None:
        if as_json:
            result = _recorded(command, options)
            console.print_json(result)
            raise typer.Exit(result["exit_code"])
        result = command(**options) or {}
        if result.get("exit_code", 0):
            raise typer.Exit(result["exit_code"])

    json_option = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False)
    return as_command(run, command, (*parameters.values(), json_option), hints)


class Command(TyperCommand):
    """A command whose --help names no type behind --help itself."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option --help."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option


def without_types_of_flags(command: Callable[..., Any]) -> None:
    """Let --help name no type behind an option that takes no value."""
    for hint in get_type_hints(command, include_extras=True).values():
        value_type, *metadata = get_args(hint) or (hint,)
        for option in metadata:
            if value_type is bool and isinstance(option, OptionInfo):
                option.metavar = ""


def _recorded(command: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Run a command, and return what it prints and returns as one JSON object."""
    exit_code = 0
    returned = None
    with redirect_stdout(StringIO()) as printed, console.recorded_tables() as tables:
        try:
            returned = command(**options)
        except typer.Exit as error:
            exit_code = error.exit_code
    result = {
        "exit_code": exit_code,
        "lines": printed.getvalue().splitlines(),
        "tables": tables,
    }
    return result | (returned or {})
