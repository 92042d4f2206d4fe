"""What libraries read from a folder or a Hub repository: never with its code, and an error names the place."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.lazy import transformers
from videotune.models.model_files import read_config

PROBES = ("a red circle moves left", "a blue square moves up")
"""Two captions that every tokenizer tells apart which has its vocabulary."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """An error that a library raises of a damaged file becomes a VideotuneError that begins with ``what``.

    That the memory is full stays the error that it is.
    """
    try:
        yield
    except VideotuneError:
        raise
    except Exception as error:  # each library has kinds of its own, tokenizers' has none
        if isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error)):
            raise
        if "trust_remote_code" in str(error):
            raise VideotuneError(f"{what}: it names code of its own, which videotune never runs") from error
        why = " ".join((str(error) or type(error).__name__).split())[:200]
        raise VideotuneError(f"{what}: {why}") from error


def pretrained(cls: Any, place: Path | str, **words: Any) -> Any:
    """``cls.from_pretrained(place)``, without code that lies there; nobody is asked whether to run it.

    Raises VideotuneError where the library cannot read it.
    """
    adapter = Path(place) / "adapter_config.json"
    if adapter.is_file():
        raise VideotuneError(f"{adapter}: the weights of another model would be read in place of this one's: remove it")
    with explained(f"{place} cannot be read by {cls.__name__}"):
        return cls.from_pretrained(place, trust_remote_code=False, **words)


def read_tokenizer(folder: Path, encoder: Path, cls: Any = None) -> Any:
    """The tokenizer in a folder, by its own class or by ``cls``, for the text encoder in another.

    Raises VideotuneError where it is damaged, does not tell two captions apart (it has no vocabulary then), or has more
    tokens than the encoder's table has rows.
    """
    tokenizer = pretrained(cls or transformers.AutoTokenizer, folder)
    with explained(f"{folder} holds no tokenizer that works"):
        most = min(32, tokenizer.model_max_length)
        one, other = (tokenizer(text, truncation=True, max_length=most, verbose=False).input_ids for text in PROBES)
        last = max(tokenizer.get_vocab().values())
    if one == other:
        fault = f"its tokenizer reads {PROBES[0]!r} and {PROBES[1]!r} as the same {len(one)} tokens"
        raise VideotuneError(f"{folder}: {fault}: fetch the model again, or copy all of it")
    config = read_config(encoder / "config.json")
    # a pipeline pads with the end mark where neither the tokenizer nor its encoder names a token for it, as Llama's
    if tokenizer.pad_token is None and (tokenizer.eos_token is None or config.get("pad_token_id") is not None):
        raise VideotuneError(f"{folder} names no token that pads captions: fetch the model again, or copy all of it")
    rows = config.get("vocab_size")
    if isinstance(rows, int) and last >= rows:
        raise VideotuneError(f"{folder} has a token {last}, and {encoder} knows {rows}: take both from one checkpoint")
    return tokenizer


def count_tokens(folder: Path, captions: Sequence[str]) -> list[int] | None:
    """How many tokens each caption has, marks included, without torch; None where the folder has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer  # light to start

    with explained(f"{path} cannot be read"):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(captions))]
