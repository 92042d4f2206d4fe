"""Captions: read them from text files, add the trigger word, and lint them."""

import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from videotune.bounds import CAPTION_BYTES, read_limited
from videotune.data.file_checks import ClipProblem
from videotune.data.packed_texts import TextNumbers
from videotune.data.remarks import Remark
from videotune.errors import VideotuneError
from videotune.text import counted

LONG_CAPTION = 512
"""Words beyond which every model's text encoder truncates a caption."""

MIN_CLIPS_TO_COMPARE = 8
"""Datasets with fewer clips are not checked for shared captions."""

_TEMPORAL = re.compile(
    r"\b(first|firstly|then|next|afterwards?|finally|lastly)\b", re.IGNORECASE
)

_PLACEHOLDERS = re.compile(
    r"(your |insert )?(captions?|text|prompt|description|placeholder)( here)?"
    r"|todo|tbd|fixme|xxx|lorem ipsum|none|null|nan|n/?a|untitled|unknown|test|example"
    r"|((a|an|the) )?(video|clip|image|picture)"
)
"""Captions that were never written, in the form of ``_normalize``."""

TRIGGER_PLACEHOLDERS = ("[trigger]", "[name]")
"""What stands for the trigger word in captions that were written for ai-toolkit."""

_LINE_END = re.compile(r"\r\n|\r|\n")

_INVISIBLE = frozenset(
    "\ufeff\ufffd\u200b\u2060\u00ad\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
"""Characters that are not displayed, and U+FFFD, which replaces a lost one.

Joiners are not included, since some scripts need them.
"""


def read_caption(path: Path) -> tuple[str, ...]:
    """Read the variants of a caption: the lines of a UTF-8 file.

    Raises:
        ClipProblem: if the file is missing, empty, or not UTF-8.
    """
    return split_variants(read_caption_text(path))


def read_caption_text(path: Path) -> str:
    """Read the text of a caption file, which is not blank.

    Raises:
        ClipProblem: if the file is missing, empty, or not UTF-8.
    """
    try:
        is_other = path.exists() and not path.is_file()
    except OSError as error:  # a link into a folder that may not be entered
        raise ClipProblem(
            "missing_caption", f"{path} cannot be read: {error.strerror}"
        ) from error
    if is_other:
        raise ClipProblem("missing_caption", f"{path} is not a regular file")

    text = read_utf8(path)
    if not text.strip():
        raise ClipProblem("empty_caption", f"{path} has no text")
    return text


def split_variants(text: str) -> tuple[str, ...]:
    """Split a text into its lines, trimmed and without blank ones; each is a caption.

    Lines end as editors end them. Other separators (U+2028, U+0085, a vertical tab)
    may be within a caption.
    """
    lines = [line.strip() for line in _LINE_END.split(text)]
    return tuple(line for line in lines if line)


def join_lines(text: str) -> str:
    """Return the lines of a text as one caption."""
    return " ".join(split_variants(text))


def has_paragraphs(text: str) -> bool:
    """Return whether a blank line separates lines of a text: it is prose, then."""
    lines = [line.strip() for line in _LINE_END.split(text.strip())]
    return "" in lines


def read_utf8(path: Path) -> str:
    """Read UTF-8 text, with or without a byte order mark.

    Raises:
        ClipProblem: if the file cannot be read, is too large, or has another encoding;
            the message names the encoding that it seems to have.
    """
    try:
        content = read_limited(path, CAPTION_BYTES, "a file of captions")
    except VideotuneError as error:
        raise ClipProblem("undecodable_caption", str(error)) from error
    except OSError as error:
        raise ClipProblem(
            "missing_caption", f"{path} cannot be read: {error.strerror}"
        ) from error

    fault = None
    text = ""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 text (byte {error.start})"
    if "\0" in text:
        fault = f"contains a NUL (byte {content.find(0)})"

    if fault is not None:
        guess = "an older encoding (Windows-1252, GBK, Shift-JIS …)"
        if 0 in content:
            guess = "UTF-16, UTF-32 or no text"
        raise ClipProblem(
            "undecodable_caption",
            f"{path} {fault}; it looks like {guess}; save it as UTF-8",
        )
    return text


def with_trigger(caption: str, trigger: str | None) -> str:
    """Put the trigger word in front of a caption, unless it contains that word.

    It takes the place of ``[trigger]`` and ``[name]``, which captions for other
    trainers have.
    """
    caption = fill_trigger(caption, trigger)
    if not trigger or re.search(
        rf"(?<!\w){re.escape(trigger)}(?!\w)", caption, re.IGNORECASE
    ):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


def fill_trigger(caption: str, trigger: str | None) -> str:
    """Replace placeholders of the trigger word, if there is such a word."""
    if trigger:
        for placeholder in TRIGGER_PLACEHOLDERS:
            caption = caption.replace(placeholder, trigger)
    return caption


def with_token(caption: str, token: str) -> str:
    """Put a new token in front of a caption, unless it contains it.

    The case must match, since the tokenizer recognizes no other form.
    """
    if token in caption:
        return caption
    return f"{token}, {caption}" if caption else token


def lint_caption(caption: str, name: str | None = None) -> list[str]:
    """Return hints on a caption; none of them is an error.

    Args:
        caption: one variant.
        name: file name of the clip, without suffix.
    """
    hints = []

    temporal_words = sorted({match.lower() for match in _TEMPORAL.findall(caption)})
    if temporal_words:
        quoted = ", ".join(f'"{text}"' for text in temporal_words)
        hints.append(
            f"the caption tells a sequence ({quoted}); describe what is seen instead"
        )

    count = len(caption.split())
    if count > LONG_CAPTION:
        hints.append(
            f"the caption has {count} words; text encoders truncate it long before"
        )

    if _PLACEHOLDERS.fullmatch(_normalize(caption)):
        hints.append(
            f'the caption is only "{caption.strip()}"; it looks like a placeholder'
        )
    elif name and _normalize(caption) == _normalize(name):
        hints.append(
            f'the caption is only the file\'s name, "{caption.strip()}"; describe what is seen'
        )

    for placeholder in TRIGGER_PLACEHOLDERS:
        if placeholder in caption:
            hints.append(
                f"the caption has {placeholder}, which is trained as it is without a trigger"
                " word; set datasets.trigger"
            )

    invisible = dict.fromkeys(char for char in caption if _is_invisible(char))
    if invisible:
        codes = ", ".join(f"U+{ord(char):04X}" for char in list(invisible)[:5])
        hints.append(f"the caption contains invisible characters ({codes}); retype it")
    return [Remark("caption", hint) for hint in hints]


def _normalize(text: str) -> str:
    """Lower the case and drop surrounding marks: "<TODO>" and "todo." both become
    "todo".
    """
    spaced = re.sub(r"[\s_\-]+", " ", text).lower()
    return " ".join(spaced.strip(" \"'.,:;!?<>[](){}*…").split())


def _is_invisible(char: str) -> bool:
    if char in _INVISIBLE:
        return True
    category = unicodedata.category(char)
    return category in ("Cc", "Cn", "Co", "Cs", "Zl", "Zp") and char not in "\t\n\r"


class SharedCaptions:
    """Finds the caption that most clips of a dataset share.

    Such a caption teaches nothing that a trigger word would not.
    """

    def __init__(self) -> None:
        self._texts = TextNumbers()
        self._clip_of_text = array("i")
        self._clips = 0

    def add(self, variants: Iterable[str]) -> None:
        """Add the variants of the next clip's caption."""
        for text in _with_single_spaces(variants):
            self._texts.add(text)
            self._clip_of_text.append(self._clips)
        self._clips += 1

    def hints(self, variants_of: Callable[[int], Iterable[str]]) -> list[str]:
        """Return hints; none of them is an error.

        Args:
            variants_of: returns the variants of a clip by its number, from 0.
        """
        if self._clips < MIN_CLIPS_TO_COMPARE or not self._clip_of_text:
            return []
        number_of_text, first_texts = self._texts.number_all()
        counts = np.bincount(number_of_text)
        commonest = int(counts.argmax())
        count = int(counts[commonest])
        if count <= self._clips / 2:
            return []

        clip = self._clip_of_text[first_texts[commonest]]
        for text in _with_single_spaces(variants_of(clip)):
            if self._texts.number_of(text) == commonest:
                break
        description = "an empty caption"
        if text:
            ellipsis = "…" if len(text) > 60 else ""
            description = f'the same caption ("{text[:60]}{ellipsis}")'
        hint = f"{count} of {self._clips} clips have {description}; describe what each one shows"
        return [Remark("captions_alike", hint)]


def _with_single_spaces(variants: Iterable[str]) -> dict[str, None]:
    """Return the different variants, with one space wherever there is any."""
    return dict.fromkeys(" ".join(variant.split()) for variant in variants)


def lint_captions(captions: Mapping[str, Iterable[str]]) -> list[str]:
    """Return hints on the captions of a dataset; none of them is an error.

    Args:
        captions: variants by clip.
    """
    shared = SharedCaptions()
    variants = list(captions.values())
    for variants_of_clip in variants:
        shared.add(variants_of_clip)
    return shared.hints(variants.__getitem__)


def caption_message(
    without_caption: Sequence[tuple[str, str]],
    others: Sequence[tuple[str, str]] | None = (),
    *,
    clip_count: int,
    example: Path,
    unused: Sequence[str] = (),
) -> str:
    """Describe the clips without a usable caption, and what to do.

    Args:
        without_caption: (path, what is wrong with it) of each.
        others: those that would be skipped for another reason. None: the clips have
            not been read yet.
        clip_count: how many clips there are in all.
        example: the text file that one of them lacks.
        unused: notes on caption files that no clip uses.
    """
    count = len(without_caption)
    lines = ["1 clip has no usable caption:"]
    if count > 1:
        lines = [f"{count} clips have no usable caption:"]
    lines += _listed(without_caption)
    if others:
        lines.append(f"{counted(len(others), 'other file')} cannot be used either:")
        lines += _listed(others)

    lines += [f"note: {note}" for note in unused]
    lines.append(caption_advice(example))
    skipped = count + len(others or ())
    if skipped < clip_count:
        line = f"Or go on without these files: --allow-skips {skipped}."
        if others is None:
            line += " Other clips are not read yet: `videotune check` counts all that cannot be used."
        lines.append(line)
    lines.append(
        "With --set missing_caption=empty clips without a caption are trained with no words."
    )
    return "\n".join(lines)


def caption_advice(example: Path) -> str:
    """Return how captions get written, with the text file that a clip lacks."""
    return (
        f'Each needs one, in UTF-8: a text file such as {example} with a line like "a '
        'kitten walks on grass". `videotune caption` writes those that are missing.'
    )


def _listed(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each of the first ten."""
    lines = [f"  {path}: {detail}" for path, detail in rows[:10]]
    if len(rows) > 10:
        lines.append(f"  … and {len(rows) - 10} more")
    return lines
