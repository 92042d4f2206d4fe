"""Export a whole model as a folder in diffusers layout, which ``from_pretrained``
opens.

It is a fine-tuned model, or the base model with an adapter merged into its weights.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from videotune.adapters import adapter_types, effect
from videotune.console import bar
from videotune.errors import VideotuneError
from videotune.exporter.formats import (
    Exported,
    check_finite,
    check_same,
    digest_of,
    refuse_overflow,
    verification_error,
)
from videotune.files import system_errors, whole_folder, write_json
from videotune.model_spec import ModelSpec
from videotune.models import loading, model_files, single_file
from videotune.models.base import DiffusersModel
from videotune.models.weight_changes import Change, WeightChanges

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
    """Write a model with trained weights, everything else as in ``base``, and read it
    back.

    Args:
        family: the family of the model.
        expert: the expert that ``state`` belongs to.
        state: the trained weights; empty if only text encoders were trained.
        base: the base model's folder.
        folder: the folder to write.
        facts: written to ``videotune.json``.
        text: trained weights of text encoders, by their folders and by name.
        dtype: the dtype of the weights, except those that diffusers keeps in float32.
            None: the run's.

    Raises:
        VideotuneError: for NaN, for weights that the dtype cannot hold, and if the
            weights read back differently.
    """
    text_states = {name: weights for name, weights in (text or {}).items() if weights}
    check_finite("model", state, *text_states.values())
    dtype = dtype or family.dtype
    part = family.spec.part_of(expert)
    changed_parts = list(text_states)
    if state:
        changed_parts.append(part)

    with model_folder(base, folder, changed_parts, facts) as temporary_folder:
        if state:
            model: Any = family.skeleton(expert)
            weights = cast_weights(
                model, dtype, state, base / part, family.weight_changes.get(part)
            )
            refuse_overflow(state, {name: weights[name] for name in state}, dtype)
            model.load_state_dict(weights, assign=True)
            with system_errors(folder):
                model.save_pretrained(temporary_folder / part)
            check_same(weights, iter_tensors(temporary_folder / part), folder)

        for name, text_state in text_states.items():
            with system_errors(folder):
                write_text_encoder(
                    family=family,
                    name=name,
                    state=text_state,
                    base=base / name,
                    folder=temporary_folder / name,
                    dtype=dtype,
                )

    weight_count = len(state) + sum(
        len(text_state) for text_state in text_states.values()
    )
    return Exported(
        format="diffusers",
        path=folder,
        modules=weight_count,
        max_error=0.0,
        reader="diffusers from_pretrained",
        use=facts.get("use", ""),
    )


@contextmanager
def model_folder(
    base: Path, folder: Path, parts: Collection[str], facts: Mapping[str, Any]
) -> Iterator[Path]:
    """Yield a folder with the base's files, which takes its name at the end of the
    block.

    The files are hard links if the disk allows it, so that they take no space twice.

    Args:
        base: the base model's folder. Its hidden files are left out.
        folder: the folder to write.
        parts: subfolders of the base that are left out, because the block writes them.
        facts: written to ``videotune.json``.
    """

    def ignored(directory: str, names: list[str]) -> list[str]:
        is_root = Path(directory) == base
        return [
            name
            for name in names
            if name.startswith(".") or (is_root and name in parts)
        ]

    with whole_folder(folder) as temporary_folder:
        shutil.copytree(
            base,
            temporary_folder,
            copy_function=link_or_copy,
            ignore=ignored,
            dirs_exist_ok=True,
        )
        yield temporary_folder
        write_json(temporary_folder / "videotune.json", dict(facts))


def write_text_encoder(
    family: DiffusersModel,
    name: str,
    state: StateDict,
    base: Path,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write a text encoder with trained weights, everything else as in ``base``.

    The folder has the layout of transformers.

    Raises:
        VideotuneError: if the weights read back differently.
    """
    encoder_class = type(family.text_skeletons()[name])
    encoder: Any = loading.load_model(encoder_class, base, dtype, torch.device("cpu"))
    encoder.load_state_dict(state, strict=False)
    weights = encoder.state_dict()
    refuse_overflow(state, {key: weights[key] for key in state}, dtype)

    with loading.quietly():
        encoder.save_pretrained(folder)
    # Tied weights are in the file only once, so only the trained ones must be there.
    check_same(weights, iter_tensors(folder), folder, needed=state)


def cast_weights(
    model: Any,
    dtype: torch.dtype,
    state: StateDict,
    base: Path,
    changes: WeightChanges | None = None,
) -> dict[str, Tensor]:
    """Return a model's weights in the dtypes that they are used in.

    Buffers, such as a table of positions, and untrained weights come from the base's
    files, with their ``changes``.
    """
    model_class = type(model)
    weights = _untrained_weights(model, state, base, changes) | dict(state)
    cast = {}
    for name in model.state_dict():
        weight_dtype = loading.dtype_of(name, model_class, dtype)
        cast[name] = weights[name].detach().to("cpu", weight_dtype).contiguous()
    return cast


def _untrained_weights(
    model: Any, state: StateDict, base: Path, changes: WeightChanges | None
) -> dict[str, Tensor]:
    """Read the base's weights and buffers that are not in ``state``."""
    weights = {}
    states: Iterable[dict[str, Tensor]] = loading.read_states(type(model), base, model)
    if changes is not None:
        states = changes.apply(states, torch.device("cpu"))
    for tensors in states:
        for name, value in tensors.items():
            if name not in state:
                weights[name] = value
    return weights


def iter_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a part on disk, one after the other."""
    for path in model_files.weight_files(folder):
        yield from load_file(path).items()  # memory-mapped


def link_or_copy(source: str, target: str) -> str:
    """Hard-link a file, or copy it if the disks differ; links are resolved first."""
    real_source = os.path.realpath(source)
    try:
        os.link(real_source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(real_source, target)
    return target


def export_merged(
    family: DiffusersModel,
    adapters: Mapping[str, StateDict],
    scale: float,
    base: Path,
    folder: Path,
    facts: Mapping[str, Any],
    changes: Mapping[str, WeightChanges] | None = None,
) -> Exported:
    """Write the base model with adapters merged into its weights, and read it back.

    Each new weight is calculated in float64 and rounded once, to its dtype in the
    base's file. One tensor at a time is in memory.

    Args:
        family: the family of the model.
        adapters: the adapter of each expert.
        scale: alpha / rank.
        base: the base model's folder.
        folder: the folder to write.
        facts: written to ``videotune.json``.
        changes: of the base's weights before the adapters, by part.

    Raises:
        VideotuneError: for NaN, for modules that the base lacks, and if a weight reads
            back differently.
    """
    check_finite("adapter", *adapters.values())
    changes = changes or {}

    part_states: dict[str, StateDict] = {}
    for expert, state in adapters.items():
        part_states |= _by_part(family.spec, expert, state)
    with model_folder(base, folder, part_states, facts) as temporary_folder:
        weight_count = 0
        for part in part_states:
            weight_count += _merge_part(
                net=family.part_skeleton(part),
                dtype=family.dtype,
                base=base / part,
                new_weight=_merging(part_states[part], scale, changes.get(part)),
                folder=temporary_folder / part,
            )

    return Exported(
        format="merged",
        path=folder,
        modules=weight_count,
        max_error=0.0,
        reader="safetensors",
        use=facts.get("use", ""),
    )


def _by_part(spec: ModelSpec, expert: str, state: StateDict) -> dict[str, StateDict]:
    """Return the tensors of an adapter by the folders of the networks that they change."""
    if not spec.connectors_in_step:
        return {spec.part_of(expert): state}
    assert spec.connectors is not None
    path = spec.connectors.path
    of_connectors = {}
    of_transformer = {}
    for name, value in state.items():
        if spec.is_connector(name):
            of_connectors[name.removeprefix(f"{path}.")] = value
        else:
            of_transformer[name] = value
    return {spec.part_of(expert): of_transformer, path: of_connectors}


NewWeight = Mapping[str, Callable[[Tensor], Tensor]]
"""What a base's weight becomes, in float64 on the CPU, by the weight's name."""


def _merging(
    state: StateDict, scale: float, changes: WeightChanges | None
) -> NewWeight:
    """Return what becomes of each weight that an adapter or a change applies to."""
    before: Mapping[str, Change] = {} if changes is None else changes.read()
    adapters = {
        f"{path}.weight": parts
        for path, parts in adapter_types.by_module(state).items()
    }

    def merged(weight: Tensor, name: str) -> Tensor:
        weight = weight.double()
        if name in before:
            weight = before[name](weight)
        if name in adapters:
            weight = effect.new_weight(weight, adapters[name], scale)
        return weight

    return {
        name: partial(merged, name=name) for name in dict.fromkeys([*before, *adapters])
    }


def _merge_part(
    net: Any, dtype: Any, base: Path, new_weight: NewWeight, folder: Path
) -> int:
    """Write a part of the model with merged weights; return the changed weights'
    count.
    """
    weight_files = model_files.weight_files(base)
    sources = loading.check_part(type(net), base, net)
    missing = sorted(set(new_weight) - set(sources))
    if missing:
        raise VideotuneError(
            f"{base} has no weight called {missing[0]}: the adapter was made for another model"
        )

    if not single_file.in_diffusers_layout(sources):
        _merge_converted(net, dtype, sources, new_weight, folder)
        return len(new_weight)

    folder.mkdir()
    for entry in sorted(base.iterdir()):
        if not entry.is_file() or entry.name.startswith("."):
            continue
        is_changed = entry in weight_files and not set(new_weight).isdisjoint(
            model_files.headers([entry])
        )
        source = os.path.realpath(entry)
        target = str(folder / entry.name)
        if is_changed:
            shutil.copyfile(source, target)
        else:
            link_or_copy(source, target)
    for file in weight_files:
        _merge_file(file, new_weight, folder / file.name)
    return len(new_weight)


def _merge_converted(
    net: Any,
    dtype: Any,
    sources: Any,
    new_weight: NewWeight,
    folder: Path,
) -> None:
    """Merge a part whose file has another layout: all weights are saved again by
    diffusers.

    Weights in fp8 are saved in ``dtype``.
    """
    weights = {}
    for name, value in single_file.tensors(sources):
        weight = value
        if name in new_weight:
            weight = new_weight[name](value)
        is_fp8 = sources[name].stored.dtype in single_file.FP8
        weight_dtype = (
            loading.dtype_of(name, type(net), dtype) if is_fp8 else value.dtype
        )
        # A copy, since the parts of a fused tensor share its memory, which cannot be saved.
        weights[name] = weight.to(weight_dtype, copy=True)

    check_finite("merged model", weights)
    net.load_state_dict(weights, assign=True)
    with system_errors(folder):
        net.save_pretrained(folder)
    check_same(weights, iter_tensors(folder), folder)


def _merge_file(base: Path, new_weight: NewWeight, target: Path) -> None:
    """Overwrite the changed weights in a copy of a file and read them back."""
    spans = model_files.spans_of(base)
    names = [name for name in new_weight if name in spans]
    if not names:
        return

    digests: dict[str, str] = {}
    with (
        safe_open(base, "pt") as base_file,
        target.open("r+b") as merged_file,
        bar("merge") as progress,
    ):
        for done, name in enumerate(names):
            progress.update(done, len(names), name)
            base_weight = base_file.get_tensor(name)
            exact_weight = new_weight[name](base_weight)
            weight = exact_weight.to(base_weight.dtype).contiguous()
            if not bool(weight.isfinite().all()):
                raise VideotuneError(
                    f"{name} is too large for the base's {base_weight.dtype} after merging: not"
                    " exported"
                )
            start, _ = spans[name]
            merged_file.seek(start)
            merged_file.write(weight.flatten().view(torch.uint8).numpy().data)
            digests[name] = digest_of({name: weight})
        merged_file.flush()
        os.fsync(merged_file.fileno())

    with safe_open(target, "pt") as merged_file:
        for name, digest in digests.items():
            if digest_of({name: merged_file.get_tensor(name)}) != digest:
                raise verification_error(target, f"{name} does not match")
