"""Parse the options of commands in shell, batch and PowerShell files; nothing is run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError

_CLEANUPS = (
    (r"(?im)^[ \t]*(?:#|::|rem[ \t]).*$", ""),
    # continued lines of sh, cmd and PowerShell
    (r"[\\^`][ \t]*\r?\n", " "),
    # assignments of PowerShell
    (r"(?m)^[ \t]*\$(?:env:)?(\w+)[ \t]*=[ \t]*", r"\1="),
)
"""Patterns that are replaced before the text is split into tokens."""

_TOKEN = re.compile(
    r"""[ \t\r]*(?:(\#[^\n]*)|(\n|[();|&<>]+)"""
    r"""|((?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"'();|&<>\\])+)|$|(.))""",
    re.DOTALL,
)
_QUOTED_PART = re.compile(
    r""""((?:\\.|[^"\\])*)"|'([^']*)'|((?:\\.|[^"'\\])+)""", re.DOTALL
)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?\}|\$(\w+)|%(\w+)%")
_ASSIGNMENT = re.compile(r"(['\"]?)([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_OPTION = re.compile(r"--?([A-Za-z_][\w.-]*)?(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_ASSIGNING_COMMANDS = ("set", "export", "eval", "local")

MAX_LENGTH = 50_000
"""Limit of an argument's characters and an array's items, as variables can nest."""


def parse_options(text: str, path: Path) -> dict[str, Any]:
    """Return the options of the commands in a file, typed, without their dashes.

    A flag without a value is True; several values of one flag are a list. Options
    before the name of a Python script belong to the launcher:
    ``launcher.mixed_precision``. ``script`` is the file
        name of the script that trains. Commands without a Python script count only if
        no command has one.

    Args:
        text: the file's text.
        path: the file, for messages.

    Raises:
        VideotuneError: for an unclosed quote, and for arguments that grow without
            bound.
    """
    commands = list(_commands(text, path))
    python_commands = [
        command for command in commands if _script_index(command) is not None
    ]

    options: dict[str, Any] = {}
    for command in python_commands or commands:
        index = _script_index(command)
        if index is None:
            options |= _command_options(command)
            continue

        for name, value in _command_options(command[:index]).items():
            options[f"launcher.{name}"] = value
        options |= _command_options(command[index + 1 :])
        script = command[index]
        if "script" not in options or "train" in Path(script).name:
            options["script"] = re.split(r"[/\\]", script)[-1]
    return options


def _script_index(command: list[str]) -> int | None:
    """Return the position of the first Python script in a command, or None."""
    for i, argument in enumerate(command):
        if argument.endswith(".py"):
            return i
    return None


def _command_options(arguments: list[str]) -> dict[str, Any]:
    texts: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        option = _OPTION.fullmatch(argument)
        if option:
            name = (option[1] or "").replace("-", "_")
            texts[name] = [] if option[2] is None else [option[2]]
        elif name:
            texts[name].append(argument)

    options: dict[str, Any] = {}
    for name, option_texts in texts.items():
        if not name:
            continue
        values = [parse_scalar(value) for value in option_texts]
        if not values:
            options[name] = True
        else:
            options[name] = values[0] if len(values) == 1 else values
    return options


def parse_scalar(text: str) -> Any:
    """Return text as a bool or a number if it reads as one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    is_number = len(text) <= 40 and _NUMBER.fullmatch(text) is not None
    if not is_number:
        return text
    return float(text) if set(text) & set(".eE") else int(text)


def _commands(text: str, path: Path) -> Iterator[list[str]]:
    """Yield the arguments of each command, with the file's variables substituted.

    ``X=(…)`` is an array.
    """
    variables: dict[str, list[str]] = {}
    command: list[str] = []
    array: list[str] | None = None
    variable = ""
    may_open_array = False
    for operator, token in _tokens(text, path):
        assignment = None if command else _ASSIGNMENT.fullmatch(token)

        if array is not None:
            array.extend(_expand(token, variables, path))
            if ")" in operator or len(array) > MAX_LENGTH:
                array = None
        elif may_open_array and operator == "(":
            array = []
            variables[variable] = array
        elif operator:
            yield command
            command = []
        elif assignment:
            variable = assignment[2]
            value = assignment[1] + assignment[3]
            # The value may use the variable itself.
            values = [" ".join(_expand(value, variables, path))] if value else []
            variables[variable] = values
        elif command or token.lower() not in _ASSIGNING_COMMANDS:
            command.extend(_expand(token, variables, path))

        may_open_array = assignment is not None and not assignment[3]
    yield command


def _expand(token: str, variables: dict[str, list[str]], path: Path) -> list[str]:
    """Return the arguments that a token stands for, without its quotes."""
    variable = _VARIABLE.fullmatch(token.strip('"'))
    values = variables.get(variable[variable.lastindex or 0]) if variable else None
    is_array = "[" in token
    if values is not None and is_array:
        return values
    if values is not None and not token.startswith('"'):
        # An unquoted variable is split into arguments.
        arguments = []
        for text in values:
            for _, inner_token in _tokens(text, path):
                arguments += _expand(inner_token, {}, path)
        return arguments

    def substitute(match: re.Match[str]) -> str:
        return " ".join(variables.get(match[match.lastindex or 0], [match[0]]))

    argument = ""
    for double_quoted, single_quoted, unquoted in _QUOTED_PART.findall(token):
        substituted = _VARIABLE.sub(substitute, double_quoted or unquoted)
        argument += single_quoted or re.sub(
            r"\\(.)", r"\1", substituted, flags=re.DOTALL
        )
    if len(argument) > MAX_LENGTH:
        raise VideotuneError(
            f"{path}: an argument of a command grows beyond {MAX_LENGTH:,} characters"
        )
    return [argument] if token else []


def _tokens(text: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield (operator, "") for line ends and operators, ("", token) for others, with
    quotes.
    """
    for pattern, replacement in _CLEANUPS:
        text = re.sub(pattern, replacement, text)
    # In Windows paths a backslash escapes nothing.
    if re.search(r"\b[A-Za-z]:\\", text):
        text = text.replace("\\", "\\\\")

    for token in _TOKEN.finditer(text):
        if token[4]:
            line = text.count("\n", 0, token.end()) + 1
            raise VideotuneError(
                f"{path}: the command in line {line} cannot be read; is a quote not closed?"
            )
        yield token[2] or "", token[3] or ""
