"""How samples of a run with sound are generated: by diffusers' pipelines if video and
sound are learnt, by videotune if one of them is given.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from videotune.reporter.read import Run, items
from videotune.text import as_argument

GIVEN_FILES = {"video": "--video clip.mp4", "sound": "--sound sound.wav"}
"""By what a run is given, the option of ``videotune sample``."""


@cache
def _sound_rates() -> dict[str, str]:
    """Return the code of the samples a second of the sound, by the pipeline's class."""
    path = Path(__file__).with_name("sound_code.json")
    rates: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return rates


def learnt_modalities(run: Run) -> set[str]:
    """Return which of "video" and "sound" a run learns; empty if it reads no sound."""
    return {"video", "sound"} & {str(name) for name in items(run.setting("generate"))}


def conditioning_modality(run: Run) -> str:
    """Return which of "video" and "sound" a run's samples are given; empty if none."""
    learnt = learnt_modalities(run)
    if len(learnt) != 1:
        return ""
    return "video" if learnt == {"sound"} else "sound"


def sound_use(run: Run, pipelines: Sequence[str], folder: str) -> dict[str, Any]:
    """Return what the chapter on using the files says of sound.

    Args:
        run: the run.
        pipelines: classes of the pipelines that its code loads.
        folder: how the run is named in commands.

    Returns:
        "sound_rate", the code of the sound's samples a second, empty if the code writes
        no sound; "conditioning_modality"; and "given_command", the command for samples that are
        given it.
    """
    known_names = set(pipelines) & _sound_rates().keys()
    sound_rate = ""
    if len(learnt_modalities(run)) == 2 and len(known_names) == 1:
        sound_rate = _sound_rates()[known_names.pop()]

    modality = conditioning_modality(run)
    command = ""
    if modality:
        options = GIVEN_FILES[modality]
        command = f'videotune sample {as_argument(folder)} --prompt "…" {options}'
    return {
        "sound_rate": sound_rate,
        "conditioning_modality": modality,
        "given_command": command,
    }
