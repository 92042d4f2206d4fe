"""Prepare candidates: companions, size, windows and captions, or why one is skipped."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from videotune.config.schema import Config
from videotune.data.candidate_table import CandidateTable
from videotune.data.candidates import Candidate
from videotune.data.captions import (
    caption_message,
    join_lines,
    read_caption_text,
    split_variants,
)
from videotune.data.clip_file import ClipFile
from videotune.data.companion_files import FOLDER_OF_ROLE
from videotune.data.companions import alpha_mask, check_companion
from videotune.data.file_checks import ClipProblem
from videotune.data.packed_texts import TextNumbers
from videotune.errors import VideotuneError
from videotune.model_spec import VideoRules


def prepare_candidates(
    candidates: CandidateTable, config: Config, rules: VideoRules
) -> Iterator[Candidate]:
    """Set each candidate's size, windows and captions, or its problem, and yield it.

    Raises:
        VideotuneError: if captions are missing and the config does not allow that.
    """
    order, copied_ids = _originals_first(candidates, config)
    first_rows: dict[str, int] = {}
    """Rows of usable candidates of which there are copies, by the hash of their bytes."""
    for row in order:
        candidate = candidates[row]
        first_row = first_rows.get(candidate.content_id)
        original = None if first_row is None else candidates[first_row]
        try:
            _prepare(candidate, original, config, rules)
        except ClipProblem as problem:
            candidate.problem = problem
        else:
            if candidate.content_id in copied_ids:
                first_rows[candidate.content_id] = row
        candidates.put_prepared(row, candidate)
        yield candidate

    if config.missing_caption != "skip":
        _refuse_missing_captions(candidates)


def _refuse_missing_captions(candidates: CandidateTable) -> None:
    """Raise VideotuneError if a clip has no usable caption."""
    without_caption = []
    others = []
    example: Path | None = None
    for row, preparation in candidates.prepared_unusable():
        problem = preparation.problem
        assert problem is not None
        file = candidates.file(row)
        path_and_detail = (str(file.path), problem.detail)
        if problem.reason.endswith("_caption"):
            without_caption.append(path_and_detail)
            example = example or file.expected_caption
        else:
            others.append(path_and_detail)

    if example is not None:
        raise VideotuneError(
            caption_message(
                without_caption, others, clip_count=len(candidates), example=example
            )
        )


def _originals_first(
    candidates: CandidateTable, config: Config
) -> tuple[array[int], set[str]]:
    """Order the candidates so that, of several copies, the original is prepared first.

    The original is the copy in the earliest dataset; there, one with a caption; of
    these, the one with the shortest name: "kitten.mp4", not "kitten (1).mp4".

    Returns:
        Rows, and the hashes of the contents of which there are several.
    """
    ids = candidates.content_ids
    is_copy = _are_repeated(ids)
    copies = np.flatnonzero(is_copy).tolist()

    preferences: dict[int, tuple[bool, int]] = {}
    for row in copies:
        file = candidates.file(row)
        has_caption = False
        with suppress(ClipProblem):
            has_caption = any(_captions_of(file, config).texts)
        preferences[row] = (not has_caption, len(file.path.name))

    # In each dataset, those of which there are no copies are the first.
    order = array("q")
    datasets = candidates.datasets
    for number in np.unique(datasets):
        in_dataset = datasets == number
        order.extend(np.flatnonzero(in_dataset & ~is_copy).tolist())
        copies_in_dataset = np.flatnonzero(in_dataset & is_copy).tolist()
        order.extend(sorted(copies_in_dataset, key=preferences.__getitem__))
    return order, {ids[row] for row in copies}


def _are_repeated(texts: Sequence[str]) -> NDArray[np.bool_]:
    """Return for each text whether it is there several times."""
    numbers = TextNumbers()
    for text in texts:
        numbers.add(text)
    number_of_text, _ = numbers.number_all()
    counts = np.bincount(number_of_text)
    return np.asarray(counts[number_of_text] > 1)


def _prepare(
    candidate: Candidate,
    original: Candidate | None,
    config: Config,
    rules: VideoRules,
) -> None:
    """Set one candidate's companions, size, windows and captions.

    Args:
        candidate: has media info and content scan, or a problem.
        original: the usable candidate before it that has the same bytes.
        config: the run's config.
        rules: frames and sizes that the model accepts.

    Raises:
        ClipProblem: if the candidate cannot be used.
    """
    _refuse_unusable(candidate, original, config)
    _attach_and_check_companions(candidate, config)
    _fill(candidate, config, rules)


def _refuse_unusable(
    candidate: Candidate, original: Candidate | None, config: Config
) -> None:
    """Raise ClipProblem for a missing file, a copy, and a file with a problem."""
    if not candidate.file.exists:
        raise ClipProblem(
            "missing_file",
            f"{candidate.file.metadata_row} lists it, but it does not exist",
        )

    # A copy is reported as a duplicate even if it has another problem. Without media
    # info (unreadable under its own suffix) its own problem is reported.
    if original is not None and candidate.info is not None:
        raise _duplicate_problem(candidate, original, config)
    if candidate.problem is not None:
        raise candidate.problem


def _attach_and_check_companions(candidate: Candidate, config: Config) -> None:
    """Attach the mask of an alpha channel; raise ClipProblem if a companion that the run
    needs is missing or cannot be used.
    """
    has_mask_file = "loss_mask" in candidate.companions
    if config.loss_mask.is_used and candidate.media.transparent and not has_mask_file:
        mask = alpha_mask(candidate.clip_id, candidate.media)
        candidate.companions["loss_mask"] = mask
    for companion in candidate.companions.values():
        check_companion(companion, candidate.media)
    for role, folder in FOLDER_OF_ROLE.items():
        if role in config.condition_types and role not in candidate.companions:
            raise ClipProblem(
                f"no_{role}",
                f"the run learns from {folder}, but {folder}/ beside videos/ has no file of its name, "
                "and no metadata file names one",
            )


def _fill(candidate: Candidate, config: Config, rules: VideoRules) -> None:
    """Set size, windows and captions of a candidate without a problem so far."""
    candidate.set_size_and_windows(config, rules)
    # Damage after the end of all windows does not matter.
    damaged_at = candidate.scan.damaged_at if candidate.scan is not None else None
    if damaged_at is not None and damaged_at < max(candidate.placement.shown_until):
        raise ClipProblem(
            "decode_error",
            f"its frames are damaged from {damaged_at:.2f} s on, within its windows",
        )
    # If the run reads sound, media infos stay in a list, with all timestamps of each clip.
    candidate.media.release()
    candidate.captions, candidate.caption_texts = _captions_of(candidate.file, config)


def _duplicate_problem(
    candidate: Candidate, original: Candidate, config: Config
) -> ClipProblem:
    """Build the problem of a file with the same bytes as an earlier one."""
    detail = f"has the same bytes as {original.relative}"
    # Without a caption of its own there is nothing to compare.
    with suppress(ClipProblem):
        captions = _captions_of(candidate.file, config).variants
        if not set(captions) <= set(original.captions):
            detail += (
                ", whose captions are used; its own captions differ and are not used"
            )
    return ClipProblem("duplicate", detail)


class _Captions(NamedTuple):
    """A clip's caption."""

    variants: tuple[str, ...]
    """What a sample may read: it draws one of them."""
    texts: tuple[str, ...]
    """What was written, of which the variants were made."""


def _captions_of(file: ClipFile, config: Config) -> _Captions:
    """Read the variants of a clip's caption, or the config's substitute for a missing
    one.

    Raises:
        ClipProblem: if there is no caption and the config does not allow that.
    """
    try:
        texts = _read_texts(file)
    except ClipProblem as problem:
        is_missing = problem.reason in ("missing_caption", "empty_caption")
        if is_missing and config.missing_caption == "text":
            return _Captions((config.missing_caption_text or "",), ())
        if is_missing and config.missing_caption == "empty":
            return _Captions(("",), ())
        raise

    if config.caption_lines == "join":
        return _Captions(tuple(join_lines(text) for text in texts), texts)
    return _Captions(split_variants("\n".join(texts)), texts)


def _read_texts(file: ClipFile) -> tuple[str, ...]:
    """Read captions from the metadata file if it lists the clip, else from its text
    file.
    """
    if file.metadata_texts is not None:
        if not file.metadata_texts:
            raise ClipProblem(
                "empty_caption", f"{file.metadata_row} has no text for it"
            )
        return file.metadata_texts

    if file.caption_file is None:
        raise ClipProblem("missing_caption", file.missing_detail)
    return (read_caption_text(file.caption_file),)
