"""What rounding the frozen weights costs: the toy trained over each kind, the ruler read of its base and of what was learnt.

    python scripts/quantised.py [--kinds auto FLOAT_8 INT_8 NFLOAT_4] [--seeds 0 1 2] [--steps 100] [--set KEY=VALUE]
                                [--work runs/quantised] [--out docs/quantised.json]

Denoiser and text encoder are kept in the same kind. Runs of one seed have the same clips, order, noise and first weights and
differ by the kind alone. ``on_plain``: the adapter that was learnt over the rounded base, laid over the base as it is. A
second call goes on with what is missing, and then prints the table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from videotune.errors import DONE
from videotune.files import read_json, write_json
from videotune.monitor.journal import read_journal
from videotune.run.demo import TRIGGER, train_or_resume
from videotune.run.job import Words
from videotune.toy.dataset import write_dataset
from videotune.train.state import pick

COLUMNS = {"base": "base", "trained": "trained", "on_plain": "its adapter over the plain base", "loss": "last losses"}


def words_of(clips: Path, kind: str, seed: int, steps: int, sets: Sequence[str]) -> Words:
    """The toy preset with weights of this kind; the ruler is read first and last."""
    knobs = {
        "weight_dtype": kind,
        "seed": seed,
        "steps": steps,
        "save_every": 0,
        "sample_after": 0,
        "probe_budget": 0,
        "ruler_after": steps,
        "validation_fraction": 0.05,
    }
    return Words(preset="toy", data=str(clips), sets=(*(f"{key}={value}" for key, value in knobs.items()), *sets))


def readings(run: Path) -> list[float]:
    """The held-out error of each reading."""
    return [line["held_out"]["mean"] for line in read_journal(run) if line["kind"] == "ruler"]


def trained(words: Words, run: Path) -> None:
    """Train, or go on with what was begun."""
    if train_or_resume(words, run) != DONE:
        raise SystemExit("stopped; the same command goes on")


def one_run(told: argparse.Namespace, kind: str, seed: int) -> dict[str, Any]:
    """Train over a base of this kind, and read what its adapter does to the base as it is."""
    clips, run = told.work / "clips", told.work / f"{kind}-seed-{seed}-steps-{told.steps}"
    trained(words_of(clips, kind, seed, told.steps, told.set), run)
    base, last = readings(run)
    losses = [line["loss"] for line in read_journal(run) if line["kind"] == "step"]
    plain = last
    if kind != "auto":
        beside = run.with_name(f"{run.name}-on-plain")
        sets = (*told.set, f"init_from={pick(run, None).folder}")
        trained(words_of(clips, "auto", seed, 1, sets), beside)
        plain = readings(beside)[0]
    row = {"kind": kind, "seed": seed, "base": base, "trained": last, "on_plain": plain}
    row["loss"] = statistics.fmean(losses[-25:])
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each kind, of each figure the mean over seeds, and its ratio to the plain run of the seed with its deviation."""
    plain = {row["seed"]: row for row in rows if row["kind"] == "auto"}
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        line: dict[str, Any] = {"kind": kind, "runs": len(own)}
        for name in COLUMNS:
            ratios = [row[name] / plain[row["seed"]][name] - 1 for row in own if row["seed"] in plain]
            spread = round(statistics.stdev(ratios), 6) if len(ratios) > 1 else None
            mean = round(statistics.fmean(row[name] for row in own), 6)
            line[name] = [mean, round(statistics.fmean(ratios), 6) if ratios else None, spread]
        lines.append(line)
    return lines


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """The table: held-out errors, and by how much they are more than those of plain weights."""
    print("| weights | " + " | ".join(COLUMNS.values()) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for line in lines:
        cells = [f"{line[name][0]:.5f}" + ("" if line["kind"] == "auto" else more(*line[name][1:])) for name in COLUMNS]
        print(f"| {'FLOAT_32' if line['kind'] == 'auto' else line['kind']} | " + " | ".join(cells) + " |")


def more(mean: float | None, deviation: float | None) -> str:
    """The part of a cell that compares."""
    if mean is None:
        return ""
    return f" ({100 * mean:+.2f} %" + ("" if deviation is None else f" ± {100 * deviation:.2f}") + ")"


def main() -> None:
    """Do the runs that are missing, write the file after each, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["auto", "FLOAT_8", "INT_8", "NFLOAT_4"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--work", type=Path, default=Path("runs/quantised"))
    parser.add_argument("--out", type=Path, default=Path("docs/quantised.json"))
    parser.add_argument("--set", action="append", default=[], help="a further word for every run")
    told = parser.parse_args()
    if not (told.work / "clips").is_dir():
        write_dataset(told.work / "clips", trigger=TRIGGER)
    shared = {"steps": told.steps, "sets": list(told.set)}
    result = read_json(told.out) if told.out.is_file() else {**shared, "runs": []}
    if {name: result[name] for name in shared} != shared:
        raise SystemExit(f"{told.out} holds runs of {result['steps']} steps with {result['sets']}; give another --out")
    done = {(row["kind"], row["seed"]) for row in result["runs"]}
    for seed in told.seeds:
        for kind in told.kinds:
            if (kind, seed) not in done:
                result["runs"].append(one_run(told, kind, seed))
                result["summary"] = summary(result["runs"])
                write_json(told.out, result)
                print(result["runs"][-1], flush=True)
    show(result["summary"])


if __name__ == "__main__":
    main()
