"""The notes of a check on the whole set, as the page Data shows them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from videotune.data.remarks import SERIOUS, code_of, with_codes
from videotune.data.source_videos import HELD_OUT_DEPENDABLE, HELD_OUT_NEEDED
from videotune.studio import clip_row, clip_words
from videotune.studio.clip_row import ClipRow
from videotune.studio.records import CheckAccount


@dataclass(frozen=True)
class DataNotes:
    """Notes on the whole set, each with its code."""

    serious: tuple[str, ...] = ()
    """Those that ask for a decision: they stand open."""

    others: tuple[str, ...] = ()
    """Those that only say what is done: they are folded."""


def notes_of_check(
    account: CheckAccount,
    rows: Collection[ClipRow],
    shared_warnings: Iterable[str],
    *,
    has_model: bool,
) -> DataNotes:
    """Return the notes of a check that still hold and that nothing else on the page says.

    Args:
        account: what the check has found.
        rows: the clips as they are now.
        shared_warnings: the warnings that stand above the notes.
        has_model: whether a model is chosen; without one, notes that depend on a model
            are left out.
    """
    notes = with_codes(account["notes"], account.get("note_codes", []))
    if not has_model:
        notes = [note for note in notes if code_of(note) not in clip_row.OF_MODEL]
    notes = clip_words.without_repeats(notes, shared_warnings)

    answered = _answered_by_moves(rows)
    notes = [note for note in notes if code_of(note) not in answered]
    return DataNotes(
        serious=tuple(note for note in notes if code_of(note) in SERIOUS),
        others=tuple(note for note in notes if code_of(note) not in SERIOUS),
    )


def _answered_by_moves(rows: Collection[ClipRow]) -> set[str]:
    """Return the codes of notes that no longer hold since clips are kept aside."""
    kept_aside = clip_words.count_states(rows).get("held out", 0)
    answered = set()
    if kept_aside:
        answered.add("none_held_out")
    if kept_aside >= HELD_OUT_NEEDED:
        answered.add("few_held_out")
    if kept_aside >= HELD_OUT_DEPENDABLE:
        answered.add("few_dependable")
    return answered
