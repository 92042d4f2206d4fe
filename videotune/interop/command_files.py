"""Parse the options of commands in shell, batch and PowerShell files; nothing is run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from videotune.bounds import SCRIPT_LETTERS, SCRIPT_WORDS
from videotune.errors import VideotuneError

_CLEANUPS = (
    (r"(?im)^[ \t]*@?(?:#|::|rem[ \t]).*$", ""),
    # continued lines of sh, cmd and PowerShell
    (r"[\\^`][ \t]*\r?\n", " "),
    # assignments of PowerShell
    (r"(?im)^[ \t]*\$(?:env:)?(\w+)[ \t]*(\+?)=[ \t]*", r"\1\2="),
)
"""Patterns that are replaced before the text is split into tokens."""

_TOKEN = re.compile(
    r"""[ \t\r]*(?:(\#[^\n]*)|(\n|[();|&<>]+)"""
    r"""|((?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|\$\((?:[^()]|\([^()]*\))*\)|[^\s"'();|&<>\\])+)"""
    r"""|$|(.))""",
    re.DOTALL,
)
_QUOTED_PART = re.compile(
    r"""("(?:\\.|[^"\\])*")|'([^']*)'|((?:\\.|[^"'\\])+)""", re.DOTALL
)
_VARIABLE = r"\$\{(?:env:)?(\w+)(?:\[[@*]\])?\}|\$(?:env:)?(\w+)|%(\w+)%|!(\w+)!"
_WHOLE_VARIABLE = re.compile(_VARIABLE, re.IGNORECASE)
_PIECE = re.compile(rf"(\\.)|{_VARIABLE}", re.DOTALL | re.IGNORECASE)
_BATCH_SET = re.compile(
    r'^[ \t]*@?set[ \t]+(?:"(\w+)=([^\n]*)"|(\w+)=([^\n&|]*))[ \t\r]*$',
    re.IGNORECASE | re.MULTILINE,
)
_ASSIGNMENT = re.compile(r"(['\"]?)([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--?([A-Za-z_][\w.-]*)?(?:=(.*))?", re.DOTALL)
_LONE_VARIABLE = re.compile(r"@\w+|\$\w+|\$\{\w+(?:\[[@*]\])?\}")
"""An argument that is a variable without a value."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_DRIVE_PATH = re.compile(r"\b[A-Za-z]:\\")
_ASSIGNING_COMMANDS = ("set", "export", "eval", "local")
_WINDOWS_SUFFIXES = (".bat", ".cmd", ".ps1")
_POWERSHELL_OBJECTS = ("@", "[", "New-Object")
"""How values of PowerShell begin that are no text, such as arrays and lists."""

_SHELL_ESCAPES = frozenset('$`"\\\n')
"""What a backslash escapes between double quotes of sh; others keep it."""

MAX_LENGTH = 50_000
"""Limit of an argument's characters."""


def parse_options(text: str, path: Path) -> dict[str, Any]:
    """Return the options of the commands in a file, typed, without their dashes.

    A flag without a value is True; several values of one flag are a list. Options
    before the name of a Python script belong to the launcher:
    ``launcher.mixed_precision``. ``script`` is the file name of the script that trains.
    Commands that prepare a training count only if no script is called a training, and
    those without a Python script only if no command has one.

    Args:
        text: the file's text.
        path: the file, for messages.

    Raises:
        VideotuneError: for an unclosed quote, for several trainings with different
            options, and for arguments that grow without bound.
    """
    commands = [command for command in _Script(text, path).commands() if command]
    python_commands = [
        command for command in commands if _script_index(command) is not None
    ]
    trainings = [command for command in python_commands if _is_training(command)]
    _refuse_several(trainings, path)
    for command in trainings or python_commands:
        _refuse_unread_arguments(command, path)

    options: dict[str, Any] = {}
    for command in trainings or python_commands or commands:
        index = _script_index(command)
        if index is None:
            options |= _command_options(command)
            continue

        for name, value in _command_options(command[:index]).items():
            options[f"launcher.{name}"] = value
        options |= _command_options(command[index + 1 :])
        options["script"] = _script_name(command[index])
    return options


def _script_index(command: list[str]) -> int | None:
    """Return the position of the first Python script in a command, or None."""
    for i, argument in enumerate(command):
        if argument.endswith(".py"):
            return i
    return None


def _script_name(argument: str) -> str:
    return re.split(r"[/\\]", argument)[-1]


def _is_training(command: list[str]) -> bool:
    index = _script_index(command)
    return index is not None and "train" in _script_name(command[index])


def _refuse_several(trainings: list[list[str]], path: Path) -> None:
    """Raise VideotuneError if a file starts trainings that differ.

    The launchers may differ: scripts choose one by an option of theirs.
    """
    different: list[dict[str, Any]] = []
    for command in trainings:
        index = _script_index(command) or 0
        options = _command_options(command[index + 1 :])
        if options not in different:
            different.append(options)
    if len(different) > 1:
        raise VideotuneError(
            f"{path} starts {len(different)} trainings with different options, and one is"
            " translated: copy the lines of one training into a file of their own"
        )


def _refuse_unread_arguments(command: list[str], path: Path) -> None:
    """Raise VideotuneError if a command takes arguments from a variable whose value is
    not known here, such as a list of PowerShell.

    Directly after an option such a variable is its value, but for PowerShell's lists.
    """
    previous = ""
    for argument in command:
        is_variable = _LONE_VARIABLE.fullmatch(argument) is not None
        is_value = _OPTION.fullmatch(previous) is not None
        is_list = argument.startswith("@") or path.suffix.lower() == ".ps1"
        if is_variable and (is_list or not is_value):
            raise VideotuneError(
                f"{path}: {argument} holds arguments that are not known here: write the "
                "options themselves into the training's command"
            )
        previous = argument


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


class _Script:
    """The commands of a file, with the file's own variables substituted."""

    def __init__(self, text: str, path: Path) -> None:
        self._path = path
        self._is_windows = path.suffix.lower() in _WINDOWS_SUFFIXES or bool(
            _DRIVE_PATH.search(text)
        )
        self._is_powershell = path.suffix.lower() == ".ps1"
        for pattern, replacement in _CLEANUPS:
            text = re.sub(pattern, replacement, text)
        self._text = self._with_plain_sets(text)
        self._variables: dict[str, list[str]] = {}
        self._words_left = SCRIPT_WORDS
        self._letters_left = SCRIPT_LETTERS

    def commands(self) -> Iterator[list[str]]:
        """Yield the arguments of each command; ``X=(…)`` is an array."""
        command: list[str] = []
        array: list[str] | None = None
        variable = ""
        may_open_array = False
        for operator, token in self._tokens(self._text):
            assignment = None if command else _ASSIGNMENT.fullmatch(token)

            if array is not None:
                array.extend(self._expand(token))
                if ")" in operator:
                    array = None
            elif may_open_array and operator == "(":
                # Empty, but for an array that += appends to.
                array = self._variables[variable]
            elif operator:
                yield command
                command = []
            elif assignment:
                variable = self._name(assignment[2])
                value = assignment[1] + assignment[4]
                # The value may use the variable itself.
                values = [" ".join(self._expand(value))] if value else []
                if assignment[3]:
                    values = self._appended(variable, values)
                self._variables[variable] = values
                if self._is_powershell and value.startswith(_POWERSHELL_OBJECTS):
                    del self._variables[variable]  # no text: what it holds is not read
            elif command or token.lower() not in _ASSIGNING_COMMANDS:
                command.extend(self._expand(token))

            may_open_array = assignment is not None and not assignment[4]
        yield command

    def _appended(self, variable: str, values: list[str]) -> list[str]:
        """Return the value of a variable to which ``+=`` appends.

        A text is appended to the text; an array follows in parentheses.
        """
        old_values = self._variables.get(variable, [])
        if not values:
            return list(old_values)
        if not old_values:
            return values
        return [*old_values[:-1], old_values[-1] + values[0]]

    def _with_plain_sets(self, text: str) -> str:
        """Return the text with what only Windows has written as in sh.

        There a backslash escapes nothing, and ``set X=a b`` takes the whole line.
        """
        if not self._is_windows:
            return text
        text = text.replace("\\", "\\\\")

        def assignment(match: re.Match[str]) -> str:
            name = match[1] or match[3]
            value = match[2] if match[1] else match[4]
            escaped_value = value.strip().replace('"', '\\"')
            return f'{name}="{escaped_value}"'

        return _BATCH_SET.sub(assignment, text)

    def _name(self, name: str) -> str:
        """Return the name under which a variable is kept."""
        return name.lower() if self._is_windows else name

    def _value(self, match: re.Match[str]) -> list[str] | None:
        """Return the value of a variable that a pattern with ``_VARIABLE`` matches."""
        name = next(filter(None, match.groups()))
        return self._variables.get(self._name(name))

    def _expand(self, token: str) -> list[str]:
        """Return the arguments that a token stands for, without its quotes."""
        variable = _WHOLE_VARIABLE.fullmatch(token.strip('"'))
        values = self._value(variable) if variable else None
        if values is not None and "[" in token:  # an array
            self._count(values)
            return list(values)
        # PowerShell hands a variable on as one argument.
        if values is not None and not self._is_powershell and not token.startswith('"'):
            return self._split(values)

        argument = "".join(self._pieces(token))
        self._count([argument])
        return [argument] if token else []

    def _split(self, values: list[str]) -> list[str]:
        """Return the arguments in the value of a variable without quotes."""
        arguments: list[str] = []
        for text in values:
            self._count([text])
            # The value has had its escapes already.
            for _, token in self._tokens(text.replace("\\", "\\\\")):
                if token:
                    arguments.append("".join(self._pieces(token, substitute=False)))
        self._count(arguments)
        return arguments

    def _pieces(self, token: str, *, substitute: bool = True) -> Iterator[str]:
        """Yield the texts that a token consists of, without quotes and escapes.

        What a variable stands for is text: its backslashes escape nothing.
        """
        length = 0
        for double_quoted, single_quoted, unquoted in _QUOTED_PART.findall(token):
            if single_quoted:
                # All backslashes of a Windows file are doubled.
                yield (
                    single_quoted.replace("\\\\", "\\")
                    if self._is_windows
                    else single_quoted
                )
                continue

            text = double_quoted[1:-1] or unquoted
            end = 0
            for match in _PIECE.finditer(text):
                yield text[end : match.start()]
                end = match.end()
                piece = self._piece(match, bool(double_quoted), substitute=substitute)
                length += len(piece)
                self._refuse_long(length)
                yield piece
            yield text[end:]

    def _piece(self, match: re.Match[str], is_quoted: bool, *, substitute: bool) -> str:
        escape = match[1]
        if escape:
            keeps_backslash = is_quoted and escape[1] not in _SHELL_ESCAPES
            return escape if keeps_backslash else escape[1]
        values = self._value(match) if substitute else None
        return match[0] if values is None else " ".join(values)

    def _tokens(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (operator, "") for line ends and operators, ("", token) for others,
        with quotes.
        """
        for token in _TOKEN.finditer(text):
            if token[4]:
                line = text.count("\n", 0, token.end()) + 1
                raise VideotuneError(
                    f"{self._path}: the command in line {line} cannot be read;"
                    " is a quote not closed?"
                )
            yield token[2] or "", token[3] or ""

    def _count(self, arguments: list[str]) -> None:
        """Raise VideotuneError if the file's arguments grow without bound."""
        self._words_left -= len(arguments)
        for argument in arguments:
            self._letters_left -= len(argument)
            self._refuse_long(len(argument))
        if self._words_left < 0 or self._letters_left < 0:
            raise VideotuneError(
                f"{self._path}: its commands have more than {SCRIPT_WORDS:,} arguments or"
                f" {SCRIPT_LETTERS:,} characters, variables substituted"
            )

    def _refuse_long(self, length: int) -> None:
        if length > MAX_LENGTH:
            raise VideotuneError(
                f"{self._path}: an argument of a command grows beyond {MAX_LENGTH:,} characters"
            )
