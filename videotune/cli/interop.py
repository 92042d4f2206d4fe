"""Configs of other trainers: ``videotune autopsy`` and ``videotune import``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from videotune import commands
from videotune.cli.options import Arg, AsJson, Offline, Opt
from videotune.config.load import shortened
from videotune.console import answer, echo, out, print_table
from videotune.text import counted, plain, shape_words

if TYPE_CHECKING:
    from videotune.interop.translate import Imported


def autopsy(
    files: Annotated[
        list[Path], Arg(help="the other trainer's config; its dataset's config beside it")
    ],
    data: Annotated[Path, Opt(help="a folder of clips")],
    sets: Annotated[
        list[str] | None, Opt("--set", help="KEY=VALUE by their keys; may be repeated")
    ] = None,
    base: Annotated[
        str | None, Opt(help="the base model's folder or Hub id, if the config names none")
    ] = None,
    as_json: AsJson = False,
    offline: Offline = False,
) -> None:
    """Say what another trainer does with these clips by its config, beside what videotune does."""
    answer(as_json, commands.autopsy.autopsy(files, data, base=base, sets=sets or ()), show)


def show(found: dict[str, Any]) -> None:
    """Print a line a clip, the run's figures side by side, and the differences by what they cost."""
    trainer = found["trainer"]
    both = (found["theirs"], found["ours"])
    out(
        f"{trainer} ({found['repository']} at {found['commit']}), {found['model']}, {len(found['clips'])} clips"
    )
    rows = [
        [row["path"], "{frames} at {fps:g} fps".format(**row["source"]),
         "\n".join(dict.fromkeys(outcome_text(outcome) for outcome in row["theirs"])),
         outcome_text({**row["ours"], "dropped": row["ours"]["reason"], "samples": row["ours"]["windows"]})]
        for row in found["clips"]
    ]  # fmt: skip
    print_table("clips", ["clip", "source", trainer, "videotune"], rows)
    print_table("a run", ["", trainer, "videotune"], [
        ["clips used, dropped", *(f"{one['used']}, {one['dropped']}" for one in both)],
        ["buckets (samples)", *(buckets_text(one["buckets"]) for one in both)],
        ["steps an epoch", *(plain(one["steps_per_epoch"]) for one in both)],
        ["noise levels: median (5-95 %)", *(noise_text(one["noise"]) for one in both)],
        ["alpha / rank", *(plain(one["scale"]) for one in both)],
        ["as its file is read", *(plain(one.get("read_scale", one["scale"])) for one in both)],
    ])  # fmt: skip
    for number, one in enumerate(found["findings"], 1):
        out(f"{number}. {one['text']}")
    if not found["findings"]:
        out("Both do the same with these clips, but for rounding.")


def outcome_text(outcome: dict[str, Any]) -> str:
    """What becomes of a clip: why it is dropped, or its samples with the speed at which they play."""
    if outcome["dropped"]:
        return f"dropped: {outcome['dropped']}"
    return f"{counted(outcome['samples'], 'sample')}, {shape_words(outcome['shape'])}, {outcome['speed']:.2f} x"


def buckets_text(buckets: dict[str, int]) -> str:
    """The buckets, the largest first, each with its samples."""
    texts = [f"{shape_words(shape)} ({count})" for shape, count in buckets.items()]
    return (
        "\n".join([*texts[:4], *([f"and {len(texts) - 4} more"] if len(texts) > 4 else [])])
        or "none"
    )


def noise_text(noise: Any) -> str:
    """The median and the range of the noise levels, or why they are not known."""
    return (
        noise if isinstance(noise, str) else f"{noise[2]:.2f} ({noise[0]:.2f}-{noise[4]:.2f})"
    )


ORDER = ("differs", "unknown", "missing", "none", "translated", "same")
"""Verdicts in the order in which is spoken of their keys."""


def import_config(
    files: Annotated[
        list[Path], Arg(help="the config; a command line or a dataset's config beside it")
    ],
    to: Annotated[
        Path | None, Opt("--out", help="a new JSON file for videotune's config")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Translate a config of another trainer, with a row for every key of it."""
    result = commands.import_config.import_config(files, out=to)
    answer(as_json, asdict(result), lambda _: show_imported(result))
    if to is not None:
        echo(f"config: {to}; `videotune check --config {to}` accounts for its clips")


def show_imported(result: Imported) -> None:
    """Print the table, the notes below it, surprises first, and the counts."""
    rows = []
    notes = dict[tuple[str, str], list[str]]()
    for row in result.rows:
        value = shortened(json.dumps(row.theirs, ensure_ascii=False, default=str))
        ours = "\n".join(
            f"{key} = {shortened(json.dumps(one, ensure_ascii=False))}"
            for key, one in row.ours.items()
        )
        rows.append(
            [f"{row.key} = {value}{'' if row.given else ' (default)'}", row.verdict, ours]
        )
        said = f"{row.note} [{row.source}]" if row.source else row.note
        notes.setdefault((row.verdict, said if row.note else ""), []).append(row.key)
    print_table(f"keys of {result.trainer}", ["theirs", "verdict", "videotune"], rows)
    for (verdict, note), keys in sorted(notes.items(), key=lambda one: ORDER.index(one[0][0])):
        if note:
            out(f"{verdict}: {', '.join(keys)}: {note}")
    counts = Counter(row.verdict for row in result.rows)
    out(
        f"{len(result.rows)} keys: {', '.join(f'{count} {word}' for word, count in counts.items())}"
    )
