"""How the clips of a project have changed since a run began: the run then cannot be
resumed as it was, and its user is asked before a process starts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import Response

from videotune.data.captions import split_variants
from videotune.reporter.read import Run, items, mapping
from videotune.studio import clips
from videotune.studio.clip_row import ClipRow, is_aside, state_of
from videotune.studio.projects import HELD_OUT, Project
from videotune.studio.web import FormData, reply
from videotune.text import counted

AFFIX_KEYS = ("trigger", "caption_prefix", "caption_suffix")
"""Settings of a dataset that put words around each caption."""

MAX_NAMES = 3
"""Clips that a sentence names."""


def ask_about_changes(project: Project, run: Run, form: FormData) -> Response | None:
    """Return the answer that asks whether to resume a run with the clips as they are now;
    None if they have not changed, or the user has said so.
    """
    if form["sure"] or form["data"] == "changed":
        return None
    changes = describe_changes(project, run)
    if not changes:
        return None

    lines = [
        f"Its clips have changed since it began: {changes}.",
        "To resume it as it was, do not start: undo the change on the page Data first.",
        "With the changed clips it trains on them from the next step on; what was "
        "trained before stays.",
    ]
    if _changes_clips_kept_aside(project, run):
        lines.append(
            "Clips kept aside are among them, and they are measured and never trained: from "
            "here on their errors are shares of that at this step, not of "
            f"{run.start.error_share}, "
            "and do not compare with what was measured before. To keep the figures, begin "
            "a new run."
        )
    question = {
        "lines": lines,
        "title": f"Resume {run.folder.name} with the changed clips?",
        "yes": "Continue with the changed clips",
    }
    return reply(status=409, ask=question)


def _changes_clips_kept_aside(project: Project, run: Run) -> bool:
    """Whether other clips of the project's own folders are kept aside now than in a run, or
    they have other captions.
    """
    aside = {
        str(row["path"]): row
        for row in run.clips
        if row["held_out"] and Path(str(row["path"])).is_relative_to(project.folder)
    }
    rows = {
        str(project.folder / row["path"]): row
        for row in clips.table(project).rows.values()
        if row["part"]
    }

    has_affixes = _has_affixes(run)
    for path, run_row in aside.items():
        row = rows.get(path)
        if row is None or not _is_caption_of(row["caption"], run_row, has_affixes):
            return True

    return any(
        row["part"] == HELD_OUT and path not in aside for path, row in rows.items()
    )


def changes_since(project: Project, run: Run) -> str:
    """Return how the clips of a project have changed since a run began; empty if they have
    not, or if the run came from another computer.
    """
    is_own = any(
        Path(str(row["path"])).is_relative_to(project.folder) for row in run.clips
    )
    return describe_changes(project, run) if is_own else ""


def describe_changes(project: Project, run: Run) -> str:
    """Return how the clips of the project's own folders differ from those of a run, as
    far as the account of the run and the last check know; empty if they do not.
    """
    run_rows = {
        str(row["path"]): row for row in run.clips if row["used"] or row["held_out"]
    }
    known_paths = {str(row["path"]) for row in run.clips}
    if not known_paths:
        return ""

    changes: dict[str, list[str]] = {}
    rows = {
        str(project.folder / row["path"]): row
        for row in clips.table(project).rows.values()
        if row["part"]
    }
    # A clip that is no longer where the run had it may have been moved within the project.
    gone_rows = {
        path: run_row
        for path, run_row in run_rows.items()
        if Path(path).is_relative_to(project.folder) and path not in rows
    }
    for path, row in rows.items():
        run_row = run_rows.get(path)
        if run_row is not None:
            is_equal = _is_caption_of(row["caption"], run_row, _has_affixes(run))
            change = "" if is_equal else "with another caption"
        elif path in known_paths or state_of(row) not in ("used", "held out"):
            change = ""
        else:
            change = _change_of_new_path(path, row, gone_rows)
        if change:
            changes.setdefault(change, []).append(row["name"])

    new_names = {Path(path).name for path in rows if path not in run_rows}
    for path in gone_rows:
        if Path(path).name not in new_names:
            changes.setdefault("removed", []).append(Path(path).name)
    return "; ".join(_phrase(change, names) for change, names in changes.items())


def _change_of_new_path(
    path: str, row: ClipRow, gone_rows: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return what a clip is whose path the run does not know.

    Args:
        path: where the clip is.
        row: the clip as it is now.
        gone_rows: the clips that the run had at paths that no longer exist.
    """
    was_held_out = {
        bool(run_row["held_out"])
        for gone_path, run_row in gone_rows.items()
        if Path(gone_path).name == Path(path).name
    }
    is_held_out = is_aside(row)
    if not was_held_out:
        return "added"
    if is_held_out in was_held_out:
        return "in another folder"
    return "now kept aside" if is_held_out else "no longer kept aside"


def _is_caption_of(text: str, run_row: Mapping[str, Any], has_affixes: bool) -> bool:
    """Return whether a caption is the one that a run has read of its clip."""
    captions = [str(caption) for caption in items(run_row["captions"])]
    variants = list(split_variants(text))
    if captions == variants:
        return True
    if not has_affixes or len(captions) != len(variants):
        return False
    pairs = zip(variants, captions, strict=True)
    return all(variant in caption for variant, caption in pairs)


def _has_affixes(run: Run) -> bool:
    """Return whether a run has put words around its captions: those of its datasets, or
    the new token of an embedding.
    """
    if run.setting("training_method") == "EMBEDDING":
        return True
    for dataset in items(run.setting("datasets")):
        values = mapping(dataset)
        if any(values[key] for key in AFFIX_KEYS):
            return True
    return False


def _phrase(change: str, names: list[str]) -> str:
    shown_names = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        shown_names += ", …"
    return f"{counted(len(names), 'clip')} {change} ({shown_names})"
