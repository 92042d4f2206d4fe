"""``status``: the training runs in a folder, how each stands, and what to do next."""

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.data.captions import read_caption
from videotune.data.clip_file import ClipFile
from videotune.data.file_checks import ClipProblem
from videotune.data.folder_listing import RUN_FILES
from videotune.data.images import IMAGE_SUFFIXES
from videotune.data.layouts import read_folder
from videotune.data.probe import probe
from videotune.errors import VideotuneError, did_you_mean
from videotune.files import near_paths
from videotune.reporter.outcome import (
    FINISHED_STATES,
    RUNNING_STATES,
    is_result_next,
    reason_without_verdict,
    recommended_checkpoint,
    status,
)
from videotune.reporter.previews import existing_exports
from videotune.reporter.progress import progress
from videotune.reporter.read import mapping, number, read_run
from videotune.reporter.restarts import Restart, restarts_of
from videotune.reporter.sample_findings import SampleFindings, sample_findings
from videotune.runs.rank_figures import RankFigures, find_stragglers, ranks_in
from videotune.runs.run_life import life
from videotune.text import plain

MAX_DEPTH = 4
"""Levels of folders that are searched for runs."""

RUN_MARKS = ("journal.jsonl", "heartbeat.json")
"""Files of a run; one that still encodes its clips has only the second."""

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""

MARKER = "COMPLETE"
"""The last file that a checkpoint gets, as in ``videotune.runs.checkpoint``, which would
import torch.
"""

PROJECT_MARKS = ("project.json",)
"""The file that makes a folder a project of the studio."""

CAPTION_COMMAND = "videotune caption {folder} --model MODEL"


@dataclass(frozen=True)
class RunOverview:
    """How a run stands."""

    run: Path

    state: str
    """A state of ``videotune.reporter.outcome.status``."""

    why: str
    """The state in a sentence."""

    step: int

    steps: int | None
    """Steps of the full run; None if they are not known yet."""

    seconds_left: float | None
    """Only of a run that is running, after its first steps."""

    verdict: str | None

    shown_verdict: str
    """The word for it, "none" if there is none."""

    verdict_reason: str | None
    """What the verdict rests on; None if there is none."""

    verdict_parts: Mapping[str, str | None] | None
    """The verdicts on video and sound, if both are learnt."""

    recommended: int | None
    """The recommended checkpoint's step; None if nothing is saved."""

    recommended_why: str
    """Why it is this one; empty if nothing speaks against it."""

    is_toy: bool
    """Whether it trained the toy, which no other program has."""

    exports: tuple[tuple[Path, int | None], ...]
    """The files that it has exported and that are still there, each with the step in its
    name; those of the recommended step first.
    """

    def is_recommended(self, step: int | None) -> bool:
        """Whether an exported file is of the recommended checkpoint."""
        return step is not None and step == self.recommended

    restarts: tuple[Restart, ...] = ()
    """How the run went on after it began."""

    ranks: Sequence[RankFigures] = ()
    """What each process needs for a step; empty for a run of one process."""

    activity: str = ""
    """What a running run does while it takes no step, such as "encoding clips 3 of 20";
    empty while it trains.
    """

    no_verdict: str = ""
    """Why there is no verdict; empty if there is one."""

    samples: SampleFindings | None = None
    """What the samples of the recommended checkpoint show; None before a journal."""

    saved_step: int | None = None
    """The step of the newest checkpoint; None if there is none."""

    takes_result: bool = False
    """Whether the user goes on with the recommended checkpoint, as after the end."""

    @property
    def is_stopped(self) -> bool:
        """Whether no process works on the run, and it has not come to its end."""
        return self.state not in (*RUNNING_STATES, *FINISHED_STATES, "absent")

    @property
    def stopped_text(self) -> str:
        """What has happened to a run that stopped, and what a resume keeps of it."""
        total = "" if self.steps is None else f" of {self.steps}"
        if self.saved_step is None:
            outlook = "nothing is saved yet, so a resume begins at step 0"
        else:
            outlook = (
                f"step {self.saved_step} is saved, and a resume continues from there"
            )
        if self.takes_result:
            outlook += "; more steps on these clips make it worse"
        return f"stopped at step {self.step}{total} ({self.why.removeprefix('ended: ')}); {outlook}"

    @property
    def next_command(self) -> str:
        """The command that the user runs next."""
        folder = shlex.quote(str(self.run))
        if self.state in RUNNING_STATES:
            return f"videotune wait {folder}"
        if self.takes_result:
            step = "" if self.recommended is None else f" --step {self.recommended}"
            takes_any = self.recommended is None
            if any(
                takes_any or at in (None, self.recommended) for _, at in self.exports
            ):
                return f'videotune sample {folder}{step} --prompt "…"'
            return f"videotune export {folder}{step}"
        if self.state == "failed":
            return f"videotune doctor {folder}"
        return f"videotune resume {folder}"

    def to_json(self) -> dict[str, Any]:
        """Return the overview as JSON values."""
        copies = self.samples.copies if self.samples else None
        return {
            "run": str(self.run),
            "state": self.state,
            "why": self.why,
            "step": self.step,
            "steps": self.steps,
            "seconds_left": self.seconds_left,
            "verdict": self.verdict,
            "shown_verdict": self.shown_verdict,
            "verdict_reason": self.verdict_reason,
            "verdict_parts": self.verdict_parts,
            "no_verdict": self.no_verdict or None,
            "activity": self.activity or None,
            "recommended": self.recommended,
            "likely_copies": copies.to_json() if copies is not None else None,
            "faulty_samples": self.samples.faults or None if self.samples else None,
            "exports": [str(path) for path, _ in self.exports],
            "restarts": [restart.to_json() for restart in self.restarts],
            "processes": [figures.to_json() for figures in self.ranks],
            "slow_processes": [
                straggler.figures.rank for straggler in find_stragglers(self.ranks)
            ],
            "next": self.next_command,
        }


@dataclass(frozen=True)
class DatasetOverview:
    """How a folder of clips stands of which no run is known."""

    folder: Path
    clips: int

    without_caption: int
    """Clips that can be read and lack a caption."""

    unreadable: int
    """Of the clips without a caption, those that cannot be read."""

    @property
    def next_command(self) -> str:
        """The command that the user runs next."""
        folder = shlex.quote(str(self.folder))
        if self.without_caption:
            return CAPTION_COMMAND.format(folder=folder)
        return f"videotune check {folder}"

    def to_json(self) -> dict[str, Any]:
        """Return the overview as JSON values."""
        return {
            "folder": str(self.folder),
            "clips": self.clips,
            "without_caption": self.without_caption,
            "unreadable": self.unreadable,
            "next": self.next_command,
        }


def find_marked(folder: Path, marks: Collection[str]) -> Iterator[Path]:
    """Yield the folders at or below ``folder`` that hold one of the files ``marks``.

    Hidden folders, bins, and what lies inside a marked folder are left out.
    """
    for parent, folder_names, file_names in os.walk(folder):
        depth = len(Path(parent).relative_to(folder).parts)
        if not set(marks).isdisjoint(file_names):
            yield Path(parent)
            folder_names.clear()
            continue

        folder_names[:] = sorted(
            name
            for name in folder_names
            if not name.startswith(".") and name != "bin" and depth < MAX_DEPTH
        )


def overview(run: Path) -> RunOverview:
    """Return how a run stands."""
    facts = status(run)
    seconds_left = None
    exports: list[tuple[Path, int | None]] = []
    restarts: list[Restart] = []
    is_toy = False
    recommended_why = ""
    no_verdict = ""
    samples = None
    takes_result = False
    if any((run / name).is_file() for name in RUN_FILES):
        contents = read_run(run)
        restarts = restarts_of(contents)
        is_toy = contents.is_toy
        _, recommended_why = recommended_checkpoint(contents, contents.last("verdict"))
        samples = sample_findings(contents.journal, facts["recommended"])
        if facts["verdict"] is None:
            no_verdict = reason_without_verdict(contents)
        if facts["state"] in RUNNING_STATES:
            seconds_left = progress(contents).left
        exports = existing_exports(contents)
        latest = contents.last("verdict")
        takes_result = is_result_next(facts["state"], latest, facts["recommended"])

    recommended = facts["recommended"]
    exports.sort(key=lambda export: export[1] != recommended)
    return RunOverview(
        run=run,
        state=facts["state"],
        why=facts["why"],
        step=facts["step"],
        steps=None if facts["steps"] is None else int(facts["steps"]),
        seconds_left=seconds_left,
        verdict=facts["verdict"],
        shown_verdict=facts["shown_verdict"],
        verdict_reason=facts["verdict_reason"],
        verdict_parts=facts["verdict_parts"],
        recommended=recommended,
        recommended_why=recommended_why,
        is_toy=is_toy,
        exports=tuple(exports),
        restarts=tuple(restarts),
        ranks=ranks_in(life(run)),
        activity=describe_activity(run) if facts["state"] == "running" else "",
        no_verdict=no_verdict,
        samples=samples,
        saved_step=_saved_step(run),
        takes_result=takes_result,
    )


def _saved_step(run: Path) -> int | None:
    """Return the step of the newest checkpoint that is complete by its marker."""
    steps = []
    for marker in (run / CHECKPOINTS).glob(f"step-*/{MARKER}"):
        number_text = marker.parent.name.removeprefix("step-")
        if number_text.isdecimal():
            steps.append(int(number_text))
    return max(steps, default=None)


def describe_activity(run: Path) -> str:
    """Return what a running process does, with how far it is; empty while it trains."""
    beat = mapping(life(run))
    activity = str(beat["state"] or "")
    if activity in ("", "training", "ended"):
        return ""
    done = mapping(beat["progress"])
    if number(done["total"]) is None:
        return activity
    subject = str(done["what"] or activity)
    if not subject.startswith(activity):
        subject = f"{activity} {subject}"
    return f"{subject} {plain(number(done['done']))} of {plain(number(done['total']))}"


def runs_below(folder: Path) -> list[RunOverview]:
    """Return how each run at or below a folder stands, the last written first.

    Raises:
        VideotuneError: if the folder does not exist.
    """
    if not folder.is_dir():
        otherwise = (
            ". Give a run, a folder of runs or of clips, or a folder of the studio's "
            "projects."
        )
        near = did_you_mean(near_paths(folder), otherwise)
        raise VideotuneError(f"{folder} is not a folder{near}")
    runs = list(find_marked(folder, RUN_MARKS))
    runs.sort(key=_written_at, reverse=True)
    return [overview(run) for run in runs]


def _written_at(run: Path) -> float:
    """Return when a run wrote last."""
    paths = [run / name for name in RUN_MARKS]
    return max(path.stat().st_mtime for path in paths if path.is_file())


def dataset_overview(folder: Path) -> DatasetOverview | None:
    """Return how many clips of a folder have a caption; None if it holds no clips."""
    try:
        clips, _ = read_folder(folder)
    except VideotuneError:
        return None
    missing = [clip for clip in clips if not _has_caption(clip)]
    unreadable = [clip for clip in missing if not _is_readable(clip)]
    return DatasetOverview(
        folder=folder,
        clips=len(clips),
        without_caption=len(missing) - len(unreadable),
        unreadable=len(unreadable),
    )


def _is_readable(clip: ClipFile) -> bool:
    """Return whether a clip that lacks a caption is worth one."""
    if clip.path.suffix.lower() in IMAGE_SUFFIXES:
        return True
    try:
        probe(clip.path)
    except ClipProblem:
        return False
    return True


def _has_caption(clip: ClipFile) -> bool:
    """Return whether a caption is recorded, or is in a file that can be read."""
    if clip.metadata_captions or clip.caption_file is None:
        return bool(clip.metadata_captions)
    try:
        return any(variant.strip() for variant in read_caption(clip.caption_file))
    except ClipProblem:
        return False
