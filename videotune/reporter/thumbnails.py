"""A small picture of each clip for the run folder: the report shows what was trained on, wherever the clips are then."""

import shutil
from pathlib import Path
from typing import Any

from videotune.console import echo
from videotune.data.file_checks import ClipProblem
from videotune.files import write_whole
from videotune.reporter.contact_sheet import shots
from videotune.trainer.run_spec import Job
from videotune.types import Clip

MOST = 200
"""Clips that get a picture; of more the first ones, training clips before others."""

HIGH = 48
"""Pixels: the height of a picture."""

FOLDER = "pictures"


def keep_pictures(job: Job) -> None:
    """Make those pictures that the cache does not hold yet: a clip's first, middle and last frame in a row.

    A clip that cannot be decoded now has none: the encoding will say why. videotune prints a note for a full disk.
    """
    paths = {clip.id: path for clip, path in _places(job)}
    todo = [clip for clip, path in _places(job) if not path.is_file()]
    try:
        for clip, frames in shots(job, todo, HIGH) if todo else ():
            if not isinstance(frames, ClipProblem):
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
    first = {window.clip_id: window for window in (*job.library.held_out_windows, *job.library.windows)}
    return [
        (clip, job.cache / FOLDER / f"{clip.id[:16]}-{first[clip.id].shape}-{first[clip.id].resize}.jpg")
        for clip in sorted(job.library.clips, key=lambda clip: order[clip.kind])[:MOST]
        if clip.id in first
    ]


def _write(path: Path, frames: Any) -> None:
    """uint8 frames (n, H, W, 3) in a row."""
    import numpy as np
    from PIL import Image

    picture = Image.fromarray(np.concatenate(list(frames), axis=1))
    write_whole(path, lambda aside: picture.save(aside, quality=80), durable=False)
