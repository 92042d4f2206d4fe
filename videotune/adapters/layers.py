"""The weights that train: modules and layers named by patterns, and rows of new tokens.

Textual inversion (Gal et al. 2022, arXiv 2208.01618) trains only the rows of new
tokens. They are a separate parameter over the frozen table of a text encoder, so
nothing else has a gradient or weight decay. n vectors are n tokens ``<name>``,
``<name>_1``, …; the word ``<name>`` in a caption is replaced by all of them, as in
diffusers.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from videotune.config.sections import Embedding
from videotune.errors import VideotuneError
from videotune.model_spec import ModelSpec
from videotune.rng import generator_for
from videotune.types import TextPart

Parameters = Mapping[str, nn.Parameter]
"""Trainable parameters by name."""


@dataclass(frozen=True)
class LiveText:
    """Settings of text that is encoded in the training step."""

    tokens: tuple[str, ...] = ()
    """The new tokens."""

    def with_all_tokens(self, caption: str) -> str:
        """Return the caption for the tokenizer, with the new tokens."""
        return spelled(caption, self.tokens)


def is_named(path: str, pattern: str) -> bool:
    """Return whether a pattern is a regular expression of the full path, or its last
    parts.
    """
    return re.fullmatch(pattern, path) is not None or f".{path}".endswith(f".{pattern}")


def named_by(
    paths: Sequence[str], patterns: Sequence[str], key: str, noun: str
) -> set[str]:
    """Return the paths that any of the patterns names, see ``is_named``.

    Args:
        paths: the paths of the model.
        patterns: the patterns of the config.
        key: key of the config, for the error.
        noun: what the paths are, for the error.

    Raises:
        VideotuneError: for a pattern that is not valid or names nothing.
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
                f"{key}: {pattern!r} matches no {noun}, such as {', '.join(paths[:3])}"
            )
        matches |= hits
    return matches


def grouped(paths: Sequence[str]) -> dict[str, int]:
    """Count paths by kind, with a block's number written as *, in model order."""
    kinds = [re.sub(r"(?<=[a-z_]\.)\d+(?=\.)", "*", path, count=1) for path in paths]
    return dict(Counter(kinds))


def layers_of(
    names: Iterable[str], patterns: Sequence[str] | None, of_text: bool = False
) -> list[str]:
    """Return the parameters that train.

    Args:
        names: all parameters.
        patterns: name a parameter or a module that contains it. None: all train.
        of_text: names begin with their text encoder, which a pattern may leave out.

    Raises:
        VideotuneError: for a pattern that names nothing.
    """
    names = list(names)
    if patterns is None:
        return names

    # Each parameter, and each module that contains it.
    paths: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        paths[name] = []
        for start in (1, 0) if of_text else (0,):
            for stop in range(len(parts), of_text, -1):
                paths[name].append(".".join(parts[start:stop]))

    key = "text_encoder" if of_text else "transformer"
    model = "text encoders" if of_text else "transformer"
    all_paths = list(dict.fromkeys(chain.from_iterable(paths.values())))
    noun = f"module or parameter of the {model}"
    matches = named_by(all_paths, patterns, f"{key}.layers", noun)
    return [name for name in names if not matches.isdisjoint(paths[name])]


def _let_train(parameters: Parameters, names: Sequence[str]) -> dict[str, nn.Parameter]:
    chosen = set(names)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen)
    return {name: parameters[name] for name in names}


def add_full(
    net: nn.Module, spec: ModelSpec, layers: Sequence[str] | None = None
) -> dict[str, nn.Parameter]:
    """Make all weights of a network or those of ``layers`` trainable, but for those that
    have no effect in a training step.

    Raises:
        VideotuneError: for a pattern that names nothing, or if nothing is left.
    """
    parameters = dict(net.named_parameters())
    names = layers_of(parameters, layers)
    acting = [name for name in names if not spec.is_idle(name)]
    if not acting:
        raise VideotuneError(
            f"transformer.layers: all {len(names)} weights that are named, such as {names[0]}, have no "
            f"effect in a step that learns {' and '.join(spec.generates)} (generate). Name others"
        )
    return _let_train(parameters, acting)


def add_text(
    encoders: Mapping[str, nn.Module], layers: Sequence[str] | None
) -> dict[str, nn.Parameter]:
    """Make weights of text encoders trainable; returns them by encoder and path.

    The encoders stay in evaluation mode, without dropout.
    """
    parameters = {
        f"{part}.{path}": p
        for part, net in encoders.items()
        for path, p in net.named_parameters()
    }
    return _let_train(parameters, layers_of(parameters, layers, of_text=True))


def load_weights(
    parameters: Parameters, state: Mapping[str, Tensor], where: str
) -> None:
    """Copy saved weights into parameters of the same names.

    Raises:
        VideotuneError: for a missing or extra tensor, or one of another shape.
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
"""Rows of the table, at most, of which mean and deviation are computed."""


def spelled(text: str, tokens: Sequence[str]) -> str:
    """Return the text with each first token followed by the others."""
    return text.replace(tokens[0], " ".join(tokens)) if tokens else text


class Overlay(nn.Module):
    """An embedding table in which the n tokens from ``first`` on read ``rows`` (n, D).

    The table may be shorter than ``first`` or have spare rows at those positions.
    """

    def __init__(self, table: nn.Module, rows: nn.Parameter, first: int) -> None:
        super().__init__()
        self.table = table
        self.rows = rows
        self.first = first

    @property
    def weight(self) -> Any:
        """The weight of the original table."""
        return self.table.weight

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the rows (…, D) of token numbers (…) in the table's dtype."""
        index = numbers - self.first
        is_new = (index >= 0) & (index < len(self.rows))
        table_rows = self.table(numbers.masked_fill(is_new, 0))
        new_rows = nn.functional.embedding(
            index.clamp(0, len(self.rows) - 1), self.rows
        )
        # Some tables multiply what they return; files hold the rows before that.
        scale = getattr(self.table, "embed_scale", None)
        if scale is not None:
            new_rows = new_rows * scale
        return torch.where(is_new[..., None], new_rows.to(table_rows.dtype), table_rows)


def add_rows(
    parts: Mapping[str, TextPart], settings: Embedding, seed: int
) -> dict[str, nn.Parameter]:
    """Add the new tokens to each text encoder; returns their rows (n, D)."""
    rows = {
        name: first_rows(part, settings, seed, name) for name, part in parts.items()
    }
    return {
        name: lay_rows(part, settings.tokens, rows[name])
        for name, part in parts.items()
    }


def lay_rows(part: TextPart, tokens: Sequence[str], rows: Tensor) -> nn.Parameter:
    """Add tokens to the tokenizer and their rows (n, D) to the encoder's table.

    T5's ``shared`` and its encoder's ``embed_tokens`` are one table and get one
    overlay.

    Raises: VideotuneError: if the tokenizer already has a token or splits it, or the
        rows have another width.
    """
    encoder: Any = part.encoder
    table = encoder.get_input_embeddings()
    if rows.shape != (len(tokens), table.weight.shape[1]):
        raise VideotuneError(
            f"{tokens[0]} has rows of {rows.shape[1]} numbers, and the text encoder reads "
            f"{table.weight.shape[1]}: it is for another one"
        )
    first = add_tokens(part.tokenizer, tokens)
    parameter = nn.Parameter(
        rows.detach().to(table.weight.device, torch.float32, copy=True)
    )
    encoder.set_input_embeddings(Overlay(table, parameter, first))
    return parameter


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> int:
    """Add tokens to a tokenizer and return the number of the first; the others follow
    it.

    Raises:
        VideotuneError: if the tokenizer already has a token or splits it.
    """
    existing = [token for token in tokens if token in tokenizer.get_vocab()]
    if existing:
        raise VideotuneError(
            f"embedding.token: the tokenizer has a token {existing[0]!r} of its own: "
            f"take another, such as <my-{existing[0]}>"
        )

    tokenizer.add_tokens(list(tokens))
    first = tokenizer.convert_tokens_to_ids(tokens[0])
    ids = tokenizer(f"a {' '.join(tokens)} b").input_ids
    new_ids = [number for number in ids if number >= first]
    if new_ids != list(range(first, first + len(tokens))):
        raise VideotuneError(
            f"embedding.token: the tokenizer takes {tokens[0]!r} apart: take a word such as <name>"
        )
    return first


def first_rows(
    part: TextPart, settings: Embedding, seed: int, name: str = "text_encoder"
) -> Tensor:
    """Return the initial rows (n, D), float32 on the CPU.

    The tokens of ``init_text`` are spread over the rows in order: a single row is the
    mean of all tokens, n rows of n tokens are the tokens' rows, and fewer tokens than
    rows are repeated. Without a text, rows are drawn around the mean of the table's
    rows with their deviation, by (seed, encoder).

    Raises:
        VideotuneError: for a text without a token.
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
        raise VideotuneError(
            f"embedding.init_text: {settings.init_text!r} has no token"
        )
    token_rows = table[numbers].float().cpu()
    count = settings.vectors
    bounds = [i * len(token_rows) // count for i in range(count + 1)]
    means = [token_rows[lo : max(hi, lo + 1)].mean(0) for lo, hi in pairwise(bounds)]
    return torch.stack(means)
