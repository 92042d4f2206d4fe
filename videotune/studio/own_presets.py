"""The presets that a user has saved: settings under a name, each in a file."""

from pathlib import Path

from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.studio import projects, trash
from videotune.studio.caption_decisions import without_decisions
from videotune.studio.projects import Project, draft, inside
from videotune.studio.records import OwnPreset, read_record
from videotune.studio.uploads import safe_name

PRESETS_FOLDER = "presets"
"""Folder of the user's presets: each a file with ``preset`` and ``keys``."""

PRESET_REMEDY = "fix it, or remove it"


def read_own_presets(root: Path) -> tuple[dict[str, OwnPreset], list[str]]:
    """Return the user's presets by name, and what is wrong with each damaged one."""
    presets = {}
    problems = []
    for path in sorted((root / PRESETS_FOLDER).glob("*.json")):
        try:
            presets[path.stem] = read_record(path, OwnPreset, PRESET_REMEDY)
        except VideotuneError as error:
            problems.append(str(error))
    return presets, problems


def preset_path(root: Path, name: str) -> Path:
    """Return the file of a preset.

    Raises:
        VideotuneError: if it is empty, or cannot be the name of a file.
    """
    if not name.strip():
        raise VideotuneError("a preset needs a name: type one")
    file_name = safe_name(name.strip() + ".json")
    return inside(root / PRESETS_FOLDER, file_name)


def save_own_preset(root: Path, project: Project, path: Path) -> None:
    """Save the settings of a project as a preset.

    Raises:
        VideotuneError: if the preset exists.
    """
    with projects.lock_of(root):
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            raise VideotuneError(
                f"the preset {path.stem} already exists: use another name"
            )
        write_json(
            path, {"preset": project.preset, "keys": without_decisions(draft(project))}
        )


def read_own_preset(path: Path) -> OwnPreset:
    """Read a preset.

    Raises:
        VideotuneError: if it is damaged.
    """
    preset = read_record(path, OwnPreset, PRESET_REMEDY)
    preset["keys"] = without_decisions(preset["keys"])
    return preset


def discard_own_preset(root: Path, path: Path) -> None:
    """Move a preset to the bin."""
    with projects.lock_of(root):
        trash.move_to_trash(root, "preset", path.stem, [path])
