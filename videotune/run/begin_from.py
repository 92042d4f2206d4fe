"""``--init-from``: a new run that begins with weights of another one. Weights alone: the optimizer begins afresh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from videotune.errors import VideotuneError
from videotune.export.embedding import read_embedding
from videotune.export.lora import read_factors
from videotune.run.bench import Bench, put_weights
from videotune.run.console import say
from videotune.run.experts import of_expert, prefix
from videotune.run.models import lora_settings
from videotune.run.text import ROWS
from videotune.train.state import Checkpoint, read_checkpoint
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor, nn

    from videotune.config.schema import Config
    from videotune.train.step import Learner


def begin_from(source: Path, family: Family, bench: Bench, config: Config) -> None:
    """Put the weights of a LoRA or embedding file, or of a checkpoint's folder, into what trains, and say what was taken.

    Raises VideotuneError where they do not fit.
    """
    if source.is_file() and len(bench.learners) > 1:
        raise VideotuneError(
            f"init_from: {source} is one file, and two experts train: give a checkpoint's folder, or train one of them"
        )
    told = [_begin_one(source, family, name, learner, config) for name, learner in bench.learners.items()]
    say(f"beginning with the weights of {source} ({'; '.join(told)}); fresh optimizer, step 0")


def _begin_one(source: Path, family: Family, name: str, learner: Learner, config: Config) -> str:
    begin = prefix(family.spec, name)
    if config.training_method == "LORA":
        found = factors_of_checkpoint(source, begin) if source.is_dir() else factors_of(source, family)
        settings = lora_settings(config)
        told = put_lora(source, found, learner.parameters, settings.rank, settings.scale)
    elif config.training_method == "EMBEDDING":
        told = put_rows(source, family, learner.parameters)
    elif source.is_dir():
        checkpoint = checkpoint_in(source)
        put_weights(learner.parameters, of_expert(checkpoint.load("weights"), begin), config, f"init_from: {source}")
        told = f"all {len(learner.parameters)} tensors"
    else:
        what = "is a file" if source.exists() else "is not there"
        raise VideotuneError(f"init_from: {source} {what}; FINE_TUNE begins from a checkpoint's folder")
    if learner.masters:
        learner.masters.spread()
    if learner.ema:
        learner.ema.load({name: parameter.detach() for name, parameter in learner.parameters.items()})
    return told


def put_rows(source: Path, family: Family, parameters: Mapping[str, nn.Parameter]) -> str:
    """Copy the rows of an embedding file, or of a checkpoint, into ours; says how many there were.

    The new run's token may be another word. Raises VideotuneError where there are more or fewer rows, or of another width.
    """
    import torch

    if source.is_dir():
        found = of_expert(checkpoint_in(source).load("weights"), ROWS)
    else:
        found = read_embedding(family, source)[1]
    odd = sorted({ROWS + name for name in found} ^ set(parameters))
    if odd:
        raise VideotuneError(f"init_from: {source} does not have the rows that train here: {odd[0]}")
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


Factors = tuple["Tensor", "Tensor", float]
"""A (rank, in), B (out, rank) and what B A is multiplied by."""


def put_lora(
    source: Path, found: Mapping[str, Factors], parameters: Mapping[str, nn.Parameter], rank: int, scale: float
) -> str:
    """Copy the factors of each module into ours, so that ΔW is theirs; says how much was taken.

    Those of a lower rank fill the first rows and columns: A keeps its draw in the others, whose B is zero. Raises
    VideotuneError where they have a higher rank, another size, or are of modules that do not train.
    """
    import torch

    paths = {name.removesuffix(".lora_A.weight") for name in parameters if name.endswith(".lora_A.weight")}
    odd = sorted(set(found) - paths)
    if odd:
        raise VideotuneError(
            f"init_from: {source} changes {len(odd)} modules that do not train here, such as {odd[0]}: set lora.targets so "
            "that they do"
        )
    for path, (a, b, theirs) in found.items():
        to_a, to_b = parameters[f"{path}.lora_A.weight"].data, parameters[f"{path}.lora_B.weight"].data
        if a.shape[0] > rank:
            raise VideotuneError(f"init_from: {source} has rank {a.shape[0]} in {path}: set lora.rank to it, or higher")
        if a.shape[1] != to_a.shape[1] or b.shape[0] != to_b.shape[0]:
            raise VideotuneError(f"init_from: {source} was made for another base: {path} differs in size")
        with torch.no_grad():
            to_a[: a.shape[0]].copy_(a)
            to_b.zero_()
            to_b[:, : a.shape[0]].copy_(b * (theirs / scale))
    rest = len(paths) - len(found)
    return f"{len(found)} modules" + (f"; {rest} others begin at zero" if rest else "")


def checkpoint_in(source: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises VideotuneError where it is none, or not complete.
    """
    checkpoint = read_checkpoint(source)
    if isinstance(checkpoint, str):
        raise VideotuneError(f"init_from: {source} is no complete checkpoint: {checkpoint}")
    return checkpoint


def factors_of_checkpoint(source: Path, begin: str = "") -> dict[str, Factors]:
    """A, B and scale of each module in a run's checkpoint, of names that ``begin`` so; its alpha may be another than ours.

    Raises VideotuneError where it holds no LoRA.
    """
    checkpoint = checkpoint_in(source)
    scale, weights = checkpoint.state().get("lora_scale"), of_expert(checkpoint.load("weights"), begin)
    if scale is None:
        raise VideotuneError(f"init_from: {source} holds no LoRA: it is of a run that trained every weight")
    paths = sorted(name.removesuffix(".lora_A.weight") for name in weights if name.endswith(".lora_A.weight"))
    return {path: (weights[f"{path}.lora_A.weight"], weights[f"{path}.lora_B.weight"], scale) for path in paths}


def factors_of(source: Path, family: Family) -> dict[str, Factors]:
    """A, B and scale of each module of a LoRA file in any form that diffusers reads.

    Raises VideotuneError where the file is missing, or no LoRA of this family.
    """
    if not source.is_file():
        raise VideotuneError(f"init_from: no such file or folder: {source}")
    try:
        return read_factors(family, source)
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # each of diffusers' ways to say no
        raise VideotuneError(f"init_from: {source} is no LoRA of {family.spec.title}: {str(error)[:200]}") from error
