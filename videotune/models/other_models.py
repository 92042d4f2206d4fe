"""Models that videotune does not train, recognised by what names them or by their
weights.

A config, file or repository of such a model is refused by its name, instead of being
taken for a model that is spelled like it.
"""

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.models.base import FAMILIES
from videotune.models.discovery import import_families

LONGEST_NAME = 1000
"""Characters of a name that are looked at."""


class NotTrained(VideotuneError):
    """The model is one that videotune does not train."""


@lru_cache
def _models() -> Sequence[dict[str, Any]]:
    models: list[dict[str, Any]] = read_json(
        Path(__file__).with_name("other_models.json")
    )
    return models


def letters_of(name: str) -> str:
    """Return a model's name without what people spell differently: case, blanks and
    dashes.
    """
    return re.sub(r"[-_ ]", "", name[:LONGEST_NAME].lower())


def other_model_of_name(name: str) -> str | None:
    """Return the model that a name, Hub id or path stands for; None if it is unknown or
    trained here.

    Of a path, only the last two parts count: folders above them are the user's.
    """
    parts = re.split(r"[/\\]", name)
    return _match("names", [letters_of(part) for part in parts[-2:]])


def other_model_of_pipeline(class_name: str) -> str | None:
    """Return the model that a pipeline's class in diffusers samples."""
    return _match("pipelines", [class_name])


def other_model_of_keys(keys: Collection[str]) -> str | None:
    """Return the model whose weights have keys that no trained model's weights have."""
    return _match("keys", keys)


def _match(field: str, texts: Collection[str]) -> str | None:
    for model in _models():
        pattern = model.get(field)
        if pattern is None:
            continue
        if any(re.search(pattern, text) for text in texts):
            return str(model["title"])
    return None


def trained_models() -> str:
    """Return what videotune trains, as people call it."""
    import_families()
    return ", ".join(FAMILIES[name].series for name in sorted(FAMILIES))


def refuse_other_model(title: str | None, where: str) -> None:
    """Raise NotTrained if a model was recognised that is not trained.

    Args:
        title: what one of the functions above returned.
        where: the file or key that names the model.
    """
    if title is not None:
        raise not_trained(title, where)


def not_trained(title: str, where: str = "") -> NotTrained:
    """Return the error for a model that is not trained.

    Args:
        title: the model's name.
        where: the file or key that names it.
    """
    start = f"{where}: " if where else ""
    return NotTrained(
        f"{start}videotune does not train {title} (trains: {trained_models()})"
    )
