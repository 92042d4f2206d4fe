"""New tokens' rows as a file that others read, and reading such files.

diffusers' form is one tensor under the token, (n, D); ComfyUI looks for a key of the text encoder's own, in a file whose
name is the word. Our own facts stand in the header under the key ``videotune``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.config.schema import token_names
from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.formats import Exported, check_finite, check_same, failed, write_verified
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = "emb_params"
"""The key of rows in files that name neither a token nor an encoder; the file's name is the token."""


def export_embedding(
    family: Family, format: str, rows: Mapping[str, Tensor], token: str, path: Path, facts: Mapping[str, Any]
) -> list[Exported]:
    """Write the rows (n, D) of each text encoder, float32, and read every file back; ``path`` is without its ending.

    In diffusers' form each encoder has a file; where there are several, its name ends in the encoder's. Raises
    VideotuneError for rows that are not finite, and where a file does not read back as it was written.
    """
    check_finite("new tokens' rows", rows)
    whole = {name: value.detach().cpu().float().contiguous() for name, value in rows.items()}
    keys = family.embedding_keys()[format]
    parts = [whole] if keys else [{name: value} for name, value in whole.items()]
    done = []
    for part in parts:
        (name, value), *_ = part.items()
        file = path.with_name(f"{path.name}{f'-{name}' if len(parts) > 1 else ''}.safetensors")
        own = {**facts, "token": token} | ({} if keys else {"text_encoder": name})
        tensors = {keys[key]: x for key, x in part.items()} if keys else {token: value}
        tokenizer = None if keys else family.tokenizers()[name]
        verify = partial(_verify, family, token, part, tokenizer)
        done.append(write_verified(format, file, len(part), tensors, own, verify))
    return done


def _verify(family: Family, token: str, rows: Mapping[str, Tensor], tokenizer: Any, path: Path) -> tuple[float, str]:
    """Read a file back, with a tokenizer by diffusers too; VideotuneError where its token or its rows are others."""
    named, found = read_embedding(family, path)
    if named != token:
        raise failed(path, f"its token is {named!r}")
    check_same(rows, found.items(), path)
    if tokenizer is None:
        return 0.0, "safetensors, by the key that ComfyUI asks for"
    (own,) = rows.values()
    _read_by_diffusers(tokenizer, path, token, own)
    return 0.0, "diffusers load_textual_inversion"


def _read_by_diffusers(tokenizer: Any, path: Path, token: str, rows: Tensor) -> None:
    """VideotuneError where diffusers' own reader finds other tokens or rows in a file."""
    from diffusers.loaders.textual_inversion import TextualInversionLoaderMixin as Reader
    from diffusers.loaders.textual_inversion import load_textual_inversion_state_dicts

    (state,) = load_textual_inversion_state_dicts([str(path.parent)], weight_name=path.name)
    named = Reader._retrieve_tokens_and_embeddings([None], [state], tokenizer)
    found = zip(*Reader._extend_tokens_and_embeddings(*named, tokenizer), strict=True)
    check_same(dict(zip(token_names(token, len(rows)), rows, strict=True)), found, path)


def read_embedding(family: Family, path: Path) -> tuple[str, dict[str, Tensor]]:
    """The token of a file, and the rows (n, D) of each text encoder in it, float32.

    Read are diffusers' form (one tensor under its token), ComfyUI's (a key for each encoder) and one with the plain key
    ``emb_params``; where no token stands in the file, its name is the token. Raises VideotuneError for another file.
    """
    if not path.is_file():
        raise VideotuneError(f"no such file of new tokens: {path}")
    file = AdapterFile(path)
    facts = file.facts
    tensors = {key: value.float()[None] if value.ndim == 1 else value.float() for key, value in file.tensors.items()}
    encoders = {key: name for keys in family.embedding_keys().values() for name, key in keys.items()}
    token = facts.get("token", "-".join(path.stem.split()))
    if tensors and set(tensors) <= set(encoders):
        return token, {encoders[key]: value for key, value in tensors.items()}
    names = list(family.text_skeletons())
    own = facts.get("text_encoder", names[0])
    if len(tensors) != 1 or own not in names or next(iter(tensors.values())).ndim != 2:
        keys = ", ".join(sorted(tensors)[:3])
        raise VideotuneError(f"{path} holds no new tokens of {family.spec.title}: it has the keys {keys}")
    ((key, value),) = tensors.items()
    return (token if key == PLAIN else key), {own: value}
