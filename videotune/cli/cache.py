"""The ``cache`` commands: encode before a training, and list, verify and prune a cache."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from videotune.cli.options import (
    AsJson,
    CacheFolder,
    Opt,
    Skips,
    takes_config,
    takes_config_options,
    with_json,
)
from videotune.console import doing, is_silent_process, out, print_table, size
from videotune.errors import SKIPPED, VideotuneError
from videotune.files import CONFIG_SUFFIXES
from videotune.text import counted, counted_are

if TYPE_CHECKING:
    from videotune.job.overrides import Overrides

LISTED = 20
"""Entries, and other files, that ``prune`` lists before it counts the remaining ones.
"""

ENCODER_LABELS = {
    "latents": "VAE",
    "text": "text encoder",
    "masks": "loss masks",
    "conditions": "conditions",
}
"""What ``ls`` calls the encoder of each kind of entries; masks need none."""

SLIP = 0.8
"""How alike a slip and its command are, as ``difflib`` measures it; "clips" is no slip
of "list".
"""

Every = Annotated[bool, Opt("--all", help="print a row for each entry")]
Yes = Annotated[
    bool, Opt("--yes", help="remove them; without --yes they are only listed")
]


class CacheGroup(TyperGroup):
    """The cache's commands; ``cache SOURCE`` encodes the clips, or those of a config."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a first argument that is no command, nor a slip of one, as the clips or a
        config file.
        """
        is_argument = (
            args and not args[0].startswith("-") and args[0] not in self.commands
        )
        if is_argument and not _is_slip(args[0], self.commands):
            is_config = Path(args[0]).suffix.lower() in CONFIG_SUFFIXES
            args = ["--config" if is_config else "--data", *args]
        return super().parse_args(ctx, args)


def _is_slip(argument: str, commands: Iterable[str]) -> bool:
    """Return whether an argument is nearly a command, and names nothing that exists."""
    near_commands = difflib.get_close_matches(argument, commands, cutoff=SLIP)
    return bool(near_commands) and not Path(argument).exists()


cache_app = typer.Typer(
    cls=CacheGroup,
    help="Encode clips and captions before a training; list, verify and prune the cache.",
)


@cache_app.callback(invoke_without_command=True)
@with_json
@takes_config_options
def cache(
    overrides: Overrides, context: typer.Context, allow_skips: Skips = None
) -> None:
    """Encode the clips and captions of a run: `cache CLIPS`; a subcommand lists,
    verifies or prunes a cache.
    """
    subcommand = context.invoked_subcommand
    if subcommand is not None:
        if any(vars(overrides).values()) or allow_skips:
            raise VideotuneError(
                f"videotune cache: options belong after the subcommand. "
                f"Write: videotune cache {subcommand} …"
            )
        return

    from videotune.job.early_captions import refuse_missing_captions
    from videotune.job.overrides import check_files

    check_files(overrides)
    refuse_missing_captions(overrides, allow_skips)
    doing("opening the clips")
    from videotune.commands.cache import cache as encode_cache

    result = encode_cache(overrides, allow_skips=allow_skips)
    if not is_silent_process():
        out(f"{counted_are(result.windows, 'window')} cached in {result.folder}")


@cache_app.command("list", hidden=True)
@cache_app.command("ls")
def cache_ls(
    folder: CacheFolder, as_json: AsJson = False, every: Every = False
) -> None:
    """List the entries of a cache: clips, captions, sizes, and the encoders that made
    them.
    """
    from videotune.commands.cache_folder import place_of_cache

    cache_path = place_of_cache(folder)
    doing(f"reading {cache_path}")
    from videotune.commands.cache import list_cache

    _, rows = list_cache(folder)
    total = f"{entries(len(rows))}, {size(sum(row['bytes'] for row in rows))}"

    if as_json:
        print(json.dumps({"folder": cache_path, "entries": rows}, indent=2))
    elif every:
        columns = ["kind", "of", "clip", "holds", "bytes", "encoder", "made", "key"]
        cells = [entry_cells(row) for row in rows]
        print_table(cache_path, columns, cells, right=(4,))
        out(total)
    else:
        for line in encoder_lines(rows):
            out(line)
        out(f"{total} in {cache_path} (--all lists them)")


@cache_app.command("verify")
def cache_verify(folder: CacheFolder) -> None:
    """Verify every entry; drop damaged ones, which the next run encodes again (exit
    code 2).
    """
    from videotune.commands.cache_folder import place_of_cache

    cache_path = place_of_cache(folder)
    doing(f"reading {cache_path}")
    from videotune.commands.cache import verify_cache

    _, count, damaged = verify_cache(folder)
    for row in damaged:
        out(f"{row.file}: {row.kind} of {row.of[:80]!r} {row.why}")
    if damaged:
        out(
            f"damaged and dropped: {len(damaged)} of {entries(count)}; "
            f"the next run encodes them again"
        )
        raise typer.Exit(SKIPPED)
    out(f"{entries(count)} in {cache_path}: as written, none damaged")


@cache_app.command("prune")
@takes_config
def cache_prune(overrides: Overrides, yes: Yes = False) -> None:
    """Remove the entries that a run with these options would not read."""
    from videotune.job.overrides import check_files

    check_files(overrides)
    doing("opening the clips")
    from videotune.commands.cache import prune_cache

    store, pruned = prune_cache(overrides, yes=yes)

    for entry in pruned.entries[:LISTED]:
        out(f"{entry.kind} of {entry.made_of[:80]!r}: {size(entry.bytes)}")
    if len(pruned.entries) > LISTED:
        out(f"… and {len(pruned.entries) - LISTED} more")
    for file in pruned.files[:LISTED]:
        out(f"{file}: no entry")

    freed = f"{entries(len(pruned.entries))} of {size(pruned.entry_bytes)}"
    if pruned.files:
        freed += f" and {counted(len(pruned.files), 'other file')} of {size(pruned.file_bytes)}"
    if yes:
        out(f"removed {freed}; {entries(pruned.kept)} left in {store.place}")
    elif pruned.entries or pruned.files:
        out(
            f"would remove {freed} and leave {entries(pruned.kept)}. --yes removes them"
        )
    else:
        out(f"nothing to remove: {entries(pruned.kept)} in {store.place}, all needed")


def entries(count: int) -> str:
    """Return '1 entry', '2 entries'."""
    return counted(count, "entry", "entries")


def entry_cells(row: dict[str, Any]) -> list[str | None]:
    """Return the cells of an entry's row."""
    tensors = [f"{name} {shape}" for name, shape in row["tensors"].items()]
    return [
        row["kind"],
        row["of"][:60],
        row["clip"] and Path(row["clip"]).name,
        ", ".join(tensors),
        size(row["bytes"]),
        row["encoder"] and row["encoder"][:8],
        row["made"],
        row["key"][:8],
    ]


def encoder_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each encoder: its entries, their size, and the time of the last
    one.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["encoder"] or ""), []).append(row)

    lines = []
    for (kind, encoder), group in groups.items():
        encoder_name = ENCODER_LABELS[kind]
        if kind == "latents":
            clips = counted(len({row["clip"] for row in group}), "clip")
            count = f"{counted(len(group), 'window')} of {clips}"
        elif kind == "text":
            count = counted(len(group), "caption")
        else:
            count = entries(len(group))
        times = [row["made"] for row in group if row["made"]]
        last = max(times, default="")[:16].replace("T", " ")
        parts = [count, size(sum(row["bytes"] for row in group)), last]
        text = ", ".join(part for part in parts if part)
        lines.append(f"{encoder_name} {encoder[:8]}".rstrip() + f": {text}")
    return lines
