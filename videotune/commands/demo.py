"""``demo``: the main job on the toy base, from clips on disk to a LoRA that plain diffusers loads, with a measured result.

The clips show a shape that the base model does not know, under a word that it does not know. Beside them lies a
regularization dataset of shapes that it does know, whose target is the base's own prediction: so it keeps them. Before and
after are drawn by diffusers' own pipeline from the exported file.
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
from videotune.commands.sample import SampleOptions, open_sampler, render
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

CLIPS = 24
REPEATS = 2
KNOWN_CLIPS = 40
"""Clips of the new concept, of which some are held out, how often each counts, and clips of what the base knows.

So these are about half of each batch, and most of the 48 combinations that the base was taught are among them.
"""

STEPS = 300
BATCH = 8
SAMPLE_STEPS = 12
"""Updates, samples of each, and denoising steps of what is drawn, which is half of the work: measured, see docs/toy.md."""

SEEDS = (100, 101, 102, 103, 104, 105)
"""The concept is drawn in each direction with each of these."""

CONTROLS = HELD_OUT
"""What the base must still draw: combinations that neither the base's training nor the demo's clips contain."""

PREVIEWS = ("left", "right", "up")
"""Directions in which the run's previews show the concept; as many show a control."""

TOGETHER = 8
"""Samples in one call of the pipeline."""


def demo(
    out: Path,
    seed: int = 0,
    on_step: Callable[[CheckResult | PlanResult | TrainResult], None] = lambda _: None,
) -> dict[str, Any] | None:
    """Everything into ``out``; a second call continues what was cut off, or returns the finished result again.

    Returns ``demo.json``, None where the training was interrupted. ``on_step`` is called with the account of the clips, the
    plan and the training as they are there. ``seed``: of the clips and of the training. Raises VideotuneError where ``out``
    holds the demo of another seed.
    """
    run = out / "run"
    listed = out / "demo.json"
    config = out / "config.json"
    refuse_other(config, seed)
    if not listed.is_file():
        begun = time.perf_counter()
        echo(
            f"1/5 writing clips into {out / 'clips'}, and of what the base knows into {out / 'known'}"
        )
        write_dataset(
            out / "clips", concept_clips=CLIPS, reminder_clips=0, trigger=TRIGGER, seed=seed
        )
        write_dataset(out / "known", concept_clips=0, reminder_clips=KNOWN_CLIPS, seed=seed)
        write_json(config, settings_of(out, seed))
        words = Overrides(preset="toy", config=config)
        echo("2/5 checking and planning")
        on_step(check(words))
        on_step(plan(words))
        echo("3/5 training")
        if not train_or_resume(words, run, on_step):
            return None
        echo("4/5 sampling before and after with diffusers' own pipeline")
        figures = measure(run, out)
        figures["seconds"] = round(time.perf_counter() - begun, 1)
        write_json(run / "demo.json", figures)
        write_json(listed, figures)
        echo("5/5 report")
    write_report(run)
    return dict(read_json(listed))


def train_or_resume(
    words: Overrides, run: Path, on_step: Callable[[TrainResult], None] = lambda _: None
) -> bool:
    """Train, or continue a run that was cut off; whether the training has ended."""
    if any(line["why"] == "done" for line in History(run).of_kind("end")):
        return True
    resume = (run / "config.json").exists()
    result = train(None if resume else words, run, resume=resume)
    on_step(result)
    return result.why == "done"


def refuse_other(config: Path, seed: int) -> None:
    """Raise VideotuneError where a config of another demo lies already."""
    if config.is_file() and (other := read_json(config).get("seed")) != seed:
        raise VideotuneError(
            f"{config.parent} holds the demo of seed {other}: name that one, or another --out"
        )


def settings_of(out: Path, seed: int) -> dict[str, Any]:
    """The demo's config: two datasets, and previews of both the concept and what was known. The rest is the preset's."""
    others = [caption(*look) for look in CONTROLS[:: len(CONTROLS) // len(PREVIEWS)]]
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
        "samples": [phrase(TRIGGER, way) for way in PREVIEWS] + others,
        "sample": {"steps": SAMPLE_STEPS},
        # a run of minutes could pay the base model's samples alone, and 96 samples are measured at the end
        "sample_metrics": {"budget": 0},
        "seed": seed,
    }


def measure(run: Path, out: Path) -> dict[str, Any]:
    """``demo.json``: what the base and the LoRA draw, seen by the toy's detector."""
    prompts = [phrase(TRIGGER, way) for _ in SEEDS for way in DIRECTIONS]
    seeds = [seed for seed in SEEDS for _ in DIRECTIONS]
    controls = [caption(*look) for look in CONTROLS]
    settings = run_settings(run)
    pipe = open_pipeline(run)
    lora = exported(run, "diffusers")
    with bar("samples") as progress:
        whole = 2 * (len(prompts) + len(controls))
        asked = [*prompts, *controls]
        shots = [*seeds, *seeds]
        first = draw(
            pipe, settings, asked, shots, lambda done: progress.update(done, whole, "base")
        )
        pipe.load_lora_weights(str(lora))
        then = draw(
            pipe,
            settings,
            asked,
            shots,
            lambda done: progress.update(whole // 2 + done, whole, "LoRA"),
        )
    count = len(prompts)
    concept = [CONCEPT] * len(prompts)
    before = first[:count]
    kept = first[count:]
    after = then[:count]
    still = then[count:]
    rows = [*prompts[:4], *controls[::6]]
    upper = shown(rows, [*before[:4], *kept[::6]], "base")
    lower = shown(rows, [*after[:4], *still[::6]], f"with the LoRA of {TRIGGER}")
    write_sheet(
        out / "before_after.png",
        [row for pair in zip(upper, lower, strict=True) for row in pair],
        label=200,
    )
    plan_facts = read_record(run / "plan.json")
    losses = History(run).of_kind("validation")
    return {
        "clips_used": plan_facts["clips"]["used"],
        "steps": plan_facts["steps"],
        "views": plan_facts["views"]["per_window"],
        "validation": {
            "before": losses[0]["held_out"]["mean"],
            "after": losses[-1]["held_out"]["mean"],
        },
        "concept": {
            "before": share_right(before, concept),
            "after": share_right(after, concept),
            "n": count,
        },
        "control": {
            "before": share_right(kept, CONTROLS),
            "after": share_right(still, CONTROLS),
            "n": len(controls),
        },
        "same_frames": {"max_difference": own_difference(run, prompts[0], seeds[0], after[0])},
        "lora": str(lora),
        "base": settings["base_model_name"],
    }


def open_pipeline(run: Path) -> Any:
    """diffusers' pipeline over the run's base model, in float32 on the CPU, as any other program would open it."""
    settings = run_settings(run)
    base = base_model.place(settings["base_model_name"])
    family = registry.find(settings["family"])(base.folder, torch.device("cpu"), torch.float32)
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
    """float frames (T,H,W,3) in [0,1] for each prompt with its seed, some of them in each call."""
    sample = settings["sample"]
    frames = []
    height, width = (int(side) for side in sample["resolution"].split("x"))
    for begin in range(0, len(prompts), TOGETHER):
        part = slice(begin, begin + TOGETHER)
        drawn = pipe(
            prompt=list(prompts[part]),
            height=height,
            width=width,
            num_frames=sample["frames"],
            num_inference_steps=sample["steps"],
            guidance_scale=sample["guidance"],
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds[part]],
            output_type="np",
        )
        frames += list(drawn.frames)
        on_done(len(frames))
    return frames


def to_bytes(clip: np.ndarray) -> np.ndarray:
    """Frames in [0,1] -> uint8."""
    return (clip * 255).round().astype("uint8")


def share_right(clips: Sequence[np.ndarray], looks: Sequence[tuple[str, ...]]) -> float:
    """The share of clips in which the detector sees what was asked for: colour and shape, and the direction if named."""
    seen = [detect(to_bytes(clip)) for clip in clips]
    found = [(one.colour, one.shape, one.direction) for one in seen]
    right = sum(one[: len(look)] == look for one, look in zip(found, looks, strict=True))
    return round(right / len(seen), 3)


def own_difference(run: Path, prompt: str, seed: int, theirs: np.ndarray) -> float:
    """Largest difference, in grey levels of 255, between our sampler's frames and diffusers' with the exported file."""
    ours = render(open_sampler(SampleOptions((prompt,), seed, run)), [prompt], [seed])[0]
    return int(abs(ours.astype("int16") - to_bytes(theirs).astype("int16")).max())


def shown(
    prompts: Sequence[str], clips: Sequence[np.ndarray], by: str
) -> list[tuple[str, list[np.ndarray]]]:
    """A row of a sheet for each prompt: what was drawn of it, in five frames."""
    places = (np.linspace(1, len(clip) - 2, 5).round().astype(int) for clip in clips)
    rows = zip(prompts, clips, places, strict=True)
    return [(f"{prompt}\n{by}", list(to_bytes(clip[each]))) for prompt, clip, each in rows]
