"""New tokens' rows as a file that others read, and reading such files.

diffusers' form is one tensor under the token, (n, D); ComfyUI looks for a key of the text encoder's own, in a file whose
name is the word. Our own facts stand in the header under the key ``videotune``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.config.schema import token_names
from videotune.errors import VideotuneError
from videotune.export.adapter_file import facts_in, read_tensors
from videotune.export.formats import digest_of
from videotune.export.lora import Exported
from videotune.files import write_whole
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
    if any(not bool(value.isfinite().all()) for value in rows.values()):
        raise VideotuneError("the new tokens' rows are NaN or infinite: they are not exported")
    whole = {name: value.detach().cpu().float().contiguous() for name, value in rows.items()}
    keys = family.embedding_keys()[format]
    if keys:
        file = path.with_name(f"{path.name}.safetensors")
        _write(file, {keys[name]: value for name, value in whole.items()}, {**facts, "token": token})
        return [
            Exported(
                format,
                file,
                len(whole),
                _difference(family, file, whole, token),
                "safetensors, by the key that ComfyUI asks for",
            )
        ]
    done = []
    for name, value in whole.items():
        file = path.with_name(f"{path.name}{f'-{name}' if len(whole) > 1 else ''}.safetensors")
        _write(file, {token: value}, {**facts, "token": token, "text_encoder": name})
        _read_by_diffusers(family.tokenizers()[name], file, token, value)
        off = _difference(family, file, {name: value}, token)
        done.append(Exported(format, file, 1, off, "diffusers load_textual_inversion"))
    return done


def _write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    facts = {**facts, "digest": digest_of(tensors)}
    header = {"format": "pt", "videotune": json.dumps(facts, ensure_ascii=False)}
    write_whole(path, lambda aside: save_file(dict(tensors), aside, metadata=header))


def _read_by_diffusers(tokenizer: Any, path: Path, token: str, rows: Tensor) -> None:
    """VideotuneError where diffusers' own reader finds other tokens or rows in a file."""
    from diffusers.loaders.textual_inversion import TextualInversionLoaderMixin as Reader
    from diffusers.loaders.textual_inversion import load_textual_inversion_state_dicts

    (state,) = load_textual_inversion_state_dicts([str(path.parent)], weight_name=path.name)
    named = Reader._retrieve_tokens_and_embeddings([None], [state], tokenizer)
    tokens, found = Reader._extend_tokens_and_embeddings(*named, tokenizer)
    same = all(bool((a == b).all()) for a, b in zip(found, rows, strict=True))
    if tuple(tokens) != token_names(token, len(rows)) or not same:
        raise VideotuneError(
            f"{path}: diffusers reads {len(found)} rows of {tokens[:1]} as something else: not exported"
        )


def _difference(family: Family, path: Path, rows: Mapping[str, Tensor], token: str) -> float:
    """0.0: what is read back is what was written; VideotuneError where it is not."""
    named, found = read_embedding(family, path)
    if (
        named != token
        or set(found) != set(rows)
        or any(not bool((found[name] == value).all()) for name, value in rows.items())
    ):
        raise VideotuneError(f"{path} reads back as something else: not exported")
    return 0.0


def read_embedding(family: Family, path: Path) -> tuple[str, dict[str, Tensor]]:
    """The token of a file, and the rows (n, D) of each text encoder in it, float32.

    Read are diffusers' form (one tensor under its token), ComfyUI's (a key for each encoder) and one with the plain key
    ``emb_params``; where no token stands in the file, its name is the token. Raises VideotuneError for another file.
    """
    if not path.is_file():
        raise VideotuneError(f"no such file of new tokens: {path}")
    found, header = read_tensors(path)
    facts = facts_in(header, path)
    tensors = {key: value.float()[None] if value.ndim == 1 else value.float() for key, value in found.items()}
    encoders = {key: name for keys in family.embedding_keys().values() for name, key in keys.items()}
    token = facts.get("token", "-".join(path.stem.split()))
    if tensors and set(tensors) <= set(encoders):
        return token, {encoders[key]: value for key, value in tensors.items()}
    names = list(family.text_skeletons())
    own = facts.get("text_encoder", names[0])
    if len(tensors) != 1 or own not in names or next(iter(tensors.values())).ndim != 2:
        raise VideotuneError(
            f"{path} holds no new tokens of {family.spec.title}: it has the keys {', '.join(sorted(tensors)[:3])}"
        )
    ((key, value),) = tensors.items()
    return (token if key == PLAIN else key), {own: value}
