"""LoRA files made of others: converted, merged, resized, or extracted from a fine-tuned model; each is read back.

No file takes its name before ΔW of every module that it gives, read as any file is, is what was meant to 1e-6.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from videotune.console import bar, exactly
from videotune.errors import VideotuneError
from videotune.exporter import lora_factors as maths
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.adapter_modules import Module, modules_in
from videotune.exporter.formats import TOLERANCE, failed, write_verified
from videotune.exporter.lora_inspect import Base, bases, expert_of, open_file, open_modules
from videotune.exporter.lora_write import Modules, kind_in, written
from videotune.files import whole_folder, write_json
from videotune.models.base_model import place
from videotune.models.model_files import headers, some, weight_files

STALE = (
    "lora_adapter_metadata",
    "lora_config",
    "adapter_config",
    "videotune",
    "format",
    "sshs_",
    "modelspec.hash",
)
"""How keys of a header begin that would not be true of another file's tensors."""

OWN = ("digest", "use", "alpha", "rank", "variant")
"""Facts of a file of ours that are of its tensors and its form."""

NOTHING = 1e-12
"""The share of the summands' norms at which a sum is what rounding leaves of zero."""


@dataclass(frozen=True)
class Target:
    """Where a result goes and in which form; ``base``, ``family``: what the sources are for, where they do not say it."""

    path: Path
    form: str = "diffusers"
    base: str | None = None
    family: str | None = None
    overwrite: bool = False

    def check(self, *sources: Path) -> None:
        """Raise VideotuneError for a name that is taken."""
        there = self.path.exists()
        form = self.form
        real = os.path.realpath(
            self.path
        )  # Path.resolve raises RuntimeError for a link to itself
        fault = "is one of the sources" if real in map(os.path.realpath, sources) else ""
        fault = fault or (
            "is there already: --overwrite replaces it" if there and not self.overwrite else ""
        )
        if form == "peft" and there and not (self.path / "adapter_config.json").is_file():
            fault = "is no folder of PEFT's: it is not replaced"
        if form != "peft" and (self.path.suffix != ".safetensors" or self.path.is_dir()):
            fault = "must be a file called .safetensors"
        if fault:
            raise VideotuneError(f"--out {self.path} {fault}; give another name")


def convert(path: Path, target: Target) -> list[str]:
    """The same adapter in another form; alpha is kept where the form can hold it, and else multiplied into a factor.

    The answer of this and of the functions below is what was written, in words.
    """
    target.check(path)
    file, base, modules = open_modules(path, target.base, target.family)
    kept = {key: value for key, value in file.header.items() if not key.startswith(STALE)}
    return save(base, modules, target, facts_of([file], base, "convert"), header=kept)


def merge(
    paths: Sequence[Path], weights: Sequence[float], rank: int | None, target: Target
) -> list[str]:
    """The sum of several LoRAs, each times its weight: exactly, their ranks added; or the nearest of a rank."""
    return combine(
        paths, weights, None if rank is None else lambda sigma: rank, "merge", target
    )


def resize(path: Path, rank: int | None, error: float, target: Target) -> list[str]:
    """The nearest LoRA of a rank, or of the lowest rank in each module whose part of ‖ΔW‖ that is lost is ``error``."""
    return combine(
        [path], (), lambda sigma: rank or maths.rank_for(sigma, error), "resize", target
    )


Ranks = Callable[[Tensor], int] | None
"""From the singular values of a module to its rank; None: all are kept."""


def combine(
    paths: Sequence[Path], weights: Sequence[float], ranks: Ranks, made: str, target: Target
) -> list[str]:
    """The sum of LoRAs of one base model and one expert, each times its weight, cut to a rank in each module.

    Raises VideotuneError for other kinds of adapter, whose update is no product of two factors.
    """
    if len(weights) not in (0, 1, len(paths)) or not all(
        math.isfinite(weight) for weight in weights
    ):
        told = f"{', '.join(map(str, weights))} for {len(paths)} files"
        raise VideotuneError(f"--weight: {told}: give a finite number for each, or one for all")
    target.check(*paths)
    first, base, modules = open_modules(paths[0], target.base, target.family)
    files = [first, *map(open_file, paths[1:])]
    found = [modules, *(modules_in(base.family, base.net, file) for file in files[1:])]
    if len({expert_of(file)[0] for file in files}) > 1:
        raise VideotuneError(
            f"{paths[0]} and the others belong to different experts: merge the files of one expert"
        )
    sums: dict[str, list[maths.Factors]] = {}
    for file, own, strength in zip(
        files, found, list(weights) * len(paths) or [1.0] * len(paths), strict=False
    ):
        if (kind := kind_in(own)) != "LORA":
            raise VideotuneError(
                f"{file.path} is {kind}: merge and resize take LoRA alone, a product of A and B"
            )
        for name, module in own.items():
            sums.setdefault(name, []).append(maths.factors(module, strength))
    whole = {
        name: (maths.total(*many), sum(map(maths.norm_of, many))) for name, many in sums.items()
    }
    pairs = {
        name: pair
        for name, (pair, size) in whole.items()
        if not maths.norm_of(pair) <= NOTHING * size < math.inf
    }
    if not pairs:
        raise VideotuneError(
            f"--weight: with these, {len(paths)} files add up to nothing: give others"
        )
    cut, notes = of_rank(pairs, ranks, made)
    return save(base, cut, target, facts_of(files, base, made), notes)


def module_of(name: str, pair: maths.Factors) -> Module:
    """A LoRA of factors whose scale is 1."""
    return Module(name, (name,), {"lora_A": pair[1], "lora_B": pair[0]}, 1.0, "tensor")


def of_rank(
    pairs: Mapping[str, maths.Factors], ranks: Ranks, doing: str
) -> tuple[dict[str, Module], list[str]]:
    """LoRAs of factors, cut to a rank by their singular values (None: as they are), and the error in words."""
    lost = 0.0
    whole = 0.0
    kept = dict(pairs)
    with bar(doing) as progress:
        for done, (name, pair) in enumerate(pairs.items() if ranks is not None else ()):
            progress.update(done, len(pairs), name)
            svd = maths.decomposed(pair)
            kept[name] = maths.cut(svd, rank := ranks(svd[1]) if ranks is not None else 0)
            lost = lost + float(svd[1][rank:].square().sum())
            whole = whole + float(svd[1].square().sum())
    found = [len(pair[1]) for pair in kept.values()]
    span = f"{min(found)} to {max(found)}" if min(found) < max(found) else f"{min(found)}"
    words = f"rank {span}; relative error of ΔW {math.sqrt(lost / (whole or 1.0)):.2e}"
    return {name: module_of(name, pair) for name, pair in kept.items()}, [words]


def facts_of(files: Sequence[AdapterFile], base: Base, made: str) -> dict[str, Any]:
    """What a file says of itself: what its source said, and what was done to it."""
    facts = (
        {key: value for key, value in files[0].facts.items() if key not in OWN}
        if len(files) == 1
        else {}
    )
    told = {
        "family": base.family.spec.name,
        "from": [file.path.name for file in files],
        "made": f"lora {made}",
    }
    return facts | told | ({"expert": expert} if (expert := expert_of(files[0])[0]) else {})


def save(
    base: Base, modules: Modules, target: Target, facts: dict[str, Any], notes: Sequence[str] = (),
    header: Mapping[str, str] | None = None,
) -> list[str]:  # fmt: skip
    """Write an adapter in the target's form and read it back: ΔW of each module is then the one that was meant.

    Raises VideotuneError where the form cannot hold it, or it reads back as something else; then nothing is written.
    """
    found = written(base.family, base.net, modules, target.form)
    alone = partial(torch.clone, memory_format=torch.contiguous_format)
    tensors = {
        name: alone(x.float() if x.dtype == torch.float64 else x)
        for name, x in found.tensors.items()
    }
    verify = partial(compare, base, modules, target.path)
    write = partial(
        write_verified, modules=len(modules), tensors=tensors, facts=facts, verify=verify
    )
    write = partial(write, header={**(header or {}), **found.header})
    target.path.parent.mkdir(parents=True, exist_ok=True)
    if found.settings is None:
        done = write(target.form, target.path)
    else:
        with whole_folder(target.path) as aside:
            write_json(aside / "adapter_config.json", found.settings)
            done = write(target.form, aside / "adapter_model.safetensors")
    folded = [
        f"alpha / rank is in the factors of {found.folded} modules: the form has no place for it"
    ][: found.folded]
    return [
        f"{target.path}: {len(modules)} modules, read back: ΔW {exactly(done.max_error)}",
        *notes,
        *folded,
    ]


def compare(base: Base, wanted: Modules, path: Path, aside: Path) -> tuple[float, str]:
    """The largest relative difference of ΔW between an adapter and a file, and who has read the file.

    Raises VideotuneError where it is beyond 1e-6, or a module is missing.
    """
    found = modules_in(base.family, base.net, AdapterFile(aside))
    worst = 0.0
    if lacking := sorted(set(wanted) - set(found)):
        raise failed(path, f"{len(lacking)} modules are missing, such as {lacking[0]}")
    for name, module in found.items():
        off = maths.difference(wanted[name], module) if name in wanted else maths.norm(module)
        if not off <= TOLERANCE:
            raise failed(path, f"ΔW of {name} differs by {off:.1e} (allowed: {TOLERANCE:.0e})")
        worst = max(worst, off)
    return worst, "videotune"


def extract(
    folder: Path, base_name: str, rank: int, expert: str | None, target: Target
) -> list[str]:
    """The LoRA of a rank that is nearest to what fine-tuning has changed in a model, tensor by tensor.

    ``folder``: in diffusers layout, whole or its transformer's alone. Raises VideotuneError where its weights are not
    those of the base's architecture, or nothing was changed.
    """
    target.check(folder)
    found = next(bases(base_name))
    base = found
    spec = found.family.spec
    known = [own.name for own in spec.experts]
    if expert not in (known if len(known) > 1 else (None, *known)):
        remedy = "name the one to extract" if len(known) > 1 else "leave it out"
        raise VideotuneError(f"--expert: {base_name} has {' and '.join(known)}: {remedy}")
    part = spec.part_of(expert)
    tuned = folder / part if (folder / "model_index.json").is_file() else folder
    before = opened(place(base_name).folder / part)
    after = opened(tuned)
    shapes = [
        {name: tuple(held[name].get_slice(name).get_shape()) for name in held}
        for held in (before, after)
    ]
    odd = [
        name for name in sorted({*before, *after}) if shapes[0].get(name) != shapes[1].get(name)
    ]
    if odd:
        raise VideotuneError(
            f"{tuned} is no fine-tuned {base_name}: {len(odd)} tensors differ in shape: {some(odd)}"
        )
    linear = {
        f"{name}.weight"
        for name, module in base.net.named_modules()
        if hasattr(module, "in_features")
    }
    modules = {}
    whole = 0.0
    apart = []
    kept = 0.0
    with bar("extract") as progress:
        for done, name in enumerate(sorted(after)):
            progress.update(done, len(after), name)
            delta = (
                after[name].get_tensor(name).double() - before[name].get_tensor(name).double()
            )
            whole += (square := float(delta.square().sum()))
            if not math.isfinite(square):
                raise VideotuneError(
                    f"{tuned}: {name} holds NaN or infinite weights, or the base does"
                )
            if square and name in linear:
                path = name.removesuffix(".weight")
                modules[path] = module_of(path, maths.truncated(delta, rank))
                kept += maths.norm(modules[path]) ** 2
            elif square:
                apart.append(square)
    if not modules:
        raise VideotuneError(
            f"{tuned} differs from {base_name} in no linear weight: there is nothing to extract"
        )
    other = sum(apart) / whole
    many = len(apart)
    notes = [
        f"{kept / whole:.2%} of ‖ΔW‖² is kept at rank {rank}; a higher rank could hold {1 - kept / whole - other:.2%} more",
        f"{other:.2%} no LoRA can hold: {many} norms, biases and other tensors that differ",
    ]
    facts: dict[str, Any] = {
        "family": spec.name,
        "from": [folder.name],
        "made": "lora extract",
        "expert": expert,
    }
    return save(base, modules, target, facts, notes)


def opened(folder: Path) -> dict[str, Any]:
    """The file of each tensor of a folder, open for one tensor at a time."""
    headers(weight_files(folder))  # says what is wrong with a damaged one
    return {
        name: file
        for path in weight_files(folder)
        for file in [safe_open(path, "pt")]
        for name in file.keys()  # noqa: SIM118 (no dict)
    }
