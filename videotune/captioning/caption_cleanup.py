"""What a model is asked, and what becomes of its answer: one clean line, or a reason why it is no caption."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from videotune.data.captions import lint_caption, lint_captions
from videotune.files import read_json

TABLES = read_json(Path(__file__).with_name("tables.json"))

PATTERNS = {
    name: re.compile(text, re.DOTALL | re.IGNORECASE)
    for name, text in TABLES["patterns"].items()
}
"""What an answer holds besides a caption, and whole sentences."""

_MARKS = " \t\"“”'*_`#>"


class CaptionError(Exception):
    """One clip gets no caption; its text explains why. The others go on."""


def prompt_for(purpose: str, own: str | None, frames: int, max_words: int) -> str:
    """The prompt on a clip of so many frames; ``own`` takes the place of the purpose's.

    A caption names what varies between clips; what it leaves out goes to the trigger word.
    """
    parts = [TABLES["video"]] * (frames > 1) + [
        own or TABLES["prompts"][purpose],
        TABLES["form"],
    ]
    return (
        " ".join(parts).replace("{frames}", str(frames)).replace("{max_words}", str(max_words))
    )


def clean(answer: str, max_words: int) -> str:
    """The caption in a model's answer: one line without thoughts, headings, quotes and Markdown.

    An answer with more words ends with its last whole sentence within them. CaptionError for a refusal, and for no text.
    """
    text = PATTERNS["thoughts"].sub("", PATTERNS["controls"].sub("", answer[:20_000]))
    text = " ".join(PATTERNS["heading"].sub("", text).replace("**", "").split()).strip(_MARKS)
    if not text:
        raise CaptionError("the answer holds no text")
    if PATTERNS["refusal"].match(text):
        raise CaptionError(f"the model refused: {text[:120]}")
    kept = " ".join(text.split()[:max_words])
    whole = None if kept == text else PATTERNS["sentences"].match(kept)
    return whole[0] if whole else kept


def hints(
    captions: Mapping[str, Sequence[str]], tokens: Mapping[str, int], most: int
) -> list[dict[str, str]]:
    """Hints on captions by clip, written by whomever; those on all of them have the clip "".

    ``tokens``: how many each caption has, as far as that is known; the model reads ``most`` of them.
    """
    rows = list[tuple[str, str]]()
    first = dict[str, str]()
    for clip, text in ((clip, text) for clip, texts in captions.items() for text in texts):
        found = lint_caption(text, Path(clip).stem)
        count = tokens.get(text, 0)
        other = first.setdefault(text, clip)
        found += [
            f"the caption has {count} tokens; the model reads {most}, the rest is cut"
        ] * (count > most)
        found += ["the caption reads like a model's refusal; write it anew"] * bool(
            PATTERNS["refusal"].match(text)
        )
        found += [f"the caption is the same as that of {other}"] * (other != clip)
        rows += [(clip, hint) for hint in found]
    rows += [
        ("", hint)
        for hint in lint_captions({clip: texts for clip, texts in captions.items() if texts})
    ]
    return [{"clip": clip, "hint": hint} for clip, hint in rows]
