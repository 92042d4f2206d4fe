"""The ``cache`` commands: encode ahead of a training, and look after what was encoded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from videotune import commands
from videotune.cli.options import AsJson, CachePlace, Opt, Skips, takes_config, with_json
from videotune.console import out, print_table, quiet, size
from videotune.errors import SKIPPED, VideotuneError
from videotune.text import counted

if TYPE_CHECKING:
    from videotune.job.overrides import Overrides

Every = Annotated[bool, Opt("--all", help="a row for each entry")]
Yes = Annotated[bool, Opt("--yes", help="remove them; without --yes they are only listed")]
cache_app = typer.Typer(
    help="Encode clips and captions before a training; list, verify and prune the cache."
)


@cache_app.callback(invoke_without_command=True)
@with_json
@takes_config
def cache(overrides: Overrides, context: typer.Context, allow_skips: Skips = None) -> None:
    """Encode the clips and captions of a run; a subcommand lists, verifies or prunes a cache."""
    if context.invoked_subcommand is not None:
        if any(vars(overrides).values()) or allow_skips:
            raise VideotuneError(
                f"options go after the word: videotune cache {context.invoked_subcommand} …"
            )
        return
    result = commands.cache.cache(overrides, allow_skips=allow_skips)
    if not quiet():
        out(f"{result.windows} windows are cached in {result.folder}")


@cache_app.command("ls")
def cache_ls(place: CachePlace, as_json: AsJson = False, every: Every = False) -> None:
    """List the entries of a cache: clips, captions, sizes, and the encoders that made them."""
    store, rows = commands.cache.list_cache(place)
    total = f"{len(rows)} entries, {size(sum(row['bytes'] for row in rows))}"
    if as_json:
        print(json.dumps({"folder": str(store.folder), "entries": rows}, indent=2))
    elif every:
        columns = ["kind", "of", "clip", "holds", "bytes", "encoder", "made", "key"]
        print_table(str(store.folder), columns, [cells(row) for row in rows], right=(4,))
        out(total)
    else:
        for line in by_encoder(rows):
            out(line)
        out(f"{total} in {store.folder} (--all lists them)")


@cache_app.command("verify")
def cache_verify(place: CachePlace) -> None:
    """Verify every entry; drop damaged ones, which the next run encodes again (exit code 2)."""
    store, count, damaged = commands.cache.verify_cache(place)
    for row in damaged:
        out(f"{row.file}: {row.kind} of {row.of[:80]!r} {row.why}")
    if damaged:
        out(
            f"{len(damaged)} of {count} entries are damaged and were dropped; the next run makes them anew"
        )
        raise typer.Exit(SKIPPED)
    out(f"all {count} entries in {store.folder} are as they were written")


@cache_app.command("prune")
@takes_config
def cache_prune(overrides: Overrides, yes: Yes = False) -> None:
    """Remove the entries that a run with these options would not read."""
    store, pruned = commands.cache.prune_cache(overrides, yes=yes)
    for entry in pruned.entries[:20]:
        out(f"{entry.kind} of {entry.of[:80]!r}: {size(entry.bytes)}")
    if len(pruned.entries) > 20:
        out(f"… and {len(pruned.entries) - 20} more")
    for file in pruned.files[:20]:
        out(f"{file}: no entry")
    freed = f"{len(pruned.entries)} entries of {size(pruned.entry_bytes)}"
    freed += (
        f" and {len(pruned.files)} other files of {size(pruned.file_bytes)}"
        if pruned.files
        else ""
    )
    if yes:
        out(f"removed {freed}; {pruned.kept} entries stay in {store.folder}")
    elif pruned.entries or pruned.files:
        out(f"would remove {freed}; {pruned.kept} entries would stay. --yes does it")
    else:
        out(f"nothing to remove: all {pruned.kept} entries in {store.folder} are needed")


def cells(row: dict[str, Any]) -> list[str | None]:
    """An entry as the table shows it."""
    clip = row["clip"] and Path(row["clip"]).name
    encoder = row["encoder"] and row["encoder"][:8]
    holds = ", ".join(f"{name} {what}" for name, what in row["tensors"].items())
    return [
        row["kind"],
        row["of"][:60],
        clip,
        holds,
        size(row["bytes"]),
        encoder,
        row["made"],
        row["key"][:8],
    ]


def by_encoder(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for what each encoder made: how much of what, its size, and when the last of it was made."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["encoder"] or ""), []).append(row)
    lines = []
    for (kind, encoder), own in groups.items():
        clips = counted(len({row["clip"] for row in own}), "clip")
        what = (
            f"{counted(len(own), 'window')} of {clips}"
            if kind == "latents"
            else counted(len(own), "caption")
        )
        made = max((row["made"] for row in own if row["made"]), default="")[:16].replace(
            "T", " "
        )
        parts = [what, size(sum(row["bytes"] for row in own)), made]
        by = f"{'VAE' if kind == 'latents' else 'text encoder'} {encoder[:8]}"
        lines.append(f"{by}: {', '.join(part for part in parts if part)}")
    return lines
