"""Every benchmark runs to its end with --tiny, so that none breaks unseen; what it
prints then means nothing.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / "benchmarks"
PARTS_OF_OTHERS = {"bare", "gpu_matmul8", "gpu_rig", "plain_loops", "toy_runs"}
"""Files that the benchmarks themselves start or import."""

WORDS = {"data decode": ("decode",), "data encode": ("encode",)}
"""Arguments of those that need some."""

REHEARSED_ELSEWHERE = {"data", "gpu", "real", "saving", "scale", "studio"}
"""data above and saving, scale and studio below, gpu.py in tests/planner/test_gpu_rehearsal.py,
and real.py in tests/simcuda/test_real.py.
"""

CASES = sorted(
    {
        *WORDS,
        *(
            path.stem
            for path in HOME.glob("*.py")
            if path.stem not in PARTS_OF_OTHERS | REHEARSED_ELSEWHERE
        ),
    }
)


def rehearse(tmp_path: Path, name: str, *words: str) -> str:
    """What a benchmark prints; its process must end well, and say nothing of packages
    that are not needed.
    """
    done = subprocess.run(
        [sys.executable, str(HOME / f"{name}.py"), *words, "--tiny"],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOME.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pip install" not in done.stderr
    return done.stdout


SLOW = {"count_compiled"}
"""Those that compile."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case
        for case in CASES
    ],
)
def test_a_benchmark_runs_to_its_end(tmp_path: Path, case: str) -> None:
    rehearse(tmp_path, case.split()[0], *WORDS.get(case, ()))


def test_processes_send_what_a_plan_calculates(tmp_path: Path) -> None:
    """Counted in two real processes, with the same ratios as those that are published."""
    file = tmp_path / "scale.json"
    rehearse(tmp_path, "scale", "--json", str(file))
    counted = json.loads(file.read_text())["rows"]
    published = json.loads((ROOT / "docs" / "benchmarks-scale.json").read_text())
    assert {row["way"] for row in counted} <= {row["way"] for row in published["rows"]}
    for row in (*counted, *published["rows"]):
        assert row["tokens"] == 1.0
        assert set(row["sent"]) <= {"attention", "prediction", "gradients", "weights"}
        for name, part in row["sent"].items():
            # FSDP fills rows up to a multiple of the processes.
            tolerance = 0.03 if name == "weights" else 0.005
            assert part["over_theory"] == pytest.approx(1, abs=tolerance), name


def test_steps_wait_less_for_a_checkpoint_that_threads_write(tmp_path: Path) -> None:
    """With the same figures as those that are published."""
    file = tmp_path / "saving.json"
    assert "ratio: steps wait" in rehearse(tmp_path, "saving", "--json", str(file))
    counted = json.loads(file.read_text())
    published = json.loads((ROOT / "docs" / "benchmarks-saving.json").read_text())
    for content in (counted, published):
        at_once, by_threads = content["rows"].values()
        assert at_once["waited"] > 0.9 * at_once["seconds"]
        assert by_threads["waited"] < by_threads["seconds"]
        assert at_once["bytes"] == by_threads["bytes"]
        assert content["ratio"] > 1


@pytest.mark.skipif(
    shutil.which("chromium") is None
    and os.environ.get("VIDEOTUNE_BROWSER") != "required",
    reason="no Chromium on PATH",
)
def test_the_benchmark_of_the_studio_runs_to_its_end(tmp_path: Path) -> None:
    assert "first paint" in rehearse(tmp_path, "studio")


ROOT = HOME.parent


def run_script(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository."""
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True, text=True, timeout=600, check=False, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_a_row_of_the_table_of_cards_is_what_the_planner_says_today() -> None:
    done = run_script("scripts/write_card_table.py", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert done.stdout.strip() in page
    hours = done.stdout.strip().split(" | ")[4]
    assert f"*planned:* {hours} for 2,000 steps on an RTX 3060 of 12 GB" in page


def test_a_row_of_wans_table_of_memory_is_what_the_planner_says_today() -> None:
    done = run_script("scripts/write_wan_memory.py", "5")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() in (ROOT / "docs/wan.md").read_text(encoding="utf-8")


def test_wrong_lines_are_made_and_noticed(tmp_path: Path) -> None:
    words = ("videotune/trainer/step_record.py", "--only", "*loss_by_noise_level*")
    done = run_script("scripts/mutants.py", *words, "--work", str(tmp_path / "work"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "survivors:" in done.stdout


def test_some_wrong_lines_are_drawn(tmp_path: Path) -> None:
    words = ("videotune/trainer/step_record.py", "--sample", "3", "--seed", "1")
    done = run_script("scripts/mutants.py", *words, "--work", str(tmp_path / "work"))
    assert re.search("^3 of [0-9]+ mutants are drawn$", done.stdout, re.MULTILINE)
    tried, unreached = re.findall("of ([0-9]+) .*, ([0-9]+) not reached", done.stdout)[
        -1
    ]
    assert int(tried) + int(unreached) == 3
    assert "interval of 95 %" in done.stdout


def test_a_test_that_fails_without_a_mutant_is_named(tmp_path: Path) -> None:
    """The smallest project whose test fails where mutmut collects its statistics."""
    project = {
        "halves.py": "def half(number):\n    return number / 2\n",
        "tests/test_halves.py": (
            "from halves import half\n\n"
            "def test_of_halves():\n"
            "    assert half(4) == 2\n"
            "    raise OSError('the disk of this test is full')\n"
        ),
        "pyproject.toml": '[tool.mutmut]\nsource_paths = ["halves.py"]\n',
    }
    for name, text in project.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")

    call = "import sys, pathlib, mutants; mutants.run(pathlib.Path(sys.argv[1]), [])"
    done = subprocess.run(
        [sys.executable, "-c", call, str(tmp_path)],
        capture_output=True, text=True, timeout=100, check=False, cwd=ROOT / "scripts",
    )  # fmt: skip

    assert done.returncode == 1
    assert "mutmut stopped with exit status 1" in done.stderr
    message = done.stderr.rpartition("mutmut stopped with exit status 1")[2]
    assert "test_of_halves" in message
    assert "the disk of this test is full" in message
    assert not any("\u2800" < letter < "\u28ff" for letter in message)
