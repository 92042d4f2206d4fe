"""``check``: what would become of every clip, before anything is loaded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.console import bar, echo, out, print_table, width
from videotune.data.dataset import to_json
from videotune.errors import DONE, FAILED, SKIPPED
from videotune.models.registry import find
from videotune.text import shape_words, short_path
from videotune.trainer.resolve_config import Overrides, layers, resolve_config, without_captions_too
from videotune.trainer.run_spec import Job, crop_blocker, open_job, refuse_skips, with_views

DEFAULT_PRESET = "toy"

WIDE = 150
"""Columns from which the whole table fits."""

MEDIUM = 100
"""Columns from which the source and the frames used fit beside the rest; the notes then stand below."""

ALIKE = 4
"""So many clips with one and the same note share a line."""


MANY, FEW = 20, 5
"""Of more clips of one state than MANY, FEW are listed, and how many more there are."""


def check(
    words: Overrides,
    *,
    as_json: bool = False,
    allow_skips: str | None = None,
    contact_sheet: Path | None = None,
    every: bool = False,
) -> int:
    """Print the account of the dataset, with ``every`` a line for each clip; exit code 2 where clips are skipped that the
    person has not allowed."""
    words = without_captions_too(words, allow_skips)
    named = layers(words)[0]
    assumed = not (words.preset or words.config or named.get("family") or named.get("base_model_name"))
    if assumed:
        words = replace(words, preset=DEFAULT_PRESET)
    resolved, spec, base = resolve_config(words, planning=True)
    with bar("reading clips") as progress:
        job = open_job(resolved, spec, base, lambda done, total, path: progress.update(done, total, path), to_look=True)
    account = with_views(job, with_cut_captions(job, to_json(job.library)), job.steps) | {"blockers": blockers(job)}
    if as_json:
        print(json.dumps(account, indent=2, ensure_ascii=False))
    else:
        rules = f"the rules of {spec.title}, {base.name if base else 'no base model'}"
        out(f"Checked by {'the toy preset, since none was named: ' if assumed else ''}{rules}.")
        show(job, account, every=every)
    if contact_sheet is not None:
        draw_contact_sheet(job, account, contact_sheet)
    return verdict(job, account, allow_skips)


def draw_contact_sheet(job: Job, account: dict[str, Any], folder: Path) -> None:
    """Pictures of each clip; those that cannot be decoded are said."""
    from videotune.reporter.contact_sheet import contact_sheet

    for path, why in contact_sheet(job, account, folder).items():
        echo(f"no picture of {path}: {why}")
    echo(f"pictures: {folder / 'index.html'} and {folder}/sheet-*.jpg")


def verdict(job: Job, account: dict[str, Any], allow_skips: str | None) -> int:
    """The exit code, with what it means."""
    if (cropped := crop_blocker(job)) is not None:
        echo(f"{cropped} (exit code 2)")
        return SKIPPED
    if not job.library.skipped:
        return DONE
    if account["blockers"]:
        for blocker in account["blockers"]:
            echo(blocker)
        return FAILED
    if allow_skips is not None:
        refuse_skips(job, allow_skips)
        return DONE
    clips = "1 clip is" if account["skipped"] == 1 else f"{account['skipped']} clips are"
    echo(f"{clips} skipped (exit code 2); --allow-skips {account['skipped']} allows it")
    return SKIPPED


def blockers(job: Job) -> list[str]:
    """What would end a training before it begins, whatever is allowed to be skipped."""
    uncaptioned = sum(reason.endswith("_caption") for _, reason, _ in job.library.skipped)
    if not uncaptioned or job.config.missing_caption != "error":
        return []
    clips = "1 clip has" if uncaptioned == 1 else f"{uncaptioned} clips have"
    ways = 'write it, or set missing_caption to "skip", "empty" or "text"'
    return [f"{clips} no usable caption, which ends a training before it begins: {ways}"]


def with_cut_captions(job: Job, account: dict[str, Any]) -> dict[str, Any]:
    """The account with a warning for each clip that has a caption longer than the model reads.

    Where no base model is named, or it comes without a fast tokenizer, nothing is counted, and that is said.
    """
    captions = sorted({caption for clip in job.library.clips for caption in clip.captions})
    lengths = find(job.spec.name).token_lengths(job.base.folder, captions) if job.base else None
    if lengths is None:
        why = "the base model has no tokenizer.json here" if job.base else "no base model is named"
        return account | {"notes": [*account["notes"], f"captions were not counted in tokens: {why}"]}
    most, by_caption = job.spec.text_tokens, dict(zip(captions, lengths, strict=True))
    longest = {clip.path: max(by_caption[caption] for caption in clip.captions) for clip in job.library.clips}
    rows = []
    for row in account["clips"]:
        tokens = longest.get(row["path"], 0)
        cut = [f"a caption has {tokens} tokens; the model reads {most}, the rest is cut"] if tokens > most else []
        rows.append(row | {"warnings": [*row["warnings"], *cut]})
    return account | {"clips": rows}


def show(job: Job, account: dict[str, Any], *, every: bool = False) -> None:
    """The account as a person reads it: a line a clip (many of one state are cut short but for ``every``), then the sums."""
    clips = sorted(account["clips"], key=lambda clip: natural(clip["path"]))
    rows = [table_row(job, clip) for clip in clips]
    listed = rows if every else few(rows)
    columns = ["clip", "state", "source", "pixels", "frames", "bucket", "windows", "frames used", "views", "notes"]
    shown = range(10) if width() >= WIDE else (0, 1, 2, 5, 6, 7, 8) if width() >= MEDIUM else (0, 1, 5, 6, 8)
    cells = [[row[i] for i in shown] for row in listed]
    numbers = [place for place, i in enumerate(shown) if i in (4, 6, 7, 8)]
    print_table(f"clips, with their views at {job.steps} steps", [columns[i] for i in shown], cells, right=numbers)
    if width() < WIDE:  # a column of notes would be a few letters wide
        print_notes({row[0]: row[-1] for row in rows if row[-1]})
    if account["buckets"]:
        rows = [[shape_words(bucket["shape"]), bucket["windows"]] for bucket in account["buckets"]]
        print_table("buckets, largest first", ["width x height", "windows"], rows, right=(1,))
    whole = sum(clip["source_seconds"] or 0.0 for clip in account["clips"] if clip["reason"] is None)
    cut = sum(clip["seconds_cut"] for clip in account["clips"] if clip["reason"] is None)
    if cut > 0.05:
        out(f"{cut:.1f} s of the {whole:.1f} s of these clips are in no window")
    buckets = f"{len(job.shapes)} bucket{'s' * (len(job.shapes) != 1)}"
    out(
        f"found {account['found']} = used {account['used']} + held out {account['held_out']}"
        f" + skipped {account['skipped']};  {len(job.library.windows)} windows in {buckets}"
    )
    for note in (*job.notes, *(note for note in account["notes"] if note not in job.notes)):
        out(f"note: {note}")


def natural(path: str) -> list[Any]:
    """A key that sorts numbers in names by their value: clip_2 before clip_10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]{1,18})", path)]


def few(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """The table's rows; of a state that more than MANY clips have, the first FEW, and a row that says how many more."""
    count = Counter(row[1] for row in rows)
    met: Counter[str] = Counter()
    kept = []
    for row in rows:
        met[row[1]] += 1
        if count[row[1]] <= MANY or met[row[1]] <= FEW:
            kept.append(row)
        elif met[row[1]] == FEW + 1:
            kept.append([f"… {count[row[1]] - FEW} more (--all)", row[1], *[""] * (len(row) - 2)])
    return kept


def print_notes(notes: dict[str, str]) -> None:
    """A line for each clip, or one for many that have the same to be said of."""
    alike: dict[str, list[str]] = {}
    for clip, note in notes.items():
        alike.setdefault(note, []).append(clip)
    for note, clips in alike.items():
        if len(clips) >= ALIKE:
            out(f"{len(clips)} clips ({clips[0]}, {clips[1]}, …): {note}")
        else:
            for clip in clips:
                out(f"{clip}: {note}")


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
    notes = "; ".join([*([clip["detail"]] if clip["detail"] else []), *clip["warnings"], *clip["notes"]])
    shape = shape_words(clip["shape"]) if clip["shape"] else ""
    counts = [clip["model_frames"], shape, clip["windows"] or None, used, clip["views"]]
    return [short_path(clip["path"], job.library.roots), state, source, pixels, *counts, notes]
