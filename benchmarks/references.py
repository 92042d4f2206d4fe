"""Whether the toy learns to follow a reference: a shape that moves along a drawn path.

    python benchmarks/references.py [--steps 200] [--seeds 0 1 2] [--scenes 48]
    [--clips 120] [--probability 0.9] [--work runs/references] [--out FILE]
    [--pictures FOLDER] [--tiny]

A clip shows a shape on a bent path, its reference a white dot on the same path, and its
caption names colour and shape only. So nothing but the reference says where the shape
is. Held-out paths are drawn three times: with their reference, with that of another
scene, and with none. Then the captions that the base model was taught are drawn, by the
base model and by the run, without a reference: what a LoRA adds should not cost what
was there. A run is the product's own, and so are its samples. A second call continues
with what is missing.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toy_runs import (
    SIDE,
    Clip,
    Path2d,
    measure_knowledge,
    path_error,
    train_toy_run,
)

from videotune.commands.sample import Sampler, open_sampler, render
from videotune.commands.sample_options import SampleOptions
from videotune.data.video_writer import write_sheet
from videotune.files import read_json, write_json
from videotune.rng import generator_for
from videotune.sampling.given_files import NO_FILES, GivenFiles
from videotune.toy.dataset import encode_clip
from videotune.toy.shapes import (
    COLOURS,
    FPS,
    SHAPES,
    distance,
    pixel_grid,
)

FRAMES = 17
MARGIN = 16
"""Pixels that a centre keeps from the border."""

DOT_RADIUS = 4.0
NEAR = 4.0
"""Mean distance in pixels up to which a clip counts as following its path."""

WAYS = {
    "followed": "its reference",
    "wrong": "another scene's reference, by that path",
    "none": "no reference",
}
"""Rows of the table."""


@dataclass(frozen=True)
class Settings:
    """What a call was told."""

    steps: int
    clips: int
    scenes: int
    batch: int = 4
    learning_rate: float = 3e-3
    sample_steps: int = 12
    probability: float = 0.9
    """Share of the steps whose samples have their reference."""
    knowledge: int = 48
    """Captions of the base model's that are drawn afterwards."""


@dataclass(frozen=True)
class Scene:
    """A clip and the path that its shape takes."""

    caption: str
    clip: Clip
    path: Path2d
    reference: Clip


def draw_path(random: np.random.Generator) -> Path2d:
    """Return a bent path: a curve from one random point to another, pulled to a third."""
    start, pull, end = random.uniform(MARGIN, SIDE - MARGIN, (3, 2))
    t = np.linspace(0, 1, FRAMES)[:, None]
    return (1 - t) ** 2 * start + 2 * t * (1 - t) * pull + t**2 * end


def draw_shape(
    path: Path2d, shape: str, colour: Sequence[float], radius: float, background: float
) -> Clip:
    """Draw a shape along a path, its outline soft over 1.5 pixels."""
    columns, rows = pixel_grid(SIDE, SIDE)
    frames = []
    for centre_column, centre_row in path:
        edge = distance(shape, columns - centre_column, rows - centre_row, radius)
        cover = np.clip(0.5 - edge / 1.5, 0, 1)[..., None]
        frames.append(cover * np.asarray(colour) + (1 - cover) * background)
    return np.stack(frames).round().astype(np.uint8)


def make_scene(seed: int, part: str, index: int) -> Scene:
    """Draw a scene."""
    random = generator_for(seed, "references", part, index)
    colour = list(COLOURS)[index % len(COLOURS)]
    shape = SHAPES[index // len(COLOURS) % len(SHAPES)]
    path = draw_path(random)
    radius = random.uniform(0.17, 0.22) * SIDE
    clip = draw_shape(path, shape, COLOURS[colour], radius, random.uniform(28, 60))
    dot = draw_shape(path, "circle", COLOURS["white"], DOT_RADIUS, 28)
    return Scene(f"a {colour} {shape}", clip, path, dot)


def write_training(folder: Path, settings: Settings, seed: int) -> None:
    """Write clips, their captions and their references."""
    for index in range(settings.clips):
        scene = make_scene(seed, "training", index)
        for name, clip in (("videos", scene.clip), ("references", scene.reference)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            encode_clip(folder / name / f"{index:03d}.mp4", clip, FPS)
        captions = folder / "captions"
        captions.mkdir(exist_ok=True)
        (captions / f"{index:03d}.txt").write_text(scene.caption, encoding="utf-8")


def train_run(folder: Path, seed: int, settings: Settings) -> Path:
    """Train, or continue, the run of a seed, and return its folder."""
    clips = folder / "clips"
    if not clips.is_dir():
        write_training(clips, settings, seed)
    run = folder / "run"
    train_toy_run(
        run,
        steps=settings.steps,
        batch=settings.batch,
        learning_rate=settings.learning_rate,
        sample_steps=settings.sample_steps,
        content={
            "datasets": [{"path": str(clips.absolute())}],
            "conditions": [{"type": "reference", "probability": settings.probability}],
            "timestep_shift": 3.0,
            "validation_fraction": 0.0,
            "seed": seed,
        },
    )
    return run


def sample(
    sampler: Sampler, scenes: Sequence[Scene], references: Sequence[Path | None]
) -> list[Clip]:
    """Sample by the product's own way, from files."""
    files = [
        NO_FILES if reference is None else GivenFiles(reference=str(reference))
        for reference in references
    ]
    seeds = [1000 + index for index in range(len(scenes))]
    prompts = [scene.caption for scene in scenes]
    if not any(files):
        return render(sampler, prompts, seeds, title="")
    return render(sampler, prompts, seeds, files, title="")


def measure_paths(
    folder: Path, run: Path, seed: int, settings: Settings, pictures: Path | None
) -> list[dict[str, Any]]:
    """Return a row of figures for each way to draw the held-out scenes."""
    sampler = open_sampler(SampleOptions(("",), run=run))
    scenes = [make_scene(seed, "held out", index) for index in range(settings.scenes)]
    files = []
    (folder / "scenes").mkdir(exist_ok=True)
    for index, scene in enumerate(scenes):
        files.append(folder / "scenes" / f"{index:03d}.mp4")
        encode_clip(files[-1], scene.reference, FPS)

    own_paths = [scene.path for scene in scenes]
    ways: dict[str, tuple[list[Path | None], list[Path2d]]] = {
        "followed": (list(files), own_paths),
        "wrong": ([*files[1:], files[0]], [*own_paths[1:], own_paths[0]]),
        "none": ([None] * len(files), own_paths),
    }
    rows = []
    videos = {}
    for way, (references, paths) in ways.items():
        videos[way] = sample(sampler, scenes, references)
        errors = [
            path_error(clip, path)
            for clip, path in zip(videos[way], paths, strict=True)
        ]
        rows.append(
            {
                "seed": seed,
                "way": way,
                "near": round(sum(error <= NEAR for error in errors) / len(errors), 4),
                "path_error": round(statistics.median(errors), 2),
                "scenes": len(scenes),
            }
        )
    if pictures is not None:
        show_scenes(pictures / "conditions-references.png", scenes, videos)
    return rows


def show_scenes(
    path: Path, scenes: Sequence[Scene], videos: dict[str, list[Clip]]
) -> None:
    """Write a picture of the first two scenes, some frames of each."""
    rows: list[tuple[str, list[Clip]]] = []
    for index, scene in enumerate(scenes[:2]):
        clips = {
            "reference": scene.reference,
            "sample": videos["followed"][index],
            "without": videos["none"][index],
        }
        for label, clip in clips.items():
            rows.append((label, [clip[frame] for frame in (0, 5, 11, 16)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sheet(path, rows, label=72)


def show(rows: Sequence[dict[str, Any]], knowledge: Sequence[dict[str, Any]]) -> None:
    """Print a table, at most 80 columns wide."""
    seeds = sorted({row["seed"] for row in rows})
    print(f"seeds {seeds}, {rows[0]['scenes']} scenes each")
    print(f"{'':<42}{'within 4 px':>18}{'path px':>18}")
    for way, label in WAYS.items():
        cells = [f"{label:<42}"]
        for measure in ("near", "path_error"):
            values = [row[measure] for row in rows if row["way"] == way]
            text = f"{statistics.fmean(values):.2f}"
            if len(values) > 1:
                text += f" ± {statistics.stdev(values):.2f}"
            cells.append(f"{text:>18}")
        print("".join(cells))

    before = statistics.fmean(row["before"] for row in knowledge)
    after = statistics.fmean(row["after"] for row in knowledge)
    print(f"the base model's own captions drawn right: {before:.2f}, then {after:.2f}")


def main() -> None:
    """Do the runs that are missing, write the file after each, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scenes", type=int, default=48, help="of each seed")
    parser.add_argument("--clips", type=int, default=120, help="of a training")
    parser.add_argument(
        "--probability", type=float, default=0.9, help="of a step with references"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/references"))
    parser.add_argument("--out", type=Path, help="the figures, as JSON")
    parser.add_argument("--pictures", type=Path, help="folder for the first seed's")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a rehearsal of seconds; its figures mean nothing",
    )
    options = parser.parse_args()
    settings = Settings(
        options.steps,
        options.clips,
        options.scenes,
        probability=options.probability,
    )
    if options.tiny:
        settings = replace(settings, steps=1, batch=1, clips=2, scenes=2)
        settings = replace(settings, sample_steps=1, knowledge=2)
        options.seeds = [0]
    torch.set_num_threads(1)

    out = options.out or options.work / "references.json"
    facts = asdict(settings)
    result: dict[str, Any] = {"settings": facts, "rows": [], "knowledge": []}
    if out.is_file():
        result = dict(read_json(out))
    if result["settings"] != facts:
        raise SystemExit(f"{out} has figures of other settings; choose another --out")

    done = {row["seed"] for row in result["rows"]}
    for seed in options.seeds:
        if seed in done:
            continue
        folder = options.work / f"{settings.steps}-{seed}"
        pictures = options.pictures if seed == options.seeds[0] else None
        run = train_run(folder, seed, settings)
        result["rows"] += measure_paths(folder, run, seed, settings, pictures)
        knowledge = measure_knowledge(run, settings.knowledge)
        result["knowledge"].append({"seed": seed, **knowledge})
        write_json(out, result)
    show(result["rows"], result["knowledge"])


if __name__ == "__main__":
    main()
