"""The table of ``plan --ways``: how a step could be computed."""

from collections.abc import Mapping, Sequence
from typing import Any

from videotune.console import print_table, tell
from videotune.text import memory_size

ANOTHER_BASE = (
    "INT_8 multiplies in eight bits: it is another base model, so it is never chosen"
)


def show_ways(ways: Sequence[Mapping[str, Any]] | None) -> None:
    """Print the ways of computing a step, the fastest of those that fit first."""
    if ways is None:
        return
    rows = []
    for way in ways:
        settings = way["settings"]
        seconds = way["seconds_a_step"]
        streamed = f"{way['streamed_blocks']} of {way['blocks']}"
        rows.append(
            [
                settings["gradient_checkpointing"],
                streamed if way["streamed_blocks"] else "none",
                "yes" if settings["compile"] else "no",
                settings["transformer.matmul_dtype"],
                memory_size(way["need_bytes"]),
                "" if seconds is None else f"{seconds:.3g} s",
                "yes" if way["fits"] else "no",
            ]
        )
    headings = ["checkpointing", "streamed", "compile", "products", "memory", "step"]
    print_table("ways of computing a step", [*headings, "fits"], rows, right=(4, 5))
    if any(way["is_another_base"] for way in ways):
        tell(ANOTHER_BASE)
