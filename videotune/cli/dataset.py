"""``videotune dataset split``: a clip of each scene of a video, or of a folder of videos."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from videotune.cli.options import Arg, Opt
from videotune.console import bar, echo, print_table
from videotune.console import out as say
from videotune.errors import SKIPPED
from videotune.text import counted

if TYPE_CHECKING:
    from videotune.data.split import SplitFile

dataset_app = typer.Typer(help="Tools for datasets.", no_args_is_help=True)


@dataset_app.callback()
def _tools() -> None:
    """Tools for datasets."""


@dataset_app.command("split")
def dataset_split(
    source: Annotated[Path, Arg(help="a video, or a folder of videos")],
    out: Annotated[Path, Opt(help="folder for the scenes; the originals are not touched")],
    min_seconds: Annotated[float, Opt(help="leave shorter scenes out, and list them")] = 1.0,
    threshold: Annotated[
        float | None, Opt(help="strength of a cut, as a multiple of the changes around it (default: 3)")
    ] = None,
    overwrite: Annotated[bool, Opt("--overwrite", help="replace existing scenes")] = False,
) -> None:
    """Cut videos into their scenes, one file a scene, with their captions."""
    from videotune.data.split import split  # --help needs no video reader

    with bar("splitting (seconds)") as progress:
        results = split(
            source, out, min_seconds=min_seconds, threshold=threshold, overwrite=overwrite, progress=progress.update
        )
    root = source if source.is_dir() else source.parent
    rows = [_row(result, root) for result in results]
    print_table("files", ["file", "seconds", "scenes", "captions", "notes"], rows, right=(1, 2, 3))
    written = sum(part.path is not None for result in results for part in result.scenes)
    dropped = sum(part.path is None for result in results for part in result.scenes)
    images = sum(result.image for result in results)
    broken = sum(result.problem is not None for result in results)
    say(f"{counted(written, 'scene')} of {counted(len(results) - broken - images, 'file')} are in {out}")
    if dropped:
        are = "is" if dropped == 1 else "are"
        say(f"{counted(dropped, 'scene')} {are} shorter than {min_seconds:g} s and left out (--min-seconds)")
    if images:
        say(f"{images} {'image was' if images == 1 else 'images were'} not split or copied")
    if written:
        bare = any(result.scenes and not result.captions for result in results if result.problem is None)
        say(f"next: {'write a caption beside each scene (NAME.txt), then: ' if bare else ''}videotune check {out}")
    if broken:
        echo(f"{broken} files could not be split (exit code 2); the table says why")
        raise typer.Exit(SKIPPED)


def _row(result: SplitFile, root: Path) -> list[str]:
    """A file as the table shows it."""
    path = result.file.path.relative_to(root)
    if result.image:
        return [str(path), "", "", "", "image: not split"]
    if result.problem is not None:
        return [str(path), f"{result.seconds:.2f}" if result.seconds else "", "", "", str(result.problem)]
    kept = [part for part in result.scenes if part.path is not None]
    short = [part for part in result.scenes if part.path is None]
    notes = [f"left out: {part.start:.2f} to {part.start + part.seconds:.2f} s" for part in short]
    if len(result.scenes) == 1 and kept:
        notes.append("no cut: copied as it is")
    if kept and not result.captions:
        notes.append("no caption")
    return [str(path), f"{result.seconds:.2f}", str(len(kept)), str(result.captions), "; ".join(notes)]
