"""docs/verdict.json: what scripts/verdict.py found of the verdict on the toy, and that docs/monitor.md tells the same."""

import json
from pathlib import Path

from videotune.validation.selection import MOST_WINDOWS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_verdict_was_right_as_often_as_is_said() -> None:
    found = json.loads((DOCS / "verdict.json").read_text(encoding="utf-8"))
    told, summary, rows = (DOCS / "monitor.md").read_text(encoding="utf-8"), found["summary"], found["runs"]
    assert found["settings"]["held_out"] <= MOST_WINDOWS - MOST_WINDOWS // 3, "the figures are of another validation"
    four, endless, levels = ([row for row in rows if row["case"] == case] for case in ("four", "endless", "levels"))
    assert len(four) == len(endless) == 20
    right = tuple(summary["four"][name] for name in ("overfitting", "within_one_reading", "both"))
    assert right[0] == sum(row["called_at"] is not None for row in four)
    assert right[1] == sum(abs(row["best_step"] - row["dense_best"]) <= found["settings"]["every"] for row in four)
    assert all(row["called_at"] is None for row in endless)
    for words in (
        f"called in {right[0]} of 20",
        f"within one validation of it in {right[1]} of 20",
        f"both in {right[2]}",
        f"called in {summary['levels']['overfitting']} of {len(levels)}",
    ):
        assert words in told, words
