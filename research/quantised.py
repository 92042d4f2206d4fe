"""What rounding the frozen weights costs: the toy trained over each kind, and the
validation loss of base and result.

    python research/quantised.py [--kinds auto FLOAT_8 INT_8 NFLOAT_4] [--seeds 0 1 2]
    [--steps 100] [--set KEY=VALUE]
    [--work runs/quantised] [--out research/quantised.json]

Denoiser and text encoder are kept in the same kind. Runs of one seed have the same
clips, order, noise and first weights and differ by the kind alone. ``on_plain``: the
adapter that was learnt over the rounded base, laid over the base as it is. ``--steps
0`` reads the bases alone. A second call goes on with what is missing, and then prints
the table.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from videotune.commands.demo import TRIGGER
from videotune.files import read_json, write_json
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.planner.plan import make_plan
from videotune.toy.dataset import write_dataset
from videotune.trainer.loop import train_steps
from videotune.trainer.resume import OpenedRun
from videotune.trainer.setup import build_trainer
from videotune.trainer.trainer import Trainer
from videotune.validation.callbacks import Validation

COLUMNS = {
    "base": "base",
    "trained": "trained",
    "on_plain": "its adapter over the plain base",
    "loss": "last losses",
}
"""What a row has; of ``--steps 0`` the first alone."""


def open_trainer(told: argparse.Namespace, kind: str, seed: int) -> Trainer:
    """The toy preset over weights of this kind, before its first step, in a run folder
    of its own.
    """
    knobs = {
        "weight_dtype": kind,
        "seed": seed,
        "steps": max(1, told.steps),
        "save_every": 0,
        "sample_after": 0,
        "samples": 0,
        "sample_metrics.budget": 0,
        "validation_fraction": 0.1,
    }
    sets = (*(f"{key}={value}" for key, value in knobs.items()), *told.set)
    number = len(list(told.work.glob("run-*")))
    job = open_job(
        *resolve_config(
            Overrides(preset="toy", data=str(told.work / "clips"), sets=sets)
        )
    )
    return build_trainer(
        OpenedRun(job),
        told.work / f"run-{number}-{kind}-seed-{seed}",
        make_plan(job),
        [Validation(job)],
    )


def error(trainer: Trainer) -> float:
    """The held-out error as the run's validation measures it."""
    (validation,) = (one for one in trainer.callbacks if isinstance(one, Validation))
    return float(validation.read(trainer)["held_out"]["mean"])


def one_run(
    told: argparse.Namespace, kind: str, seed: int, plain: Trainer | None
) -> tuple[dict[str, Any], Trainer]:
    """Train over a base of this kind, and read what its adapter does to the base of
    ``plain`` (None: this is it).
    """
    trainer = open_trainer(told, kind, seed)
    row = {"kind": kind, "seed": seed, "base": error(trainer)}
    if told.steps:
        losses = [record.read()["loss"] for record in train_steps(trainer)]
        row["trained"] = error(trainer)
        if plain is not None:
            with torch.no_grad():
                for name, parameter in plain.parameters.items():
                    parameter.copy_(trainer.parameters[name])
        row["on_plain"] = row["trained"] if plain is None else error(plain)
        row["loss"] = statistics.fmean(float(loss or 0) for loss in losses[-25:])
    trainer.journal.close()
    return {
        key: round(value, 6) if isinstance(value, float) else value
        for key, value in row.items()
    }, trainer


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each kind, of each figure the mean over seeds, and its ratio to the plain run
    of the seed with its deviation.
    """
    plain = {row["seed"]: row for row in rows if row["kind"] == "auto"}
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        line: dict[str, Any] = {"kind": kind, "runs": len(own)}
        for name in COLUMNS:
            if name in own[0]:
                ratios = [
                    row[name] / plain[row["seed"]][name] - 1
                    for row in own
                    if row["seed"] in plain
                ]
                deviation = (
                    round(statistics.stdev(ratios), 6) if len(ratios) > 1 else None
                )
                mean = round(statistics.fmean(row[name] for row in own), 6)
                line[name] = [
                    mean,
                    round(statistics.fmean(ratios), 6) if ratios else None,
                    deviation,
                ]
        lines.append(line)
    return lines


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """The table: held-out errors, and by how much they are more than those of plain
    weights.
    """
    names = [name for name in COLUMNS if name in lines[0]]
    print("| weights | " + " | ".join(COLUMNS[name] for name in names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for line in lines:
        cells = [
            f"{line[name][0]:.5f}"
            + ("" if line["kind"] == "auto" else more(*line[name][1:]))
            for name in names
        ]
        print(
            f"| {'FLOAT_32' if line['kind'] == 'auto' else line['kind']} | "
            + " | ".join(cells)
            + " |"
        )


def more(mean: float | None, deviation: float | None) -> str:
    """The part of a cell that compares."""
    if mean is None:
        return ""
    return (
        f" ({100 * mean:+.2f} %"
        + ("" if deviation is None else f" ± {100 * deviation:.2f}")
        + ")"
    )


def main() -> None:
    """Do the runs that are missing, write the file after each, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--kinds", nargs="+", default=["auto", "FLOAT_8", "INT_8", "NFLOAT_4"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--work", type=Path, default=Path("runs/quantised"))
    parser.add_argument("--out", type=Path, default=Path("research/quantised.json"))
    parser.add_argument(
        "--set", action="append", default=[], help="a further word for every run"
    )
    told = parser.parse_args()
    if not (told.work / "clips").is_dir():
        write_dataset(told.work / "clips", trigger=TRIGGER)
    shared = {"steps": told.steps, "sets": list(told.set)}
    result = read_json(told.out) if told.out.is_file() else {**shared, "runs": []}
    if {name: result[name] for name in shared} != shared:
        raise SystemExit(
            f"{told.out} holds runs of {result['steps']} steps with {result['sets']}; give another --out"
        )
    done = {(row["kind"], row["seed"]) for row in result["runs"]}
    for seed in told.seeds:
        plain = None
        for kind in told.kinds:
            if (kind, seed) in done:
                continue
            if kind != "auto" and plain is None and told.steps:
                plain = open_trainer(told, "auto", seed)
            row, trainer = one_run(told, kind, seed, plain)
            plain = trainer if kind == "auto" else plain
            result["runs"].append(row)
            result["summary"] = summary(result["runs"])
            write_json(told.out, result)
            print(row, flush=True)
    show(result["summary"])


if __name__ == "__main__":
    main()
