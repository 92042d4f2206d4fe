"""Checkpoints: complete or absent. Written aside, synced, renamed, and the marker last."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.files import read_json, sync_file, sync_folder, write_json, write_text

if TYPE_CHECKING:
    from torch import Tensor

MARKER = "COMPLETE"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    folder: Path

    def load(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """(adapter, optimizer state, state.json).

        Raises VideotuneError where a file is missing or damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            adapter, optimizer = (load_file(self.folder / f"{part}.safetensors") for part in ("adapter", "optimizer"))
            return adapter, optimizer, read_json(self.folder / "state.json")
        except (OSError, SafetensorError, ValueError) as error:
            raise VideotuneError(
                f"checkpoint {self.folder} cannot be read: {error}. Without its optimizer state a run cannot go on as if it"
                " had never stopped; take an earlier checkpoint by removing this folder."
            ) from error


def save_checkpoint(
    run: Path, step: int, adapter: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: Mapping[str, Any]
) -> Checkpoint:
    """Write ``checkpoints/step-N`` so that at every moment it is either complete or not there.

    Raises VideotuneError where a weight is NaN or infinite: such a checkpoint helps nobody.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    broken = [name for name, value in adapter.items() if not bool(value.isfinite().all())]
    if broken:
        raise VideotuneError(f"step {step}: {len(broken)} weights are not finite, the first is {broken[0]}: not saved")
    folder = run / "checkpoints" / f"step-{step}"
    aside = folder.with_name(f".step-{step}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, tensors in (("adapter", adapter), ("optimizer", optimizer)):
        path = aside / f"{name}.safetensors"
        try:
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path)
        except SafetensorError as error:
            raise OSError(f"checkpoint {path} cannot be written: {error}") from error
        sync_file(path)
    write_json(aside / "state.json", {"step": step, **state})
    sync_folder(aside)
    if folder.exists():  # left by a kill before the marker, or the same step saved twice
        shutil.rmtree(folder)
    aside.rename(folder)
    sync_folder(folder.parent)
    write_text(folder / MARKER, f"step {step}\n")
    return Checkpoint(step, folder)


def complete_checkpoints(run: Path) -> list[Checkpoint]:
    """The checkpoints of a run whose marker is there, oldest first."""
    found = []
    for folder in (run / "checkpoints").glob("step-*"):
        name = re.fullmatch(r"step-(\d+)", folder.name)
        if name and (folder / MARKER).is_file():
            found.append(Checkpoint(int(name[1]), folder))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def last_checkpoint(run: Path) -> Checkpoint:
    """The newest complete checkpoint.

    Raises VideotuneError where there is none.
    """
    found = complete_checkpoints(run)
    if not found:
        raise VideotuneError(
            f"{run} has no complete checkpoint to resume from; start it without --resume in a new folder"
        )
    return found[-1]
