"""``demo``: run the main job on the toy base, from clips on disk to a LoRA that plain
diffusers loads, and measure it.

The clips show a shape that the base model does not know, with a new word. A
regularization dataset of shapes that it does know, whose target is the base's own
prediction, lets it keep them. Samples before and after are drawn by diffusers' own
pipeline from the exported file.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from videotune.commands.check import CheckResult, check
from videotune.commands.export import exported
from videotune.commands.plan import PlanResult, plan
from videotune.commands.sample import open_sampler, render
from videotune.commands.sample_options import SampleOptions
from videotune.commands.train import TrainResult, train
from videotune.console import bar, echo
from videotune.data.video_writer import write_sheet
from videotune.errors import VideotuneError
from videotune.files import read_json, write_json
from videotune.job.overrides import Overrides
from videotune.models import base_model, loading, registry
from videotune.reporter.build import write_report
from videotune.runs.journal import History
from videotune.runs.run_dir import run_settings
from videotune.runs.schemas import read_record
from videotune.toy.dataset import CONCEPT, write_dataset
from videotune.toy.detection import detect
from videotune.toy.shapes import DIRECTIONS, HELD_OUT, caption, phrase

TRIGGER = "zorble"

CONFIG_NAME = "config.json"
"""The demo's config, in its folder."""

CLIPS = 24
"""Clips of the new concept, of which some are held out."""

REPEATS = 2
"""How often each of them counts."""

KNOWN_CLIPS = 40
"""Clips of what the base knows: about half of each batch, with most of the 48
combinations that it was taught.
"""

STEPS = 300
BATCH = 8
SAMPLE_STEPS = 12
"""Denoising steps of a sample.

Sampling is half of the demo's work; docs/toy.md has the measurements.
"""

SEEDS = (100, 101, 102, 103, 104, 105)
"""The concept is drawn in each direction with each of these."""

CONTROLS = HELD_OUT
"""What the model must still draw: combinations that neither the base's training nor the
demo's clips contain.
"""

PREVIEWS = ("left", "right", "up")
"""Directions in which the run's previews show the concept; as many show a control."""

SAMPLES_PER_CALL = 8
"""Samples in one call of the pipeline."""


def demo(
    out: Path,
    seed: int = 0,
    on_step: Callable[[CheckResult | PlanResult | TrainResult], None] = lambda _: None,
) -> dict[str, Any] | None:
    """Run the demo.

    A second call continues one that was cut off, or returns the finished result again.

    Args:
        out: the folder for everything.
        seed: of the clips and of the training.
        on_step: called with the account of the clips, the plan and the training, each
            as soon as it is there.

    Returns:
        ``demo.json``, or None if the training was interrupted.

    Raises:
        VideotuneError: if ``out`` holds the demo of another seed.
    """
    run = out / "run"
    result_file = out / "demo.json"
    config = out / CONFIG_NAME
    refuse_other(config, seed)
    if not result_file.is_file():
        begun = time.perf_counter()
        echo(
            f"1/5 writing clips of a new shape into {out / 'clips'}, and of known shapes into {out / 'known'}"
        )
        write_dataset(
            out / "clips",
            concept_clips=CLIPS,
            reminder_clips=0,
            trigger=TRIGGER,
            seed=seed,
        )
        write_dataset(
            out / "known", concept_clips=0, reminder_clips=KNOWN_CLIPS, seed=seed
        )
        write_json(config, settings_of(out, seed))

        overrides = Overrides(preset="toy", config=config)
        echo("2/5 checking and planning")
        on_step(check(overrides))
        on_step(plan(overrides))

        echo("3/5 training")
        if not train_or_resume(overrides, run, on_step):
            return None

        echo("4/5 sampling before and after with diffusers' own pipeline")
        figures = measure(run, out)
        figures["seconds"] = round(time.perf_counter() - begun, 1)
        write_json(run / "demo.json", figures)
        write_json(result_file, figures)
        echo("5/5 report")
    write_report(run)
    return dict(read_json(result_file))


def train_or_resume(
    overrides: Overrides,
    run: Path,
    on_step: Callable[[TrainResult], None] = lambda _: None,
) -> bool:
    """Train, or continue a run that was cut off.

    Return whether the training is done.
    """
    if any(line["why"] == "done" for line in History(run).of_kind("end")):
        return True
    exists = (run / "config.json").exists()
    result = train(None if exists else overrides, run, resume=exists)
    on_step(result)
    return result.why == "done"


def refuse_other(config: Path, seed: int) -> None:
    """Raise VideotuneError if the folder has the config of a demo with another seed."""
    if not config.is_file():
        return
    other_seed = read_json(config).get("seed")
    if other_seed != seed:
        raise VideotuneError(
            f"{config.parent} holds the demo of seed {other_seed}. Use that seed, or choose another --out"
        )


def settings_of(out: Path, seed: int) -> dict[str, Any]:
    """Return the demo's config: two datasets, and previews of the concept and of known
    shapes. The preset has the rest.
    """
    known = [caption(*look) for look in CONTROLS[:: len(CONTROLS) // len(PREVIEWS)]]
    return {
        "datasets": [
            {"path": str((out / "clips").absolute()), "repeats": REPEATS},
            {
                "path": str((out / "known").absolute()),
                "kind": "regularization",
                "prior_preservation": True,
            },
        ],
        "steps": STEPS,
        "batch_size": BATCH,
        "save_every": STEPS // 3,
        "sample_after": STEPS,
        "samples": [phrase(TRIGGER, way) for way in PREVIEWS] + known,
        "sample": {"steps": SAMPLE_STEPS},
        # In a run of minutes they would only pay for the base model's samples, and 96
        # are measured at the end.
        "sample_metrics": {"budget": 0},
        "seed": seed,
    }


def measure(run: Path, out: Path) -> dict[str, Any]:
    """Return ``demo.json``: what the base model and the LoRA draw, seen by the toy's
    detector.
    """
    prompts: list[str] = []
    seeds: list[int] = []
    for seed in SEEDS:
        for way in DIRECTIONS:
            prompts.append(phrase(TRIGGER, way))
            seeds.append(seed)
    count = len(prompts)
    controls = [caption(*look) for look in CONTROLS]
    lora = exported(run, "diffusers")
    before, after = _draw_before_and_after(
        run, lora, [*prompts, *controls], [*seeds, *seeds]
    )

    # A sheet of four prompts and every sixth control, before and after in turn.
    rows = []
    for index in [*range(4), *range(count, count + len(controls), 6)]:
        prompt = [*prompts, *controls][index]
        rows.append(sheet_row(prompt, before[index], "base"))
        rows.append(sheet_row(prompt, after[index], f"with the LoRA of {TRIGGER}"))
    write_sheet(out / "before_after.png", rows, label=200)

    plan_facts = read_record(run / "plan.json")
    validations = History(run).of_kind("validation")
    concept = [CONCEPT] * count
    return {
        "clips_used": plan_facts["clips"]["used"],
        "steps": plan_facts["steps"],
        "views": plan_facts["views"]["per_window"],
        "validation": {
            "before": validations[0]["held_out"]["mean"],
            "after": validations[-1]["held_out"]["mean"],
        },
        "concept": {
            "before": share_right(before[:count], concept),
            "after": share_right(after[:count], concept),
            "n": count,
        },
        "control": {
            "before": share_right(before[count:], CONTROLS),
            "after": share_right(after[count:], CONTROLS),
            "n": len(controls),
        },
        "same_frames": {
            "max_difference": own_difference(run, prompts[0], seeds[0], after[0])
        },
        "lora": str(lora),
        "base": run_settings(run)["base_model_name"],
    }


def _draw_before_and_after(
    run: Path, lora: Path, prompts: Sequence[str], seeds: Sequence[int]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Draw each prompt with the base model, and again with the LoRA."""
    settings = run_settings(run)
    pipe = open_pipeline(run)
    total = 2 * len(prompts)
    with bar("samples") as progress:
        before = draw(
            pipe,
            settings,
            prompts,
            seeds,
            lambda done: progress.update(done, total, "base"),
        )
        pipe.load_lora_weights(str(lora))
        after = draw(
            pipe,
            settings,
            prompts,
            seeds,
            lambda done: progress.update(len(prompts) + done, total, "LoRA"),
        )
    return before, after


def open_pipeline(run: Path) -> Any:
    """Open diffusers' pipeline over the run's base model, in float32 on the CPU, as any
    other program would.
    """
    settings = run_settings(run)
    base = base_model.place(settings["base_model_name"])
    family = registry.find(settings["family"])(
        base.folder, torch.device("cpu"), torch.float32
    )
    with loading.quietly():
        pipe = family.pipeline_class().from_pretrained(
            base.folder, dtype=torch.float32, trust_remote_code=False
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(
    pipe: Any,
    settings: dict[str, Any],
    prompts: Sequence[str],
    seeds: Sequence[int],
    on_done: Callable[[int], None],
) -> list[np.ndarray]:
    """Return float frames (T,H,W,3) in [0,1] for each prompt with its seed.

    ``on_done`` gets how many are done.
    """
    sample = settings["sample"]
    frames = []
    height, width = (int(side) for side in sample["resolution"].split("x"))
    for begin in range(0, len(prompts), SAMPLES_PER_CALL):
        part = slice(begin, begin + SAMPLES_PER_CALL)
        drawn = pipe(
            prompt=list(prompts[part]),
            height=height,
            width=width,
            num_frames=sample["frames"],
            num_inference_steps=sample["steps"],
            guidance_scale=sample["guidance"],
            generator=[
                torch.Generator("cpu").manual_seed(seed) for seed in seeds[part]
            ],
            output_type="np",
        )
        frames += list(drawn.frames)
        on_done(len(frames))
    return frames


def to_bytes(clip: np.ndarray) -> np.ndarray:
    """Convert frames in [0,1] to uint8."""
    return (clip * 255).round().astype("uint8")


def share_right(clips: Sequence[np.ndarray], looks: Sequence[tuple[str, ...]]) -> float:
    """Return the share of clips in which the detector sees the colour, the shape, and
    the direction if one is named.
    """
    right = 0
    for clip, look in zip(clips, looks, strict=True):
        detection = detect(to_bytes(clip))
        detected_look = (detection.colour, detection.shape, detection.direction)
        right += detected_look[: len(look)] == look
    return round(right / len(clips), 3)


def own_difference(run: Path, prompt: str, seed: int, theirs: np.ndarray) -> float:
    """Return the largest difference, in grey levels of 255, between our sampler's
    frames and diffusers' frames.
    """
    ours = render(open_sampler(SampleOptions((prompt,), seed, run)), [prompt], [seed])[
        0
    ]
    return int(abs(ours.astype("int16") - to_bytes(theirs).astype("int16")).max())


def sheet_row(
    prompt: str, clip: np.ndarray, model: str
) -> tuple[str, list[np.ndarray]]:
    """Return a row of the sheet: five frames of what a model has drawn of a prompt."""
    indices = np.linspace(1, len(clip) - 2, 5).round().astype(int)
    return f"{prompt}\n{model}", list(to_bytes(clip[indices]))
