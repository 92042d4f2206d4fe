"""The sizes of the trained frames, as the plan has them, for the field of the resolution."""

import re
from collections.abc import Mapping
from typing import Any

from videotune.text import counted

TURNED = re.compile(r'\(resolution "(\d+x\d+)"\)')
"""How the plan names the turned resolution that keeps more of the clips."""


def turned_resolution(answer: Mapping[str, Any]) -> str:
    """Return the resolution with height and width exchanged, where the plan refuses the
    present one and would take that; empty otherwise.
    """
    if not answer.get("current") or not answer.get("code"):
        return ""
    match = TURNED.search(str(answer.get("words", "")))
    return match[1] if match else ""


def trained_sizes(answer: Mapping[str, Any]) -> list[str]:
    """Return the sizes that the present settings train, each once, as the page writes
    them; empty while they are not known.
    """
    if not answer.get("current") or answer.get("code"):
        return []
    buckets = (answer.get("plan") or {}).get("buckets", [])
    sizes = []
    for bucket in buckets:
        frames, height, width = str(bucket["shape"]).split("x")
        sizes.append(f"{height} high, {width} wide, {counted(int(frames), 'frame')}")
    return list(dict.fromkeys(sizes))
