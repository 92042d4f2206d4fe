"""Going back to an earlier step: what came after it is set aside whole, and the run is again what it was."""

import filecmp
import re
import shutil
from functools import partial
from pathlib import Path

from videotune.files import write_bytes, write_json, write_whole
from videotune.runs.schemas import read_record

FACTS = ("config", "check", "plan")
"""The files that say what a run is. When a resume changes them, the old ones stay in ``before/``."""


def facts_at(run: Path, step: int | None) -> dict[str, Path]:
    """The files that said what the run was when it made the step after ``step``; None: those that say it now."""
    later = changed_after(run, step) if step is not None else []
    return {
        name: kept_before(run, name, later[0]) if later else run / f"{name}.json"
        for name in FACTS
    }


def kept_before(run: Path, name: str, step: int) -> Path:
    """Where a file of the run lies that was true until ``step``."""
    return run / "before" / f"{name}-until-step-{step}.json"


def changed_after(run: Path, step: int) -> list[int]:
    """The steps after ``step`` at which a resume has changed the run."""
    found = [
        re.fullmatch(r"config-until-step-(\d+)\.json", path.name)
        for path in (run / "before").glob("*.json")
    ]
    return sorted(int(name[1]) for name in found if name and int(name[1]) > step)


def archive_steps(run: Path, step: int, newest: int) -> Path | None:
    """Going back to ``step``: what came after it goes into a folder of its own, whole; None where nothing came after.

    ``newest``: the last step that the journal names.

    That folder is a run folder too. What says what the run was is copied there before anything moves, and the checkpoints
    move first: a kill in between loses nothing, a plain resume sees that a checkpoint is missing, and going back again
    finishes the same folder.
    """
    later = [
        folder
        for folder, number in numbered(run / "checkpoints", r"step-(\d+)")
        if number > step
    ]
    if not later and newest <= step:
        return None
    branch = branch_for(run)
    for name in (*(f"{fact}.json" for fact in FACTS), "exports.json"):
        if (run / name).is_file() and not (
            branch / name
        ).exists():  # what is there is from before a kill
            write_bytes(branch / name, (run / name).read_bytes())
    write_whole(branch / "journal.jsonl", partial(shutil.copyfile, run / "journal.jsonl"))
    for folder in later:
        _move(folder, branch / "checkpoints")
    for name in ("samples", "sample_metrics", "probe"):  # the last one is of earlier versions
        for path, number in numbered(run / name, r"step-(\d+)-.*"):
            if number > step:
                _move(path, branch / name)
    _set_exports_aside(run, branch, step)
    changed = changed_after(run, step)
    for name in FACTS if changed else ():  # the run is again what it was at that step
        if kept_before(run, name, changed[0]).exists():  # else a kill came after this was done
            write_bytes(run / f"{name}.json", kept_before(run, name, changed[0]).read_bytes())
    for number in reversed(changed):  # the oldest last: it says what the run is
        for name in reversed(FACTS):  # the config last: it says that the three are there
            if kept_before(run, name, number).exists():
                _move(kept_before(run, name, number), branch / "before")
    return branch


def branch_for(run: Path) -> Path:
    """The folder that takes what is set aside: the one that a kill left unfinished, else the next by number."""
    there = dict(
        sorted(
            (int(path.name), path)
            for path in (run / "branches").glob("*")
            if path.name.isdigit()
        )
    )
    for path in there.values():
        kept = path / "journal.jsonl"
        if not kept.is_file() or filecmp.cmp(kept, run / "journal.jsonl", shallow=False):
            return path
    branch = run / "branches" / str(1 + max(there, default=0))
    branch.mkdir(parents=True)
    return branch


def numbered(folder: Path, pattern: str) -> list[tuple[Path, int]]:
    """What lies in a folder under names that say a step, with the step."""
    names = [(path, re.fullmatch(pattern, path.name)) for path in sorted(folder.glob("*"))]
    return [(path, int(name[1])) for path, name in names if name]


def _set_exports_aside(run: Path, branch: Path, step: int) -> None:
    """Exports of later steps; those that lie elsewhere are copied, since the run may write under their names again."""
    listed = run / "exports.json"
    stay = []
    for line in read_record(listed) if listed.is_file() else ():
        name = re.search(r"-step-(\d+)", Path(line["path"]).name)
        place = run / line["path"]
        if name is None or int(name[1]) <= step:
            stay.append(line)
        elif place.absolute().is_relative_to(run.absolute()):
            if place.exists():
                _move(place, (branch / line["path"]).parent)
        elif place.exists() and not (branch / "export" / place.name).exists():
            copy = shutil.copytree if place.is_dir() else shutil.copy2
            (branch / "export").mkdir(exist_ok=True)
            copy(place, branch / "export" / place.name)
    if listed.is_file():
        write_json(listed, stay)


def _move(path: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path.rename(folder / path.name)
