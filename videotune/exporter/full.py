"""A whole model as a folder in diffusers layout, which ``from_pretrained`` opens like the one that it came from.

It is a fine-tuned one, or the base model with an adapter worked into its weights, which needs no adapter any more.
"""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from videotune.adapters import adapter_types, effect
from videotune.errors import VideotuneError
from videotune.exporter.formats import (
    Exported,
    check_finite,
    check_same,
    digest_of,
    failed,
    refuse_overflow,
)
from videotune.files import system_errors, whole_folder, write_json
from videotune.models import loading, model_files, single_file
from videotune.models.base import DiffusersModel

StateDict = Mapping[str, Tensor]
"""Weights by their names."""


def export_full(
    family: DiffusersModel,
    expert: str,
    state: StateDict,
    base: Path,
    folder: Path,
    facts: Mapping[str, Any],
    text: Mapping[str, StateDict] | None = None,
    dtype: torch.dtype | None = None,
) -> Exported:
    """Write the model with the trained weights ``state`` of an expert, all else as in ``base``, and read them back.

    ``text``: trained weights of text encoders, by their folders and by name; ``state`` is empty where these alone trained.

    The weights have ``dtype`` (None: the run's), but those that diffusers keeps in float32. Raises VideotuneError for NaN,
    for weights that the dtype cannot hold, and where those read back are not the ones written.
    """
    text = {name: own for name, own in (text or {}).items() if own}
    check_finite("model", state, *text.values())
    part = family.spec.part_of(expert)
    with model_folder(base, folder, [part] * bool(state) + list(text), facts) as aside:
        if state:
            shell: Any = family.skeleton(expert)
            weights = rounded(shell, dtype or family.dtype, state, base / part)
            refuse_overflow(
                state, {name: weights[name] for name in state}, dtype or family.dtype
            )
            shell.load_state_dict(weights, assign=True)
            with system_errors(folder):
                shell.save_pretrained(aside / part)
            check_same(weights, tensors_in(aside / part), folder)
        for name, own in text.items():
            with system_errors(folder):
                write_text_encoder(
                    family, name, own, base / name, aside / name, dtype or family.dtype
                )
    count = len(state) + sum(len(own) for own in text.values())
    return Exported(
        "diffusers", folder, count, 0.0, "diffusers from_pretrained", facts.get("use", "")
    )


@contextmanager
def model_folder(
    base: Path, folder: Path, parts: Collection[str], facts: Mapping[str, Any]
) -> Iterator[Path]:
    """A folder that takes its place at the block's end: the base's files but ``parts`` and hidden ones, and our facts.

    What the block adds are these parts. The others are linked where the disk allows it, so that they take no room twice.
    """

    def left_out(place: str, names: list[str]) -> list[str]:
        return [
            name
            for name in names
            if name.startswith(".") or (Path(place) == base and name in parts)
        ]

    with whole_folder(folder) as aside:
        shutil.copytree(base, aside, copy_function=link, ignore=left_out, dirs_exist_ok=True)
        yield aside
        write_json(aside / "videotune.json", dict(facts))


def write_text_encoder(
    family: DiffusersModel,
    name: str,
    state: StateDict,
    base: Path,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """A text encoder with trained weights, all else as in ``base``, in the layout of transformers.

    Raises VideotuneError where the weights read back are not the ones written.
    """
    encoder: Any = loading.load_model(
        type(family.text_skeletons()[name]), base, dtype, torch.device("cpu")
    )
    encoder.load_state_dict(state, strict=False)
    held = encoder.state_dict()
    refuse_overflow(state, {key: held[key] for key in state}, dtype)
    with loading.quietly():
        encoder.save_pretrained(folder)
    check_same(
        held, tensors_in(folder), folder, needed=state
    )  # tied weights are in the file once


def rounded(shell: Any, dtype: torch.dtype, state: StateDict, base: Path) -> dict[str, Tensor]:
    """The weights in the dtypes of their use; what is no parameter (a table of positions) as in the base's file."""
    stored = (
        item for one in loading.read_states(type(shell), base, shell) for item in one.items()
    )
    whole = {name: value for name, value in stored if name not in state} | dict(state)
    dtypes = {name: loading.dtype_of(name, type(shell), dtype) for name in shell.state_dict()}
    return {
        name: whole[name].detach().to("cpu", own).contiguous() for name, own in dtypes.items()
    }


def tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a part on disk, one after the other."""
    for path in model_files.weight_files(folder):
        yield from load_file(path).items()  # the file's own pages


def link(source: str, target: str) -> str:
    """A second name for a file's bytes where both lie on one disk, else a copy; never a link to a link."""
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(real, target)
    return target


def export_merged(
    family: DiffusersModel,
    adapters: Mapping[str, StateDict],
    scale: float,
    base: Path,
    folder: Path,
    facts: Mapping[str, Any],
) -> Exported:
    """Write the model with the adapter of each expert in its weights, all else as in ``base``, and read them back.

    A weight becomes what the adapter makes of it, calculated in float64 and rounded once to the dtype that it has in the
    base's file. One tensor at a time is in memory. Raises VideotuneError for NaN, for modules that the base lacks, and
    where a weight reads back as something else.
    """
    check_finite("adapter", *adapters.values())
    names = {family.spec.part_of(expert): state for expert, state in adapters.items()}
    with model_folder(base, folder, names, facts) as aside:
        nets = {family.spec.part_of(expert): family.skeleton(expert) for expert in adapters}
        dtype = family.dtype
        count = sum(
            _merge_part(nets[part], dtype, base / part, names[part], scale, aside / part)
            for part in nets
        )
    return Exported("merged", folder, count, 0.0, "safetensors", facts.get("use", ""))


def _merge_part(
    net: Any, dtype: Any, base: Path, state: StateDict, scale: float, folder: Path
) -> int:
    """Copy a part of the model and change the weights that the adapter has modules for; how many these are.

    Of a file in another layout than diffusers' all of the part is written anew, what was fp8 in ``dtype``.
    """
    modules = {
        f"{path}.weight": parts for path, parts in adapter_types.by_module(state).items()
    }
    files = model_files.weight_files(base)
    sources = loading.check_part(type(net), base, net)
    if absent := sorted(set(modules) - set(sources)):
        raise VideotuneError(
            f"{base} has no weight called {absent[0]}: the adapter is one of another model"
        )
    if not single_file.in_diffusers_layout(sources):
        whole = {}
        for name, value in single_file.tensors(sources):
            new = effect.new_weight(value, modules[name], scale) if name in modules else value
            eight = sources[name].stored.dtype in single_file.FP8
            whole[name] = new.to(
                loading.dtype_of(name, type(net), dtype) if eight else value.dtype, copy=True
            )
        check_finite("merged model", whole)
        net.load_state_dict(whole, assign=True)
        with system_errors(folder):
            net.save_pretrained(folder)
        check_same(whole, tensors_in(folder), folder)
        return len(modules)
    folder.mkdir(parents=True)
    for entry in sorted(base.iterdir()):
        if entry.is_file() and not entry.name.startswith("."):
            changed = entry in files and not set(modules).isdisjoint(
                model_files.headers([entry])
            )
            (shutil.copyfile if changed else link)(
                os.path.realpath(entry), str(folder / entry.name)
            )
    for file in files:
        _merge_file(file, modules, scale, folder / file.name)
    return len(modules)


def _merge_file(
    base: Path, modules: Mapping[str, StateDict], scale: float, target: Path
) -> None:
    """Write the new weights over the old ones in a copy of a file, whose head stays as it is, and read them back."""
    spans = model_files.spans_of(base)
    if not (mine := [name for name in modules if name in spans]):
        return
    digests: dict[str, str] = {}
    with safe_open(base, "pt") as old, target.open("r+b") as new:
        for name in mine:
            own = old.get_tensor(name)
            weight = effect.new_weight(own, modules[name], scale).to(own.dtype).contiguous()
            if not bool(weight.isfinite().all()):
                raise VideotuneError(
                    f"{name} is too large for the base's {own.dtype} after merging: not exported"
                )
            new.seek(spans[name][0])
            new.write(weight.flatten().view(torch.uint8).numpy().data)
            digests[name] = digest_of({name: weight})
        new.flush()
        os.fsync(new.fileno())
    with safe_open(target, "pt") as back:
        for name, digest in digests.items():
            if digest_of({name: back.get_tensor(name)}) != digest:
                raise failed(target, f"{name} does not match")
