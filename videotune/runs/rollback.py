"""Go back to an earlier step: archive everything that came after it, and make the run
what it was.
"""

import filecmp
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from videotune.files import write_bytes, write_json, write_whole
from videotune.runs.schemas import read_record

RUN_RECORDS = ("config", "check", "plan")
"""The JSON files of a run folder with its settings, its clips and its plan.

When a resume changes them, the old ones stay in ``before/``.
"""


def record_paths_at(run: Path, step: int | None) -> dict[str, Path]:
    """Return the files that said what the run was when it made the step after ``step``;
    for None, the present ones.
    """
    later_changes = changed_after(run, step) if step is not None else []
    if later_changes:
        return {name: kept_before(run, name, later_changes[0]) for name in RUN_RECORDS}
    return {name: run / f"{name}.json" for name in RUN_RECORDS}


def kept_before(run: Path, name: str, step: int) -> Path:
    """Return where the version of a file is kept that was true until ``step``."""
    return run / "before" / f"{name}-until-step-{step}.json"


def changed_after(run: Path, step: int) -> list[int]:
    """Return the steps after ``step`` at which a resume has changed the run."""
    steps = []
    for path in (run / "before").glob("*.json"):
        name = re.fullmatch(r"config-until-step-(\d+)\.json", path.name)
        if name and int(name[1]) > step:
            steps.append(int(name[1]))
    return sorted(steps)


def archive_steps(run: Path, step: int, newest: int) -> Path | None:
    """Go back to ``step`` and move everything that came after it into a folder of its
    own.

    That folder is a run folder, too. What says what the run was is copied there before
    anything moves, and the checkpoints move first. So a kill in between loses nothing:
    a plain resume sees that a checkpoint is missing, and going back again finishes the
    same folder.

    Args:
        run: the run folder.
        step: the step to go back to.
        newest: the last step that the journal names.

    Returns:
        The folder, or None if nothing came after the step.
    """
    later = [
        folder
        for folder, number in numbered(run / "checkpoints", r"step-(\d+)")
        if number > step
    ]
    if not later and newest <= step:
        return None

    # 1. Copy what says what the run was. A file that exists is from before a kill.
    branch = branch_for(run)
    for name in (*(f"{name}.json" for name in RUN_RECORDS), "exports.json"):
        if (run / name).is_file() and not (branch / name).exists():
            write_bytes(branch / name, (run / name).read_bytes())
    write_whole(
        branch / "journal.jsonl", partial(shutil.copyfile, run / "journal.jsonl")
    )

    # 2. Move what came after the step.
    for folder in later:
        _move(folder, branch / "checkpoints")
    # earlier versions wrote "probe"
    for name in ("samples", "sample_metrics", "sampled", "probe"):
        for path, number in numbered(run / name, r"step-(\d+)-.*"):
            if number > step:
                _move(path, branch / name)
    _archive_exports(run, branch, step)
    _archive_comparisons(run, branch, step)

    # 3. Make the run what it was.
    _restore_facts(run, branch, step)
    return branch


def _restore_facts(run: Path, branch: Path, step: int) -> None:
    """Restore config, check and plan as they were at ``step``, and move their later
    versions into the branch.
    """
    changed = changed_after(run, step)
    if not changed:
        return
    for name in RUN_RECORDS:
        version_file = kept_before(run, name, changed[0])
        if version_file.exists():  # else a kill came after this was done
            write_bytes(run / f"{name}.json", version_file.read_bytes())

    # The oldest goes last, for it says what the run is; and the config last of all, for
    # it says that all three exist.
    for number in reversed(changed):
        for name in reversed(RUN_RECORDS):
            version_file = kept_before(run, name, number)
            if version_file.exists():
                _move(version_file, branch / "before")


def branch_for(run: Path) -> Path:
    """Return the folder for an archive: the one that a kill left unfinished, else the
    next by number.
    """
    branches = {}
    for path in (run / "branches").glob("*"):
        if path.name.isdigit():
            branches[int(path.name)] = path

    for _, path in sorted(branches.items()):
        journal = path / "journal.jsonl"
        if not journal.is_file() or filecmp.cmp(
            journal, run / "journal.jsonl", shallow=False
        ):
            return path
    branch = run / "branches" / str(1 + max(branches, default=0))
    branch.mkdir(parents=True)
    return branch


def numbered(folder: Path, pattern: str) -> list[tuple[Path, int]]:
    """Return the files and folders whose names match a pattern, each with the step in
    its name.
    """
    matches = []
    for path in sorted(folder.glob("*")):
        name = re.fullmatch(pattern, path.name)
        if name:
            matches.append((path, int(name[1])))
    return matches


def _archive_exports(run: Path, branch: Path, step: int) -> None:
    """Move exports of later steps.

    Those outside of the run are copied, because the run may write them again.
    """
    list_file = run / "exports.json"
    if not list_file.is_file():
        return

    staying = []
    for entry in read_record(list_file):
        path = run / entry["path"]
        name = re.search(r"-step-(\d+)", path.name)
        if name is None or int(name[1]) <= step:
            staying.append(entry)
        elif path.absolute().is_relative_to(run.absolute()):
            if path.exists():
                _move(path, (branch / entry["path"]).parent)
        elif path.exists() and not (branch / "export" / path.name).exists():
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            (branch / "export").mkdir(exist_ok=True)
            copy(path, branch / "export" / path.name)
    write_json(list_file, staying)


def _archive_comparisons(run: Path, branch: Path, step: int) -> None:
    """Move the comparisons of checkpoints that show a later step, with their videos of
    later steps.

    Their videos of the steps that stay are not drawn again by the next comparison.
    """
    folder = run / "compare"
    for path, number in numbered(folder, r".*-step-(\d+)\.mp4"):
        if number > step:
            _move(path, branch / "compare")

    list_file = folder / "compare.json"
    if not list_file.is_file():
        return
    staying: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    for entry in read_record(list_file):
        # What does not say its steps may show any.
        shows_later = "steps" not in entry or max(entry["steps"], default=0) > step
        (later if shows_later else staying).append(entry)
    if not later:
        return

    write_json(branch / "compare" / "compare.json", later)
    for entry in later:
        for key in ("video", "sheet"):
            # Only the name counts: a comparison that was written elsewhere stays there.
            path = folder / Path(entry[key]).name
            if path.is_file():
                _move(path, branch / "compare")
    write_json(list_file, staying)


def _move(path: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path.rename(folder / path.name)
