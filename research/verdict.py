"""How well the verdict tells when to stop: the toy trained on four clips until it
copies them, and on fresh clips alone.

    python research/verdict.py [--four 20] [--endless 20] [--levels 5] [--first-seed 0]
    [--steps 240] [--every 40]
    [--work runs/verdict] [--out research/verdict.json] [--table]

four: four clips, each shown 240 times. The best step by the verdict, which reads as
many held-out clips as so short a run
pays for, is compared with that of an independent dense validation: 64 clips and noise
of its own, a reading for each checkpoint, each noise level on a third of the clips.
endless: as many steps, and every sample is of a clip that was never shown before: a
call of OVERFITTING is a false one. levels: four clips of what the base draws already,
at a small rate, at noise levels the lowest of which no model can do much about: its
error there is most of the plain mean, which hardly moves while the other levels copy.
Runs that are done are kept: a second call goes on with what is missing, and then prints
the table.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from videotune.adapters.layers import load_weights
from videotune.commands.demo import train_or_resume
from videotune.diffusion.loss import denoising_loss
from videotune.files import hash_file, read_json, write_json
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.latent_cache.batch_source import BatchSource
from videotune.latent_cache.batches import assemble
from videotune.latent_cache.store import LatentCache
from videotune.models.base import DiffusersModel
from videotune.rng import generator_for
from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.journal import read_journal
from videotune.toy.dataset import write_dataset
from videotune.trainer.build import make_objective, make_source, open_models
from videotune.trainer.cache_filling import fill_cache
from videotune.trainer.trainable import attach
from videotune.types import Window
from videotune.validation.callbacks import cache_items_of
from videotune.validation.overfitting import MIN_RISE, OVERFITTING, judge
from videotune.validation.selection import QUANTILES

VALIDATION = 16
"""Held-out clips of a run of four clips, more than validation reads in so short a run.
"""

DENSE = 64
"""Clips of the dense validation."""

POOL = 1000
SHARE = 0.016
"""The endless clips, of which a run sees each at most once, and the share of them that
is held out: 16.
"""

LOW = {
    "timestep_distribution": "UNIFORM",
    "timestep_shift": 0.2,
    "learning_rate": 3e-5,
    "video_config.frames": 17,
}
"""Noise levels of the third case: the lowest of nine is 0.02, and half of them lie
below 0.17.
"""

SHORT = {"video_config.frames": 9, "video_config.windows": "head", "batch_size": 4}
"""Half a second of each clip, one window each: half of the preset's work."""

THIRD = 3
"""The dense validation reads each of its clips at every third noise level, each level
on a third of the clips.
"""


RATE = 2e-3
"""Twice the preset's, so that four clips are copied within so few steps."""


@dataclass(frozen=True)
class Plan:
    """What all runs share: steps, steps from reading to reading, further ``--set``
    words, and where things are put.
    """

    steps: int
    every: int
    sets: tuple[str, ...]
    work: Path

    def folder(self, case: str, seed: int) -> Path:
        """A run's own folder."""
        return self.work / "-".join(
            [case, str(seed), f"steps-{self.steps}", *self.sets]
        )


def clips_of(plan: Plan, name: str, count: int, seed: int, known: bool = False) -> Path:
    """A folder of so many drawn clips of the concept, or of what the base knows, made
    once.
    """
    folder = plan.work / "clips" / f"{name}-{count}-{seed}"
    if not (folder / "whole").exists():
        write_dataset(
            folder,
            concept_clips=0 if known else count,
            reminder_clips=count if known else 0,
            seed=seed,
        )
        (folder / "whole").touch()
    return folder


def overrides_from(plan: Plan, case: str, seed: int) -> Overrides:
    """The toy preset, a checkpoint and a reading every so many steps, no previews."""
    if case in ("four", "levels"):
        known = case == "levels"
        kind = "-known" if case == "levels" else ""
        own = clips_of(plan, f"four{kind}", 4, 1000 + seed, known)
        fresh = clips_of(plan, f"validation{kind}", VALIDATION, 2000 + seed, known)
        datasets = [{"path": str(own)}, {"path": str(fresh), "kind": "validation"}]
    else:
        datasets = [{"path": str(clips_of(plan, "endless", POOL, 3000))}]
    knobs = SHORT | {
        "seed": seed,
        "steps": plan.steps,
        "datasets": datasets,
        "validation_fraction": SHARE if case == "endless" else 0,
        "cache_dir": str(
            plan.work / f"cache-{'endless' if case == 'endless' else 'four'}"
        ),
        "save_every": plan.every if case == "four" else 0,
        "sample_metrics.budget": 0,
        "validate_every": plan.every,
        "sample_after": 0,
        "learning_rate_scheduler": "CONSTANT",
        "learning_rate": RATE,
    }
    knobs |= LOW if case == "levels" else {}
    return Overrides(
        preset="toy",
        sets=(
            *(f"{key}={json.dumps(value)}" for key, value in knobs.items()),
            *plan.sets,
        ),
    )


class Dense:
    """An independent validation: 64 clips that no run has, read at the same nine noise
    levels with noise of their own.
    """

    def __init__(self, plan: Plan) -> None:
        folder = clips_of(plan, "dense", DENSE, 4000)
        short = (f"{key}={value}" for key, value in SHORT.items())
        sets = (
            *short,
            f"cache_dir={plan.work / 'cache-dense'}",
            "validation_fraction=0",
        )
        self.job = open_job(
            *resolve_config(Overrides(preset="toy", data=str(folder), sets=sets))
        )
        self.family: DiffusersModel = open_models(
            self.job.spec, self.job.base, self.job.config
        )
        store = LatentCache(self.job.cache)
        loss = make_objective(self.job.spec, self.job.config)
        fill_cache(self.job, self.family, store, cache_items_of(self.job))
        self.family.free("text_encoder")
        self.family.free("vae")
        self.source: BatchSource = make_source(self.job, self.family, store, loss)
        self.windows: list[Window] = list(self.job.library.windows)
        assert len(self.windows) == DENSE
        self.net = self.family.denoiser()
        self.parameters = attach(self.net, self.job.spec, self.job.config)
        self.base = {
            name: value.detach().clone() for name, value in self.parameters.items()
        }

    def read(self, weights: Mapping[str, torch.Tensor] | None) -> list[float]:
        """The mean error at each of the nine levels under a checkpoint's adapter, or
        (None) the base's.
        """
        load_weights(self.parameters, weights or self.base, "here")
        self.net.eval()
        means = []
        for number, level in enumerate(
            self.source.objective.timesteps.quantiles(QUANTILES)
        ):
            some = self.windows[number % THIRD :: THIRD]
            captions = [
                self.source.clips[window.clip_id].captions[0] for window in some
            ]
            types = [self.source.condition_reader.types_of_most_samples] * len(some)
            batch = assemble(
                self.source,
                some,
                captions,
                [self.source.plain_latents(w) for w in some],
                types,
            )
            shape = tuple(batch.x0.shape)
            noise = torch.from_numpy(
                generator_for(4000, "dense", number).standard_normal(shape, "float32")
            )
            with torch.no_grad():
                t = level.float().expand(len(some))
                out = denoising_loss(
                    self.family, self.net, self.source.objective, batch, t, noise
                )
            means.append(out.mse.double().mean().item())
        return means


@cache
def dense_of(plan: Plan) -> Dense:
    """Opened once a process."""
    return Dense(plan)


def one_run(plan: Plan, case: str, seed: int) -> dict[str, Any]:
    """Train, or go on with, a run; its readings, and those of the dense validation."""
    run = plan.folder(case, seed)
    begun = time.perf_counter()
    if not train_or_resume(overrides_from(plan, case, seed), run):
        raise SystemExit("stopped; the same command goes on")
    kept = ("step", "validation", "kind", "held_out", "train")
    readings = [
        {key: line[key] for key in kept}
        for line in read_journal(run)
        if line["kind"] == "validation"
    ]
    views = read_json(run / "plan.json")["views"]["per_window"]
    out = {"case": case, "seed": seed, "views": views, "readings": readings}
    if case == "four":
        dense = dense_of(plan)
        found = {0: dense.read(None)}
        found |= {
            one.step: dense.read(one.load("weights"))
            for one in complete_checkpoints(run)
        }
        out["dense"] = found
    return out | {"seconds": round(time.perf_counter() - begun, 1)}


def asset_hash() -> str:
    """The toy base's weights by their bytes."""
    import videotune

    folder = Path(videotune.__file__).parent / "assets" / "toy" / "transformer"
    return hash_file(next(folder.glob("*.safetensors")))


def course(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the verdict said as the readings came: where it first said OVERFITTING, and
    its last word and best step.
    """
    said = [judge(readings[: end + 1]) for end in range(len(readings))]
    called = [one.step for one in said if one is not None and one.label == OVERFITTING]
    last = said[-1]
    assert last is not None
    return {
        "words": [one.label if one else None for one in said],
        "called_at": called[0] if called else None,
        "best_step": last.best_step,
        "as_good": last.as_good,
        "quantile": last.quantile,
        "held_out": [round(one["held_out"]["normalised"], 4) for one in readings],
        "train": [round(one["train"]["normalised"], 4) for one in readings],
        "plain": [round(one["held_out"]["mean"], 5) for one in readings],
        "by_level": [
            [round(x, 4) for x in one["held_out"]["by_quantile"]] for one in readings
        ],
    }


def dense_course(dense: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The dense validation's normalised losses by step, and where they are lowest."""
    base = next(iter(dense.values()))
    values = {
        int(step): sum(now / then for now, then in zip(row, base, strict=True)) / 9
        for step, row in dense.items()
    }
    low = min(values, key=lambda step: values[step])
    return {"dense": [round(value, 4) for value in values.values()], "dense_best": low}


def row_of(plan: Plan, result: Mapping[str, Any]) -> dict[str, Any]:
    """A run as the table has it."""
    row = {
        "case": result["case"],
        "seed": result["seed"],
        "most_views": result["views"]["max"],
    } | course(result["readings"])
    if "dense" in result:
        row |= dense_course(result["dense"])
        row["off_by"] = round(abs(row["best_step"] - row["dense_best"]) / plan.every)
        at = row["dense"][row["best_step"] // plan.every]
        row["loss_of_it"] = round(at - min(row["dense"]), 4)
    return row


def plain_rises(values: Sequence[float]) -> bool:
    """Whether the plain mean over noise levels meets the least that the rule asks for:
    two readings in a row after the best one that lie above it by more than ``MIN_RISE``
    of the first.
    """
    best = min(range(len(values)), key=lambda i: (values[i], i))
    risen = [value - values[best] > MIN_RISE * values[0] for value in values[best:]]
    return any(one and other for one, other in pairwise(risen))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many runs of each case were called, and how near the best step was to the
    dense validation's.
    """
    found: dict[str, Any] = {}
    for case in ("four", "endless", "levels"):
        own = [row for row in rows if row["case"] == case]
        found[case] = {
            "runs": len(own),
            "overfitting": sum(row["called_at"] is not None for row in own),
        }
        if case == "four":
            near = [row for row in own if row["off_by"] <= 1]
            found[case]["within_one_reading"] = len(near)
            found[case]["both"] = sum(row["called_at"] is not None for row in near)
        if case == "levels":
            found[case]["by_the_plain_mean"] = sum(
                plain_rises(row["plain"]) for row in own
            )
    return found


def show(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """The table as a person reads it."""
    print(
        "case     seed  called at  best step  dense best  off by  held out  end    train"
    )
    for row in rows:
        low = min(row["held_out"])
        end = row["held_out"][-1]
        print(
            f"{row['case']:<8} {row['seed']:>4}  {row['called_at'] or '-':>9}  {row['best_step']:>9}  "
            f"{row.get('dense_best', '-'):>10}  {row.get('off_by', '-'):>6}  {low:.3f}     {end:.3f}  {row['train'][-1]:.3f}"
        )
    print(json.dumps(facts))


def main() -> None:
    """Do what is missing, then print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--four", type=int, default=20)
    parser.add_argument("--endless", type=int, default=20)
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--work", type=Path, default=Path("runs/verdict"))
    parser.add_argument(
        "--out",
        type=Path,
        help="a file for the table and the summary, as research/verdict.json",
    )
    parser.add_argument(
        "--table", action="store_true", help="of the runs that are done; train none"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(args.steps, args.every, tuple(args.set), args.work.absolute())
    wanted = [("four", args.first_seed + i) for i in range(args.four)]
    wanted += [("endless", args.first_seed + i) for i in range(args.endless)]
    wanted += [("levels", args.first_seed + i) for i in range(args.levels)]
    rows = []
    held_out = 0
    for number, (case, seed) in enumerate(wanted, 1):
        path = plan.folder(case, seed) / "result.json"
        if args.table and not path.is_file():
            continue
        if not path.is_file():
            result = one_run(plan, case, seed)
            write_json(path, result)
            print(
                f"{number}/{len(wanted)} {case} {seed}: {result['seconds']} s",
                flush=True,
            )
        result = read_json(path)
        held_out = result["readings"][0]["held_out"]["windows"]
        rows.append(row_of(plan, result))
    facts = summary(rows)
    show(rows, facts)
    if args.out:
        settings = {
            "steps": plan.steps,
            "every": plan.every,
            "rate": RATE,
            "frames": 9,
            "held_out": held_out,
            "sets": plan.sets,
        }
        write_json(
            args.out,
            {"toy": asset_hash(), "settings": settings, "summary": facts, "runs": rows},
        )


if __name__ == "__main__":
    main()
