"""Prompts for captioning models, and cleanup of their answers into one line each."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from videotune.data.captions import lint_caption, lint_captions
from videotune.files import read_json

TABLES = read_json(Path(__file__).with_name("tables.json"))

PATTERNS = {
    name: re.compile(text, re.DOTALL | re.IGNORECASE)
    for name, text in TABLES["patterns"].items()
}
"""Parts of an answer that are not the caption, and complete sentences."""

_SURROUNDING_MARKS = " \t\"“”'*_`#>"


class CaptionError(Exception):
    """Raised if one clip gets no caption; the others do. The text explains why."""


def prompt_for(
    purpose: str, custom_prompt: str | None, frames: int, max_words: int
) -> str:
    """Return the prompt for a clip.

    A caption names what varies between clips; what it leaves out is learnt by the
    trigger word.

    Args:
        purpose: key of the built-in prompt.
        custom_prompt: replaces the built-in prompt.
        frames: number of frames that the model gets.
        max_words: most words of the caption.
    """
    parts = []
    if frames > 1:
        parts.append(TABLES["video"])
    parts.append(custom_prompt or TABLES["prompts"][purpose])
    parts.append(TABLES["form"])
    prompt = " ".join(parts)
    prompt = prompt.replace("{frames}", str(frames))
    return prompt.replace("{max_words}", str(max_words))


def clean(answer: str, max_words: int) -> str:
    """Extract the caption from a model's answer: one line without thoughts, headings or
    Markdown.

    A longer answer ends with its last complete sentence within ``max_words``.

    Raises:
        CaptionError: if the model refused, or if there is no text.
    """
    text = answer[:20_000]
    for name in ("controls", "thoughts", "heading"):
        text = PATTERNS[name].sub("", text)
    text = text.replace("**", "")
    text = " ".join(text.split()).strip(_SURROUNDING_MARKS)
    if not text:
        raise CaptionError("the answer has no text")
    if PATTERNS["refusal"].match(text):
        raise CaptionError(f"the model refused: {text[:120]}")

    first_words = text.split()[:max_words]
    shortened = " ".join(first_words)
    if shortened == text:
        return text
    sentences = PATTERNS["sentences"].match(shortened)
    return sentences[0] if sentences else shortened


def hints(
    captions: Mapping[str, Sequence[str]], tokens: Mapping[str, int], most: int
) -> list[dict[str, str]]:
    """Return hints on captions, whoever wrote them; hints on all of them have the clip
    "".

    Args:
        captions: captions by clip.
        tokens: tokens by caption, as far as they are known.
        most: tokens that the model reads.
    """
    clip_by_caption: dict[str, str] = {}
    rows: list[dict[str, str]] = []
    for clip, texts in captions.items():
        for text in texts:
            original_clip = clip_by_caption.setdefault(text, clip)
            for hint in _caption_hints(clip, text, tokens.get(text, 0), most):
                rows.append({"clip": clip, "hint": hint})
            if original_clip != clip:
                hint = f"the caption is the same as that of {original_clip}"
                rows.append({"clip": clip, "hint": hint})

    captioned_clips = {clip: texts for clip, texts in captions.items() if texts}
    for hint in lint_captions(captioned_clips):
        rows.append({"clip": "", "hint": hint})
    return rows


def _caption_hints(clip: str, text: str, token_count: int, most: int) -> Iterator[str]:
    """Yield hints on one caption."""
    yield from lint_caption(text, Path(clip).stem)
    if token_count > most:
        yield f"the caption has {token_count} tokens; the model reads {most}, the rest is cut"
    if PATTERNS["refusal"].match(text):
        yield "the caption reads like a model's refusal; rewrite it"
