"""Captions: read them from text files, add the trigger word, and lint them."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from videotune.data.file_checks import ClipProblem
from videotune.data.remarks import Remark

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
    # Reading a pipe might wait forever.
    if path.exists() and not path.is_file():
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
        ClipProblem: if the file cannot be read or has another encoding; the message
            names the encoding that it seems to have.
    """
    try:
        content = path.read_bytes()
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


def lint_captions(captions: Mapping[str, Iterable[str]]) -> list[str]:
    """Return hints on the captions of a dataset; none of them is an error.

    A caption that more than half of the clips share teaches nothing that a trigger word
    would not.

    Args:
        captions: variants by clip.
    """
    if len(captions) < MIN_CLIPS_TO_COMPARE:
        return []

    clips_by_caption: Counter[str] = Counter()
    for variants in captions.values():
        clips_by_caption.update({" ".join(variant.split()) for variant in variants})
    if not clips_by_caption:
        return []

    text, count = clips_by_caption.most_common(1)[0]
    if count <= len(captions) / 2:
        return []
    description = "an empty caption"
    if text:
        ellipsis = "…" if len(text) > 60 else ""
        description = f'the same caption ("{text[:60]}{ellipsis}")'
    text = f"{count} of {len(captions)} clips have {description}; describe what each one shows"
    return [Remark("captions_alike", text)]
