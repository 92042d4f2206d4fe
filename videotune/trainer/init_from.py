"""``--init-from``: a new run that begins with weights of another one. Weights alone: the optimizer begins afresh."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from videotune.adapters.adapter_types import ZERO, by_module, kind_of
from videotune.adapters.layers import load_weights
from videotune.adapters.lora import of_module
from videotune.config.schema import Config, Lora
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import read_embedding, read_parts
from videotune.job.experts import of_expert, prefix
from videotune.models.base import DiffusersModel
from videotune.runs.checkpoint import MARKER, Checkpoint, cut, read_checkpoint
from videotune.trainer.expert_pool import ExpertPool
from videotune.trainer.step import TrainableState
from videotune.trainer.text_encoders import ROWS


def init_from(source: Path, family: DiffusersModel, pool: ExpertPool, config: Config) -> None:
    """Put the weights of a LoRA or embedding file, or of a checkpoint's folder, into what trains, and say what was taken.

    Raises VideotuneError where they do not fit.
    """
    if is_adapter(source) and len(pool.trainables) > 1:
        raise VideotuneError(
            f"init_from: {source} is one file, and two experts train: give a checkpoint's folder, or train one of them"
        )
    told = [
        _begin_one(source, family, name, trainable, config)
        for name, trainable in pool.trainables.items()
    ]
    echo(f"beginning with the weights of {source} ({'; '.join(told)}); fresh optimizer, step 0")


def _begin_one(
    source: Path, family: DiffusersModel, name: str, trainable: TrainableState, config: Config
) -> str:
    begin = prefix(family.spec, name)
    if config.training_method == "LORA":
        told = put_adapter(
            source, read_adapter(source, family, begin), trainable.parameters, config.lora
        )
    elif config.training_method == "EMBEDDING":
        told = put_rows(source, family, trainable.parameters)
    elif source.is_dir():
        rows = trainable.shards.rows if trainable.shards is not None else {}
        found_all = cut(of_expert(checkpoint_in(source).load("weights"), begin), rows)
        load_weights(trainable.parameters, found_all, f"init_from: {source}")
        told = f"all {len({*trainable.parameters, *rows})} tensors"
    else:
        raise VideotuneError(
            f"init_from: {source} is a file; FINE_TUNE begins from a checkpoint's folder"
        )
    if trainable.masters:
        trainable.masters.masters_to_model()
    if trainable.ema:
        trainable.ema.load(
            {name: parameter.detach() for name, parameter in trainable.parameters.items()}
        )
    return told


def put_rows(
    source: Path, family: DiffusersModel, parameters: Mapping[str, nn.Parameter]
) -> str:
    """Copy the rows of an embedding file, or of a checkpoint, into ours; says how many there were.

    The new run's token may be another word. Raises VideotuneError where there are more or fewer rows, or of another width.
    """
    is_run = source.is_dir()
    found = (
        of_expert(checkpoint_in(source).load("weights"), ROWS)
        if is_run
        else read_embedding(family, source)[1]
    )
    odd = sorted({ROWS + name for name in found} ^ set(parameters))
    if odd:
        raise VideotuneError(
            f"init_from: {source} does not have the rows that train here: {odd[0]}"
        )
    for name, rows in found.items():
        ours = parameters[ROWS + name]
        if rows.shape != ours.shape:
            raise VideotuneError(
                f"init_from: {source} has {len(rows)} rows of {rows.shape[1]} numbers, and {len(ours)} of {ours.shape[1]} "
                "train here: set embedding.vectors to their number"
            )
        with torch.no_grad():
            ours.copy_(rows)
    return f"{sum(len(rows) for rows in found.values())} rows"


LoadedAdapter = tuple[Mapping[str, Mapping[str, Tensor]], Mapping[str, float]]
"""An adapter to begin with: the tensors of each module by PEFT's names, and what its update is scaled by."""


def put_adapter(
    source: Path, found: LoadedAdapter, parameters: Mapping[str, nn.Parameter], settings: Lora
) -> str:
    """Copy the tensors of each module into ours, so that ΔW is theirs; says how much was taken.

    Factors A and B of a lower rank fill the first rows and columns: A keeps its draw in the others, whose B is zero. Raises
    VideotuneError where they are of another kind, have a higher rank, another size, or are of modules that do not train.
    """
    (theirs, scales) = found
    ours = by_module(parameters)
    check_kind(source, theirs, settings)
    odd = sorted(set(theirs) - set(ours))
    if odd:
        raise VideotuneError(
            f"init_from: {source} changes {len(odd)} modules that do not train here, such as {odd[0]}: set lora.targets so "
            "that they do"
        )
    for path, parts in theirs.items():
        refuse_shapes(source, path, parts, ours[path])
        for part, value in parts.items():
            target = ours[path][part].data
            if part in ZERO and part != "oft_R":
                value = value * (scales[path] / of_module(settings, path).scale)
            if part == "lora_A":
                target[: len(value)].copy_(value)
            elif part == "lora_B":
                target.zero_()
                target[:, : value.shape[1]].copy_(value)
            else:
                target.copy_(value)
    rest = len(ours) - len(theirs)
    return f"{len(theirs)} modules" + (f"; {rest} others begin at zero" if rest else "")


def check_source(source: Path, family: DiffusersModel, config: Config) -> None:
    """Look at what init_from names before anything is encoded or loaded.

    Raises VideotuneError where it is missing, is no adapter or embedding of this family, or does not go with the config.
    """
    if not source.exists():
        raise VideotuneError(f"init_from: no such file or folder: {source}")
    if config.training_method == "LORA" and is_adapter(source):
        check_kind(source, read_adapter(source, family, "")[0], config.lora)
    if config.training_method == "EMBEDDING" and source.is_file():
        read_embedding(family, source)


def check_kind(
    source: Path, theirs: Mapping[str, Mapping[str, Tensor]], settings: Lora
) -> None:
    """Raise VideotuneError for an adapter of another kind, or of a higher rank, than the one that trains."""
    kind = kind_of([f"{path}.{part}" for path, own in theirs.items() for part in own])
    if kind != settings.variant:
        raise VideotuneError(
            f"init_from: {source} is {kind}, and lora.variant is {settings.variant}"
        )
    for path, parts in theirs.items():
        if (
            "lora_A" in parts
            and (rank := parts["lora_A"].shape[0]) > of_module(settings, path).rank
        ):
            raise VideotuneError(
                f"init_from: {source} has rank {rank} in {path}: set lora.rank to it, or higher"
            )


def refuse_shapes(
    source: Path, path: str, theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]
) -> None:
    """Raise VideotuneError where a module's tensors have no place in ours."""
    if "lora_A" in theirs:
        a = theirs["lora_A"]
        b = theirs["lora_B"]
        if a.shape[1] != ours["lora_A"].shape[1] or b.shape[0] != ours["lora_B"].shape[0]:
            raise VideotuneError(
                f"init_from: {source} was made for another base: {path} differs in size"
            )
        return
    if {name: x.shape for name, x in theirs.items()} != {
        name: x.shape for name, x in ours.items()
    }:
        shapes = [
            ", ".join(f"{name} {tuple(x.shape)}" for name, x in sorted(each.items()))
            for each in (theirs, ours)
        ]
        raise VideotuneError(
            f"init_from: {source} has {shapes[0]} in {path}, and here it is {shapes[1]}: set lora.rank as it was there, "
            "on the same base"
        )


def is_adapter(source: Path) -> bool:
    """Whether a source is a file, or a folder of PEFT or diffusers with an adapter in it, rather than a checkpoint."""
    return source.is_file() or (
        not (source / MARKER).exists() and any(source.glob("*.safetensors"))
    )


def checkpoint_in(source: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises VideotuneError where it is none, or not complete.
    """
    checkpoint = read_checkpoint(source)
    if isinstance(checkpoint, str):
        raise VideotuneError(f"init_from: {source} is no complete checkpoint: {checkpoint}")
    return checkpoint


def read_adapter(source: Path, family: DiffusersModel, begin: str) -> LoadedAdapter:
    """The adapter in a run's checkpoint, of names that ``begin`` so, or in an adapter file or folder of any program.

    Its alpha may be another than ours. Raises VideotuneError where the source is missing, or no LoRA of this family.
    """
    if source.is_dir() and not is_adapter(source):
        checkpoint = checkpoint_in(source)
        scale = checkpoint.state().get("lora_scale")
        weights = of_expert(checkpoint.load("weights"), begin)
        if scale is None or kind_of(weights) is None:
            raise VideotuneError(
                f"init_from: {source} holds no LoRA: it is of a run that trained every weight"
            )
        parts = by_module(weights)
        return parts, {
            path: float(scale[path] if isinstance(scale, dict) else scale) for path in parts
        }
    try:
        return read_parts(family, source)
    except VideotuneError as error:
        raise VideotuneError(f"init_from: {error}") from error
