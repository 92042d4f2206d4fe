"""``demo``: the main job on the toy base, from clips on disk to a LoRA that plain diffusers loads, with a measured result.

The clips show a shape that the base model does not know, under a word that it does not know; half of them are of shapes it
does know, so that it keeps them. Before and after are drawn by diffusers' own pipeline from the exported file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import DONE
from videotune.families.find import find, place
from videotune.files import read_json, write_json, write_whole
from videotune.monitor.journal import read_journal
from videotune.report.html import write_report
from videotune.run.check import check
from videotune.run.console import clock, say
from videotune.run.folder import run_settings
from videotune.run.job import Words
from videotune.run.plan import plan
from videotune.run.resume import Resume
from videotune.run.sample import SampleWords, open_sampler, render
from videotune.run.train import train
from videotune.toy.dataset import CONCEPT, write_dataset
from videotune.toy.detect import detect
from videotune.toy.shapes import DIRECTIONS, HELD_OUT, caption, phrase

if TYPE_CHECKING:
    import numpy as np

TRIGGER = "zorble"
SEEDS = (100, 101, 102)
CONTROLS = HELD_OUT[::2]
"""What the base must still draw: combinations that neither the base's training nor the demo's clips contain."""


def demo(out: Path) -> int:
    """Everything into ``out``; a second call continues what was cut off, or shows the finished result again."""
    run, listed = out / "run", out / "demo.json"
    if not listed.is_file():
        begun = time.perf_counter()
        clips = out / "clips"
        say(f"1/5 writing clips into {clips}")
        write_dataset(clips, trigger=TRIGGER)
        words = Words(preset="toy", data=str(clips))
        say("2/5 checking and planning")
        check(words)
        plan(words)
        say("3/5 training")
        code = train_or_resume(words, run)
        if code != DONE:
            say("run the demo again to continue")
            return code
        say("4/5 drawing before and after with diffusers' own pipeline")
        result = measure(run, out)
        result["seconds"] = round(time.perf_counter() - begun, 1)
        write_json(listed, result)
        write_json(run / "demo.json", result)
        say("5/5 report")
        write_report(run)
    show(out, read_json(listed))
    return DONE


def train_or_resume(words: Words, run: Path) -> int:
    """Train, or continue a run that was cut off; the exit code."""
    ended = [line for line in read_journal(run) if line["kind"] == "end" and line["why"] == "done"]
    if ended:
        return DONE
    resume = (run / "config.json").exists()
    return train(Words() if resume else words, run, resume=Resume() if resume else None)


def measure(run: Path, out: Path) -> dict[str, Any]:
    """``demo.json``: what the base and the LoRA draw, seen by the toy's detector."""
    exported = next(line for line in read_json(run / "exports.json") if line["format"] == "diffusers")
    prompts = [phrase(TRIGGER, way) for _ in SEEDS for way in DIRECTIONS]
    seeds = [seed for seed in SEEDS for _ in DIRECTIONS]
    controls = [caption(*look) for look in CONTROLS]
    settings, pipe = run_settings(run), open_pipeline(run)
    before, kept = (draw(pipe, settings, words, seeds) for words in (prompts, controls))
    lora = run / exported["path"]
    pipe.load_lora_weights(str(lora))
    after, still = (draw(pipe, settings, words, seeds) for words in (prompts, controls))
    drawn = (("base", prompts, before), ("LoRA", prompts, after), ("LoRA", controls, still))
    rows = [(f"{who}: {words[i]}", clips[i]) for who, words, clips in drawn for i in range(len(DIRECTIONS))]
    sheet(out / "before_after.png", rows)
    plan_facts, rulers = read_json(run / "plan.json"), [line for line in read_journal(run) if line["kind"] == "ruler"]
    return {
        "clips_used": plan_facts["clips"]["used"],
        "steps": plan_facts["steps"],
        "views": plan_facts["views"]["per_window"],
        "ruler": {"before": rulers[0]["held_out"]["mean"], "after": rulers[-1]["held_out"]["mean"]},
        "concept": {"before": concept_share(before), "after": concept_share(after), "n": len(prompts)},
        "control": {"before": control_share(kept), "after": control_share(still), "n": len(controls)},
        "same_frames": {"max_difference": own_difference(run, prompts[0], seeds[0], after[0])},
        "lora": str(lora),
        "base": settings["base_model_name"],
    }


def open_pipeline(run: Path) -> Any:
    """diffusers' pipeline over the run's base model, in float32 on the CPU, as any other program would open it."""
    import torch

    settings = run_settings(run)
    base = place(settings["base_model_name"])
    family = find(settings["family"]).open_family(base.folder, torch.device("cpu"), torch.float32)
    pipe = family.pipeline_class().from_pretrained(base.folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, settings: dict[str, Any], prompts: Sequence[str], seeds: Sequence[int]) -> list[np.ndarray]:
    """float frames (T,H,W,3) in [0,1] for each prompt with its seed."""
    import torch

    sample = settings["sample"]
    height, width = (int(side) for side in sample["resolution"].split("x"))
    drawn = pipe(
        prompt=list(prompts),
        height=height,
        width=width,
        num_frames=sample["frames"],
        num_inference_steps=sample["steps"],
        guidance_scale=sample["guidance"],
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
        output_type="np",
    )
    return list(drawn.frames)


def to_bytes(clip: np.ndarray) -> np.ndarray:
    """Frames in [0,1] -> uint8."""
    return (clip * 255).round().astype("uint8")


def concept_share(clips: Sequence[np.ndarray]) -> float:
    """The share of clips in which the detector sees the concept's colour and shape."""
    seen = [detect(to_bytes(clip)) for clip in clips]
    return round(sum((one.colour, one.shape) == CONCEPT for one in seen) / len(seen), 3)


def control_share(clips: Sequence[np.ndarray]) -> float:
    """The share of control clips with the right colour, shape and direction."""
    seen = [detect(to_bytes(clip)) for clip in clips]
    right = sum((one.colour, one.shape, one.direction) == look for one, look in zip(seen, CONTROLS, strict=True))
    return round(right / len(seen), 3)


def own_difference(run: Path, prompt: str, seed: int, theirs: np.ndarray) -> float:
    """Largest difference, in grey levels of 255, between our sampler's frames and diffusers' with the exported file."""
    ours = render(open_sampler(SampleWords((prompt,), seed, run)), [prompt], [seed])[0]
    return int(abs(ours.astype("int16") - to_bytes(theirs).astype("int16")).max())


def sheet(path: Path, rows: Sequence[tuple[str, np.ndarray]]) -> None:
    """A picture: a row a clip, five of its frames, its prompt beside."""
    import numpy as np
    from PIL import Image, ImageDraw

    height, width = rows[0][1].shape[1:3]
    picture = Image.new("RGB", (180 + 5 * (width + 2), len(rows) * (height + 2)), "white")
    pen = ImageDraw.Draw(picture)
    for row, (words, clip) in enumerate(rows):
        pen.text((4, row * (height + 2) + height // 2 - 6), words, fill="black")
        for column, index in enumerate(np.linspace(0, len(clip) - 1, 5).round().astype(int)):
            picture.paste(Image.fromarray(to_bytes(clip[index])), (180 + column * (width + 2), row * (height + 2)))
    write_whole(path, lambda aside: picture.save(aside, format="PNG"), durable=False)


def show(out: Path, result: dict[str, Any]) -> None:
    """The result in words, and where everything is."""
    concept, control, ruler = result["concept"], result["control"], result["ruler"]
    print(f"\n{result['clips_used']} clips, {result['steps']} steps, {clock(result['seconds'])} in all")
    print(
        f'"{TRIGGER}" is drawn as an {" ".join(CONCEPT)} in {concept["before"]:.0%} of {concept["n"]} samples'
        f" before, {concept['after']:.0%} after"
    )
    print(
        f"what it knew is still right in {control['after']:.0%} of {control['n']} samples (before: {control['before']:.0%})"
    )
    print(f"error on held-out clips: {ruler['before']:.3f} before, {ruler['after']:.3f} after")
    print(
        f"our frames and diffusers' with the exported file differ by {result['same_frames']['max_difference']} of 255"
    )
    for name, path in (
        ("picture", out / "before_after.png"),
        ("report", out / "run" / "report.html"),
        ("LoRA", Path(result["lora"])),
        ("figures", out / "demo.json"),
    ):
        print(f"{name + ':':9} {path}")
