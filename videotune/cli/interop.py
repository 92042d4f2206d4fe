"""Configs of other trainers: ``videotune autopsy`` and ``videotune import``."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from videotune.cli.options import Arg, AsJson, Offline, Opt, Verbose
from videotune.console import answer, doing, echo, print_table, tell
from videotune.errors import VideotuneError
from videotune.interop.translated_key import TranslatedKey, our_key, short_key
from videotune.text import counted, plain, shape_words, shortened, some

if TYPE_CHECKING:
    from videotune.interop.translate import Imported

BUCKETS_SHOWN = 4


def autopsy(
    files: Annotated[
        list[Path],
        Arg(help="the other trainer's config; its dataset's config beside it"),
    ],
    data: Annotated[Path, Opt(help="a folder of clips")],
    sets: Annotated[
        list[str] | None, Opt("--set", help="KEY=VALUE by their keys; may be repeated")
    ] = None,
    base: Annotated[
        str | None,
        Opt(help="the base model's folder or Hub id, if the config names none"),
    ] = None,
    as_json: AsJson = False,
    offline: Offline = False,
    verbose: Verbose = False,
) -> None:
    """Compare what another trainer does with these clips by its config with videotune."""
    from videotune.interop.foreign_config import read_foreign_config

    read_foreign_config(files)
    if not data.exists():
        raise VideotuneError(f"--data: {data} does not exist. Name a folder of clips")
    doing("reading the config and the clips")
    from videotune.commands.autopsy import autopsy as compare_trainers

    result = compare_trainers(files, data, base=base, sets=sets or ())
    answer(as_json, result, lambda _: show_autopsy(result, verbose=verbose))


def show_autopsy(result: dict[str, Any], *, verbose: bool = False) -> None:
    """Print the differences by what they cost, both runs' figures, and, verbosely, a
    line a clip.
    """
    trainer = result["trainer"]
    clips = counted(len(result["clips"]), "clip")
    tell(f"{trainer} and videotune, {result['model']}, {clips}")
    for number, finding in enumerate(result["findings"], 1):
        tell(f"{number}. {finding['text']}", indent="   ")
    if not result["findings"]:
        tell("Both do the same with these clips, except for rounding.")
    if not verbose:
        tell("--verbose: a row for each clip, buckets, noise levels, sources")
        return

    tell(f"{trainer} is {result['repository']} at {result['commit']}")
    rows = [clip_cells(clip) for clip in result["clips"]]
    print_table("clips", ["clip", "source", trainer, "videotune"], rows)

    theirs = run_figures(result["theirs"])
    ours = run_figures(result["ours"])
    figures = [[name, theirs[name], ours[name]] for name in theirs]
    print_table("a run", ["", trainer, "videotune"], figures)


def clip_cells(clip: dict[str, Any]) -> list[str]:
    """Return a clip's row: path, source, and what either trainer makes of it."""
    theirs = dict.fromkeys(outcome_text(outcome) for outcome in clip["theirs"])
    ours = clip["ours"] | {
        "dropped": clip["ours"]["reason"],
        "samples": clip["ours"]["windows"],
    }
    source = "{frames} at {fps:g} fps".format(**clip["source"])
    return [clip["path"], source, "\n".join(theirs), outcome_text(ours)]


def run_figures(run: dict[str, Any]) -> dict[str, str]:
    """Return the figures of a run by the name of their row."""
    return {
        "clips used, dropped": f"{run['used']}, {run['dropped']}",
        "buckets (samples)": buckets_text(run["buckets"]),
        "steps an epoch": plain(run["steps_per_epoch"]),
        "noise levels: median (5-95 %)": noise_text(run["noise"]),
        "alpha / rank": plain(run["scale"]),
        "as its file is read": plain(run.get("read_scale", run["scale"])),
    }


def outcome_text(outcome: dict[str, Any]) -> str:
    """Return why a clip is dropped, or its samples and the speed at which they play."""
    if outcome["dropped"]:
        return f"dropped: {outcome['dropped']}"
    samples = counted(outcome["samples"], "sample")
    return f"{samples}, {shape_words(outcome['shape'])}, {outcome['speed']:.2f} x"


def buckets_text(buckets: dict[str, int]) -> str:
    """Return the buckets, largest first, each with its samples."""
    if not buckets:
        return "none"
    lines = [f"{shape_words(shape)} ({count})" for shape, count in buckets.items()]
    if len(lines) > BUCKETS_SHOWN:
        lines[BUCKETS_SHOWN:] = [f"and {len(lines) - BUCKETS_SHOWN} more"]
    return "\n".join(lines)


def noise_text(noise: Any) -> str:
    """Return the median and range of the noise levels, or why they are unknown."""
    if isinstance(noise, str):
        return noise
    return f"{noise[2]:.2f} ({noise[0]:.2f}-{noise[4]:.2f})"


ORDER = ("missing", "differs", "unknown", "none", "translated", "same")
"""Verdicts in the order in which the notes on their keys are printed."""

SURPRISES = ("missing", "differs", "unknown")
"""Verdicts of which each key is printed without --all."""

LISTED = 8
"""Keys that are printed without --all."""


def import_config(
    files: Annotated[
        list[Path],
        Arg(help="the config; a command line or a dataset's config beside it"),
    ],
    to: Annotated[
        Path | None, Opt("--out", help="a new JSON file for videotune's config")
    ] = None,
    every: Annotated[
        bool, Opt("--all", help="print every key, with its source")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Translate a config of another trainer, with a row for every key of it."""
    from videotune.commands.import_config import import_config as translate

    result = translate(files, out=to)
    answer(
        as_json, asdict(result.shown()), lambda _: show_imported(result, every=every)
    )
    if to is not None:
        show_next_command(to, result)


def show_next_command(to: Path, result: Imported) -> None:
    """Print the command that reads the written config, with what the config lacks.

    Args:
        to: The file of videotune's config.
        result: The translation.
    """
    missing = missing_folders(result.config)
    only_dataset = len(result.config.get("datasets", [])) == 1
    command = f"videotune check {shlex.quote(str(to))}"
    if missing and only_dataset:
        command += " --data DIR"
    if not names_base(result):
        command += " --preset NAME"
    echo(f"config: {to}; `{command}` accounts for its clips")

    if not names_base(result):
        echo(
            "the config names no model: choose the preset by `videotune presets list`, or"
            f" add base_model_name to {to}"
        )
    for path in missing:
        remedy = "give the clips with --data DIR, which replaces it"
        echo(f"{path} is not here: {remedy if only_dataset else f'change it in {to}'}")


def missing_folders(config: dict[str, Any]) -> list[str]:
    """Return the folders of the config's datasets that do not exist."""
    paths = [str(dataset.get("path", "")) for dataset in config.get("datasets", [])]
    return [
        path for path in paths if Path(path).is_absolute() and not Path(path).exists()
    ]


def show_imported(result: Imported, *, every: bool = False) -> None:
    """Print the counts, and what does not carry over; surprises first.

    Args:
        result: The translation.
        every: Print a row for each key, and every note with its source.
    """
    counts = Counter(row.verdict for row in result.rows)
    if not names_base(result):
        tell(
            "The base model is not recognised: add base_model_name, or give --base DIR or"
            " Hub id to the commands that follow.",
            indent="  ",
        )
    in_order = [name for name in ORDER if counts[name]]
    text = ", ".join(f"{counts[name]} {name}" for name in in_order)
    tell(f"{len(result.rows)} keys of {result.trainer}: {text}")
    if every:
        show_every_key(result)
        return

    surprises = [row for row in result.rows if row.verdict in SURPRISES]
    surprises.sort(key=lambda row: (ORDER.index(row.verdict), not row.given))
    for row in surprises[:LISTED]:
        tell(surprise_text(row), indent="  ")
    if len(surprises) > LISTED:
        tell(f"{len(surprises) - LISTED} more differ (--all)")

    dropped = dropped_keys(result)
    if dropped:
        tell(f"none: {some(dropped, most=12)}", indent="  ")
    others = counts["none"] - len(dropped)
    if others:
        more = " more" if dropped else ""
        are = "is" if others == 1 else "are"
        tell(
            f"none: {others}{more} {are} empty, a default of theirs, or a file whose keys are read",
            indent="  ",
        )
    tell("--all: every key, what it becomes, and the source of each remark")


def surprise_text(row: TranslatedKey) -> str:
    """Return a line on a key that does not carry over as it is: why, and what becomes
    of it.
    """
    key = short_key(row.key)
    if row.verdict == "missing":
        return f"missing: {key}: {shortened(str(row.theirs))}: {row.note}"
    note = row.note or "no rule knows it"
    settings = []
    for name, value in row.ours.items():
        text = shortened(json.dumps(value, ensure_ascii=False))
        settings.append(f"{our_key(name)} = {text}")
    if settings:
        note += f"; taken as {', '.join(settings)}"
    elif row.given:
        note += "; left out"
    return f"{row.verdict}: {key}: {note}"


def dropped_keys(result: Imported) -> list[str]:
    """Return the keys of the config that are not taken over.

    The key of a file that was read is not lost: rows of its own stand for it.
    """
    read_files = {row.key.partition(".")[0] for row in result.rows if "." in row.key}
    lost_keys = [row.key for row in result.rows if is_lost(row)]
    return [short_key(key) for key in lost_keys if key not in read_files]


def names_base(result: Imported) -> bool:
    """Whether the config says which base model is trained."""
    return bool({"base_model_name", "family", "preset"} & set(result.config))


def is_lost(row: TranslatedKey) -> bool:
    """Whether a key that the config has is not taken over."""
    return row.verdict == "none" and row.given and row.theirs not in (None, "", [], {})


def show_every_key(result: Imported) -> None:
    """Print a row for each key, and the notes below, surprises first."""
    rows = []
    notes: dict[tuple[str, str], list[str]] = {}
    for row in result.rows:
        value = shortened(json.dumps(row.theirs, ensure_ascii=False, default=str))
        default = "" if row.given else " (default)"
        ours = []
        for key, our_value in row.ours.items():
            text = shortened(json.dumps(our_value, ensure_ascii=False))
            ours.append(f"{our_key(key)} = {text}")
        rows.append([f"{row.key} = {value}{default}", row.verdict, "\n".join(ours)])

        if row.note:
            note = f"{row.note} [{row.source}]" if row.source else row.note
            notes.setdefault((row.verdict, note), []).append(row.key)
    print_table(f"keys of {result.trainer}", ["theirs", "verdict", "videotune"], rows)

    by_verdict = sorted(notes.items(), key=lambda item: ORDER.index(item[0][0]))
    for (verdict, note), keys in by_verdict:
        tell(f"{verdict}: {', '.join(keys)}: {note}")
