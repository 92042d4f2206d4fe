"""A small picture of each clip for the run folder: the report shows what was trained on, wherever the clips are then."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from videotune.console import bar, echo
from videotune.data.file_checks import ClipProblem
from videotune.data.workers import default_workers
from videotune.files import write_whole
from videotune.reporter.contact_sheet import shot_words
from videotune.trainer.run_spec import Job
from videotune.types import Clip, Window

MOST = 200
"""Clips that get a picture; of more the first ones, training clips before others."""

HIGH = 48
"""Pixels: the height of a picture."""

FOLDER = "pictures"


def keep_pictures(job: Job) -> None:
    """Draw those pictures that the cache does not hold yet: a clip's first, middle and last frame in a row.

    A clip that cannot be decoded now has none: the encoding will say why. A disk without room for pictures is said.
    """
    shown = set(_shown(job))
    todo = [(clip, path) for clip, path in _places(job) if not path.is_file() and clip.id in shown]
    if not todo:
        return
    windows: dict[str, list[Window]] = {}
    for window in (*job.library.windows, *job.library.held_out_windows):
        windows.setdefault(window.clip_id, []).append(window)

    def tasks() -> Iterator[tuple[str, dict[str, Any]]]:
        for clip, _ in todo:
            yield "decode", shot_words(job, windows[clip.id], HIGH)

    workers = default_workers()
    try:
        with bar("pictures") as progress:
            answers = workers.map(tasks(), ahead=2 * workers.count)
            for done, ((_, path), frames) in enumerate(zip(todo, answers, strict=True), 1):
                progress.update(done, len(todo))
                if not isinstance(frames, ClipProblem):
                    _write(path, frames)
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


def _shown(job: Job) -> list[str]:
    """The ids of the clips that get a picture."""
    order = {"train": 0, "validation": 1, "regularization": 2}
    return [clip.id for clip in sorted(job.library.clips, key=lambda clip: order[clip.kind])[:MOST]]


def _places(job: Job) -> list[tuple[Clip, Path]]:
    """Each clip of the account that gets a picture with its place in the cache; another size is another picture."""
    first = {window.clip_id: window for window in (*job.library.held_out_windows, *job.library.windows)}
    shown = set(_shown(job))
    return [
        (clip, job.cache / FOLDER / f"{clip.id[:16]}-{first[clip.id].shape}-{first[clip.id].resize}.jpg")
        for clip in job.library.clips
        if clip.id in shown and clip.id in first
    ]


def _write(path: Path, frames: Any) -> None:
    """uint8 frames (n, H, W, 3) in a row."""
    import numpy as np
    from PIL import Image

    picture = Image.fromarray(np.concatenate(list(frames), axis=1))
    write_whole(path, lambda aside: picture.save(aside, quality=80), durable=False)
