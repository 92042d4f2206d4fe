"""Inspect any program's adapter file: its base, form, ranks, scales, health and
readers.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from videotune.config.sections import CONNECTORS
from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.adapter_modules import (
    DORA_HEADER,
    AdapterModule,
    group_by_module,
    has_effect,
    kind_of_parts,
    locate_module,
    modules_by_path,
    split_module,
    without_alpha,
)
from videotune.exporter.base_detection import (
    Base,
    detect_expert,
    family_of_header,
    find_fitting_bases,
    open_adapter,
    other_model_of_adapter,
)
from videotune.exporter.lora_factors import delta_norm
from videotune.exporter.read_scale import (
    flat_name,
    name_prefix,
    read_scale,
)
from videotune.files import read_json
from videotune.models import model_files
from videotune.models.other_models import (
    other_model_of_name,
    refuse_other_model,
    trained_models,
)
from videotune.text import counted

MAX_VALUE_LENGTH = 200
"""Characters that are shown of a header value."""

MAX_ENTRIES = 40
"""Header keys, misfits and other tensors that are listed."""


_TARGET_GROUPS = ("cross_attention", "attention", "feed_forward")


def open_modules(
    path: Path, base: str | None, family: str | None
) -> tuple[AdapterFile, Base, dict[str, AdapterModule]]:
    """Open an adapter.

    Returns:
        The file, the base model that it belongs to, and the modules by their paths in
        diffusers.

    Raises:
        VideotuneError: if the file fits no base, or bases of several families.
    """
    file = open_adapter(path)
    fits, nearest, nearest_misfits = find_fitting_bases(file, base, family)

    families = {fit.family.spec.name for fit in fits}
    if len(families) > 1 and family_of_header(file) is None:
        raise VideotuneError(
            f"{path} fits bases of several families; choose one with --family or --base"
        )
    if nearest_misfits and base is None:
        title = other_model_of_adapter(file) or other_model_of_name(path.stem)
        refuse_other_model(title, str(path))
        name, reason = next(iter(nearest_misfits.items()))
        raise VideotuneError(
            f"{path} fits no published base ({name}: {reason}); name its base model with --base"
        )
    return file, nearest, modules_by_path(nearest.family, nearest.net, file)


def inspect(path: Path, against: str | None = None) -> dict[str, Any]:
    """Return all facts about an adapter file; docs/schemas/lora.schema.json lists the
    keys.

    Args:
        path: the adapter's file or folder.
        against: the base model that every shape is compared with; None: all published
            ones.

    Raises:
        VideotuneError: for a file that is not an adapter or cannot be read.
    """
    file = open_adapter(path, finite=False)
    parts_by_name, other_tensors = group_by_module(file)
    fits, nearest, nearest_misfits = find_fitting_bases(file, against, None)
    base = nearest if fits or against else None

    modules: list[AdapterModule] = []
    for name, parts in parts_by_name.items():
        module_base = None if name in nearest_misfits else base
        modules += split_or_keep(file, module_base, name, parts)

    kinds = sorted({kind_of_parts(module.parts) or "unknown" for module in modules})
    form = detect_form(file, base, modules)
    expert, expert_source = detect_expert(file)
    family = base.family.spec.name if base else None
    rows = [module_row(base, module) for module in modules]

    fit_names: list[str] = []
    for fit in fits:
        fit_names += fit.names
    misfit_lines = [f"{name}: {reason}" for name, reason in nearest_misfits.items()]
    header_base = file.facts.get("base")
    trained_on = None
    if isinstance(header_base, dict):
        trained_on = str(header_base.get("name"))[:MAX_VALUE_LENGTH]
    header_entries = list(file.header.items())[:MAX_ENTRIES]

    title = other_model_of_adapter(file)
    if title is None and not fits:
        title = other_model_of_name(file.path.stem)

    return {
        "file": str(file.path),
        "bytes": file.path.stat().st_size,
        "kind": " and ".join(kinds),
        "form": form,
        "family": family,
        "fits": fit_names,
        "misfits": misfit_lines[:MAX_ENTRIES] if base else [],
        "trained_on": trained_on,
        "other_model": title,
        "expert": expert,
        "expert_by": expert_source,
        "other_tensors": sorted(other_tensors)[:MAX_ENTRIES],
        "groups": group_shares(rows),
        "programs": supporting_programs(file, family, kinds, form, modules),
        "metadata": {
            key[:MAX_VALUE_LENGTH]: value[:MAX_VALUE_LENGTH]
            for key, value in header_entries
        },
        "modules": rows,
    }


def split_or_keep(
    file: AdapterFile, base: Base | None, name: str, parts: dict[str, Tensor]
) -> list[AdapterModule]:
    """Return a file's module by its paths in diffusers.

    The module stays as it is without a base that it fits, or if it cannot be split.
    """
    if base is None:
        factors = without_alpha(parts)
        scale, alpha_source = read_scale(file, factors, parts.get("alpha"), name)
        return [
            AdapterModule(
                name=name,
                paths=(),
                parts=factors,
                scale=scale,
                alpha_source=alpha_source,
            )
        ]

    module = locate_module(base.family, base.net, file, name, parts)
    if {"lora_B", "hada_w1_a"} & set(parts):
        return split_module(base.net, module)
    return [module]


def detect_form(
    file: AdapterFile, base: Base | None, modules: Sequence[AdapterModule]
) -> dict[str, Any]:
    """Return the prefix of the modules' names, and whose names they are.

    ``names`` is "diffusers", "native" (the authors'), "both" or "unknown".
    """
    prefixes: Counter[str] = Counter()
    for module in modules:
        is_part = module.name.startswith(f"{CONNECTORS}.")
        prefixes[f"{CONNECTORS}." if is_part else name_prefix(module.name)] += 1
    names = _detect_names(base, modules) if base else "unknown"
    return {
        "prefix": prefixes.most_common(1)[0][0],
        "names": names,
        "peft_folder": file.settings_source == "folder",
    }


def _detect_names(base: Base, modules: Sequence[AdapterModule]) -> str:
    has_paths = False
    is_native = True
    is_diffusers = True
    for module in modules:
        name = flat_name(module.name)
        for path in module.paths:
            has_paths = True
            diffusers_name = path.replace(".", "_")
            comfyui_name = base.family.to_comfyui_name(path).replace(".", "_")
            # diffusers' name is also native only if the authors use the same one.
            is_native = is_native and (
                name != diffusers_name or comfyui_name == diffusers_name
            )
            is_diffusers = is_diffusers and name == diffusers_name

    if not has_paths:
        return "unknown"
    if is_native and is_diffusers:
        return "both"
    if is_native:
        return "native"
    return "diffusers" if is_diffusers else "unknown"


def module_row(base: Base | None, module: AdapterModule) -> dict[str, Any]:
    """Return the figures of a module; ``norm`` is ‖ΔW‖.

    It is None if it is not finite, and for a product of which no base confirms the size.
    """
    values = list(module.parts.values())
    has_nan = any(bool(value.isnan().any()) for value in values)
    has_infinite = any(bool(value.float().isinf().any()) for value in values)
    if has_nan:
        state = "NaN"
    elif has_infinite:
        state = "infinite"
    else:
        state = "ok" if has_effect(module) else "zero"

    is_cheap = kind_of_parts(module.parts) in ("LORA", "DORA", "LOKR")
    has_norm = not has_nan and not has_infinite and (is_cheap or bool(module.paths))
    path = module.paths[0] if module.paths else module.name
    dtypes = {str(value.dtype).removeprefix("torch.") for value in values}
    return {
        "name": module.name,
        "path": path,
        "group": _target_group(base, path),
        "rank": module.rank,
        "alpha": module.scale * module.rank if module.alpha_source else None,
        "alpha_in": module.alpha_source,
        "scale": module.scale,
        "dtype": "+".join(sorted(dtypes)),
        "state": state,
        "norm": delta_norm(module) if has_norm else None,
    }


def _target_group(base: Base | None, path: str) -> str:
    """Return the set of LoRA targets that a module belongs to, or "other"."""
    if base is not None and base.family.spec.is_connector(path):
        return CONNECTORS
    targets = base.family.spec.lora_targets if base else {}
    for group in _TARGET_GROUPS:
        patterns = targets.get(group, ())
        if any(re.fullmatch(pattern, path) for pattern in patterns):
            return group
    return "other"


def group_shares(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each group's share of ‖ΔW‖² over all modules, largest first."""
    squares_by_group: dict[str, list[float]] = {}
    for row in rows:
        squares_by_group.setdefault(row["group"], []).append((row["norm"] or 0.0) ** 2)

    total = sum(sum(squares) for squares in squares_by_group.values()) or 1.0
    shares = [
        {"group": group, "modules": len(squares), "share": sum(squares) / total}
        for group, squares in squares_by_group.items()
    ]
    return sorted(shares, key=lambda share: (-share["share"], share["group"]))


def supporting_programs(
    file: AdapterFile,
    family: str | None,
    kinds: Sequence[str],
    form: dict[str, Any],
    modules: Sequence[AdapterModule],
) -> list[dict[str, Any]]:
    """Return the programs of programs.json, and what each multiplies ΔW by.

    ``reads``: "yes", "no", or "unknown" where that depends on the base model, which is
    not known. ``scale`` is [least, most] over the modules, or None without "yes".
    ``strength`` is the value to set in the program so that ΔW is as this file
    defines it; None if no single number does that.
    """
    rules = read_json(Path(__file__).with_name("programs.json"))
    programs: dict[str, dict[str, Any]] = {}
    for rule in rules:
        name = rule["program"]
        row = programs.setdefault(
            name,
            {"program": name, "reads": "no", "scale": None, "strength": None},
        )
        depends_on_base = bool({"names", "families"} & set(rule))
        if family is None and depends_on_base and row["reads"] == "no":
            row["reads"] = "unknown"
        is_read = _reads_file(rule, family, kinds, form, modules)
        is_read = is_read and ("header" in rule) == (DORA_HEADER in file.header)
        if not is_read or row["scale"] is not None:
            continue

        scales = []
        ratios = set()
        for module in modules:
            scale = module.scale if module.alpha_source in rule["alpha"] else 1.0
            scales.append(scale)
            ratios.add(round(module.scale / scale, 6))
        row["reads"] = "yes"
        row["scale"] = [min(scales), max(scales)]
        row["strength"] = min(ratios) if len(ratios) == 1 else None
    return list(programs.values())


def _reads_file(
    rule: Mapping[str, Any],
    family: str | None,
    kinds: Sequence[str],
    form: Mapping[str, Any],
    modules: Sequence[AdapterModule],
) -> bool:
    """Return whether a rule of programs.json applies to a file."""
    names = form["names"]
    alpha_sources = {module.alpha_source for module in modules}
    return (
        (names == "both" or rule.get("names", names) == names)
        and rule.get("not_with") not in alpha_sources
        and form["prefix"] in rule["prefixes"]
        and family in rule.get("families", [family])
        and set(kinds) <= set(rule["kinds"])
        and form["peft_folder"] >= rule.get("folder", False)
    )


def summary_lines(facts: dict[str, Any]) -> list[str]:
    """Return the sentences about a file that are printed above its tables."""
    rows = facts["modules"]
    form = facts["form"]
    dtypes = sorted({row["dtype"] for row in rows})
    lines = [f"{facts['kind']}, {counted(len(rows), 'module')}, {', '.join(dtypes)}"]

    form_line = f"form: {form['names']} names"
    if form["prefix"]:
        form_line += f", prefix {form['prefix']}"
    if form["peft_folder"]:
        form_line += ", in a PEFT folder"
    lines.append(form_line)

    if facts["other_model"]:
        lines.append(
            f"base: {facts['other_model']}, which videotune does not train"
            f" (trains: {trained_models()})"
        )
    elif facts["fits"]:
        lines.append(f"base: every module fits {model_files.some(facts['fits'])}")
    elif facts["family"] is None:
        lines.append(
            "base: not known, no published architecture has these modules;"
            " --against BASE names it"
        )
    else:
        lines.append(f"base: {facts['family']}")

    if facts["trained_on"]:
        lines.append(f"trained on: {facts['trained_on']} (from its header)")
        if facts["trained_on"].startswith("asset:"):
            lines.append(
                "these weights work only with the toy model, which no other program has"
            )
    if facts["expert"]:
        lines.append(f"expert: {facts['expert']} (from its {facts['expert_by']})")
    if facts["misfits"]:
        lines.append(
            f"{len(facts['misfits'])} modules do not fit, such as {facts['misfits'][0]}"
        )
    if facts["other_tensors"]:
        others = model_files.some(facts["other_tensors"])
        lines.append(f"other tensors that do not belong to an adapter: {others}")

    for state in ("zero", "NaN", "infinite"):
        paths = [row["path"] for row in rows if row["state"] == state]
        if paths:
            lines.append(f"{len(paths)} modules are {state}: {model_files.some(paths)}")
    if all(row["state"] == "ok" for row in rows):
        lines.append("health: good, no module is zero, NaN or infinite")
    return lines
