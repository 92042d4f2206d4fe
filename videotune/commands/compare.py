"""``compare``: one prompt and seed over all checkpoints of a run, the base model first, side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from videotune.commands.sample import SampleOptions, open_sampler, render, shape_of
from videotune.console import bar, echo
from videotune.data.video_writer import read_video, side_by_side, write_sheet, write_video
from videotune.errors import VideotuneError
from videotune.files import digest, path_from, write_json
from videotune.job import overrides
from videotune.reporter.build import write_report
from videotune.runs import run_dir
from videotune.runs.checkpoint import Checkpoint, complete_checkpoints
from videotune.runs.journal import History
from videotune.runs.schemas import read_record
from videotune.sampling.pipeline import SampleSettings
from videotune.validation.selection import sample_settings

ROW = 4
"""Videos beside each other at most."""

SHOWN = 5
"""Frames of a video on the sheet."""

LABEL = 18
"""Pixels of the line of words above a video."""


def compare(
    run: Path | str,
    prompt: str | None = None,
    *,
    seed: int | None = None,
    out: Path | None = None,
    image: Path | None = None,
) -> list[Path]:
    """Write a video a checkpoint; returns all of them side by side as mp4, a sheet as png, and the report that shows both.

    What was sampled before is not sampled again. Raises VideotuneError where there is no checkpoint, or no prompt.
    """
    run = Path(run)
    settings, seed = how(run, seed)
    found = complete_checkpoints(run)
    if not found:
        raise VideotuneError(
            f"{run} has no checkpoint yet, so there is nothing to compare: train it further first"
        )
    if prompt is None:
        if not (drawn := History(run).of_kind("sample")):
            raise VideotuneError(
                f"which prompt? {run} has no preview to take a prompt from: give --prompt TEXT"
            )
        prompt = str(drawn[0]["prompt"])
    folder = out or run / "compare"
    if out is not None:
        run_dir.refuse_samples_in_data(run, out)
    name = key(prompt, seed, settings, image)
    videos = {
        step: folder / f"{name}-step-{step:06d}.mp4"
        for step in (0, *(one.step for one in found))
    }
    todo = [
        step
        for step, one in zip(videos, (None, *found), strict=True)
        if not is_drawn(videos[step], one)
    ]
    if len(todo) < len(videos):
        echo(f"{len(videos) - len(todo)} of {len(videos)} are sampled already")
    with bar("checkpoints") as progress:
        for done, step in enumerate(todo):
            progress.update(done, len(todo), title(step))
            words = SampleOptions((prompt,), seed, run, step, images=(image,) if image else ())
            frames = render(
                open_sampler(words), [prompt], [seed], images=words.images, title=""
            )
            write_video(videos[step], frames[0], settings.shape.fps)
        progress.update(len(todo), len(todo))
    entry = lay_out(videos, folder, name, settings.shape.fps) | {"prompt": prompt, "seed": seed}
    remember(run, folder, entry)
    return [
        folder / entry["video"],
        folder / entry["sheet"],
        *([write_report(run)] if out is None else []),
    ]


def how(run: Path, seed: int | None) -> tuple[SampleSettings, int]:
    """How the run draws, and the seed: what is given, or the run's own."""
    resolved, spec, _ = overrides.reopened(run_dir.run_settings(run))
    config = resolved.config
    shape = shape_of(run, spec.rules.fps, config, spec)
    return sample_settings(config, spec, shape), config.sample.seed if seed is None else seed


def key(prompt: str, seed: int, settings: SampleSettings, image: Path | None) -> str:
    """Names all that decides what a comparison shows, but for the checkpoint."""
    told = {
        "prompt": prompt,
        "settings": repr(settings),
        "image": str(image.absolute()) if image else None,
    }
    return f"{digest(told)[:8]}-seed{seed}"


def is_drawn(video: Path, checkpoint: Checkpoint | None) -> bool:
    """Whether a video is there and no older than its checkpoint (None: it is the base's).

    After going back, a step has other weights under the same number.
    """
    saved = (checkpoint.folder / "state.json").stat().st_mtime if checkpoint else 0.0
    return video.is_file() and video.stat().st_mtime >= saved


def title(step: int) -> str:
    """What a step's video is called."""
    return "base" if step == 0 else f"step {step}"


def lay_out(paths: Mapping[int, Path], folder: Path, name: str, fps: float) -> dict[str, Any]:
    """Write the mp4 with all videos in step and the sheet; returns their names and the steps in order."""
    try:
        videos = [read_video(path, 512)[0] for path in paths.values()]
    except (OSError, ValueError) as problem:
        fault = f"a video in {folder} cannot be read ({problem})"
        raise VideotuneError(f"{fault}: remove it, and videotune generates it again") from None
    titles = [title(step) for step in paths]
    columns = -(-len(videos) // -(-len(videos) // ROW))  # rows of nearly the same length
    grid = side_by_side([labelled(*one) for one in zip(videos, titles, strict=True)], columns)
    write_video(folder / f"{name}.mp4", grid, fps, crf=18)
    shown = [
        [video[i] for i in np.linspace(0, len(video) - 1, SHOWN).round().astype(int)]
        for video in videos
    ]
    write_sheet(folder / f"{name}.png", list(zip(titles, shown, strict=True)), label=90)
    return {"steps": list(paths), "video": f"{name}.mp4", "sheet": f"{name}.png"}


def labelled(video: Sequence[np.ndarray], title: str) -> list[np.ndarray]:
    """Frames (H, W, 3) with a line of words above."""
    strip = Image.new("RGB", (video[0].shape[1], LABEL), "#1c1e21")
    ImageDraw.Draw(strip).text((4, 2), title, fill="#e8e8e4", font=ImageFont.load_default(12))
    return [np.concatenate([np.asarray(strip), frame]) for frame in video]


def remember(run: Path, folder: Path, entry: Mapping[str, Any]) -> None:
    """Put a comparison into the folder's compare.json, in the place of an earlier one of the same prompt and seed.

    Paths are relative to the run folder where they lie in it.
    """
    listed = folder / "compare.json"
    begin = path_from(run, folder)
    new = {**entry, "video": f"{begin}/{entry['video']}", "sheet": f"{begin}/{entry['sheet']}"}
    before = read_record(listed) if listed.is_file() else []
    kept = [
        line
        for line in before
        if (line["prompt"], line["seed"]) != (entry["prompt"], entry["seed"])
    ]
    write_json(listed, [*kept, new], durable=False)
