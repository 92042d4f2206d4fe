"""LoRA files made of others: converted, merged, resized, or extracted from a fine-tuned model; each is read back.

No file takes its name before ΔW of every module that it gives, read as any file is, is what was meant to 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from videotune.console import bar, exactly
from videotune.errors import VideotuneError
from videotune.exporter import lora_factors as maths
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.adapter_modules import Module, modules_in
from videotune.exporter.formats import TOLERANCE, failed, write_verified
from videotune.exporter.lora_base import Base, expert_of, named, open_file, open_modules
from videotune.exporter.lora_write import Written, kind_in, written
from videotune.files import whole_folder, write_json
from videotune.models.base_model import place
from videotune.models.model_files import headers, weight_files

if TYPE_CHECKING:
    from torch import Tensor

Modules = Mapping[str, Module]
STALE = ("lora_adapter_metadata", "lora_config", "adapter_config", "videotune", "format", "sshs_", "modelspec.hash")
"""How keys of a header begin that would not be true of another file's tensors."""


@dataclass(frozen=True)
class Made:
    """A file that was written and read back; ``error``: the largest relative difference of a module's ΔW."""

    path: Path
    form: str
    modules: int
    error: float
    notes: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """What was done, a line each."""
        read = f"{self.modules} modules, read back: ΔW {exactly(self.error)}"
        return [f"{self.form}: {self.path}  ({read})", *self.notes]


@dataclass(frozen=True)
class Target:
    """Where a result goes and in which form; ``base``, ``family``: what the sources are for, where they do not say it."""

    path: Path
    form: str | None = None
    base: str | None = None
    family: str | None = None
    overwrite: bool = False

    def check(self, *sources: Path) -> None:
        """Raise VideotuneError for a name that is taken."""
        if any(self.path.resolve() == source.resolve() for source in sources):
            raise VideotuneError(f"--out {self.path} is one of the files that are read: give another name")
        if self.path.exists() and not self.overwrite:
            raise VideotuneError(f"--out {self.path} is there already: give another name, or --overwrite")
        if self.form != "peft" and self.path.suffix != ".safetensors":
            raise VideotuneError(f"--out {self.path}: the file must be called .safetensors")
        if self.form == "peft" and self.path.exists() and not (self.path / "adapter_config.json").is_file():
            raise VideotuneError(f"--out {self.path} is no folder of PEFT's: it is not replaced")

    def open(self, path: Path) -> tuple[AdapterFile, Base, dict[str, Module]]:
        """An adapter file for this target's base model."""
        return open_modules(path, self.base, self.family)


def convert(path: Path, target: Target) -> Made:
    """The same adapter in another form; alpha is kept where the form can hold it, and else multiplied into a factor."""
    target.check(path)
    file, base, modules = target.open(path)
    kept = {key: value for key, value in file.header.items() if not key.startswith(STALE)}
    return save(base, modules, target, facts_of([file], base, "convert"), header=kept)


def merge(paths: Sequence[Path], weights: Sequence[float], rank: int | None, target: Target) -> Made:
    """The sum of several LoRAs, each times its weight: exactly, their ranks added; or the nearest of a rank."""
    if len(weights) not in (0, 1, len(paths)) or not all(math.isfinite(weight) for weight in weights):
        raise VideotuneError(f"--weight: {len(weights)} for {len(paths)} files: give one for each, or one for all")
    target.check(*paths)
    each = list(weights) * (len(paths) if len(weights) == 1 else 1) or [1.0] * len(paths)
    file, base, modules = target.open(paths[0])
    files, found = [file], [modules]
    for path in paths[1:]:
        files.append(open_file(path))
        found.append(modules_in(base.family, base.net, files[-1]))
    for path, modules in zip(paths, found, strict=True):
        refuse_kind(path, modules, "merged")
    experts = {expert_of(file)[0] for file in files}
    if len(experts) > 1:
        raise VideotuneError(f"{paths[0]} and others are of several experts: each expert has a LoRA of its own")
    pairs = {}
    for name in dict.fromkeys(name for modules in found for name in modules):
        mine = [(modules[name], weight) for modules, weight in zip(found, each, strict=True) if name in modules]
        pairs[name] = maths.concatenated([maths.factors(module, weight) for module, weight in mine])
    ranks = None if rank is None else (lambda sigma: rank)
    modules, notes = of_rank(pairs, ranks, "merge")
    return save(base, modules, target, facts_of(files, base, "merge"), notes)


def resize(path: Path, rank: int | None, error: float | None, target: Target) -> Made:
    """The nearest LoRA of a rank, or of the lowest rank in each module whose part of ‖ΔW‖ that is lost is ``error``."""
    target.check(path)
    file, base, modules = target.open(path)
    refuse_kind(path, modules, "resized")
    pairs = {name: maths.factors(module) for name, module in modules.items()}
    bound = 0.0 if error is None else error
    ranks: Callable[[Tensor], int] = (lambda sigma: rank) if rank else (lambda sigma: maths.rank_for(sigma, bound))
    small, notes = of_rank(pairs, ranks, "resize")
    return save(base, small, target, facts_of([file], base, "resize"), notes)


def refuse_kind(path: Path, modules: Modules, done: str) -> None:
    """Raise VideotuneError for an adapter whose update is no product of two factors."""
    if (kind := kind_in(modules)) != "LORA":
        raise VideotuneError(f"{path} is {kind}, and only LoRA can be {done}: its update alone is a product of A and B")


def of_rank(
    pairs: Mapping[str, maths.Factors], ranks: Callable[[Tensor], int] | None, doing: str
) -> tuple[dict[str, Module], tuple[str, ...]]:
    """LoRAs of factors, cut to a rank by their singular values (None: as they are), and the error in words."""
    lost = whole = 0.0
    out, kept = {}, []
    with bar(doing) as progress:
        for done, (name, pair) in enumerate(pairs.items()):
            progress.update(done, len(pairs), name)
            if ranks is not None:
                svd = maths.decomposed(pair)
                rank = min(ranks(svd[1]), len(svd[1]))
                lost, whole = lost + float(svd[1][rank:].square().sum()), whole + float(svd[1].square().sum())
                pair = maths.cut(svd, rank)
            kept.append(len(pair[1]))
            out[name] = Module(name, (name,), {"lora_A": pair[1], "lora_B": pair[0]}, 1.0, "tensor")
    span = f"{min(kept)}" if min(kept) == max(kept) else f"{min(kept)} to {max(kept)}"
    error = f"rank {span}" + (
        "" if ranks is None else f"; relative error of ΔW {math.sqrt(lost / whole if whole else 0.0):.2e}"
    )
    return out, (error,)


def facts_of(files: Sequence[AdapterFile], base: Base, made: str) -> dict[str, Any]:
    """What a file says of itself: what its source said, and what was done to it."""
    facts = {key: value for key, value in files[0].facts.items() if key != "digest"} if len(files) == 1 else {}
    expert = expert_of(files[0])[0]
    told = {"family": base.family.spec.name, "from": [file.path.name for file in files], "made": f"lora {made}"}
    return facts | told | ({"expert": expert} if expert else {})


def save(
    base: Base, modules: Modules, target: Target, facts: Mapping[str, Any], notes: tuple[str, ...] = (),
    header: Mapping[str, str] | None = None,
) -> Made:  # fmt: skip
    """Write an adapter in the target's form and read it back: ΔW of each module is then the one that was meant.

    Raises VideotuneError where the form cannot hold it, or it reads back as something else; then nothing is written.
    """
    form = target.form or "diffusers"
    found = written(base.family, base.net, {name: rounded(own) for name, own in modules.items()}, form)
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in found.tensors.items()}
    head = {**(header or {}), **found.header}

    def verify(aside: Path) -> tuple[float, str]:
        return compare(base, modules, AdapterFile(aside), target.path), "videotune"

    target.path.parent.mkdir(parents=True, exist_ok=True)
    if found.settings is None:
        done = write_verified(form, target.path, len(modules), tensors, facts, verify, head)
    else:
        with whole_folder(target.path) as aside:
            write_json(aside / "adapter_config.json", found.settings)
            done = write_verified(form, aside / "adapter_model.safetensors", len(modules), tensors, facts, verify, head)
    return Made(target.path, form, len(modules), done.max_error, notes + told_of_alpha(modules, found))


def rounded(module: Module) -> Module:
    """A module as it is written: float64 becomes float32."""
    return replace(
        module, parts={name: x.float() if x.dtype == torch.float64 else x for name, x in module.parts.items()}
    )


def told_of_alpha(modules: Modules, found: Written) -> tuple[str, ...]:
    """What became of alpha, in words."""
    scales = {round(own.scale, 6) for own in modules.values()}
    if scales == {1.0}:
        return ()
    said = f"alpha / rank = {min(scales):g}" + (f" to {max(scales):g}" if len(scales) > 1 else "")
    folded = f"multiplied into {found.folded} modules" if found.folded else ""
    return (f"{said}: {folded or 'kept'}",)


def compare(base: Base, wanted: Modules, file: AdapterFile, path: Path) -> float:
    """The largest relative difference of ΔW between an adapter and a file.

    Raises VideotuneError where it is beyond 1e-6, or a module is missing.
    """
    found = modules_in(base.family, base.net, file)
    worst = 0.0
    if lacking := sorted(set(wanted) - set(found)):
        raise failed(path, f"{len(lacking)} modules are missing, such as {lacking[0]}")
    for name, module in found.items():
        off = maths.difference(wanted[name], module) if name in wanted else maths.norm(module)
        if not off <= TOLERANCE:
            raise failed(path, f"ΔW of {name} differs by {off:.1e} (allowed: {TOLERANCE:.0e})")
        worst = max(worst, off)
    return worst


def extract(folder: Path, base_name: str, rank: int, expert: str | None, target: Target) -> Made:
    """The LoRA of a rank that is nearest to what fine-tuning has changed in a model, tensor by tensor.

    ``folder``: in diffusers layout, whole or its transformer's alone. Raises VideotuneError where its weights are not
    those of the base's architecture, or nothing was changed.
    """
    target.check(folder)
    base = named(base_name)
    part = part_of(base, folder, expert)
    tuned = folder / part if (folder / "model_index.json").is_file() else folder
    own, other = weight_files(place(base_name).folder / part), weight_files(tuned)
    shapes, theirs = headers(own), headers(other)
    odd = sorted(name for name in shapes.keys() | theirs.keys() if shape_in(shapes, name) != shape_in(theirs, name))
    if odd:
        raise VideotuneError(
            f"{tuned} is no fine-tuned {base_name}: {len(odd)} tensors differ in shape, such as {odd[0]}"
        )
    modules, kept, rest, left = differences(base, own, other, rank)
    if not modules:
        raise VideotuneError(f"{tuned} differs from {base_name} in no linear weight: there is nothing to extract")
    whole = kept + rest + left[0]
    notes = (
        f"rank {rank}: {len(modules)} modules hold {kept / whole:.2%} of ‖ΔW‖²; {rest / whole:.2%} needs a higher rank",
        f"{left[1]} other tensors changed (norms, biases, embeddings): {left[0] / whole:.2%}, which no LoRA can hold",
    )
    facts = {"family": base.family.spec.name, "from": [folder.name], "made": "lora extract"} | (
        {"expert": expert} if expert else {}
    )
    return save(base, modules, target, facts, notes)


def shape_in(found: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """The shape of a tensor; None where there is none."""
    return found[name].shape if name in found else None


def part_of(base: Base, folder: Path, expert: str | None) -> str:
    """The folder of the transformer that is compared; VideotuneError where it is to be named."""
    known = [own.name for own in base.family.spec.experts]
    if expert is not None and expert not in known:
        raise VideotuneError(f"--expert {expert}: {base.names[0]} has {', '.join(known)}")
    if expert is None and len(known) > 1:
        raise VideotuneError(f"--expert: {base.names[0]} has two, {' and '.join(known)}: name the one to extract")
    return base.family.spec.part_of(expert or known[0])


def differences(
    base: Base, own: Sequence[Path], other: Sequence[Path], rank: int
) -> tuple[dict[str, Module], float, float, tuple[float, int]]:
    """Modules of what differs, with the squares kept and lost, and the squares and number of what is no linear weight."""
    from safetensors import safe_open

    where = {name: path for path in own for name in headers([path])}
    linear = {f"{name}.weight" for name, module in base.net.named_modules() if hasattr(module, "in_features")}
    modules: dict[str, Module] = {}
    kept = rest = apart = 0.0
    count = done = 0
    with bar("extract") as progress:
        for path in other:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    progress.update(done := done + 1, len(where), name)
                    with safe_open(where[name], "pt") as before:
                        delta = file.get_tensor(name).double() - before.get_tensor(name).double()
                    square = float(delta.square().sum())
                    if not math.isfinite(square):
                        raise VideotuneError(f"{path}: {name} holds NaN or infinite weights")
                    if name not in linear:
                        apart, count = apart + square, count + (square > 0)
                    elif square:
                        b, a = maths.truncated(delta, rank)
                        held = maths.norm_of((b, a)) ** 2
                        kept, rest = kept + held, rest + max(0.0, square - held)
                        place_ = name.removesuffix(".weight")
                        modules[place_] = Module(place_, (place_,), {"lora_A": a, "lora_B": b}, 1.0, "tensor")
    return modules, kept, rest, (apart, count)
