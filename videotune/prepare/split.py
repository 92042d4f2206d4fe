"""A video, or a folder of them, -> a clip of each scene, with its caption; the originals stay as they are."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from videotune import files
from videotune.data.captions import METADATA_NAMES
from videotune.data.decode import Reader
from videotune.data.facts import ClipProblem, Facts
from videotune.data.film import SAME_BITS
from videotune.data.folders import ClipFile, find_clips
from videotune.data.images import is_animated
from videotune.data.probe import IMAGE_SUFFIXES, VIDEO_SUFFIXES, probe
from videotune.data.scenes import THRESHOLD, scenes
from videotune.errors import VideotuneError

JOURNAL = ".videotune-split.jsonl"
"""In the output folder: how each file was split, so that a stopped run goes on and nothing foreign is overwritten."""

QUALITY = "14"
"""x264's CRF: what is lost is below what a training at a lower resolution could see."""

Progress = Callable[[int, int, str], None]
"""Told (seconds done, of how many, which file)."""


@dataclass(frozen=True)
class Scene:
    """Frames ``first`` to before ``end`` of a file, written as ``path``; None where it is too short and left out."""

    first: int
    end: int
    start: float
    seconds: float
    path: Path | None


@dataclass(frozen=True)
class SplitFile:
    """What became of a file: its scenes, or the ``problem`` (reason, detail). ``captions``: how many were written.

    ``image``: it is one, has no scenes, and was left where it is.
    """

    path: Path
    seconds: float
    scenes: tuple[Scene, ...] = ()
    captions: int = 0
    problem: tuple[str, str] | None = None
    image: bool = False


@dataclass(frozen=True)
class _Task:
    """A file to split, and where its scenes go: ``folder``/``stem``-scene-001.mp4 and so on."""

    file: ClipFile
    folder: Path
    stem: str
    facts: Facts | None = None
    problem: tuple[str, str] | None = None
    id: str = ""


Row = dict[str, Any]
Advance = Callable[[float], None]


def split(
    source: Path,
    out: Path,
    *,
    min_seconds: float = 1.0,
    threshold: float | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[SplitFile]:
    """Write each scene of ``source`` (a video, or a folder of them) as a file of its own below ``out``; one result a file.

    A scene is out/<folder within source>/<stem>-scene-001.mp4: H.264 that keeps every frame, its time, and the declared
    colours, upright, in square pixels and with even sides; no sound. A file without cuts is copied as it is. A caption goes
    beside each scene. Scenes shorter than ``min_seconds`` are left out. Images are not split; their results come last.

    A run that was stopped goes on where it was. VideotuneError where something would be overwritten and ``overwrite`` does
    not allow it, or for what cannot be asked; a file that cannot be read is a result with its problem.
    """
    settings: Row = {"min_seconds": min_seconds, "threshold": THRESHOLD if threshold is None else threshold}
    _check(source, out, **settings)
    videos, images = _find(source)
    tasks = _tasks(videos, source if source.is_dir() else source.parent, out)
    rows = {str(row.get("key")): row for row in files.read_lines(out / JOURNAL)}
    if not overwrite:
        _refuse_others(tasks, out, rows, settings)
    total, before, results = sum(task.facts.seconds for task in tasks if task.facts), 0.0, []
    for task in tasks:
        length = task.facts.seconds if task.facts else 0.0

        def advance(
            part: float, name: str = task.file.path.name, start: float = before, length: float = length
        ) -> None:
            if progress is not None:
                progress(int(start + part * length), math.ceil(total), name)

        advance(0.0)
        results.append(_split_file(task, out, settings, rows, overwrite, advance))
        before += length
    if progress is not None:
        progress(math.ceil(total), math.ceil(total), "")
    return results + [SplitFile(file.path, 0.0, image=True) for file in images]


def _check(source: Path, out: Path, min_seconds: float, threshold: float) -> None:
    if not source.exists():
        raise VideotuneError(f"{source} does not exist. Give a video or a folder of videos.")
    if not 0 <= min_seconds < math.inf:
        raise VideotuneError(f"The least length of a scene is {min_seconds} s; it must be 0 or more.")
    if not 1 < threshold < math.inf:
        raise VideotuneError(f"The threshold for cuts is {threshold:g}; it must be above 1 ({THRESHOLD:g} is usual).")
    if out.exists() and not out.is_dir():
        raise VideotuneError(f"{out} is a file. Give a folder for the scenes.")
    if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
        raise VideotuneError(
            f"The scenes would go to {out}, inside {source} itself, and be taken for clips of it. Give a folder elsewhere."
        )


def _find(source: Path) -> tuple[list[ClipFile], list[ClipFile]]:
    """The videos to split and the images beside them; VideotuneError where there is no video."""
    if not source.is_dir():
        return [_single(source)], []
    try:
        found = find_clips(source)
    except VideotuneError:
        names = [name.lower() for _, _, inside in os.walk(source) for name in inside]
        if any(name.endswith((*VIDEO_SUFFIXES, *IMAGE_SUFFIXES, *METADATA_NAMES)) for name in names):
            raise
        found = []  # what find_clips says of an empty folder names images too, which are of no use here
    videos = [file for file in found if _is_video(file.path)]
    images = [file for file in found if not _is_video(file.path)]
    if not videos:
        hint = f" Images, of which it has {len(images)}, have no scenes to split." if images else ""
        raise VideotuneError(f"No video files in {source}: looked for {' '.join(VIDEO_SUFFIXES)}.{hint}")
    return videos, images


def _tasks(videos: Sequence[ClipFile], root: Path, out: Path) -> list[_Task]:
    """The videos to split, with their facts; two of one stem in one folder are told apart by their suffixes."""
    stems = Counter(str(file.path.with_suffix("")).casefold() for file in videos)
    tasks: list[_Task] = []
    taken: dict[tuple[Path, str], Path] = {}
    for file in videos:
        path = file.path
        alone = stems[str(path.with_suffix("")).casefold()] == 1
        stem = path.stem if alone else f"{path.stem}-{path.suffix[1:].lower()}"
        folder = out / path.parent.relative_to(root)
        other = taken.setdefault((folder, stem.casefold()), path)
        if other != path:
            raise VideotuneError(
                f"The scenes of {other} and of {path} would bear the same names ({stem}-scene-001). Rename one of them."
            )
        try:
            if not file.there:
                raise ClipProblem("missing_file", file.why_missing)
            tasks.append(_Task(file, folder, stem, probe(path), id=files.hash_file(path)))
        except ClipProblem as problem:
            tasks.append(_Task(file, folder, stem, problem=(problem.reason, problem.detail)))
    return tasks


def _is_video(path: Path) -> bool:
    suffix = path.suffix.lower()
    return suffix in VIDEO_SUFFIXES or (suffix == ".gif" and is_animated(path))


def _single(path: Path) -> ClipFile:
    """One video, with the caption that it has below captions/ or beside it."""
    if not _is_video(path):
        raise VideotuneError(f"{path} is no video file: its name ends in none of {' '.join(VIDEO_SUFFIXES)}.")
    beside = path.with_suffix(".txt")
    videos = next((folder for folder in path.parents if folder.name == "videos"), None)
    apart = videos.with_name("captions") / beside.relative_to(videos) if videos is not None else beside
    return ClipFile(path, next((place for place in (apart, beside) if place.is_file()), None), apart)


def _row(task: _Task, out: Path, settings: Row) -> Row:
    """What decides the scenes of a file; the journal knows them by it."""
    return {"key": (task.folder / task.stem).relative_to(out).as_posix(), "id": task.id, **settings}


def _recalled(row: Row, rows: Mapping[str, Row]) -> Row | None:
    """The journal's row of the same file and settings."""
    old = rows.get(row["key"])
    return old if old is not None and all(old.get(name) == value for name, value in row.items()) else None


def _there(task: _Task) -> list[Path]:
    """Files that bear the names of this file's scenes and captions; not those of a file called film-scene-001."""
    if not task.folder.is_dir():
        return []
    name = re.compile(rf"{re.escape(task.stem)}-scene-(\d{{3}}|[1-9]\d{{3,}})\.[^.]+")
    return sorted(path for path in task.folder.iterdir() if name.fullmatch(path.name))


def _refuse_others(tasks: Sequence[_Task], out: Path, rows: Mapping[str, Row], settings: Row) -> None:
    """VideotuneError where scenes are there that this very job did not write."""
    strange = [
        path for task in tasks if task.facts and not _recalled(_row(task, out, settings), rows) for path in _there(task)
    ]
    if strange:
        raise VideotuneError(
            f"{len(strange)} files are there already, from another split or another video (such as {strange[0]}). "
            "Give an empty folder, or allow it to replace them with --overwrite."
        )


def _split_file(
    task: _Task, out: Path, settings: Row, rows: Mapping[str, Row], overwrite: bool, advance: Advance
) -> SplitFile:
    """One file: find its cuts or recall them, then write what is not there yet."""
    path, facts = task.file.path, task.facts
    if facts is None:
        return SplitFile(path, 0.0, problem=task.problem)
    row = _row(task, out, settings)
    recalled = None if overwrite else _recalled(row, rows)
    try:
        cuts = recalled["cuts"] if recalled else scenes(facts, facts.seconds, settings["threshold"], threads=0)
        if not recalled:
            for stale in _there(task):
                stale.unlink()
            _append(out / JOURNAL, row | {"cuts": list(cuts)})
        parts = _parts(task, facts, cuts, settings["min_seconds"])
        advance(0.5)  # finding cuts takes about as long as writing
        _write_scenes(task, facts, parts, advance)
        captions = sum(_write_caption(task.file, part.path.with_suffix(".txt")) for part in parts if part.path)
    except ClipProblem as problem:
        return SplitFile(path, facts.seconds, problem=(problem.reason, problem.detail))
    return SplitFile(path, facts.seconds, parts, captions)


def _append(journal: Path, row: Row) -> None:
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file:
        file.write(
            "\n" * (file.tell() > 0) + json.dumps(row, ensure_ascii=False)
        )  # after a torn line, a line of its own
    files.sync_file(journal)


def _parts(task: _Task, facts: Facts, cuts: Sequence[float], min_seconds: float) -> tuple[Scene, ...]:
    """The scenes between cuts, numbered over those that are long enough."""
    stamps = (*facts.timestamps, facts.seconds)
    edges = [0, *(bisect_left(stamps, cut - 1e-9) for cut in cuts), len(facts.timestamps)]
    suffix = ".mp4" if cuts else task.file.path.suffix
    parts: list[Scene] = []
    number = 0
    for first, end in pairwise(edges):
        seconds = stamps[end] - stamps[first]
        long_enough = seconds >= min_seconds - 1e-6
        number += long_enough
        path = task.folder / f"{task.stem}-scene-{number:03d}{suffix}" if long_enough else None
        parts.append(Scene(first, end, stamps[first], seconds, path))
    return tuple(parts)


def _write_scenes(task: _Task, facts: Facts, parts: Sequence[Scene], advance: Advance) -> None:
    """Write the scenes that are not there yet, in one pass over the file."""
    count = len(facts.timestamps)
    with closing(Reader(facts)) as reader:
        for part in parts:
            if part.path is None or part.path.exists():
                continue
            if len(parts) == 1:
                files.write_whole(part.path, partial(_copy, task.file.path))
                continue
            frames = _counted(reader.frames(range(part.first, part.end)), lambda i: advance((1 + i / count) / 2))
            files.write_whole(part.path, partial(_encode, facts=facts, part=part, frames=frames))


def _counted(frames: Iterator[tuple[int, Any]], tell: Advance) -> Iterator[tuple[int, Any]]:
    for index, frame in frames:
        tell(index)
        yield index, frame


def _write_caption(file: ClipFile, target: Path) -> bool:
    """Give a scene its caption, unless it has one; whether there is any."""
    if target.exists():
        return True
    if file.text is not None:
        files.write_text(target, "\n".join(file.text) + "\n")
    elif file.caption is not None:
        files.write_whole(target, partial(_copy, file.caption))
    else:
        return False
    return True


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _encode(path: Path, facts: Facts, part: Scene, frames: Iterator[tuple[int, Any]]) -> None:
    """Write frames as H.264 in MP4, each at its own time counted from the first."""
    import av
    from av.video.reformatter import VideoReformatter

    numerator, denominator = facts.time_base
    reformatter = VideoReformatter()
    with av.open(str(path), "w") as container:
        rate = Fraction(facts.fps).limit_denominator(1001)
        params = f"{SAME_BITS}:tff=1" if facts.interlaced else SAME_BITS
        # without B-frames each frame's duration in the file is its own, the last one's too
        options = {"crf": QUALITY, "preset": "fast", "bf": "0", "x264-params": params}
        stream = container.add_stream("libx264", rate=rate, options=options)
        context, shown = stream.codec_context, dict[int, int]()

        def mux(packets: list[Any]) -> None:
            for packet in packets:
                packet.duration = shown[packet.pts]
                container.mux(packet)

        for index, frame in frames:
            picture = _upright(frame, facts, reformatter)
            if index == part.first:
                context.width, context.height, context.pix_fmt = picture.width, picture.height, "yuv420p"
                context.time_base, context.sample_aspect_ratio = Fraction(numerator, denominator), Fraction(1)
                rgb = frame.format.is_rgb
                context.colorspace, context.color_range = (1, 1) if rgb else (frame.colorspace, frame.color_range)
                context.color_primaries, context.color_trc = frame.color_primaries, frame.color_trc
            picture.pts, picture.time_base = facts.tick(index) - facts.tick(part.first), context.time_base
            shown[picture.pts] = _ticks_shown(facts, index)
            picture.pict_type = av.video.frame.PictureType.NONE  # the source's choice of keyframes is not ours
            mux(stream.encode(picture))
        mux(stream.encode())


def _ticks_shown(facts: Facts, index: int) -> int:
    if index + 1 < len(facts.timestamps):
        return facts.tick(index + 1) - facts.tick(index)
    return max(1, round(facts.frame_seconds * facts.time_base[1] / facts.time_base[0]))


def _upright(frame: Any, facts: Facts, reformatter: Any) -> Any:
    """The frame as 8-bit 4:2:0 in its own range: square pixels, even sides (an odd one loses its last line), upright."""
    import av
    from av.video.reformatter import ColorRange, Colorspace

    wide, high = (facts.height, facts.width) if facts.rotation in (90, 270) else (facts.width, facts.height)
    how: dict[str, Any] = {"src_color_range": frame.color_range, "dst_color_range": frame.color_range}
    if frame.format.is_rgb:
        how = {"dst_colorspace": Colorspace.ITU709, "dst_color_range": ColorRange.MPEG}
    small = reformatter.reformat(frame, wide, high, "yuv420p", **how)
    if not facts.rotation and not facts.mirrored and wide % 2 == high % 2 == 0:
        return small
    planes = []
    for plane, scale in zip(small.planes, (1, 2, 2), strict=True):
        lines = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
        cells = lines[: high // 2 * 2 // scale, : wide // 2 * 2 // scale]
        planes.append(np.rot90(cells[::-1] if facts.mirrored else cells, facts.rotation // 90))
    flat = np.concatenate([plane.ravel() for plane in planes])
    return av.VideoFrame.from_ndarray(flat.reshape(-1, planes[0].shape[1]), format="yuv420p")
