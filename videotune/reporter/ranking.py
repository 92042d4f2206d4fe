"""Which errors of several runs compare, in which order that puts the runs, and which doubt
is left.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from videotune.reporter import inventory
from videotune.reporter.read import Run, at, items, mapping
from videotune.reporter.setting_cells import folder_names

BEST_FIRST = "The run with the lowest error on clips kept aside comes first."
"""The order of runs whose errors compare; others keep theirs."""

NOT_RANKED = "The runs are not ranked."
"""The order of runs whose errors are relative to different models."""

START_SETTINGS = ("base_loras", "init_from")
"""Settings of weights that a run begins with, beside those of the base model."""

Start = tuple[str, ...]
"""What a run began with, equal for runs whose errors are relative to the same model."""


def comparable_settings(run: Run) -> dict[str, Any]:
    """Return a run's settings by dotted name, each path as the file system resolves it:
    ``runs/../clips`` is ``clips``.
    """
    settings = inventory.flat_settings(run)
    return {name: _with_real_paths(value) for name, value in settings.items()}


def _with_real_paths(value: Any) -> Any:
    if isinstance(value, str) and Path(value).is_absolute():
        return os.path.realpath(value)
    if isinstance(value, list):
        return [_with_real_paths(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _with_real_paths(entry) for key, entry in value.items()}
    return value


def _start_of(run: Run) -> Start:
    """Return what a run began with."""
    settings = comparable_settings(run)
    base_model = sorted(mapping(at(run.config, "base", "fingerprints")).items())
    weights = [settings.get(name) for name in START_SETTINGS]
    return tuple(map(repr, (base_model, *weights)))


def ranked_start(runs: Sequence[Run]) -> Start | None:
    """Return what those runs began with that are ranked by their errors: all of them, or
    else most of them. None if no two runs began alike, or as many otherwise.
    """
    counts = Counter(
        _start_of(run) for run in runs if run.validations and _has_one_reference(run)
    )
    if len(counts) == 1:
        return next(iter(counts))
    most_common = counts.most_common(2)
    if not most_common or most_common[0][1] == most_common[1][1]:
        return None
    return most_common[0][0]


def _has_one_reference(run: Run) -> bool:
    """Whether the clips kept aside are those that the run began with."""
    return run.error_reference.changed_at == 0


def is_ranked(run: Run, start: Start | None) -> bool:
    """Whether the errors of a run compare with those of the runs that began with
    ``start``.
    """
    return _has_one_reference(run) and _start_of(run) == start


def order_of_runs(runs: Sequence[Run]) -> str:
    """Return in which order runs are shown; empty if none has measured clips kept aside."""
    measured = [run for run in runs if run.held_out_losses]
    if not measured:
        return ""
    start = ranked_start(runs)
    if any(is_ranked(run, start) for run in measured):
        return BEST_FIRST
    return NOT_RANKED


def common_reference(runs: Sequence[Run]) -> str:
    """Return what the errors of all runs are relative to, in words."""
    references = {run.start.name for run in runs}
    is_common = len({_start_of(run) for run in runs}) == 1
    return references.pop() if is_common else "what each run began with"


def doubt_on_errors(runs: Sequence[Run]) -> str:
    """Return why the errors do not compare; empty if they do."""
    doubts = (_doubt_on_starts(runs), _doubt_on_clips(runs))
    return " ".join(doubt for doubt in doubts if doubt)


def _doubt_on_starts(runs: Sequence[Run]) -> str:
    """Return which runs have errors that are relative to another model; empty if none
    has.
    """
    measured = [run for run in runs if run.validations]
    if len({_start_of(run) for run in measured}) < 2:
        return ""

    start = ranked_start(runs)
    names = folder_names([run.folder for run in runs])
    others = [names[run.folder] for run in measured if _start_of(run) != start]
    if start is None:
        return (
            f"{' and '.join(others)} did not begin with the same weights. The errors of each "
            "are relative to what it began with, so they do not compare."
        )
    return (
        f"{' and '.join(others)} began with other weights than the other runs. The errors of "
        "each run are relative to what it began with, so these do not compare: what began "
        "otherwise comes last, and is not in the chart."
    )


def _doubt_on_clips(runs: Sequence[Run]) -> str:
    """Return why the errors on clips kept aside do not compare; empty if they do."""
    changed = [run.folder.name for run in runs if not _has_one_reference(run)]
    if changed:
        return (
            f"The clips kept aside of {' and '.join(changed)} have changed in the run: its "
            "errors are shares of another one than that at step 0. It comes last, and "
            "is not in the chart."
        )

    measured = [run for run in runs if run.held_out_losses]
    aside = [
        {
            str(clip["id"]): items(clip["captions"])
            for clip in run.clips
            if clip["held_out"]
        }
        for run in measured
    ]
    if any(captions.keys() != aside[0].keys() for captions in aside):
        return (
            "The runs keep other clips aside, so their errors on them do not compare."
        )
    if any(captions != aside[0] for captions in aside):
        return (
            "The clips kept aside have other captions in these runs, so the errors on them "
            "compare roughly."
        )
    return ""


def doubt_on_found_clips(runs: Sequence[Run]) -> str:
    """Return that the runs of a sweep found different clips, or different captions of them;
    empty if they did not.

    Clips that a run found and did not use count, too: which ones it uses may be what the
    sweep tries.
    """
    found = [_captions_of_found(run) for run in runs if run.clips]
    if all(captions == found[0] for captions in found):
        return ""

    has_other_clips = any(captions.keys() != found[0].keys() for captions in found)
    changed = "Clips" if has_other_clips else "Captions"
    return (
        f"{changed} were changed between these runs, so they do not differ by their "
        "settings alone."
    )


def _captions_of_found(run: Run) -> dict[str, list[Any]]:
    """Return the captions of all clips that a run found, used or not, by the clips' ids."""
    return {
        str(clip["id"] or clip["path"]): items(clip["captions"]) for clip in run.clips
    }
