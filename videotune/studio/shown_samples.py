"""The samples of checkpoints that the page Results shows: those of the sample metrics
beside the clips that they are nearest to, and the previews.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.reporter.read import Run, at, mapping, number
from videotune.reporter.sample_findings import LikelyCopies, likely_copies
from videotune.sampling.picture_faults import (
    describe_faults,
    describe_sound,
    remark_at,
    samples_at,
)
from videotune.studio.preview_clips import clip_of
from videotune.studio.preview_rows import existing_file


@dataclass(frozen=True)
class ShownSample:
    """A sample of a step that the page shows."""

    path: str
    """Path within the project."""

    record: Any
    """Its record of the journal."""

    fault: str
    """What is wrong with it, in words; empty if nothing is."""

    sound: str
    """How loud its sound is, in words; empty without sound."""

    near: dict[str, str]
    """Name and path of the training clip that looks most alike; empty if not measured."""


@dataclass(frozen=True)
class SampleGroup:
    """The samples of a step that the page shows."""

    step: int
    remark: str
    """What is wrong with some of them; empty if nothing is."""

    measured: list[ShownSample]
    """Those that the sample metrics have drawn and compared with the training clips."""

    previews: list[ShownSample]
    """Those of the prompts for previews, which are not compared."""

    line: float | None
    """The likeness above which a sample is a likely copy; None if not known."""

    copies: LikelyCopies | None
    """How many samples are likely copies; None if that was not measured."""


def sample_groups(
    home: Path, run: Run, step: int | None, saved_steps: Sequence[int]
) -> list[SampleGroup]:
    """Return the samples that the page shows, by step.

    Of the step that is taken these are all samples, of other checkpoints those with a
    fault: what the remarks on the page count can be seen. If sample metrics did not
    measure that step, all of the last one that they did are shown too.
    """
    whole_steps = [] if step is None else [step]
    line_by_step = _lines_of_likely_copies(run)
    if line_by_step and step not in line_by_step:
        whole_steps.append(list(line_by_step)[-1])
    other_steps = [saved for saved in reversed(saved_steps) if saved not in whole_steps]

    preview_paths = {record.get("path") for record in run.of_kind("sample")}
    groups = []
    for shown_step in (*whole_steps, *other_steps):
        samples = list(_shown_samples(home, run, shown_step))
        if shown_step not in whole_steps:
            samples = [sample for sample in samples if sample.fault]
        if samples:
            previews: list[ShownSample] = []
            measured: list[ShownSample] = []
            for sample in samples:
                is_preview = sample.record["path"] in preview_paths
                (previews if is_preview else measured).append(sample)

            group = SampleGroup(
                step=shown_step,
                remark=remark_at(run.journal, shown_step),
                measured=measured,
                previews=previews,
                line=line_by_step.get(shown_step),
                copies=_copies_at(run, shown_step),
            )
            groups.append(group)
    return groups


def _copies_at(run: Run, step: int) -> LikelyCopies | None:
    """Return how many samples of a step are likely copies; None if not measured."""
    copies = likely_copies(run.journal, step)
    return copies if copies is not None and copies.step == step else None


def _lines_of_likely_copies(run: Run) -> dict[int, float | None]:
    """Return the line above which a sample is a likely copy, by measured step."""
    line_by_step = {}
    for record in run.of_kind("sample_metrics"):
        step = number(record.get("step"))
        if step is not None and "samples" in record:
            line_by_step[int(step)] = number(at(record, "replication", "line"))
    return line_by_step


def _shown_samples(home: Path, run: Run, step: int) -> Iterator[ShownSample]:
    """Yield the samples of a step whose files exist, those with a fault first."""
    clip_by_path = {str(clip["path"]): clip for clip in run.clips}
    records = [mapping(record) for record in samples_at(run.journal, step)]
    records.sort(key=lambda record: describe_faults(record) == "")
    for record in records:
        path = existing_file(run.folder, record["path"])
        if path is None:
            continue
        near: dict[str, str] = {}
        if record["clip"]:
            clip = clip_by_path.get(str(record["clip"]), {"path": record["clip"]})
            near = clip_of(home, run.folder, clip)
        yield ShownSample(
            path=path.relative_to(home).as_posix(),
            record=record,
            fault=describe_faults(record),
            sound=describe_sound(record),
            near=near,
        )


def preview_of(run: Run, home: Path, step: int | None) -> tuple[str, str] | None:
    """Return a preview of a step, as a path within the project, and how loud it is."""
    for record in run.of_kind("sample"):
        if record.get("step") == step:
            path = existing_file(run.folder, record.get("path"))
            if path is not None:
                relative = path.relative_to(home).as_posix()
                return relative, describe_sound(record)
    return None
