"""The table of ``plan --ways``: how a step could be computed."""

from collections.abc import Mapping, Sequence
from typing import Any

from videotune.console import print_table, tell
from videotune.text import memory_size

ANOTHER_BASE = (
    "INT_8 multiplies in eight bits: it is another base model, so it is never chosen"
)

FITS = {None: "yes", "fits": "yes", "tight": "tight", "does not fit": "no"}
"""The words of the table for each verdict."""

CHOSEN = (
    "*: a training takes this one; with compile: auto its blocks are compiled too where "
    "that saves more time than compiling takes"
)

TIGHT = (
    "tight: it leaves less of the card free than other programs and an error of the "
    "calculation may take"
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
                ("* " if way["is_chosen"] else "") + settings["gradient_checkpointing"],
                streamed if way["streamed_blocks"] else "none",
                "yes" if settings["compile"] else "no",
                settings["transformer.matmul_dtype"],
                memory_size(way["need_bytes"]),
                "" if seconds is None else f"{seconds:.3g} s",
                FITS[way["verdict"]],
            ]
        )
    headings = ["checkpointing", "streamed", "compile", "products", "memory", "step"]
    print_table("ways of computing a step", [*headings, "fits"], rows, right=(4, 5))
    tell(CHOSEN)
    if any(way["verdict"] == "tight" for way in ways):
        tell(TIGHT)
    if any(way["is_another_base"] for way in ways):
        tell(ANOTHER_BASE)
