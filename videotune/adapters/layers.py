"""The weights that train, named by patterns: of modules for adapters, of layers for full fine-tuning and text encoders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from videotune.adapters.textual_inversion import spelled
from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class LiveText:
    """That text is encoded in the step; ``tokens`` are the new ones, which captions contain as ``spelled`` writes them.

    Without new tokens captions stay as they are.
    """

    tokens: tuple[str, ...] = ()

    def spell(self, caption: str) -> str:
        """The caption as the tokenizer is to read it."""
        return spelled(caption, self.tokens) if self.tokens else caption


def named_by(paths: Sequence[str], patterns: Sequence[str], key: str, what: str) -> set[str]:
    """The paths that any of the patterns names: a whole path as a regular expression, or its last parts.

    Raises VideotuneError, beginning with the config's ``key``, for a pattern that is not valid or names no ``what``.
    """
    matches: set[str] = set()
    for pattern in patterns:
        try:
            whole = re.compile(pattern)
        except re.error as error:
            raise VideotuneError(f"{key}: {pattern!r} is not a valid pattern: {error}") from error
        hits = {path for path in paths if whole.fullmatch(path) or f".{path}".endswith(f".{pattern}")}
        if not hits:
            raise VideotuneError(f"{key}: {pattern!r} matches no {what}, such as {', '.join(paths[:3])}")
        matches |= hits
    return matches


def grouped(paths: Sequence[str]) -> dict[str, int]:
    """How many paths there are of each kind, a block's number written as *, in the model's order."""
    groups: dict[str, int] = {}
    for path in paths:
        kind = re.sub(r"(?<=[a-z_]\.)\d+(?=\.)", "*", path, count=1)
        groups[kind] = groups.get(kind, 0) + 1
    return groups


def layers_of(names: Iterable[str], patterns: Sequence[str] | None, of_text: bool = False) -> list[str]:
    """The parameters that train: all (None), or those that a pattern names, by itself or by a module that contains it.

    ``of_text``: names begin with their text encoder's, which a pattern may leave out. Raises VideotuneError for a pattern
    that names nothing.
    """
    names = list(names)
    if patterns is None:
        return names
    paths: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        stops, starts = range(len(parts), of_text, -1), (1, 0) if of_text else (0,)
        paths[name] = [".".join(parts[start:stop]) for start in starts for stop in stops]
    key, what = ("text_encoder", "text encoders") if of_text else ("transformer", "transformer")
    flat = list(dict.fromkeys(path for own in paths.values() for path in own))
    matches = named_by(flat, patterns, f"{key}.layers", f"module or parameter of the {what}")
    return [name for name in names if not matches.isdisjoint(paths[name])]


def _let_train(parameters: Mapping[str, nn.Parameter], names: Sequence[str]) -> dict[str, nn.Parameter]:
    chosen = set(names)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen)
    return {name: parameters[name] for name in names}


def add_full(net: nn.Module, layers: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """Let weights of the network train, all or those of ``layers``, and return them by name, in the network's own dtypes."""
    parameters = dict(net.named_parameters())
    return _let_train(parameters, layers_of(parameters, layers))


def add_text(encoders: Mapping[str, nn.Module], layers: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """As ``add_full`` of text encoders, by encoder and path. The encoders stay in evaluation: nothing is dropped out."""
    parameters = {f"{part}.{path}": p for part, net in encoders.items() for path, p in net.named_parameters()}
    return _let_train(parameters, layers_of(parameters, layers, of_text=True))


def load_weights(parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor], where: str) -> None:
    """Copy saved weights into parameters of the same names.

    Raises VideotuneError that names a missing, superfluous or misshapen tensor.
    """
    odd = sorted(set(parameters) ^ set(state))
    odd += [name for name, parameter in parameters.items() if name in state and parameter.shape != state[name].shape]
    if odd:
        raise VideotuneError(f"{where} does not fit what trains: {len(odd)} tensors differ, the first is {odd[0]}")
    for name, parameter in parameters.items():
        parameter.data.copy_(state[name])
