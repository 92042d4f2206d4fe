"""Runs of a few steps under the real torchrun, which restarts what fails."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.hosts import Host
from tests.support.launcher import QUIET, free_port
from tests.support.run_results import steps_of
from videotune.runs.journal import read_journal

LOST_AFTER = 10
"""Seconds instead of 45 until a silent process is lost, in tests that lose one. On a machine
that others use, a living process may be silent for some seconds.
"""

SOON_LOST = {"VIDEOTUNE_LOST_AFTER": str(LOST_AFTER)}

LIMIT = 300.0
"""Seconds after which a test gives up."""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@dataclass(frozen=True)
class Work:
    """A config file of runs of a few small steps, and where one of them goes."""

    config: Path
    run: Path

    def arguments(self, *more: str) -> list[str]:
        """Return the command to begin or to continue the run."""
        command = ["-m", "videotune", "train", str(self.config)]
        return [*command, "--out", str(self.run), *more]

    @property
    def step(self) -> int:
        """The last step that is written."""
        if not (self.run / "journal.jsonl").is_file():
            return 0
        return max((line["step"] for line in steps_of(self.run)), default=0)

    def resumes(self) -> list[dict[str, Any]]:
        return [line for line in read_journal(self.run) if line["kind"] == "resume"]


def write_config(
    folder: Path,
    clips: Path,
    base: Path,
    *,
    steps: int,
    samples: int = 1,
    save_every: int = 5,
    context: int = 1,
) -> Path:
    """Write the config of a run that learns a little in each of its steps.

    Args:
        folder: where the file and the cache go.
        clips: the dataset.
        base: the base model.
        steps: of the run.
        samples: that a process takes in each step.
        save_every: steps between two checkpoints.
        context: processes that share a sample.
    """
    settings: dict[str, Any] = {
        "base_model_name": str(base),
        "cache_dir": str(folder / "cache"),
        "datasets": [{"path": str(clips)}],
        "resolution": "32x32",
        "steps": steps,
        "save_every": save_every,
        "batch_size": samples,
        "context_parallel": context,
        "caption_dropout": 0.3,
        "learning_rate": 0.001,
        "samples": 1,
    }
    for text in QUIET:
        key, _, value = text.partition("=")
        part, _, name = key.rpartition(".")
        section = settings.setdefault(part, {}) if part else settings
        section[name] = int(value)
    name = f"{steps}-steps-of-{samples}-saved-each-{save_every}-context-{context}.json"
    config = folder / name
    config.write_text(json.dumps(settings))
    return config


def start(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command whose output goes into a file."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=os.environ | VARIABLES | dict(variables or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def torchrun(
    work: Work,
    log: Path,
    *more: str,
    processes: int = 2,
    restarts: int = 3,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a run in several processes of this machine."""
    launcher = (
        f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}",
        f"--master-port={free_port()}",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )
    return start([*TORCHRUN, *launcher, *work.arguments(*more)], log, variables)


def torchrun_on(
    host: Host, work: Work, log: Path, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start one process of a run on a host. Any number of one to three hosts make a run;
    the first one has the store in which they meet.
    """
    meeting = {
        "is_host": int(host.number == 1),
        "last_call_timeout": 8,
        "join_timeout": 60,
        "read_timeout": 10,
        "keep_alive_interval": 1,
    }
    launcher = (
        "--nnodes=1:3",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-id=test",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.77.0.1:29400",
        "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in meeting.items()),
        f"--local-addr={host.address}",
    )
    command = [*TORCHRUN, *launcher, *work.arguments()]
    return host.start(command, log, VARIABLES | dict(variables or {}))


def wait_until(met: Callable[[], bool], what: str, logs: Sequence[Path]) -> None:
    """Wait until something is so; the error has what was printed."""
    until = time.monotonic() + LIMIT
    while not met():
        if time.monotonic() > until:
            pytest.fail(f"waited too long for {what}: {printed(logs)}")
        time.sleep(0.02)


def ended(process: subprocess.Popen[bytes], logs: Sequence[Path]) -> int:
    """Return the exit code of a command that ends by itself."""
    wait_until(lambda: process.poll() is not None, "the end", logs)
    return process.returncode


def printed(logs: Sequence[Path]) -> str:
    """Return what commands have printed."""
    return "\n".join(log.read_text(errors="replace") for log in logs if log.is_file())


def workers(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes of a run, in the order in which the launcher began them."""
    children = psutil.Process(launcher.pid).children()
    return [child for child in children if "videotune" in child.cmdline()]


def end_all(launcher: subprocess.Popen[bytes]) -> None:
    """Kill a launcher that still runs, and what it began."""
    if launcher.poll() is not None:
        return
    processes = [launcher, *psutil.Process(launcher.pid).children(recursive=True)]
    for process in processes:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    launcher.wait()


def assert_same_losses(run: Path, reference: Path) -> None:
    """Each step once, with the reference's windows and captions, and its loss to rounding."""
    ours = steps_of(run)
    theirs = steps_of(reference)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert one["window_ids"] == two["window_ids"]
        assert one["captions"] == two["captions"]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4), one["step"]
