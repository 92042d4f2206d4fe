"""The tests that are marked ``cuda``, on the stand-in card; on a machine with a real
one they run there too.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.simcuda import card
from tests.simcuda.child import ROOT, on_card

FILES = (
    "trainer/test_cuda.py",
    "memory/test_offload.py",
    "trainer/test_step.py",
    "diffusion/test_timesteps.py",
)
"""Not trainer/test_optimizers.py: paged moments need the driver's unified memory."""


class Counted:
    """How many tests passed, and what the others said."""

    def __init__(self) -> None:
        self.passed, self.failed, self.errors = 0, list[str](), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.when == "teardown":  # before another test has the same memory
            self.errors += [f"{report.nodeid}: {error}" for error in card.ops.errors()]
        if report.failed:
            self.failed.append(f"{report.nodeid}: {report.longreprtext[-1500:]}")


def marked(folder: str) -> dict[str, Any]:
    """Run them here, and what the card has found."""
    counted, files = Counted(), [str(ROOT / "tests" / name) for name in FILES]
    pytest.main(
        [
            *files,
            "-m",
            "cuda",
            "-k",
            "not graph",  # the stand-in has no CUDA graphs
            "-n",
            "0",
            "--basetemp",
            folder,
            "-p",
            "no:cacheprovider",
        ],
        [counted],
    )
    return {
        "passed": counted.passed,
        "failed": counted.failed,
        "errors": counted.errors,
    }


def test_the_marked_tests_pass(tmp_path: Path) -> None:
    seen = on_card(marked, tmp_path / "base")
    assert seen["failed"] == []
    assert seen["errors"] == []
    assert seen["passed"] == 7
