"""Text encoders that train: run in the step, with gradients, instead of read from the cache."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from videotune.adapters.textual_inversion import spelled
from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class LiveText:
    """That text is encoded in the step; ``tokens`` are the new ones, to which captions are spelled out (none: as they are).

    They begin with the one that stands in captions.
    """

    tokens: tuple[str, ...] = ()

    def spell(self, caption: str) -> str:
        """The caption as the tokenizer is to read it."""
        return spelled(caption, self.tokens) if self.tokens else caption


def add_text(encoders: Mapping[str, nn.Module], layers: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Let weights of the text encoders train, all or those that ``layers`` names; by encoder and path, in their own dtypes.

    Nothing is dropped out: the encoders stay in evaluation. Raises VideotuneError for a pattern that names nothing.
    """
    named = {f"{part}.{path}": p for part, net in encoders.items() for path, p in net.named_parameters()}
    chosen = named if layers is None else {name: named[name] for name in matching_text(list(named), layers)}
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)
    return chosen


def matching_text(names: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The parameters, named by encoder and path, that the patterns name, in order.

    A pattern is a regular expression for the whole path of a parameter or of a module that holds it, with or without the
    encoder's name, or the last parts of such a path. Raises VideotuneError for one that names nothing.
    """
    found: set[str] = set()
    for pattern in layers:
        try:
            hits = {name for name in names if any(_is(pattern, path) for path in _paths(name))}
        except re.error as error:
            raise VideotuneError(f"text_encoder.layers: {pattern!r} is not a valid pattern: {error}") from error
        if not hits:
            examples = ", ".join(name.partition(".")[2] for name in names[:: max(1, len(names) // 3)][:3])
            raise VideotuneError(f"text_encoder.layers: {pattern!r} names no weight, such as {examples}")
        found |= hits
    return [name for name in names if name in found]


def _paths(name: str) -> list[str]:
    """A parameter's own path and those of the modules around it, each with and without the encoder's name."""
    parts = name.split(".")
    return [".".join(parts[start:stop]) for start in (0, 1) for stop in range(2, len(parts) + 1)]


def _is(pattern: str, path: str) -> bool:
    return bool(re.fullmatch(pattern, path)) or f".{path}".endswith(f".{pattern}")
