"""The configs of published base models, which come with videotune, so that a plan needs no network."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from videotune.errors import VideotuneError


class NotHere(VideotuneError):
    """A base model that is neither a folder nor in the Hub's cache, and cannot be fetched."""


HOME = Path(str(resources.files("videotune") / "assets" / "models"))
"""A folder in diffusers layout for each model, of configs alone; ``index.json`` says which base model names mean it."""


def published(name: str) -> Path | None:
    """The folder of configs of a base model, by its Hub id or by the name of its folder here; None where there is none."""
    known: dict[str, str] = json.loads((HOME / "index.json").read_text(encoding="utf-8"))
    folder = HOME / known.get(name, name)
    return folder if name in {*known, *known.values()} else None
