"""``check``: what would become of every clip, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.data.account import to_json
from videotune.errors import DONE, FAILED, SKIPPED
from videotune.families.find import find
from videotune.run.console import bar, print_table, say, width
from videotune.run.job import Job, Words, layers, open_job, refuse_skips, settle, with_views

DEFAULT_PRESET = "toy"

WIDE = 150
"""Columns from which the whole table fits."""


def check(
    words: Words, *, as_json: bool = False, allow_skips: str | None = None, contact_sheet: Path | None = None
) -> int:
    """Print the account of the dataset; exit code 2 where clips are skipped that the person has not allowed."""
    assumed = not (words.preset or words.config or words.family or layers(words)[0].get("base_model_name"))
    if assumed:
        words = replace(words, preset=DEFAULT_PRESET)
    resolved, spec, base = settle(words)
    with bar("reading clips") as progress:
        job = open_job(resolved, spec, base, lambda done, total, path: progress.update(done, total, path), to_look=True)
    account = with_views(job, with_cut_captions(job, to_json(job.library)), job.steps)
    if as_json:
        print(json.dumps(account, indent=2, ensure_ascii=False))
    else:
        rules = f"the rules of {spec.title}, {base.name if base else 'no base model'}"
        print(f"Checked by {'the toy preset, since none was named: ' if assumed else ''}{rules}.")
        show(job, account)
    if contact_sheet is not None:
        draw_contact_sheet(job, account, contact_sheet)
    return verdict(job, account, allow_skips)


def draw_contact_sheet(job: Job, account: dict[str, Any], folder: Path) -> None:
    """Pictures of each clip; those that cannot be decoded are said."""
    from videotune.run.sheet import contact_sheet

    for path, why in contact_sheet(job, account, folder).items():
        say(f"no picture of {path}: {why}")
    say(f"pictures: {folder / 'index.html'} and {folder}/sheet-*.jpg")


def verdict(job: Job, account: dict[str, Any], allow_skips: str | None) -> int:
    """The exit code, with what it means."""
    if not job.library.skipped:
        return DONE
    uncaptioned = sum(reason.endswith("_caption") for _, reason, _ in job.library.skipped)
    if uncaptioned and job.config.missing_caption == "error":
        ways = 'write them, or set missing_caption to "skip", "empty" or "text"'
        say(f"{uncaptioned} clips have no usable caption, which ends a training before it begins: {ways}")
        return FAILED
    if allow_skips is not None:
        refuse_skips(job, allow_skips)
        return DONE
    say(f"{account['skipped']} clips are skipped (exit code 2); --allow-skips {account['skipped']} allows it")
    return SKIPPED


def with_cut_captions(job: Job, account: dict[str, Any]) -> dict[str, Any]:
    """The account with a warning for each clip that has a caption longer than the model reads.

    Where no base model is named, or it comes without a fast tokenizer, nothing is counted, and that is said.
    """
    captions = sorted({caption for clip in job.library.clips for caption in clip.captions})
    lengths = find(job.spec.name).token_lengths(job.base.folder, captions) if job.base else None
    if lengths is None:
        why = "it has no tokenizer.json" if job.base else "no base model is named"
        return account | {"notes": [*account["notes"], f"captions were not counted in tokens: {why}"]}
    most, by_caption = job.spec.text_tokens, dict(zip(captions, lengths, strict=True))
    longest = {clip.path: max(by_caption[caption] for caption in clip.captions) for clip in job.library.clips}
    rows = []
    for row in account["clips"]:
        tokens = longest.get(row["path"], 0)
        cut = [f"a caption has {tokens} tokens; the model reads {most}, the rest is cut"] if tokens > most else []
        rows.append(row | {"warnings": [*row["warnings"], *cut]})
    return account | {"clips": rows}


def show(job: Job, account: dict[str, Any]) -> None:
    """The account as a person reads it: a line a clip, then the sums."""
    rows = [table_row(job, clip) for clip in account["clips"]]
    if width() < WIDE:  # a column of notes would be a few letters wide
        noted = [(row[0], row[-1]) for row in rows if row[-1]]
        narrow = [[row[0], row[1], row[5], row[6], row[8]] for row in rows]
        print_table("clips", ["clip", "state", "bucket", "windows", "views"], narrow, right=(3, 4))
        for clip, notes in noted:
            print(f"{clip}: {notes}")
    else:
        columns = ["clip", "state", "source", "pixels", "frames", "bucket", "windows", "frames used", "views", "notes"]
        print_table("clips", columns, rows, right=(4, 6, 7, 8))
    if account["buckets"]:
        rows = [[bucket["shape"], bucket["windows"]] for bucket in account["buckets"]]
        print_table("buckets, dearest first", ["frames x height x width", "windows"], rows, right=(1,))
    print(
        f"found {account['found']} = used {account['used']} + held out {account['held_out']}"
        f" + skipped {account['skipped']};  {len(job.library.windows)} windows in {len(job.shapes)} buckets"
    )
    for note in (*job.notes, *(note for note in account["notes"] if note not in job.notes)):
        print(f"note: {note}")


def table_row(job: Job, clip: dict[str, Any]) -> list[Any]:
    """clip, state, source, pixels, frames at the rate of training, bucket, windows, frames used, views, notes."""
    source = ""
    if clip["source_fps"]:
        source = f"{clip['source_frames']} @ {clip['source_fps']:.4g} = {clip['source_seconds']:.2f} s"
    elif clip["source_frames"]:
        source = "image"
    pixels = f"{clip['width']}x{clip['height']}" if clip["width"] else ""
    kind = "" if clip["kind"] in (None, "train", "validation") else f" ({clip['kind']})"
    state = "used" + kind if clip["used"] else "held out" if clip["held_out"] else f"skipped: {clip['reason']}"
    used = f"{clip['frames']} ({clip['frames_cut']} cut)" if clip["frames_cut"] else clip["frames"] or None
    notes = "; ".join([*([clip["detail"]] if clip["detail"] else []), *clip["warnings"]])
    counts = [clip["model_frames"], clip["shape"], clip["windows"] or None, used, clip["views"]]
    return [short(job, clip["path"]), state, source, pixels, *counts, notes]


def short(job: Job, path: str) -> str:
    """A clip's path from its dataset's folder, as the table shows it; from the folder's name where there are several."""
    for root in job.library.roots:
        if Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root if len(job.library.roots) == 1 else root.parent))
    return path
