"""What a run gave: ``videotune export``, ``report``, ``publish`` and ``card``."""

from pathlib import Path
from typing import Annotated, Any

from videotune import commands
from videotune.cli.options import Arg, Offline, Opt
from videotune.console import exactly, size
from videotune.files import write_text

Formats = Annotated[
    list[str] | None, Opt("--format", help="diffusers, comfyui or peft; may be given twice")
]
Merge = Annotated[
    bool,
    Opt(
        "--merge",
        help="the whole base model with the adapter in its weights, in diffusers layout",
    ),
]
RunFolder = Annotated[Path, Arg(help="a run folder that has exports")]


def export(
    run: Annotated[Path, Arg(help="a run folder")],
    formats: Formats = None,
    step: Annotated[
        int | None, Opt(help="the checkpoint of this step (default: newest)")
    ] = None,
    out: Annotated[Path | None, Opt(help="folder for the files (default: RUN/export)")] = None,
    merge: Merge = False,
    dtype: Annotated[
        str | None, Opt(help="FLOAT_32, BFLOAT_16 or FLOAT_16 (default: output_dtype)")
    ] = None,
    offline: Offline = False,
) -> dict[str, Any]:
    """Write a run's weights for diffusers, ComfyUI or PEFT, and read each file back."""
    written = commands.export.export(
        run, formats or (), step=step, out=out, merge=merge, dtype=dtype
    )
    for done in written:
        read = f"{done.modules} parts, read back by {done.reader}: {exactly(done.max_error)}"
        print(f"{done.format}: {done.path}  ({read})")
    return {"exports": [one.to_json(run) for one in written]}


def report(run: Annotated[Path, Arg(help="a run folder, also of a running run")]) -> None:
    """Write RUN/report.html: progress, verdict, recommended checkpoint, every clip and setting."""
    print(commands.report.report(run))


def publish(
    run: RunFolder,
    repo: Annotated[
        str | None, Opt("--repo", help="id on the Hub (default: the run's name)")
    ] = None,
    public: Annotated[
        bool, Opt("--public", help="everybody may read it (default: private)")
    ] = False,
    dry_run: Annotated[
        bool, Opt("--dry-run", help="list the files and print the card alone")
    ] = False,
) -> dict[str, Any]:
    """Upload a run's exports with a model card and previews to the Hugging Face Hub; what is there is not sent again."""
    done = commands.publish.publish(run, repo, public=public, dry_run=dry_run)
    for file in done["files"]:
        print(f"{file['path']}  ({size(file['bytes'])})")
    print(done["url"] or done["card"])
    return done


def card(
    run: RunFolder,
    out: Annotated[Path | None, Opt("--out", help="file to write (default: print it)")] = None,
) -> dict[str, Any]:
    """Write the model card that publish would upload."""
    made = commands.publish.card(run)
    if out is not None:
        write_text(out, made["card"])
    print(out or made["card"])
    return made
