"""What families share about their text encoders: tokenizers, shapes without weights, captions encoded in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.families.pretrained import explained, read_tokenizer
from videotune.families.skeletons import built

if TYPE_CHECKING:
    from torch import Tensor, nn


def fresh_tokenizers(folder: Path, parts: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A tokenizer of each text encoder, by the encoder's folder; ``parts`` names the tokenizers' folders."""
    names = {"text_encoder": "tokenizer"} if parts is None else parts
    return {part: read_tokenizer(folder / place, folder / part) for part, place in names.items()}


def count_tokens(folder: Path, captions: Sequence[str]) -> list[int] | None:
    """How many tokens each caption has, marks included, without torch; None where the folder has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    with explained(f"{path} cannot be read"):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(captions))]


def text_skeletons(folder: Path, name: str, part: str = "text_encoder") -> dict[str, nn.Module]:
    """A text encoder of transformers, by its class's name, with all of its weights on the meta device."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    with torch.device("meta"):
        return {part: built(cls, folder / part)}


def each_once(captions: Sequence[str], encode: Callable[[str], Tensor]) -> Tensor:
    """The captions' states stacked, (B,L,D); each is encoded by itself, so that no neighbour moves its last bit."""
    import torch

    states = {caption: encode(caption) for caption in dict.fromkeys(captions)}
    return torch.stack([states[caption] for caption in captions])


def token_lengths(folder: Path, captions: Sequence[str]) -> list[int] | None:
    """How many tokens T5 makes of each caption, the end mark included, without torch; None without a tokenizer.json."""
    # T5's tokenizer takes any white space for one space, whether its file says so or the library that loads it
    return count_tokens(folder / "tokenizer", [" ".join(caption.split()) for caption in captions])
