"""Read config files of other trainers, with the files that they refer to, as dotted
keys.

Of shell, batch and PowerShell files that start a trainer, the options of the commands
are read; no line of them is executed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from videotune.bounds import CONFIG_BYTES
from videotune.config.load import config_text, parsed, refuse_unreadable
from videotune.config.suggestions import flat_leaves, other_trainer, plain
from videotune.errors import VideotuneError
from videotune.files import size_text
from videotune.interop import files_here
from videotune.interop.command_files import parse_options
from videotune.interop.files_here import seen_within
from videotune.pages import docs_page

MAX_KEYS = 2_000
"""Keys of a config."""

MAX_FILES = 64
"""Files that a config may refer to."""

MAX_BYTES = 4 * CONFIG_BYTES
"""Bytes of all files of a config."""

MAX_FOLDERS = 6
"""Folders, its own first, that a config's paths may be relative to."""

PROMPT_SUFFIX = ".txt"
"""Ending of a file with a prompt in each line."""

_CONTROL = re.compile(r"[\x07\x08\t\x0b\x0c\r\n\x1b]")
_DRIVE = re.compile(r"[A-Za-z]:[\\/\x00-\x1f]")
_FILE_NAME = re.compile(r"\.(safetensors|pth|pt|ckpt|bin|toml|json|ya?ml)$", re.I)
_PATH_KEY = re.compile(r"(path|folder|dir|directory|file|dit|vae)$", re.IGNORECASE)
"""Keys and values that are paths, as far as names show it."""

_CONFIG_SUFFIXES = (".json", ".yaml", ".yml", ".toml")


@dataclass(frozen=True)
class ForeignConfig:
    """A config of another trainer."""

    trainer: str

    values: Mapping[str, Any]
    """Every leaf by its dotted key, such as "datasets.0.num_frames".

    Lists of scalars and lists of such lists are one leaf. A file that is referred to
    has its leaves under the key that refers to it ("dataset.directory.0.path"), also if
    it is passed by itself.
    """

    files: tuple[Path, ...]
    """The files that were read."""

    missing: tuple[tuple[str, str], ...]
    """Key and path of files that are referred to and do not exist."""

    within: Path | None = None
    """The folder below which files may be seen; None for any."""


class _ConfigFile(NamedTuple):
    path: Path

    leaves: dict[str, Any]
    """Values by dotted key, without leading dashes."""

    kind: Mapping[str, Any]
    """The entry of other_trainers.json that the file matches."""

    @property
    def is_part(self) -> bool:
        """Whether a main config refers to files of this kind."""
        return "part" in self.kind


def read_foreign_config(
    paths: Sequence[Path], *, within: Path | None = None
) -> ForeignConfig:
    """Read the configs of one run of another trainer, with the files that they refer
    to.

    Args:
        paths: the files, in any order.
        within: a folder; files outside of it are not read, also through a link. None:
            any file is read.

    Raises:
        VideotuneError: for a file that cannot be read or is not a config of a known
            trainer, and for files of several trainers or runs.
    """
    config_files, texts = _open_configs(paths)
    parts = {file.kind["part"]: file.leaves for file in config_files if file.is_part}
    main_files = [file for file in config_files if not file.is_part]
    has_duplicates = len(parts) + len(main_files) < len(config_files)
    trainer = _trainer_of(config_files, has_duplicates=has_duplicates)

    values: dict[str, Any] = {}
    files = [file.path for file in config_files]
    missing = list[tuple[str, str]]()
    byte_count = 0
    # A command line overrides a file.
    main_files.sort(key=lambda file: "script" in file.leaves)
    for config_file in main_files:
        values |= config_file.leaves
        kind = config_file.kind
        folder = config_file.path.parent
        for key, name in _references(config_file.leaves, kind.get("refers", ())):
            if key in parts:
                continue
            is_inline = name.lstrip()[:1] in ("{", "[")
            if is_inline:
                values |= _below(key, flat_leaves(parsed(name, Path(f"{key}.json"))))
                continue
            may_read = len(files) < MAX_FILES
            path = _find_file(name, folder, within) if may_read else None
            if path is None:
                missing.append((key, name))
                continue

            byte_count += path.stat().st_size
            if byte_count > MAX_BYTES:
                raise VideotuneError(
                    f"{paths[0]} refers to files of more than {size_text(MAX_BYTES)}: {key}"
                )
            leaves = flat_leaves(parse_config_file(path))
            if key in kind.get("whole", ()):
                # The file is a config of the same form, and the main config overrides
                # it.
                values = {**leaves, **values}
            else:
                values |= _below(key, leaves)
            files.append(path)

    for key, leaves in parts.items():
        values |= _below(key, leaves)
    for key, path in list(_prompt_files(main_files, values, texts, within)):
        values[f"{key}.lines"] = _prompt_lines(path)
        files.append(path)
    if len(values) > MAX_KEYS:
        raise VideotuneError(
            f"{paths[0]} has {len(values):,} keys; at most {MAX_KEYS:,} are read"
        )
    return ForeignConfig(trainer, values, tuple(files), tuple(missing), within)


def _trainer_of(config_files: Sequence[_ConfigFile], *, has_duplicates: bool) -> str:
    """Return the trainer of all files; VideotuneError if they are of several runs."""
    trainers = sorted({file.kind["trainer"] for file in config_files})
    if len(trainers) != 1 or has_duplicates:
        raise VideotuneError(
            f"the files are of {' and '.join(trainers)}, or of several runs: give those of one run"
        )
    return str(trainers[0])


def _below(key: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{key}.{name}": value for name, value in leaves.items()}


def parse_config_file(path: Path) -> Any:
    """Return the value of a JSON, YAML or TOML file, or the options in a command file.

    Raises:
        VideotuneError: if the file cannot be parsed.
    """
    text = config_text(path)
    has_config_suffix = path.suffix.lower() in _CONFIG_SUFFIXES
    if has_config_suffix or text.lstrip()[:1] in ("{", "["):
        value = parsed(text, path)
    else:
        value = parse_options(text, path)
    refuse_unreadable(value, str(path))
    _refuse_escaped_paths(value, path)
    return value


def _refuse_escaped_paths(value: Any, path: Path) -> None:
    """Raise VideotuneError for a Windows path in which a backslash was an escape.

    Between double quotes ``C:`` and ``\\temp`` are a tab and "emp".
    """
    for key, text in flat_leaves(value).items():
        if not isinstance(text, str):
            continue
        control = _CONTROL.search(text.strip())
        is_path = _DRIVE.match(text) or _PATH_KEY.search(key) or _FILE_NAME.search(text)
        if control and is_path:
            escape = control[0].encode("unicode_escape").decode()
            raise VideotuneError(
                f"{path}: {key} holds a control character where {escape} was written"
                f" ({text[:80]!r}): between double quotes a backslash is an escape. Write the"
                " path with / or between single quotes"
            )


def _open_configs(
    paths: Sequence[Path],
) -> tuple[list[_ConfigFile], dict[str, Path]]:
    """Read config files.

    Returns:
        The configs, and by its name each text that may be a file of prompts.

    Raises:
        VideotuneError: for a file of neither kind.
    """
    config_files = []
    texts = {}
    for path in dict.fromkeys(paths):
        config_file = _open_config(path)
        if config_file is not None:
            config_files.append(config_file)
        elif path.suffix == PROMPT_SUFFIX:
            texts[path.name] = path
        else:
            _refuse_unknown(path)
    if not config_files and texts:
        _refuse_unknown(next(iter(texts.values())))
    return config_files, texts


def _refuse_unknown(path: Path) -> NoReturn:
    """Raise VideotuneError for a file that is not a config."""
    parse_config_file(path)  # a command that cannot be read has a message of its own
    raise VideotuneError(
        f"{path} is not a config that videotune import reads:"
        f" {docs_page('interop')} lists the trainers"
    )


def _open_config(path: Path) -> _ConfigFile | None:
    """Read a config file and detect its kind; None for a text of no known kind."""
    if path.suffix == PROMPT_SUFFIX:
        try:
            file_leaves = flat_leaves(parse_config_file(path))
        except VideotuneError:
            file_leaves = {}  # a text of prompts need not be one of commands
    else:
        file_leaves = flat_leaves(parse_config_file(path))
    leaves = {re.sub("^-+", "", key): value for key, value in file_leaves.items()}
    kind = other_trainer(leaves)
    return None if kind is None else _ConfigFile(path, leaves, kind)


def _last_part(name: str) -> str:
    """Return the file's name of a path of any system."""
    return re.split(r"[/\\]", name)[-1]


def _prompt_files(
    main_files: Sequence[_ConfigFile],
    values: Mapping[str, Any],
    texts: Mapping[str, Path],
    within: Path | None,
) -> Iterator[tuple[str, Path]]:
    """Yield key and path of each text of prompts that a config names.

    Args:
        main_files: the configs.
        values: the values of all keys.
        texts: texts that were passed with the configs, by their names.
        within: a folder that files which were not passed must be in.

    Raises:
        VideotuneError: for a text that no config names.
    """
    unnamed = dict(texts)
    for config_file in main_files:
        prompt_keys = config_file.kind.get("prompts", ())
        for key, name in _references(values, prompt_keys):
            path = unnamed.pop(_last_part(name), None)
            if path is None:
                path = _find_file(name, config_file.path.parent, within)
            if path is not None and path.suffix == PROMPT_SUFFIX:
                yield key, path
    for path in unnamed.values():
        _refuse_unknown(path)


def _prompt_lines(path: Path) -> list[str]:
    """Read the prompts of a text file, a line each, without blank lines and comments."""
    lines = [line.strip() for line in config_text(path).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _references(
    leaves: Mapping[str, Any], refers: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield key and path of each file that a config refers to; list items have an
    index.
    """
    for key, value in leaves.items():
        if plain(key) not in refers:
            continue
        entries = [(key, value)]
        if isinstance(value, list) and "script" in leaves:
            # A path with blanks and without quotes, as in a pasted log.
            entries = [(key, " ".join(map(str, value)))]
        elif isinstance(value, list):
            entries = [(f"{key}.{i}", item) for i, item in enumerate(value)]
        for entry_key, path in entries:
            if isinstance(path, str) and path:
                yield entry_key, path


def _find_file(name: str, folder: Path, within: Path | None) -> Path | None:
    """Return the file that a name refers to, or None if it does not exist or is not
    below ``within``.

    The name may be relative to the config's folder, one above it, or the working
    folder.
    """
    config_folder = folder.resolve()
    folders = [config_folder, *config_folder.parents][:MAX_FOLDERS]
    with seen_within(within):
        for base_folder in [*folders, Path()]:
            path = base_folder / name
            if files_here.is_file(path):
                return path
    return None
