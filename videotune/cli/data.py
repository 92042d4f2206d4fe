"""The data of a run: ``videotune check`` and ``caption``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from videotune.bounds import ANSWER_SECONDS
from videotune.cli.clip_lines import natural, print_notes
from videotune.cli.next_steps import card_options, next_command
from videotune.cli.options import (
    AsJson,
    Opt,
    Skips,
    Verbose,
    takes_config,
)
from videotune.console import answer, doing, echo, out, print_table, tell, width
from videotune.data.remarks import most_serious_first, shown_first
from videotune.errors import DONE, VideotuneError
from videotune.job.shown_notes import remember
from videotune.text import (
    counted,
    counted_are,
    reason_words,
    shape_words,
    short_path,
    some,
    state_words,
)

if TYPE_CHECKING:
    from videotune.captioning.write import CaptionResult
    from videotune.commands.check import CheckResult
    from videotune.job.job import Job
    from videotune.job.overrides import Overrides

WIDE = 150
"""Terminal columns from which the whole table fits."""

MEDIUM = 100
"""Terminal columns from which the source and the used frames fit."""

MANY = 20
FEW = 5
"""Of more than MANY clips with one state, FEW are listed, and the number of the others.
"""

LISTED = 3
"""Clips of a state that are listed without --verbose."""

COLUMNS = (
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
)
MEDIUM_COLUMNS = (
    "clip",
    "state",
    "source",
    "bucket",
    "windows",
    "frames used",
    "views",
)
NARROW_COLUMNS = ("clip", "state", "bucket", "windows", "views")
NUMBERS = ("frames", "windows", "frames used", "views")

ContactSheet = Annotated[
    Path | None,
    Opt(help="folder for a page with pictures of each clip as it is trained"),
]
Every = Annotated[bool, Opt("--all", help="print a row for each clip, however many")]


@takes_config
def check(
    overrides: Overrides,
    as_json: AsJson = False,
    allow_skips: Skips = None,
    contact_sheet: ContactSheet = None,
    verbose: Verbose = False,
    every: Every = False,
) -> None:
    """Account for every clip: used, kept aside for checking or skipped, with the reason;
    load no model.
    """
    from videotune.commands.check import check as check_clips

    result = check_clips(
        overrides,
        allow_skips=allow_skips,
        contact_sheet=contact_sheet,
    )
    answer(
        as_json,
        result.account,
        lambda _: show_account(result, verbose=verbose, every=every),
    )
    if contact_sheet is not None:
        from videotune.reporter.contact_sheet import written_sheets

        paths = [contact_sheet / "index.html", *written_sheets(contact_sheet)]
        echo(f"pictures: {some([str(path) for path in paths])}")
    exit_code = explain_exit_code(result, allow_skips)
    if exit_code == DONE and not as_json:
        echo(f"next: {_command_after_check(result, overrides, allow_skips)}")
    raise typer.Exit(exit_code)


def _command_after_check(
    result: CheckResult, overrides: Overrides, allow_skips: str | None
) -> str:
    """Return the command that comes next: a plan, or without a model the list of them."""
    if result.assumed:
        return "choose a preset: videotune presets list --card NAME"
    skips = [] if allow_skips is None else ["--allow-skips", allow_skips]
    card = card_options(overrides.config)
    return next_command("plan", overrides, *card, *skips)


def explain_exit_code(result: CheckResult, allow_skips: str | None) -> int:
    """Return the exit code; print its reason if it is not 0."""
    # they read clips: not for --help
    from videotune.commands.check import uncaptioned_example
    from videotune.data.captions import caption_advice
    from videotune.job.skips import crop_blocker, refuse_skips

    account = result.account
    skipped = account["skipped"]
    crop = crop_blocker(result.job)
    if crop is not None:
        echo(crop)
    elif skipped and account["blockers"]:
        for blocker in account["blockers"]:
            echo(blocker)
        example = uncaptioned_example(result.job)
        if example is not None:
            echo(caption_advice(example))
        _echo_other_skips(result)
        if account["used"]:
            them = "it" if skipped == 1 else "them"
            echo(f"--allow-skips {skipped} trains without {them}")
    elif skipped and allow_skips is not None:
        refuse_skips(result.job, allow_skips)
        return DONE
    elif skipped and not account["used"]:
        echo("nothing here can be trained on; the reasons are above")
    elif skipped:
        clips = counted_are(skipped, "clip")
        echo(
            f"{clips} skipped, so a training does not start. "
            f"--allow-skips {skipped} starts it without"
        )
    return result.exit_code


def _echo_other_skips(result: CheckResult) -> None:
    """Say what remains once each clip has a caption."""
    reasons = [reason for _, reason, _ in result.job.library.skipped]
    others = [reason for reason in reasons if not reason.endswith("_caption")]
    if others:
        clips = counted_are(len(others), "clip")
        them = "it" if len(others) == 1 else "them"
        echo(f"{clips} skipped for another reason: mend or remove {them}")


def show_account(
    result: CheckResult,
    *,
    verbose: bool = False,
    every: bool = False,
    command: str = "",
) -> None:
    """Print what becomes of the clips, serious remarks first.

    Args:
        result: The account of the clips.
        verbose: Print a table of the clips, and every remark.
        every: Print every clip, and not only the first of a state that many clips have.
        command: The ``check`` that prints this, if another command does; options are
            then named with it.
    """
    account = result.account
    sums = "{found} found: {used} used, {held_out} kept aside, {skipped} skipped"
    rules = f"by the rules of {result.job.spec.title}"
    if result.assumed:
        rules = "no model named: by the toy's rules"
    tell(f"{sums.format_map(account)} ({rules})")
    show_sound(result)

    rows = [clip_row(result.job, clip) for clip in account["clips"]]
    if verbose or every:
        show_details(result, rows, every=every)
    else:
        show_summary(result, rows, command)


def show_sound(result: CheckResult) -> None:
    """Print how many clips have sound, if the run reads it."""
    if not result.job.config.reads_sound:
        return
    clips = [clip for clip in result.account["clips"] if clip["reason"] is None]
    sounds = [clip["sound"] for clip in clips if clip["sound"] is not None]
    sounding = sum(sound["windows"] > 0 for sound in sounds)
    total = counted(len(clips), "clip")
    tell(f"sound: {sounding} of {total} {'has' if sounding == 1 else 'have'} it")


def show_summary(
    result: CheckResult, rows: Sequence[Mapping[str, Any]], command: str
) -> None:
    """Print skipped clips, serious remarks, the buckets, and the most serious notes."""
    from videotune.commands.check import UNCOUNTED

    skipped = {row["clip"]: row["problem"] for row in rows if row["skipped"]}
    show_first("skipped", skipped)
    serious = [row for row in rows if row["serious"]]
    for state in dict.fromkeys(row["state"] for row in serious):
        clips = {
            row["clip"]: row["serious"] for row in serious if row["state"] == state
        }
        show_first(state, clips)

    remarks = [row for row in rows if row["notes"] and row["clip"] not in skipped]
    more_remarks = len(remarks) - len(serious)
    buckets = result.account["buckets"]
    if buckets:
        windows = counted(len(result.job.library.windows), "window")
        shape = shape_words(buckets[0]["shape"])
        grouping = "of" if len(buckets) == 1 else f"in {len(buckets)} buckets, largest"
        tell(f"{windows} {grouping} {shape}")

    # How captions are counted asks nothing of the user.
    notes = [
        note
        for note in dict.fromkeys((*result.job.notes, *result.account["notes"]))
        if not note.startswith(UNCOUNTED)
    ]
    shown_notes = shown_first(notes)
    for note in shown_notes:
        tell(f"note: {note}")
    remember(result.job.cache, shown_notes)
    more_notes = len(notes) - len(shown_notes)
    details = [
        "a row for each clip",
        counted(more_remarks, "small remark") if more_remarks > 0 else "",
        counted(more_notes, "more note") if more_notes else "",
    ]
    option = f"{command} --verbose".lstrip()
    tell(f"{option}: {', '.join(filter(None, details))}")


def show_first(state: str, clips: Mapping[str, str]) -> None:
    """Print the first clips of a state with their remarks, and the number of the others."""
    for clip, remark in list(clips.items())[:LISTED]:
        tell(f"{state}: {clip}: {remark}")
    if len(clips) > LISTED:
        others = [
            f"{clip} ({remark.partition(': ')[0]})"
            for clip, remark in list(clips.items())[LISTED:]
        ]
        tell(f"{state}: {len(others)} more: {some(others)}")


def show_details(
    result: CheckResult, rows: Sequence[Mapping[str, Any]], *, every: bool
) -> None:
    """Print the clips, the buckets, what is in no window, and the notes."""
    job = result.job
    account = result.account
    show_clips(job, rows, every=every)
    if account["buckets"]:
        buckets = []
        for bucket in account["buckets"]:
            sound = ", with sound" if bucket["sound"] else ""
            shape = shape_words(bucket["shape"]) + sound
            buckets.append([shape, bucket["windows"]])
        columns = ["width x height", "windows"]
        print_table("buckets, largest first", columns, buckets, right=(1,))

    used_clips = [clip for clip in account["clips"] if clip["reason"] is None]
    seconds = sum(clip["source_seconds"] or 0.0 for clip in used_clips)
    seconds_cut = sum(clip["seconds_cut"] for clip in used_clips)
    if seconds_cut > 0.05:
        tell(
            f"{seconds_cut:.1f} s of the {seconds:.1f} s of these clips are in no window"
        )

    sums = "found {found} = used {used} + kept aside {held_out} + skipped {skipped}"
    shapes = counted(len(job.shapes_by_cost), "bucket")
    tell(
        f"{sums.format_map(account)};  {counted(len(job.library.windows), 'window')} in {shapes}"
    )
    notes = most_serious_first((*job.notes, *account["notes"]))
    for note in notes:
        tell(f"note: {note}")
    remember(job.cache, notes)


def show_clips(job: Job, clips: Sequence[Mapping[str, Any]], *, every: bool) -> None:
    """Print the table of the clips, with the columns that fit the terminal."""
    rows = sorted(clips, key=lambda row: natural(row["clip"]))
    columns: tuple[str, ...]
    if width() >= WIDE:
        columns = COLUMNS
    elif width() >= MEDIUM:
        columns = MEDIUM_COLUMNS
    else:
        columns = NARROW_COLUMNS

    listed = rows if every else first_of_each_state(rows)
    cells = []
    for row in listed:
        cells.append([row[column] for column in columns])
    numbers = [i for i, column in enumerate(columns) if column in NUMBERS]
    title = f"clips, with their views at {counted(job.steps, 'step')}"
    print_table(title, columns, cells, right=numbers)
    if width() < WIDE:  # a column of notes would be a few letters wide
        print_notes({row["clip"]: row["notes"] for row in rows if row["notes"]})


def first_of_each_state(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows, with only the first FEW of a state that more than MANY clips
    have.

    A row with the number of the others takes their place.
    """
    count = Counter(row["state"] for row in rows)
    position: Counter[str] = Counter()
    listed: list[Mapping[str, Any]] = []
    for row in rows:
        state = row["state"]
        position[state] += 1
        if count[state] <= MANY or position[state] <= FEW:
            listed.append(row)
        elif position[state] == FEW + 1:
            others = f"… {count[state] - FEW} more (--all)"
            listed.append(dict.fromkeys(COLUMNS, "") | {"clip": others, "state": state})
    return listed


def clip_row(job: Job, clip: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of a clip by column; its frames are at the rate of the training."""
    source = ""
    if clip["source_fps"]:
        rate = f"{clip['source_frames']} @ {clip['source_fps']:.4g}"
        source = f"{rate} = {clip['source_seconds']:.2f} s"
    elif clip["source_frames"]:
        source = "image"

    frames_used = clip["frames"] or None
    if clip["frames_cut"]:
        frames_used = f"{clip['frames']} ({clip['frames_cut']} cut)"
    notes = [*clip["warnings"], *clip["notes"]]
    problem = ""
    if clip["reason"]:
        detail = clip["detail"]
        for root in job.library.roots:
            detail = detail.replace(f"{root}/", "")
        problem = f"{reason_words(clip['reason'])}: {detail}"
        notes.insert(0, problem)

    state = state_words(clip)
    if clip["serious"]:
        is_skipped = clip["reason"] is not None
        state += "; look at the clip, too" if is_skipped else ", but look at it"
    return {
        "clip": short_path(clip["path"], job.library.roots),
        "skipped": clip["reason"] is not None,
        "problem": problem,
        "serious": "; ".join(clip["serious"]),
        "state": state,
        "source": source,
        "pixels": f"{clip['width']}x{clip['height']}" if clip["width"] else "",
        "frames": clip["model_frames"],
        "bucket": shape_words(clip["shape"]) if clip["shape"] else "",
        "windows": clip["windows"] or None,
        "frames used": frames_used,
        "views": clip["views"],
        "notes": "; ".join(notes),
    }


Purpose = Literal["general", "style", "character", "motion"]
Model = Annotated[
    str | None,
    Opt(
        help="the name of a server's model, or a transformers folder or Hub id to run here"
    ),
]
Endpoint = Annotated[
    str | None, Opt(help="a server with OpenAI's chat API: http://…/v1")
]
KeyVariable = Annotated[str, Opt(help="environment variable with the server's key")]
Workers = Annotated[int, Opt(min=1, max=256, help="requests at once")]
Timeout = Annotated[
    float,
    Opt(
        min=1.0,
        max=86400.0,
        help="seconds for an answer of the server, to its last byte",
    ),
]
Frames = Annotated[
    int, Opt(min=1, max=256, help="frames of a clip that the model gets")
]
PurposeOption = Annotated[Purpose, Opt(help="what the LoRA is to learn")]
Prompt = Annotated[
    str | None, Opt(help="a prompt of your own instead of the purpose's")
]
Trigger = Annotated[str | None, Opt(help="a word that each new caption must contain")]
MaxWords = Annotated[int, Opt(min=1, max=2000, help="words of a caption")]
OverwriteCaptions = Annotated[
    bool, Opt("--overwrite", help="replace captions; the old ones stay as .bak files")
]
DryRun = Annotated[
    bool, Opt("--dry-run", help="list the clips that would be captioned")
]


@takes_config
def caption(
    overrides: Overrides,
    model: Model = None,
    endpoint: Endpoint = None,
    key_env: KeyVariable = "OPENAI_API_KEY",
    workers: Workers = 4,
    timeout: Timeout = ANSWER_SECONDS,
    frames: Frames = 8,
    purpose: PurposeOption = "general",
    prompt: Prompt = None,
    trigger: Trigger = None,
    max_words: MaxWords = 100,
    overwrite: OverwriteCaptions = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let a vision-language model write the captions that clips lack."""
    if not model:
        from videotune.captioning.offered_models import advice

        raise VideotuneError(advice())

    from videotune.commands.caption import CaptionOptions
    from videotune.commands.caption import caption as caption_clips

    options = CaptionOptions(
        model=model,
        endpoint=endpoint,
        key_env=key_env,
        workers=workers,
        timeout=timeout,
        frames=frames,
        purpose=purpose,
        prompt=prompt,
        trigger=trigger,
        max_words=max_words,
        overwrite=overwrite,
        dry_run=dry_run,
    )
    options.check()
    doing("reading the clips")
    result = caption_clips(overrides, options=options)
    answer(as_json, vars(result), lambda _: show_captions(result, dry_run=dry_run))
    raise typer.Exit(result.exit_code)


def show_captions(result: CaptionResult, *, dry_run: bool) -> None:
    """Print the clips without a new caption and the reasons, and the counts."""
    rows = [*result.skipped, *result.failed, *result.hints]
    if dry_run:
        planned = [
            {"clip": clip, "state": "would be captioned"} for clip in result.planned
        ]
        rows = [*planned, *rows]
    for row in rows:
        out(": ".join(filter(None, row.values())))
    out(", ".join(f"{len(clips)} {name}" for name, clips in vars(result).items()))
