"""Config files of other trainers, read whole: every value by its dotted key, files that they refer to included.

Shell, batch and PowerShell files that start a trainer give the options of their commands; no line of them is run.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.config.load import config_text, parsed, refuse_unreadable
from videotune.config.suggestions import flat_leaves, other_trainer, plain
from videotune.errors import VideotuneError

MOST_KEYS = 2_000
MOST_FILES = 64
UPWARD = 6
"""Keys of a config, files that it may refer to, and folders, its own first, that its paths may be relative to."""


@dataclass(frozen=True)
class ForeignConfig:
    """A config of another trainer.

    ``values``: every leaf by its dotted key, such as "datasets.0.num_frames"; lists of scalars and lists of such lists
    are one leaf. A file that is referred to has its leaves under the key that refers to it ("dataset.directory.0.path");
    so has a file of that kind that is given alone.
    ``files``: what was read. ``missing``: key and path of the files that are referred to and are not there.
    """

    trainer: str
    values: Mapping[str, Any]
    files: tuple[Path, ...]
    missing: tuple[tuple[str, str], ...]


def read_foreign_config(paths: Sequence[Path]) -> ForeignConfig:
    """Read configs of one run of another trainer, in any order, with the files that they refer to.

    Raises VideotuneError for a file that cannot be read, that is no config of a known trainer, and for files of several
    trainers or of several runs.
    """
    given = [_known(path) for path in dict.fromkeys(paths)]
    trainers = sorted({kind["trainer"] for _, _, kind in given})
    parts = {kind["part"]: leaves for _, leaves, kind in given if "part" in kind}
    mains = [one for one in given if "part" not in one[2]]
    if len(trainers) != 1 or len(parts) + len(mains) < len(given):
        raise VideotuneError(
            f"the files are of {' and '.join(trainers)}, or of several runs: give those of one run"
        )
    values: dict[str, Any] = {}
    files = [path for path, _, _ in given]
    missing = list[tuple[str, str]]()
    for path, leaves, kind in sorted(
        mains, key=lambda one: "script" in one[1]
    ):  # a command line is above a file
        values |= leaves
        for key, name in _references(leaves, kind.get("refers", ())):
            found = (
                None if key in parts or len(files) >= MOST_FILES else _found(name, path.parent)
            )
            if found is not None:
                inner = flat_leaves(parse_config_file(found))
                whole = key in kind.get("whole", ())
                values = (
                    {**inner, **values}
                    if whole
                    else values | {f"{key}.{one}": inner[one] for one in inner}
                )
                files.append(found)
            elif key not in parts:
                missing.append((key, name))
    for key, leaves in parts.items():
        values |= {f"{key}.{name}": value for name, value in leaves.items()}
    if len(values) > MOST_KEYS:
        raise VideotuneError(
            f"{paths[0]} has {len(values):,} keys; at most {MOST_KEYS:,} are read"
        )
    return ForeignConfig(trainers[0], values, tuple(files), tuple(missing))


def parse_config_file(path: Path) -> Any:
    """The value of a JSON, YAML or TOML file, or the options of a command line in any other.

    Raises VideotuneError with one sentence.
    """
    text = config_text(path)
    known = path.suffix.lower() in (".json", ".yaml", ".yml", ".toml") or text.lstrip()[:1] in (
        "{",
        "[",
    )
    value = parsed(text, path) if known else parse_options(text, path)
    refuse_unreadable(value, str(path))
    return value


def _known(path: Path) -> tuple[Path, dict[str, Any], Mapping[str, Any]]:
    """A file, its leaves without leading dashes, and what kind of config it is."""
    leaves = {
        re.sub("^-+", "", key): value
        for key, value in flat_leaves(parse_config_file(path)).items()
    }
    if (kind := other_trainer(leaves)) is None:
        raise VideotuneError(
            f"{path} is no config that videotune import reads: docs/interop.md lists the trainers"
        )
    return path, leaves, kind


def _references(leaves: Mapping[str, Any], refers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Key and path of each file that a config refers to; of a list of paths each has its index."""
    for key, value in ((key, leaves[key]) for key in leaves if plain(key) in refers):
        names = (
            [(f"{key}.{i}", one) for i, one in enumerate(value)]
            if isinstance(value, list)
            else [(key, value)]
        )
        yield from ((key, one) for key, one in names if isinstance(one, str) and one)


def _found(name: str, folder: Path) -> Path | None:
    """The file that a name means, seen from the config's folder, one above it, or the working folder; None: not there."""
    folders = [*[folder.resolve(), *folder.resolve().parents][:UPWARD], Path()]
    return next((path / name for path in folders if os.path.isfile(path / name)), None)


_BEFORE = (
    (r"(?im)^[ \t]*(?:#|::|rem[ \t]).*$", ""),
    (r"[\\^`][ \t]*\r?\n", " "),  # lines that continue: sh, cmd, PowerShell
    (r"(?m)^[ \t]*\$(?:env:)?(\w+)[ \t]*=[ \t]*", r"\1="),  # PowerShell's assignments
)
_TOKEN = re.compile(
    r"""[ \t\r]*(?:(\#[^\n]*)|(\n|[();|&<>]+)|((?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"'();|&<>\\])+)|$|(.))""",
    re.DOTALL,
)
_PIECE = re.compile(r""""((?:\\.|[^"\\])*)"|'([^']*)'|((?:\\.|[^"'\\])+)""", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?\}|\$(\w+)|%(\w+)%")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

MOST = 50_000
"""Letters of one word, and words of one array: variables that name each other could grow without bound."""


def parse_options(text: str, path: Path) -> dict[str, Any]:
    """The options of the commands in a file, typed, without their dashes.

    A flag without a value is True; several values of one flag are a list. Options before the name of a Python script are
    the launcher's: ``launcher.mixed_precision``. ``script`` is the file name of the script that trains. Commands without
    a Python script count where no command has one.
    Raises VideotuneError for a quote without an end and for words that grow without bound.
    """
    found: dict[str, Any] = {}
    commands = list(_commands(text, path))
    for command in [
        some for some in commands if any(word.endswith(".py") for word in some)
    ] or commands:
        place = next((i for i, word in enumerate(command) if word.endswith(".py")), -1)
        found |= {
            f"launcher.{name}": value
            for name, value in _options(command[: max(place, 0)]).items()
        }
        found |= _options(command[place + 1 :])
        if place >= 0 and ("script" not in found or "train" in Path(command[place]).name):
            found["script"] = re.split(r"[/\\]", command[place])[-1]
    return found


def _options(words: list[str]) -> dict[str, Any]:
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if option := re.fullmatch(r"--?([A-Za-z_][\w.-]*)?(?:=(.*))?", word, re.DOTALL):
            name = (option[1] or "").replace("-", "_")
            found[name] = [] if option[2] is None else [option[2]]
        elif name:
            found[name].append(word)
    several = {
        name: [parse_scalar(word) for word in words] for name, words in found.items() if name
    }
    return {
        name: True if not some else some[0] if len(some) == 1 else some
        for name, some in several.items()
    }


def parse_scalar(text: str) -> Any:
    """A word as a bool or a number where it reads as one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    number = len(text) <= 40 and _NUMBER.fullmatch(text)
    return text if not number else float(text) if set(text) & set(".eE") else int(text)


def _commands(text: str, path: Path) -> Iterator[list[str]]:
    """The words of each command, with variables of the same file put in; ``X=(…)`` is an array."""
    variables: dict[str, list[str]] = {}
    command: list[str] = []
    array: list[str] | None = None
    name = ""
    opened = False
    for mark, word in _tokens(text, path):
        assigned = (
            re.fullmatch(r"(['\"]?)([A-Za-z_]\w*)\+?=(.*)", word, re.DOTALL)
            if not command
            else None
        )
        if array is not None:
            array.extend(_expanded(word, variables, path))
            array = None if ")" in mark or len(array) > MOST else array
        elif opened and mark == "(":
            array = variables[name] = []
        elif mark:
            yield command
            command = []
        elif assigned:
            name = assigned[2]
            value = assigned[1] + assigned[3]
            variables[name] = [" ".join(_expanded(value, variables, path))] if value else []
        elif command or word.lower() not in ("set", "export", "eval", "local"):
            command.extend(_expanded(word, variables, path))
        opened = bool(assigned and not assigned[3])
    yield command


def _expanded(word: str, variables: dict[str, list[str]], path: Path) -> list[str]:
    """The words that one word of a file stands for, without its quotes."""
    whole = _VARIABLE.fullmatch(word.strip('"'))
    known = variables.get(whole[whole.lastindex or 0]) if whole else None
    if known is not None and ("[" in word or not word.startswith('"')):
        inner = [one for text in known for _, one in _tokens(text, path)]
        return (
            known
            if "[" in word
            else [part for one in inner for part in _expanded(one, {}, path)]
        )

    def value(found: re.Match[str]) -> str:
        return " ".join(variables.get(found[found.lastindex or 0], [found[0]]))

    parts = [
        (single, _VARIABLE.sub(value, double or plain))
        for double, single, plain in _PIECE.findall(word)
    ]
    text = "".join(
        single or re.sub(r"\\(.)", r"\1", rest, flags=re.DOTALL) for single, rest in parts
    )
    if len(text) > MOST:
        raise VideotuneError(f"{path}: a word of a command grows beyond {MOST:,} letters")
    return [text] if word else []


def _tokens(text: str, path: Path) -> Iterator[tuple[str, str]]:
    """(mark, "") for ends of lines and operators, ("", word) for words, which keep their quotes."""
    for pattern, instead in _BEFORE:
        text = re.sub(pattern, instead, text)
    if re.search(r"\b[A-Za-z]:\\", text):  # paths of Windows: a backslash escapes nothing
        text = text.replace("\\", "\\\\")
    for token in _TOKEN.finditer(text):
        if token[4]:
            line = text.count("\n", 0, token.end()) + 1
            raise VideotuneError(
                f"{path}: the command in line {line} cannot be read; is a quote not closed?"
            )
        yield token[2] or "", token[3] or ""
