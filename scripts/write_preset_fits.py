"""Write videotune/planner/preset_fits.json: on cards of which memory each preset fits, and
how long it takes there, as `plan --vram` calculates them: python
scripts/write_preset_fits.py [PRESET ...]

A preset that is named is calculated again, and without names all are, which takes some
minutes. The clip is one of eight seconds in 1280x720 at 24 frames a second: some presets take
no shorter one.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from plan_tables import write_example_clip

from videotune.commands.plan import plan
from videotune.files import read_json, write_json
from videotune.planner.preset_fits import CLASSES, TABLE
from videotune.presets.shipped import preset_card, preset_names

SECONDS = 8
FPS = 24


def write_clip(folder: Path) -> None:
    """Write one clip with its caption: a bar that crosses the picture."""
    frames = np.zeros((SECONDS * FPS, 720, 1280, 3), np.uint8)
    for index, frame in enumerate(frames):
        frame[:, 6 * index : 6 * index + 60] = 200
    write_example_clip(folder, frames, FPS)


def fit_of(preset: str, gigabytes: int, clips: Path) -> dict[str, Any] | None:
    """Return the verdict of a plan and its least and most hours on cards of a memory;
    None if it does not fit.
    """
    facts = plan(preset=preset, vram=gigabytes, data=str(clips)).plan
    if not facts["fits"]:
        return None
    hours = [
        example["hours"] + example["hours_beside"] for example in facts["examples"]
    ]
    bounds = [round(min(hours), 2), round(max(hours), 2)] if hours else []
    return {"verdict": facts["verdict"], "hours": bounds}


def fits_of(preset: str, clips: Path) -> dict[str, Any]:
    """Return the fit of a preset by class of memory."""
    fits = {}
    for gigabytes in CLASSES:
        fit = fit_of(preset, gigabytes, clips)
        if fit is not None:
            fits[str(gigabytes)] = fit
    return fits


def main(names: list[str]) -> None:
    """Write the rows of some presets, or of all."""
    table = read_json(TABLE) if TABLE.is_file() and names else {}
    with TemporaryDirectory() as folder:
        write_clip(Path(folder))
        for name in names or preset_names():
            if preset_card(name) is None:
                continue
            table[name] = fits_of(name, Path(folder))
            write_json(TABLE, dict(sorted(table.items())))
            print(name, table[name], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
