"""The run folder: what a run is made of on disk, and what others may ask of it while it runs."""

import json
import os
import platform
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from videotune._version import __version__
from videotune.config.optimizers import default_warmup
from videotune.config.resolve import INTERVALS
from videotune.data.dataset import to_json
from videotune.errors import INTERRUPTED, VideotuneError
from videotune.files import digest, hash_file, is_left_behind, write_json
from videotune.job.job import Job, with_views
from videotune.runs.schemas import read_record
from videotune.types import BasePlace

CONTROL_WORDS = ("stop", "save", "sample")


@cache
def versions() -> Mapping[str, str]:
    """What ran: for the journal and for bug reports."""
    found = {
        name: version(name) for name in ("torch", "diffusers", "transformers", "peft", "av")
    }
    return {"videotune": __version__, "python": platform.python_version(), **found}


OWN = (
    "config.json", "check.json", "plan.json", "journal.jsonl", "exports.json", "validation.json", "demo.json",
    "sample_metrics.json", "ruler.json", "probe.json", "report.html", "checkpoints", "samples", "export", "pictures",
    "sample_metrics", "probe", "compare", "before", "branches", "tensorboard",
    "wandb", "mlflow.db", "mlartifacts",
)  # fmt: skip
"""What a run writes into its folder, or an earlier version did, but for its lock and its heartbeat."""

LOCK = ".lock"

BEFORE_CONFIG = ("check.json", "plan.json")
"""What a start writes before config.json: alone beside a run's lock, a start that was killed has left it."""

LONGEST_NAME = 180
"""Bytes that the folder's name may have: exports bear it, with a step and a format; a file's name may have 255."""


def refuse_run(run: Path) -> None:
    """Raise VideotuneError where a run lies there already, files are in the way, or the folder cannot be made."""
    name = len(os.fsencode(run.absolute().name))
    if name > LONGEST_NAME:
        raise VideotuneError(
            f"--out: the name of {run} has {name} bytes, and exports are named after it: at most {LONGEST_NAME}"
        )
    try:
        _refuse_taken(run)
        made = [folder for folder in (run, *run.absolute().parents) if not folder.exists()]
        try:
            run.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=run).close()
        finally:
            for folder in made:  # nothing is left of a run that is refused for another reason
                with suppress(OSError):
                    folder.rmdir()
    except OSError as error:
        raise VideotuneError(
            f"--out: {run} cannot be written: {error.strerror}. Give another folder"
        ) from error


def _refuse_taken(run: Path) -> None:
    if (run / "config.json").exists():
        raise VideotuneError(
            f"{run} holds a run already: continue it with --resume, or give another --out"
        )
    if run.exists() and not run.is_dir():
        raise VideotuneError(f"{run} is a file: --out takes a folder for the run")
    there = [
        name
        for name in OWN
        if (run / name).is_file() or ((run / name).is_dir() and any((run / name).iterdir()))
    ]
    if there and not ((run / LOCK).exists() and set(there) <= set(BEFORE_CONFIG)):
        raise VideotuneError(
            f"{run} holds {', '.join(there)}, which a run would write over: move them away, or give another --out"
        )


def refuse_out_in_data(run: Path, datasets: Iterable[str], above: bool = True) -> None:
    """Raise VideotuneError where the folder of a run, or of samples, is a dataset or lies in one, or (``above``) holds one.

    The samples would be clips of the dataset then.
    """
    out = run.resolve()
    for dataset in datasets:
        data = Path(dataset).expanduser().resolve()
        if data.exists() and (
            out == data or data in out.parents or (above and out in data.parents)
        ):
            how = "is" if out == data else "lies in" if data in out.parents else "holds"
            raise VideotuneError(
                f"--out {run} {how} the dataset {dataset}, so that previews would be taken as clips: give another --out"
            )


def refuse_samples_in_data(run: Path, out: Path) -> None:
    """The same for a folder of samples of a run."""
    refuse_out_in_data(
        out, [row["path"] for row in read_run_config(run)["settings"]["datasets"]], above=False
    )


@contextmanager
def only_process(run: Path) -> Iterator[None]:
    """Hold the run folder for this process alone, until it ends in whatever way.

    Raises VideotuneError where another process trains there.
    """
    run.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(run / LOCK).acquire(timeout=0)
    except (Timeout, OSError, NotImplementedError) as error:
        raise VideotuneError(
            f"another process trains in {run}: stop it first, or give another --out"
        ) from error
    with held:
        yield


def begin(
    run: Path, job: Job, prints: Mapping[str, str], plan: Mapping[str, Any], train_dtype: str
) -> None:
    """Create a run folder; its ``config.json`` comes last, so that a folder that has one has all.

    What a start left that was killed before that is written over.
    """
    refuse_run(run)
    run.mkdir(parents=True, exist_ok=True)
    for part in run.glob(".part-*"):
        if is_left_behind(part):
            part.unlink()
    write_json(run / "check.json", with_views(job, to_json(job.library), job.steps))
    write_json(run / "plan.json", plan)
    write_config(run, job, prints, train_dtype)


def write_config(
    run: Path,
    job: Job,
    prints: Mapping[str, str],
    train_dtype: str,
    asked: Mapping[str, Any] | None = None,
) -> None:
    """``config.json``: every key with its origin, the base and the data it was settled for.

    What was left to the machine (the dtype, the steps of the warm-up, those of the epochs) is frozen, so that a resume
    elsewhere is still the same run. ``asked``: what these keys were given as, where they were frozen before.
    """
    config = job.config
    fit_settings = job.resolved.to_json()
    warmup = default_warmup(job.steps) if config.warmup_steps is None else config.warmup_steps
    frozen = {
        "train_dtype": train_dtype,
        "warmup_steps": warmup,
        "steps": job.steps,
        "epochs": None,
    }
    frozen |= dict.fromkeys(f"{key}_epochs" for key in INTERVALS)
    given = (
        {key: fit_settings["settings"][key] for key in frozen} if asked is None else dict(asked)
    )
    fit_settings["settings"] |= frozen
    base = {"name": job.base.name, "fingerprints": dict(prints)} if job.base else {}
    if job.base is not None and (scheduler := scheduler_hash(job.base)):
        base["scheduler"] = scheduler
    whole = fit_settings | {
        "base": base,
        "data": job.data_digest(),
        "steps": job.steps,
        "processes": job.processes,
        "past": asdict(job.past),
        "asked": given,
        "versions": versions(),
    }
    write_json(run / "config.json", whole | {"digest": digest(whole)})


SCHEDULER = "scheduler/scheduler_config.json"


def scheduler_hash(base: BasePlace) -> str | None:
    """Names the bytes of the base model's scheduler config; None where it has none."""
    path = base.folder / SCHEDULER
    return hash_file(path) if path.is_file() else None


def read_run_config(run: Path) -> dict[str, Any]:
    """``config.json`` of a run.

    Raises VideotuneError where the folder holds no run.
    """
    if not (run / "config.json").is_file():
        raise VideotuneError(f"{run} holds no run: it has no config.json")
    return read_record(run / "config.json")


def run_settings(run: Path) -> dict[str, Any]:
    """The settings of a run, to sample or export from it; ``sample.steps`` is open again where only previews had fewer."""
    kept = read_run_config(run)
    settings: dict[str, Any] = kept["settings"]
    if kept["origins"].get("sample.steps") == "plan":
        settings["sample"]["steps"] = None
    return settings


def poll_control(run: Path) -> set[str]:
    """What ``control.json`` asks for; the file is taken away, so each asking is answered once.

    Raises nothing: a file that is not (yet) JSON is left for the next poll.
    """
    path = run / "control.json"
    if not path.exists():
        return set()
    try:
        asked = json.loads(
            path.read_bytes()
        )  # UTF-8, 16 or 32: whatever an editor or a shell writes
        path.unlink()
    except (ValueError, OSError):
        return set()
    return {word for word in CONTROL_WORDS if isinstance(asked, dict) and asked.get(word)}


class Interrupted(BaseException):
    """The person has asked to stop while something was made that can be made again."""


@dataclass
class Signals:
    """Whether the person has asked to stop, and when. ``several``: the launcher signals each process once more."""

    stop: bool = False
    at: float = 0.0
    several: bool = False
    _breaking: bool = False

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """What is done in this block is given up at once when the person asks to stop; raises Interrupted there.

        Anywhere there, in a ``finally`` too: what must be put back whole is put back outside of it.
        """
        self._breaking = True
        try:
            if self.stop:
                raise Interrupted
            yield
        finally:
            self._breaking = False


ONE_PRESS = 2.0
"""A terminal and a launcher both signal a process of several: what comes within so many seconds is one asking."""


HANGUP = getattr(signal, "SIGHUP", None)
"""What a closed terminal sends; Windows has none."""


def hangup_is_termination() -> None:
    """From now on a closed terminal does what SIGTERM does, unless the process was started to ignore it (nohup)."""
    if HANGUP is not None and signal.getsignal(HANGUP) == signal.SIG_DFL:
        signal.signal(HANGUP, signal.getsignal(signal.SIGTERM))


@contextmanager
def signals(several: bool = False) -> Iterator[Signals]:
    """SIGINT, SIGTERM and SIGHUP ask the run to finish its step and save; a second one ends the process at once.

    But not a SIGHUP, which a closed terminal may send twice; one that the process was started to ignore stays ignored.
    """
    asked = Signals(several=several)

    def tell(
        text: str,
    ) -> None:  # at once: a print in a signal handler may meet another in the middle
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.stop:
            if number == HANGUP or (asked.several and time.monotonic() - asked.at < ONE_PRESS):
                return
            tell("videotune: stopped at once; the last checkpoint is whole")
            os._exit(INTERRUPTED)  # nothing more is waited for, not even threads
        asked.stop = True
        asked.at = time.monotonic()
        tell("stopping after this step and saving; once more to stop at once")
        if asked._breaking:
            raise Interrupted

    numbers = [signal.SIGINT, signal.SIGTERM]
    if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
        numbers.append(HANGUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
