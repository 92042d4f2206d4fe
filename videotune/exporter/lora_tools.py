"""Convert, merge and resize LoRA files.

A file takes its name only after ΔW of every module in it, read back like any other
file, matches the intended update to 1e-6.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from videotune.console import bar, exactly
from videotune.errors import VideotuneError
from videotune.exporter import lora_factors
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.adapter_modules import AdapterModule, modules_by_path
from videotune.exporter.base_detection import Base, detect_expert, open_adapter
from videotune.exporter.formats import TOLERANCE, verification_error, write_verified
from videotune.exporter.lora_factors import Factors
from videotune.exporter.lora_inspect import open_modules
from videotune.exporter.lora_target import Target, refuse_weights
from videotune.exporter.lora_write import Modules, kind_of_modules, write_form
from videotune.files import whole_folder, write_json
from videotune.text import counted

STALE_HEADER_KEYS = (
    "lora_adapter_metadata",
    "lora_config",
    "adapter_config",
    "videotune",
    "format",
    "sshs_",
    "modelspec.hash",
)
"""Beginnings of header keys that would be wrong for another file's tensors."""

TENSOR_FACTS = ("digest", "use", "alpha", "rank", "variant")
"""Facts in our header that describe the tensors and the form of one file."""

ZERO_SUM = 1e-12
"""A sum with at most this share of its summands' norms is the rounding error of zero.
"""


def convert(path: Path, target: Target) -> list[str]:
    """Write an adapter in another form.

    Alpha is kept if the form can hold it, and otherwise multiplied into a factor. This
    and the functions below return sentences about the file that was written.
    """
    target.check(path)
    file, base, modules = open_modules(path, target.base, target.family)
    header = {
        key: value
        for key, value in file.header.items()
        if not key.startswith(STALE_HEADER_KEYS)
    }
    facts = collect_facts([file], base, "convert")
    return save_adapter(base, modules, target, facts, header=header)


def merge(
    paths: Sequence[Path], weights: Sequence[float], rank: int | None, target: Target
) -> list[str]:
    """Write the weighted sum of LoRAs: exactly (their ranks add up), or cut to a rank."""
    return combine_adapters(
        paths=paths,
        weights=weights,
        choose_rank=None if rank is None else lambda sigma: rank,
        action="merge",
        target=target,
    )


def resize(path: Path, rank: int | None, error: float, target: Target) -> list[str]:
    """Write the nearest LoRA of a lower rank.

    Args:
        path: the source.
        rank: the new rank; None: per module the lowest one that keeps to ``error``.
        error: the part of ‖ΔW‖ that may be lost.
        target: the file to write.
    """

    def choose_rank(sigma: Tensor) -> int:
        return rank or lora_factors.rank_for(sigma, error)

    return combine_adapters(
        paths=[path],
        weights=(),
        choose_rank=choose_rank,
        action="resize",
        target=target,
    )


RankChooser = Callable[[Tensor], int]
"""The singular values of a module -> its rank."""


def combine_adapters(
    paths: Sequence[Path],
    weights: Sequence[float],
    choose_rank: RankChooser | None,
    action: str,
    target: Target,
) -> list[str]:
    """Write the weighted sum of LoRAs of one base model and one expert.

    Args:
        paths: the sources.
        weights: one per source, one for all, or none (each counts 1).
        choose_rank: the rank of each module; None: all ranks are kept.
        action: "merge" or "resize", for the progress bar and the header.
        target: the file to write.

    Raises:
        VideotuneError: for other kinds of adapter, whose update is not a product of two
            factors.
    """
    refuse_weights(paths, weights)
    target.check(*paths)

    first_file, base, first_modules = open_modules(paths[0], target.base, target.family)
    files = [first_file, *(open_adapter(path) for path in paths[1:])]
    adapters: list[Modules] = [first_modules]
    for file in files[1:]:
        adapters.append(modules_by_path(base.family, base.net, file))

    experts = {detect_expert(file)[0] for file in files}
    if len(experts) > 1:
        raise VideotuneError(
            f"{paths[0]} and the others belong to different experts;"
            " merge the files of one expert"
        )

    if not weights:
        file_weights = [1.0] * len(paths)
    elif len(weights) == 1:
        file_weights = list(weights) * len(paths)
    else:
        file_weights = list(weights)

    sums = _sum_modules(files, adapters, file_weights)
    if not sums:
        raise VideotuneError(
            f"--weight: with these weights, the {len(paths)} files add up to zero; give others"
        )
    modules, notes = truncate_modules(sums, choose_rank, action)
    return save_adapter(
        base, modules, target, collect_facts(files, base, action), notes
    )


def _sum_modules(
    files: Sequence[AdapterFile], adapters: Sequence[Modules], weights: Sequence[float]
) -> dict[str, Factors]:
    """Return the factors of each module's weighted sum, without the sums that are zero."""
    summands: dict[str, list[Factors]] = {}
    for file, modules, weight in zip(files, adapters, weights, strict=True):
        kind = kind_of_modules(modules)
        if kind != "LORA":
            raise VideotuneError(
                f"{file.path} is {kind}, but merge and resize take only LoRA"
                " (a product of A and B)"
            )
        for name, module in modules.items():
            summands.setdefault(name, []).append(
                lora_factors.factors_of(module, weight)
            )

    sums = {}
    for name, module_summands in summands.items():
        module_sum = lora_factors.sum_factors(*module_summands)
        zero_norm = ZERO_SUM * sum(map(lora_factors.product_norm, module_summands))
        # Sums that are infinite or NaN stay: the check of the written file reports
        # them.
        is_zero = lora_factors.product_norm(module_sum) <= zero_norm < math.inf
        if not is_zero:
            sums[name] = module_sum
    return sums


def lora_module(name: str, factors: Factors) -> AdapterModule:
    """Return a LoRA with these factors and a scale of 1."""
    b, a = factors
    return AdapterModule(
        name=name,
        paths=(name,),
        parts={"lora_A": a, "lora_B": b},
        scale=1.0,
        alpha_source="tensor",
    )


def truncate_modules(
    factors: Mapping[str, Factors], choose_rank: RankChooser | None, action: str
) -> tuple[dict[str, AdapterModule], list[str]]:
    """Cut the factors of each module to a rank by their singular values.

    Returns:
        The LoRA's modules, and a sentence with the ranks and the error.
    """
    lost_square = 0.0
    total_square = 0.0
    truncated = dict(factors)
    with bar(action) as progress:
        if choose_rank is not None:
            for done, (name, module_factors) in enumerate(factors.items()):
                progress.update(done, len(factors), name)
                svd = lora_factors.svd_of(module_factors)
                sigma = svd[1]
                rank = choose_rank(sigma)
                truncated[name] = lora_factors.truncate_svd(svd, rank)
                lost_square += float(sigma[rank:].square().sum())
                total_square += float(sigma.square().sum())

    ranks = [len(a) for _, a in truncated.values()]
    rank_range = f"{min(ranks)}"
    if min(ranks) < max(ranks):
        rank_range = f"{min(ranks)} to {max(ranks)}"
    lost_share = lost_square / total_square if total_square else 0.0
    error = math.sqrt(lost_share)
    note = f"rank {rank_range}; relative error of ΔW {error:.2e}"
    return {name: lora_module(name, pair) for name, pair in truncated.items()}, [note]


def collect_facts(
    files: Sequence[AdapterFile], base: Base, action: str
) -> dict[str, Any]:
    """Return the facts for a new file's header: those of its only source, and what was
    done.
    """
    facts: dict[str, Any] = {}
    if len(files) == 1:
        source_facts = files[0].facts.items()
        facts = {key: value for key, value in source_facts if key not in TENSOR_FACTS}

    facts["family"] = base.family.spec.name
    facts["from"] = [file.path.name for file in files]
    facts["made"] = f"lora {action}"
    expert, _ = detect_expert(files[0])
    if expert:
        facts["expert"] = expert
    return facts


def save_adapter(
    base: Base,
    modules: Modules,
    target: Target,
    facts: dict[str, Any],
    notes: Sequence[str] = (),
    header: Mapping[str, str] | None = None,
) -> list[str]:
    """Write an adapter in the target's form, read it back and compare ΔW of each
    module.

    Raises:
        VideotuneError: if the form cannot hold the adapter, or it reads back
            differently. Nothing is written then.
    """
    output = write_form(base.family, base.net, modules, target.form)
    tensors = {}
    for name, value in output.tensors.items():
        stored = value.float() if value.dtype == torch.float64 else value
        tensors[name] = stored.clone(memory_format=torch.contiguous_format)

    write = partial(
        write_verified,
        modules=len(modules),
        tensors=tensors,
        facts=facts,
        verify=partial(compare_adapters, base, modules, target.path),
        header={**(header or {}), **output.header},
    )
    target.path.parent.mkdir(parents=True, exist_ok=True)
    if output.settings is None:
        exported = write(target.form, target.path)
    else:
        with whole_folder(target.path) as temporary_folder:
            write_json(temporary_folder / "adapter_config.json", output.settings)
            exported = write(
                target.form, temporary_folder / "adapter_model.safetensors"
            )

    error = exactly(exported.max_error)
    lines = [
        f"{target.path}: {counted(len(modules), 'module')}, read back: ΔW {error}",
        *notes,
    ]
    if output.folded:
        lines.append(
            f"alpha / rank is multiplied into the factors of {counted(output.folded, 'module')},"
            " because the form cannot store it"
        )
    return lines


def compare_adapters(
    base: Base, expected: Modules, path: Path, written_path: Path
) -> tuple[float, str]:
    """Compare ΔW of an adapter with a file.

    Args:
        base: the base model.
        expected: the adapter.
        path: the file's final name, for messages.
        written_path: the file.

    Returns:
        The largest relative difference over the modules, and the program that read the
        file.

    Raises:
        VideotuneError: if a difference exceeds 1e-6, or a module is missing.
    """
    modules = modules_by_path(base.family, base.net, AdapterFile(written_path))
    missing = sorted(set(expected) - set(modules))
    if missing:
        raise verification_error(
            path, f"{len(missing)} modules are missing, such as {missing[0]}"
        )

    max_error = 0.0
    for name, module in modules.items():
        if name in expected:
            error = lora_factors.relative_difference(expected[name], module)
        else:
            error = lora_factors.delta_norm(module)
        if not error <= TOLERANCE:
            raise verification_error(
                path, f"ΔW of {name} differs by {error:.1e} (allowed: {TOLERANCE:.0e})"
            )
        max_error = max(max_error, error)
    return max_error, "videotune"
