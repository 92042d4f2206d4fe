"""The base model that another program's config names."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.interop import files_here
from videotune.interop.rule_tables import load_rules
from videotune.model_spec import ModelSpec
from videotune.models.base_model import published, spec_for
from videotune.models.other_models import letters_of
from videotune.types import BasePlace


def base_named(names: list[Any], folder: Path) -> dict[str, str]:
    """Return videotune's keys for the base model that a config names; {} if it is not
    known.
    """
    for name in names:
        if isinstance(name, str) and files_here.is_file(
            folder / name / "model_index.json"
        ):
            return {"base_model_name": str((folder / name).absolute())}

    return known_base(" ".join(str(name) for name in names))


def known_base(text: str) -> dict[str, str]:
    """Return videotune's keys for the base model that a text names; {} if none."""
    text = re.sub(r"[/\\]", "", letters_of(text))
    for base in load_rules("bases")["bases"]:
        has_all = all(part in text for part in base["words"])
        has_excluded = any(part in text for part in base.get("not", ()))
        if has_all and not has_excluded:
            return dict(base["ours"])
    return {}


def spec_of_base(base: Mapping[str, str]) -> ModelSpec | None:
    """Return the known facts about the base model; nothing is downloaded."""
    if "family" not in base:
        return None
    name = base.get("base_model_name", "")
    folder = published(name)
    return spec_for(base["family"], BasePlace(name, folder) if folder else None)
