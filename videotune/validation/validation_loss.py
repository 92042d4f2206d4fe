"""The validation loss: the same clips, noise levels and noise at every validation, so that two differ by the model alone.

Held-out clips and some training clips, at 9 fixed quantiles of the timestep distribution, each clip at a third of them and
with its own fixed noise; plain v-MSE, no caption dropout. It draws nothing from training and changes nothing in it.
``validation.json`` says what it is made of, frozen before its first use and checked at a resume.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videotune.console import echo
from videotune.diffusion.loss import Objective, denoising_loss
from videotune.files import digest, read_json, write_json
from videotune.latent_cache.exposure import CLIP_DIGITS
from videotune.models.base import DiffusersModel
from videotune.rng import generator_for
from videotune.trainer.build import plain_batch
from videotune.trainer.step import tokens_per_sample
from videotune.trainer.trainer import Trainer
from videotune.types import Batch, Expert, Window
from videotune.validation.selection import QUANTILES, levels_of

AT_ONCE = 4096
"""Noise levels of a window are read together while they are no more tokens than this: small clips cost less that way."""


@dataclass(frozen=True)
class ValidationLoss:
    """Which windows are read; ``held_out`` may be empty: then no validation is possible, and the reading says null."""

    held_out: tuple[Window, ...]
    train: tuple[Window, ...]
    seed: int


def read_validation(
    validation: ValidationLoss,
    family: DiffusersModel,
    nets: Mapping[str, nn.Module],
    objective: Objective,
    batch_of: Callable[[Window], Batch],
) -> dict[str, Any]:
    """{"held_out": {mean, by_quantile, windows, clips} or None, "train": likewise}; plain mse averaged over the clips.

    ``clips``: the mse at each level of each clip (None: not read there), averaged over its windows, by the first digits of
    its id, as windows name it; each clip counts alike, however many windows it has. Each noise level is read by the expert
    whose it is; of ``nets`` one after the other is looked up, each once.
    """
    levels = objective.timesteps.quantiles(QUANTILES)
    parts = {"held_out": validation.held_out, "train": validation.train}
    errors = {
        part: torch.zeros(len(windows), QUANTILES, dtype=torch.float64)
        for part, windows in parts.items()
    }
    for expert in family.spec.experts:
        own = [i for i, t in enumerate(levels.tolist()) if _has(expert, t)]
        if not own:
            continue
        net = nets[expert.name]
        device = next(net.parameters()).device
        training = net.training
        net.eval()
        try:
            with torch.no_grad():
                for part, windows in parts.items():
                    for place, (window, its) in enumerate(
                        zip(windows, levels_of(windows), strict=True)
                    ):
                        batch = batch_of(window).map(lambda x, device=device: x.to(device))  # type: ignore[misc]
                        for some in _together(
                            [i for i in its if i in own], tokens_per_sample(family, batch)
                        ):
                            found = _errors(
                                validation.seed, window, some, family, net, objective, batch
                            )
                            errors[part][place, some] = found
        finally:
            net.train(training)
            del net  # it would stay in memory beside the next expert
    return {part: _mean(errors[part], windows) for part, windows in parts.items()}


def noise_of(seed: int, window: Window, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The fixed noise of a window at a quantile, on the CPU."""
    # "ruler" is part of the seed: with another word every run would be validated with other noise
    return torch.from_numpy(
        generator_for(seed, "ruler", window.id, number).standard_normal(shape, "float32")
    )


def _together(numbers: Sequence[int], tokens: int) -> list[list[int]]:
    """The quantiles in groups that are read by one forward pass: by the sample's size alone, so that bits repeat."""
    count = max(1, AT_ONCE // tokens)
    return [list(numbers[i : i + count]) for i in range(0, len(numbers), count)]


def _errors(
    seed: int,
    window: Window,
    its: Sequence[int],
    family: DiffusersModel,
    net: nn.Module,
    objective: Objective,
    batch: Batch,
) -> torch.Tensor:
    """The plain mse of a window at some levels, each with its own noise, float64 on the CPU."""
    device = batch.x0.device
    shape = tuple(batch.x0.shape)
    count = len(its)
    noise = torch.cat([noise_of(seed, window, number, shape) for number in its])
    several = batch if count == 1 else batch.map(lambda x: x.repeat_interleave(count, 0))
    t = objective.timesteps.quantiles(QUANTILES)[list(its)].float().to(device)
    return (
        denoising_loss(family, net, objective, several, t, noise.to(device)).mse.double().cpu()
    )


def _mean(errors: torch.Tensor, windows: Sequence[Window]) -> dict[str, Any] | None:
    """A part of a reading from a (window, level) table; None: there was no window."""
    if not windows:
        return None
    names = [window.clip_id[:CLIP_DIGITS] for window in windows]
    clips: dict[str, list[float | None]] = {}
    for name, its in zip(
        names, levels_of(windows), strict=True
    ):  # of a clip's windows all have the same levels
        rows = errors[[place for place, other in enumerate(names) if other == name]]
        clips[name] = [
            value if i in its else None for i, value in enumerate(rows.mean(0).tolist())
        ]
    levels = [
        [level for level in column if level is not None]
        for column in zip(*clips.values(), strict=True)
    ]
    means = [sum(level) / len(level) for level in levels]
    return {
        "mean": sum(means) / len(means),
        "by_quantile": means,
        "windows": len(windows),
        "clips": clips,
    }


def related(
    reading: Mapping[str, Any] | None,
    first: Mapping[str, Any] | None,
    owners: Sequence[str] = (),
) -> dict[str, Any] | None:
    """A part of a reading as the journal has it: in relation to the same part of the set's first reading.

    Each clip's value is the mean over its levels of its error's ratio to the first reading's mean over the clips;
    ``normalised`` is the mean of these values. ``owners``: the expert of each quantile, where there are two; then each
    one's own value, the mean ratio at its levels, is given too.
    """
    if reading is None:
        return None
    before = (reading if first is None else first)["by_quantile"]
    out = {key: reading[key] for key in ("mean", "by_quantile", "windows")}
    clips = {
        name: _ratio(own, before, range(QUANTILES)) for name, own in reading["clips"].items()
    }
    finite = [value for value in clips.values() if value is not None]
    out["normalised"] = sum(finite) / len(finite) if len(finite) == len(clips) else None
    out["clips"] = clips
    names = list(dict.fromkeys(owners))
    if len(names) > 1:
        own = {name: [i for i, owner in enumerate(owners) if owner == name] for name in names}
        out["experts"] = {
            name: _ratio(reading["by_quantile"], before, own[name]) for name in names
        }
    return out


def owners(family: DiffusersModel, objective: Objective) -> list[str]:
    """The expert whose each of the quantiles is, from little noise to much."""
    levels = objective.timesteps.quantiles(QUANTILES).tolist()
    return [
        next(expert.name for expert in family.spec.experts if _has(expert, t)) for t in levels
    ]


def _has(expert: Expert, t: float) -> bool:
    return expert.t_lo <= t < expert.t_hi or t == expert.t_hi == 1


def _ratio(
    now: Sequence[float | None], before: Sequence[float | None], places: Collection[int]
) -> float | None:
    """The mean of the ratios at the quantiles that were read; None where the first reading was not finite."""
    pairs = [(value, before[i]) for i in places if (value := now[i]) is not None]
    ratios = [value / max(then, 1e-12) for value, then in pairs if then is not None]
    return sum(ratios) / len(ratios) if len(ratios) == len(pairs) else None


FILE = "validation.json"

PARTS = {
    "levels": "its noise levels", "mean": "its averaging", "seed": "its seed", "noise": "its noise",
    "held_out": "its held-out clips", "train": "its training clips",
}  # fmt: skip
"""What a validation set is made of, in words."""


def contents_of(trainer: Trainer, validation: ValidationLoss) -> dict[str, Any]:
    """Noise levels, seed, a hash of the noise, and each window with hashes of its latents and its text."""
    source = trainer.source

    def row(window: Window) -> dict[str, str]:
        batch = plain_batch(source, window)
        latents = [
            batch.x0,
            *(batch.conditioning.extras[name] for name in sorted(batch.conditioning.extras)),
        ]
        return {
            "window": window.id,
            "latents": hashed(*latents),
            "text": hashed(batch.conditioning.text, batch.captions[0]),
        }

    first = next(iter((*validation.held_out, *validation.train)), None)
    shape = tuple(plain_batch(source, first).x0.shape) if first is not None else ()
    # "mean": a set of an earlier version, which read each clip at all levels, is another one
    return {
        "levels": source.objective.timesteps.quantiles(QUANTILES).tolist(),
        "mean": "clips, each at a third of the levels",
        "seed": validation.seed,
        "noise": None if first is None else hashed(noise_of(validation.seed, first, 0, shape)),
        "held_out": [row(window) for window in validation.held_out],
        "train": [row(window) for window in validation.train],
    }


def hashed(*values: Tensor | str) -> str:
    """16 hex digits that name the bytes of tensors and of words."""
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, str):
            state.update(value.encode())
        else:
            state.update(str((tuple(value.shape), value.dtype)).encode())
            state.update(
                value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
    return state.hexdigest()


def freeze(trainer: Trainer, validation: ValidationLoss) -> tuple[str, str]:
    """(the set's name, 8 hex digits of what it is made of; how it differs from the run's earlier one, in words).

    The file is written at the first call; one that says something else is replaced.
    """
    facts = contents_of(trainer, validation)
    name = digest(facts)[:8]
    path = trainer.run / FILE
    differs = differing(path, facts)
    if differs or not path.is_file():
        write_json(path, {"name": name, **facts})
    return name, differs


def differing(path: Path, facts: dict[str, Any]) -> str:
    """What the set's file says otherwise, in words; empty where it says the same, or is not there."""
    if not path.is_file():
        return ""
    try:
        kept = dict(read_json(path))
    except (OSError, ValueError) as error:
        echo(f"warning: {path} cannot be read and is written anew: {error}")
        return "its file could not be read"
    if (
        kept.get("name")
        != digest({key: value for key, value in kept.items() if key != "name"})[:8]
    ):
        echo(f"warning: {path} was changed by another program; it is written anew")
    return ", ".join(
        _what(part, kept.get(part), facts[part])
        for part in PARTS
        if kept.get(part) != facts[part]
    )


def _what(part: str, kept: Any, now: Any) -> str:
    """What of a part differs: other windows, or the same ones with other latents or text."""
    if part not in ("held_out", "train") or not isinstance(kept, list):
        return PARTS[part]
    if [row.get("window") for row in kept] != [row["window"] for row in now]:
        return PARTS[part]
    other = [
        key
        for key in ("latents", "text")
        if [row.get(key) for row in kept] != [row[key] for row in now]
    ]
    return f"the {' and '.join(other)} of {PARTS[part]}"
