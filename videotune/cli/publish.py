"""``videotune publish`` and ``videotune card``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from videotune import commands
from videotune.console import size
from videotune.files import write_text

RunFolder = Annotated[Path, typer.Argument(help="a run folder that has exports")]


def publish(
    run: RunFolder,
    repo: Annotated[str | None, typer.Option("--repo", help="id on the Hub (default: the run's name)")] = None,
    public: Annotated[bool, typer.Option("--public", help="everybody may read it (default: private)")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the files and print the card alone")] = False,
) -> dict[str, Any]:
    """Upload a run's exports with a model card and previews to the Hugging Face Hub; what is there is not sent again."""
    done = commands.publish.publish(run, repo, public=public, dry_run=dry_run)
    for file in done["files"]:
        print(f"{file['path']}  ({size(file['bytes'])})")
    print(done["url"] or done["card"])
    return done


def card(
    run: RunFolder, out: Annotated[Path | None, typer.Option("--out", help="file to write (default: print it)")] = None
) -> dict[str, Any]:
    """Write the model card that publish would upload."""
    made = commands.publish.card(run)
    if out is not None:
        write_text(out, made["card"])
    print(out or made["card"])
    return made
