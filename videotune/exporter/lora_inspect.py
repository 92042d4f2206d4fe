"""What an adapter file of any program is: its base, form, ranks, scales and health, and who reads it how strongly."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.adapters.kinds import ZERO, kind_of
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.adapter_modules import (
    Module,
    apart,
    bare,
    keys_of,
    located,
    places,
    prefix_of,
    scale_of,
)
from videotune.exporter.lora_base import Base, expert_of, fitting, misfits, open_file
from videotune.exporter.lora_factors import norm
from videotune.models.model_files import some

if TYPE_CHECKING:
    from torch import Tensor

LONGEST, MANY = 200, 40
"""Letters of a value of the header that are told, and keys of it."""

TITLES = {
    "transformer.": "diffusers", "diffusion_model.": "ComfyUI", "base_model.model.": "PEFT", "lora_unet_": "kohya / musubi",
    "lora_transformer_": "OneTrainer", "lycoris_": "LyCORIS", "": "names alone",
}  # fmt: skip


def inspect(path: Path, base: str | None = None) -> dict[str, Any]:
    """All that is known of an adapter file; docs/schemas/lora.schema.json says which keys there are.

    Raises VideotuneError for a file that holds no adapter or cannot be read.
    """
    file = open_file(path, finite=False)
    found, rest = keys_of(file)
    fits, near, _ = fitting(file, base, None)
    known = bool(fits) or base is not None
    odd = misfits(near, found) if known else []
    modules = [
        module_of(file, near if known and bare(name) in places(near.family, near.net) else None, name, parts, odd)
        for name, parts in found.items()
    ]
    kinds = Counter(kind_of([f"x.{part}" for part in module.parts]) or "unknown" for module in modules)
    kind, prefix = kinds.most_common(1)[0][0], Counter(map(prefix_of, found)).most_common(1)[0][0]
    names = names_of(near, modules) if known else "unknown"
    expert, told = expert_of(file)
    facts = file.facts.get("base")
    rows = [row_of(near if known else None, module) for module in modules]
    return {
        "file": str(file.path),
        "bytes": file.path.stat().st_size,
        "kind": kind if len(kinds) == 1 else "mixed",
        "form": {"title": title_of(file, prefix), "prefix": prefix, "names": names},
        "family": near.family.spec.name if known else None,
        "title": near.family.spec.title if known else None,
        "fits": [
            name
            for one in fits
            if expert in (None, *(own.name for own in one.family.spec.experts))
            for name in one.names
        ],
        "trained_on": str(facts.get("name"))[:LONGEST] if isinstance(facts, dict) else None,
        "expert": expert,
        "expert_by": told,
        "misfits": odd[:MANY],
        "other_tensors": sorted(rest)[:MANY],
        "groups": groups_of(near if known else None, modules, rows),
        "programs": programs(file, near.family.spec.name if known else None, kind, prefix, names, modules),
        "metadata": {key[:LONGEST]: value[:LONGEST] for key, value in list(file.header.items())[:MANY]},
        "modules": rows,
    }


def module_of(file: AdapterFile, base: Base | None, name: str, parts: dict[str, Tensor], odd: Sequence[str]) -> Module:
    """A module of a file with its paths and its scale; without paths where it has no place in the base model."""
    if base is not None and not any(one.startswith(f"{name} is ") for one in odd):
        return located(base.family, base.net, file, name, parts)
    own = {part: value for part, value in parts.items() if part != "alpha"}
    return Module(name, (), own, *scale_of(file, own, parts.get("alpha"), name, f"{file.path}: {name}"))


def title_of(file: AdapterFile, prefix: str) -> str:
    """The form in words: whose names, and where PEFT's settings stand."""
    whole = TITLES.get(prefix, prefix)
    settings = file.told == "folder" and bool(file.lora_settings)
    return (
        f"{whole}, in a PEFT folder" if settings and prefix != "base_model.model." else f"{whole}{' folder' * settings}"
    )


def names_of(base: Base, modules: Sequence[Module]) -> str:
    """Whose names the modules have: "diffusers", "native" (the authors'), or "both" where these are the same."""
    own = [module for module in modules if module.paths]
    mine = [bare(module.name) in {path.replace(".", "_") for path in module.paths} for module in own]
    theirs = [
        bare(module.name) in {base.family.native(path).replace(".", "_") for path in module.paths} for module in own
    ]
    return "both" if all(mine) and all(theirs) else "diffusers" if all(mine) else "native"


def row_of(base: Base | None, module: Module) -> dict[str, Any]:
    """A module in figures; ``norm``: ‖ΔW‖, None where it is not finite or its factors are no pair."""
    state = state_of(module)
    return {
        "name": module.name,
        "paths": list(module.paths),
        "rank": module.rank,
        "alpha": module.scale * module.rank if module.told else None,
        "alpha_in": module.told,
        "scale": module.scale,
        "dtype": "+".join(sorted({str(value.dtype).removeprefix("torch.") for value in module.parts.values()})),
        "state": state,
        "norm": norm(module) if state in ("ok", "zero") else None,
    }


def state_of(module: Module) -> str:
    """ "ok", "zero", "NaN" or "infinite"."""
    if any(bool(value.isnan().any()) for value in module.parts.values()):
        return "NaN"
    if any(bool(value.isinf().any()) for value in module.parts.values()):
        return "infinite"
    return "zero" if not any(bool(value.any()) for part, value in module.parts.items() if part in ZERO) else "ok"


def groups_of(base: Base | None, modules: Sequence[Module], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Attention, cross attention, feed-forward and the rest, each with its share of ‖ΔW‖² over all modules."""
    squares: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for module, row in zip(modules, rows, strict=True):
        if row["norm"] is None:
            continue
        for path, square in squares_of(base, module, row["norm"]):
            group = group_of(base, path)
            counts[group] += 1
            squares[group] += square
    whole = sum(squares.values())
    return [
        {"group": group, "modules": counts[group], "share": squares[group] / whole if whole else 0.0}
        for group in sorted(squares, key=lambda group: -squares[group])
    ]


def squares_of(base: Base | None, module: Module, whole: float) -> list[tuple[str, float]]:
    """‖ΔW‖² by the module's paths; of a Kronecker product over several it is told of the first alone."""
    if base is None or len(module.paths) < 2 or not any(part in module.parts for part in ("lora_B", "hada_w1_a")):
        return [((module.paths or (module.name,))[0], whole**2)]
    found = apart(base.net, module).items()
    return [(path, norm(replace(module, paths=(path,), parts=parts)) ** 2) for path, parts in found]


def group_of(base: Base | None, path: str) -> str:
    """The group of a module, by the sets of targets of its family."""
    targets = base.family.spec.lora_targets if base is not None else {}
    for group in ("cross_attention", "attention", "feed_forward"):
        if any(re.fullmatch(pattern, path) for pattern in targets.get(group, ())):
            return group
    return "other"


def programs(
    file: AdapterFile, family: str | None, kind: str, prefix: str, names: str, modules: Sequence[Module]
) -> list[dict[str, Any]]:
    """Who reads a file of this form, by programs.json, and what each multiplies ΔW by.

    ``strength``: what to set there so that ΔW is as this file means it; None where one number cannot do that.
    """
    rules = json.loads((resources.files("videotune") / "exporter" / "programs.json").read_text(encoding="utf-8"))
    told = {module.told for module in modules}
    found: dict[str, dict[str, Any]] = {}
    for rule in rules:
        mine = found.setdefault(
            rule["program"], {"program": rule["program"], "reads": False, "scale": None, "strength": None}
        )
        fine = (
            prefix in rule["prefixes"]
            and kind in rule["kinds"]
            and (names == "both" or rule.get("names", names) == names)
            and family in rule.get("families", [family])
            and rule.get("not_with") not in told
            and (not rule.get("folder") or file.told == "folder")
        )
        if fine and not mine["reads"]:
            applied = [module.scale if module.told in rule["alpha"] else 1.0 for module in modules]
            ratios = {round(module.scale / own, 6) for module, own in zip(modules, applied, strict=True)}
            scales = sorted(set(applied))
            mine |= {
                "reads": True,
                "scale": [scales[0], scales[-1]],
                "strength": min(ratios) if len(ratios) == 1 else None,
            }
    return list(found.values())


def summary(found: Mapping[str, Any]) -> list[str]:
    """The sentences about a file that stand above its tables."""
    rows = found["modules"]
    ranks, dtypes = ({row[key] for row in rows} for key in ("rank", "dtype"))
    span = f"rank {min(ranks)}" + (f" to {max(ranks)}" if len(ranks) > 1 else "")
    lines = [
        f"{found['kind']} in {found['form']['title']} form: {len(rows)} modules, {span}, {', '.join(sorted(dtypes))}"
    ]
    if found["family"] is None:
        lines.append("base: none of the published architectures has these modules (--against BASE checks another one)")
    else:
        lines.append(
            f"base: {found['title']}" + (f"; every module fits {some(found['fits'])}" if found["fits"] else "")
        )
    if found["trained_on"]:
        lines.append(f"trained on: {found['trained_on']}, as its header says")
    if found["expert"]:
        lines.append(f"expert: {found['expert']}, by its {found['expert_by']}")
    lines += (
        [f"does not fit: {len(found['misfits'])} modules, such as: {found['misfits'][0]}"] if found["misfits"] else []
    )
    others = found["other_tensors"]
    lines += [f"other tensors, of no adapter: {some(others)}"] if others else []
    for state in ("zero", "NaN", "infinite"):
        odd = [row["name"] for row in rows if row["state"] == state]
        lines += [f"{len(odd)} modules are {state}: {some(odd)}"] if odd else []
    return lines
