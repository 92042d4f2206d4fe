"""``videotune caption``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from videotune import commands
from videotune.cli.options import AsJson, Folder, Opt, takes_config, with_clips
from videotune.console import answer, out

if TYPE_CHECKING:
    from videotune.captioning.write import CaptionResult
    from videotune.trainer.resolve_config import Overrides

Purpose = Literal["general", "style", "character", "motion"]


@takes_config
def caption(
    overrides: Overrides,
    model: Annotated[str, Opt(help="a server's model, or here a folder or Hub id of transformers")],
    folder: Folder = None,
    endpoint: Annotated[str | None, Opt(help="a server with OpenAI's chat API: http://…/v1")] = None,
    key_env: Annotated[str, Opt(help="variable that holds the server's key")] = "OPENAI_API_KEY",
    workers: Annotated[int, Opt(min=1, max=256, help="requests at once")] = 4,
    frames: Annotated[int, Opt(min=1, max=256, help="frames of a clip that the model is shown")] = 8,
    purpose: Annotated[Purpose, Opt(help="what the LoRA is to learn")] = "general",
    prompt: Annotated[str | None, Opt(help="a prompt of your own instead of the purpose's")] = None,
    trigger: Annotated[str | None, Opt(help="a word that each new caption holds")] = None,
    max_words: Annotated[int, Opt(min=1, max=2000, help="words of a caption")] = 100,
    overwrite: Annotated[bool, Opt("--overwrite", help="replace captions; the old ones stay as .bak files")] = False,
    dry_run: Annotated[bool, Opt("--dry-run", help="list the clips that would be captioned")] = False,
    as_json: AsJson = False,
) -> None:
    """Let a vision-language model write the captions that clips lack."""
    given = {name: value for name, value in locals().items() if name not in ("overrides", "folder", "as_json")}
    options = commands.caption.CaptionOptions(**given)
    result = commands.caption.caption(with_clips(overrides, folder), options=options)
    answer(as_json, vars(result), lambda _: show(result, dry_run))
    raise typer.Exit(result.exit_code)


def show(result: CaptionResult, dry_run: bool) -> None:
    """Print what was not captioned and why, and the counts."""
    planned = [{"clip": clip, "state": "would be captioned"} for clip in result.planned if dry_run]
    for row in (*planned, *result.skipped, *result.failed, *result.hints):
        out(": ".join(filter(None, row.values())))
    out(", ".join(f"{len(rows)} {name}" for name, rows in vars(result).items()))
