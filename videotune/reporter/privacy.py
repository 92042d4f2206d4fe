"""Remove what names this machine from the texts of a page that is sent to others.

Paths become relative to the run or to the dataset; of any other absolute path the last
part stays. Hosts and process numbers go.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

from videotune.reporter.read import Run, at, items, mapping

_SEPARATOR = r"[/\\]"
_PART = r"[^\s\"'`,;:()<>|/\\]"

_ABSOLUTE = re.compile(
    rf"(?<![\w./\\:~-])(?:[A-Za-z]:{_SEPARATOR}|/|\\\\)(?:{_PART}+{_SEPARATOR})+({_PART}*)"
)
"""An absolute path of two parts and more; the group is its last part."""

_USER_TEXTS = frozenset({"prompt", "prompts", "caption", "captions", "negative", "use"})
"""Keys of texts that a user wrote, or that are code. Only known folders are replaced."""

_FILE_KEYS = frozenset({"path", "video", "sheet"})
"""Keys of files of the run. The report opens them, so they stay; ``shown_path`` names
them on the page.
"""


class PathNames:
    """Replaces the folders of a machine by short names.

    Args:
        names: the name of each absolute path; what lies in it keeps its relative path
            behind the name, or alone if the name is empty.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names: list[tuple[re.Pattern[str], str]] = []
        ancestors: dict[str, str] = {}
        for path in names:
            for parent in _pure(path).parents:
                is_named = str(parent) in names
                if len(parent.parts) > 2 and not is_named:
                    ancestors[str(parent)] = "…"

        # The longest first: a dataset may lie in the run folder, or the other way.
        by_path = ancestors | dict(names)
        for path in sorted(by_path, key=len, reverse=True):
            pattern = re.escape(path.rstrip("/\\"))
            before_a_file = re.compile(pattern + _SEPARATOR + r"(?=\S)")
            name_before_a_file = f"{by_path[path]}/" if by_path[path] else ""
            self._names.append((before_a_file, name_before_a_file))

            by_itself = re.compile(pattern + rf"{_SEPARATOR}?(?![\w.-])")
            name_by_itself = by_path[path] or _pure(path).name
            self._names.append((by_itself, name_by_itself))

    def in_text(self, text: str, *, is_user_text: bool = False) -> str:
        """Return a text without absolute paths of the machine."""
        for pattern, name in self._names:
            text = pattern.sub(lambda _, name=name: name, text)  # type: ignore[misc]
        if is_user_text:
            return text
        return _ABSOLUTE.sub(r"…/\1", text)

    def in_value(self, value: Any, keep: frozenset[str] = frozenset()) -> Any:
        """Return a JSON value with all its texts replaced, except those under ``keep``."""
        return self._in_value(value, key="", keep=keep)

    def _in_value(self, value: Any, *, key: str, keep: frozenset[str]) -> Any:
        if isinstance(value, str):
            if key in keep:
                return value
            is_user_text = key in _USER_TEXTS
            return self.in_text(value, is_user_text=is_user_text)
        if isinstance(value, list | tuple):
            return [self._in_value(item, key=key, keep=keep) for item in value]
        if isinstance(value, Mapping):
            replaced = {}
            for name, item in value.items():
                shown_name = self.in_text(str(name), is_user_text=True)
                replaced[shown_name] = self._in_value(item, key=str(name), keep=keep)
            return replaced
        return value


def shareable(run: Run) -> Run:
    """Return a run whose texts name no folder, host or process of this machine."""
    names = PathNames(_names_of(run))

    life = None
    if run.life is not None:
        life = dict(run.life)
        for key in ("pid", "host"):
            life.pop(key, None)
    exports = None
    if run.exports is not None:
        exports = names.in_value(run.exports, _FILE_KEYS)
    compared = None
    if run.compared is not None:
        compared = names.in_value(run.compared, _FILE_KEYS)

    return replace(
        run,
        journal=tuple(names.in_value(record, _FILE_KEYS) for record in run.journal),
        notes=tuple(names.in_text(note) for note in run.notes),
        life=life,
        config=names.in_value(run.config),
        check=names.in_value(run.check),
        plan=names.in_value(run.plan),
        demo=names.in_value(run.demo),
        exports=exports,
        compared=compared,
    )


def _names_of(run: Run) -> dict[str, str]:
    """Return names of the folders that a run knows; empty for the run and its dataset."""
    names = {str(Path.home()): "~"}
    for path in _absolute_paths(run.setting()):
        names[path] = _pure(path).name

    datasets = []
    for dataset in items(run.setting("datasets")):
        path = mapping(dataset)["path"]
        if isinstance(path, str) and _is_absolute(path):
            datasets.append(path)
    names |= names_of_datasets(datasets)
    if not datasets:
        folder = _common_folder(run)
        if folder:
            names[folder] = ""

    destination = at(run.config, "settings", "output_model_destination")
    if isinstance(destination, str) and _is_absolute(destination):
        names[destination] = ""
    names[str(run.folder.absolute())] = ""
    names[str(run.folder.resolve())] = ""
    return names


def names_of_datasets(folders: Sequence[str | Path]) -> dict[str, str]:
    """Return the name of each dataset's folder: empty for only one."""
    texts = [str(folder) for folder in folders]
    if len(texts) == 1:
        return {texts[0]: ""}
    return {text: _pure(text).name for text in texts}


def _common_folder(run: Run) -> str:
    """Return the folder of all clips of a run that does not name its datasets."""
    parents = set()
    for clip in run.clips:
        path = str(clip["path"])
        if _is_absolute(path):
            parents.add(str(_pure(path).parent))
    return min(parents, key=len, default="")


def _absolute_paths(value: Any) -> Iterable[str]:
    """Yield the absolute paths of a JSON value."""
    if isinstance(value, str) and _is_absolute(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _absolute_paths(item)
    elif isinstance(value, list):
        for item in value:
            yield from _absolute_paths(item)


def _is_absolute(text: str) -> bool:
    """Whether a text is an absolute path, of this system or of another."""
    if "\n" in text or len(text) > 4096:
        return False
    path = _pure(text)
    return path.is_absolute() and len(path.parts) > 1


def _pure(path: str) -> PurePath:
    """Return a path of the system that its text belongs to."""
    is_windows = re.match(r"[A-Za-z]:[/\\]|\\\\", path) is not None
    return PureWindowsPath(path) if is_windows else PurePosixPath(path)


def shown_path(run: Run, path: str) -> str:
    """Return how the page names a file of the run: relative to it, else by its name."""
    pure = _pure(path)
    if not pure.is_absolute():
        return path
    for run_folder in (run.folder.absolute(), run.folder.resolve()):
        folder = str(run_folder)
        if pure.is_relative_to(folder):
            return pure.relative_to(folder).as_posix()
    return pure.name


def without_machine(value: Any, folders: Sequence[Path]) -> Any:
    """Return a JSON value with paths relative to the folders of datasets."""
    names = {str(Path.home()): "~"}
    names |= names_of_datasets(folders)
    return PathNames(names).in_value(value)
