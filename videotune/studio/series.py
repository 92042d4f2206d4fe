"""The curves of runs as JSON for the charts: steps, validation, and norms of module
groups.
"""

import json
import re
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from videotune.files import digest
from videotune.reporter.read import Run, number, points
from videotune.studio.queue_page import run_folder
from videotune.studio.status import curves, read_cached, read_live
from videotune.studio.web import CurrentPage

routes = APIRouter()

MAX_POINTS = 1500
"""Points of a curve that are sent."""

MAX_POINTS_OF_NINE = 600
"""Points of a curve that is one of nine."""

MAX_RUNS = 8
"""Runs on one chart."""

READ_SECONDS = 1.0
"""Time a response may spend on reading checkpoints; the next one reads the others."""

NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy types by the names in a safetensors header; BF16 is the upper half of a
float32.
"""

_NORMS: dict[tuple[str, int], dict[str, float]] = {}
"""Norms that were read from checkpoints, by file and time of its last change."""


def curve(
    name: str, steps: Any, values: Any, max_points: int = MAX_POINTS
) -> dict[str, Any]:
    """Return a curve as JSON data, thinned to at most ``max_points`` points.

    A long curve keeps the lowest and the highest value of each section, so spikes stay
    visible.
    """
    x = np.asarray(steps, dtype=np.int64)
    y = np.asarray(values, dtype=np.float64)

    if len(x) > max_points:
        indices = [0, len(x) - 1]
        for section in np.array_split(np.arange(len(x)), max_points // 2 - 1):
            indices.append(section[0] + np.argmin(y[section]))
            indices.append(section[0] + np.argmax(y[section]))
        kept_indices = np.unique(indices)
        x = x[kept_indices]
        y = y[kept_indices]

    return {"name": name, "x": x.tolist(), "y": [float(f"{value:.6g}") for value in y]}


def module_group(module: str) -> str:
    """Return the group of a module: feed-forward, or a projection of an attention.

    Blocks of the same kind count together.
    """
    parts = [part for part in module.split(".") if not part.isdigit()]
    if any(re.match("ff|mlp|feed", part) for part in parts):
        return "ffn"

    projection = re.search(r"(?:to_|add_|_|^)(q|k|v|out|qkv)(?:_proj|$)", parts[-1])
    if projection is None:
        return " ".join(parts[-2:])
    attention = next((part for part in parts if "attn" in part), "")
    return f"{attention} {projection[1]}".strip()


class SafetensorsFile:
    """A safetensors file whose tensors are read one at a time."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
            self.header = json.loads(file.read(min(header_length, path.stat().st_size)))
        self._data = np.memmap(path, np.uint8, "r", 8 + header_length)

    def read(self, name: str) -> Any:
        """Return a tensor as float32."""
        info = self.header[name]
        start, end = info["data_offsets"]
        raw = (
            self._data[start:end]
            .view(NUMPY_TYPES[info["dtype"]])
            .reshape(info["shape"])
        )
        if raw.dtype == "<u2":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)


def lora_norms(weights: Path) -> dict[str, float]:
    """Return the norm of B·A of each module group of a LoRA file; empty for other
    files.

    ‖BA‖² is the trace of (BᵀB)(AAᵀ), so no product has the size of the model's weights.
    """
    file = SafetensorsFile(weights)
    squares: dict[str, float] = {}

    for name in file.header:
        if ".lora_A." not in name:
            continue
        a = file.read(name)
        b = file.read(name.replace(".lora_A.", ".lora_B."))
        if a.ndim == b.ndim == 2:
            group = module_group(name.partition(".lora_A.")[0])
            squares[group] = squares.get(group, 0.0) + float(np.vdot(b.T @ b, a @ a.T))

    return {group: max(0.0, square) ** 0.5 for group, square in squares.items()}


def norms_by_checkpoint(run: Path) -> tuple[dict[str, list[tuple[float, float]]], bool]:
    """Return the norm curve of each module group, and whether checkpoints are still
    unread.
    """
    norm_curves: dict[str, list[tuple[float, float]]] = {}
    deadline = time.monotonic() + READ_SECONDS

    for step, folder in checkpoints(run):
        for path in folder.glob("weights.safetensors"):
            key = (str(path), path.stat().st_mtime_ns)
            if key not in _NORMS:
                if time.monotonic() > deadline:
                    return norm_curves, True
                _NORMS[key] = _checkpoint_norms(path)

            for group, norm in _NORMS[key].items():
                norm_curves.setdefault(group, [(0, 0.0)]).append((step, norm))
    return norm_curves, False


def _checkpoint_norms(weights: Path) -> dict[str, float]:
    """Return the norms of a checkpoint; empty if damaged, which its loading reports."""
    try:
        state = read_cached(weights.parent / "state.json") or {}
        scale = float(state.get("lora_scale") or 1)
        return {group: scale * norm for group, norm in lora_norms(weights).items()}
    except (ValueError, KeyError, TypeError):
        return {}


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Return the complete checkpoints of a run with their steps, in order."""
    steps = []
    for marker in run.glob("checkpoints/step-*/COMPLETE"):
        step = marker.parent.name.partition("-")[2]
        if step.isdecimal():
            steps.append((int(step), marker.parent))
    return sorted(steps)


def charts(run: Run) -> dict[str, Any]:
    """Return all charts of a run, and the steps at which it saved and sampled previews."""
    norm_curves, is_pending = norms_by_checkpoint(run.folder)
    chart_curves = {}
    for name, raw_curves in _raw_charts(run, norm_curves).items():
        chart_curves[name] = [
            curve(*raw_curve) for raw_curve in raw_curves if len(raw_curve[1])
        ]
    sample_steps = {number(record.get("step")) or 0 for record in run.of_kind("sample")}

    return {
        "name": run.folder.name,
        "pending": is_pending,
        "saves": [step for step, _ in checkpoints(run.folder)],
        "previews": sorted(sample_steps),
        "charts": chart_curves,
    }


def _raw_charts(
    run: Run, norm_curves: dict[str, list[tuple[float, float]]]
) -> dict[str, list[Any]]:
    """Return the arguments of ``curve`` for each curve of each chart."""
    steps = run.steps
    held_out = _validation_curve(run, "held_out")
    train = _validation_curve(run, "train")

    rates = []
    speed = []
    for name, step_curve in curves(run.folder).items():
        if name.startswith("rate "):
            rates.append((name.removeprefix("rate "), *step_curve))
        elif name == "seconds":
            speed.append(("seconds per step", *step_curve))

    ninths = []
    for index, noise_curve in enumerate(steps.by_noise):
        label = f"{index / 9:.2f} to {(index + 1) / 9:.2f}"
        ninths.append((label, *noise_curve, MAX_POINTS_OF_NINE))

    return {
        "loss": [("loss", *steps.mse)],
        "validation": [("held-out clips", *held_out), ("training clips", *train)],
        "noise": ninths,
        "modules": [
            (name, *np.transpose(pairs)) for name, pairs in sorted(norm_curves.items())
        ],
        "rate": rates,
        "norm": [("gradient norm", *steps.norms)],
        "speed": speed,
    }


def _validation_curve(run: Run, key: str) -> Any:
    """Return steps and normalised losses of the validation."""
    return np.reshape(points(run.validations, key, "normalised"), (-1, 2)).T


@routes.get("/p/{project}/series")
def series(
    page: CurrentPage, request: Request, run: Annotated[list[str], Query()]
) -> Response:
    """Send the charts of some runs; HTTP 304 if nothing was added."""
    folders = [run_folder(page.current_project, name) for name in run[:MAX_RUNS]]

    file_marks = []
    for folder in folders:
        for path in folder.glob("journal.jsonl"):
            file_stat = path.stat()
            file_marks.append((file_stat.st_size, file_stat.st_mtime_ns))
    etag = f'"{digest([run, len(_NORMS), *file_marks])}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"ETag": etag})

    run_charts = [charts(read_live(folder)) for folder in folders]
    return Response(
        json.dumps(run_charts, allow_nan=False, separators=(",", ":")),
        media_type="application/json",
        headers={"ETag": etag, "Cache-Control": "no-cache"},
    )
