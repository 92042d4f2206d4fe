"""``--init-from``: a new run that begins with weights of another one. Weights alone: the optimizer begins afresh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from videotune.errors import VideotuneError
from videotune.export.lora import read_factors
from videotune.run.bench import Bench, of_expert, prefix, put_weights
from videotune.run.console import say
from videotune.train.state import read_checkpoint
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor, nn

    from videotune.config.schema import Config
    from videotune.train.step import Learner


def begin_from(source: Path, family: Family, bench: Bench, config: Config) -> None:
    """Put the weights of a LoRA file, or of a checkpoint's folder, into what trains, and say what was taken.

    Raises VideotuneError where they do not fit.
    """
    if source.is_file() and len(bench.learners) > 1:
        raise VideotuneError(
            f"init_from: {source} is one file, and two experts train: give a checkpoint's folder, or train one of them"
        )
        raise VideotuneError()
    told = [_begin_one(source, family, name, learner, config) for name, learner in bench.learners.items()]
    say(f"beginning with the weights of {source} ({'; '.join(told)}); fresh optimizer, step 0")


def _begin_one(source: Path, family: Family, name: str, learner: Learner, config: Config) -> str:
    if source.is_dir():
        checkpoint = read_checkpoint(source)
        if isinstance(checkpoint, str):
            raise VideotuneError(f"init_from: {source} is no complete checkpoint: {checkpoint}")
        weights = of_expert(checkpoint.load("weights"), prefix(family.spec, name))
        put_weights(learner.parameters, weights, config, f"init_from: {source}")
        told = f"all {len(learner.parameters)} tensors"
    elif config.training_method != "LORA":
        raise VideotuneError(f"init_from: {source} is a file; FINE_TUNE begins from a checkpoint's folder")
    else:
        told = put_lora(source, family, learner.parameters, config.lora.rank, scale_of(config))
    if learner.masters:
        learner.masters.spread()
    if learner.ema:
        learner.ema.load({name: parameter.detach() for name, parameter in learner.parameters.items()})
    return told


def scale_of(config: Config) -> float:
    """What B A is multiplied by."""
    return (config.lora.rank if config.lora.alpha is None else config.lora.alpha) / config.lora.rank


def put_lora(source: Path, family: Family, parameters: Mapping[str, nn.Parameter], rank: int, scale: float) -> str:
    """Copy a LoRA file of any form that diffusers reads into ours, so that ΔW is the file's; says how much was taken.

    A file of a lower rank fills the first rows and columns: A keeps its draw in the others, whose B is zero. Raises
    VideotuneError where it has a higher rank, or modules that do not train.
    """
    import torch

    found = factors_of(source, family)
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


def factors_of(source: Path, family: Family) -> dict[str, tuple[Tensor, Tensor, float]]:
    """A, B and scale of each module, read by diffusers.

    Raises VideotuneError where the file is missing, or no LoRA of this family.
    """
    if not source.is_file():
        raise VideotuneError(f"init_from: no such file or folder: {source}")
    try:
        return read_factors(family, source)
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # each of diffusers' ways to say no
        raise VideotuneError(f"init_from: {source} is no LoRA of {family.spec.title}: {str(error)[:200]}") from error
