"""What a training costs the base model: a toy that was distilled with guidance, trained
plainly and with each remedy, and the toy itself.

    python research/forgetting.py [--cases plain prior guided half undistilled
    forgetful] [--seeds 20] [--steps 80] [--guidance 4]
    [--work runs/forgetting] [--out research/forgetting.json] [--table]

First a student is made: all weights of the toy learn the toy's own guided prediction, so
that it is sampled without guidance. Then a LoRA learns the demo's new concept on it.
plain: as it is. prior: with regularization clips whose target is the base model's
prediction. guided: with ``distilled_guidance``. half: plain, at half the learning rate.
undistilled: plain, on the toy itself. forgetful: all weights of the toy itself, at a
high rate, on one clip. Each run has its own seed and clips; the verdict reads six
prompts before and after. Of the first runs of a case it is counted how many videos of
other prompts show what they should. A second call runs what is missing, and
then prints the table.
"""

import argparse
import copy
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import videotune
from videotune.commands.demo import TRIGGER
from videotune.diffusion.loss import predict_and_target
from videotune.files import read_json, write_json
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.planner.plan import make_plan
from videotune.rng import generator_for
from videotune.runs.journal import read_journal
from videotune.sampling.pipeline import SampleSettings, decode, draw
from videotune.toy.dataset import write_dataset
from videotune.toy.detection import detect
from videotune.toy.shapes import HELD_OUT, caption
from videotune.trainer.build import plain_batch
from videotune.trainer.loop import train_steps
from videotune.trainer.resume import OpenedRun
from videotune.trainer.setup import build_trainer
from videotune.trainer.trainer import Callback, Trainer
from videotune.types import Batch
from videotune.validation.callbacks import Validation
from videotune.validation.forgetting_callback import ForgettingCallback
from videotune.validation.overhead import planned_forgetting

CASES = ("plain", "prior", "guided", "half", "undistilled", "forgetful")

COUNTED = 4
"""Runs of a case whose videos are counted."""

COUNTED_PROMPTS = 12
"""Videos of such a run."""

FORGETFUL_RATE = 1e-3
"""Rate of the case that trains all weights of the toy on one clip."""

STUDENT_STEPS = 400
STUDENT_BATCH = 8
STUDENT_RATE = 3e-4
STUDENT_CLIPS = 48

USUAL = {
    "video_config.frames": 9,
    "video_config.windows": "head",
    "batch_size": 4,
    "micro_batch_size": 4,
    "gradient_checkpointing": "OFF",
    "layer_offload_fraction": 0,
    "save_every": 0,
    "sample_after": 0,
    "validate_every": 0,
    "sample_metrics.budget": 0,
    "validation_fraction": 0.1,
    "forgetting.budget": 100,
}
"""Half a second of each clip, and no more than what is asked here."""


@dataclass(frozen=True)
class Experiment:
    """What all runs share."""

    steps: int
    guidance: float
    work: Path

    @property
    def student(self) -> Path:
        """Folder of the distilled toy."""
        return self.work / f"student-{self.guidance:g}"


class OtherPrompts(Callback):
    """Lets the prompts that are counted be encoded."""

    def prompts(self) -> Sequence[str]:
        """Return the prompts."""
        return [caption(*look) for look in HELD_OUT[:COUNTED_PROMPTS]]


def open_trainer(
    name: str, experiment: Experiment, data: Sequence[Mapping[str, Any]], **keys: Any
) -> Trainer:
    """Open a run of the toy before its first step, in a folder of its own."""
    values = {**USUAL, "datasets": data, **keys}
    sets = tuple(f"{key}={_as_word(value)}" for key, value in values.items())
    job = open_job(*resolve_config(Overrides(preset="toy", sets=sets)))
    callbacks: list[Callback] = [OtherPrompts(), Validation(job)]
    planned = planned_forgetting(job)
    if planned is not None:
        callbacks.append(ForgettingCallback(job, *planned))
    run = experiment.work / name
    shutil.rmtree(run, ignore_errors=True)
    return build_trainer(OpenedRun(job), run, make_plan(job), callbacks)


def _as_word(value: Any) -> str:
    """Return a value as ``--set`` reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def clips(experiment: Experiment, name: str, **counts: Any) -> str:
    """Return a folder of drawn clips, made once."""
    folder = experiment.work / "clips" / name
    if not (folder / "whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_dataset(folder, trigger=TRIGGER, **counts)
        (folder / "whole").touch()
    return str(folder)


def make_student(experiment: Experiment) -> None:
    """Distil the toy with guidance, into a folder in diffusers layout."""
    if (experiment.student / "whole").exists():
        return
    known_clips = clips(
        experiment, "known", concept_clips=0, reminder_clips=STUDENT_CLIPS, seed=7
    )
    trainer = open_trainer(
        "distilling",
        experiment,
        [{"path": known_clips}],
        training_method="FINE_TUNE",
        steps=1,
        validation_fraction=0,
    )
    net: Any = trainer.net
    teacher = copy.deepcopy(net).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=STUDENT_RATE, weight_decay=0)
    batches = [
        plain_batch(trainer.source, window) for window in trainer.job.training_windows
    ]
    empty = trainer.family.collate_states(
        [trainer.source.text_states("")] * STUDENT_BATCH
    )
    objective = trainer.source.objective

    for step in range(STUDENT_STEPS):
        set_rate(optimizer, step)
        random = generator_for(0, "student", step)
        chosen = random.integers(len(batches), size=STUDENT_BATCH)
        x0 = torch.cat([batches[index].x0 for index in chosen])
        texts = [
            trainer.source.text_states(batches[index].captions[0]) for index in chosen
        ]
        with_prompt = Batch.of(x0, trainer.family.collate_states(texts))
        without = Batch.of(x0, empty)
        t = objective.timesteps.draw(torch.from_numpy(random.random(STUDENT_BATCH)))
        noise = torch.from_numpy(random.standard_normal(tuple(x0.shape), "float32"))

        arguments = (objective, with_prompt, t.float(), noise)
        with torch.no_grad():
            prompt_v = predict_and_target(trainer.family, teacher, *arguments)[0].video
            arguments_without = (objective, without, t.float(), noise)
            empty_v = predict_and_target(trainer.family, teacher, *arguments_without)[
                0
            ].video
            target = empty_v + experiment.guidance * (prompt_v - empty_v)
        # Every eighth step keeps the prediction without a prompt as it is.
        if step % 8 == 7:
            arguments = arguments_without
            target = empty_v
        error = predict_and_target(trainer.family, net, *arguments)[0].video - target
        optimizer.zero_grad()
        loss = error.square().mean()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"student: step {step}, error {float(loss.detach()):.4f}")

    save_toy(net, experiment.student)
    trainer.journal.close()


def save_toy(net: Any, folder: Path) -> None:
    """Write a toy with other weights, in diffusers layout."""
    toy = Path(videotune.__file__).parent / "assets" / "toy"
    shutil.copytree(toy, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "transformer")
    net.half().save_pretrained(folder / "transformer")
    (folder / "whole").touch()


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the rate of a step of a distillation: up over 20 steps, then down to 0."""
    rate = min(1.0, (step + 1) / 20) * (1 - step / STUDENT_STEPS)
    for group in optimizer.param_groups:
        group["lr"] = STUDENT_RATE * rate


def one_run(experiment: Experiment, case: str, seed: int) -> dict[str, Any]:
    """Train a LoRA on the new concept, and return what it learnt and what it cost."""
    concept = clips(
        experiment, f"concept-{seed}", concept_clips=24, reminder_clips=0, seed=seed
    )
    data: list[dict[str, Any]] = [{"path": concept}]
    keys: dict[str, Any] = {"seed": seed, "steps": experiment.steps}
    is_distilled = case not in ("undistilled", "forgetful")
    if is_distilled:
        keys["base_model_name"] = str(experiment.student)
        keys["sample.guidance"] = 1
    if case == "prior":
        reminders = clips(
            experiment, "known", concept_clips=0, reminder_clips=STUDENT_CLIPS, seed=7
        )
        # As many samples of them as of the concept.
        data[0]["repeats"] = 2
        data.append({"path": reminders, "kind": "regularization"})
    if case == "guided":
        keys["distilled_guidance"] = experiment.guidance
    if case == "half":
        keys["learning_rate"] = 5e-4
    if case == "forgetful":
        # One clip, so one caption; the concept's clips are held out.
        data[0]["kind"] = "validation"
        single = clips(
            experiment,
            f"single-{seed}",
            concept_clips=1,
            reminder_clips=0,
            seed=1000 + seed,
        )
        data.append({"path": single})
        keys |= {"training_method": "FINE_TUNE", "learning_rate": FORGETFUL_RATE}
    trainer = open_trainer(f"run-{case}-{seed}", experiment, data, **keys)

    (validation,) = (x for x in trainer.callbacks if isinstance(x, Validation))
    (reader,) = (x for x in trainer.callbacks if isinstance(x, ForgettingCallback))
    counted = seed < COUNTED
    row: dict[str, Any] = {"case": case, "seed": seed}
    row |= held_out_errors(validation, trainer, "before")
    if counted:
        row["right_before"] = share_right(trainer, guided=not is_distilled)
    reader.run(trainer, 0)
    for record in train_steps(trainer):
        if record.step % 20 == 0:
            print(f"{case} {seed}: step {record.step}")
    reader.run(trainer, experiment.steps)
    row |= held_out_errors(validation, trainer, "after")
    if counted:
        row["right_after"] = share_right(trainer, guided=not is_distilled)
    trainer.journal.close()

    line = read_journal(trainer.run)[-1]
    assert line["kind"] == "forgetting", line
    row |= {
        "verdict": line["verdict"],
        "guidance": line["guidance"]["mean"],
        "effect": line["effect"]["mean"],
        "distance": line["distance"]["mean"],
        "own_guidance": line["own_guidance"],
        "few_step_growth": line["few_steps"]["error"] / line["few_steps"]["base"],
    }
    shutil.rmtree(trainer.run)
    return row


def held_out_errors(
    validation: Validation, trainer: Trainer, when: str
) -> dict[str, float]:
    """Return the error on held-out clips of the concept, and where the run's target is
    not the clips' own, the error against that.
    """
    reading = validation.read(trainer)
    if "plain" not in reading:
        return {f"error_{when}": float(reading["held_out"]["mean"])}
    return {
        f"error_{when}": float(reading["plain"]["held_out"]["mean"]),
        f"target_error_{when}": float(reading["held_out"]["mean"]),
    }


def share_right(trainer: Trainer, *, guided: bool) -> float:
    """Return the share of videos of other prompts that show what they should."""
    looks = HELD_OUT[:COUNTED_PROMPTS]
    shape = trainer.job.shapes[0]
    settings = SampleSettings(shape=shape, steps=12, guidance=2.0 if guided else 1.0)
    samples = [(caption(*look), 900 + i) for i, look in enumerate(looks)]
    latents = draw(trainer.family, trainer.pool, settings, trainer.text_states, samples)
    right = 0
    for frames, look in zip(decode(trainer.family, latents), looks, strict=True):
        detected = detect(frames)
        right += (detected.colour, detected.shape, detected.direction) == look
    return right / len(looks)


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each case what was called, and the means over its runs."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]

        line: dict[str, Any] = {"case": case, "runs": len(of_case)}
        for verdict in ("UNDISTILLING", "FORGETTING"):
            line[verdict] = sum(row["verdict"] == verdict for row in of_case)
        for name in ("guidance", "effect", "own_guidance", "few_step_growth"):
            line[name] = round(statistics.fmean(row[name] for row in of_case), 3)
        ratios = [row["error_after"] / row["error_before"] for row in of_case]
        line["learnt"] = round(statistics.fmean(ratios), 3)
        for name in ("right_before", "right_after"):
            shares = [row[name] for row in of_case if name in row]
            line[name] = round(statistics.fmean(shares), 3) if shares else None
        lines.append(line)
    return lines


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of the cases."""
    print(
        "| case | UNDISTILLING | FORGETTING | guidance left | change | other prompts "
        "right before, after | error on the concept |"
    )
    print("|---" * 7 + "|")
    for line in lines:
        runs = line["runs"]
        print(
            f"| {line['case']} | {line['UNDISTILLING']} of {runs} "
            f"| {line['FORGETTING']} of {runs} | {line['guidance']:.2f} "
            f"| {line['effect']:.2f} | {line['right_before']}, {line['right_after']} "
            f"| {line['learnt']:.2f} |"
        )


def main() -> None:
    """Do the runs that are missing, write the file after each, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--work", type=Path, default=Path("runs/forgetting"))
    parser.add_argument("--out", type=Path, default=Path("research/forgetting.json"))
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()

    experiment = Experiment(options.steps, options.guidance, options.work)
    shared = {"steps": options.steps, "guidance": options.guidance}
    result = {**shared, "runs": []}
    if options.out.is_file():
        result = read_json(options.out)
    if {name: result[name] for name in shared} != shared:
        raise SystemExit(f"{options.out} holds other runs; give another --out")
    if not options.table:
        options.work.mkdir(parents=True, exist_ok=True)
        make_student(experiment)
        done = {(row["case"], row["seed"]) for row in result["runs"]}
        for seed in range(options.seeds):
            for case in options.cases:
                if (case, seed) in done:
                    continue
                result["runs"].append(one_run(experiment, case, seed))
                result["summary"] = summary(result["runs"])
                write_json(options.out, result)
                print(result["runs"][-1], flush=True)
    show(summary(result["runs"]))


if __name__ == "__main__":
    main()
