"""The clips and buckets of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from videotune.console import print_table, tell
from videotune.text import counted, shape_words

if TYPE_CHECKING:
    pass


def bucket_words(bucket: Mapping[str, Any]) -> str:
    """Return the shape of a bucket's samples, and whether they have sound."""
    shape = shape_words(bucket["shape"])
    return f"{shape}, with sound" if bucket["sound"] else shape


def show_sound(facts: Mapping[str, Any]) -> None:
    """Print how many training windows have sound, if the run reads it."""
    with_sound = facts["sound_windows"]
    if with_sound is None:
        return
    without = facts["windows"] - with_sound
    line = f"sound: {counted(with_sound, 'training window')} with it"
    tell(f"{line}, {without} without" if without else line)


def show_buckets(facts: Mapping[str, Any]) -> None:
    """Print the clips, and the buckets."""
    clips = "found {found} = used {used} + kept aside {held_out} + skipped {skipped}"
    tell(f"clips: {clips.format_map(facts['clips'])}")
    show_sound(facts)

    rows = []
    for bucket in facts["buckets"]:
        share = f"{bucket['share']:.0%}"
        shape = bucket_words(bucket)
        rows.append(
            [shape, bucket["windows"], share, bucket["batch"], bucket["tokens"]]
        )
    columns = [
        "width x height",
        "windows",
        "share of steps",
        "samples a step",
        "tokens",
    ]
    print_table("buckets, largest first", columns, rows, right=(1, 2, 3, 4))
