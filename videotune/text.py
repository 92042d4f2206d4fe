"""Numbers, times, sizes and paths as a person reads them; the command line, the report and the studio share these."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any


def plain(value: float | None, digits: int = 4) -> str:
    """A number: whole ones with thousands marked, others to ``digits`` significant ones; a dash for None."""
    if value is None:
        return "–"
    return (
        f"{int(value):,}"
        if float(value).is_integer() and abs(value) < 1e15
        else f"{value:.{digits}g}"
    )


def counted(value: float | None, thing: str) -> str:
    """'1 clip', '2 clips'."""
    return f"{plain(value)} {thing}{'' if value == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time span."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def moment(seconds: float) -> str:
    """A time, given in seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def value_text(value: Any) -> str:
    """A value of a setting or of a record."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:.12g}"
    if isinstance(value, list):
        return ", ".join(map(value_text, value)) or "none"
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{key}: {value_text(entry)}" for key, entry in value.items()) + "}"
        )
    return str(value)


def shape_words(shape: str) -> str:
    """FRAMESxHEIGHTxWIDTH, as files have it, as "WIDTHxHEIGHT, N frames"; of a damaged file the text as it is."""
    parts = shape.split("x")
    if len(parts) != 3:
        return shape
    frames, height, width = parts
    return f"{width}x{height}" + (f", {frames} frames" if frames != "1" else "")


def state_words(clip: Mapping[str, Any]) -> str:
    """What becomes of a clip of the account, in two or three words."""
    if clip["used"]:
        return "used (regularization)" if clip["kind"] == "regularization" else "used"
    return "held out" if clip["held_out"] else f"skipped: {clip['reason']}"


def short_path(path: str, roots: Sequence[Path]) -> str:
    """A clip's path from its dataset's folder; from that folder's name on where there are several datasets."""
    for root in roots:
        if Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root if len(roots) == 1 else root.parent))
    return path


def some(words: Sequence[str], most: int = 8) -> str:
    """The first of the words, and a sign where there are more."""
    return ", ".join(words[:most]) + (", …" if len(words) > most else "")


def share(value: float | None) -> str:
    """A share of one in percent; a dash for None."""
    return "–" if value is None else f"{value:.0%}"


def file_name(path: object) -> str:
    """The last part of a path."""
    return PurePath(str(path)).name
