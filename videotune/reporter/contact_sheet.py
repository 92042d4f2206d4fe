"""Pictures of clips as they are trained: on sheets and on a page for ``check --contact-sheet``, small for the run folder.

The run folder's are there so that the report shows what was trained on, wherever the clips are then.
"""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from videotune.console import bar, echo
from videotune.data import file_checks, frame_sampling, video_writer
from videotune.data.workers import default_workers
from videotune.errors import VideotuneError
from videotune.files import write_text, write_whole
from videotune.job.job import Job
from videotune.reporter.build import contact_sheet_page
from videotune.text import counted, shape_words, short_path, state_words
from videotune.types import DETERMINISTIC_VARIANT, Clip, Window

THUMB = 160
"""Height of a picture on the page and on a sheet, in pixels."""

ROWS = 20
"""Clips on a sheet."""

LABEL = 360
"""Pixels for the words beside the pictures."""

LINES = 9
"""Lines of words that fit beside a clip's pictures."""


def contact_sheet(job: Job, account: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Write index.html, sheet-001.jpg … and the single pictures into ``folder``; returns clips that could not be decoded.

    A clip's three pictures are the first frame of its first window, the middle one of the middle window and the last one
    of its last window: cropped, resized and at the times that training shows. A still has one. VideotuneError where the
    pictures would become clips of a dataset themselves.
    """
    _refuse_among_clips(folder, job)
    rows_by_path = {row["path"]: row for row in account["clips"]}
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    pictures: dict[str, list[str]] = {}
    failed: dict[str, str] = {}

    def rows() -> Iterator[tuple[str, list[Any]]]:
        for clip, frames in shots(job, job.library.clips):
            if isinstance(frames, file_checks.ClipProblem):
                failed[clip.path] = f"{frames.reason}: {frames.detail}"
                continue
            images = [_thumb(frame) for frame in frames]
            pictures[clip.path] = [
                _save(image, folder, clip, i) for i, image in enumerate(images)
            ]
            yield (
                _label(rows_by_path[clip.path], job.library.roots),
                [np.asarray(image) for image in images],
            )

    shown = rows()  # a thousand clips' pictures do not wait in memory for one sheet
    for number, first in enumerate(shown, 1):
        video_writer.write_sheet(
            folder / f"sheet-{number:03d}.jpg", [first, *islice(shown, ROWS - 1)], LABEL
        )
    title = f"Clips of {Path(job.config.datasets[0].path).name}"
    page = contact_sheet_page(title, account, pictures, job.library.roots, job.notes)
    write_text(folder / "index.html", page, durable=False)
    return failed


def _refuse_among_clips(folder: Path, job: Job) -> None:
    """VideotuneError where the folder lies in a dataset's; hidden folders there, such as the cache, are never read."""
    place = folder.resolve()
    for root in (root.resolve() for root in job.library.roots):
        if place.is_relative_to(root) and not any(
            part.startswith(".") for part in place.relative_to(root).parts
        ):
            fault = f"The pictures would go to {folder}, inside the dataset {root}, and be taken for clips of it."
            elsewhere = root.with_name(root.name + "-sheet")
            raise VideotuneError(
                f"{fault} Give --contact-sheet a folder elsewhere, such as {elsewhere}."
            )


def shots(
    job: Job, clips: Sequence[Clip], height: int | None = None
) -> Iterator[tuple[Clip, list[np.ndarray] | file_checks.ClipProblem]]:
    """Each clip's first, middle and last frame as they are trained, with a bar; a ClipProblem where it cannot be decoded.

    Frames are uint8 (H, W, 3), at most ``height`` pixels high, and decoded a few clips ahead. A still has one.
    """
    windows: dict[str, list[Window]] = {}
    for window in (*job.library.windows, *job.library.held_out_windows):
        windows.setdefault(window.clip_id, []).append(window)

    def task(clip: Clip) -> tuple[str, dict[str, Any]]:
        own = windows[clip.id]
        info = job.library.media[clip.id]
        first = own[0]
        middle = own[len(own) // 2]
        last = own[-1]
        times = [
            frame_sampling.sample_window(w, DETERMINISTIC_VARIANT, job.config.seed).times
            for w in (first, middle, last)
        ]
        chosen = [times[0][0], times[1][len(times[1]) // 2], times[2][-1]]
        shape = first.shape
        high = min(shape.height, height or shape.height)
        wide = max(1, round(shape.width * high / shape.height))
        frames = {
            "info": info,
            "times": chosen[:1] if info.still else chosen,
            "resize": first.resize,
        }
        return "decode", frames | {"height": high, "width": wide}

    workers = default_workers()
    with bar("pictures") as progress:
        answers = workers.map(map(task, clips), ahead=2 * workers.count)
        for done, (clip, answer) in enumerate(zip(clips, answers, strict=True), 1):
            progress.update(done, len(clips))
            yield clip, answer if isinstance(answer, file_checks.ClipProblem) else list(answer)


def _thumb(frame: np.ndarray) -> Any:
    image = Image.fromarray(frame)
    wide = max(1, round(image.width * THUMB / image.height))
    return image.resize((min(wide, 4 * THUMB), THUMB), Image.Resampling.LANCZOS)


def _save(image: Any, folder: Path, clip: Clip, index: int) -> str:
    name = f"clips/{clip.id[:16]}-{('first', 'middle', 'last')[index]}.jpg"
    write_whole(folder / name, lambda aside: image.save(aside, quality=88), durable=False)
    return name


def _label(row: Mapping[str, Any], roots: Sequence[Path]) -> str:
    """A clip's words on a sheet: name, state, source, the caption's first line, and warnings while there is room."""
    rate = "image" if row["source_fps"] is None else f"{row['source_fps']:.4g} fps"
    words = [
        short_path(row["path"], roots),
        f"{state_words(row)}, {shape_words(row['shape'])}, {counted(row['windows'], 'window')}",
        f"source {row['width']}x{row['height']}, {rate}",
    ]
    caption = next(iter(row["captions"]), "").partition("\n")[0]
    words += [f'"{textwrap.shorten(caption, 130, placeholder=" …")}"'] if caption else []
    lines = [
        part for line in (*words, *row["warnings"][:2]) for part in textwrap.wrap(line, 48)
    ]
    return "\n".join(lines if len(lines) <= LINES else [*lines[: LINES - 1], "…"])


MOST = 200
"""Clips that get a picture; of more the first ones, training clips before others."""

HIGH = 48
"""Pixels: the height of a picture."""

FOLDER = "pictures"


def cache_pictures(job: Job) -> None:
    """Make those pictures that the cache does not hold yet: a clip's first, middle and last frame in a row.

    A clip that cannot be decoded now has none: the encoding will say why. videotune prints a note for a full disk.
    """
    paths = {clip.id: path for clip, path in _places(job)}
    todo = [clip for clip, path in _places(job) if not path.is_file()]
    try:
        for clip, frames in shots(job, todo, HIGH) if todo else ():
            if not isinstance(frames, file_checks.ClipProblem):
                _write(paths[clip.id], frames)
    except OSError as error:
        echo(f"note: the report will lack pictures of clips: {error}")


def copy_pictures(job: Job, run: Path) -> None:
    """Put the pictures that there are into the run folder."""
    try:
        for clip, path in _places(job):
            if path.is_file():
                (run / FOLDER).mkdir(exist_ok=True)
                shutil.copyfile(path, run / FOLDER / f"{clip.id[:16]}.jpg")
    except OSError as error:
        echo(f"note: the report will lack pictures of clips: {error}")


def _places(job: Job) -> list[tuple[Clip, Path]]:
    """Each clip that gets a picture with its place in the cache; another size is another picture."""
    order = {"train": 0, "validation": 1, "regularization": 2}
    first = {
        window.clip_id: window
        for window in (*job.library.held_out_windows, *job.library.windows)
    }
    return [
        (
            clip,
            job.cache
            / FOLDER
            / f"{clip.id[:16]}-{first[clip.id].shape}-{first[clip.id].resize}.jpg",
        )
        for clip in sorted(job.library.clips, key=lambda clip: order[clip.kind])[:MOST]
        if clip.id in first
    ]


def _write(path: Path, frames: Any) -> None:
    """uint8 frames (n, H, W, 3) in a row."""
    picture = Image.fromarray(np.concatenate(list(frames), axis=1))
    write_whole(path, lambda aside: picture.save(aside, quality=80), durable=False)
