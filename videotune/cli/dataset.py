"""Tools for datasets: ``videotune dataset split`` and ``dataset derive``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from videotune.cli.options import Arg, Opt
from videotune.console import bar, echo, print_table
from videotune.console import out as say
from videotune.errors import SKIPPED
from videotune.text import as_argument, counted, counted_are

if TYPE_CHECKING:
    from videotune.data.control_clips import ControlClip
    from videotune.data.split import SplitFile

dataset_app = typer.Typer(help="Tools for datasets.", no_args_is_help=True)

SplitSource = Annotated[Path, Arg(help="a video, or a folder of videos")]
SplitFolder = Annotated[
    Path, Opt(help="folder for the scenes; the originals stay unchanged")
]
MinSeconds = Annotated[float, Opt(help="omit shorter scenes, and list them")]
Threshold = Annotated[
    float | None,
    Opt(help="strength of a cut, as a multiple of the changes around it (default: 3)"),
]
OverwriteScenes = Annotated[bool, Opt("--overwrite", help="replace existing scenes")]


@dataset_app.command("split")
def dataset_split(
    source: SplitSource,
    out: SplitFolder,
    min_seconds: MinSeconds = 1.0,
    threshold: Threshold = None,
    overwrite: OverwriteScenes = False,
) -> None:
    """Cut videos into their scenes, one file a scene, with their captions."""
    from videotune.data.split import split  # --help needs no video reader

    with bar("splitting (seconds)") as progress:
        files = split(
            source,
            out,
            min_seconds=min_seconds,
            threshold=threshold,
            overwrite=overwrite,
            progress=progress.update,
        )

    root = source if source.is_dir() else source.parent
    rows = [split_cells(file, root) for file in files]
    columns = ["file", "seconds", "scenes", "captions", "notes"]
    print_table("files", columns, rows, right=(1, 2, 3))
    show_split(files, out, min_seconds)

    broken = sum(file.problem is not None for file in files)
    if broken:
        echo(f"{counted_are(broken, 'file')} not split; the table has the reasons")
        raise typer.Exit(SKIPPED)


def show_split(files: Sequence[SplitFile], folder: Path, min_seconds: float) -> None:
    """Print the number of scenes, what was omitted, and the next command."""
    scenes = list(chain.from_iterable(file.scenes for file in files))
    written = sum(scene.path is not None for scene in scenes)
    images = sum(file.is_image for file in files)
    videos = [file for file in files if file.problem is None]
    video_count = counted(len(videos) - images, "file")
    say(f"{counted(written, 'scene')} of {video_count} are in {folder}")

    omitted = len(scenes) - written
    if omitted:
        verb = "is" if omitted == 1 else "are"
        limit = f"shorter than {min_seconds:g} s and omitted (--min-seconds)"
        say(f"{counted(omitted, 'scene')} {verb} {limit}")
    if images:
        verb = "image was" if images == 1 else "images were"
        say(f"{images} {verb} not split or copied")
    if written:
        lacks_captions = any(file.scenes and not file.captions for file in videos)
        advice = (
            "write a caption beside each scene (NAME.txt), then: "
            if lacks_captions
            else ""
        )
        say(f"next: {advice}videotune check {as_argument(folder)}")


def split_cells(file: SplitFile, root: Path) -> list[str]:
    """Return the cells of a file that was split."""
    path = str(file.file.path.relative_to(root))
    seconds = f"{file.seconds:.2f}"
    if file.is_image:
        return [path, "", "", "", "image: not split"]
    if file.problem is not None:
        return [path, seconds if file.seconds else "", "", "", str(file.problem)]

    written = 0
    notes = []
    for scene in file.scenes:
        if scene.path is None:
            end = scene.start + scene.seconds
            notes.append(f"omitted: {scene.start:.2f} to {end:.2f} s")
        else:
            written += 1
    if len(file.scenes) == 1 and written:
        notes.append("no cut: copied as it is")
    if written and not file.captions:
        notes.append("no caption")
    return [path, seconds, str(written), str(file.captions), "; ".join(notes)]


ControlKind = Literal["edges", "blur", "lowres", "grey", "every-nth"]
DeriveSource = Annotated[Path, Arg(help="a folder of clips, or one clip")]
Kind = Annotated[ControlKind, Opt("--kind", help="what is made of each picture")]
ControlFolder = Annotated[
    Path | None,
    Opt(help="folder for the control clips (default: controls beside videos)"),
]
Strength = Annotated[
    float | None,
    Opt(help="edges: 1 makes only an edge from black to white white (default: 2)"),
]
Amount = Annotated[
    float | None,
    Opt(help="blur: its standard deviation, as a share of the height (default: 0.02)"),
]
Factor = Annotated[
    int | None, Opt(help="lowres: factor by which sides are reduced (default: 4)")
]
EveryNth = Annotated[
    int | None,
    Opt(help="every-nth: each n-th frame is held until the next (default: 4)"),
]


@dataset_app.command("derive")
def dataset_derive(
    source: DeriveSource,
    kind: Kind,
    out: ControlFolder = None,
    strength: Strength = None,
    amount: Amount = None,
    factor: Factor = None,
    every: EveryNth = None,
) -> dict[str, Any]:
    """Make a control clip of each clip, with the same name, size and frame times."""
    from videotune.data.control_clips import plan_controls, write_controls
    from videotune.data.control_filters import control_settings

    options = {"strength": strength, "amount": amount, "factor": factor, "every": every}
    settings = control_settings(kind, options)
    with bar("reading (clips)") as progress:
        controls = plan_controls(source, settings, out, progress.update)
    with bar("deriving (clips)") as progress:
        write_controls(controls, settings, progress.update)
    return show_controls(controls)


def show_controls(controls: Sequence[ControlClip]) -> dict[str, Any]:
    """Print the clips without a control, and the number of controls in each folder.

    Returns:
        The exit code, as a key of the command's JSON.
    """
    skipped = [control for control in controls if control.problem is not None]
    for control in skipped:
        say(f"skipped: {control.name}: {control.problem}")

    for folder in dict.fromkeys(control.folder for control in controls):
        derived = [
            control
            for control in controls
            if control.folder == folder and control.problem is None
        ]
        if not derived:
            continue
        earlier = sum(control.is_complete for control in derived)
        earlier_note = f" ({earlier} from an earlier run)" if earlier else ""
        verb = "is" if len(derived) == 1 else "are"
        clips = counted(len(derived), "control clip")
        say(f"{clips} {verb} in {folder}{earlier_note}")

    if skipped:
        echo(f"{counted_are(len(skipped), 'clip')} skipped")
        return {"exit_code": SKIPPED}
    return {}
