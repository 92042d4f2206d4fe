"""The run folder: what a run writes there, and what others may ask of it while it runs."""

import json
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from typing_extensions import TypedDict

from videotune._version import __version__
from videotune.config.optimizers import default_warmup
from videotune.config.resolve import INTERVALS
from videotune.data.dataset import to_json
from videotune.errors import VideotuneError, did_you_mean
from videotune.files import (
    digest,
    hash_file,
    is_left_behind,
    read_typed,
    write_json,
)
from videotune.job.job import Job, with_views
from videotune.runs.run_life import life
from videotune.runs.schemas import read_record
from videotune.runs.way_on import describe_way_on
from videotune.text import as_argument, some
from videotune.types import BasePlace

CONTROL_KEYS = ("stop", "save", "sample")
"""Keys of control.json."""

OWN = (
    "config.json",
    "begun.json",
    "check.json",
    "plan.json",
    "journal.jsonl",
    "exports.json",
    "validation.json",
    "demo.json",
    "sample_metrics.json",
    "forgetting.safetensors",
    "ruler.json",
    "probe.json",
    "report.html",
    "checkpoints",
    "samples",
    "export",
    "pictures",
    "sample_metrics",
    "probe",
    "compare",
    "sampled",
    "before",
    "branches",
    "tensorboard",
    "wandb",
    "mlflow.db",
    "mlartifacts",
)
"""What a run writes into its folder, or an earlier version did, except for its lock and
its heartbeat.
"""

SAMPLED = "sampled"
"""Folder of the videos of ``videotune sample RUN``; ``samples`` has the previews."""

LOCK = ".lock"

BEGUN = "begun.json"
"""What the user asked for, until config.json is written."""

BEFORE_CONFIG = (BEGUN, "check.json", "plan.json")
"""What a start writes before config.json.

If only these are beside a run's lock, a start was killed.
"""

LONGEST_NAME = 180
"""Bytes of the folder's name, at most.

Exports contain it, with a step and a format; a file name may have 255.
"""

SCHEDULER = "scheduler/scheduler_config.json"


class BegunRun(TypedDict):
    """``begun.json``: how to begin a run that was stopped before its first step."""

    preset: str | None
    keys: dict[str, Any]
    """The user's own keys, with absolute paths."""
    allow_skips: str | None


def write_begun(run: Path, begun: BegunRun) -> None:
    """Write ``begun.json``, so that a start that is interrupted can be resumed."""
    write_json(run / BEGUN, begun)


def read_begun(run: Path) -> BegunRun | None:
    """Return how a run was begun that has no ``config.json`` yet; None if it has one,
    or was never begun.

    Raises:
        VideotuneError: if the file is damaged.
    """
    path = run / BEGUN
    if (run / "config.json").is_file() or not path.is_file():
        return None
    try:
        begun: BegunRun = read_typed(path, BegunRun)
    except ValueError as error:
        raise VideotuneError(
            f"{path} is damaged ({error}): remove it, and begin the run again"
        ) from error
    return begun


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of videotune, Python and libraries, for the journal and bug
    reports.
    """
    libraries = ("torch", "diffusers", "transformers", "peft", "av")
    return {
        "videotune": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
    }


def refuse_run(run: Path) -> None:
    """Raise VideotuneError if the folder holds a run or other files of one, or cannot
    be written.
    """
    name_bytes = len(os.fsencode(run.absolute().name))
    if name_bytes > LONGEST_NAME:
        raise VideotuneError(
            f"--out: the name of {run} has {name_bytes} bytes. Exports are named after it, so it may have at most "
            f"{LONGEST_NAME}"
        )
    try:
        _refuse_taken(run)
        _try_to_write(run)
    except OSError as error:
        raise VideotuneError(
            f"--out: {run} cannot be written: {error.strerror}. Choose another folder"
        ) from error


def _try_to_write(run: Path) -> None:
    """Raise OSError if the folder cannot be written.

    A folder that does not exist is tried in another of a name of its own: the processes
    of a run try at the same time, and none may remove what another has just made.
    """
    if run.exists():
        tempfile.TemporaryFile(dir=run).close()
        return

    existing = next(folder for folder in run.absolute().parents if folder.exists())
    missing = run.absolute().relative_to(existing)
    with tempfile.TemporaryDirectory(dir=existing, prefix=".videotune-") as aside:
        trial = Path(aside) / missing
        trial.mkdir(parents=True)
        tempfile.TemporaryFile(dir=trial).close()


def _refuse_taken(run: Path) -> None:
    """Raise VideotuneError if the folder holds a run, or files that a run would
    overwrite.
    """
    if (run / "config.json").exists():
        if (life(run) or {}).get("alive"):
            raise VideotuneError(
                f"--out: {run} is being trained by another process: videotune wait "
                f"{as_argument(run)} waits for its end. Or choose another --out"
            )
        raise VideotuneError(
            f"--out: {run} already holds a run. {describe_way_on(run)}; or choose another --out"
        )
    if run.exists() and not run.is_dir():
        raise VideotuneError(f"--out: {run} is a file. Choose a folder for the run")

    taken_names = []
    for name in OWN:
        path = run / name
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            taken_names.append(name)
    is_killed_start = (run / LOCK).exists() and set(taken_names) <= set(BEFORE_CONFIG)
    if taken_names and not is_killed_start:
        raise VideotuneError(
            f"--out: {run} holds {', '.join(taken_names)}, which a run would overwrite. "
            "Move them away, or choose another --out"
        )


def refuse_out_in_data(run: Path, datasets: Iterable[str], above: bool = True) -> None:
    """Raise VideotuneError if an output folder is a dataset or inside of one, so that
    samples would become clips.

    Args:
        run: the folder of a run or of samples.
        datasets: paths of the datasets.
        above: also refuse a folder that contains a dataset.
    """
    out = run.resolve()
    for dataset in datasets:
        data = Path(dataset).expanduser().resolve()
        if not data.exists():
            continue

        relation = None
        if out == data:
            relation = "is"
        elif data in out.parents:
            relation = "is inside of"
        elif above and out in data.parents:
            relation = "contains"
        if relation is not None:
            raise VideotuneError(
                f"--out: {run} {relation} the dataset {dataset}, so previews would be taken for clips. "
                "Choose another --out"
            )


def refuse_samples_in_data(run: Path, out: Path) -> None:
    """Do the same for a folder of samples of a run."""
    datasets = read_run_config(run)["settings"]["datasets"]
    refuse_out_in_data(out, [dataset["path"] for dataset in datasets], above=False)


@contextmanager
def only_process(run: Path) -> Iterator[None]:
    """Hold the run folder's lock until the process ends.

    Raises VideotuneError if another process trains there.
    """
    run.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(run / LOCK).acquire(timeout=0)
    except (Timeout, OSError, NotImplementedError) as error:
        raise VideotuneError(
            f"another process trains in {run}. Stop it first, or choose another --out"
        ) from error
    with lock:
        yield


def begin(
    run: Path,
    job: Job,
    fingerprints: Mapping[str, str],
    plan: Mapping[str, Any],
    train_dtype: str,
) -> None:
    """Create a run folder.

    ``config.json`` comes last, so a folder that has one has everything.

    What a killed start has left is overwritten.

    Args:
        run: the folder.
        job: what is to be done.
        fingerprints: of the base model.
        plan: content of plan.json.
        train_dtype: the dtype in which the run computes.
    """
    refuse_run(run)
    run.mkdir(parents=True, exist_ok=True)
    for part in run.glob(".part-*"):
        if is_left_behind(part):
            part.unlink()
    write_json(run / "check.json", with_views(job, to_json(job.library), job.steps))
    write_json(run / "plan.json", plan)
    begun = read_begun(run)
    command = None if begun is None else digest(dict(begun))
    write_config(run, job, fingerprints, train_dtype, command=command)


def write_config(
    run: Path,
    job: Job,
    fingerprints: Mapping[str, str],
    train_dtype: str,
    user_values: Mapping[str, Any] | None = None,
    command: str | None = None,
) -> None:
    """Write ``config.json``: every key with its origin, the base model and the data.

    What was left to the machine (the dtype, the warm-up, lengths in epochs) is replaced
    by its value, so that a resume elsewhere is still the same run.

    Args:
        run: the folder.
        job: what is to be done.
        fingerprints: of the base model.
        train_dtype: the dtype in which the run computes.
        user_values: what the user set for the replaced keys, if they were replaced
            before.
        command: digest of what the user asked for at the start. None: it is not known.
    """
    content = job.resolved.to_json()
    warmup_steps = job.config.warmup_steps
    if warmup_steps is None:
        warmup_steps = default_warmup(job.steps)
    frozen = {
        "train_dtype": train_dtype,
        "warmup_steps": warmup_steps,
        "steps": job.steps,
        "epochs": None,
    }
    frozen |= dict.fromkeys(f"{key}_epochs" for key in INTERVALS)
    if user_values is None:
        user_values = {key: content["settings"][key] for key in frozen}
    content["settings"] |= frozen

    content |= {
        "base": _base_facts(job.base, fingerprints),
        "data": job.data_digest(),
        "steps": job.steps,
        "processes": job.processes,
        "past": asdict(job.view_history),
        "asked": dict(user_values),
        "versions": versions(),
        "command": command,
    }
    write_json(run / "config.json", content | {"digest": digest(content)})
    (run / BEGUN).unlink(missing_ok=True)


def _base_facts(
    base: BasePlace | None, fingerprints: Mapping[str, str]
) -> dict[str, Any]:
    if base is None:
        return {}
    facts: dict[str, Any] = {"name": base.name, "fingerprints": dict(fingerprints)}
    scheduler = scheduler_hash(base)
    if scheduler:
        facts["scheduler"] = scheduler
    return facts


def scheduler_hash(base: BasePlace) -> str | None:
    """Return a hash of the base model's scheduler config, or None if it has none."""
    path = base.folder / SCHEDULER
    return hash_file(path) if path.is_file() else None


def read_run_config(run: Path) -> dict[str, Any]:
    """Return ``config.json`` of a run.

    Raises VideotuneError if the folder holds no run.
    """
    if not (run / "config.json").is_file():
        raise VideotuneError(_why_no_run(run))
    return read_record(run / "config.json")


def _why_no_run(folder: Path) -> str:
    """Return why a folder holds no run, with the runs that may be meant."""
    if not folder.exists():
        near = get_close_matches(folder.name, _runs_in(folder.parent), 2)
        names = [str(folder.parent / name) for name in near]
        return f"{folder} does not exist{did_you_mean(names)}"

    inside = [str(folder / name) for name in _runs_in(folder)]
    if inside:
        return f"{folder} holds runs, and is none: {some(inside)}. Name one of them"
    return (
        f"{folder} holds no run: it has no config.json. If it was stopped before its "
        "first step, give its train command again"
    )


def _runs_in(folder: Path) -> list[str]:
    """Return the names of the runs in a folder."""
    return sorted(path.parent.name for path in folder.glob("*/config.json"))


def run_settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run, to sample or export from it.

    If the plan gave previews fewer steps, ``sample.steps`` is unset again.
    """
    run_config = read_run_config(run)
    settings: dict[str, Any] = run_config["settings"]
    if run_config["origins"].get("sample.steps") == "plan":
        settings["sample"]["steps"] = None
    return settings


def poll_control(run: Path) -> set[str]:
    """Return what ``control.json`` asks for, and delete the file, so that each request
    is answered once.

    Raises nothing: a file that is not valid JSON (yet) is left for the next poll.
    """
    path = run / "control.json"
    if not path.exists():
        return set()
    try:
        # Bytes may be UTF-8, 16 or 32, whatever an editor or a shell writes.
        requests = json.loads(path.read_bytes())
        path.unlink()
    except (ValueError, OSError):
        return set()
    if not isinstance(requests, dict):
        return set()
    return {key for key in CONTROL_KEYS if requests.get(key)}
