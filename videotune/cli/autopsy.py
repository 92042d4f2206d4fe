"""``videotune autopsy``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from videotune import commands
from videotune.cli.options import AsJson, Base, Offline
from videotune.console import out, print_table
from videotune.text import counted, plain, shape_words


def autopsy(
    files: Annotated[list[Path], typer.Argument(help="the other trainer's config; its dataset's config beside it")],
    data: Annotated[Path, typer.Option("--data", help="a folder of clips")],
    sets: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE by their keys; may be repeated")] = None,
    base: Base = None,
    as_json: AsJson = False,
    offline: Offline = False,
) -> None:
    """Say what another trainer does with these clips by its config, beside what videotune does."""
    from videotune.interop.command_line import typed

    given = {key: typed(value) for key, _, value in (one.partition("=") for one in sets or ())}
    found = commands.autopsy.autopsy(files, data, base=base, sets=given)
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        show(found)


def show(found: dict[str, Any]) -> None:
    """Print a line a clip, the run's figures side by side, and the differences by what they cost."""
    trainer, theirs, ours = found["trainer"], found["theirs"], found["ours"]
    out(
        f"{trainer} (rules of {found['repository']} at {found['commit']}), {found['model']}, {len(found['clips'])} clips"
    )
    rows = [[row["path"], source_text(row["source"]), there(row), here(row["ours"])]
            for row in found["clips"]]  # fmt: skip
    print_table("clips", ["clip", "source", trainer, "videotune"], rows)
    print_table("a run", ["", trainer, "videotune"], [
        ["clips used", theirs["used"], ours["used"]],
        ["clips dropped", theirs["dropped"], ours["dropped"]],
        ["buckets (samples)", buckets_text(theirs["buckets"]), buckets_text(ours["buckets"])],
        ["steps an epoch", plain(theirs["steps_per_epoch"]), plain(ours["steps_per_epoch"])],
        ["noise levels: median (5-95 %)", noise_text(theirs["noise"]), noise_text(ours["noise"])],
        ["alpha / rank", plain(theirs["scale"]), plain(ours["scale"])],
        ["as its file is read", plain(theirs["read_scale"]), plain(ours["scale"])],
    ])  # fmt: skip
    for number, one in enumerate(found["findings"], 1):
        out(f"{number}. {one['text']}")
    if not found["findings"]:
        out("Both do the same with these clips, but for rounding.")


def source_text(source: dict[str, Any]) -> str:
    """Frames and rate of a clip."""
    return f"{source['frames']} at {source['fps']:g} fps"


def there(row: dict[str, Any]) -> str:
    """What their rules make of a clip."""
    texts = [
        f"dropped: {one['dropped']}" if one["dropped"] else
        f"{counted(one['samples'], 'sample')}, {shape_words(one['shape'])}, {one['speed']:.2f} x"
        for one in row["theirs"]
    ]  # fmt: skip
    return "\n".join(dict.fromkeys(texts))


def here(ours: dict[str, Any]) -> str:
    """What videotune makes of it."""
    if not ours["used"]:
        return f"skipped: {ours['reason']}"
    return f"{counted(ours['windows'], 'window')}, {shape_words(ours['shape'])}, {ours['speed']:.2f} x"


def buckets_text(buckets: dict[str, int]) -> str:
    """The buckets, the largest first, each with its samples."""
    texts = [f"{shape_words(shape)} ({count})" for shape, count in buckets.items()]
    return "\n".join([*texts[:4], *([f"and {len(texts) - 4} more"] if len(texts) > 4 else [])]) or "none"


def noise_text(noise: Any) -> str:
    """The median and the range of the noise levels, or why they are not known."""
    return noise if isinstance(noise, str) else f"{noise[2]:.2f} ({noise[0]:.2f}-{noise[4]:.2f})"
