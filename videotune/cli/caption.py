"""``videotune caption``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from videotune import commands
from videotune.cli.options import AsJson, Folder, takes_config, with_clips
from videotune.console import out

if TYPE_CHECKING:
    from videotune.trainer.resolve_config import Overrides


@takes_config
def caption(
    overrides: Overrides,
    model: Annotated[str, Option("--model", help="a server's model, or here a folder or Hub id of transformers")],
    folder: Folder = None,
    endpoint: Annotated[str | None, Option("--endpoint", help="a server with OpenAI's chat API: http://…/v1")] = None,
    key_env: Annotated[str, Option("--key-env", help="variable that holds the server's key")] = "OPENAI_API_KEY",
    workers: Annotated[int, Option("--workers", min=1, max=256, help="requests at once")] = 4,
    timeout: Annotated[float, Option("--timeout", min=0.1, help="seconds for a request")] = 120.0,
    frames: Annotated[int, Option("--frames", min=1, max=256, help="frames of a clip that the model is shown")] = 8,
    purpose: Annotated[str, Option("--purpose", help="what is learnt: general, style, character, motion")] = "general",
    prompt: Annotated[str | None, Option("--prompt", help="a prompt of your own instead of the purpose's")] = None,
    trigger: Annotated[str | None, Option("--trigger", help="a word that each new caption holds")] = None,
    max_words: Annotated[int, Option("--max-words", min=1, max=2000, help="words of a caption")] = 100,
    overwrite: Annotated[bool, Option("--overwrite", help="replace captions; the old ones stay as .txt.bak")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="list the clips that would be captioned")] = False,
    as_json: AsJson = False,
) -> None:
    """Let a vision-language model write the captions that clips lack."""
    given = {name: value for name, value in locals().items() if name not in ("overrides", "folder", "as_json")}
    options = commands.caption.CaptionOptions(**given)
    result = commands.caption.caption(with_clips(overrides, folder), options=options)
    if as_json:
        print(json.dumps(asdict(result), indent=2, ensure_ascii=False))
    else:
        for clip in result.planned:
            out(f"{clip}: would be captioned")
        for row in result.skipped:
            out(f"{row['clip']}: skipped: {row['reason']}: {row['detail']}")
        for row in result.failed:
            out(f"{row['clip']}: failed: {row['why']}")
        for row in result.hints:
            out(": ".join(filter(None, row.values())))
        counts = [f"{len(rows)} {name}" for name, rows in vars(result).items() if name != "hints"]
        out(f"captions: {', '.join(counts)}")
    raise typer.Exit(result.exit_code)
