"""Pictures of clips as they are trained.

``check --contact-sheet`` writes them as sheets and as a page. The run folder gets
small ones, so the report shows the clips even if they are moved later.
"""

import hashlib
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from videotune.console import bar, echo
from videotune.data import file_checks, frame_sampling, video_writer
from videotune.data.clip_file import ROLE_LABELS
from videotune.data.companions import ALPHA
from videotune.data.decode import decode
from videotune.data.probe import probe
from videotune.data.remote_cache_files import fetch_pictures, upload_pictures
from videotune.data.workers import default_workers
from videotune.errors import VideotuneError
from videotune.files import write_text, write_whole
from videotune.job.job import Job
from videotune.reporter.build import contact_sheet_page
from videotune.text import (
    counted,
    reason_words,
    shape_words,
    short_path,
    state_words,
)
from videotune.types import DETERMINISTIC_VARIANT, Clip, Window

THUMB_HEIGHT = 160
"""Height of a picture on the page and on a sheet, in pixels."""

ROWS = 20
"""Rows on a sheet: those of clips and of the files that belong to them."""

LABEL_WIDTH = 360
"""Width of the text beside the pictures, in pixels."""

LABEL_LINES = 9
"""Lines of text that fit beside a clip's pictures."""

DIMMED = 0.25
"""Brightness of a picture where the clip's loss mask is black."""

SHOTS = ("first", "middle", "last")

SheetRow = tuple[str, list[Any]]
"""The label of a clip or of a companion, and its pictures."""


def contact_sheet(job: Job, account: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Write index.html, sheet-001.jpg … and the single pictures into a folder.

    Sheets of an earlier time are removed. The pictures of a clip are the first frame of its first window, the middle frame of
    its middle window, and the last frame of its last window: cropped, resized and timed
    as in training, and dark where its loss mask is black. A still has one. Each file that
    belongs to the clip and that the run reads has a row below, at the same times. A clip
    that is skipped, such as one without a caption, has pictures in its own shape if it
    can be decoded.

    Args:
        job: the job.
        account: the account of clips.
        folder: the folder to write to.

    Returns:
        Reasons by path of the clips that cannot be decoded.

    Raises:
        VideotuneError: if the folder is in a dataset, where the pictures would become
            clips.
    """
    _refuse_inside_dataset(folder, job)
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    for path in written_sheets(folder):
        path.unlink()
    pictures = SheetPictures()

    # Rows are made sheet by sheet, so that not all pictures are in memory.
    sheet_rows: list[SheetRow] = []
    sheet = 0
    all_rows = chain(
        _rows_by_clip(job, account, folder, pictures),
        _rows_of_skipped(job, account, folder, pictures),
    )
    for clip_rows in all_rows:
        if sheet_rows and len(sheet_rows) + len(clip_rows) > ROWS:
            sheet += 1
            _write_sheet(folder, sheet, sheet_rows)
            sheet_rows = []
        sheet_rows += clip_rows
    if sheet_rows:
        _write_sheet(folder, sheet + 1, sheet_rows)

    title = f"Clips of {Path(job.config.datasets[0].path).name}"
    page = contact_sheet_page(
        title,
        account,
        pictures.of_clips,
        job.library.roots,
        job.notes,
        companions=pictures.of_companions,
    )
    write_text(folder / "index.html", page, durable=False)
    return pictures.failed


def written_sheets(folder: Path) -> list[Path]:
    """Return the sheets in a folder, in their order."""
    return sorted(folder.glob("sheet-[0-9][0-9][0-9].jpg"))


@dataclass
class SheetPictures:
    """The single pictures of a contact sheet, by the path of their clip."""

    of_clips: dict[str, list[str]] = field(default_factory=dict)
    """Paths of pictures relative to the page."""

    of_companions: dict[str, list[tuple[str, list[str]]]] = field(default_factory=dict)
    """Label and paths of pictures of each file that belongs to the clip."""

    failed: dict[str, str] = field(default_factory=dict)
    """Reasons of the clips that cannot be decoded."""


def _write_sheet(folder: Path, number: int, rows: Sequence[SheetRow]) -> None:
    path = folder / f"sheet-{number:03d}.jpg"
    video_writer.write_sheet(path, rows, LABEL_WIDTH)


def _rows_by_clip(
    job: Job, account: Mapping[str, Any], folder: Path, pictures: SheetPictures
) -> Iterator[list[SheetRow]]:
    """Yield the row of each clip, with those of its companions, and write their single
    pictures.

    The pictures' paths and the failures are added to ``pictures``.
    """
    account_rows = {row["path"]: row for row in account["clips"]}
    windows = _windows_by_clip(job)
    for clip, frames in shots(job, job.library.clips):
        if isinstance(frames, file_checks.ClipProblem):
            problem = f"{reason_words(frames.reason)}: {frames.detail}"
            pictures.failed[clip.path] = problem
            continue

        images = [_thumbnail(frame) for frame in frames]
        pictures.of_clips[clip.path] = _save_all(images, folder, clip.id[:16])
        label = _label(account_rows[clip.path], job.library.roots)
        rows = [(label, [np.asarray(image) for image in images])]

        companions = companion_shots(job, clip, windows[clip.id])
        for number, (label, companion_frames) in enumerate(companions):
            images = [_thumbnail(frame) for frame in companion_frames]
            names = _save_all(images, folder, f"{clip.id[:16]}-{number}")
            labelled = pictures.of_companions.setdefault(clip.path, [])
            labelled.append((label, names))
            rows.append((label, [np.asarray(image) for image in images]))
        yield rows


def _rows_of_skipped(
    job: Job, account: Mapping[str, Any], folder: Path, pictures: SheetPictures
) -> Iterator[list[SheetRow]]:
    """Yield the row of each skipped clip that can be decoded, and write its single
    pictures, whose paths are added to ``pictures``.
    """
    for row in account["clips"]:
        path = row["path"]
        is_skipped = not row["used"] and not row["held_out"]
        if not is_skipped or path in pictures.of_clips or not Path(path).is_file():
            continue
        frames = _frames_of_file(path)
        if frames is None:
            continue  # the account says why it cannot be read

        images = [_thumbnail(frame) for frame in frames]
        stem = hashlib.sha256(path.encode()).hexdigest()[:16]
        pictures.of_clips[path] = _save_all(images, folder, f"skipped-{stem}")
        label = f"{short_path(path, job.library.roots)}\n{state_words(row)}"
        yield [(label, [np.asarray(image) for image in images])]


def _frames_of_file(path: str) -> list[np.ndarray] | None:
    """Return the first, middle and last frame of a file in its own shape; None if it
    cannot be decoded.
    """
    try:
        info = probe(path)
        times = [0.0] if info.still else [0.0, info.seconds / 2, info.seconds]
        height = min(info.height, THUMB_HEIGHT)
        width = max(1, round(info.width * height / info.height))
        return list(decode(info, times, height, width))
    except file_checks.ClipProblem:
        return None


def _refuse_inside_dataset(folder: Path, job: Job) -> None:
    """Raise VideotuneError if a folder is inside a dataset.

    Hidden folders of a dataset, such as the cache, are allowed: they are never read.
    """
    target = folder.resolve()
    for root in job.library.roots:
        dataset = root.resolve()
        if not target.is_relative_to(dataset):
            continue
        if any(part.startswith(".") for part in target.relative_to(dataset).parts):
            continue
        suggestion = dataset.with_name(dataset.name + "-sheet")
        raise VideotuneError(
            f"--contact-sheet: {folder} is inside the dataset {dataset}, so the "
            f"pictures would become clips of it. "
            f"Choose another folder, such as {suggestion}."
        )


def shots(
    job: Job, clips: Sequence[Clip], height: int | None = None
) -> Iterator[tuple[Clip, list[np.ndarray] | file_checks.ClipProblem]]:
    """Yield the first, middle and last frame of clips as they are trained.

    Frames are decoded a few clips ahead. A still has one.

    Args:
        job: the job.
        clips: the clips.
        height: maximum height in pixels.

    Yields:
        The clip with its frames, uint8 (H, W, 3), or the problem if it cannot be
        decoded.
    """
    windows = _windows_by_clip(job)

    def task(clip: Clip) -> tuple[str, dict[str, Any]]:
        return "decode", _decode_request(job, clip, windows[clip.id], height)

    workers = default_workers()
    with bar("pictures") as progress:
        answers = workers.map(map(task, clips), ahead=2 * workers.count)
        pairs = zip(clips, answers, strict=True)
        for done, (clip, answer) in enumerate(pairs, start=1):
            progress.update(done, len(clips))
            if isinstance(answer, file_checks.ClipProblem):
                yield clip, answer
                continue
            mask = _masks(job, clip, windows[clip.id], height)
            yield clip, list(answer if mask is None else _dimmed(answer, mask))


def _windows_by_clip(job: Job) -> dict[str, list[Window]]:
    """Return the windows of each clip, by its id."""
    windows: dict[str, list[Window]] = {}
    for window in (*job.library.windows, *job.library.held_out_windows):
        windows.setdefault(window.clip_id, []).append(window)
    return windows


def _masks(
    job: Job, clip: Clip, windows: Sequence[Window], max_height: int | None
) -> np.ndarray | None:
    """Return the loss mask of a clip's frames, uint8 (T,H,W,3); None if it has none, or
    if it cannot be decoded, which encoding reports.
    """
    mask_id = windows[0].companion("loss_mask")
    if mask_id is None:
        return None
    request = _decode_request(job, clip, windows, max_height)
    return _companion_frames(job, mask_id, request)


def companion_shots(
    job: Job, clip: Clip, windows: Sequence[Window]
) -> list[tuple[str, list[np.ndarray]]]:
    """Return label and frames of each file that belongs to a clip and that the run
    reads, at the times and with the crop of ``shots``.

    An image has one frame. A file that cannot be decoded is left out: encoding reports
    it.
    """
    roles_by_id: dict[str, list[str]] = {}
    for role, companion_id in windows[0].companions:
        roles_by_id.setdefault(companion_id, []).append(ROLE_LABELS[role])

    labelled = []
    for companion_id, roles in roles_by_id.items():
        request = _decode_request(job, clip, windows, None)
        info = job.library.media[companion_id]
        frames = _companion_frames(job, companion_id, request)
        if frames is None:
            continue
        shown = frames[:1] if info.still else frames
        name = short_path(info.path, job.library.roots)
        if companion_id.endswith(ALPHA):
            name = "alpha channel"
        labelled.append((f"{' and '.join(roles)}: {name}", list(shown)))
    return labelled


def _companion_frames(
    job: Job, companion_id: str, request: dict[str, Any]
) -> np.ndarray | None:
    """Return the frames of a clip's companion, uint8 (T,H,W,3); None if it cannot be
    decoded.

    Args:
        job: the job.
        companion_id: id of the companion's pixels.
        request: how the clip is decoded.
    """
    info = job.library.media[companion_id]
    times = request["times"]
    if not info.still:
        times = [min(time, info.seconds) for time in times]
    companion_request = request | {"info": info, "times": times}
    try:
        return decode(**companion_request, alpha=companion_id.endswith(ALPHA))
    except file_checks.ClipProblem:
        return None


def _dimmed(frames: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Return frames that are dark where their mask is black."""
    brightness = DIMMED + (1 - DIMMED) * (masks.astype(np.float32) / 255)
    return (frames * brightness).astype(np.uint8)


def _decode_request(
    job: Job, clip: Clip, windows: Sequence[Window], max_height: int | None
) -> dict[str, Any]:
    """Return the arguments with which a worker decodes a clip's three frames."""
    info = job.library.media[clip.id]
    times = []
    for window in (windows[0], windows[len(windows) // 2], windows[-1]):
        sample = frame_sampling.draw_frames(
            window, DETERMINISTIC_VARIANT, job.config.seed
        )
        times.append(sample.times)
    first, middle, last = times
    shown_times = [first[0], middle[len(middle) // 2], last[-1]]

    shape = windows[0].shape
    height = min(shape.height, max_height or shape.height)
    width = max(1, round(shape.width * height / shape.height))
    return {
        "info": info,
        "times": shown_times[:1] if info.still else shown_times,
        "resize": windows[0].resize,
        "height": height,
        "width": width,
    }


def _thumbnail(frame: np.ndarray) -> Any:
    image = Image.fromarray(frame)
    width = max(1, round(image.width * THUMB_HEIGHT / image.height))
    size = (min(width, 4 * THUMB_HEIGHT), THUMB_HEIGHT)
    return image.resize(size, Image.Resampling.LANCZOS)


def _save_all(images: Sequence[Any], folder: Path, stem: str) -> list[str]:
    """Write the pictures of a row and return their paths relative to the page."""
    names = []
    for image, shot in zip(images, SHOTS, strict=False):
        name = f"clips/{stem}-{shot}.jpg"
        save = partial(image.save, quality=88)
        write_whole(folder / name, save, durable=False)
        names.append(name)
    return names


def _label(row: Mapping[str, Any], roots: Sequence[Path]) -> str:
    """Return a clip's text: name, state, source, caption, warnings if they fit."""
    rate = "image"
    if row["source_fps"] is not None:
        rate = f"{row['source_fps']:.4g} fps"
    windows = counted(row["windows"], "window")
    facts = [
        short_path(row["path"], roots),
        f"{state_words(row)}, {shape_words(row['shape'])}, {windows}",
        f"source {row['width']}x{row['height']}, {rate}",
    ]
    caption = next(iter(row["captions"]), "").partition("\n")[0]
    if caption:
        facts.append(f'"{textwrap.shorten(caption, 130, placeholder=" …")}"')

    lines = video_writer.fitting_lines(
        "\n".join((*facts, *row["warnings"])), LABEL_WIDTH - 2 * video_writer.GAP, 1000
    )
    if len(lines) > LABEL_LINES:
        lines = [*lines[: LABEL_LINES - 1], "… (all of it is in index.html)"]
    return "\n".join(lines)


MAX_PICTURES = 200
"""Clips with a picture in the run folder, at most; training clips come first."""

PICTURE_HEIGHT = 48
"""Height of such a picture, in pixels."""

FOLDER = "pictures"

KIND_ORDER = {"train": 0, "validation": 1, "regularization": 2}


def cache_pictures(job: Job) -> None:
    """Write the pictures that the cache lacks: three frames of a clip in a row. Those of
    a cache on an object store are fetched, and new ones uploaded.

    A clip that cannot be decoded has none; the encoding reports it. If the disk is
    full, a note is printed.
    """
    paths = _cached_pictures(job)
    path_by_id = {clip.id: path for clip, path in paths}
    new_paths = []
    try:
        fetch_pictures(job.config.cache_dir, path_by_id.values())
        missing = [clip for clip, path in paths if not path.is_file()]
        for clip, frames in shots(job, missing, PICTURE_HEIGHT) if missing else ():
            if not isinstance(frames, file_checks.ClipProblem):
                _write_row(path_by_id[clip.id], frames)
                new_paths.append(path_by_id[clip.id])
        upload_pictures(job.config.cache_dir, new_paths)
    except OSError as error:
        echo(f"note: the report will lack pictures of clips: {error}")


def copy_pictures(job: Job, run: Path) -> None:
    """Copy the pictures from the cache to the run folder."""
    try:
        for clip, path in _cached_pictures(job):
            if path.is_file():
                (run / FOLDER).mkdir(exist_ok=True)
                shutil.copyfile(path, run / FOLDER / f"{clip.id[:16]}.jpg")
    except OSError as error:
        echo(f"note: the report will lack pictures of clips: {error}")


def _cached_pictures(job: Job) -> list[tuple[Clip, Path]]:
    """Return the clips that get a picture, with its path in the cache.

    The path contains shape and resize mode, so other settings give other pictures.
    """
    window_by_clip = {}
    for window in (*job.library.held_out_windows, *job.library.windows):
        window_by_clip[window.clip_id] = window
    clips = sorted(job.library.clips, key=lambda clip: KIND_ORDER[clip.kind])

    paths = []
    for clip in clips[:MAX_PICTURES]:
        if clip.id in window_by_clip:
            window = window_by_clip[clip.id]
            mask = (window.companion("loss_mask") or "")[:16]
            suffix = f"-{mask}" if mask else ""
            name = f"{clip.id[:16]}-{window.shape}-{window.resize}{suffix}.jpg"
            paths.append((clip, job.cache / FOLDER / name))
    return paths


def _write_row(path: Path, frames: Sequence[np.ndarray]) -> None:
    """Write uint8 frames (H, W, 3) side by side as one picture."""
    picture = Image.fromarray(np.concatenate(list(frames), axis=1))
    write_whole(
        path, lambda temporary: picture.save(temporary, quality=80), durable=False
    )
