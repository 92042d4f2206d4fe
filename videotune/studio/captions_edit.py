"""Changes of captions: what stood there before is noted first, so that each change can be undone."""

import json
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.data.captions import split_variants, with_trigger
from videotune.errors import VideotuneError
from videotune.files import append_whole, read_json, read_lines, write_json, write_text
from videotune.queue.jobs import all_jobs, start
from videotune.studio import clips
from videotune.studio.projects import Project

HISTORY = "history.jsonl"
"""Every change of a caption: when, of which clip, by what, the text before and after; ``batch`` joins one action's."""


def history(project: Project, name: str | None = None) -> list[dict[str, Any]]:
    """The changes, the newest first; ``name``: of that clip, by its path without the part of the project."""
    path = project.folder / HISTORY
    lines = _lines(path, path.stat().st_size) if path.is_file() else []
    return [line for line in lines if name in (None, line["name"])]


@lru_cache(maxsize=8)
def _lines(path: Path, size: int) -> list[dict[str, Any]]:
    return [
        line
        for line in reversed(read_lines(path))
        if {"batch", "name", "before", "after", "by"} <= line.keys()
    ]


def change(project: Project, texts: Mapping[str, str], by: str, undoes: str = "") -> int:
    """Write captions by the paths of their clips, a variant a line; returns how many were changed.

    An empty text takes the caption's file away. Raises VideotuneError where a caption stands in a list.
    """
    batch = f"{time.time_ns():x}"
    rows = clips.table(project).rows
    todo = []
    for path, text in texts.items():
        row = clips.found(rows, path)
        after = "\n".join(split_variants(text.replace("\0", "")))
        if row["fixed"]:
            raise VideotuneError(f"{row['name']}: {row['fixed']}")
        if (before := clips.caption_of(row["clip"])) != after or undoes:
            todo.append((row, before, after))
    note(
        project,
        [(row["name"], before, after) for row, before, after in todo],
        batch,
        by,
        undoes,
    )
    for row, _, after in todo:
        place = row["clip"].caption_file or row["clip"].expected_caption
        if after:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text(place, f"{after}\n", durable=len(todo) == 1)
        else:
            place.unlink(missing_ok=True)
    return len(todo)


def note(
    project: Project, changes: list[tuple[str, str, str]], batch: str, by: str, undoes: str = ""
) -> None:
    """Add changes (name, text before, text after) to the history."""
    about = {"batch": batch, "by": by, "undoes": undoes, "time": round(time.time(), 3)}
    lines = [
        json.dumps({**about, "name": name, "before": old, "after": new}) + "\n"
        for name, old, new in changes
    ]
    with (project.folder / HISTORY).open("ab", buffering=0) as file:
        append_whole(file, "".join(lines).encode())


def last(project: Project) -> list[dict[str, Any]]:
    """The newest change that was not undone, with all that belongs to it."""
    lines = history(project)
    gone = {line.get("undoes") for line in lines}
    batch = next(
        (one["batch"] for one in lines if not one.get("undoes") and one["batch"] not in gone),
        None,
    )
    return [line for line in lines if line["batch"] == batch]


def undo(project: Project) -> int:
    """Take the newest change back, except where a caption has changed since; returns how many captions it had."""
    names = {row["name"]: row for row in clips.table(project).rows.values() if not row["fixed"]}
    lines = [line for line in last(project) if line["name"] in names]
    if not lines:
        raise VideotuneError("there is no change of captions to undo")
    now = [
        (line, names[line["name"]]["path"], clips.caption_of(names[line["name"]]["clip"]))
        for line in lines
    ]
    texts = {
        path: line["before"] if text == line["after"] else text for line, path, text in now
    }
    return change(project, texts, "undo", lines[0]["batch"])


def planned(project: Project, words: Mapping[str, str], paths: list[str]) -> dict[str, str]:
    """The captions that a change of all of them would alter: a trigger word in front or taken away, or a text replaced."""
    rows = clips.table(project).rows
    texts = {
        path: _changed(rows[path]["caption"], words)
        for path in paths
        if not rows[path]["fixed"]
    }
    return {
        path: text
        for path, text in texts.items()
        if text.strip() and text != rows[path]["caption"]
    }


def _changed(text: str, words: Mapping[str, str]) -> str:
    word = words["word"].strip()
    lines = text.split("\n")
    if not word or not text:
        return text
    if words["how"] == "add":
        return "\n".join(with_trigger(line, word) for line in lines)
    if words["how"] == "remove":
        return "\n".join(
            re.sub(rf"^{re.escape(word)}(?!\w)[\s,;:]*", "", line, flags=re.IGNORECASE)
            for line in lines
        )
    return re.sub(
        re.escape(words["word"]),
        lambda _: words["to"],
        text,
        flags=0 if words["case"] else re.IGNORECASE,
    )


def begin_captioning(project: Project, words: list[str]) -> None:
    """Start a captioning job, and remember the captions as they were before."""
    before = {row["path"]: row["caption"] for row in clips.table(project).rows.values()}
    write_json(start(project.folder, "caption", words).folder / "before.json", before)


def settle(project: Project) -> None:
    """Finish, once, what jobs have done: written captions go into the history, the film of a cut goes to the bin."""
    for job in [*all_jobs(project.folder, "caption"), *all_jobs(project.folder, "split")]:
        rows = clips.table(project).rows
        done = job.folder / "settled"
        before = job.folder / "before.json"
        if job.running or done.exists():
            continue
        done.touch()
        if job.kind == "split" and job.state == "done" and job.about in rows:
            clips.move(project, [job.about], "bin")
        elif before.is_file():
            old = read_json(before)
            new = [
                (row["name"], old.get(path, ""), row["caption"]) for path, row in rows.items()
            ]
            note(
                project,
                [one for one in new if one[1] != one[2]],
                job.folder.name,
                "auto-caption",
            )
