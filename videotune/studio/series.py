"""The curves of runs as JSON for the charts: of the steps, of validation, and how far each group of modules has moved."""

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
from videotune.studio.status import curves, read_live, remembered
from videotune.studio.web import In

routes = APIRouter()
MOST = 1500
"""Points of a curve that are sent."""

FEWER = 600
"""Points of a curve that is one of nine."""

MOST_RUNS = 8
"""Runs on one chart."""

PATIENCE = 1.0
"""Seconds that an answer may spend on reading checkpoints; those that are left wait for the next."""

TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy's types of a safetensors header; BF16 is the upper half of a float32."""

_MOVED: dict[tuple[str, int], dict[str, float]] = {}
"""What was read of checkpoints, by file and time of its last change."""


def curve(name: str, steps: Any, values: Any, most: int = MOST) -> dict[str, Any]:
    """A curve of at most ``most`` points: of each stretch of steps the lowest value and the highest."""
    x = np.asarray(steps, dtype=np.int64)
    y = np.asarray(values, dtype=np.float64)
    if len(x) > most:
        parts = np.array_split(np.arange(len(x)), most // 2 - 1)
        kept = np.unique(
            [
                0,
                *(part[0] + at(y[part]) for part in parts for at in (np.argmin, np.argmax)),
                len(x) - 1,
            ]
        )
        x = x[kept]
        y = y[kept]
    return {"name": name, "x": x.tolist(), "y": [float(f"{value:.6g}") for value in y]}


def group(module: str) -> str:
    """The group of a module by its name: feed-forward, or the part of an attention; blocks count together."""
    parts = [part for part in module.split(".") if not part.isdigit()]
    if any(re.match("ff|mlp|feed", part) for part in parts):
        return "ffn"
    found = re.search(r"(?:to_|add_|_|^)(q|k|v|out|qkv)(?:_proj|$)", parts[-1])
    attention = next((part for part in parts if "attn" in part), "")
    return f"{attention} {found[1]}".strip() if found else " ".join(parts[-2:])


def moved(weights: Path) -> dict[str, float]:
    """How far each group of modules has moved, by a LoRA's file: the norm of B·A over the group's modules.

    ‖BA‖² is the trace of (BᵀB)(AAᵀ), so no product is as large as the model. Empty where the file holds no LoRA.
    """
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(min(length, weights.stat().st_size)))
    data = np.memmap(weights, np.uint8, "r", 8 + length)
    squares = dict[str, float]()

    def matrix(name: str) -> Any:
        start, end = head[name]["data_offsets"]
        raw = data[start:end].view(TYPES[head[name]["dtype"]]).reshape(head[name]["shape"])
        return (
            (raw.astype(np.uint32) << 16).view(np.float32)
            if raw.dtype == "<u2"
            else raw.astype(np.float32)
        )

    for first in (name for name in head if ".lora_A." in name):
        a = matrix(first)
        b = matrix(first.replace(".lora_A.", ".lora_B."))
        key = group(first.partition(".lora_A.")[0])
        if a.ndim == b.ndim == 2:
            squares[key] = squares.get(key, 0.0) + float(np.vdot(b.T @ b, a @ a.T))
    return {name: max(0.0, square) ** 0.5 for name, square in squares.items()}


def by_module(run: Path) -> tuple[dict[str, list[tuple[float, float]]], bool]:
    """How far each group of modules has moved at each checkpoint; and whether some are still to be read."""
    found = dict[str, list[tuple[float, float]]]()
    end = time.monotonic() + PATIENCE
    for step, folder in checkpoints(run):
        for path in folder.glob("weights.safetensors"):
            if (key := (str(path), path.stat().st_mtime_ns)) not in _MOVED:
                if time.monotonic() > end:
                    return found, True
                try:
                    scale = float(
                        (remembered(folder / "state.json") or {}).get("lora_scale") or 1
                    )
                    _MOVED[key] = {name: scale * far for name, far in moved(path).items()}
                except (
                    ValueError,
                    KeyError,
                    TypeError,
                ):  # damaged; the command that loads it says what is wrong
                    _MOVED[key] = {}
            for name, far in _MOVED[key].items():
                found.setdefault(name, [(0, 0.0)]).append((step, far))
    return found, False


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run with their steps, in order."""
    found = [
        (path.parent.name.partition("-")[2], path.parent)
        for path in run.glob("checkpoints/step-*/COMPLETE")
    ]
    return sorted((int(step), path) for step, path in found if step.isdecimal())


def charts(run: Run) -> dict[str, Any]:
    """Every chart of a run: a list of curves each; and the steps at which it saved and drew previews."""
    steps = run.steps
    more = curves(run.folder)
    (modules, pending) = by_module(run.folder)
    held, train = (
        np.reshape(points(run.validations, key, "normalised"), (-1, 2)).T
        for key in ("held_out", "train")
    )
    ninths = [
        (f"{n / 9:.2f} to {(n + 1) / 9:.2f}", *one, FEWER)
        for n, one in enumerate(steps.by_noise)
    ]
    named: dict[str, list[Any]] = {
        "loss": [("loss", *steps.mse)],
        "validation": [("held-out clips", *held), ("training clips", *train)],
        "noise": ninths,
        "modules": [(name, *np.transpose(pairs)) for name, pairs in sorted(modules.items())],
        "rate": [(name[5:], *one) for name, one in more.items() if name.startswith("rate ")],
        "norm": [("gradient norm", *steps.norms)],
        "speed": [
            ("seconds per step", *one) for name, one in more.items() if name == "seconds"
        ],
    }
    shown = {
        name: [curve(*one) for one in found if len(one[1])] for name, found in named.items()
    }
    previews = sorted({number(record.get("step")) or 0 for record in run.of_kind("sample")})
    saves = [step for step, _ in checkpoints(run.folder)]
    return {
        "name": run.folder.name,
        "pending": pending,
        "saves": saves,
        "previews": previews,
        "charts": shown,
    }


@routes.get("/p/{project}/series")
def series(asked: In, request: Request, run: Annotated[list[str], Query()]) -> Response:
    """The charts of some runs; 304 where nothing has been added."""
    folders = [run_folder(asked.home, name) for name in run[:MOST_RUNS]]
    marks = [path.stat() for folder in folders for path in folder.glob("journal.jsonl")]
    mark = f'"{digest([run, len(_MOVED), *((one.st_size, one.st_mtime_ns) for one in marks)])}"'
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=304, headers={"ETag": mark})
    body = json.dumps(
        [charts(read_live(folder)) for folder in folders],
        allow_nan=False,
        separators=(",", ":"),
    )
    return Response(
        body, media_type="application/json", headers={"ETag": mark, "Cache-Control": "no-cache"}
    )
