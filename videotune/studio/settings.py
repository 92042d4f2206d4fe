"""Settings of the studio itself, for all its projects: a file beside them."""

from pathlib import Path
from typing import cast

from typing_extensions import TypedDict

from videotune.files import write_json
from videotune.studio.projects import lock_of
from videotune.studio.records import read_record

SETTINGS_FILE = ".settings.json"
"""The file, in the folder of the projects."""


class StudioSettings(TypedDict, total=False):
    """What the user has set for all projects."""

    comfyui: str
    """Folder of ComfyUI, into which results are copied."""


def read_settings(root: Path) -> StudioSettings:
    """Return the settings.

    Raises:
        VideotuneError: if the file is damaged.
    """
    path = root / SETTINGS_FILE
    if not path.is_file():
        return {}
    remedy = "fix it, or remove it to set everything again"
    return cast(StudioSettings, read_record(path, StudioSettings, remedy))


def change_settings(root: Path, changes: StudioSettings) -> None:
    """Write some settings; an empty text removes one."""
    with lock_of(root):
        merged = {**read_settings(root), **changes}
        kept = {key: value for key, value in merged.items() if value}
        write_json(root / SETTINGS_FILE, kept)
