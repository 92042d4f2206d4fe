"""``validation.json``: what a run's validation loss is made of, frozen before its first use and checked at a resume."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from videotune.console import echo
from videotune.files import digest, read_json, write_json
from videotune.trainer.components import plain_batch
from videotune.trainer.trainer import Trainer
from videotune.types import Batch
from videotune.validation.selection import QUANTILES
from videotune.validation.validation_loss import ValidationLoss, noise_of

FILE = "validation.json"

PARTS = {
    "levels": "its noise levels",
    "mean": "its averaging",
    "seed": "its seed",
    "noise": "its noise",
    "held_out": "its held-out clips",
    "train": "its training clips",
}
"""What a validation set is made of, in words."""


def contents_of(trainer: Trainer, validation: ValidationLoss) -> dict[str, Any]:
    """Noise levels, seed, a hash of the noise, and each window with hashes of its latents and its text."""
    source = trainer.source
    rows: dict[str, list[dict[str, str]]] = {"held_out": [], "train": []}
    first: Batch | None = None
    for part, windows in (("held_out", validation.held_out), ("train", validation.train)):
        for window in windows:
            batch = plain_batch(source, window)
            first = first or batch
            latents = [batch.x0, *(batch.cond.extras[name] for name in sorted(batch.cond.extras))]
            row = {"window": window.id, "latents": hashed(*latents), "text": hashed(batch.cond.text, batch.captions[0])}
            rows[part].append(row)
    whole = [*validation.held_out, *validation.train]
    noise = hashed(noise_of(validation.seed, whole[0], 0, tuple(first.x0.shape))) if first is not None else None
    levels = source.objective.timesteps.quantiles(QUANTILES).tolist()
    # "mean": a set of an earlier version, which read each clip at all levels, is another one
    return {
        "levels": levels,
        "mean": "clips, each at a third of the levels",
        "seed": validation.seed,
        "noise": noise,
        **rows,
    }


def hashed(*values: Tensor | str) -> str:
    """16 hex digits that name the bytes of tensors and of words."""
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, str):
            state.update(value.encode())
        else:
            state.update(str((tuple(value.shape), value.dtype)).encode())
            state.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def freeze(trainer: Trainer, validation: ValidationLoss) -> tuple[str, str]:
    """(the set's name, 8 hex digits of what it is made of; how it differs from the run's earlier one, in words).

    The file is written at the first call; one that says something else is replaced.
    """
    facts = contents_of(trainer, validation)
    name, path = digest(facts)[:8], trainer.run / FILE
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
    if kept.get("name") != digest({key: value for key, value in kept.items() if key != "name"})[:8]:
        echo(f"warning: {path} was changed by another program; it is written anew")
    words = [_what(part, kept.get(part), facts[part]) for part in PARTS if kept.get(part) != facts[part]]
    return ", ".join(words)


def _what(part: str, kept: Any, now: Any) -> str:
    """What of a part differs: other windows, or the same ones with other latents or text."""
    if part not in ("held_out", "train") or not isinstance(kept, list):
        return PARTS[part]
    if [row.get("window") for row in kept] != [row["window"] for row in now]:
        return PARTS[part]
    other = [key for key in ("latents", "text") if [row.get(key) for row in kept] != [row[key] for row in now]]
    return f"the {' and '.join(other)} of {PARTS[part]}"
