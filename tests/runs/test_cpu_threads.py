"""Threads on the CPU: how long they wait, how many there are, and that a user's own
settings win.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from videotune import cpu_threads
from videotune.cpu_threads import available_cores

SETTINGS = (*cpu_threads.WAIT_SETTINGS, *cpu_threads.THREAD_SETTINGS)


def threads_of(parameters: int, configure: bool = True, **settings: str) -> list[str]:
    """The threads and the spin count of a process that loads a model of this size."""
    code = (
        "import os\n"
        "from videotune import cpu_threads\n"
        f"{'cpu_threads.configure()' if configure else ''}\n"
        "import torch\n"
        "before = torch.get_num_threads()\n"
        f"cpu_threads.fit_to_model({parameters})\n"
        "print(before, torch.get_num_threads(), os.environ.get('GOMP_SPINCOUNT'))"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in SETTINGS
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_small_model_has_one_thread_and_a_large_one_those_of_torch() -> None:
    _, threads, spins = threads_of(2_000_000)
    assert (threads, spins) == ("1", str(cpu_threads.SPIN_COUNT))
    before, threads, _ = threads_of(1_000_000_000)
    assert int(threads) == min(int(before), available_cores())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"OMP_NUM_THREADS": "2"}, ["2", "2", "1000"]),
        ({"GOMP_SPINCOUNT": "7"}, ["1", "7"]),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ["1", "None"]),
    ],
)
def test_settings_of_the_user_win(
    settings: dict[str, str], expected: list[str]
) -> None:
    assert threads_of(2_000_000, **settings)[-len(expected) :] == expected


def test_within_another_program_nothing_is_set() -> None:
    before, threads, spins = threads_of(2_000_000, configure=False)
    assert before == threads
    assert spins == "None"


def test_the_command_line_sets_it_before_torch_is_imported() -> None:
    code = (
        "import sys, os\n"
        "from videotune.cli import main\n"
        "assert 'torch' not in sys.modules\n"
        "main.set_up_libraries()\n"
        "print(os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in SETTINGS
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(cpu_threads.SPIN_COUNT), done.stderr


def group(root: Path, path: str, cpu_max: str) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(cpu_max)


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000\n", 16),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("1600000 100000\n", 16),
        ("odd\n", 16),
        ("100000 0\n", 16),
    ],
)
def test_the_quota_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_max: str, cores: int
) -> None:
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(16)), raising=False
    )
    group(tmp_path, "", cpu_max)
    assert available_cores(tmp_path) == cores


def test_the_quota_of_a_group_above_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(16)), raising=False
    )
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/job\n")
    group(tmp_path, "user.slice/job", "max 100000")
    assert available_cores(tmp_path) == 16
    group(tmp_path, "user.slice", "400000 100000")
    assert available_cores(tmp_path) == 4


def test_the_first_version_of_control_groups_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(16)), raising=False
    )
    folder = tmp_path / "sys/fs/cgroup/cpu"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", 16), ("300000", 3)):
        (folder / "cpu.cfs_quota_us").write_text(quota)
        assert available_cores(tmp_path) == cores
