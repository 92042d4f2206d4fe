"""The identity of a validation set, stored in the run folder as ``validation.json``.

The file is written before the first validation and checked on a resume, so readings of
different sets are never compared. If only its training clips have changed, a set
keeps its name: what decides is the error on clips kept aside.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from videotune.console import echo
from videotune.files import digest, read_json, write_json
from videotune.trainer.build import plain_batch
from videotune.trainer.trainer import Trainer
from videotune.types import Window
from videotune.validation.selection import QUANTILES
from videotune.validation.validation_loss import ValidationLoss, noise_of

FILE = "validation.json"

PARTS = {
    "levels": "its noise levels",
    "mean": "its averaging",
    "seed": "its seed",
    "noise": "its noise",
    "held_out": "its clips kept aside",
    "train": "its training clips",
    "target": "its target (distilled_guidance)",
}
"""Parts of a validation set, and their names in messages."""

NAMED_WITH = "named_with"
"""Key of a file for the training clips by which a set got its name, if they have changed
since.
"""


@dataclass(frozen=True)
class FrozenSet:
    """A validation set as its file in the run folder has it."""

    name: str
    """8 hex digits of the contents it began with: readings of one name compare."""

    difference: str = ""
    """How it differs from the earlier set of the run; empty if it does not."""

    goes_on: bool = False
    """Whether it differs from the earlier set by its training clips alone."""


def freeze_validation_set(trainer: Trainer, validation: ValidationLoss) -> FrozenSet:
    """Write the set's file, or compare the set with it.

    The file of a different set is replaced.
    """
    contents = contents_of(trainer, validation)
    path = trainer.run / FILE
    frozen, file_contents = _compared(path, contents)
    if file_contents is not None:
        write_json(path, file_contents)
    return frozen


def _compared(
    path: Path, contents: dict[str, Any]
) -> tuple[FrozenSet, dict[str, Any] | None]:
    """Return a set as it compares with its file, and what the file shall have; None if
    it has that.
    """
    name = _name_of(contents)
    as_new = {"name": name, **contents}
    if not path.is_file():
        return FrozenSet(name), as_new
    try:
        stored = dict(read_json(path))
    except (OSError, ValueError) as error:
        echo(f"warning: {path}: cannot be read ({error}). It is rewritten.")
        return FrozenSet(name, "its file could not be read"), as_new

    differences = _differences(stored, contents)
    description = ", ".join(differences.values())
    named_with = stored.get(NAMED_WITH, stored.get("train"))
    is_known = not differences or list(differences) == ["train"]
    if is_known and contents["held_out"]:
        name = _name_of({**contents, "train": named_with})
        frozen = FrozenSet(name, description, goes_on=bool(differences))
        kept = {"name": name, **contents}
        if named_with != contents["train"]:
            kept[NAMED_WITH] = named_with
    else:
        frozen = FrozenSet(name, description)
        kept = as_new

    is_touched = stored != kept and not differences
    if is_touched:
        echo(f"warning: {path}: was changed by another program. It is rewritten.")
    return frozen, kept if stored != kept else None


def _name_of(contents: dict[str, Any]) -> str:
    return digest(contents)[:8]


def contents_of(trainer: Trainer, validation: ValidationLoss) -> dict[str, Any]:
    """Return noise levels, seed, a hash of the noise, and hashes of each window."""
    source = trainer.source
    noise_hash = None
    windows = (*validation.held_out, *validation.train)
    if windows:
        first = windows[0]
        shape = tuple(plain_batch(source, first).x0.shape)
        noise_hash = hash_values(noise_of(validation.seed, first, 0, shape))

    contents = {
        "levels": source.objective.timesteps.quantiles(QUANTILES).tolist(),
        # Sets of an earlier version, which read each clip at all levels, differ here.
        "mean": "clips, each at a third of the levels",
        "seed": validation.seed,
        "noise": noise_hash,
        "held_out": [_window_hashes(trainer, window) for window in validation.held_out],
        "train": [_window_hashes(trainer, window) for window in validation.train],
    }
    # Only where it differs from the clips' own, so that sets keep their names.
    scale = trainer.job.config.distilled_guidance
    if scale is not None:
        contents["target"] = {"distilled_guidance": scale}
    return contents


def _window_hashes(trainer: Trainer, window: Window) -> dict[str, str]:
    """Return the id of a window with hashes of its latents and its text."""
    batch = plain_batch(trainer.source, window)
    extras = batch.conditioning.extras
    latents = [batch.x0]
    if batch.sound is not None:
        latents.append(batch.sound.x0)
    latents.extend(extras[name] for name in sorted(extras))
    return {
        "window": window.id,
        "latents": hash_values(*latents),
        "text": hash_values(batch.conditioning.text, batch.captions[0]),
    }


def hash_values(*values: Tensor | str) -> str:
    """Return 16 hex digits of the bytes of tensors and strings."""
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, str):
            state.update(value.encode())
            continue
        state.update(str((tuple(value.shape), value.dtype)).encode())
        flat = value.detach().cpu().contiguous().flatten()
        state.update(flat.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _differences(stored: dict[str, Any], contents: dict[str, Any]) -> dict[str, str]:
    """Return the parts of a set that differ from its file's, with their descriptions."""
    differences = {}
    for part in PARTS:
        if stored.get(part) != contents.get(part):
            differences[part] = _describe_part(
                part, stored.get(part), contents.get(part)
            )
    return differences


def _describe_part(part: str, stored: Any, current: Any) -> str:
    """Return what differs: the windows, or only their latents or text."""
    if part not in ("held_out", "train") or not isinstance(stored, list):
        return PARTS[part]
    stored_ids = [row.get("window") for row in stored]
    if stored_ids != [row["window"] for row in current]:
        return PARTS[part]

    keys = []
    for key in ("latents", "text"):
        if [row.get(key) for row in stored] != [row[key] for row in current]:
            keys.append(key)
    return f"the {' and '.join(keys)} of {PARTS[part]}"
