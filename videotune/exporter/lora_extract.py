"""Extract a LoRA from a fine-tuned model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from videotune.console import bar
from videotune.errors import VideotuneError
from videotune.exporter import lora_factors
from videotune.exporter.adapter_modules import AdapterModule
from videotune.exporter.base_detection import Base, candidate_bases
from videotune.exporter.lora_target import Target
from videotune.exporter.lora_tools import lora_module, save_adapter
from videotune.model_spec import ModelSpec
from videotune.models.base_model import place
from videotune.models.model_files import headers, some, weight_files


def extract(
    folder: Path, base_name: str, rank: int, expert: str | None, target: Target
) -> list[str]:
    """Write the LoRA of a rank that is nearest to a fine-tuned model's changes.

    Args:
        folder: the fine-tuned model, or only its transformer, in diffusers layout.
        base_name: the base model.
        rank: the LoRA's rank.
        expert: the expert to extract, for base models with two.
        target: the file to write.

    Raises:
        VideotuneError: if the weights do not have the base's architecture, or nothing
            changed.
    """
    target.check(folder)
    base = next(candidate_bases(base_name))
    spec = base.family.spec
    _check_expert(spec, base_name, expert)

    part = spec.part_of(expert)
    is_full_model = (folder / "model_index.json").is_file()
    tuned_folder = folder / part if is_full_model else folder
    base_tensors = open_tensors(place(base_name).folder / part)
    tuned_tensors = open_tensors(tuned_folder)
    _check_shapes(base_tensors, tuned_tensors, tuned_folder, base_name)

    extracted = _extract_modules(base, base_tensors, tuned_tensors, tuned_folder, rank)
    if not extracted.modules:
        raise VideotuneError(
            f"{tuned_folder} differs from {base_name} in no linear weight,"
            " so there is nothing to extract"
        )

    stored_share = extracted.stored_square / extracted.total_square
    other_share = sum(extracted.other_squares) / extracted.total_square
    notes = [
        f"{stored_share:.2%} of ‖ΔW‖² is kept at rank {rank};"
        f" a higher rank could hold {1 - stored_share - other_share:.2%} more",
        f"{other_share:.2%} no LoRA can hold: {len(extracted.other_squares)} norms, biases"
        " and other tensors that differ",
    ]
    facts: dict[str, Any] = {
        "family": spec.name,
        "from": [folder.name],
        "made": "lora extract",
        "expert": expert,
    }
    return save_adapter(base, extracted.modules, target, facts, notes)


def _check_expert(spec: ModelSpec, base_name: str, expert: str | None) -> None:
    """Raise VideotuneError unless the expert is named exactly if the base model has
    several.
    """
    names = [spec_expert.name for spec_expert in spec.experts]
    has_several = len(names) > 1
    if expert in names or (expert is None and not has_several):
        return
    remedy = "name the one to extract" if has_several else "leave it out"
    raise VideotuneError(f"--expert: {base_name} has {' and '.join(names)}; {remedy}")


def _check_shapes(
    base_tensors: Mapping[str, Any],
    tuned_tensors: Mapping[str, Any],
    tuned_folder: Path,
    base_name: str,
) -> None:
    """Raise VideotuneError if a fine-tuned model has tensors of other shapes than its
    base.
    """
    base_shapes = _shapes(base_tensors)
    tuned_shapes = _shapes(tuned_tensors)
    names = sorted({*base_shapes, *tuned_shapes})
    differing = [
        name for name in names if base_shapes.get(name) != tuned_shapes.get(name)
    ]
    if differing:
        raise VideotuneError(
            f"{tuned_folder} is not a fine-tuned {base_name}: {len(differing)} tensors"
            f" differ in shape: {some(differing)}"
        )


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(file.get_slice(name).get_shape()) for name, file in tensors.items()
    }


@dataclass
class _Extracted:
    """The changes of a fine-tuned model; the squares are of Frobenius norms."""

    modules: dict[str, AdapterModule] = field(default_factory=dict)
    total_square: float = 0.0

    stored_square: float = 0.0
    """Of the changes that the modules hold."""

    other_squares: list[float] = field(default_factory=list)
    """Of the changes of each tensor that is not a linear weight."""


def _extract_modules(
    base: Base,
    base_tensors: Mapping[str, Any],
    tuned_tensors: Mapping[str, Any],
    tuned_folder: Path,
    rank: int,
) -> _Extracted:
    """Compare the models tensor by tensor and truncate the change of each linear
    weight.
    """
    linear_weights = {
        f"{path}.weight"
        for path, module in base.net.named_modules()
        if hasattr(module, "in_features")
    }
    extracted = _Extracted()
    with bar("extract") as progress:
        for done, name in enumerate(sorted(tuned_tensors)):
            progress.update(done, len(tuned_tensors), name)
            tuned_weight = tuned_tensors[name].get_tensor(name).double()
            delta = tuned_weight - base_tensors[name].get_tensor(name).double()
            square = float(delta.square().sum())
            extracted.total_square += square
            if not math.isfinite(square):
                raise VideotuneError(
                    f"{tuned_folder}: {name} holds NaN or infinite weights, or the base does"
                )

            if square and name in linear_weights:
                path = name.removesuffix(".weight")
                module = lora_module(path, lora_factors.low_rank_factors(delta, rank))
                extracted.modules[path] = module
                extracted.stored_square += lora_factors.delta_norm(module) ** 2
            elif square:
                extracted.other_squares.append(square)
    return extracted


def open_tensors(folder: Path) -> dict[str, Any]:
    """Open a folder's weights; return the file that each tensor can be read from."""
    files = weight_files(folder)
    headers(files)  # reports a damaged file with a clear error

    tensors = {}
    for path in files:
        file = safe_open(path, "pt")
        for name in file.keys():  # noqa: SIM118 (not a dict)
            tensors[name] = file
    return tensors
