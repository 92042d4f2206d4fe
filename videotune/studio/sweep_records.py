"""The records of sweeps: which runs each has, and the values that they differ by."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.studio.projects import Project
from videotune.studio.records import SweepRecord, read_record


def read_sweeps(
    root: Path,
) -> tuple[dict[Path, Mapping[str, Mapping[str, str]]], dict[Path, str]]:
    """Return the runs of each sweep, and what is wrong with the damaged ones."""
    sweeps = {}
    damaged_sweeps = {}
    for path in sorted(root.glob("[!.]*/.studio/sweeps/*.json")):
        try:
            sweeps[path] = read_record(path, SweepRecord, "remove it")["runs"]
        except VideotuneError as error:
            damaged_sweeps[path] = str(error)
    return sweeps, damaged_sweeps


def runs_of_sweeps(project: Project) -> set[str]:
    """Return the runs of a project's sweeps, as far as their records can be read."""
    names: set[str] = set()
    for path in (project.folder / ".studio" / "sweeps").glob("*.json"):
        with suppress(VideotuneError):  # the page Queue reports the damaged record
            names.update(read_record(path, SweepRecord, "remove it")["runs"])
    return names
