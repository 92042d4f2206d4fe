"""docs/verdict.json: what scripts/verdict.py found of the verdict on the toy, and that docs/monitor.md tells the same."""

from __future__ import annotations

import json
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_verdict_was_right_as_often_as_is_said() -> None:
    found = json.loads((DOCS / "verdict.json").read_text(encoding="utf-8"))
    told, summary, rows = (DOCS / "monitor.md").read_text(encoding="utf-8"), found["summary"], found["runs"]
    four = [row for row in rows if row["case"] == "four"]
    assert len({row["seed"] for row in four}) == 10
    assert sum(row["called_at"] is not None for row in four) == summary["four"]["overfitting"] >= 9
    every = found["settings"]["every"]
    near = [row for row in four if abs(row["best_step"] - row["dense_best"]) <= every]
    assert len(near) == summary["four"]["within_one_reading"] >= 9
    endless = [row for row in rows if row["case"] == "endless"]
    assert len({row["seed"] for row in endless}) == 20
    assert all(row["called_at"] is None for row in endless)
    levels = [row for row in rows if row["case"] == "levels"]
    assert sum(row["called_at"] is not None for row in levels) == summary["levels"]["overfitting"] >= 1
    assert summary["levels"]["by_the_plain_mean"] == 0
    for words in (
        f"called in {summary['four']['overfitting']} of 10",
        f"within one reading of it in {summary['four']['within_one_reading']} of 10",
        "in 0 of 20",
        f"called in {summary['levels']['overfitting']} of {len(levels)}",
    ):
        assert words in told, words
