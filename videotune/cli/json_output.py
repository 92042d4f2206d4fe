"""``--json`` on commands that have none of their own: what they would print, as one JSON object."""

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from inspect import Parameter, Signature, signature
from io import StringIO
from typing import Any, get_type_hints

import typer

from videotune import console
from videotune.cli.options import AsJson


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
        code, value = 0, None
        with redirect_stdout(StringIO()) as printed, console.recorded_tables() as tables:
            try:
                value = command(**options)
            except typer.Exit as ended:
                code = ended.exit_code
        text = {"exit_code": code, "lines": printed.getvalue().splitlines(), "tables": tables} | (value or {})
        print(json.dumps(text, indent=2, ensure_ascii=False, default=str))
        raise typer.Exit(text["exit_code"])

    added = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False)
    own = (*parameters.values(), added)
    every = [one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in own]
    run.__name__, run.__doc__, run.__signature__ = command.__name__, command.__doc__, Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in every}
    return run
