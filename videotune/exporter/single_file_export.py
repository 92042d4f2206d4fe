"""Export a fine-tuned transformer as one file in the layout that ComfyUI reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from videotune.exporter.formats import (
    Exported,
    check_finite,
    check_same,
    refuse_overflow,
    write_verified,
)
from videotune.exporter.full import StateDict, cast_weights
from videotune.models import single_file
from videotune.models.base import DiffusersModel
from videotune.models.key_names import KeyRules, rename_key
from videotune.models.part_check import check_part

READER = "videotune, as a base model"


def export_single_file(
    family: DiffusersModel,
    expert: str,
    state: StateDict,
    base: Path,
    path: Path,
    facts: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> Exported:
    """Write a transformer with trained weights to one file, and read it back.

    Args:
        family: the family of the model.
        expert: the expert that ``state`` belongs to.
        state: the trained weights.
        base: the base model's folder.
        path: the file.
        facts: written into the header.
        dtype: the dtype of the weights, except those that diffusers keeps in float32.
            None: the run's.

    Raises:
        VideotuneError: for NaN, for weights that the dtype cannot hold, and if the
            weights read back differently.
    """
    check_finite("model", state)
    dtype = dtype or family.dtype
    part = family.spec.part_of(expert)
    model: Any = family.skeleton(expert)
    weights = cast_weights(
        model, dtype, state, base / part, family.weight_changes.get(part)
    )
    refuse_overflow(state, {name: weights[name] for name in state}, dtype)
    rules = family.single_file_names()
    assert rules is not None, "check_formats refuses it"

    def verify(written_path: Path) -> tuple[float, str]:
        sources = check_part(type(model), base / part, model, files=[written_path])
        check_same(weights, single_file.tensors(sources), path, needed=weights)
        return 0.0, READER

    return write_verified(
        format="comfyui",
        path=path,
        modules=len(state),
        tensors=in_one_layout(weights, rules),
        facts=facts,
        verify=verify,
    )


def in_one_layout(weights: Mapping[str, Tensor], rules: KeyRules) -> dict[str, Tensor]:
    """Return weights by a layout's names; those that it joins are joined along rows.

    For the form of the rules see ``single_file.find_sources``.
    """
    pieces: dict[str, dict[int, Tensor]] = {}
    for name, weight in weights.items():
        key, _, rows = rename_key(name, rules).partition("#")
        numbers, _, _ = rows.partition("/")
        places = [int(number) for number in numbers.split(",")] if numbers else [0]
        chunks = weight.chunk(len(places))
        pieces.setdefault(key, {}).update(zip(places, chunks, strict=True))

    joined = {}
    for key, chunks_by_place in pieces.items():
        chunks_in_order = [chunks_by_place[place] for place in sorted(chunks_by_place)]
        is_single = len(chunks_in_order) == 1
        joined[key] = chunks_in_order[0] if is_single else torch.cat(chunks_in_order)
    return joined
