"""What temporal_consistency_weight does: the toy trained with several weights and
seeds, what it then draws measured.

    python research/consistency.py [--weights 0 0.5 1 2] [--seeds 0 1 2] [--steps 150]
    [--set KEY=VALUE]
    [--work runs/consistency] [--out research/consistency.json]

Runs of one seed have the same clips, order, noise, noise levels and first weights and
differ by the weight alone, so each is compared with the run of its own seed at weight
0. A second call runs what is missing, and then prints the table.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toymaking.motion import motion

from videotune.commands.demo import (
    CONTROLS,
    SEEDS,
    TRIGGER,
    share_right,
    train_or_resume,
)
from videotune.commands.sample import SampleOptions, open_sampler
from videotune.diffusion.loss import denoising_loss
from videotune.files import read_json, write_json
from videotune.job.job import Job, open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.latent_cache.store import LatentCache
from videotune.models.base import DiffusersModel
from videotune.rng import generator_for
from videotune.runs.journal import read_journal
from videotune.sampling.pipeline import SampleSettings, draw
from videotune.toy.dataset import CONCEPT, write_dataset
from videotune.toy.detection import detect
from videotune.toy.shapes import DIRECTIONS, caption, draw_clip, phrase
from videotune.trainer.build import (
    make_objective,
    make_source,
    open_models,
    plain_batch,
)
from videotune.trainer.cache_filling import fill_cache
from videotune.validation.callbacks import cache_items_of
from videotune.validation.selection import preview_settings

LOOKS = [(*CONCEPT, way) for _ in SEEDS for way in DIRECTIONS] + list(CONTROLS)
PROMPTS = [phrase(TRIGGER, way) for _ in SEEDS for way in DIRECTIONS] + [
    caption(*look) for look in CONTROLS
]
NOISES = [seed for seed in SEEDS for _ in DIRECTIONS] + [
    SEEDS[0] + i for i in range(len(CONTROLS))
]
"""12 samples of the concept and 12 of what neither the base nor the clips ever showed,
as in the demo.
"""

COPIES = 4
"""Drawn clips of each look that say what is right."""

COLUMNS = {
    "held_out": "held-out error",
    "normalised": "normalised",
    "error_flicker": "its flicker",
    "energy": "motion energy",
    "flicker": "flicker",
    "shimmer": "shimmer",
    "jerk": "jerk",
    "concept": "concept",
    "control": "control",
}


@dataclass(frozen=True)
class Plan:
    """What all runs share: the clips' folder, steps, further ``--set`` words, and where
    run folders are put.
    """

    clips: Path
    steps: int
    sets: tuple[str, ...]
    work: Path

    def folder(self, weight: float, seed: int) -> Path:
        """A run's own folder."""
        return self.work / "-".join(
            [f"weight-{weight:g}", f"seed-{seed}", f"steps-{self.steps}", *self.sets]
        )


def overrides_from(plan: Plan, weight: float, seed: int) -> Overrides:
    """The toy preset with this weight: nothing is saved or drawn on the way, validation
    is first and last.
    """
    knobs = {
        "video_config.temporal_consistency_weight": weight,
        "seed": seed,
        "steps": plan.steps,
        "save_every": 0,
        "sample_after": 0,
        "validate_every": plan.steps,
    }
    sets = (*(f"{key}={value}" for key, value in knobs.items()), *plan.sets)
    return Overrides(preset="toy", data=str(plan.clips), sets=sets)


def sampled(
    family: DiffusersModel,
    nets: Mapping[str, torch.nn.Module],
    settings: SampleSettings,
    states: Mapping[str, Any],
) -> list[np.ndarray]:
    """What the prompts give: float frames (T, H, W, 3) in 0 to 255."""
    latents = draw(
        family,
        nets,
        settings,
        states.__getitem__,
        list(zip(PROMPTS, NOISES, strict=True)),
    )
    return [to_grey_levels(family.decode(one)) for one in latents]


def to_grey_levels(pixels: torch.Tensor) -> np.ndarray:
    """(3, T, H, W) in [-1, 1] -> float frames (T, H, W, 3) in 0 to 255, unrounded."""
    return ((pixels / 2 + 0.5).clamp(0, 1) * 255).permute(1, 2, 3, 0).numpy()


def right_ones(family: DiffusersModel) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Drawn clips of the same looks, and the same through the autoencoder and back: the
    best that any sample can be.
    """
    drawn = []
    copies = []
    for number, look in enumerate(LOOKS * COPIES):
        clip = draw_clip(generator_for(0, "consistency", number), *look)
        pixels = torch.from_numpy(clip).float().permute(3, 0, 1, 2) / 127.5 - 1
        drawn.append(clip.astype(np.float32))
        copies.append(to_grey_levels(family.decode(family.encode_video(pixels).mean)))
    return drawn, copies


def measured(clips: Sequence[np.ndarray]) -> dict[str, Any]:
    """Means of the measures of motion over the clips in which a subject can be
    followed, and how many these are.
    """
    found = [asdict(seen) for clip in clips if (seen := motion(clip)) is not None]
    means = {
        name: statistics.fmean(one[name] for one in found)
        for name in (found[0] if found else {})
    }
    return {name: round(value, 4) for name, value in means.items()} | {
        "followed": len(found),
        "of": len(clips),
    }


def scores(clips: Sequence[np.ndarray]) -> dict[str, float]:
    """What the detector sees of the samples: the demo's two shares, and how well
    outlines fit.
    """
    whole = [clip.round().astype("uint8") for clip in clips]
    count = len(SEEDS) * len(DIRECTIONS)
    part = [clip / 255 for clip in clips]
    return {
        "concept": share_right(part[:count], [CONCEPT] * count),
        "control": share_right(part[count:], CONTROLS),
        "iou": round(statistics.fmean(detect(clip).iou for clip in whole), 4),
    }


def error_flicker(
    job: Job, family: DiffusersModel, nets: Mapping[str, torch.nn.Module]
) -> float:
    """How much of the held-out error changes from frame to frame: |e_f - e_(f-1)|² over
    that of white error of |e|².

    1: the frames' errors have nothing to do with one another; 0: every frame has the
    same; 2: they alternate. Over the held-out clips and the validation's nine noise
    levels, with noise of their own.
    """
    plain = make_objective(job.spec, job.config)
    source = make_source(job, family, LatentCache(job.cache), plain)
    priced = replace(plain, temporal_consistency=1.0)
    (expert,) = job.spec.experts
    net = nets[expert.name].eval()
    ratios = []
    for number, level in enumerate(plain.timesteps.quantiles(9)):
        change = whole = 0.0
        for window in job.library.held_out_windows:
            batch = plain_batch(source, window)
            shape = tuple(batch.x0.shape)
            noise = torch.from_numpy(
                generator_for(0, "consistency", window.id, number).standard_normal(
                    shape, "float32"
                )
            )
            with torch.no_grad():
                out = denoising_loss(
                    family, net, priced, batch, level.float()[None], noise
                )
            share = (shape[2] - 1) / shape[2]
            mse = out.mse.item()
            change += out.per_sample_loss.item() * (1 + 2 * share) - mse
            whole += 2 * share * mse
        ratios.append(change / whole)
    return round(statistics.fmean(ratios), 4)


def one_run(
    plan: Plan, weight: float, seed: int, states: Mapping[str, Any]
) -> dict[str, Any]:
    """Train, or go on with, the run of a weight and a seed, and measure it."""
    run = plan.folder(weight, seed)
    begun = time.perf_counter()
    words = overrides_from(plan, weight, seed)
    if not train_or_resume(words, run):
        raise SystemExit("stopped; the same command goes on")
    took = sum(
        sum(line["seconds"].values())
        for line in read_journal(run)
        if line["kind"] == "step"
    )
    validation = [line for line in read_journal(run) if line["kind"] == "validation"][
        -1
    ]["held_out"]
    sampler = open_sampler(SampleOptions(tuple(PROMPTS), run=run))
    drawn = sampled(sampler.family, sampler.nets, sampler.settings, states)
    return {
        "weight": weight,
        "seed": seed,
        "held_out": round(validation["mean"], 5),
        "normalised": round(validation["normalised"], 5),
        "error_flicker": error_flicker(
            open_job(*resolve_config(words)), sampler.family, sampler.nets
        ),
        **measured(drawn),
        **scores(drawn),
        "seconds": {
            "steps": round(took, 1),
            "in_all": round(time.perf_counter() - begun, 1),
        },
    }


def foundation(plan: Plan, known: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What does not depend on the runs: the data's measures and the base model's unless
    known, and prompts' text states.
    """
    job = open_job(*resolve_config(overrides_from(plan, 0, 0)))
    family = open_models(job.spec, job.base, job.config)
    texts = list(dict.fromkeys([*PROMPTS, ""]))
    states = dict(zip(texts, family.encode_text(texts), strict=True))
    family.free("text_encoder")
    if known:
        return {}, states
    fill_cache(job, family, LatentCache(job.cache), cache_items_of(job))
    nets = {job.spec.experts[0].name: family.denoiser()}
    base = sampled(family, nets, preview_settings(job), states)
    drawn, copies = right_ones(family)
    facts = {
        "data": {"drawn": measured(drawn), "through_the_vae": measured(copies)},
        "base": measured(base)
        | scores(base)
        | {"error_flicker": error_flicker(job, family, nets)},
    }
    return facts, states


def as_ratio(row: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, float]:
    """A run's figures with measures of motion as ratios to the data's; the table's
    columns.
    """
    return {
        name: row[name] / data[name] if name in data else row[name] for name in COLUMNS
    }


def summary(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each weight mean and standard deviation over seeds, and the same of the
    difference to weight 0 of the seed.
    """
    data = result["data"]["through_the_vae"]
    rows = {(row["weight"], row["seed"]): as_ratio(row, data) for row in result["runs"]}
    lines = []
    for weight in sorted({weight for weight, _ in rows}):
        own = {seed: row for (w, seed), row in rows.items() if w == weight}
        line: dict[str, Any] = {"weight": weight, "runs": len(own)}
        for name in COLUMNS:
            line[name] = spread([row[name] for row in own.values()])
            gains = [
                row[name] - rows[0.0, seed][name]
                for seed, row in own.items()
                if (0.0, seed) in rows
            ]
            line[f"{name}_change"] = spread(gains)
        lines.append(line)
    return lines


def spread(values: Sequence[float]) -> list[float | None]:
    """[mean, standard deviation], None where there are too few to say."""
    deviation = round(statistics.stdev(values), 5) if len(values) > 1 else None
    return [round(statistics.fmean(values), 5) if values else None, deviation]


def show(result: Mapping[str, Any]) -> None:
    """The table: a line a weight, then what each weight changes."""
    print("| λ | " + " | ".join(COLUMNS.values()) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for end, lines in (
        ("", result["summary"]),
        ("_change", [one for one in result["summary"] if one["weight"]]),
    ):
        for line in lines:
            found = [line[name + end] for name in COLUMNS]
            cells = [
                cell(mean, deviation, "+" if end else "") for mean, deviation in found
            ]
            print(
                f"| {line['weight']:g}{' - 0' if end else ''} | "
                + " | ".join(cells)
                + " |"
            )


def cell(mean: float | None, deviation: float | None, sign: str) -> str:
    """A cell of the table."""
    return (
        ""
        if mean is None
        else f"{mean:{sign}.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")
    )


def main() -> None:
    """Do the runs that are missing, write the file after each, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--weights", type=float, nargs="+", default=[0.0, 0.5, 1.0, 2.0]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--work", type=Path, default=Path("runs/consistency"))
    parser.add_argument("--out", type=Path, default=Path("research/consistency.json"))
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        help="a further word for every run, as of videotune train",
    )
    told = parser.parse_args()
    plan = Plan(told.work / "clips", told.steps, tuple(told.set), told.work)
    if not plan.clips.is_dir():
        write_dataset(plan.clips, trigger=TRIGGER)
    shared = {"steps": plan.steps, "sets": list(plan.sets)}
    result: dict[str, Any] = (
        read_json(told.out) if told.out.is_file() else {**shared, "runs": []}
    )
    if {name: result[name] for name in shared} != shared:
        raise SystemExit(
            f"{told.out} holds runs of {result['steps']} steps with {result['sets']}; give another --out"
        )
    done = {(row["weight"], row["seed"]) for row in result["runs"]}
    todo = [
        (weight, seed)
        for seed in told.seeds
        for weight in told.weights
        if (weight, seed) not in done
    ]
    if todo:
        facts, states = foundation(plan, "data" in result)
        result |= facts
    for weight, seed in todo:
        result["runs"].append(one_run(plan, weight, seed, states))
        result["summary"] = summary(result)
        write_json(told.out, result)
        print(result["runs"][-1], flush=True)
    show(result)


if __name__ == "__main__":
    main()
