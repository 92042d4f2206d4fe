"""Shell, batch and PowerShell files that start a trainer -> the options of their commands; no line of them is run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError

_BEFORE = (
    (r"(?im)^[ \t]*(?:#|::|rem[ \t]).*$", ""),
    (r"[\\^`][ \t]*\r?\n", " "),  # lines that continue: sh, cmd, PowerShell
    (r"(?m)^[ \t]*\$(?:env:)?(\w+)[ \t]*=[ \t]*", r"\1="),  # PowerShell's assignments
)
_TOKEN = re.compile(
    r"""[ \t\r]*(?:(\#[^\n]*)|(\n|[();|&<>]+)|((?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"'();|&<>\\])+)|$)""", re.DOTALL
)
_PIECE = re.compile(r""""((?:\\.|[^"\\])*)"|'([^']*)'|((?:\\.|[^"'\\])+)""", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?\}|\$(\w+)|%(\w+)%")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

MOST = 50_000
"""Letters of one word, and words of one array: variables that name each other could grow without bound."""


def options_of(text: str, path: Path) -> dict[str, Any]:
    """The options of the commands in a file, typed, without their dashes.

    A flag without a value is True; several values of one flag are a list. Options before the name of a Python script are
    the launcher's: ``launcher.mixed_precision``. ``script`` is the file name of the script that trains. Commands without
    a Python script count where no command has one.
    Raises VideotuneError for a quote without an end and for words that grow without bound.
    """
    found: dict[str, Any] = {}
    commands = list(_commands(text, path))
    for command in [some for some in commands if any(word.endswith(".py") for word in some)] or commands:
        place = next((i for i, word in enumerate(command) if word.endswith(".py")), -1)
        launcher = _options(command[:place]) if place >= 0 else {}
        found |= {f"launcher.{name}": value for name, value in launcher.items()} | _options(command[place + 1 :])
        if place >= 0 and ("script" not in found or "train" in Path(command[place]).name):
            found["script"] = re.split(r"[/\\]", command[place])[-1]
    return found


def _options(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    name, values = "", list[str]()
    for word in [*words, "--"]:
        option = re.fullmatch(r"--?([A-Za-z_][\w.-]*)?(?:=(.*))?", word, re.DOTALL)
        if option is None:
            values.append(word)
            continue
        if name:
            several = [typed(value) for value in values]
            found[name] = True if not several else several[0] if len(several) == 1 else several
        name, values = (option[1] or "").replace("-", "_"), [] if option[2] is None else [option[2]]
    return found


def typed(text: str) -> Any:
    """A word as a bool or a number where it reads as one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if len(text) > 40 or not _NUMBER.fullmatch(text):
        return text
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _commands(text: str, path: Path) -> Iterator[list[str]]:
    """The words of each command, with variables of the same file put in; ``X=(…)`` is an array."""
    variables: dict[str, list[str]] = {}
    command: list[str] = []
    array: list[str] | None = None
    name, opened = "", False
    for mark, word in _tokens(text, path):
        assigned = re.fullmatch(r"(['\"]?)([A-Za-z_]\w*)\+?=(.*)", word, re.DOTALL) if not command else None
        if array is not None:
            array.extend(_expanded(word, variables, path))
            array = None if ")" in mark or len(array) > MOST else array
        elif opened and mark == "(":
            array = variables[name] = []
        elif mark:
            yield command
            command = []
        elif assigned:
            name, value = assigned[2], assigned[1] + assigned[3]
            variables[name] = [" ".join(_expanded(value, variables, path))] if value else []
        elif command or word.lower() not in ("set", "export", "eval", "local"):
            command.extend(_expanded(word, variables, path))
        opened = bool(assigned and not assigned[3])
    yield command


def _expanded(word: str, variables: dict[str, list[str]], path: Path) -> list[str]:
    """The words that one word of a file stands for, without its quotes."""
    whole = _VARIABLE.fullmatch(word.strip('"'))
    known = variables.get(next(filter(None, whole.groups()))) if whole else None
    if known is not None and ("[" in word or not word.startswith('"')):
        return list(known) if "[" in word else [part for text in known for part in _split(text, path)]

    def value(found: re.Match[str]) -> str:
        return " ".join(variables.get(next(filter(None, found.groups())), [found[0]]))

    parts = []
    for double, single, plain in _PIECE.findall(word):
        parts.append(single or re.sub(r"\\(.)", r"\1", _VARIABLE.sub(value, double or plain), flags=re.DOTALL))
    text = "".join(parts)
    if len(text) > MOST:
        raise VideotuneError(f"{path}: a word of a command grows beyond {MOST:,} letters")
    return [text] if word else []


def _split(text: str, path: Path) -> list[str]:
    return [part for _, word in _tokens(text, path) for part in _expanded(word, {}, path)]


def _tokens(text: str, path: Path) -> Iterator[tuple[str, str]]:
    """(mark, "") for ends of lines and operators, ("", word) for words, which keep their quotes."""
    for pattern, instead in _BEFORE:
        text = re.sub(pattern, instead, text)
    if re.search(r"\b[A-Za-z]:\\", text):  # paths of Windows: a backslash escapes nothing
        text = text.replace("\\", "\\\\")
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            line = text.count("\n", 0, place) + 1
            raise VideotuneError(f"{path}: the command in line {line} cannot be read; is a quote not closed?")
        place = token.end()
        if token[2] or token[3]:
            yield token[2] or "", token[3] or ""
