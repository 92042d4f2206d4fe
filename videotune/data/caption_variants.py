"""The texts that a dataset's settings make of a written caption: prefix and suffix,
shuffled and dropped tags, wildcards in braces and from files.

Text states are cached by text, so a caption has a bounded number of variants, drawn once
for (seed, caption, number). A resume and any number of processes draw the same.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from videotune.config.data_schema import Dataset
from videotune.data.captions import with_trigger
from videotune.data.wildcard_files import WildcardFiles
from videotune.errors import VideotuneError
from videotune.rng import generator_for

LONGEST = 100_000
"""Most characters of a caption of which variants are made."""

MOST_NESTING = 10
"""Wildcards within wildcards that are resolved, in levels."""

_WILDCARD = re.compile(r"\{([^{}]*)\}")
_PUNCTUATION = ".,;:!?)"


def trained_captions(
    written: Sequence[str],
    dataset: Dataset,
    seed: int,
    *,
    fixed: bool,
    wildcards: WildcardFiles,
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the captions of a clip as the run reads them, and how often each is drawn.

    Args:
        written: the clip's captions (``Candidate.captions``), one for each of their
            lines, before prefix, wildcards and trigger.
        dataset: the settings.
        seed: the run's seed.
        fixed: nothing is drawn, as for clips that are held out.
        wildcards: the dataset's files of wildcards.

    Returns:
        The captions, and their weights; no weights: all alike.

    Raises:
        VideotuneError: if a caption cannot have variants.
    """
    weights = tuple(dataset.caption_weights or ())
    if fixed or not dataset.varies_captions:
        texts = [_without_chance(text, dataset, wildcards) for text in written]
        return tuple(texts), weights

    used_weights = weights[: len(written)]
    if not sum(used_weights):
        used_weights = (1.0,) * len(written)

    weight_by_text: Counter[str] = Counter()
    for text, weight in zip(written, used_weights, strict=False):
        for variant in variants_of(text, dataset, seed, wildcards):
            weight_by_text[variant] += weight / dataset.caption_variants  # type: ignore[assignment]
    return tuple(weight_by_text), tuple(weight_by_text.values())


def variants_of(
    text: str, dataset: Dataset, seed: int, wildcards: WildcardFiles
) -> list[str]:
    """Return the variants of a written caption. The first one is not random, and some may
    be equal.

    Args:
        text: the caption.
        dataset: the settings.
        seed: the run's seed.
        wildcards: the dataset's files of wildcards.

    Raises:
        VideotuneError: if the caption is far longer than any model reads, or names a
            wildcard that does not exist.
    """
    _refuse_long(text, dataset)
    variants = [_without_chance(text, dataset, wildcards)]
    for number in range(1, dataset.caption_variants):
        generator = generator_for(seed, "caption variant", text, number)
        variants.append(_vary(text, dataset, wildcards, generator))
    return variants


def _refuse_long(text: str, dataset: Dataset) -> None:
    """Raise VideotuneError if a caption is far longer than any model reads."""
    if len(text) > LONGEST:
        raise VideotuneError(
            f"datasets.caption_variants: the caption in {dataset.path} that begins {text[:60]!r} has "
            f"{len(text)} characters; variants are made of at most {LONGEST}. Shorten it."
        )


def _without_chance(text: str, dataset: Dataset, wildcards: WildcardFiles) -> str:
    """Return a caption with the first choice of each wildcard, and all tags in order."""
    if dataset.caption_wildcards:
        text = _resolve_wildcards(text, dataset, wildcards, lambda count: 0)
    return _with_prefix_and_suffix(text, dataset)


def _vary(
    text: str,
    dataset: Dataset,
    wildcards: WildcardFiles,
    generator: np.random.Generator,
) -> str:
    """Draw the wildcards, the order and the dropped tags of a caption."""
    if dataset.caption_wildcards:

        def draw(count: int) -> int:
            return int(generator.integers(count))

        text = _resolve_wildcards(text, dataset, wildcards, draw)

    if dataset.caption_shuffle or dataset.caption_tag_dropout > 0:
        separator = dataset.caption_separator
        tags = [tag.strip() for tag in text.split(separator)]
        tags = [tag for tag in tags if tag]
        first_tags = tags[: dataset.caption_keep_tokens]
        other_tags = tags[dataset.caption_keep_tokens :]
        if dataset.caption_shuffle:
            order = generator.permutation(len(other_tags))
            other_tags = [other_tags[index] for index in order]
        numbers = generator.random(len(other_tags))
        remaining_tags = [
            tag
            for tag, number in zip(other_tags, numbers, strict=True)
            if number >= dataset.caption_tag_dropout
        ]
        joint = f"{separator.rstrip()} "
        text = joint.join([*first_tags, *remaining_tags])
    return _with_prefix_and_suffix(text, dataset)


def _resolve_wildcards(
    text: str,
    dataset: Dataset,
    wildcards: WildcardFiles,
    choose: Callable[[int], int],
) -> str:
    """Replace each {a|b} by one of its choices, the inner ones first, and each __name__
    by a line of its file.

    Braces without a bar stay as they are.

    Args:
        text: the caption.
        dataset: the settings.
        wildcards: the dataset's files of wildcards.
        choose: returns the index of one of so many choices.

    Raises:
        VideotuneError: if a wildcard has no file, or the text grows without an end.
    """

    def choice_of(match: re.Match[str]) -> str:
        choices = match[1].split("|")
        if len(choices) == 1:
            return match[0]
        return choices[choose(len(choices))].strip()

    for _ in range(MOST_NESTING):
        resolved = _WILDCARD.sub(choice_of, text)
        resolved = wildcards.replace(resolved, choose)
        if resolved == text:
            return text
        text = resolved
        _refuse_long(text, dataset)
    wildcards.refuse_unresolved(text, MOST_NESTING)
    return text


def _with_prefix_and_suffix(text: str, dataset: Dataset) -> str:
    """Add prefix, suffix and trigger to a caption."""
    prefix = dataset.caption_prefix or ""
    if prefix and text and not prefix[-1].isspace():
        prefix += " "

    suffix = dataset.caption_suffix or ""
    if suffix and text and not suffix[0].isspace() and suffix[0] not in _PUNCTUATION:
        suffix = f" {suffix}"

    completed = text
    if prefix or suffix:
        completed = f"{prefix}{text}{suffix}".strip()
    return with_trigger(completed, dataset.trigger)
