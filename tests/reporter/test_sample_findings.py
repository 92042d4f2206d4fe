"""What is said of samples that may be copies of training clips."""

from typing import Any

import pytest

from videotune.reporter.sample_findings import LikelyCopies, likely_copies


def measured(copies: int, base_copies: int, unrelated: float = 0.5) -> dict[str, Any]:
    """Return a line of the sample metrics with three samples."""
    replication = {
        "line": 0.9,
        "copies": copies,
        "base_copies": base_copies,
        "held_out": {"p99": 0.4},
        "others": {"p99": unrelated},
    }
    return {
        "kind": "sample_metrics",
        "step": 2,
        "replication": replication,
        "samples": [{}, {}, {}],
    }


def found_in(record: dict[str, Any]) -> LikelyCopies:
    found = likely_copies([record])
    assert found is not None
    return found


def test_copies_are_counted_beside_those_before_training() -> None:
    assert "before training, 1" in found_in(measured(2, 1)).sentence


@pytest.mark.parametrize(
    ("copies", "base_copies", "answer"),
    [
        (2, 0, "Likely yes: 2 of 3 samples, before training 0."),
        (2, 1, "Likely yes: 2 of 3 samples, before training 1."),
        (1, 1, "No sign of it: 1 of 3 samples would"),
        (0, 1, "No sign of it in 3 samples."),
    ],
)
def test_the_answer_counts_only_more_copies_than_before_training(
    copies: int, base_copies: int, answer: str
) -> None:
    assert found_in(measured(copies, base_copies)).answer.startswith(answer)


@pytest.mark.parametrize(("unrelated", "is_told"), [(0.95, True), (0.951, False)])
def test_no_answer_is_given_where_all_clips_look_alike(
    unrelated: float, is_told: bool
) -> None:
    found = found_in(measured(0, 0, unrelated))
    assert found.answer.startswith("No sign") == is_told
    assert found.are_clips_alike != is_told
