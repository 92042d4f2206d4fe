"""Facts of the sound of each clip, and notes on the sound of a dataset."""

from collections.abc import Iterator, Mapping
from typing import Any

from videotune.config.schema import Config
from videotune.data.candidates import Candidate
from videotune.data.packed_rows import PackedTexts
from videotune.data.remarks import Remark, RemarkCode
from videotune.text import counted, some

CLIPPED_SHARE = 0.001
"""Share of samples at full scale above which a note says that sound is clipped."""

MISSING_SECONDS = 0.1
"""Seconds without sound above which a note says that a track is shorter than its clip."""


DESCRIPTIONS: Mapping[RemarkCode, str] = {
    "no_sound": "without a sound track that can be used",
    "silent_sound": "whose sound track is silent or damaged",
    "clipped_sound": "whose sound is clipped: it was recorded too loud",
    "short_sound": f"whose sound track is shorter by more than {MISSING_SECONDS:g} s: the rest "
    "is silence",
    "sound_dropped": "with windows that do not run as filmed (stretch, temporal_augmentation): "
    "these train without sound",
}
"""What is wrong with the sound of clips, in the order of the notes."""


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


class SoundNotes:
    """Collects notes on clips without sound, and on sound that has a fault.

    Args:
        config: the run's config. If it reads no sound, there are no notes.
    """

    def __init__(self, config: Config) -> None:
        self._reads_sound = config.reads_sound
        self._clips: dict[RemarkCode, PackedTexts] = {
            code: PackedTexts() for code in DESCRIPTIONS
        }

    def add(self, candidate: Candidate) -> None:
        """Add a usable clip."""
        if not self._reads_sound or candidate.media.still:
            return
        for code in _faults(candidate):
            self._clips[code].append(str(candidate.relative))

    def notes(self) -> list[str]:
        """Return a note on each fault, with the names of the first clips."""
        notes: list[str] = []
        for code, clips in self._clips.items():
            if len(clips):
                text = f"sound: {counted(len(clips), 'clip')} {DESCRIPTIONS[code]}"
                notes.append(Remark(code, f"{text} ({some(clips)})"))
        return notes


def _faults(candidate: Candidate) -> Iterator[RemarkCode]:
    """Yield what is wrong with a clip's sound."""
    scan = candidate.sound
    if scan is None:
        yield "no_sound"
    elif candidate.sound_problem:
        yield "silent_sound"
    if candidate.sound_problem:
        return

    if scan is not None and scan.clipped > CLIPPED_SHARE:
        yield "clipped_sound"
    sound = candidate.media.sound
    seconds = candidate.media.seconds
    if sound is not None and sound.missing_seconds(seconds) > MISSING_SECONDS:
        yield "short_sound"
    windows = candidate.placement.windows
    if not all(window.shape.sound for window in windows):
        yield "sound_dropped"
