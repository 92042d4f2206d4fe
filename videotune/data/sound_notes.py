"""Facts of the sound of each clip, and notes on the sound of a dataset."""

from collections.abc import Sequence
from typing import Any

from videotune.config.schema import Config
from videotune.data.candidates import Candidate
from videotune.data.remarks import Remark, RemarkCode
from videotune.text import counted, some

CLIPPED_SHARE = 0.001
"""Share of samples at full scale above which a note says that sound is clipped."""

MISSING_SECONDS = 0.1
"""Seconds without sound above which a note says that a track is shorter than its clip."""


def sound_fields(candidate: Candidate) -> dict[str, Any] | None:
    """Return the facts of a clip's sound, as ``check --json`` prints them; None without
    a track.

    What only decoding tells is None unless the run reads sound.
    """
    info = candidate.info
    if info is None or (info.sound is None and not info.unusable_sound):
        return None

    sound = info.sound
    scan = candidate.sound
    problem = info.unusable_sound
    if scan is not None:
        problem = candidate.sound_problem
    has_facts = scan is not None and not scan.problem
    return {
        "codec": None if sound is None else sound.codec,
        "sample_rate": None if sound is None else sound.sample_rate,
        "channels": None if sound is None else sound.channels,
        "start": None if sound is None else sound.start,
        "seconds": None if sound is None else sound.seconds,
        "problem": problem or None,
        "windows": sum(window.shape.sound for window in candidate.placement.windows),
        "loudness": scan.loudness if scan is not None and has_facts else None,
        "peak": scan.peak if scan is not None and has_facts else None,
        "clipped": scan.clipped if scan is not None and has_facts else None,
        "silent": scan.silent if scan is not None and has_facts else None,
        "envelope": list(scan.envelope) if scan is not None else [],
    }


def notes_on_sound(candidates: Sequence[Candidate], config: Config) -> list[str]:
    """Return notes on clips without sound, and on sound that has a fault.

    Args:
        candidates: all usable files.
        config: the run's config. If it reads no sound, there are no notes.
    """
    if not config.reads_sound:
        return []

    videos = [candidate for candidate in candidates if not candidate.media.still]
    heard = [candidate for candidate in videos if not candidate.sound_problem]
    silent = [c for c in videos if c.sound is not None and c.sound_problem]
    missing = [c for c in videos if c.sound is None]
    notes = [
        _note("no_sound", missing, "without a sound track that can be used"),
        _note("silent_sound", silent, "whose sound track is silent or damaged"),
        _note(
            "clipped_sound",
            _clipped(heard),
            "whose sound is clipped: it was recorded too loud",
        ),
        _note(
            "short_sound",
            _short(heard),
            f"whose sound track is shorter by more than {MISSING_SECONDS:g} s: the rest "
            "is silence",
        ),
        _note(
            "sound_dropped",
            _changed(heard),
            "with windows that do not run as filmed (stretch, temporal_augmentation): "
            "these train without sound",
        ),
    ]
    return [note for note in notes if note is not None]


def _note(
    code: RemarkCode, candidates: Sequence[Candidate], text: str
) -> Remark | None:
    """Return a note on clips, with the names of the first; None if there are none."""
    if not candidates:
        return None
    names = some([str(candidate.relative) for candidate in candidates])
    return Remark(code, f"sound: {counted(len(candidates), 'clip')} {text} ({names})")


def _clipped(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those whose sound is at full scale too often."""
    clipped = []
    for candidate in candidates:
        if candidate.sound is not None and candidate.sound.clipped > CLIPPED_SHARE:
            clipped.append(candidate)
    return clipped


def _short(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those whose sound track does not cover the whole clip."""
    short = []
    for candidate in candidates:
        sound = candidate.media.sound
        if sound is None:
            continue
        if sound.missing_seconds(candidate.media.seconds) > MISSING_SECONDS:
            short.append(candidate)
    return short


def _changed(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those with a window that has none of the clip's sound."""
    changed = []
    for candidate in candidates:
        windows = candidate.placement.windows
        if not all(window.shape.sound for window in windows):
            changed.append(candidate)
    return changed
