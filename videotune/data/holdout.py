"""Which clips are held out for validation: whole source videos, chosen by hash, so that no two cuts of one straddle."""

from __future__ import annotations

import math
from collections.abc import Sequence

from videotune.rng import key

SOURCES_NEEDED = 20
"""Below this number of source videos nothing is held out: every clip counts more in training than in validation."""


def hold_out(
    sources: Sequence[str], kinds: Sequence[str], fraction: float, seed: int, validated: bool = False
) -> tuple[list[bool], list[str]]:
    """For each clip whether it is held out, and notes; ``sources`` and ``kinds`` (of their datasets) are the clips'.

    Clips of validation datasets are, and then no others, also where none of them can be used (``validated``). Without such
    a dataset it is max(2, fraction) of the source videos of training datasets, those with the smallest keys of (seed, name);
    regularization clips never are.
    """
    if validated and "validation" not in kinds:
        return [False] * len(kinds), ["no validation: no clip of the validation datasets can be used"]
    if "validation" in kinds:
        return [kind == "validation" for kind in kinds], _straddling(sources, kinds)
    names = {source for source, kind in zip(sources, kinds, strict=True) if kind == "train"}
    none = [False] * len(sources)
    if fraction == 0 or not names:
        return none, []
    if len(names) < SOURCES_NEEDED:
        note = f"no validation: {len(names)} source video{'s' * (len(names) != 1)}, {SOURCES_NEEDED} are needed"
        clips = kinds.count("train")
        if len(names) < clips:
            note += f" ({clips} clips: some are cuts of one video, by their names or their pictures)"
        return none, [note]
    count = max(2, math.floor(fraction * len(names) + 0.5))
    chosen = set(sorted(names, key=lambda name: (key(seed, "held out", name), name))[:count])
    also = {source for source, kind in zip(sources, kinds, strict=True) if kind == "regularization"} & chosen
    notes = [f"a cut of the held-out video {name} is among the regularization clips" for name in sorted(also)]
    return [kind == "train" and source in chosen for source, kind in zip(sources, kinds, strict=True)], notes


def _straddling(sources: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """A note where a validation clip and a training clip come from one video."""
    pairs = list(zip(sources, kinds, strict=True))
    trained = {source for source, kind in pairs if kind != "validation"}
    both = sorted(trained & {source for source, kind in pairs if kind == "validation"})
    if not both:
        return []
    shown = ", ".join(both[:3]) + (f" and {len(both) - 3} more" if len(both) > 3 else "")
    videos = "1 source video" if len(both) == 1 else f"{len(both)} source videos"
    return [f"validation and training share {videos} ({shown}): the ruler will look better than it is"]
