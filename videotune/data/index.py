"""What is known of files and of their contents, so that a second scan neither reads nor opens one.

A file is known by its path, size and time of change, a content by the hash of its bytes: a file that was moved or copied is
hashed, and nothing else is asked of it again. The index is one JSON file, with a line for each file and each content:

    {"version", "av", "files": {path: {size, mtime_ns, id}}, "contents": {id + suffix: {"facts" | "problem", "look", …}}}

Where "look" and its like are {"words", "answer" | "problem"}: what was asked and what came of it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from videotune import files

from .facts import REASONS, ClipProblem, Facts
from .look import Look
from .probe import stat_of
from .workers import Lost, Task, Workers, default_workers

INDEX_VERSION = 4
"""Raised whenever ``probe``, ``look`` or ``scenes`` would say something else of the same file."""

SAVE_EVERY = 60.0
"""Seconds of a long scan after which what is known so far is written down."""

SLOWEST_DISK = 10e6
"""Bytes a second: beyond the usual time limit a file gets as long as this takes, since all of it is hashed."""

SLOWEST_DECODER = 20.0
"""Seconds for each second of a clip, beyond the usual time limit: one thread on 8K is about so slow."""

AHEAD = 64
"""Clips asked of the workers before their turn: one that hangs holds up the others only when so many wait behind it."""

Progress = Callable[[int, int, str], None]
"""Told (how many files are done, of how many, which is next)."""

Row = dict[str, Any]

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What an index can raise that is damaged, or that a dataset brought."""


_SOUND: Mapping[str, Callable[[Any], Any]] = {
    "look": Look.from_json,
    "scenes": lambda cuts: Look.from_json({"until": 0.0, "cuts": cuts, "signatures": ()}),
}
"""What fails on a task's remembered answer where that is no such answer."""


@dataclass(frozen=True)
class Known:
    """A file's id (a hash of its bytes), and its facts or the problem (reason, detail) that it is."""

    id: str
    facts: Facts | None = None
    problem: tuple[str, str] | None = None


@dataclass
class _Index:
    """The index, as it was read and as it grows; ``changed`` since it was written."""

    files: dict[str, Row]
    contents: dict[str, Row]
    notes: list[str]
    changed: bool


def identify(
    paths: Sequence[Path],
    roots: Sequence[Path],
    index_path: Path | None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> tuple[list[Known], list[str]]:
    """What each file is, from the index where size and time of change agree, else by hashing and probing it.

    The index is written anew, whole, when something changed: at the end, every minute, and when the scan is interrupted.
    Entries of files below ``roots`` that are gone are dropped; others stay. What may be otherwise next time (rights, a
    decoder that crashed or hung) is told, not remembered. No worker is started when everything is known. Also returns
    notes: an index that was damaged, or cannot be written, is said.
    """
    index = _read(index_path)
    remembered = [_remembered(path, index, index_path) for path in paths]
    unknown = [(path, stamp) for path, (stamp, what) in zip(paths, remembered, strict=True) if what is None]
    known: list[Known] = []
    with _kept(index, index_path) as keep, closing(_examine(unknown, index, workers)) as answers:
        for done, (path, (stamp, what)) in enumerate(zip(paths, remembered, strict=True)):
            if progress is not None:
                progress(done, len(paths), str(path))
            known.append(_learn(path, stamp, next(answers), index) if what is None else what)
            keep()
        if progress is not None:
            progress(len(paths), len(paths), "")
        _forget_gone(
            index, {_name(path) for path in paths}, roots
        )  # not earlier: a moved file's content is known by it
    return known, index.notes


def recall(
    task: str,
    known: Sequence[Known],
    words: Mapping[str, Any],
    index_path: Path | None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> list[Any]:
    """For each of ``known`` the JSON-like answer of a worker's task ("look", "scenes"), or None where there are no facts.

    ``words`` are the task's beside the facts. An answer comes from the index if the same was asked there, with an
    ``until`` that reaches as far or beyond the clip's end; else from the workers, and is then remembered. A ClipProblem is
    an answer too; one that is Lost is not remembered, nor is what was said of a file that has changed since ``identify``.
    The index is written as ``identify`` does; clips that it does not hold are asked each time.
    """
    words = json.loads(json.dumps(words))  # as the index will give them back
    index = _read(index_path)
    clips = {_key(item.id, item.facts.path): item.facts for item in known if item.facts is not None}
    answers: dict[str, Any] = {}
    for key, facts in clips.items():
        try:
            if (row := index.contents.get(key, {}).get(task)) is not None and _covers(row, words, facts):
                answers[key] = _problem(row) if "problem" in row else row["answer"]
                if "answer" in row:
                    _SOUND[task](row["answer"])
        except _DAMAGE:
            answers.pop(key, None)  # it is asked again
    missing = [facts for key, facts in clips.items() if key not in answers]
    with _kept(index, index_path) as keep, closing(_ask(task, missing, words, workers)) as fresh:
        for done, (key, facts) in enumerate(clips.items()):
            if progress is not None:
                progress(done, len(clips), facts.path)
            if key not in answers:
                answers[key] = next(fresh)
                if key in index.contents and not isinstance(answers[key], Lost) and _is_unchanged(facts, index):
                    index.contents[key] = {**index.contents[key], task: {"words": words, **_outcome(answers[key])}}
                    index.changed = True
            keep()
        if progress is not None:
            progress(len(clips), len(clips), "")
    return [None if item.facts is None else answers[_key(item.id, item.facts.path)] for item in known]


_ID = re.compile("[0-9a-f]{32}")
"""A content's hash, of which names of files are made."""


def _name(path: Path) -> str:
    return str(path.absolute())


def _key(clip_id: str, path: str) -> str:
    """A content's name: what ``probe`` says depends on the bytes, and on whether the suffix calls them an image."""
    return clip_id + os.path.splitext(path)[1].lower()


def _forget_gone(index: _Index, inside: set[str], roots: Sequence[Path]) -> None:
    """Drop the files that were found below ``roots`` once, and are there no more."""
    folders = tuple(os.path.join(_name(root), "") for root in roots)
    for name in [name for name in index.files if name not in inside and name.startswith(folders)]:
        del index.files[name]
        index.changed = True


def _remembered(path: Path, index: _Index, index_path: Path | None) -> tuple[Row, Known | None]:
    """The file's stamp, and what it is if the index knows that file unchanged."""
    try:
        stat = stat_of(path)
    except ClipProblem as problem:
        return {}, Known("", problem=(problem.reason, problem.detail))
    stamp = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    row = index.files.get(_name(path), {})
    if stamp != {"size": row.get("size"), "mtime_ns": row.get("mtime_ns")}:
        return stamp, None
    key = _key(row["id"], str(path))
    try:
        return stamp, _known(path, row["id"], index.contents[key])
    except _DAMAGE as error:
        index.contents.pop(key, None)
        index.changed = True
        if not index.notes:
            index.notes.append(
                f"the index {index_path} was damaged in part ({type(error).__name__}); those files are read again"
            )
        return stamp, None


def _known(path: Path, clip_id: str, content: Row) -> Known:
    """A content as a file has it; KeyError, TypeError or ValueError where it is damaged."""
    if "problem" in content:
        problem = _problem(content)
        return Known(clip_id, problem=(problem.reason, problem.detail))
    return Known(clip_id, Facts.from_json(content["facts"] | {"path": str(path)}))


def _problem(row: Row) -> ClipProblem:
    """A problem as the index keeps it; ValueError for another."""
    reason, detail = row["problem"]
    if reason not in REASONS or not isinstance(detail, str):
        raise ValueError("no problem that clips have")
    return ClipProblem(reason, detail)


def _examine(unknown: Sequence[tuple[Path, Row]], index: _Index, workers: Workers | None) -> Generator[Any, None, None]:
    """The workers' answers for these files, in order. Contents known by another name are hashed only."""
    if not unknown:
        return
    pool = workers or default_workers()
    alike: dict[tuple[int, str], set[str]] = {(stamp["size"], _key("", str(path))): set() for path, stamp in unknown}
    for name, row in index.files.items():
        if (ids := alike.get((row["size"], _key("", name)))) is not None and _is_sound(row["id"], name, index):
            ids.add(row["id"])

    def tasks() -> Iterator[Task]:
        for path, stamp in unknown:
            known_already = sorted(alike[stamp["size"], _key("", str(path))])
            words = {"path": _name(path), "unless": known_already}
            yield "examine", words, pool.limit + stamp["size"] / SLOWEST_DISK

    yield from pool.ordered(tasks(), AHEAD)


def _is_sound(clip_id: str, name: str, index: _Index) -> bool:
    """Whether the index knows this content, undamaged."""
    try:
        _known(Path(name), clip_id, index.contents[_key(clip_id, name)])
    except _DAMAGE:
        return False
    return True


def _learn(path: Path, stamp: Row, answer: Any, index: _Index) -> Known:
    """Put a worker's answer into the index, unless it may be another next time."""
    if isinstance(answer, ClipProblem):
        return Known("", problem=(answer.reason, answer.detail))
    clip_id, content = answer["id"], {name: value for name, value in answer.items() if name != "id"}
    if not clip_id:
        reason, detail = content["problem"]
        return Known("", problem=(reason, detail))
    key = _key(clip_id, str(path))
    if "facts" in content:
        content["facts"].pop("path")
    if content:
        index.contents[key] = content
    index.files[_name(path)] = {**stamp, "id": clip_id}
    index.changed = True
    return _known(path, clip_id, index.contents[key])


def _ask(
    task: str, clips: Sequence[Facts], words: Mapping[str, Any], workers: Workers | None
) -> Generator[Any, None, None]:
    """The workers' answers about these clips, in order."""
    if not clips:
        return
    pool = workers or default_workers()

    def tasks() -> Iterator[Task]:
        for facts in clips:
            seconds = min(facts.seconds, words.get("until", facts.seconds))
            yield task, {**words, "facts": facts}, pool.limit + SLOWEST_DECODER * seconds

    yield from pool.ordered(tasks(), AHEAD)


def _covers(row: Any, words: Mapping[str, Any], facts: Facts) -> bool:
    """Whether an answer in the index holds for these words: of the same stretch of the clip, so that no run before this
    one decides what is seen."""
    if not isinstance(row, dict) or not {"answer", "problem"} & row.keys():  # damaged
        return False
    then, now = dict(row.get("words", {})), dict(words)
    reached, wanted = then.pop("until", 0.0), now.pop("until", 0.0)
    return then == now and min(reached, facts.seconds) == min(wanted, facts.seconds)


def _outcome(answer: Any) -> Row:
    """An answer as the index keeps it."""
    return {"problem": [answer.reason, answer.detail]} if isinstance(answer, ClipProblem) else {"answer": answer}


def _is_unchanged(facts: Facts, index: _Index) -> bool:
    """Whether the file that was looked at still is the one that the index knows, so that the answer is its content's."""
    row = index.files.get(_name(Path(facts.path)), {})
    try:
        stat = os.stat(facts.path)
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (row.get("size"), row.get("mtime_ns"))


@contextmanager
def _kept(index: _Index, index_path: Path | None) -> Iterator[Callable[[], None]]:
    """Write the index down at the end, whatever that is; gives a function that does so once in a while."""
    written = time.monotonic()

    def keep() -> None:
        nonlocal written
        if time.monotonic() - written >= SAVE_EVERY:
            _write(index, index_path)
            written = time.monotonic()

    try:
        yield keep
    finally:
        _write(index, index_path)


def _write(index: _Index, index_path: Path | None) -> None:
    """Write the index whole if something changed, without contents that no file has any more."""
    if index_path is None or not index.changed:
        return
    used = {_key(row["id"], name) for name, row in index.files.items()}
    contents = {key: row for key, row in index.contents.items() if key in used}
    head = json.dumps({"version": INDEX_VERSION, "av": version("av")})[:-1]
    try:
        files.write_text(index_path, f'{head}, "files": {_lines(index.files)}, "contents": {_lines(contents)}}}\n')
    except OSError as error:
        note = f"{index_path.parent} cannot be written ({error.strerror}): the clips are read again next time"
        index.notes += [note] if note not in index.notes else []
    index.changed = False


def _lines(rows: Mapping[str, Row]) -> str:
    """A JSON object with a line for each of its values; ASCII, since a file's name may be no valid text."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n}"


def _read(index_path: Path | None) -> _Index:
    """The index, or an empty one with a note where it is damaged; another version's is made anew without one."""
    if index_path is None or not index_path.exists():
        return _Index({}, {}, [], changed=False)
    try:
        value = files.read_json(index_path)
        if (value["version"], value["av"]) != (INDEX_VERSION, version("av")):
            return _Index({}, {}, [], changed=True)
        for row in value["files"].values():
            if not (isinstance(row["size"], int) and isinstance(row["mtime_ns"], int) and _ID.fullmatch(row["id"])):
                raise ValueError("a file's row lacks something")
        if not all(isinstance(row, dict) for row in value["contents"].values()):
            raise TypeError("a content is no object")
        return _Index(value["files"], value["contents"], [], changed=False)
    except (OSError, *_DAMAGE) as error:
        note = f"the index {index_path} was damaged ({type(error).__name__}) and has been rebuilt"
        return _Index({}, {}, [note], changed=True)
