"""How many CPU threads torch takes, and how long they wait for each other.

OpenMP's threads wait actively by default: on a machine whose cores are taken, a thread
that waits keeps the one that it waits for from running. `python benchmarks/threads.py`
measures it. A user's own settings (OMP_NUM_THREADS and the like) always win.
"""

import math
import os
import sys
from contextlib import suppress
from pathlib import Path

SPIN_COUNT = 1000
"""Rounds that a thread of GNU's OpenMP waits actively, before it sleeps: some 30 µs."""

SMALL_MODEL = 20_000_000
"""Parameters below which a model is trained with one thread.

Of the toy (2.3 million), a second thread saves nothing that waiting does not cost.
"""

WAIT_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

_is_configured = False
"""Whether this process is videotune's command, whose threads videotune may choose."""


def configure() -> None:
    """Set how long OpenMP's threads wait actively. It acts until torch is imported."""
    global _is_configured
    _is_configured = True
    if "torch" in sys.modules or any(name in os.environ for name in WAIT_SETTINGS):
        return
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def fit_to_model(parameters: int) -> None:
    """Choose the threads of this process for a model on the CPU.

    Within another program, and if the user named a number, nothing changes.

    Args:
        parameters: numbers in the weights of the model.
    """
    if not _is_configured or any(name in os.environ for name in THREAD_SETTINGS):
        return
    import torch

    threads = 1 if parameters < SMALL_MODEL else available_cores()
    if threads < torch.get_num_threads():
        torch.set_num_threads(threads)


def available_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use, by its affinity and by the quota of
    its control groups, which containers set. At least 1.

    Args:
        root: root of the file system.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for quota in _quotas(root):
        cores = min(cores, math.ceil(quota))
    return max(1, cores)


def _quotas(root: Path) -> list[float]:
    """Return the quotas, in cores, of the control groups of this process."""
    quotas: list[float] = []
    groups = root / "sys" / "fs" / "cgroup"
    folders = [groups]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            path = line.rpartition(":")[2].strip("/")
            folder = groups / path
            while path and folder != groups:
                folders.append(folder)
                folder = folder.parent

    for folder in folders:
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
    with suppress(OSError, ValueError, ZeroDivisionError):
        v1 = groups / "cpu"
        microseconds = int((v1 / "cpu.cfs_quota_us").read_text())
        if microseconds > 0:
            quotas.append(microseconds / int((v1 / "cpu.cfs_period_us").read_text()))
    return quotas
