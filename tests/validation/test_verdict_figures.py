"""docs/verdict.json: what scripts/verdict.py found of the verdict on the toy, and that docs/monitor.md tells the same."""

import json
from pathlib import Path

from videotune.validation.selection import MOST_WINDOWS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_verdict_was_right_as_often_as_is_said() -> None:
    found = json.loads((DOCS / "verdict.json").read_text(encoding="utf-8"))
    told, summary, rows = (DOCS / "monitor.md").read_text(encoding="utf-8"), found["summary"], found["runs"]
    assert found["settings"]["held_out"] <= MOST_WINDOWS - MOST_WINDOWS // 3, "the figures are of another validation"
    four = [row for row in rows if row["case"] == "four"]
    count = len({row["seed"] for row in four})
    assert count == len(four) == 20
    every = found["settings"]["every"]
    called = {row["seed"] for row in four if row["called_at"] is not None}
    near = {row["seed"] for row in four if abs(row["best_step"] - row["dense_best"]) <= every}
    right = (len(called), len(near), len(called & near))
    assert right == tuple(summary["four"][name] for name in ("overfitting", "within_one_reading", "both"))
    assert min(right) >= 0.9 * count
    for ten in (range(10), range(10, 20)):  # the rule was settled on the first ten
        assert len(called & near & set(ten)) >= 9
    endless = [row for row in rows if row["case"] == "endless"]
    assert len({row["seed"] for row in endless}) == 20
    assert all(row["called_at"] is None for row in endless)
    levels = [row for row in rows if row["case"] == "levels"]
    assert sum(row["called_at"] is not None for row in levels) == summary["levels"]["overfitting"] >= 1
    assert summary["levels"]["by_the_plain_mean"] == 0
    for words in (
        f"called in {right[0]} of 20",
        f"within one validation of it in {right[1]} of 20",
        f"both in {right[2]}",
        "in 0 of 20",
        f"called in {summary['levels']['overfitting']} of {len(levels)}",
    ):
        assert words in told, words
