"""What an adapter file of any program is: its base, form, ranks, scales and health, and who reads it how strongly."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videotune.adapters.adapter_types import kind_of
from videotune.errors import VideotuneError
from videotune.exporter import adapter_modules as files
from videotune.exporter.adapter_file import AdapterFile, adapter_path
from videotune.exporter.adapter_modules import Module, bare, keys_of
from videotune.exporter.lora_factors import norm
from videotune.files import read_json
from videotune.models import base_model, model_files, registry
from videotune.models.base import DiffusersModel

LONGEST = 200
MANY = 40
"""Letters of a value of the header that are told, and keys of it."""

MOST = 8 << 30
"""Bytes of the largest adapter that is read; published ones have some hundred megabytes."""


@dataclass(frozen=True)
class Base:
    """A base model's architecture: its transformer on the meta device, and the names that it is published under."""

    names: tuple[str, ...]
    family: DiffusersModel
    net: nn.Module


def open_file(path: Path, *, finite: bool = True) -> AdapterFile:
    """An adapter's file or folder.

    Raises VideotuneError where there is none, or it is too large for an adapter.
    """
    file = adapter_path(path)
    if not file.is_file():
        raise VideotuneError(f"no such file or folder: {path}")
    if (size := file.stat().st_size) > MOST:
        raise VideotuneError(f"{file} has {size >> 30} GB: that is no adapter")
    if not any(
        mark in key
        for key in model_files.headers([file])
        for mark in (".lora", ".hada_", ".lokr_", ".oft_R")
    ):
        raise VideotuneError(
            f"{file} holds no adapter: no tensor is called like those of LoRA, LoHa, LoKr or OFT"
        )
    return AdapterFile(file, finite=finite)


@cache
def architecture(folder: Path, names: tuple[str, ...]) -> Base:
    """The architecture whose configs lie in a folder."""
    name = base_model.spec_for(None, base_model.place(str(folder), weights=False)).name
    family = registry.find(name)(folder, torch.device("cpu"), torch.float32)
    return Base(names, family, family.skeleton())


def bases(base: str | None = None, family: str | None = None) -> Iterator[Base]:
    """The named base model, by its folder or Hub id and without its weights, or the published ones (of a family)."""
    if base is not None:
        yield architecture(base_model.place(base, weights=False).folder, (base,))
        return
    index: dict[str, str] = read_json(base_model.CONFIGS / "index.json")
    for folder in sorted(own for own in base_model.CONFIGS.iterdir() if own.is_dir()):
        if family is None or base_model.of_base(folder) is registry.find(family):
            yield architecture(
                folder,
                tuple(
                    name for name, own in index.items() if own == folder.name and "/" in name
                ),
            )


def misfits(base: Base, modules: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Why the base model has no place for some of a file's modules, by their names."""
    found = {}
    for name, parts in modules.items():
        size = files.size_of({part: value for part, value in parts.items() if part != "alpha"})
        held = [
            files.linear_size(base.net, path)
            for path in files.places(base.family, base.net).get(bare(name), ())
        ]
        if not held:
            found[name] = "no module of it"
        elif size and size != (wanted := (sum(rows for rows, _ in held), held[0][1])):
            found[name] = f"{size[0]}x{size[1]}, and {wanted[0]}x{wanted[1]} in the base"
    return found


def fitting(
    file: AdapterFile, base: str | None, family: str | None
) -> tuple[list[Base], Base, dict[str, str]]:
    """The bases that fit every module of a file, the base of its header first; the nearest base; and that base's misfits."""
    modules, _ = keys_of(file)
    expert = expert_of(file)[0]
    own = file.facts.get("family")

    def distance(each: tuple[dict[str, str], Base]) -> tuple[int, bool, bool, int]:
        spec = each[
            1
        ].family.spec  # of two that fit, the one of which fewer modules are left as they are
        alien = expert is not None and expert not in [one.name for one in spec.experts]
        return (
            len(each[0]),
            spec.name != own,
            alien,
            len(files.places(each[1].family, each[1].net)),
        )

    tried = sorted(((misfits(one, modules), one) for one in bases(base, family)), key=distance)
    fits = [each for each in tried if distance(each)[:3:2] == (0, False)] or [
        each for each in tried if not each[0]
    ]
    return [one for _, one in fits], tried[0][1], tried[0][0]


def open_modules(
    path: Path, base: str | None, family: str | None
) -> tuple[AdapterFile, Base, dict[str, Module]]:
    """A file's adapter by its paths in diffusers, and the base model that it is for.

    Raises VideotuneError where it fits none, or bases of several families.
    """
    file = open_file(path)
    fits, nearest, odd = fitting(file, base, family)
    if len({one.family.spec.name for one in fits}) > 1 and "family" not in file.facts:
        raise VideotuneError(
            f"{path} fits bases of several families: say which with --family or --base"
        )
    if odd and base is None:
        name, why = next(iter(odd.items()))
        raise VideotuneError(
            f"{path} fits no published base ({name}: {why}): name its base model with --base"
        )
    return file, nearest, files.modules_in(nearest.family, nearest.net, file)


def expert_of(file: AdapterFile) -> tuple[str | None, str]:
    """Which expert a file is of, and what says so: our own header, or the file's name; (None, "") where nothing does."""
    if isinstance(own := file.facts.get("expert"), str):
        return own[:20], "header"
    name = f"{file.path.parent.name if file.settings[1] == 'folder' else ''} {file.path.name}"
    found = re.findall(r"(high|low)[^a-z]?noise", name.lower())
    return (found[0], "file name") if len(set(found)) == 1 else (None, "")


def inspect(path: Path, against: str | None = None) -> dict[str, Any]:
    """All that is known of an adapter file; docs/schemas/lora.schema.json says which keys there are.

    ``against``: the base model that every shape is held against. Raises VideotuneError for a file that holds no adapter or
    cannot be read.
    """
    file = open_file(path, finite=False)
    found, rest = keys_of(file)
    fits, near, odd = fitting(file, against, None)
    base = near if fits or against else None
    modules = [
        own
        for name, parts in found.items()
        for own in modules_of(file, base, name, parts, name in odd)
    ]
    kinds = sorted(
        {kind_of([f"x.{part}" for part in own.parts]) or "unknown" for own in modules}
    )
    form = form_of(file, base, modules)
    (expert, told) = expert_of(file)
    trained = file.facts.get("base")
    family = base.family.spec.name if base else None
    rows = [row_of(base, own) for own in modules]
    return {
        "file": str(file.path),
        "bytes": file.path.stat().st_size,
        "kind": " and ".join(kinds),
        "form": form,
        "family": family,
        "fits": [name for one in fits for name in one.names],
        "misfits": [f"{name}: {why}" for name, why in list(odd.items())[:MANY]] if base else [],
        "trained_on": str(trained.get("name"))[:LONGEST] if isinstance(trained, dict) else None,
        "expert": expert,
        "expert_by": told,
        "other_tensors": sorted(rest)[:MANY],
        "groups": shares(rows),
        "programs": programs(file, family, kinds, form, modules),
        "metadata": {
            key[:LONGEST]: value[:LONGEST] for key, value in list(file.header.items())[:MANY]
        },
        "modules": rows,
    }


def modules_of(
    file: AdapterFile, base: Base | None, name: str, parts: dict[str, Tensor], odd: bool
) -> list[Module]:
    """A module of a file by its paths in diffusers; itself where it has no place in the base, or cannot be taken apart."""
    if base is None or odd:
        own = {part: value for part, value in parts.items() if part != "alpha"}
        return [Module(name, (), own, *files.scale_of(file, own, parts.get("alpha"), name))]
    whole = files.located(base.family, base.net, file, name, parts)
    return files.apart(base.net, whole) if {"lora_B", "hada_w1_a"} & set(parts) else [whole]


def form_of(file: AdapterFile, base: Base | None, modules: Sequence[Module]) -> dict[str, Any]:
    """What stands before the modules' names, and whose names these are: "diffusers", "native" (the authors') or "both"."""
    prefix = Counter(files.prefix_of(own.name) for own in modules).most_common(1)[0][0]
    pairs = (
        [
            (bare(own.name), path.replace(".", "_"), path)
            for own in modules
            for path in own.paths
        ]
        if base
        else []
    )
    native = all(
        name != own or base.family.to_comfyui_name(path).replace(".", "_") == own
        for name, own, path in pairs
        if base
    )
    whose = ["native"] * native + ["diffusers"] * all(name == own for name, own, _ in pairs)
    names = "unknown" if not pairs or not whose else whose[0] if len(whose) == 1 else "both"
    return {"prefix": prefix, "names": names, "peft_folder": file.settings[1] == "folder"}


def row_of(base: Base | None, module: Module) -> dict[str, Any]:
    """A module in figures; ``norm``: ‖ΔW‖, None where it is not finite."""
    values = list(module.parts.values())
    nan = any(bool(x.isnan().any()) for x in values)
    infinite = any(bool(x.float().isinf().any()) for x in values)
    state = (
        "NaN" if nan else "infinite" if infinite else "ok" if files.changes(module) else "zero"
    )
    path = module.paths[0] if module.paths else module.name
    targets = base.family.spec.lora_targets if base else {}
    sets = ("cross_attention", "attention", "feed_forward")
    group = next(
        (
            name
            for name in sets
            if any(re.fullmatch(own, path) for own in targets.get(name, ()))
        ),
        "other",
    )
    return {
        "name": module.name,
        "path": path,
        "group": group,
        "rank": module.rank,
        "alpha": module.scale * module.rank if module.told else None,
        "alpha_in": module.told,
        "scale": module.scale,
        "dtype": "+".join(
            sorted({str(value.dtype).removeprefix("torch.") for value in values})
        ),
        "state": state,
        "norm": None if nan or infinite else norm(module),
    }


def shares(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The share of each group of modules in ‖ΔW‖² over all of them."""
    norms = {
        key: [row["norm"] or 0.0 for row in rows if row["group"] == key]
        for key in {row["group"] for row in rows}
    }
    whole = sum(one**2 for own in norms.values() for one in own) or 1.0
    found = [
        {"group": name, "modules": len(of), "share": sum(x**2 for x in of) / whole}
        for name, of in norms.items()
    ]
    return sorted(found, key=lambda own: (-own["share"], own["group"]))


def programs(
    file: AdapterFile,
    family: str | None,
    kinds: Sequence[str],
    form: dict[str, Any],
    modules: Sequence[Module],
) -> list[dict[str, Any]]:
    """Who reads a file of this form, by programs.json, and what each multiplies ΔW by (least, most).

    ``strength``: what to set there so that ΔW is as this file means it; None where one number cannot do that.
    """
    rules = read_json(Path(__file__).with_name("programs.json"))
    told = {module.told for module in modules}
    names = form["names"]
    found: dict[str, dict[str, Any]] = {}
    for rule in rules:
        fine = (
            (names == "both" or rule.get("names", names) == names)
            and rule.get("not_with") not in told,
            form["prefix"] in rule["prefixes"] and family in rule.get("families", [family]),
            set(kinds) <= set(rule["kinds"])
            and form["peft_folder"] >= rule.get("folder", False),
        )
        mine = found.setdefault(
            rule["program"], {"program": rule["program"], "scale": None, "strength": None}
        )
        if all(fine) and mine["scale"] is None:
            applied = [
                module.scale if module.told in rule["alpha"] else 1.0 for module in modules
            ]
            ratios = {
                round(module.scale / own, 6)
                for module, own in zip(modules, applied, strict=True)
            }
            strength = min(ratios) if len(ratios) == 1 else None
            found[rule["program"]] = mine | {
                "scale": [min(applied), max(applied)],
                "strength": strength,
            }
    return list(found.values())


def summary(found: dict[str, Any]) -> list[str]:
    """The sentences about a file that stand above its tables."""
    rows = found["modules"]
    others = found["other_tensors"]
    form = found["form"]
    lines = [
        f"{found['kind']}, {len(rows)} modules, {', '.join(sorted({row['dtype'] for row in rows}))}"
    ]
    prefix = f", prefix {form['prefix']}" if form["prefix"] else ""
    lines += [
        f"form: {form['names']} names{prefix}{', in a PEFT folder' * form['peft_folder']}"
    ]
    base = f"base: {found['family']}"
    if found["family"] is None:
        base = "base: no published architecture has these modules; --against BASE checks another one"
    lines.append(
        f"base: every module fits {model_files.some(found['fits'])}" if found["fits"] else base
    )
    lines += [f"trained on: {found['trained_on']}, as its header says"] * bool(
        found["trained_on"]
    )
    lines += [f"expert: {found['expert']}, by its {found['expert_by']}"] * bool(found["expert"])
    lines += [
        f"{len(found['misfits'])} modules do not fit, such as {one}"
        for one in found["misfits"][:1]
    ]
    lines += [f"other tensors, of no adapter: {model_files.some(others)}"] * bool(others)
    for state in ("zero", "NaN", "infinite"):
        odd = [row["path"] for row in rows if row["state"] == state]
        lines += [f"{len(odd)} modules are {state}: {model_files.some(odd)}"] * bool(odd)
    return lines
