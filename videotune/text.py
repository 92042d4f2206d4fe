"""Numbers, times, sizes and paths as text, for the command line, the report and the
studio.
"""

import inspect
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from shlex import quote
from typing import Any

ONLY_FOR_TOY = "these files work only with the toy model"
"""What is said of files that the toy was trained into."""


def plain(value: float | None, digits: int = 4) -> str:
    """Return a number: a whole one with commas, another with significant digits.

    None becomes a dash.
    """
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def without_thousands_marks(text: str) -> str:
    """Return a number without the marks that set its thousands apart: "1,000", "1 000" or
    "1'000" is 1000. Any other text stays as it is, and so does "0,001".
    """
    marks = r"[,'\u2019 \u00a0\u202f]"
    if re.fullmatch(rf"[+-]?[1-9][0-9]{{0,2}}(?:{marks}[0-9]{{3}})+", text):
        return re.sub(marks, "", text)
    return text


def counted(value: float | None, thing: str, plural: str | None = None) -> str:
    """Return '1 clip', '2 clips'; ``plural`` if it is not with an s."""
    many = f"{thing}s" if plural is None else plural
    return f"{plain(value)} {thing if value == 1 else many}"


def counted_are(value: int, thing: str, *, plural: str | None = None) -> str:
    """Return '1 clip is', '2 clips are'."""
    return f"{counted(value, thing, plural)} {'is' if value == 1 else 'are'}"


def times_between(least: float, most: float) -> str:
    """Return '1 time', '9 to 10 times'."""
    return counted_between(least, most, "time")


def counted_between(least: float, most: float, thing: str) -> str:
    """Return '1 sample', '2 to 4 samples'."""
    things = counted(most, thing)
    return things if least == most else f"{plain(least)} to {things}"


def memory_size(count: float) -> str:
    """Return bytes of memory as text, in powers of 1024 as nvidia-smi shows them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def disk_size(count: float) -> str:
    """Return bytes of a disk as text, in powers of 1000 as disks are sold."""
    if count < 1e12:
        return f"{count / 1e9:,.{1 if count >= 1e10 else 2}f} GB"
    return f"{count / 1e12:,.{1 if count < 1e13 else 0}f} TB"


def duration(seconds: float) -> str:
    """Return a time span as text: seconds, minutes, or hours and minutes."""
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def time_left(seconds: float) -> str:
    """Return a time that is left as text, in whole seconds: it is an estimate."""
    return duration(max(1, round(seconds)))


def rough_duration(hours: float) -> str:
    """Return a time that is calculated and not measured, no finer than it is known: to 5
    minutes, half an hour, or from five hours on an hour.
    """
    minutes = max(5, 5 * round(hours * 12))
    if minutes < 60:
        return f"{minutes} min"
    if hours >= 5:
        return f"{round(hours):,} hours"
    halves = round(2 * hours)
    return "1 hour" if halves == 2 else f"{halves / 2:g} hours"


def time_span(hours: float) -> str:
    """Return a time span as text: hours and minutes, or days from two on, or years."""
    if hours < 1 / 60:
        return "under 1 min"
    if hours < 48:
        return duration(hours * 3600)
    days = hours / 24
    if days < 365:
        return f"{days:,.0f} days"
    return (
        f"{days / 365.25:,.0f} years" if days >= 730 else f"{days / 30.44:.0f} months"
    )


def about_time_span(hours: float) -> str:
    """Return an estimated time span: "about 2 h 00 min", or "under 1 min"."""
    return time_span(hours) if hours < 1 / 60 else f"about {time_span(hours)}"


def moment(seconds: float) -> str:
    """Return a time, given in seconds since 1970, as text."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def value_text(value: Any) -> str:
    """Return a value of a setting or of a record as text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:.12g}"
    if isinstance(value, list):
        return ", ".join(map(value_text, value)) or "none"
    if isinstance(value, Mapping):
        entries = [f"{key}: {value_text(entry)}" for key, entry in value.items()]
        return "{" + ", ".join(entries) + "}"
    return str(value)


def shape_words(shape: str) -> str:
    """Return FRAMESxHEIGHTxWIDTH, as files have it, as "WIDTHxHEIGHT, N frames".

    Text of a damaged file stays as it is.
    """
    parts = shape.split("x")
    if len(parts) != 3:
        return shape
    frames, height, width = parts
    size = f"{width}x{height}"
    return size if frames == "1" else f"{size}, {frames} frames"


LEAST_SHARE = 0.005
"""The smallest silent share of a sound that is named."""

LEAST_CLIPPED = 0.001
"""The smallest clipped share of a sound that is named."""

REASON_WORDS = {
    "unreadable": "cannot be read",
    "empty": "empty file",
    "missing_file": "file is missing",
    "bad_mask": "bad mask",
    "bad_start_image": "bad start image",
    "bad_reference": "bad reference",
    "no_reference": "no reference",
    "bad_control": "bad control clip",
    "no_control": "no control clip",
    "no_sound": "no sound",
    "sound_speed": "its sound would not fit its frames",
    "missing_caption": "no caption",
    "empty_caption": "its caption is empty",
    "undecodable_caption": "its caption is not UTF-8 text",
    "not_a_video": "not a video",
    "no_video_stream": "no video in the file",
    "one_frame": "only one frame",
    "decode_error": "damaged",
    "too_short": "too short",
    "duplicate": "a copy of another clip",
}
"""Why a clip is skipped, by the code in the account of the clips."""


def reason_words(reason: object) -> str:
    """Return in words why a clip is skipped; a code that is not known stays as it is."""
    return REASON_WORDS.get(str(reason), str(reason).replace("_", " "))


def state_words(clip: Mapping[str, Any]) -> str:
    """Return the state of a clip of the account in two or three words."""
    if clip["used"]:
        return "used (regularization)" if clip["kind"] == "regularization" else "used"
    return (
        "kept aside" if clip["held_out"] else f"skipped: {reason_words(clip['reason'])}"
    )


def sound_words(sound: Mapping[str, Any] | None) -> str:
    """Return in words how a clip's sound is: how loud, how much of it silent or clipped.

    Empty without a track, and if it was not decoded because the run reads no sound.
    """
    if not sound:
        return ""
    if sound.get("problem"):
        return f"sound not used: {sound['problem']}"
    loudness = sound.get("loudness")
    if loudness is None:
        return ""

    words = f"sound {round(loudness)} dB".replace("-", "−")
    silent = sound.get("silent") or 0.0
    if silent >= LEAST_SHARE:
        words += f", {silent:.0%} silent"
    clipped = sound.get("clipped") or 0.0
    if clipped >= LEAST_CLIPPED:
        words += f", {clipped:.1%} clipped"
    return words


def short_path(path: str, roots: Sequence[Path]) -> str:
    """Return a clip's path from its dataset's folder; with that folder's name for
    several.
    """
    for root in roots:
        if Path(path).is_relative_to(root):
            start = root if len(roots) == 1 else root.parent
            return str(Path(path).relative_to(start))
    return path


def as_argument(path: object) -> str:
    """Return a path or a name as a shell takes it in a command: quoted if it has a space
    or another character that a shell reads.
    """
    return quote(str(path))


def some(words: Sequence[str], most: int = 8) -> str:
    """Return the first of the words, with an ellipsis if there are more."""
    return ", ".join(words[:most]) + (", …" if len(words) > most else "")


def share(value: float | None) -> str:
    """Return a share of one in percent; a dash for None."""
    return "–" if value is None else f"{value:.0%}"


def unwrapped(text: str) -> str:
    """Return a docstring as text for users: a line for each of its paragraphs."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def file_name(path: object) -> str:
    """Return the last part of a path."""
    return PurePath(str(path)).name


_PLAIN_WORD = re.compile(r"[a-z]+(?:['’-][a-z]+)*[,:;.!?)]*(?=\s|$)")


def capitalized(text: str) -> str:
    """Return a sentence with a capital at its beginning; a name that it begins with, such
    as bf16 or cat.mp4, stays as it is.
    """
    return text[:1].upper() + text[1:] if _PLAIN_WORD.match(text) else text


def shortened(text: str) -> str:
    """Return a user's text, short enough to be shown."""
    return text if len(text) <= 80 else f"{text[:79]}…"
