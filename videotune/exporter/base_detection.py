"""Find the base models that an adapter file fits."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import (
    AdapterFile,
    adapter_path,
    refuse_large_file,
)
from videotune.exporter.adapter_modules import (
    delta_shape,
    fits_shape,
    fused_shape,
    group_by_module,
    without_alpha,
)
from videotune.exporter.read_scale import (
    flat_name,
    paths_by_name,
)
from videotune.files import read_json
from videotune.models import base_model, model_files, registry
from videotune.models.base import DiffusersModel
from videotune.models.other_models import (
    letters_of,
    other_model_of_keys,
    other_model_of_name,
)

LONGEST_NAME = 1000
"""Characters of the name of a base model in a header."""

_ADAPTER_MARKS = (".lora", ".hada_", ".lokr_", ".oft_R")
"""Parts of tensor names that only adapters have."""


@dataclass(frozen=True)
class Base:
    """A base model's architecture."""

    names: tuple[str, ...]
    """The names under which it is published."""

    family: DiffusersModel

    net: nn.Module
    """The transformer on the meta device, with the text connectors if it has some."""


def open_adapter(path: Path, *, finite: bool = True) -> AdapterFile:
    """Open an adapter's file or folder.

    Raises:
        VideotuneError: if there is no adapter, or the file is too large for one.
    """
    file = adapter_path(path)
    refuse_large_file(file)
    if not file.is_file():
        raise VideotuneError(f"no such file or folder: {path}")

    keys = "\n".join(model_files.headers([file]))
    if not any(mark in keys for mark in _ADAPTER_MARKS):
        raise VideotuneError(
            f"{file} is not an adapter:"
            " no tensor is named like those of LoRA, LoHa, LoKr or OFT"
        )
    return AdapterFile(file, finite=finite)


ARCHITECTURE_KEYS = (
    "modelspec.architecture",
    "ss_base_model_version",
    "ss_network_module",
    "base_model",
)
"""Keys of a header in which trainers name the model."""


def other_model_of_adapter(file: AdapterFile) -> str | None:
    """Return the model that an adapter belongs to by its tensors' names or its header,
    if videotune does not train it.

    An adapter of some models also fits the shapes of a model that is trained.
    """
    title = other_model_of_keys(file.tensors)
    for key in ARCHITECTURE_KEYS:
        title = title or other_model_of_name(file.header.get(key, ""))
    return title


def family_of_header(file: AdapterFile) -> str | None:
    """Return the family that a file's header names, in videotune's entry or in a
    trainer's key; None if it names none.

    A LoRA on the attention of one model may fit the shapes of another.
    """
    family = file.facts.get("family")
    if isinstance(family, str):
        return family
    for key in ARCHITECTURE_KEYS:
        model, _, _ = file.header.get(key, "").partition("/")
        for family_name in registry.names():
            aliases = registry.find(family_name).spec.aliases
            if letters_of(model) in map(letters_of, (family_name, *aliases)):
                return family_name
    return None


@cache
def load_architecture(folder: Path, names: tuple[str, ...]) -> Base:
    """Build the architecture from the configs in a folder."""
    family_name = base_model.spec_for(
        None, base_model.place(str(folder), weights=False)
    ).name
    family_class = registry.find(family_name)
    family = family_class(folder, torch.device("cpu"), torch.float32)
    if family.spec.connectors is not None:
        # A file may change them too.
        family.spec = family.spec.with_connectors()
    return Base(names, family, family.skeleton())


def candidate_bases(
    base: str | None = None, family: str | None = None
) -> Iterator[Base]:
    """Yield the architectures that a file may belong to.

    Args:
        base: a folder or Hub id; only its configs are read. None: all published base
            models.
        family: only published base models of this family.
    """
    if base is not None:
        yield load_architecture(base_model.place(base, weights=False).folder, (base,))
        return

    folder_names: dict[str, str] = read_json(base_model.CONFIGS / "index.json")
    folders = sorted(path for path in base_model.CONFIGS.iterdir() if path.is_dir())
    for folder in folders:
        if family is not None and base_model.of_base(folder) is not registry.find(
            family
        ):
            continue
        names = [
            name
            for name, folder_name in folder_names.items()
            if folder_name == folder.name and "/" in name
        ]
        yield load_architecture(folder, tuple(names))


def base_of_header(file: AdapterFile) -> Base | None:
    """Return the architecture of the base model that the file's header names.

    Only models on this machine count: a stranger's file starts no download.
    """
    facts = file.facts.get("base")
    name = facts.get("name") if isinstance(facts, Mapping) else None
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        return None
    is_asset = name.startswith("asset:")
    if not is_asset and not os.path.isfile(os.path.join(name, "model_index.json")):
        return None
    with suppress(VideotuneError):  # the header is only a hint
        return load_architecture(base_model.place(name, weights=False).folder, (name,))
    return None


def misfits(base: Base, modules: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Return, by name, why modules of a file do not fit the base model."""
    paths_of = paths_by_name(base.family, base.net)
    reasons = {}
    for name, parts in modules.items():
        paths = paths_of.get(flat_name(name), ())
        if not paths:
            reasons[name] = "no module of it"
            continue

        factors = without_alpha(parts)
        base_shape = fused_shape(base.net, paths)
        if fits_shape(factors, base_shape):
            continue
        size = "rotations of other inputs"
        if "oft_R" not in factors:
            size = "x".join(map(str, delta_shape(factors)))
        reasons[name] = f"{size}, and {base_shape[0]}x{base_shape[1]} in the base"
    return reasons


@dataclass(frozen=True)
class _Candidate:
    """A base model with the modules of a file that do not fit it."""

    base: Base
    misfits: dict[str, str]
    is_other_family: bool
    """Whether the file's header names another family."""

    lacks_expert: bool
    """Whether the file belongs to an expert that the base model does not have."""

    def distance(self) -> tuple[int, bool, bool, int]:
        """Sort key: of two bases that fit, the one with fewer untouched modules is
        nearer.
        """
        module_count = len(paths_by_name(self.base.family, self.base.net))
        return len(self.misfits), self.is_other_family, self.lacks_expert, module_count


def find_fitting_bases(
    file: AdapterFile, base: str | None, family: str | None
) -> tuple[list[Base], Base, dict[str, str]]:
    """Compare a file with the base models that it may belong to.

    Returns:
        The bases that fit every module, the base of the file's header first; the
        nearest base; and that base's misfits.
    """
    modules, _ = group_by_module(file)
    expert, _ = detect_expert(file)
    header_family = family_of_header(file)

    named_base = base_of_header(file) if base is None else None
    bases = [named_base] if named_base is not None else []
    bases += candidate_bases(base, family)

    candidates = []
    for candidate_base in bases:
        spec = candidate_base.family.spec
        expert_names = [spec_expert.name for spec_expert in spec.experts]
        candidates.append(
            _Candidate(
                base=candidate_base,
                misfits=misfits(candidate_base, modules),
                is_other_family=spec.name != header_family,
                lacks_expert=expert is not None and expert not in expert_names,
            )
        )
    candidates.sort(key=_Candidate.distance)

    fitting = [candidate for candidate in candidates if not candidate.misfits]
    with_expert = [candidate for candidate in fitting if not candidate.lacks_expert]
    fits = [candidate.base for candidate in with_expert or fitting]
    nearest = candidates[0]
    return fits, nearest.base, nearest.misfits


def detect_expert(file: AdapterFile) -> tuple[str | None, str]:
    """Return which expert a file belongs to, and the source: "header" or "file name".

    Returns (None, "") if neither names an expert.
    """
    header_expert = file.facts.get("expert")
    if isinstance(header_expert, str):
        return header_expert[:20], "header"

    folder_name = file.path.parent.name if file.settings_source == "folder" else ""
    name = f"{folder_name} {file.path.name}".lower()
    noise_levels = set(re.findall(r"(high|low)[^a-z]?noise", name))
    if len(noise_levels) == 1:
        return noise_levels.pop(), "file name"
    return None, ""
