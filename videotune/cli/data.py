"""The data of a run: ``videotune check``, ``caption`` and ``dataset split``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from videotune import commands
from videotune.cli.options import Arg, AsJson, Folder, Opt, Skips, takes_config, with_clips
from videotune.console import answer, bar, echo, out, print_table, width
from videotune.console import out as say
from videotune.errors import DONE, SKIPPED
from videotune.text import counted, shape_words, short_path, state_words

if TYPE_CHECKING:
    from videotune.captioning.write import CaptionResult
    from videotune.commands.check import CheckResult
    from videotune.data.split import SplitFile
    from videotune.job.job import Job
    from videotune.job.overrides import Overrides

WIDE = 150
"""Columns from which the whole table fits."""

MEDIUM = 100
"""Columns from which the source and the frames used fit beside the rest; the notes then stand below."""

ALIKE = 4
"""So many clips with one and the same note share a line."""

MANY = 20
FEW = 5
"""Of more clips of one state than MANY, FEW are listed, and how many more there are."""


ContactSheet = Annotated[
    Path | None, Opt(help="folder for pictures of each clip as it is trained, and a page")
]


@takes_config
def check(
    overrides: Overrides,
    folder: Folder = None,
    as_json: AsJson = False,
    allow_skips: Skips = None,
    contact_sheet: ContactSheet = None,
    every: Annotated[
        bool, Opt("--all", help="a line for each clip, however many there are")
    ] = False,
) -> None:
    """Account for every clip: used, held out or skipped, with the reason; no model is loaded."""
    result = commands.check.check(
        with_clips(overrides, folder), allow_skips=allow_skips, contact_sheet=contact_sheet
    )
    answer(as_json, result.account, lambda _: show_account(result, every=every))
    if contact_sheet is not None:
        echo(f"pictures: {contact_sheet / 'index.html'} and {contact_sheet}/sheet-*.jpg")
    raise typer.Exit(verdict(result, allow_skips))


def verdict(result: CheckResult, allow_skips: str | None) -> int:
    """The exit code, with what it means."""
    from videotune.job.job import (
        crop_blocker,
        refuse_skips,
    )  # reads clips, which --help must not

    account = result.account
    cropped = crop_blocker(result.job)
    if cropped is not None:
        echo(f"{cropped} (exit code 2)")
    elif account["skipped"] and account["blockers"]:
        for blocker in account["blockers"]:
            echo(blocker)
    elif account["skipped"] and allow_skips is not None:
        refuse_skips(result.job, allow_skips)
        return DONE
    elif account["skipped"]:
        clips = "1 clip is" if account["skipped"] == 1 else f"{account['skipped']} clips are"
        echo(f"{clips} skipped (exit code 2); --allow-skips {account['skipped']} allows it")
    return result.exit_code


def show_account(result: CheckResult, *, every: bool = False) -> None:
    """Print a line a clip (many of one state are cut short but for ``every``), then the sums."""
    job = result.job
    account = result.account
    rules = f"the rules of {job.spec.title}, {job.base.name if job.base else 'no base model'}"
    out(
        f"Checked by {'the toy preset, since none was named: ' if result.assumed else ''}{rules}."
    )
    rows = [
        table_row(job, clip)
        for clip in sorted(account["clips"], key=lambda clip: natural(clip["path"]))
    ]
    listed = rows if every else few(rows)
    columns = [
        "clip",
        "state",
        "source",
        "pixels",
        "frames",
        "bucket",
        "windows",
        "frames used",
        "views",
        "notes",
    ]
    shown = (
        range(10)
        if width() >= WIDE
        else (0, 1, 2, 5, 6, 7, 8)
        if width() >= MEDIUM
        else (0, 1, 5, 6, 8)
    )
    cells = [[row[i] for i in shown] for row in listed]
    numbers = [place for place, i in enumerate(shown) if i in (4, 6, 7, 8)]
    print_table(
        f"clips, with their views at {job.steps} steps",
        [columns[i] for i in shown],
        cells,
        right=numbers,
    )
    if width() < WIDE:  # a column of notes would be a few letters wide
        print_notes({row[0]: row[-1] for row in rows if row[-1]})
    if account["buckets"]:
        rows = [
            [shape_words(bucket["shape"]), bucket["windows"]] for bucket in account["buckets"]
        ]
        print_table("buckets, largest first", ["width x height", "windows"], rows, right=(1,))
    whole = sum(
        clip["source_seconds"] or 0.0 for clip in account["clips"] if clip["reason"] is None
    )
    cut = sum(clip["seconds_cut"] for clip in account["clips"] if clip["reason"] is None)
    if cut > 0.05:
        out(f"{cut:.1f} s of the {whole:.1f} s of these clips are in no window")
    buckets = f"{len(job.shapes)} bucket{'s' * (len(job.shapes) != 1)}"
    clips = "found {found} = used {used} + held out {held_out} + skipped {skipped}".format_map(
        account
    )
    out(f"{clips};  {len(job.library.windows)} windows in {buckets}")
    for note in (*job.notes, *(note for note in account["notes"] if note not in job.notes)):
        out(f"note: {note}")


def natural(path: str) -> list[Any]:
    """A key that sorts numbers in names by their value: clip_2 before clip_10."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part)
        for part in re.split(r"([0-9]{1,18})", path)
    ]


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
            kept.append(
                [f"… {count[row[1]] - FEW} more (--all)", row[1], *[""] * (len(row) - 2)]
            )
    return kept


def print_notes(notes: dict[str, str]) -> None:
    """A line for each clip, or one for many that have the same to be said of."""
    alike: dict[str, list[str]] = {}
    for clip, note in notes.items():
        alike.setdefault(note, []).append(clip)
    for note, clips in alike.items():
        many = len(clips) >= ALIKE
        for of in [f"{len(clips)} clips ({clips[0]}, {clips[1]}, …)"] if many else clips:
            out(f"{of}: {note}")


def table_row(job: Job, clip: dict[str, Any]) -> list[Any]:
    """clip, state, source, pixels, frames at the rate of training, bucket, windows, frames used, views, notes."""
    source = ""
    if clip["source_fps"]:
        source = f"{clip['source_frames']} @ {clip['source_fps']:.4g} = {clip['source_seconds']:.2f} s"
    elif clip["source_frames"]:
        source = "image"
    pixels = f"{clip['width']}x{clip['height']}" if clip["width"] else ""
    used = (
        f"{clip['frames']} ({clip['frames_cut']} cut)"
        if clip["frames_cut"]
        else clip["frames"] or None
    )
    notes = "; ".join(
        [*([clip["detail"]] if clip["detail"] else []), *clip["warnings"], *clip["notes"]]
    )
    shape = shape_words(clip["shape"]) if clip["shape"] else ""
    counts = [clip["model_frames"], shape, clip["windows"] or None, used, clip["views"]]
    return [
        short_path(clip["path"], job.library.roots),
        state_words(clip),
        source,
        pixels,
        *counts,
        notes,
    ]


Purpose = Literal["general", "style", "character", "motion"]


@takes_config
def caption(
    overrides: Overrides,
    model: Annotated[
        str, Opt(help="a server's model, or here a folder or Hub id of transformers")
    ],
    folder: Folder = None,
    endpoint: Annotated[
        str | None, Opt(help="a server with OpenAI's chat API: http://…/v1")
    ] = None,
    key_env: Annotated[
        str, Opt(help="variable that holds the server's key")
    ] = "OPENAI_API_KEY",
    workers: Annotated[int, Opt(min=1, max=256, help="requests at once")] = 4,
    frames: Annotated[
        int, Opt(min=1, max=256, help="frames of a clip that the model is shown")
    ] = 8,
    purpose: Annotated[Purpose, Opt(help="what the LoRA is to learn")] = "general",
    prompt: Annotated[
        str | None, Opt(help="a prompt of your own instead of the purpose's")
    ] = None,
    trigger: Annotated[str | None, Opt(help="a word that each new caption holds")] = None,
    max_words: Annotated[int, Opt(min=1, max=2000, help="words of a caption")] = 100,
    overwrite: Annotated[
        bool, Opt("--overwrite", help="replace captions; the old ones stay as .bak files")
    ] = False,
    dry_run: Annotated[
        bool, Opt("--dry-run", help="list the clips that would be captioned")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let a vision-language model write the captions that clips lack."""
    given = {
        name: value
        for name, value in locals().items()
        if name not in ("overrides", "folder", "as_json")
    }
    options = commands.caption.CaptionOptions(**given)
    result = commands.caption.caption(with_clips(overrides, folder), options=options)
    answer(as_json, vars(result), lambda _: show_captions(result, dry_run))
    raise typer.Exit(result.exit_code)


def show_captions(result: CaptionResult, dry_run: bool) -> None:
    """Print what was not captioned and why, and the counts."""
    planned = [
        {"clip": clip, "state": "would be captioned"} for clip in result.planned if dry_run
    ]
    for row in (*planned, *result.skipped, *result.failed, *result.hints):
        out(": ".join(filter(None, row.values())))
    out(", ".join(f"{len(rows)} {name}" for name, rows in vars(result).items()))


dataset_app = typer.Typer(help="Tools for datasets.", no_args_is_help=True)


Threshold = Annotated[
    float | None,
    Opt(help="strength of a cut, as a multiple of the changes around it (default: 3)"),
]


@dataset_app.command("split")
def dataset_split(
    source: Annotated[Path, Arg(help="a video, or a folder of videos")],
    out: Annotated[Path, Opt(help="folder for the scenes; the originals are not touched")],
    min_seconds: Annotated[float, Opt(help="leave shorter scenes out, and list them")] = 1.0,
    threshold: Threshold = None,
    overwrite: Annotated[bool, Opt("--overwrite", help="replace existing scenes")] = False,
) -> None:
    """Cut videos into their scenes, one file a scene, with their captions."""
    from videotune.data.split import split  # --help needs no video reader

    with bar("splitting (seconds)") as progress:
        results = split(
            source,
            out,
            min_seconds=min_seconds,
            threshold=threshold,
            overwrite=overwrite,
            progress=progress.update,
        )
    root = source if source.is_dir() else source.parent
    rows = [_row(result, root) for result in results]
    print_table(
        "files", ["file", "seconds", "scenes", "captions", "notes"], rows, right=(1, 2, 3)
    )
    written = sum(part.path is not None for result in results for part in result.scenes)
    dropped = sum(part.path is None for result in results for part in result.scenes)
    images = sum(result.is_image for result in results)
    broken = sum(result.problem is not None for result in results)
    say(
        f"{counted(written, 'scene')} of {counted(len(results) - broken - images, 'file')} are in {out}"
    )
    if dropped:
        are = "is" if dropped == 1 else "are"
        say(
            f"{counted(dropped, 'scene')} {are} shorter than {min_seconds:g} s and left out (--min-seconds)"
        )
    if images:
        say(f"{images} {'image was' if images == 1 else 'images were'} not split or copied")
    if written:
        bare = any(
            result.scenes and not result.captions
            for result in results
            if result.problem is None
        )
        say(
            f"next: {'write a caption beside each scene (NAME.txt), then: ' if bare else ''}videotune check {out}"
        )
    if broken:
        echo(f"{broken} files could not be split (exit code 2); the table says why")
        raise typer.Exit(SKIPPED)


def _row(result: SplitFile, root: Path) -> list[str]:
    """A file as the table shows it."""
    path = result.file.path.relative_to(root)
    if result.is_image:
        return [str(path), "", "", "", "image: not split"]
    if result.problem is not None:
        return [
            str(path),
            f"{result.seconds:.2f}" if result.seconds else "",
            "",
            "",
            str(result.problem),
        ]
    kept = [part for part in result.scenes if part.path is not None]
    short = [part for part in result.scenes if part.path is None]
    notes = [
        f"left out: {part.start:.2f} to {part.start + part.seconds:.2f} s" for part in short
    ]
    if len(result.scenes) == 1 and kept:
        notes.append("no cut: copied as it is")
    if kept and not result.captions:
        notes.append("no caption")
    return [
        str(path),
        f"{result.seconds:.2f}",
        str(len(kept)),
        str(result.captions),
        "; ".join(notes),
    ]
