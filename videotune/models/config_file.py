"""JSON of a base model, read within bounds: what is damaged or absurd is a sentence that names file and key."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import walk_json

MOST_BYTES, DEEPEST = 64 << 20, 32
"""The largest file and the deepest nesting that are read; published indices of shards have some MB."""

_SIZES = "dim|width|height|size|channels|frames|position_embeddings|seq_len|d_model|d_ff|d_kv"
_AT_LEAST_1 = "z_dim|num_train_timesteps|(in|latent)_channels"
_BOUNDS = (
    (r"num_\w*(layers|blocks|experts)|\w*layers_per_block|block_repeats", 0, 1024),
    (rf"patch_size(_t)?|num_\w*heads|\w*compression_ratio|scale_factor_\w+|{_AT_LEAST_1}", 1, 1 << 20),
    (rf"(?!total_|use_)\w*({_SIZES})", 0, 1 << 20),
)
"""Whole numbers, or lists of them, by the key's name: least and most. Models that are published stay far below."""

_KERNELS = re.compile(r"_?(attn|experts)_implementation")
"""Keys by which transformers would fetch and run code of the Hub, where a repository stands under them."""


class ConfigFile(dict[str, Any]):
    """An object of a JSON file; a key that it lacks is a VideotuneError that names both."""

    def __init__(self, path: Path, value: dict[str, Any]) -> None:
        super().__init__(value)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise VideotuneError(f"{self.path} lacks {key!r}: take the file that comes with the checkpoint")


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a base model.

    Raises VideotuneError where the file is missing, damaged or too large, and for a value that no model has.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise VideotuneError(f"{path} has {path.stat().st_size:,} bytes: it is no config of a model")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise VideotuneError(f"the base model is incomplete: {path} is missing") from None
    except UnicodeDecodeError as error:
        raise VideotuneError(f"{path} is not valid JSON: it is not UTF-8 text. Fetch it again") from error
    return ConfigFile(path, parse_object(text, str(path)))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object that a file from elsewhere holds; ``where`` begins the VideotuneError of one that is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise VideotuneError(f"{where} is not valid JSON: {error.msg} in line {error.lineno}") from error
    except (RecursionError, ValueError) as error:  # deeper than Python reads, a number of thousands of digits
        raise VideotuneError(f"{where} is not valid JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise VideotuneError(f"{where} holds {json.dumps(value)[:40]} where an object {{…}} is expected")
    _check(value, where)
    return value


def _check(value: Any, where: str) -> None:
    """Raise VideotuneError for a value beyond its bounds, by the name of its key, and whatever it holds."""
    for path, one in walk_json(value):
        key = next((part for part in reversed(path) if isinstance(part, str)), "")
        if len(path) > DEEPEST:
            raise VideotuneError(f"{where}: {key!r} is nested more than {DEEPEST} deep: it is no config of a model")
        if isinstance(one, float) and not math.isfinite(one):
            raise VideotuneError(f"{where}: {key} is {one}, no finite number")
        if isinstance(one, str) and _KERNELS.fullmatch(key) and "/" in one:
            raise VideotuneError(f"{where}: {key} names code of the Hub ({one[:80]!r}), which videotune never runs")
        bounds = ((least, most) for pattern, least, most in _BOUNDS if re.fullmatch(pattern, key))
        for least, most in bounds if not (one is None or isinstance(one, dict | list)) else ():
            number = isinstance(one, int) or (isinstance(one, float) and one.is_integer())
            if isinstance(one, bool) or not number or not least <= one <= most:
                raise VideotuneError(
                    f"{where}: {key} is {str(one)[:40]!r}, and must be a whole number from {least} to {most:,}"
                )
            break  # the first pattern that fits
