"""``dataset split``: a clip of each scene of a video, or of a folder of videos."""

from __future__ import annotations

from pathlib import Path

from videotune.console import bar, echo, out, print_table
from videotune.data.split import SplitFile, split
from videotune.errors import DONE, SKIPPED
from videotune.text import counted


def split_dataset(source: Path, folder: Path, *, min_seconds: float, threshold: float | None, overwrite: bool) -> int:
    """Split into scenes and print what became of each file; exit code 2 where a file could not be read."""
    with bar("splitting (seconds)") as progress:
        results = split(
            source,
            folder,
            min_seconds=min_seconds,
            threshold=threshold,
            overwrite=overwrite,
            progress=lambda done, total, name: progress.update(done, total, name),
        )
    root = source if source.is_dir() else source.parent
    rows = [_row(result, root) for result in results]
    print_table("files", ["file", "seconds", "scenes", "captions", "notes"], rows, right=(1, 2, 3))
    written = sum(part.path is not None for result in results for part in result.scenes)
    dropped = sum(part.path is None for result in results for part in result.scenes)
    images = sum(result.image for result in results)
    broken = sum(result.problem is not None for result in results)
    out(f"{counted(written, 'scene')} of {counted(len(results) - broken - images, 'file')} are in {folder}")
    if dropped:
        are = "is" if dropped == 1 else "are"
        out(f"{counted(dropped, 'scene')} {are} shorter than {min_seconds:g} s and left out (--min-seconds)")
    if images:
        out(f"{images} {'image was' if images == 1 else 'images were'} not split or copied")
    if written:
        out(f"next: write a caption beside each scene (NAME.txt), then: videotune check {folder}")
    if not broken:
        return DONE
    echo(f"{broken} files could not be split (exit code 2); the table says why")
    return SKIPPED


def _row(result: SplitFile, root: Path) -> list[str]:
    """A file as the table shows it."""
    path = result.file.path.relative_to(root)
    if result.image:
        return [str(path), "", "", "", "image: not split"]
    if result.problem is not None:
        return [str(path), f"{result.seconds:.2f}" if result.seconds else "", "", "", str(result.problem)]
    kept = [part for part in result.scenes if part.path is not None]
    notes = [
        f"left out: {part.start:.2f} to {part.start + part.seconds:.2f} s"
        for part in result.scenes
        if part.path is None
    ]
    if len(result.scenes) == 1 and kept:
        notes.append("no cut: copied as it is")
    if kept and not result.captions:
        notes.append("no caption")
    return [str(path), f"{result.seconds:.2f}", str(len(kept)), str(result.captions), "; ".join(notes)]
