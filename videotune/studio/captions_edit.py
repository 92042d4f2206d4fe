"""Editing of captions: each change is recorded with the text before it, so it can be
undone.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.data.captions import split_variants, with_trigger
from videotune.errors import VideotuneError
from videotune.files import write_json, write_text
from videotune.queue.jobs import QueuedJob, all_jobs, start
from videotune.studio import clip_history, clip_moves, clip_row, clips
from videotune.studio.clip_row import ClipRow, is_aside
from videotune.studio.film_scenes import (
    files_of_scenes,
    folder_of_scenes,
    is_whole,
    remove_scenes,
)
from videotune.studio.projects import Project, lock_of
from videotune.studio.records import read_record

MAX_BACKUP_BYTES = 64_000_000
"""Size limit of the captions as they were before a job."""


def change(
    project: Project,
    text_by_path: Mapping[str, str],
    by: str,
    *,
    undoes: str = "",
    redoes: str = "",
) -> str:
    """Write captions and return the id of the action.

    Args:
        project: the project.
        text_by_path: new captions by the paths of their clips, one variant per line; an
            empty text deletes the caption file.
        by: what made the change, for the history.
        undoes: the batch that this change undoes.
        redoes: the batch that it does again.

    Raises:
        VideotuneError: if a caption is in a list of captions.
    """
    is_correction = bool(undoes or redoes)
    batch = clip_history.new_batch()
    with lock_of(project.folder):
        edits = _edits(project, text_by_path, keep_equal=is_correction)

        # The history is written first, so an interrupted change can be undone.
        changes = [(row["name"], before, after) for row, before, after in edits]
        record_changes(
            project, changes, batch=batch, by=by, undoes=undoes, redoes=redoes
        )
        for row, _, after in edits:
            caption_path = row["clip"].caption_file or row["clip"].expected_caption
            _write_caption(caption_path, after, durable=len(edits) == 1)
    return batch


def _edits(
    project: Project, text_by_path: Mapping[str, str], *, keep_equal: bool
) -> list[tuple[ClipRow, str, str]]:
    """Return the clips whose captions change, with their texts before and after.

    Args:
        project: the project.
        text_by_path: new captions by the paths of their clips.
        keep_equal: whether captions that stay as they are belong to the list too.
    """
    rows = clips.table(project).rows
    edits = []
    for path, text in text_by_path.items():
        row = clips.find_clip(rows, path)
        after = "\n".join(split_variants(text.replace("\0", "")))
        if row["caption_fixed"]:
            raise VideotuneError(f"{row['name']}: {row['fixed']}")

        before = clip_row.caption_of(row["clip"])
        if before != after or keep_equal:
            edits.append((row, before, after))
    return edits


def _write_caption(path: Path, text: str, *, durable: bool) -> None:
    if not text:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"{text}\n", durable=durable)


def record_changes(
    project: Project,
    changes: list[tuple[str, str, str]],
    *,
    batch: str,
    by: str,
    undoes: str = "",
    redoes: str = "",
) -> None:
    """Add changes to the history.

    Args:
        project: the project.
        changes: name of the clip, text before, text after.
        batch: id of the action.
        by: what made the change.
        undoes: the batch that it undoes.
        redoes: the batch that it does again.
    """
    action = {
        "batch": batch,
        "by": by,
        "undoes": undoes,
        "redoes": redoes,
        "time": round(time.time(), 3),
    }
    clip_history.append(
        project,
        [
            {**action, "name": name, "before": before, "after": after}
            for name, before, after in changes
        ],
    )


@dataclass(frozen=True)
class PlannedEdit:
    """What an edit of captions would change."""

    texts: dict[str, str]
    """The new text of each clip whose caption changes."""

    hidden: int
    """Clips kept aside that the filter does not show and that it would change, too."""

    fixed: int
    """Clips that it would change if their captions were not in other folders or lists."""


def plan_edit(
    project: Project, edit: Mapping[str, str], paths: list[str]
) -> PlannedEdit:
    """Return what an edit of the shown clips would change.

    Args:
        project: the project.
        edit: the edit. ``how`` is "add" or "remove" (a trigger word) or "replace";
            ``word`` is the word; ``to`` its replacement; ``case`` whether upper and
            lower case differ. ``all`` says that it is for all clips of the filter,
            ``with-aside`` that it is for those kept aside, too.
        paths: paths of the clips.
    """
    rows = clips.table(project).rows
    texts = _edited_texts(edit, [clips.find_clip(rows, path) for path in paths])

    # Without "all" the user has chosen these clips one by one.
    hidden_rows = []
    if edit["all"]:
        shown_paths = set(paths)
        hidden_rows = [
            row
            for path, row in rows.items()
            if is_aside(row) and path not in shown_paths
        ]
    hidden_texts = _edited_texts(edit, hidden_rows)
    if edit["with-aside"]:
        texts |= hidden_texts

    is_fixed = {path: bool(rows[path]["caption_fixed"]) for path in texts}
    return PlannedEdit(
        texts={path: text for path, text in texts.items() if not is_fixed[path]},
        hidden=sum(not rows[path]["caption_fixed"] for path in hidden_texts),
        fixed=sum(is_fixed.values()),
    )


def _edited_texts(edit: Mapping[str, str], rows: Sequence[ClipRow]) -> dict[str, str]:
    """Return the new text of each clip whose caption an edit would change."""
    texts = {}
    for row in rows:
        text = _edited(row["caption"], edit)
        if text.strip() and text != row["caption"]:
            texts[row["path"]] = text
    return texts


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
        scenes_folder = folder_of_scenes(project, rows[job.about]["name"])
        scenes = [scenes_folder / name for name in files_of_scenes(scenes_folder)]
        if len(scenes) == 1 and is_whole(scenes[0], project.folder / job.about):
            remove_scenes(scenes_folder)
        else:
            clip_moves.move(project, [job.about], "bin")
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
    record_changes(project, changes, batch=job.folder.name, by="auto-caption")
