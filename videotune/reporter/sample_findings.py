"""What a run's samples show without a verdict: likely copies of training clips, and
faulty pictures or sound. Each is a sentence for the terminal, the report and the studio.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.reporter.read import at, items, mapping, number
from videotune.sampling.picture_faults import remark_at
from videotune.text import as_argument, counted, plain

TOO_ALIKE = 0.95
"""Similarity of unrelated clips above which copies can hardly be recognised."""


@dataclass(frozen=True)
class LikelyCopies:
    """How many samples of a step are likely copies of training clips."""

    step: int
    copies: int

    base_copies: int
    """As many of the samples before training were as near to a clip, by chance."""

    samples: int

    are_clips_alike: bool = False
    """Whether the clips are so alike among themselves that a copy can hardly be told."""

    @property
    def are_found(self) -> bool:
        """Whether more samples are likely copies than before training."""
        return self.copies > self.base_copies

    @property
    def answer(self) -> str:
        """Whether the samples are copies, as a sentence without the step."""
        if self.are_clips_alike:
            return (
                "It cannot be told from samples: your clips are so alike among "
                "themselves that a copy would not stand out."
            )

        samples = counted(self.samples, "sample")
        before = f"before training {plain(self.base_copies)}"
        if self.are_found:
            return f"Likely yes: {plain(self.copies)} of {samples}, {before}."
        if self.copies:
            return (
                f"No sign of it: {plain(self.copies)} of {samples} would count as a "
                f"likely copy, {before}."
            )
        return f"No sign of it in {samples}."

    @property
    def sentence(self) -> str:
        """What was found, with its step."""
        verb = "is a likely copy" if self.copies == 1 else "are likely copies"
        base = ""
        if self.base_copies:
            base = f" (before training, {plain(self.base_copies)})"
        samples = counted(self.samples, "sample")
        return (
            f"{plain(self.copies)} of {samples} {verb} of a training clip at step "
            f"{plain(self.step)}{base}"
        )

    def to_json(self) -> dict[str, int]:
        """Return the counts as JSON values."""
        return {
            "step": self.step,
            "copies": self.copies,
            "base_copies": self.base_copies,
            "samples": self.samples,
        }


def likely_copies(
    records: Iterable[Mapping[str, Any]], step: int | None = None
) -> LikelyCopies | None:
    """Return the likely copies among the samples of the sample metrics.

    Args:
        records: lines of the journal.
        step: the step that is asked about; if it was not measured, or None, the last
            step that was.

    Returns:
        None if no step was measured, or if nothing says how near a copy would be.
    """
    measured = {}
    for record in records:
        measured_step = number(record.get("step"))
        if record.get("kind") != "sample_metrics" or measured_step is None:
            continue
        if number(at(record, "replication", "line")) is not None:
            measured[int(measured_step)] = record
    if not measured:
        return None

    chosen_step = step if step in measured else list(measured)[-1]
    record = measured[chosen_step]
    replication = mapping(record.get("replication"))
    return LikelyCopies(
        step=chosen_step,
        copies=int(number(replication["copies"]) or 0),
        base_copies=int(number(replication["base_copies"]) or 0),
        samples=len(items(record.get("samples"))),
        are_clips_alike=are_clips_alike(record),
    )


def are_clips_alike(record: Mapping[str, Any]) -> bool:
    """Return whether clips that have nothing to do with each other are so alike that a
    copy can hardly be told.

    Args:
        record: a line of the sample metrics.
    """
    baselines = []
    for part in ("held_out", "others"):
        baselines.append(number(at(record, "replication", part, "p99")) or 0.0)
    return max(baselines) > TOO_ALIKE


@dataclass(frozen=True)
class SampleFindings:
    """What the samples of a checkpoint show that a user must know."""

    step: int | None
    """The checkpoint; None: nothing is saved."""

    copies: LikelyCopies | None

    faults: str
    """Which samples of the checkpoint are faulty; empty if none is."""

    def lines(self, run: Path) -> list[str]:
        """Return a line on copies and one on faults, each with where to look.

        Args:
            run: the run folder.
        """
        report = run / "report.html"
        where_to_look = f"see {report}"
        if not report.is_file():
            where_to_look = f"to see them: videotune report {as_argument(run)}"

        lines = []
        if self.copies is not None and self.copies.are_found:
            lines.append(f"{self.copies.sentence}; {where_to_look}")
        if self.faults:
            step = plain(self.step)
            lines.append(f"samples of step {step}: {self.faults}; {where_to_look}")
        return lines


def sample_findings(
    records: Iterable[Mapping[str, Any]], step: int | None
) -> SampleFindings:
    """Return what the samples of a checkpoint show.

    Args:
        records: lines of the journal.
        step: the checkpoint that is recommended; None if nothing is saved.
    """
    lines = list(records)
    return SampleFindings(
        step=step,
        copies=likely_copies(lines, step),
        faults="" if step is None else remark_at(lines, step),
    )
