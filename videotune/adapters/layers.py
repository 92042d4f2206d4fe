"""The weights that train, named by patterns: of modules for adapters, of layers for full fine-tuning and text encoders.

And textual inversion (Gal et al. 2022, arXiv 2208.01618): new tokens, whose rows alone train. The rows are a parameter of
their own, laid over the frozen table of a text encoder: nothing else has a gradient, and no weight decay can reach it. n
vectors are n tokens, ``<name>``, ``<name>_1``, …, to which the word ``<name>`` of a caption is spelled out, as diffusers
does it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from videotune.config.schema import Embedding
from videotune.errors import VideotuneError
from videotune.rng import generator_for
from videotune.types import TextPart

Parameters = Mapping[str, nn.Parameter]
"""What trains, by name."""


@dataclass(frozen=True)
class LiveText:
    """That text is encoded in the step; ``tokens`` are the new ones, which captions contain as ``spelled`` writes them.

    Without new tokens captions stay as they are.
    """

    tokens: tuple[str, ...] = ()

    def spell(self, caption: str) -> str:
        """The caption as the tokenizer is to read it."""
        return spelled(caption, self.tokens) if self.tokens else caption


def is_named(path: str, pattern: str) -> bool:
    """Whether a pattern names a path: the whole path as a regular expression, or its last parts."""
    return re.fullmatch(pattern, path) is not None or f".{path}".endswith(f".{pattern}")


def named_by(paths: Sequence[str], patterns: Sequence[str], key: str, what: str) -> set[str]:
    """The paths that any of the patterns names: a whole path as a regular expression, or its last parts.

    Raises VideotuneError, beginning with the config's ``key``, for a pattern that is not valid or names no ``what``.
    """
    matches: set[str] = set()
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise VideotuneError(
                f"{key}: {pattern!r} is not a valid pattern: {error}"
            ) from error
        hits = {path for path in paths if is_named(path, pattern)}
        if not hits:
            raise VideotuneError(
                f"{key}: {pattern!r} matches no {what}, such as {', '.join(paths[:3])}"
            )
        matches |= hits
    return matches


def grouped(paths: Sequence[str]) -> dict[str, int]:
    """How many paths there are of each kind, a block's number written as *, in the model's order."""
    return dict(
        Counter(re.sub(r"(?<=[a-z_]\.)\d+(?=\.)", "*", path, count=1) for path in paths)
    )


def layers_of(
    names: Iterable[str], patterns: Sequence[str] | None, of_text: bool = False
) -> list[str]:
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
        stops = range(len(parts), of_text, -1)
        starts = (1, 0) if of_text else (0,)
        paths[name] = [".".join(parts[start:stop]) for start in starts for stop in stops]
    key, what = ("text_encoder", "text encoders") if of_text else ("transformer", "transformer")
    flat = list(dict.fromkeys(path for own in paths.values() for path in own))
    matches = named_by(flat, patterns, f"{key}.layers", f"module or parameter of the {what}")
    return [name for name in names if not matches.isdisjoint(paths[name])]


def _let_train(parameters: Parameters, names: Sequence[str]) -> dict[str, nn.Parameter]:
    chosen = set(names)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen)
    return {name: parameters[name] for name in names}


def add_full(net: nn.Module, layers: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """Let weights of the network train, all or those of ``layers``, and return them by name, in the network's own dtypes."""
    parameters = dict(net.named_parameters())
    return _let_train(parameters, layers_of(parameters, layers))


def add_text(
    encoders: Mapping[str, nn.Module], layers: Sequence[str] | None
) -> dict[str, nn.Parameter]:
    """As ``add_full`` of text encoders, by encoder and path. The encoders stay in evaluation: nothing is dropped out."""
    parameters = {
        f"{part}.{path}": p
        for part, net in encoders.items()
        for path, p in net.named_parameters()
    }
    return _let_train(parameters, layers_of(parameters, layers, of_text=True))


def load_weights(parameters: Parameters, state: Mapping[str, Tensor], where: str) -> None:
    """Copy saved weights into parameters of the same names.

    Raises VideotuneError that names a missing, superfluous or misshapen tensor.
    """
    odd = sorted(set(parameters) ^ set(state))
    odd += [
        name
        for name, parameter in parameters.items()
        if name in state and parameter.shape != state[name].shape
    ]
    if odd:
        raise VideotuneError(
            f"{where} does not fit what trains: {len(odd)} tensors differ, the first is {odd[0]}"
        )
    for name, parameter in parameters.items():
        parameter.data.copy_(state[name])


SAMPLED = 4096
"""At most so many rows of the table say what a usual row is."""


def spelled(text: str, tokens: Sequence[str]) -> str:
    """The text with the first token, wherever it stands, followed by the others that belong to it."""
    return text.replace(tokens[0], " ".join(tokens)) if len(tokens) > 1 else text


class Overlay(nn.Module):
    """An embedding table with ``rows`` (n, D) laid over it: the n numbers from ``first`` on read them instead.

    The table may be shorter than ``first``, or have spare rows at those numbers: neither is looked at.
    """

    def __init__(self, table: nn.Module, rows: nn.Parameter, first: int) -> None:
        super().__init__()
        self.table = table
        self.rows = rows
        self.first = first

    @property
    def weight(self) -> Any:
        """The table that lies below."""
        return self.table.weight

    def forward(self, numbers: Tensor) -> Tensor:
        """Token numbers (…) -> rows (…, D) in the table's dtype."""
        place = numbers - self.first
        own = (place >= 0) & (place < len(self.rows))
        below = self.table(numbers.masked_fill(own, 0))
        new = nn.functional.embedding(place.clamp(0, len(self.rows) - 1), self.rows)
        return torch.where(own[..., None], new.to(below.dtype), below)


def add_rows(
    parts: Mapping[str, TextPart], settings: Embedding, seed: int
) -> dict[str, nn.Parameter]:
    """Give each text encoder the new tokens; their rows (n, D), float32, by the encoder's name."""
    rows = {name: first_rows(part, settings, seed, name) for name, part in parts.items()}
    return {name: lay_rows(part, settings.tokens, rows[name]) for name, part in parts.items()}


def lay_rows(part: TextPart, tokens: Sequence[str], rows: Tensor) -> nn.Parameter:
    """Teach the tokenizer the tokens and lay their rows (n, D) over the encoder's table.

    T5's ``shared`` and its encoder's ``embed_tokens`` are one table, and so have one overlay. Raises VideotuneError for a
    token that the tokenizer knows already or takes apart, and for rows of another width.
    """
    encoder: Any = part.encoder
    table = encoder.get_input_embeddings()
    if rows.shape != (len(tokens), table.weight.shape[1]):
        theirs = f"the text encoder reads {table.weight.shape[1]}: it is for another one"
        raise VideotuneError(f"{tokens[0]} has rows of {rows.shape[-1]} numbers, and {theirs}")
    first = add_tokens(part.tokenizer, tokens)
    parameter = nn.Parameter(rows.detach().to(table.weight.device, torch.float32, copy=True))
    encoder.set_input_embeddings(Overlay(table, parameter, first))
    return parameter


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> int:
    """Teach a tokenizer new tokens; the number of the first, after which come the others'.

    Raises VideotuneError for a token that it knows already, or takes apart.
    """
    known = [token for token in tokens if token in tokenizer.get_vocab()]
    if known:
        fault = f"the tokenizer has a token {known[0]!r} of its own"
        raise VideotuneError(f"embedding.token: {fault}: take another, such as <my-{known[0]}>")
    tokenizer.add_tokens(list(tokens))
    first = tokenizer.convert_tokens_to_ids(tokens[0])
    read = tokenizer(f"a {' '.join(tokens)} b").input_ids
    if [number for number in read if number >= first] != list(
        range(first, first + len(tokens))
    ):
        raise VideotuneError(
            f"embedding.token: the tokenizer takes {tokens[0]!r} apart: take a word such as <name>"
        )
    return first


def first_rows(
    part: TextPart, settings: Embedding, seed: int, name: str = "text_encoder"
) -> Tensor:
    """Where the rows (n, D) begin, float32 on the CPU.

    The tokens of ``init_text`` are dealt out over the rows in order: one row is the mean of all of them, as many rows as
    tokens are the tokens' own, and fewer tokens than rows stand in several. Without a text: a usual row of the table, drawn
    about their mean with their deviation, by (seed, encoder). Raises VideotuneError for a text without a token.
    """
    table = part.encoder.get_input_embeddings().weight.detach()  # type: ignore[operator]
    if settings.init_text is None:
        usual = table[:: max(1, len(table) // SAMPLED)].float().cpu()
        noise = generator_for(seed, "embedding", name).standard_normal(
            (settings.vectors, table.shape[1]), "float32"
        )
        return usual.mean(0) + usual.std(0) * torch.from_numpy(noise)
    numbers = part.tokenizer(settings.init_text, add_special_tokens=False).input_ids
    if not numbers:
        raise VideotuneError(f"embedding.init_text: {settings.init_text!r} has no token")
    words = table[torch.tensor(numbers, device=table.device)].float().cpu()
    count = settings.vectors
    bounds = [i * len(words) // count for i in range(count + 1)]
    return torch.stack([words[lo : max(hi, lo + 1)].mean(0) for lo, hi in pairwise(bounds)])
