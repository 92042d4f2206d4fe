"""What the planner says of the guide's memory table: Wan 2.2 5B and A14B, row by row,
without a GPU and without weights.

    python benchmarks/planning.py [ROWS] [--out docs/benchmarks-memory.json] [--tiny]

ROWS: as "5b-8" or "a14b-48", all of them unless named; then also "a14b-4", a full
fine-tuning of A14B on a card of 4 GB, which does not fit.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from videotune.config.resolve import resolve
from videotune.models.base_model import published, spec_for
from videotune.models.registry import find
from videotune.planner.gpus import USUAL
from videotune.planner.memory import (
    Constraints,
    fastest,
    fit_other_phases,
    room,
    smallest,
)
from videotune.planner.plan_inputs import PlanInputs
from videotune.planner.read_step import fake_run, read_step_spec
from videotune.planner.step_spec import TILED, UNCHANGED
from videotune.types import BasePlace, ClipShape

MODELS = {"5b": "wan2.2-ti2v-5b", "a14b": "wan2.2-t2v-a14b"}
TINY = "tiny"
TABLE = {8: (1, 9, 384), 16: (2, 17, 512), 24: (4, 17, 512), 48: (8, 33, 768)}
"""GB of the card: samples of a step, pixel frames (the guide's 8, 16 and 32, as Wan
takes them), pixels of a side.
"""
GIB = 2**30


def wanted(model: str, batch: int, frames: int, side: int, method: str) -> PlanInputs:
    """What is to be read for a row."""
    folder = (
        find("wan").tiny(Path(tempfile.mkdtemp()) / TINY)
        if model == TINY
        else published(model)
    )
    assert folder is not None, model
    base = BasePlace(model, folder)
    spec = spec_for("wan", base)
    shape = ClipShape(frames, side, side, spec.rules.fps)
    one = {"experts": "high"} if method == "FINE_TUNE" and len(spec.experts) > 1 else {}
    config = resolve(
        {"batch_size": batch, "training_method": method, **one}, {}, spec
    ).config
    return PlanInputs(spec, base.folder, config, "BFLOAT_16", (shape,), shape)


def row(
    model: str, gigabytes: int, batch: int, frames: int, side: int, method: str = "LORA"
) -> dict[str, Any]:
    """What is chosen for one row, and what it needs."""
    begun = time.perf_counter()
    inputs = wanted(MODELS[model], batch, frames, side, method)
    vram = int(gigabytes * 1e9)
    facts = read_step_spec(inputs)
    found = fastest(facts, batch, Constraints(), vram, USUAL)
    training = found or smallest(facts, batch, Constraints())
    choice = training.choice
    away = fit_other_phases(facts, training, vram)
    if inputs.preview is not None and room(away["preview"][1]) > vram:
        tiles = {TILED: fake_run(inputs).decode(inputs.preview, tiled=True)}
        preview = {**facts.other_phases["preview"], **tiles}
        away = fit_other_phases(
            replace(facts, other_phases={**facts.other_phases, "preview": preview}),
            training,
            vram,
        )
    phases = {"training": (UNCHANGED, training.device[training.worst]), **away}
    return {
        "model": model,
        "method": method,
        "gb": gigabytes,
        "shape": f"{frames}x{side}x{side}",
        "batch": batch,
        "fits": found is not None
        and all(room(parts) <= vram for _, parts in phases.values()),
        "micro_batch_size": choice.micro_batch,
        "gradient_checkpointing": choice.checkpointing,
        "layer_offload_fraction": round(choice.streamed / len(facts.blocks), 3),
        "allocated_gib": round(training.allocated / GIB, 2),
        "need_gib": {
            name: round(room(parts) / GIB, 2) for name, (_, parts) in phases.items()
        },
        "ways": {name: way for name, (way, _) in phases.items()},
        "host_gib": round(sum(training.host.values()) / GIB, 2),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main() -> None:
    """Print the rows that were asked for, each as soon as it is known."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("rows", nargs="*")
    words.add_argument("--out", type=Path)
    words.add_argument(
        "--tiny", action="store_true", help="a rehearsal: one row of a tiny model"
    )
    asked = words.parse_args()
    if asked.tiny:
        MODELS["tiny"] = TINY
        asked.rows = ["tiny-8"]
    rows = [
        (model, gb)
        for model in MODELS
        for gb in TABLE
        if not asked.rows or f"{model}-{gb}" in asked.rows
    ]
    found = []
    for model, gb in rows:
        found.append(row(model, gb, *TABLE[gb]))
        print(json.dumps(found[-1]), flush=True)
    if not asked.rows or "a14b-4" in asked.rows:
        found.append(row("a14b", 4, 1, 9, 384, "FINE_TUNE"))
        print(json.dumps(found[-1]), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
