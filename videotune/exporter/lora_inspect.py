"""What an adapter file of any program is: its base, form, ranks, scales and health, and who reads it how strongly."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from videotune.adapters.kinds import kind_of
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.adapter_modules import Module, apart, bare, changes, keys_of, located, prefix_of, scale_of
from videotune.exporter.lora_base import Base, expert_of, fitting, open_file
from videotune.exporter.lora_factors import norm
from videotune.models.model_files import some

LONGEST, MANY = 200, 40
"""Letters of a value of the header that are told, and keys of it."""


def inspect(path: Path, against: str | None = None) -> dict[str, Any]:
    """All that is known of an adapter file; docs/schemas/lora.schema.json says which keys there are.

    ``against``: the base model that every shape is held against. Raises VideotuneError for a file that holds no adapter or
    cannot be read.
    """
    file = open_file(path, finite=False)
    found, rest = keys_of(file)
    fits, near, odd = fitting(file, against, None)
    base = near if fits or against else None
    modules = [own for name, parts in found.items() for own in modules_of(file, base, name, parts, name in odd)]
    kinds = sorted({kind_of([f"x.{part}" for part in own.parts]) or "unknown" for own in modules})
    form, (expert, told), trained = form_of(file, base, modules), expert_of(file), file.facts.get("base")
    spec = base.family.spec if base else None
    of_expert = [one for one in fits if expert in (None, *(own.name for own in one.family.spec.experts))]
    rows = [row_of(base, own) for own in modules]
    return {
        "file": str(file.path),
        "bytes": file.path.stat().st_size,
        "kind": " and ".join(kinds),
        "form": form,
        "family": spec.name if spec else None,
        "title": spec.title if spec else None,
        "fits": [name for one in of_expert for name in one.names],
        "misfits": [f"{name}: {why}" for name, why in list(odd.items())[:MANY]] if base else [],
        "trained_on": str(trained.get("name"))[:LONGEST] if isinstance(trained, dict) else None,
        "expert": expert,
        "expert_by": told,
        "other_tensors": sorted(rest)[:MANY],
        "groups": shares(rows),
        "programs": programs(file, spec.name if spec else None, kinds, form, modules),
        "metadata": {key[:LONGEST]: value[:LONGEST] for key, value in list(file.header.items())[:MANY]},
        "modules": rows,
    }


def modules_of(file: AdapterFile, base: Base | None, name: str, parts: dict[str, Tensor], odd: bool) -> list[Module]:
    """A module of a file by its paths in diffusers; itself where it has no place in the base, or cannot be taken apart."""
    if base is None or odd:
        own = {part: value for part, value in parts.items() if part != "alpha"}
        return [Module(name, (), own, *scale_of(file, own, parts.get("alpha"), name))]
    whole = located(base.family, base.net, file, name, parts)
    return apart(base.net, whole) if {"lora_B", "hada_w1_a"} & set(parts) else [whole]


def form_of(file: AdapterFile, base: Base | None, modules: Sequence[Module]) -> dict[str, Any]:
    """What stands before the modules' names, and whose names these are: "diffusers", "native" (the authors') or "both"."""
    prefix = Counter(prefix_of(own.name) for own in modules).most_common(1)[0][0]
    pairs = [(bare(own.name), path) for own in modules for path in own.paths] if base else []
    whose = {
        "diffusers": all(name == path.replace(".", "_") for name, path in pairs),
        "native": base is not None and all(name == base.family.native(path).replace(".", "_") for name, path in pairs),
    }
    names = "both" if all(whose.values()) else next((name for name, so in whose.items() if so and pairs), "unknown")
    folder = file.told == "folder" and bool(file.lora_settings)
    return {"prefix": prefix, "names": names, "peft_folder": folder}


def row_of(base: Base | None, module: Module) -> dict[str, Any]:
    """A module in figures; ``norm``: ‖ΔW‖, None where it is not finite."""
    values = list(module.parts.values())
    odd = {
        "NaN": any(bool(x.isnan().any()) for x in values),
        "infinite": any(bool(x.float().isinf().any()) for x in values),
    }
    state = next((name for name, so in (odd | {"zero": not changes(module)}).items() if so), "ok")
    path = module.paths[0] if module.paths else module.name
    targets = base.family.spec.lora_targets if base else {}
    sets = ("cross_attention", "attention", "feed_forward")
    group = next((name for name in sets if any(re.fullmatch(own, path) for own in targets.get(name, ()))), "other")
    return {
        "name": module.name,
        "path": path,
        "group": group,
        "rank": module.rank,
        "alpha": module.scale * module.rank if module.told else None,
        "alpha_in": module.told,
        "scale": module.scale,
        "dtype": "+".join(sorted({str(value.dtype).removeprefix("torch.") for value in values})),
        "state": state,
        "norm": None if any(odd.values()) else norm(module),
    }


def shares(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The share of each group of modules in ‖ΔW‖² over all of them."""
    sums = {
        group: sum(row["norm"] ** 2 for row in rows if row["group"] == group and row["norm"])
        for group in dict.fromkeys(row["group"] for row in rows)
    }
    count, whole = Counter(row["group"] for row in rows), sum(sums.values()) or 1.0
    return [{"group": name, "modules": count[name], "share": own / whole} for name, own in sums.items()]


def programs(
    file: AdapterFile, family: str | None, kinds: Sequence[str], form: dict[str, Any], modules: Sequence[Module]
) -> list[dict[str, Any]]:
    """Who reads a file of this form, by programs.json, and what each multiplies ΔW by (least, most).

    ``strength``: what to set there so that ΔW is as this file means it; None where one number cannot do that.
    """
    rules = json.loads((resources.files("videotune") / "exporter" / "programs.json").read_text(encoding="utf-8"))
    told, names = {module.told for module in modules}, form["names"]
    found: dict[str, dict[str, Any]] = {}
    for rule in rules:
        fine = form["prefix"] in rule["prefixes"] and set(kinds) <= set(rule["kinds"])
        fine = fine and (names == "both" or rule.get("names", names) == names)
        fine = fine and family in rule.get("families", [family]) and rule.get("not_with") not in told
        mine = found.setdefault(rule["program"], {"program": rule["program"], "scale": None, "strength": None})
        if fine and form["peft_folder"] >= rule.get("folder", False) and mine["scale"] is None:
            applied = [module.scale if module.told in rule["alpha"] else 1.0 for module in modules]
            ratios = {round(module.scale / own, 6) for module, own in zip(modules, applied, strict=True)}
            strength = min(ratios) if len(ratios) == 1 else None
            found[rule["program"]] = mine | {"scale": [min(applied), max(applied)], "strength": strength}
    return list(found.values())


def summary(found: dict[str, Any]) -> list[str]:
    """The sentences about a file that stand above its tables."""
    rows, others, base = found["modules"], found["other_tensors"], f"base: {found['title']}"
    dtypes = ", ".join(sorted({row["dtype"] for row in rows}))
    form = f"{found['form']['prefix'] or 'nothing'} before {found['form']['names']} names"
    lines = [
        f"{found['kind']}, {len(rows)} modules, {dtypes}; form: {form}" + ", PEFT folder" * found["form"]["peft_folder"]
    ]
    if found["family"] is None:
        base = "base: no published architecture has these modules; --against BASE checks another one"
    lines.append(base + (f"; every module fits {some(found['fits'])}" if found["fits"] else ""))
    lines += [f"trained on: {found['trained_on']}, as its header says"] * bool(found["trained_on"])
    lines += [f"expert: {found['expert']}, by its {found['expert_by']}"] * bool(found["expert"])
    lines += [f"{len(found['misfits'])} modules do not fit, such as {one}" for one in found["misfits"][:1]]
    lines += [f"other tensors, of no adapter: {some(others)}"] * bool(others)
    for state in ("zero", "NaN", "infinite"):
        odd = [row["path"] for row in rows if row["state"] == state]
        lines += [f"{len(odd)} modules are {state}: {some(odd)}"] * bool(odd)
    return lines
