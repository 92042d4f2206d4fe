"""Facts about other trainers, and the parts of their configs that the rules need.

``trainer_rules.json`` has the keys that are read, with their defaults, and the source
of each rule.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.interop.rules import (
    Bucket,
    FrameIndices,
    NoiseLevels,
    PixelSize,
    SourceVideo,
)
from videotune.model_spec import ModelSpec

TRAINER_FACTS: Mapping[str, Any] = read_json(
    Path(__file__).with_name("trainer_rules.json")
)
"""By trainer: the sources of its rules, its keys with defaults, and numbers that depend
on the model.
"""

HUGE_NUMBER = re.compile(r"(?<![\d.])\d{7,}|inf|nan")
"""A number in a value that is larger than any meaningful one."""

ForeignSection = Any
"""A part of a config as attributes, dots as underscores; missing keys have their
defaults.
"""


@dataclass(frozen=True)
class DatasetRules:
    """The rules for clips of one dataset; ``frames`` and ``size`` are from
    ``rules.py``.
    """

    name: str
    frames: Callable[[SourceVideo], FrameIndices]
    size: Callable[[SourceVideo, int], PixelSize]
    batch: int = 1
    repeats: float = 1

    drops_rest: bool = False
    """Whether samples that do not fill a batch are left out."""

    stretches: bool = False
    """Whether frames are resized without a crop."""


@dataclass(frozen=True)
class TrainerRules:
    """A trainer's rules for a run."""

    datasets: Sequence[DatasetRules]

    noise: Callable[[Bucket], NoiseLevels | str]
    """A bucket -> its noise levels, or why they cannot be calculated."""

    scale: float = 1.0
    """alpha / rank in training."""

    read_scale: float = 1.0
    """The scale that programs apply when they read the saved file."""

    accumulation: int = 1

    findings: Sequence[tuple[str, str]] = ()
    """Kinds and sentences of what the config itself shows, whatever the clips are."""


def read_datasets(
    values: Mapping[str, Any], table: Mapping[str, Any] | None
) -> Iterator[ForeignSection]:
    """Yield the datasets of a config that have one of the keys of clip datasets."""
    if not table:
        return

    for list_key in (table["list"], table.get("also", table["list"])):
        names = {
            key[len(list_key) + 1 :].split(".")[0]
            for key in values
            if key.startswith(f"{list_key}.")
        }
        indices = sorted((name for name in names if name.isdigit()), key=int)
        for index in indices:
            prefix = f"{list_key}.{index}."
            has_clips = any(prefix + key in values for key in table["clips"])
            if has_clips:
                yield read_section(
                    values, prefix, table.get("general"), table["defaults"]
                )
        if names:
            return


def read_section(
    values: Mapping[str, Any],
    prefix: str,
    general: str | None,
    defaults: Mapping[str, Any],
) -> ForeignSection:
    """Read a part of a config.

    Args:
        values: the config by dotted keys.
        prefix: the part's prefix.
        general: the prefix of values that apply to all parts.
        defaults: the keys that are read; values get the types of their defaults.

    Raises:
        VideotuneError: for a value of another type, and for one that is too large.
    """
    section = SimpleNamespace(name=prefix[:-1])
    for key, default in defaults.items():
        value = values.get(prefix + key)
        if value is None and general is not None:
            value = values.get(general + key)
        if value is None:
            value = default

        try:
            if isinstance(default, list) and not isinstance(value, list):
                typed_value = [value]
            else:
                typed_value = type(default)(value)
        except (TypeError, ValueError) as error:
            raise VideotuneError(
                f"{prefix}{key}: {str(value)[:40]!r} is not of type {type(default).__name__}"
            ) from error
        if HUGE_NUMBER.search(str(typed_value)):
            raise VideotuneError(
                f"{prefix}{key}: {str(value)[:40]} is not a valid number of frames,"
                " pixels or samples"
            )
        setattr(section, key.replace(".", "_"), typed_value)
    return section


def model_number(trainer: str, table: str, spec: ModelSpec, default: float) -> Any:
    """Return a trainer's number for the model family, or for its spatial stride too."""
    numbers = TRAINER_FACTS[trainer][table]
    family_number = numbers.get(spec.name, default)
    return numbers.get(f"{spec.name}/{spec.rules.spatial_stride}", family_number)
