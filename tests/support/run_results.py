"""What a run has left on the disk, and whether two runs are one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from safetensors.torch import load_file

from videotune.adapters.effect import effects
from videotune.runs.checkpoint import Checkpoint, complete_checkpoints, read_checkpoint
from videotune.runs.journal import read_journal


def updates(state: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """What an adapter adds to each module: of LoRA ΔW = scale · B A."""
    return {name: calculate() for name, calculate in effects(state, scale).items()}


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_journal(run) if line["kind"] == "step"]


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_journal(run) if line["kind"] == kind]


def warnings_of(run: Path) -> list[str]:
    return [line["text"] for line in of_kind(run, "warning")]


def facts_of(run: Path, until: int | None = None) -> list[Any]:
    """What must be equal in two runs that are the same, step by step: all but times."""
    names = ("step", "loss", "mse", "by_t", "lr", "grad_norm", "window_ids", "captions")
    return [
        [line[name] for name in names]
        for line in steps_of(run)
        if until is None or line["step"] <= until
    ]


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by part and name."""
    folder = run / "checkpoints" / f"step-{step}"
    found = read_checkpoint(folder)
    assert isinstance(found, Checkpoint), found
    return {
        f"{path.stem}/{name}": value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """The same names, and the same bits."""
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def assert_same_run(run: Path, other: Path, *steps: int) -> None:
    """Two runs measured the same in each step, and saved the same bits at these."""
    assert facts_of(run) == facts_of(other)
    for step in steps:
        assert same_tensors(state(run, step), state(other, step)), f"step {step}"


def listing(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but for a run's lock and heartbeat."""
    names = (".lock", "heartbeat.json")
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in names
    }


def complete(run: Path) -> list[int]:
    """The steps of complete checkpoints."""
    return [one.step for one in complete_checkpoints(run)]


def largest_weight_difference(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]
) -> float:
    """The largest difference of weights, relative to the largest weight."""
    names = [name for name in a if name.startswith("weights/")]
    assert names
    assert set(a) == set(b)
    return max(
        float((a[n] - b[n]).abs().max() / a[n].abs().max().clamp_min(1e-12))
        for n in names
    )


def largest_difference(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
) -> float:
    """The largest difference of ΔW, relative to each module's largest entry; modules
    that only ours has are zero.
    """
    assert set(ours) >= set(theirs)
    assert any(bool(value.any()) for value in theirs.values())
    assert not any(bool(ours[name].any()) for name in set(ours) - set(theirs))
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max())
        for name in theirs
    )


def film(path: Path) -> np.ndarray:
    """All frames of a video file, uint8 (T,H,W,3)."""
    with av.open(str(path)) as container:
        return np.stack(
            [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        )
