"""The curves of runs as JSON for the charts: steps, validation, and norms of module
groups.
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from videotune.files import digest
from videotune.reporter.read import LearntPart, Run, number, points
from videotune.runs.step_sums import StepErrors
from videotune.studio.queue_page import run_folder
from videotune.studio.status import checkpoints, curves, read_cached, read_live
from videotune.studio.tensor_file import TensorFile
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

MAX_PRODUCT = 1 << 24
"""Numbers of the largest matrix that is computed for a norm: 64 MB."""

MAX_OPERATIONS = 1e12
"""Multiplications that the norms of a checkpoint may take, some seconds of a CPU."""

_NORMS: dict[tuple[str, int], dict[str, float] | str] = {}
"""Norms of checkpoints, or why there are none, by file and time of its last change."""

MAX_NORMS = 4096
"""Checkpoints whose norms are remembered."""


def curve(
    name: str, steps: Any, values: Any, max_points: int = MAX_POINTS
) -> dict[str, Any]:
    """Return a curve as JSON data, thinned to at most ``max_points`` points.

    A long curve keeps the lowest and the highest value of each section, so spikes stay
    visible. Points that are not finite are left out, since JSON has no word for them.
    """
    x = np.asarray(steps, dtype=np.int64)
    y = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(y)
    x = x[is_finite]
    y = y[is_finite]

    if len(x) > max_points:
        indices = [0, len(x) - 1]
        sections = np.array_split(np.arange(len(x)), max_points // 2 - 1)
        for section in sections:
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


def lora_norms(
    weights: Path, scales: float | Mapping[str, float] = 1.0
) -> dict[str, float]:
    """Return the norm of the updates of each module group of a LoRA file; empty for
    other files.

    Args:
        weights: the file.
        scales: what B·A is multiplied by, for all modules or by module.

    Raises:
        ValueError: if the file is damaged, or so large that it would hold up the page.
    """
    file = TensorFile(weights)
    squares: dict[str, float] = {}
    operations = 0.0

    for name in file.entries:
        b_name = name.replace(".lora_A.", ".lora_B.")
        if ".lora_A." not in name or b_name not in file.entries:
            continue
        shape_a = file.entries[name]["shape"]
        shape_b = file.entries[b_name]["shape"]
        if len(shape_a) != 2 or len(shape_b) != 2:
            continue

        operations += _product_operations(shape_a, shape_b)
        if operations > MAX_OPERATIONS:
            raise ValueError("its matrices are too large for a curve")
        module = name.partition(".lora_A.")[0]
        scale = _scale_of_module(module, scales)
        square = scale * scale * _squared_norm(file.read(name), file.read(b_name))
        group = module_group(module)
        squares[group] = squares.get(group, 0.0) + square

    # A square below 0 is a rounding error; one that is not a number stays so.
    return {group: max(square, 0.0) ** 0.5 for group, square in squares.items()}


def _scale_of_module(module: str, scales: float | Mapping[str, float]) -> float:
    """Return a module's scale. A checkpoint of two experts has the expert's name before
    the module's, and its scales do not.
    """
    if not isinstance(scales, Mapping):
        return scales
    of_expert = scales.get(module.partition(".")[2], 1.0)
    return scales.get(module, of_expert)


def _product_operations(shape_a: list[int], shape_b: list[int]) -> float:
    """Return the multiplications of the cheaper way to the norm of B·A.

    Raises:
        ValueError: if the shapes do not fit, or a matrix would be too large.
    """
    rank, inputs = shape_a
    outputs, rank_b = shape_b
    if rank != rank_b:
        raise ValueError("the shapes of its matrices do not fit")
    if min(rank * rank, outputs * inputs) > MAX_PRODUCT:
        raise ValueError("its matrices are too large for a curve")
    if rank * rank <= outputs * inputs:
        return float(rank * rank * (inputs + outputs))
    return float(rank * inputs * outputs)


def _squared_norm(a: Any, b: Any) -> float:
    """Return ‖BA‖², by the smaller of the two possible matrices.

    ‖BA‖² is the trace of (BᵀB)(AAᵀ), so usually no matrix has the size of the model's
    weights.
    """
    with np.errstate(all="ignore"):  # weights that are not finite give no point
        if len(a) * len(a) <= len(b) * a.shape[1]:
            return float(np.vdot(b.T @ b, a @ a.T))
        product = b @ a
        return float(np.vdot(product, product))


@dataclass
class NormCurves:
    """The norms of a run's checkpoints."""

    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Steps and norms of each module group."""

    notes: list[str] = field(default_factory=list)
    """What could not be read."""

    is_pending: bool = False
    """Whether checkpoints are still unread."""


def norms_by_checkpoint(run: Path, deadline: float) -> NormCurves:
    """Return the norm curve of each module group.

    Args:
        run: the run folder.
        deadline: the ``time.monotonic()`` after which no further checkpoint is read.
    """
    norms = NormCurves()
    for step, folder in checkpoints(run):
        for path in folder.glob("weights.safetensors"):
            key = (str(path), path.stat().st_mtime_ns)
            if key not in _NORMS:
                if time.monotonic() > deadline:
                    norms.is_pending = True
                    return norms
                if len(_NORMS) >= MAX_NORMS:
                    _NORMS.clear()
                _NORMS[key] = _checkpoint_norms(path)

            groups = _NORMS[key]
            if isinstance(groups, str):
                norms.notes.append(f"{run.name}, checkpoint of step {step}: {groups}")
                continue
            for group, norm in groups.items():
                norms.curves.setdefault(group, [(0, 0.0)]).append((step, norm))
    return norms


def _checkpoint_norms(weights: Path) -> dict[str, float] | str:
    """Return the norms of a checkpoint, or why there are none."""
    try:
        return lora_norms(weights, _scales_of(weights.parent / "state.json"))
    except (ValueError, OSError, MemoryError) as error:
        return f"{weights.name} gives no curve: {error or 'there is no memory for it'}"


def _scales_of(path: Path) -> float | dict[str, float]:
    """Return the scale of a checkpoint's LoRA, by module if they may differ."""
    state = read_cached(path)
    scale = state.get("lora_scale") if isinstance(state, dict) else None
    if isinstance(scale, dict):
        return {module: number(value) or 1.0 for module, value in scale.items()}
    return number(scale) or 1.0


def charts(run: Run, deadline: float) -> dict[str, Any]:
    """Return all charts of a run, and the steps at which it saved and sampled previews.

    Args:
        run: the run.
        deadline: see ``norms_by_checkpoint``.
    """
    norms = norms_by_checkpoint(run.folder, deadline)
    chart_curves = {}
    for name, raw_curves in _raw_charts(run, norms.curves).items():
        drawn_curves = [curve(*raw_curve) for raw_curve in raw_curves]
        chart_curves[name] = [drawn for drawn in drawn_curves if drawn["x"]]
    sample_steps = set()
    for record in run.of_kind("sample"):
        sample_steps.add(number(record.get("step")) or 0)

    return {
        "name": run.folder.name,
        "pending": norms.is_pending,
        "notes": norms.notes,
        "saves": [step for step, _ in checkpoints(run.folder)],
        "previews": sorted(sample_steps),
        "charts": chart_curves,
    }


def _raw_charts(
    run: Run, norm_curves: dict[str, list[tuple[float, float]]]
) -> dict[str, list[Any]]:
    """Return the arguments of ``curve`` for each curve of each chart."""
    losses = []
    validations = []
    for part in run.parts:
        prefix = f"{part.name}, " if part.name else ""
        losses.append((part.name or "loss", *part.errors.mse))
        held_out = _validation_curve(part, "held_out")
        validations.append((f"{prefix}clips kept aside", *held_out))
        train = _validation_curve(part, "train")
        validations.append((f"{prefix}training clips", *train))

    rates = []
    speed = []
    for name, step_curve in curves(run.folder).items():
        if name.startswith("rate "):
            rates.append((name.removeprefix("rate "), *step_curve))
        elif name == "seconds":
            speed.append(("seconds per step", *step_curve))

    modules = []
    for name, pairs in sorted(norm_curves.items()):
        modules.append((name, *np.transpose(pairs)))

    return {
        "loss": losses,
        "validation": validations,
        "noise": _by_noise_level(run.steps.errors),
        "sound_noise": _by_noise_level(run.steps.sound_errors),
        "modules": modules,
        "rate": rates,
        "norm": [("gradient norm", *run.steps.norms)],
        "speed": speed,
    }


def _by_noise_level(errors: StepErrors) -> list[tuple[Any, ...]]:
    """Return the arguments of ``curve`` for each ninth of the noise levels."""
    curves_by_level = []
    for index, noise_curve in enumerate(errors.by_noise):
        label = f"{index / 9:.2f} to {(index + 1) / 9:.2f}"
        curves_by_level.append((label, *noise_curve, MAX_POINTS_OF_NINE))
    return curves_by_level


def _validation_curve(part: LearntPart, key: str) -> Any:
    """Return steps and normalised losses of the validation."""
    return np.reshape(points(part.validations, key, "normalised"), (-1, 2)).T


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

    deadline = time.monotonic() + READ_SECONDS
    run_charts = [charts(read_live(folder), deadline) for folder in folders]
    return Response(
        json.dumps(run_charts, allow_nan=False, separators=(",", ":")),
        media_type="application/json",
        headers={"ETag": etag, "Cache-Control": "no-cache"},
    )
