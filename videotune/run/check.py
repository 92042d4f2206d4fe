"""``check``: what would become of every clip, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.data.account import to_json
from videotune.errors import DONE, FAILED, SKIPPED
from videotune.run.console import bar, print_table, say, width
from videotune.run.job import Job, Words, layers, open_job, refuse_skips, settle, with_views

DEFAULT_PRESET = "toy"

WIDE = 130
"""Columns from which the whole table fits."""


def check(words: Words, *, as_json: bool = False, allow_skips: str | None = None) -> int:
    """Print the account of the dataset; exit code 2 where clips are skipped that the person has not allowed."""
    assumed = not (words.preset or words.config or words.family or layers(words)[0].get("base_model_name"))
    if assumed:
        words = replace(words, preset=DEFAULT_PRESET)
    resolved, spec, base = settle(words)
    with bar("reading clips") as progress:
        job = open_job(resolved, spec, base, lambda done, total, path: progress.update(done, total, path), to_look=True)
    account = with_views(job, to_json(job.library), job.steps)
    if as_json:
        print(json.dumps(account, indent=2, ensure_ascii=False))
    else:
        rules = f"the rules of {spec.title}, {base.name if base else 'no base model'}"
        print(f"Checked by {'the toy preset, since none was named: ' if assumed else ''}{rules}.")
        show(job, account)
    if not job.library.skipped:
        return DONE
    uncaptioned = sum(reason.endswith("_caption") for _, reason, _ in job.library.skipped)
    if uncaptioned and job.config.missing_caption == "error":
        ways = 'write them, or set missing_caption to "skip" or "empty"'
        say(f"{uncaptioned} clips have no usable caption, which ends a training before it begins: {ways}")
        return FAILED
    if allow_skips is not None:
        refuse_skips(job, allow_skips)
        return DONE
    say(f"{account['skipped']} clips are skipped (exit code 2); --allow-skips {account['skipped']} allows it")
    return SKIPPED


def show(job: Job, account: dict[str, Any]) -> None:
    """The account as a person reads it: a line a clip, then the sums."""
    rows = []
    for clip in account["clips"]:
        source = f"{clip['source_frames']} @ {clip['source_fps']:.4g}" if clip["source_frames"] else ""
        pixels = f"{clip['width']}x{clip['height']}" if clip["width"] else ""
        state = "used" if clip["used"] else "held out" if clip["held_out"] else f"skipped: {clip['reason']}"
        notes = "; ".join([*([clip["detail"]] if clip["detail"] else []), *clip["warnings"]])
        used = [clip["shape"], clip["windows"] or None, clip["frames"] or None, clip["views"]]
        rows.append([short(job, clip["path"]), state, source, pixels, *used, notes])
    if width() < WIDE:  # a column of notes would be a few letters wide
        noted = [(row[0], row[-1]) for row in rows if row[-1]]
        rows = [[row[0], row[1], row[4], row[5], row[7]] for row in rows]
        print_table("clips", ["clip", "state", "bucket", "windows", "views"], rows, right=(3, 4))
        for clip, notes in noted:
            print(f"{clip}: {notes}")
    else:
        columns = ["clip", "state", "frames @ fps", "pixels", "bucket", "windows", "frames used", "views", "notes"]
        print_table("clips", columns, rows, right=(5, 6, 7))
    print(
        f"found {account['found']} = used {account['used']} + held out {account['held_out']}"
        f" + skipped {account['skipped']};  {len(job.library.windows)} windows in {len(job.shapes)} buckets"
    )
    for note in job.notes:
        print(f"note: {note}")


def short(job: Job, path: str) -> str:
    """A clip's path from its dataset's folder, as the table shows it; from the folder's name where there are several."""
    for dataset in job.config.datasets:
        root = Path(dataset.path)
        if Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root if len(job.config.datasets) == 1 else root.parent))
    return path
