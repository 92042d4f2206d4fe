"""``--init-from``: begin a new run with the weights of another one, and a new optimizer
state.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from videotune.adapters.adapter_types import ZERO, by_module, kind_of
from videotune.adapters.layers import load_weights
from videotune.adapters.lora import of_module
from videotune.bounds import require_file
from videotune.config.schema import Config
from videotune.config.sections import Lora
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import read_embedding, read_parts
from videotune.job.experts import of_expert, prefix
from videotune.models.base import DiffusersModel
from videotune.runs.checkpoint import MARKER, Checkpoint, read_checkpoint, select_rows
from videotune.trainer.expert_pool import ExpertPool
from videotune.trainer.step_context import TrainableState
from videotune.trainer.text_encoders import ROWS

LoadedAdapter = tuple[Mapping[str, Mapping[str, Tensor]], Mapping[str, float]]
"""An adapter: the tensors of each module by PEFT's names, and the factor of its update.
"""


def init_from(
    source: Path, family: DiffusersModel, pool: ExpertPool, config: Config
) -> None:
    """Copy the weights of a LoRA or embedding file, or of a checkpoint, into what
    trains, and print what was taken.

    Raises VideotuneError if they do not fit.
    """
    if is_adapter(source) and len(pool.trainables) > 1:
        raise VideotuneError(
            f"init_from: {source} is one file, and two experts train. Set the folder of a checkpoint, or train one expert"
        )
    taken = []
    for expert, trainable in pool.trainables.items():
        taken.append(_load_expert(source, family, expert, trainable, config))
    echo(
        f"starting from the weights of {source} ({'; '.join(taken)}); new optimizer state, step 0"
    )


def _load_expert(
    source: Path,
    family: DiffusersModel,
    expert: str,
    trainable: TrainableState,
    config: Config,
) -> str:
    """Copy the weights of one expert, and return what was taken."""
    name_prefix = prefix(family.spec, expert)
    if config.training_method == "LORA":
        adapter = read_adapter(source, family, name_prefix)
        taken = put_adapter(source, adapter, trainable.parameters, config.lora)
    elif config.training_method == "EMBEDDING":
        taken = put_rows(source, family, trainable.parameters)
    elif source.is_dir():
        rows = trainable.shards.layout if trainable.shards is not None else {}
        weights = of_expert(checkpoint_in(source).load("weights"), name_prefix)
        load_weights(
            trainable.parameters, select_rows(weights, rows), f"init_from: {source}"
        )
        taken = f"all {len({*trainable.parameters, *rows})} tensors"
    else:
        raise VideotuneError(
            f"init_from: {source} is a file, and FINE_TUNE starts from the folder of a checkpoint"
        )

    if trainable.masters:
        trainable.masters.masters_to_model()
    if trainable.ema:
        weights_now = {name: p.detach() for name, p in trainable.parameters.items()}
        trainable.ema.load(weights_now)
    return taken


def put_rows(
    source: Path, family: DiffusersModel, parameters: Mapping[str, nn.Parameter]
) -> str:
    """Copy the rows of an embedding file or a checkpoint, and return how many there
    were.

    The new run's token may be another word. Raises VideotuneError if number or width of
    the rows differ.
    """
    if source.is_dir():
        loaded = of_expert(checkpoint_in(source).load("weights"), ROWS)
    else:
        loaded = read_embedding(family, source)[1]

    misfits = sorted({ROWS + name for name in loaded} ^ set(parameters))
    if misfits:
        raise VideotuneError(
            f"init_from: {source} does not have the rows that train here: {misfits[0]}"
        )
    for name, rows in loaded.items():
        parameter = parameters[ROWS + name]
        if rows.shape != parameter.shape:
            raise VideotuneError(
                f"init_from: {source} has {len(rows)} rows of {rows.shape[1]} numbers, and {len(parameter)} of "
                f"{parameter.shape[1]} train here. Set embedding.vectors to {len(rows)}"
            )
        with torch.no_grad():
            parameter.copy_(rows)
    return f"{sum(len(rows) for rows in loaded.values())} rows"


def put_adapter(
    source: Path,
    adapter: LoadedAdapter,
    parameters: Mapping[str, nn.Parameter],
    settings: Lora,
) -> str:
    """Copy an adapter into the one that trains, so that ΔW is the same, and return how
    much was taken.

    Factors A and B of a lower rank fill the first rows and columns. A keeps its draw in
    the others, whose B is zero.

    Args:
        source: the adapter's file, for messages.
        adapter: what is copied.
        parameters: the adapter that trains.
        settings: its settings.

    Raises:
        VideotuneError: if the adapter has another type, a higher rank, another size, or
            modules that do not train.
    """
    modules, scales = adapter
    trained_modules = by_module(parameters)
    check_kind(source, modules, settings)
    untrained = sorted(set(modules) - set(trained_modules))
    if untrained:
        raise VideotuneError(
            f"init_from: {source} changes {len(untrained)} modules that do not train here, such as {untrained[0]}. "
            "Set lora.targets so that they do"
        )

    for path, tensors in modules.items():
        refuse_shapes(source, path, tensors, trained_modules[path])
        for part, value in tensors.items():
            if part in ZERO and part != "oft_R":
                value = value * (scales[path] / of_module(settings, path).scale)
            _copy_factor(part, value, trained_modules[path][part].data)

    remaining = len(trained_modules) - len(modules)
    taken = f"{len(modules)} modules"
    if remaining:
        taken += f"; {remaining} others start at zero"
    return taken


def _copy_factor(part: str, value: Tensor, target: Tensor) -> None:
    if part == "lora_A":
        target[: len(value)].copy_(value)
    elif part == "lora_B":
        target.zero_()
        target[:, : value.shape[1]].copy_(value)
    else:
        target.copy_(value)


def check_source(source: Path, family: DiffusersModel, config: Config) -> None:
    """Check what init_from names before anything is encoded or loaded.

    Raises VideotuneError if it does not exist, is not an adapter or embedding of this
    family, or does not fit the config.
    """
    if not source.exists():
        raise VideotuneError(f"init_from: no such file or folder: {source}")
    require_file(source, "init_from")
    if config.training_method == "LORA" and is_adapter(source):
        modules, _ = read_adapter(source, family, "")
        check_kind(source, modules, config.lora)
    if config.training_method == "EMBEDDING" and source.is_file():
        read_embedding(family, source)


def check_kind(
    source: Path, modules: Mapping[str, Mapping[str, Tensor]], settings: Lora
) -> None:
    """Raise VideotuneError for an adapter of another type, or of a higher rank, than
    the one that trains.
    """
    names = []
    for path, tensors in modules.items():
        names += [f"{path}.{part}" for part in tensors]
    kind = kind_of(names)
    if kind != settings.variant:
        raise VideotuneError(
            f"init_from: {source} is {kind}, and lora.variant is {settings.variant}"
        )

    for path, tensors in modules.items():
        if "lora_A" not in tensors:
            continue
        rank = tensors["lora_A"].shape[0]
        if rank > of_module(settings, path).rank:
            raise VideotuneError(
                f"init_from: {source} has rank {rank} in {path}. Set lora.rank to it, or higher"
            )


def refuse_shapes(
    source: Path,
    path: str,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
) -> None:
    """Raise VideotuneError if a module's tensors do not fit those that train."""
    if "lora_A" in tensors:
        inputs_differ = tensors["lora_A"].shape[1] != parameters["lora_A"].shape[1]
        outputs_differ = tensors["lora_B"].shape[0] != parameters["lora_B"].shape[0]
        if inputs_differ or outputs_differ:
            raise VideotuneError(
                f"init_from: {source} was made for another base: {path} differs in size"
            )
        return

    shapes = {name: x.shape for name, x in tensors.items()}
    trained_shapes = {name: x.shape for name, x in parameters.items()}
    if shapes != trained_shapes:
        raise VideotuneError(
            f"init_from: {source} has {_describe_shapes(tensors)} in {path}, and here it is "
            f"{_describe_shapes(parameters)}. Set lora.rank as it was there, on the same base"
        )


def _describe_shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in sorted(tensors.items()))


def is_adapter(source: Path) -> bool:
    """Return whether a source is a file, or a folder of PEFT or diffusers with an
    adapter, rather than a checkpoint.
    """
    if source.is_file():
        return True
    is_checkpoint = (source / MARKER).exists()
    return not is_checkpoint and any(source.glob("*.safetensors"))


def checkpoint_in(source: Path) -> Checkpoint:
    """Return the checkpoint in a folder.

    Raises VideotuneError if there is none, or it is not complete.
    """
    checkpoint = read_checkpoint(source)
    if isinstance(checkpoint, str):
        raise VideotuneError(
            f"init_from: {source} is not a complete checkpoint: {checkpoint}"
        )
    return checkpoint


def read_adapter(
    source: Path, family: DiffusersModel, name_prefix: str
) -> LoadedAdapter:
    """Read the adapter of a run's checkpoint, or of an adapter file or folder of any
    program.

    Args:
        source: the checkpoint, file or folder.
        family: the base model.
        name_prefix: of the expert's names in the checkpoint.

    Raises:
        VideotuneError: if the source does not exist or is not an adapter of this
            family.
    """
    if is_adapter(source) or not source.is_dir():
        try:
            return read_parts(family, source)
        except VideotuneError as error:
            raise VideotuneError(f"init_from: {error}") from error

    checkpoint = checkpoint_in(source)
    scale = checkpoint.state().get("lora_scale")
    weights = of_expert(checkpoint.load("weights"), name_prefix)
    if scale is None or kind_of(weights) is None:
        raise VideotuneError(
            f"init_from: {source} holds no LoRA: its run trained every weight"
        )
    modules = by_module(weights)
    scales = {}
    for path in modules:
        scales[path] = float(scale[path] if isinstance(scale, dict) else scale)
    return modules, scales
