"""``doctor --gpu`` on the stand-in card, and the plan that uses its rates."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from tests.simcuda import card
from tests.simcuda.child import on_card
from videotune.cli.main import app
from videotune.commands import self_test
from videotune.commands.self_test import (
    GRAPHS,
    OTHER_LOSS,
    SLOWER,
    UNDER_LOAD,
    WAYS,
    WITHIN,
    Sizes,
    wrong,
)
from videotune.errors import FAILED, SKIPPED
from videotune.planner.fit import requested_card
from videotune.planner.gpus import measured_file

SMALL = Sizes(
    blocks=4,
    heads=4,
    head=32,
    frames=9,
    side=128,
    steps=4,
    matrix=64,
    copied=1 << 16,
    seconds=0.1,
)
BOUNDS = ("plan", "slow", "graphs", "cooling", "deterministic")
"""A word of the sentence on each bound."""


def self_tested(folder: str) -> dict[str, Any]:
    """What the card has seen of a small self-test, what that prints and writes, and the
    card that a plan is made for.
    """
    os.environ["XDG_CACHE_HOME"] = folder
    with card.watched() as found, patch.object(self_test, "Sizes", lambda: SMALL):
        done = CliRunner().invoke(app, ["doctor", "--gpu"])
    (report,) = Path(folder).rglob("cards/*.json")
    planned = requested_card(None, None)[1]
    assert planned is not None
    again = measured_file(planned.name) == report
    whole, damaged = json.loads(report.read_text()), []
    for text in ("{", json.dumps(whole | {"card": whole["card"] | {"flops": 0.0}})):
        report.write_text(text)
        damaged.append(requested_card(None, None)[1])
    return {
        "errors": found.errors,
        "said": done.output,
        "code": done.exit_code,
        "planned": asdict(planned),
        "again": again,
        "damaged": [one and one.measured for one in damaged],
    }


def test_self_test(tmp_path: Path) -> None:
    """No error on the card, memory as planned, equal losses, and rates that a plan then
    uses; a damaged report is none.
    """
    found = on_card(self_tested, tmp_path)
    print(found["said"])
    assert found["errors"] == []
    assert found["again"]
    assert found["planned"]["measured"]
    assert not any(found["damaged"])
    assert "the plan is" not in found["said"]
    assert found["code"] == SKIPPED * ("note:" in found["said"])


def report(**other: Any) -> dict[str, Any]:
    """A report in which nothing is wrong, but for ``other``."""
    rows = {
        way: {
            "planned_bytes": 100,
            "allocated_bytes": 100,
            "seconds": 1.0,
            "losses": [2.0, 1.0],
        }
        for way in WAYS
    }
    return {
        "trainings": rows,
        "matrix_flops": {"first": 1.0, "under load": 1.0},
        "same_losses": True,
    } | other


@pytest.mark.parametrize("over", [0, 1])
def test_bounds(over: int) -> None:
    """A sentence for each figure that is beyond its bound, and none for those within."""
    off = over * 0.02 - 0.01
    rows = report()["trainings"]
    rows["resident"]["planned_bytes"] = 100 * (1 + WITHIN + off)
    rows["weights streamed"]["seconds"] = SLOWER + off
    rows[GRAPHS]["losses"] = [2.0, 1.0 + OTHER_LOSS + off * OTHER_LOSS]
    made = report(
        trainings=rows,
        matrix_flops={"first": 1.0, "under load": UNDER_LOAD - off},
        same_losses=not over,
    )
    found = wrong(made)
    assert len(found) == over * len(BOUNDS)
    assert all(word in line for word, line in zip(BOUNDS, found, strict=False))


def test_without_a_card() -> None:
    """The self-test is refused where torch finds no card."""
    assert CliRunner().invoke(app, ["doctor", "--gpu"]).exit_code == FAILED


def test_a_run_beside_it() -> None:
    """A run that would not be looked at is refused."""
    assert (
        CliRunner().invoke(app, ["doctor", "--gpu", "runs/first"]).exit_code == FAILED
    )
