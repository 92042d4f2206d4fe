"""Whether the toy learns its conditions: held-out scenes, inpainted and extended before
and after a training.

    python benchmarks/conditions.py [--steps 300] [--seeds 0 1 2] [--scenes 12]
    [--tasks inpainting extension] [--probability 1] [--caption-dropout 1] [--control]
    [--work runs/conditions] [--out FILE] [--pictures FOLDER] [--tiny]

Inpainting hides a strip at the left or right of a clip, extension hides the last two of
five latent frames. All captions are empty, so only the clip says what it shows. A run
is the product's own, and so are its samples, whose files hold other pixels in the place
of the hidden ones. A seed has its own clips, scenes, noise and first weights. Of
inpainting the trained network is also given cells beside hidden pixels, once cut out of
the whole clip's latents, as another program might do, which flatters it. Then the
captions that the base model was taught are drawn, before and after each run, without a
condition: what a LoRA adds should not cost what was there. --control also trains the
same runs without the condition. A second call continues with what is missing.
"""

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from toy_runs import (
    SIDE,
    Clip,
    measure_knowledge,
    path_error,
    path_of,
    train_toy_run,
)

from videotune.commands.sample import Sampler, open_sampler, render
from videotune.commands.sample_options import SampleOptions
from videotune.data.video_writer import write_sheet
from videotune.diffusion.regions import cells_without
from videotune.files import read_json, write_json
from videotune.latent_cache.conditions import (
    KNOWN,
    LATENTS,
    SeparateCondition,
    encode_condition,
)
from videotune.latent_cache.pixels import to_model
from videotune.models.base import DiffusersModel
from videotune.rng import generator_for
from videotune.runs.journal import read_journal
from videotune.sampling.given_files import GivenFiles
from videotune.sampling.pipeline import decode, draw, to_frames
from videotune.toy.dataset import encode_clip, write_dataset
from videotune.toy.detection import CONTRAST, detect
from videotune.toy.shapes import FPS, HELD_OUT, Look, draw_clip
from videotune.types import LatentDistribution, Window

FRAMES = 17
"""Frames of a clip: 5 x 8 x 8 latents, tokens of 16 x 16 pixels."""

STRIP = 24
"""Columns that are hidden. They leave half of the tokens known, since a token counts
only if no pixel of it or next to it is hidden.
"""

TOUCHING_STRIP = 32
"""Columns that are hidden where cut latents are compared: the same half of the tokens
has no hidden pixel, but touches one. Honestly a quarter of the tokens is known.
"""

SHARE_HIDDEN = (0.25, 0.75)
"""How much of a shape's pixels a strip hides: something is to be painted, and something
says what.
"""

PREFIX_LATENT_FRAMES = 3
PREFIX_FRAMES = 9
"""What an extension is given."""

CONDITIONS: dict[str, dict[str, Any]] = {
    "inpainting": {"type": "mask"},
    "extension": {"type": "prefix", "latent_frames": PREFIX_LATENT_FRAMES},
}

PICTURED = 2
"""Scenes of each task that are shown in a picture."""

LABELS = {
    "base": "before the training",
    "control": "trained without the condition",
    "trained": "after the training",
    "touching, grey": "after, touching cells, grey",
    "touching, cut": "after, touching cells, cut out",
    "filled": "filled without a network",
    "autoencoder": "the clip through the VAE",
}
"""Rows of a table."""

MEASURES = ("colour_shape", "all", "psnr", "path_error")


@dataclass(frozen=True)
class Settings:
    """What a call was told."""

    steps: int
    batch: int
    clips: int
    """Clips of a training."""
    scenes: int
    """Held-out scenes of a seed."""
    strips: tuple[int, ...] = (STRIP, TOUCHING_STRIP)
    shift: float = 3.0
    """Of the noise levels in training."""
    learning_rate: float = 3e-3
    sample_steps: int = 12
    """Denoising steps of a sample."""
    probability: float = 1.0
    """Share of the steps whose samples have their condition."""
    caption_dropout: float = 1.0
    """Share of the samples in training whose caption is empty."""
    knowledge: int = 48
    """Captions of the base model's that are drawn before and after."""


@dataclass(frozen=True)
class Scene:
    """A clip that a network has never seen, and what is hidden of it."""

    look: Look
    clip: Clip
    hidden: NDArray[np.bool_]
    """(T, H, W)."""
    decoy: Clip
    """The clip with another scene's pixels where it is hidden."""
    files: GivenFiles

    @property
    def is_extended(self) -> bool:
        """Whether the end of the clip is hidden, and not a part of all frames."""
        return self.files.mask is None

    @property
    def new_frames(self) -> NDArray[np.intp]:
        """Indices of the frames of which something is hidden."""
        return np.flatnonzero(self.hidden.any((1, 2)))


# training


def hide_strip(seed: int, *name: str | int, columns: int) -> NDArray[np.bool_]:
    """Return a picture (H, W) whose left or right columns are hidden."""
    hidden = np.zeros((SIDE, SIDE), bool)
    is_left = generator_for(seed, "conditions side", *name).random() < 0.5
    hidden[:, slice(0, columns) if is_left else slice(SIDE - columns, SIDE)] = True
    return hidden


def write_mask(path: Path, hidden: NDArray[np.bool_]) -> None:
    """Write a mask, white where a picture (H, W) is hidden."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(hidden.astype(np.uint8) * np.uint8(255)).save(path)


def write_training(folder: Path, task: str, count: int, seed: int) -> None:
    """Write clips of what the base model knows, and for inpainting their masks."""
    videos = write_dataset(folder, concept_clips=0, reminder_clips=count, seed=seed)
    if task != "inpainting":
        return
    for index, video in enumerate(videos):
        hidden = hide_strip(seed, "training", index, columns=STRIP)
        write_mask(folder / "masks" / f"{video.stem}.png", hidden)


def train_run(
    folder: Path, task: str, seed: int, settings: Settings, *, control: bool = False
) -> Path:
    """Train, or continue, the run of a task and a seed, and return its folder.

    The control has the same clips, noise and order, and is never given anything.
    """
    clips = folder / "clips"
    if not clips.is_dir():
        write_training(clips, task, settings.clips, seed)

    run = run_folder(folder, control=control)
    probability = 0.0 if control else settings.probability
    train_toy_run(
        run,
        steps=settings.steps,
        batch=settings.batch,
        learning_rate=settings.learning_rate,
        sample_steps=settings.sample_steps,
        content={
            "datasets": [{"path": str(clips.absolute())}],
            "conditions": [CONDITIONS[task] | {"probability": probability}],
            "caption_dropout": settings.caption_dropout,
            "timestep_shift": settings.shift,
            "seed": seed,
        },
    )
    return run


def run_folder(folder: Path, *, control: bool) -> Path:
    """Return the folder of a run."""
    return folder / ("control" if control else "run")


# held-out scenes


def make_scenes(
    folder: Path, seed: int, count: int, columns: int | None
) -> list[Scene]:
    """Draw held-out scenes and write the files that a sample is given of them.

    Args:
        folder: for the files.
        seed: of the scenes.
        count: number of scenes; 24 have each held-out combination once.
        columns: how many are hidden; None: the end of the clip is hidden.
    """
    scenes = []
    for index in range(count):
        look = HELD_OUT[index * 7 % len(HELD_OUT)]
        other_look = HELD_OUT[(index + 1) * 7 % len(HELD_OUT)]
        other = draw_clip(generator_for(seed, "conditions decoy", index), *other_look)
        clip, hidden = draw_scene(seed, index, look, columns)
        decoy = np.where(hidden[..., None], other, clip)
        files = write_files(folder, f"{index:03d}-{columns}", decoy, hidden)
        scenes.append(Scene(look, clip, hidden, decoy, files))
    return scenes


def draw_scene(
    seed: int, index: int, look: Look, columns: int | None
) -> tuple[Clip, NDArray[np.bool_]]:
    """Draw a clip and what is hidden of it (T, H, W), until enough of its shape is
    hidden and enough is not.
    """
    for attempt in itertools.count():
        name = ("conditions scene", index, attempt)
        clip = draw_clip(generator_for(seed, *name), *look)
        hidden = np.zeros((FRAMES, SIDE, SIDE), bool)
        if columns is None:
            hidden[PREFIX_FRAMES:] = True
            break
        hidden[:] = hide_strip(seed, *name, columns=columns)

        background = np.median(clip, axis=(1, 2), keepdims=True)
        is_shape = np.abs(clip - background).max(axis=-1) > CONTRAST
        hidden_share = is_shape[hidden].sum() / is_shape.sum()
        if SHARE_HIDDEN[0] <= hidden_share <= SHARE_HIDDEN[1]:
            break
    return clip, hidden


def write_files(
    folder: Path, name: str, decoy: Clip, hidden: NDArray[np.bool_]
) -> GivenFiles:
    """Write what a sample is given of a clip. No file knows a hidden pixel."""
    folder.mkdir(parents=True, exist_ok=True)
    video = folder / f"{name}.mp4"
    if hidden[PREFIX_FRAMES - 1].any():
        mask = folder / f"{name}.png"
        encode_clip(video, decoy, FPS)
        write_mask(mask, hidden[0])
        return GivenFiles(video=str(video), mask=str(mask))
    encode_clip(video, decoy[:PREFIX_FRAMES], FPS)
    return GivenFiles(prefix=str(video))


def encode_masked(
    family: DiffusersModel, sampler: Sampler, clip: Clip, hidden: NDArray[np.bool_]
) -> dict[str, Tensor]:
    """Encode what a masked clip shows, as training and samples do."""
    shape = sampler.settings.shape
    window = Window("", 0.0, shape.frames / shape.fps, shape)
    mask = torch.from_numpy(hidden[:1]).float()
    return encode_condition(
        family, to_model(clip), SeparateCondition(window, 0, "mask"), mask
    )


def honest_change(sampler: Sampler, scenes: Sequence[Scene]) -> float:
    """Return by how much the given latents change, at most, if the hidden pixels are
    replaced by another scene's.
    """
    family = sampler.family
    changes = []
    for scene in scenes:
        pair = []
        for clip in (scene.clip, scene.decoy):
            if scene.is_extended:
                latents = family.encode_video(to_model(clip)).mean
                pair.append(latents[:, :PREFIX_LATENT_FRAMES])
                continue
            entry = encode_masked(family, sampler, clip, scene.hidden)
            pair.append(entry[LATENTS][:, entry[KNOWN].bool()])
        changes.append((pair[0] - pair[1]).abs().max().item())
    return max(changes)


# samples


def noise_seeds(scenes: Sequence[Scene]) -> list[int]:
    """Return the seeds of the samples' noise, which all networks have in common."""
    return [1000 + index for index in range(len(scenes))]


def sample_honestly(sampler: Sampler, scenes: Sequence[Scene]) -> list[Clip]:
    """Sample by the product's own way, from files."""
    files = [scene.files for scene in scenes]
    prompts = [""] * len(scenes)
    return render(sampler, prompts, noise_seeds(scenes), files, title="")


def free_cells(family: DiffusersModel, hidden: Tensor) -> Tensor:
    """Return the cells (F,H,W) of all tokens without a hidden pixel."""
    covered = (~cells_without(hidden, family.spec.rules)).float()
    patch = family.spec.patch
    tokens = torch.nn.functional.max_pool3d(covered[None, None], kernel_size=patch)
    cells = tokens[0, 0]
    for axis, size in enumerate(patch):
        cells = cells.repeat_interleave(size, dim=axis)
    return cells == 0


def sample_touching(
    sampler: Sampler, scenes: Sequence[Scene], *, is_cut: bool
) -> list[Clip]:
    """Sample with all cells given that have no hidden pixel, even beside hidden ones.

    Args:
        sampler: what to sample with.
        scenes: the scenes.
        is_cut: the cells are cut out of the whole clip's latents; else they are
            encoded with the hidden pixels grey.
    """
    family = sampler.family
    states = {"": family.encode_text([""])[0]}
    family.free("text_encoder")
    conditions = []
    for scene in scenes:
        if is_cut:
            latents = family.encode_video(to_model(scene.clip)).mean
        else:
            latents = encode_masked(family, sampler, scene.clip, scene.hidden)[LATENTS]
        known = free_cells(family, torch.from_numpy(scene.hidden).float())
        conditions.append(LatentDistribution(latents, known=known))
    pairs = [("", seed) for seed in noise_seeds(scenes)]
    latents_of_all = draw(
        family,
        sampler.nets,
        sampler.settings,
        states.__getitem__,
        pairs,
        conditions=conditions,
    )
    return decode(family, latents_of_all)


def through_vae(sampler: Sampler, scenes: Sequence[Scene]) -> list[Clip]:
    """Return the true clips encoded and decoded: the best that a sample can be."""
    family = sampler.family
    return [
        to_frames(family.decode(family.encode_video(to_model(scene.clip)).mean))
        for scene in scenes
    ]


def filled(scene: Scene) -> Clip:
    """Return a clip completed without a network: by its background, or its last given
    frame.
    """
    clip = scene.clip.copy()
    if scene.is_extended:
        clip[PREFIX_FRAMES:] = clip[PREFIX_FRAMES - 1]
        return clip
    background = np.median(clip[~scene.hidden], axis=0)
    clip[scene.hidden] = background.astype(np.uint8)
    return clip


# scores


def score(scenes: Sequence[Scene], videos: Sequence[Clip]) -> dict[str, float]:
    """Return what samples show, as means over scenes: the shares with the right colour
    and shape, and with the right direction too; dB of the hidden pixels; and the median
    error of the path in pixels.

    Only frames of which something is hidden count.
    """
    looks = []
    decibels = []
    path_errors = []
    for scene, video in zip(scenes, videos, strict=True):
        frames = scene.new_frames
        seen = detect(video[frames])
        looks.append((seen.colour, seen.shape, seen.direction))

        difference = (video.astype(np.float64) - scene.clip)[scene.hidden]
        decibels.append(10 * np.log10(255**2 / max(np.square(difference).mean(), 1e-9)))
        path_errors.append(path_error(video[frames], path_of(scene.clip[frames])))
    pairs = list(zip(looks, (scene.look for scene in scenes), strict=True))
    return {
        "colour_shape": share([seen[:2] == look[:2] for seen, look in pairs]),
        "all": share([seen == look for seen, look in pairs]),
        "psnr": round(float(np.mean(decibels)), 2),
        "path_error": round(float(np.median(path_errors)), 2),
    }


def share(values: Sequence[bool]) -> float:
    """Return the share of values that are true."""
    return round(sum(values) / len(values), 4)


# runs


def measure_run(
    folder: Path, task: str, seed: int, settings: Settings, pictures: Path | None
) -> list[dict[str, Any]]:
    """Train the run of a task and a seed, and return a row of figures for each way of
    completing each kind of scene.
    """
    run = train_run(folder, task, seed, settings)
    base = open_sampler(SampleOptions(("",), run=run, step=0))
    trained = open_sampler(SampleOptions(("",), run=run))
    seconds = sum(
        sum(line["seconds"].values())
        for line in read_journal(run)
        if line["kind"] == "step"
    )

    rows: list[dict[str, Any]] = []
    for columns in hidden_columns(task, settings):
        scenes = make_scenes(folder / "scenes", seed, settings.scenes, columns)
        if columns == TOUCHING_STRIP:
            videos = complete_touching(trained, scenes)
        else:
            videos = complete(base, trained, scenes)
        for way, clips in videos.items():
            rows.append(row_of(task, seed, columns, way, scenes, clips))
        change = honest_change(base, scenes)
        rows[-1] |= {"given_changes_by": change, "step_seconds": round(seconds, 1)}

        if pictures is not None:
            name = f"{task}-{columns}" if columns else task
            show_scenes(pictures / f"conditions-{name}.png", scenes, videos)
    return rows


def measure_control(
    folder: Path, task: str, seed: int, settings: Settings
) -> list[dict[str, Any]]:
    """Train the same run without the condition, and return its rows."""
    run = train_run(folder, task, seed, settings, control=True)
    sampler = open_sampler(SampleOptions(("",), run=run))
    rows = []
    for columns in hidden_columns(task, settings):
        if columns == TOUCHING_STRIP:
            continue
        scenes = make_scenes(folder / "scenes", seed, settings.scenes, columns)
        clips = sample_honestly(sampler, scenes)
        rows.append(row_of(task, seed, columns, "control", scenes, clips))
    return rows


def knowledge_row(
    folder: Path, task: str, seed: int, settings: Settings, *, control: bool = False
) -> dict[str, Any]:
    """Return what a run, or its control, leaves of what the base model knows."""
    way = "control" if control else "trained"
    shares = measure_knowledge(run_folder(folder, control=control), settings.knowledge)
    return {"task": task, "seed": seed, "way": way, **shares}


def hidden_columns(task: str, settings: Settings) -> tuple[int | None, ...]:
    """Return how many columns each kind of a task's scenes hides, None for extension."""
    return settings.strips if task == "inpainting" else (None,)


def row_of(
    task: str,
    seed: int,
    columns: int | None,
    way: str,
    scenes: Sequence[Scene],
    clips: Sequence[Clip],
) -> dict[str, Any]:
    """Return the figures of scenes that were completed in a way."""
    facts = {"task": task, "hidden": hidden_part(columns), "seed": seed, "way": way}
    return {**facts, **score(scenes, clips), "scenes": len(scenes)}


def hidden_part(columns: int | None) -> str:
    """Return in words what is hidden of a clip."""
    if columns is None:
        return f"{FRAMES - PREFIX_FRAMES} of {FRAMES} frames"
    return f"{columns} of {SIDE} columns"


def complete(
    base: Sampler, trained: Sampler, scenes: Sequence[Scene]
) -> dict[str, list[Clip]]:
    """Return the scenes completed in the usual ways of ``LABELS``."""
    return {
        "base": sample_honestly(base, scenes),
        "trained": sample_honestly(trained, scenes),
        "filled": [filled(scene) for scene in scenes],
        "autoencoder": through_vae(base, scenes),
    }


def complete_touching(
    trained: Sampler, scenes: Sequence[Scene]
) -> dict[str, list[Clip]]:
    """Return the scenes completed in the ways that compare cut latents."""
    return {
        "trained": sample_honestly(trained, scenes),
        "touching, grey": sample_touching(trained, scenes, is_cut=False),
        "touching, cut": sample_touching(trained, scenes, is_cut=True),
    }


def show_scenes(
    path: Path, scenes: Sequence[Scene], videos: Mapping[str, Sequence[Clip]]
) -> None:
    """Write a picture of the first scenes, some frames of each."""
    frames: tuple[int, ...] = (0, 5, 11, 16)
    if scenes[0].is_extended:
        frames = (8, 11, 13, 16)
    shown = {"before": "base", "after": "trained"}
    if "touching, cut" in videos:
        shown = {"grey": "touching, grey", "cut out": "touching, cut"}
        frames = (0, 8, 16)

    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, list[Clip]]] = []
    for index, scene in enumerate(scenes[:PICTURED]):
        clips = {
            "given": np.where(scene.hidden[..., None], np.uint8(128), scene.clip),
            **{label: videos[way][index] for label, way in shown.items()},
            "truth": scene.clip,
        }
        for label, clip in clips.items():
            rows.append((label, [clip[frame] for frame in frames]))
    write_sheet(path, rows, label=64)


# the table


def spread(values: Sequence[float], digits: int) -> str:
    """Return a mean with its standard deviation over seeds."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for each kind of scene, at most 80 columns wide."""
    kinds = dict.fromkeys((row["task"], row["hidden"]) for row in rows)
    for task, hidden in kinds:
        part = [row for row in rows if (row["task"], row["hidden"]) == (task, hidden)]
        scenes = sum(row["scenes"] for row in part if row["way"] == "trained")
        seeds = sorted({row["seed"] for row in part})
        title = f"{task}, {hidden} hidden: {scenes} scenes, seeds {seeds}"
        heads = ("colour+shape", "+ direction", "PSNR dB", "path px")
        print(f"\n{title}\n" + " " * 31 + "".join(f"{head:>12}" for head in heads))
        for way, label in LABELS.items():
            lines = [row for row in part if row["way"] == way]
            if not lines:
                continue
            cells = []
            for measure, digits in zip(MEASURES, (2, 2, 1, 1), strict=True):
                cells.append(spread([line[measure] for line in lines], digits))
            print(f"{label:<31}" + "".join(f"{cell:>12}" for cell in cells))
        changes = [row.get("given_changes_by", 0.0) for row in part]
        print(f"other hidden pixels change what is given by at most {max(changes):.1e}")


def show_knowledge(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of the base model's captions, at most 80 columns wide."""
    title = "the base model's captions drawn right"
    print(f"\n{title:<55}{'before':>12}{'after':>12}")
    runs = dict.fromkeys((row["task"], row["way"]) for row in rows)
    for task, way in runs:
        lines = [row for row in rows if (row["task"], row["way"]) == (task, way)]
        cells = []
        for moment in ("before", "after"):
            cells.append(spread([line[moment] for line in lines], 2))
        label = f"{task}, {LABELS[way]}"
        print(f"{label:<55}" + "".join(f"{cell:>12}" for cell in cells))


def folder_of(work: Path, task: str, settings: Settings, seed: int) -> Path:
    """Return the folder of a task's runs."""
    shares = f"{settings.probability:g}-{settings.caption_dropout:g}"
    return work / f"{task}-{settings.steps}-{shares}-{seed}"


def main() -> None:
    """Do the runs that are missing, write the file after each, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--tasks", nargs="+", choices=CONDITIONS, default=list(CONDITIONS)
    )
    parser.add_argument("--scenes", type=int, default=12, help="of each seed")
    parser.add_argument(
        "--control", action="store_true", help="also train without the condition"
    )
    parser.add_argument(
        "--probability", type=float, default=1.0, help="of a sample's condition"
    )
    parser.add_argument(
        "--caption-dropout", type=float, default=1.0, help="of a training"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--clips", type=int, default=48, help="of a training")
    parser.add_argument("--work", type=Path, default=Path("runs/conditions"))
    parser.add_argument("--out", type=Path, help="the figures, as JSON")
    parser.add_argument("--pictures", type=Path, help="folder for the first seed's")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a rehearsal of seconds; its figures mean nothing",
    )
    options = parser.parse_args()
    settings = Settings(
        steps=options.steps,
        batch=options.batch,
        clips=options.clips,
        scenes=options.scenes,
        probability=options.probability,
        caption_dropout=options.caption_dropout,
    )
    if options.tiny:
        settings = replace(settings, steps=1, batch=1, clips=2, scenes=1)
        settings = replace(settings, strips=(STRIP,), sample_steps=1, knowledge=2)
        options.seeds = [0]
    torch.set_num_threads(1)

    out = options.out or options.work / "conditions.json"
    facts = {**asdict(settings), "strips": list(settings.strips)}
    result: dict[str, Any] = {"settings": facts, "rows": [], "knowledge": []}
    if out.is_file():
        result = dict(read_json(out))
    if result["settings"] != facts:
        raise SystemExit(f"{out} has figures of other settings; choose another --out")

    is_done = {
        (row["task"], row["seed"], row["way"] == "control") for row in result["rows"]
    }
    todo = [(seed, task) for seed in options.seeds for task in options.tasks]
    for seed, task in todo:
        if (task, seed, False) not in is_done:
            folder = folder_of(options.work, task, settings, seed)
            pictures = options.pictures if seed == options.seeds[0] else None
            result["rows"] += measure_run(folder, task, seed, settings, pictures)
            result["knowledge"].append(knowledge_row(folder, task, seed, settings))
            write_json(out, result)
    for seed, task in todo if options.control else ():
        if (task, seed, True) not in is_done:
            folder = folder_of(options.work, task, settings, seed)
            result["rows"] += measure_control(folder, task, seed, settings)
            result["knowledge"].append(
                knowledge_row(folder, task, seed, settings, control=True)
            )
            write_json(out, result)
    show(result["rows"])
    show_knowledge(result["knowledge"])


if __name__ == "__main__":
    main()
