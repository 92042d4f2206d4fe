"""Editing of captions: each change is recorded with the text before it, so it can be
undone.
"""

import json
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from videotune.data.captions import split_variants, with_trigger
from videotune.errors import VideotuneError
from videotune.files import append_whole, checked, write_json, write_text
from videotune.queue.jobs import QueuedJob, all_jobs, start
from videotune.studio import clip_row, clips
from videotune.studio.projects import Project, lock_of
from videotune.studio.records import CaptionChange, read_record

HISTORY = "history.jsonl"
"""Every change of a caption: when, of which clip, by what, the text before and after.

``batch`` joins the changes of one action.
"""

MAX_HISTORY_BYTES = 64_000_000
"""Bytes of the history that are read, from its end."""

MAX_BACKUP_BYTES = 64_000_000
"""Size limit of the captions as they were before a job."""


def history(project: Project, name: str | None = None) -> list[CaptionChange]:
    """Return the changes, newest first.

    Args:
        project: the project.
        name: only of the clip of this name; None for all.
    """
    path = project.folder / HISTORY
    if not path.is_file():
        return []
    lines = _read_history(path, path.stat().st_size)
    return [line for line in lines if name in (None, line["name"])]


@lru_cache(maxsize=8)
def _read_history(path: Path, size: int) -> list[CaptionChange]:
    """Return the changes, newest first, without lines that are damaged or torn."""
    with path.open("rb") as file:
        file.seek(max(0, size - MAX_HISTORY_BYTES))
        content = file.read(MAX_HISTORY_BYTES)

    changes: list[CaptionChange] = []
    for line in reversed(content.split(b"\n")):
        try:
            changes.append(checked(CaptionChange, line))
        except ValueError:
            continue
    return changes


def change(
    project: Project, text_by_path: Mapping[str, str], by: str, undoes: str = ""
) -> int:
    """Write captions and return how many changed.

    Args:
        project: the project.
        text_by_path: new captions by the paths of their clips, one variant per line; an
            empty text deletes the caption file.
        by: what made the change, for the history.
        undoes: the batch that this change undoes.

    Raises:
        VideotuneError: if a caption is in a list of captions.
    """
    with lock_of(project.folder):
        return _change(project, text_by_path, by, undoes)


def _change(
    project: Project, text_by_path: Mapping[str, str], by: str, undoes: str
) -> int:
    batch = f"{time.time_ns():x}"
    rows = clips.table(project).rows

    edits = []
    for path, text in text_by_path.items():
        row = clips.find_clip(rows, path)
        after = "\n".join(split_variants(text.replace("\0", "")))
        if row["caption_fixed"]:
            raise VideotuneError(f"{row['name']}: {row['fixed']}")

        before = clip_row.caption_of(row["clip"])
        if before != after or undoes:
            edits.append((row, before, after))

    # The history is written first, so an interrupted change can be undone.
    changes = [(row["name"], before, after) for row, before, after in edits]
    record_changes(project, changes, batch, by, undoes)
    for row, _, after in edits:
        caption_path = row["clip"].caption_file or row["clip"].expected_caption
        _write_caption(caption_path, after, durable=len(edits) == 1)
    return len(edits)


def _write_caption(path: Path, text: str, *, durable: bool) -> None:
    if not text:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"{text}\n", durable=durable)


def record_changes(
    project: Project,
    changes: list[tuple[str, str, str]],
    batch: str,
    by: str,
    undoes: str = "",
) -> None:
    """Add changes to the history.

    Args:
        project: the project.
        changes: name of the clip, text before, text after.
        batch: id of the action.
        by: what made the change.
        undoes: the batch that it undoes.
    """
    action = {"batch": batch, "by": by, "undoes": undoes, "time": round(time.time(), 3)}
    lines = []
    for name, before, after in changes:
        record = {**action, "name": name, "before": before, "after": after}
        lines.append(json.dumps(record) + "\n")

    with (project.folder / HISTORY).open("ab", buffering=0) as file:
        append_whole(file, "".join(lines).encode())


def latest_change(project: Project) -> list[CaptionChange]:
    """Return the records of the newest action that was not undone."""
    lines = history(project)
    undone_batches = {line.get("undoes") for line in lines}
    for line in lines:
        if not line.get("undoes") and line["batch"] not in undone_batches:
            return [record for record in lines if record["batch"] == line["batch"]]
    return []


def undo(project: Project) -> int:
    """Undo the newest action; return how many captions it had.

    A caption that was changed again since then keeps its text.
    """
    with lock_of(project.folder):
        return _undo(project)


def _undo(project: Project) -> int:
    rows = clips.table(project).rows.values()
    row_by_name = {row["name"]: row for row in rows if not row["caption_fixed"]}
    lines = [line for line in latest_change(project) if line["name"] in row_by_name]
    if not lines:
        raise VideotuneError("there is no change of captions to undo")

    text_by_path = {}
    for line in lines:
        row = row_by_name[line["name"]]
        text = clip_row.caption_of(row["clip"])
        text_by_path[row["path"]] = line["before"] if text == line["after"] else text
    return change(project, text_by_path, "undo", undoes=lines[0]["batch"])


def planned_changes(
    project: Project, edit: Mapping[str, str], paths: list[str]
) -> dict[str, str]:
    """Return the captions that an edit of all of them would change, with their new
    text.

    Args:
        project: the project.
        edit: the edit. ``how`` is "add" or "remove" (a trigger word) or "replace";
            ``word`` is the word; ``to`` its replacement; ``case`` whether upper and
            lower case differ.
        paths: paths of the clips.
    """
    rows = clips.table(project).rows
    text_by_path = {}
    for path in paths:
        row = clips.find_clip(rows, path)
        if row["caption_fixed"]:
            continue
        text = _edited(row["caption"], edit)
        if text.strip() and text != row["caption"]:
            text_by_path[path] = text
    return text_by_path


def _edited(text: str, edit: Mapping[str, str]) -> str:
    trigger = edit["word"].strip()
    lines = text.split("\n")
    if not trigger or not text:
        return text

    if edit["how"] == "add":
        return "\n".join(with_trigger(line, trigger) for line in lines)
    if edit["how"] == "remove":
        pattern = re.compile(rf"^{re.escape(trigger)}(?!\w)[\s,;:]*", re.IGNORECASE)
        return "\n".join(pattern.sub("", line) for line in lines)

    flags = 0 if edit["case"] else re.IGNORECASE
    return re.sub(re.escape(edit["word"]), lambda _: edit["to"], text, flags=flags)


def start_captioning(
    project: Project, arguments: list[str], environment: Mapping[str, str]
) -> None:
    """Start a captioning job and store the captions as they are before it."""
    before = {row["path"]: row["caption"] for row in clips.table(project).rows.values()}
    job = start(project.folder, "caption", arguments, env=environment)
    write_json(job.folder / "before.json", before)


def finish_jobs(project: Project) -> None:
    """Finish ended jobs once: record new captions, and move the film of a cut to the
    bin.
    """
    for job in [
        *all_jobs(project.folder, "caption"),
        *all_jobs(project.folder, "split"),
    ]:
        with lock_of(project.folder):
            _finish_job(project, job)


def _finish_job(project: Project, job: QueuedJob) -> None:
    rows = clips.table(project).rows
    marker = job.folder / "settled"
    if job.is_running or marker.exists():
        return
    marker.touch()

    if job.kind == "split" and job.state == "done" and job.about in rows:
        clips.move(project, [job.about], "bin")
    elif (job.folder / "before.json").is_file():
        _record_captions(project, job)


def _record_captions(project: Project, job: QueuedJob) -> None:
    """Add the captions that a job wrote to the history."""
    caption_before = read_record(
        job.folder / "before.json",
        dict[str, str],
        "the new captions stay, but they cannot be undone",
        MAX_BACKUP_BYTES,
    )
    changes = []
    for path, row in clips.table(project).rows.items():
        before = caption_before.get(path, "")
        if before != row["caption"]:
            changes.append((row["name"], before, row["caption"]))
    record_changes(project, changes, job.folder.name, "auto-caption")
