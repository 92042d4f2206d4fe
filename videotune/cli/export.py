"""Results of a run: ``videotune export``, ``report``, ``publish`` and ``card``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from videotune import console
from videotune.cli.next_steps import command_line
from videotune.cli.options import Arg, Offline, Opt
from videotune.console import exactly, size
from videotune.files import write_text
from videotune.text import ONLY_FOR_TOY, counted

Formats = Annotated[
    list[str] | None,
    Opt(
        "--format",
        help="diffusers, comfyui or peft; may be given twice; kohya: lora convert",
    ),
]
Merge = Annotated[
    bool,
    Opt(
        "--merge",
        help="the whole base model with the adapter in its weights, for diffusers and ComfyUI",
    ),
]
RunFolder = Annotated[Path, Arg(help="a run folder that has exports")]


def export(
    run: Annotated[Path, Arg(help="a run folder")],
    formats: Formats = None,
    step: Annotated[
        int | None, Opt(help="step of the checkpoint (default: newest)")
    ] = None,
    out: Annotated[
        Path | None, Opt(help="folder for the files (default: RUN/export)")
    ] = None,
    merge: Merge = False,
    dtype: Annotated[
        str | None, Opt(help="FLOAT_32, BFLOAT_16 or FLOAT_16 (default: output_dtype)")
    ] = None,
    offline: Offline = False,
) -> dict[str, Any]:
    """Write a run's weights for diffusers, ComfyUI or PEFT, and read each file back."""
    from videotune.commands.export_options import check_export

    check_export(run, formats or (), step=step, merge=merge, dtype=dtype)
    console.doing("reading the checkpoint")
    from videotune.commands.export import export as write_exports
    from videotune.reporter.comfyui import note_on_experts
    from videotune.reporter.read import read_run

    exports = write_exports(
        run, formats or (), step=step, out=out, merge=merge, dtype=dtype
    )
    for item in exports:
        error = exactly(item.max_error)
        console.tell(
            f"{item.format}: {item.path}  "
            f"({counted(item.modules, 'part')}, read back by {item.reader}: {error})"
        )
    experts_note = note_on_experts([item.path.name for item in exports])
    if experts_note:
        console.echo(experts_note)
    if read_run(run).is_toy:
        console.echo(ONLY_FOR_TOY)
    return {"exports": [item.to_json(run) for item in exports]}


def report(
    run: Annotated[Path, Arg(help="a run folder, also of a running run")],
) -> None:
    """Write RUN/report.html: progress, verdict, recommended checkpoint, clips and
    settings.
    """
    from videotune.commands.report import report as write_report

    console.out(write_report(run))


def publish(
    run: RunFolder,
    repo: Annotated[
        str | None, Opt("--repo", help="id on the Hub (default: the run's name)")
    ] = None,
    public: Annotated[
        bool, Opt("--public", help="make it readable to everybody (default: private)")
    ] = False,
    dry_run: Annotated[
        bool, Opt("--dry-run", help="only list the files and print the card")
    ] = False,
    exports: Annotated[
        list[Path] | None,
        Opt("--exports", help="a folder outside the run that holds exports of it"),
    ] = None,
) -> dict[str, Any]:
    """Upload a run's exports, model card and previews to the Hugging Face Hub, once
    each.
    """
    from videotune.commands.publish import publish as upload_run

    result = upload_run(
        run, repo, public=public, dry_run=dry_run, folders=tuple(exports or ())
    )
    if dry_run:
        console.tell(
            f"dry run, nothing is sent. Files for {_repository(repo, result)}:"
        )
    for file in result["files"]:
        console.out(f"{file['path']}  ({size(file['bytes'])})")
    console.out(result["url"] or result["card"])
    if dry_run:
        console.echo(f"next: {_command_to_publish(run, repo, public, exports or ())}")
    return result


def _repository(repo: str | None, result: Mapping[str, Any]) -> str:
    """Return the repository that a dry run would fill, in words."""
    access = "public" if result["public"] else "private"
    owner = "" if repo and "/" in repo else " of the token's account"
    return f"the {access} repository {result['repo']}{owner}"


def _command_to_publish(
    run: Path, repo: str | None, public: bool, exports: Sequence[Path]
) -> str:
    """Return the command that sends what a dry run has listed."""
    arguments = ["videotune", "publish", str(run)]
    if repo:
        arguments += ["--repo", repo]
    if public:
        arguments.append("--public")
    for folder in exports:
        arguments += ["--exports", str(folder)]
    return command_line(arguments)


def card(
    run: RunFolder,
    out: Annotated[
        Path | None, Opt("--out", help="file to write (default: print it)")
    ] = None,
) -> dict[str, Any]:
    """Write the model card that publish would upload."""
    from videotune.commands.publish import card as model_card

    result = model_card(run)
    if out is None:
        console.out(result["card"])
    else:
        write_text(out, result["card"])
        console.out(out)
    return result
