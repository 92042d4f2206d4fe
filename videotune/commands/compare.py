"""``compare``: show one prompt and seed over all checkpoints of a run, the base model
first, side by side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from videotune.commands.sample import (
    open_sampler,
    render_with_sound,
    sample_rate_of,
    shape_of,
)
from videotune.commands.sample_options import SampleOptions, refuse_compare
from videotune.config.load import parse_sets
from videotune.config.nested_keys import merge
from videotune.console import bar, echo
from videotune.data.video_writer import (
    read_video,
    side_by_side,
    write_sheet,
    write_video,
)
from videotune.errors import VideotuneError
from videotune.files import digest, path_from, write_json
from videotune.job import overrides
from videotune.job.absolute_paths import absolute_paths
from videotune.reporter.build import write_report
from videotune.runs import run_dir
from videotune.runs.checkpoint import Checkpoint, complete_checkpoints
from videotune.runs.schemas import read_record
from videotune.sampling.pipeline import SampleSettings
from videotune.sampling.sample_files import write_sample
from videotune.validation.selection import sample_settings

ROW = 4
"""Videos side by side, at most."""

FRAMES_ON_SHEET = 5
"""Frames of a video on the sheet."""

LABEL = 18
"""Height in pixels of the title above a video."""


def compare(
    run: Path | str,
    prompt: str | None = None,
    *,
    seed: int | None = None,
    out: Path | None = None,
    image: Path | None = None,
    sets: Sequence[str] = (),
) -> list[Path]:
    """Draw a video with each checkpoint of a run.

    What was drawn before is not drawn again.

    Args:
        run: the run folder.
        prompt: what to draw. None: the prompt of the run's first preview.
        seed: None: the run's own.
        out: the folder to write to. None: ``compare`` in the run folder.
        image: the first frame.
        sets: ``KEY=VALUE`` settings, such as those of ``sample``.

    Returns:
        An mp4 with all videos side by side, a sheet as png, and the report that shows
        both.

    Raises:
        VideotuneError: if there is no checkpoint, or no prompt.
    """
    run = Path(run)
    prompt = refuse_compare(run, prompt, seed, image, sets)
    settings, seed = draw_settings(run, seed, sets)
    checkpoints = complete_checkpoints(run)
    folder = out or run / "compare"
    if out is not None:
        run_dir.refuse_samples_in_data(run, out)

    name = key(prompt, seed, settings, image)
    checkpoint_of: dict[int, Checkpoint | None] = {0: None}
    checkpoint_of.update((checkpoint.step, checkpoint) for checkpoint in checkpoints)
    videos = {step: folder / f"{name}-step-{step:06d}.mp4" for step in checkpoint_of}
    todo = [step for step in videos if not is_drawn(videos[step], checkpoint_of[step])]
    if len(todo) < len(videos):
        echo(f"{len(videos) - len(todo)} of {len(videos)} are sampled already")

    images = (image,) if image else ()
    with bar("checkpoints") as progress:
        for done, step in enumerate(todo):
            progress.update(done, len(todo), title(step))
            options = SampleOptions(
                (prompt,), seed, run, step, images=images, sets=sets
            )
            sampler = open_sampler(options)
            (sample,) = render_with_sound(
                sampler, [prompt], [seed], options.given(), title=""
            )
            write_sample(videos[step], sample, settings.shape.fps)
        progress.update(len(todo), len(todo))

    entry = lay_out(videos, folder, name, settings.shape.fps)
    entry |= {"prompt": prompt, "seed": seed}
    remember(run, folder, entry)
    written = [folder / entry["video"], folder / entry["sheet"]]
    if out is None:
        written.append(write_report(run))
    return written


def draw_settings(
    run: Path, seed: int | None, sets: Sequence[str] = ()
) -> tuple[SampleSettings, int]:
    """Return how the run draws, and the seed: the one that is given, or the run's own."""
    settings = merge(run_dir.run_settings(run), parse_sets(sets))
    resolved, spec, _ = overrides.reopened(absolute_paths(settings))
    config = resolved.config
    shape = shape_of(run, sample_rate_of(config, spec), config, spec)
    return sample_settings(
        config, spec, shape
    ), config.sample.seed if seed is None else seed


def key(prompt: str, seed: int, settings: SampleSettings, image: Path | None) -> str:
    """Return a name that depends on all that decides what a comparison shows, except
    for the checkpoint.
    """
    content = {
        "prompt": prompt,
        "settings": repr(settings),
        "image": str(image.absolute()) if image else None,
    }
    return f"{digest(content)[:8]}-seed{seed}"


def is_drawn(video: Path, checkpoint: Checkpoint | None) -> bool:
    """Return whether a video exists and is no older than its checkpoint (None: the base
    model).

    After going back, a step has other weights under the same number.
    """
    saved = (checkpoint.folder / "state.json").stat().st_mtime if checkpoint else 0.0
    return video.is_file() and video.stat().st_mtime >= saved


def title(step: int) -> str:
    """Return the title of a step's video."""
    return "base" if step == 0 else f"step {step}"


def lay_out(
    paths: Mapping[int, Path], folder: Path, name: str, fps: float
) -> dict[str, Any]:
    """Write the mp4 with all videos in step, and the sheet.

    Args:
        paths: the videos by step.
        folder: to write to.
        name: of both files, without the ending.
        fps: of the videos.

    Returns:
        The names of both files and the steps in order.
    """
    try:
        videos = [read_video(path, 512)[0] for path in paths.values()]
    except (OSError, ValueError) as problem:
        raise VideotuneError(
            f"a video in {folder} cannot be read ({problem}). Remove it, and videotune generates it again"
        ) from None

    titles = [title(step) for step in paths]
    rows = -(-len(videos) // ROW)
    columns = -(-len(videos) // rows)  # rows of nearly the same length
    titled = [labelled(video, text) for video, text in zip(videos, titles, strict=True)]
    write_video(folder / f"{name}.mp4", side_by_side(titled, columns), fps, crf=18)

    sheet_rows = []
    for video, text in zip(videos, titles, strict=True):
        indices = np.linspace(0, len(video) - 1, FRAMES_ON_SHEET).round().astype(int)
        sheet_rows.append((text, [video[index] for index in indices]))
    write_sheet(folder / f"{name}.png", sheet_rows, label=90)
    return {"steps": list(paths), "video": f"{name}.mp4", "sheet": f"{name}.png"}


def labelled(video: Sequence[np.ndarray], title: str) -> list[np.ndarray]:
    """Return frames (H, W, 3) with a title above."""
    strip = Image.new("RGB", (video[0].shape[1], LABEL), "#1c1e21")
    ImageDraw.Draw(strip).text(
        (4, 2), title, fill="#e8e8e4", font=ImageFont.load_default(12)
    )
    return [np.concatenate([np.asarray(strip), frame]) for frame in video]


def remember(run: Path, folder: Path, entry: Mapping[str, Any]) -> None:
    """Add a comparison to the folder's compare.json, in place of an earlier one of the
    same prompt and seed.

    Paths are relative to the run folder if they are in it.
    """
    list_file = folder / "compare.json"
    base = path_from(run, folder)
    new = {
        **entry,
        "video": f"{base}/{entry['video']}",
        "sheet": f"{base}/{entry['sheet']}",
    }

    others = []
    if list_file.is_file():
        for line in read_record(list_file):
            if (line["prompt"], line["seed"]) != (entry["prompt"], entry["seed"]):
                others.append(line)
    write_json(list_file, [*others, new], durable=False)
