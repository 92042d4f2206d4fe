"""Compare the clips of a scan: near-duplicates, source videos, and which clips are held
out.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from videotune.config.schema import Config
from videotune.data.candidate_table import CandidateTable, JointResults
from videotune.data.candidates import Candidate, lacks_only_caption
from videotune.data.locations import Location
from videotune.data.packed_rows import return_free_memory
from videotune.data.packed_texts import PackedTexts
from videotune.data.picture_matching import near_duplicates
from videotune.data.picture_table import PictureTable
from videotune.data.source_clips import SourceClipTable
from videotune.data.source_videos import group_by_source, hold_out
from videotune.model_spec import VideoRules


def compare_clips(
    candidates: CandidateTable,
    locations: Sequence[Location],
    config: Config,
    rules: VideoRules,
) -> list[str]:
    """Set what follows from all clips together: near-duplicates, source videos, and which
    clips are held out.

    Returns:
        Notes. Those on held-out clips are the first ones, since they may say that the
        validation loss is useless.
    """
    # 1. Near-duplicates and sources, by the pictures of the usable clips.
    clips = _source_clips(candidates, locations, config)
    usable = candidates.usable
    usable_clips = clips.take(usable)
    pictures = PictureTable(usable_clips)
    looks_like: dict[int, int] = {}
    _add_near_duplicates(looks_like, usable_clips, candidates, pictures)
    return_free_memory()
    sources, source_notes, look_alikes = group_by_source(usable_clips, pictures)
    del pictures
    return_free_memory()

    # 2. Clips that lack only a caption name clips that they look like.
    uncaptioned = _uncaptioned(candidates)
    if len(uncaptioned):
        looked_at = clips.take(np.concatenate([usable, uncaptioned]))
        _add_near_duplicates(looks_like, looked_at, candidates)

    # 3. Which sources are held out.
    kind_by_dataset = [dataset.kind for dataset in config.datasets]
    held_out, held_out_notes = hold_out(
        sources,
        kinds=[kind_by_dataset[number] for number in candidates.datasets[usable]],
        fraction=config.validation_fraction,
        seed=config.seed,
        has_validation="validation" in kind_by_dataset,
        look_alikes=look_alikes,
    )

    def finish(candidate: Candidate) -> None:
        """Complete a usable candidate that was read from the table."""
        # Each read of the table builds a candidate with the windows of its preparation,
        # when no clip was held out yet. Those of held-out clips have nothing random.
        if candidate.held_out:
            candidate.set_size_and_windows(config, rules)
        candidate.mirror()

    is_held_out = np.array(held_out, bool)
    candidates.set_joint_results(JointResults(sources, is_held_out, looks_like, finish))
    return [*held_out_notes, *source_notes]


def _source_clips(
    candidates: CandidateTable, locations: Sequence[Location], config: Config
) -> SourceClipTable:
    """Return name, duration and pictures of each candidate, in their order."""
    names = _dataset_names(locations, [dataset.path for dataset in config.datasets])
    paths = PackedTexts()
    for row in range(len(candidates)):
        name = names[candidates.settings_of(row).location.root]
        relative_path = candidates.relative_path(row)
        paths.append(f"{name}/{relative_path}" if name else relative_path)

    def signatures_of(row: int) -> tuple[str, ...]:
        scan = candidates.examined(row).scan
        assert scan is not None
        return scan.signatures

    rows = np.arange(len(candidates), dtype=np.int32)
    return SourceClipTable(paths, candidates.seconds, signatures_of, rows)


def _uncaptioned(candidates: CandidateTable) -> NDArray[np.int32]:
    """Return the rows of the candidates that lack only a caption."""
    rows = []
    for row, preparation in candidates.prepared_unusable():
        if lacks_only_caption(preparation.problem, preparation.has_windows):
            rows.append(row)
    return np.array(rows, np.int32)


def _add_near_duplicates(
    looks_like: dict[int, int],
    clips: SourceClipTable,
    candidates: CandidateTable,
    pictures: PictureTable | None = None,
) -> None:
    """Let clips that look nearly the same name each other, for a warning.

    Both stay in training. ``group_by_source`` compares pictures by itself, so that
    clips of one source are held out together.
    """
    for first_position, second_position in near_duplicates(clips, pictures):
        first = int(clips.rows[first_position])
        second = int(clips.rows[second_position])
        for row, similar_row in ((second, first), (first, second)):
            # A clip that is used does not name one that is not.
            is_used = candidates.is_usable(row)
            if is_used and not candidates.is_usable(similar_row):
                continue
            looks_like.setdefault(row, similar_row)


def _dataset_names(
    locations: Sequence[Location], paths: Sequence[str]
) -> dict[Path, str]:
    """Return a name for each dataset's folder, with its parents' names if two are the
    same: "cats/clips" and "dogs/clips" keep their parents, "cats/clips" and "dogs" are
    "clips" and "dogs".
    """
    names = {location.root: location.name for location in locations}
    most_parts = max((len(root.absolute().parts) for root in names), default=1)
    for depth in range(1, most_parts):
        counts = Counter(names.values())
        for location, path in zip(locations, paths, strict=True):
            if counts[names[location.root]] > 1:
                parents = path.rstrip("/").split("/")[-1 - depth : -1]
                names[location.root] = "/".join([*parents, location.name])
    return names
