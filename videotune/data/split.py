"""A video, or a folder of them, -> a clip of each scene, with its caption; the originals stay as they are."""

import json
import math
import re
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from videotune import files
from videotune.data.archives import FileProgressFn, silent
from videotune.data.content_scan import CUT_RATIO, scan_content
from videotune.data.decode import Reader
from videotune.data.file_checks import ClipProblem
from videotune.data.images import is_animated
from videotune.data.layouts import ClipFile, read_folder
from videotune.data.media_info import VIDEO_SUFFIXES, MediaInfo, probe
from videotune.data.video_writer import SAME_BITS
from videotune.errors import VideotuneError
from videotune.lazy import av, av_reformatter

JOURNAL = ".videotune-split.jsonl"
"""In the output folder: how each file was split, so that a stopped run continues and no other file is overwritten."""

QUALITY = "14"
"""x264's CRF: what is lost is below what a training at a lower resolution could see."""

ClipAccount = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """Frames ``first`` to before ``end`` of a file, written as ``path``; None where it is too short and left out."""

    first: int
    end: int
    start: float
    seconds: float
    path: Path | None


@dataclass
class SplitFile:
    """A file to split: its scenes go to ``folder``/``stem``-scene-001.mp4 and so on; ``problem`` says why it has none;
    ``row`` is its line of the journal, without the cuts.

    ``captions``: how many were written. ``image``: it is one, has no scenes, and was left where it is.
    """

    file: ClipFile
    folder: Path
    stem: str
    image: bool = False
    row: ClipAccount = field(default_factory=dict)
    info: MediaInfo | None = None
    problem: ClipProblem | None = None
    scenes: tuple[Scene, ...] = ()
    captions: int = 0

    @property
    def seconds(self) -> float:
        """How long the file plays; 0 where that is not known."""
        return self.info.seconds if self.info is not None else 0.0

    def written(self) -> list[Path]:
        """Files that bear the names of its scenes and captions; not those of a file called video-scene-001."""
        name = re.compile(rf"{re.escape(self.stem)}-scene-(\d{{3}}|[1-9]\d{{3,}})\.[^.]+")
        return sorted(path for path in self.folder.glob("*") if name.fullmatch(path.name))


def split(
    source: Path,
    out: Path,
    *,
    min_seconds: float = 1.0,
    threshold: float | None = None,
    overwrite: bool = False,
    progress: FileProgressFn = silent,
) -> list[SplitFile]:
    """Write each scene of ``source`` (a video, or a folder of them) as a file of its own below ``out``; one result a file.

    A scene is out/<folder within source>/<stem>-scene-001.mp4: H.264 that keeps every frame, its time, and the declared
    colours, upright, in square pixels and with even sides; no sound. A file without cuts is copied as it is. A caption goes
    beside each scene. Scenes shorter than ``min_seconds`` are left out. ``threshold`` (None: 3) is how many times as much
    as the frames around it a cut changes the picture. Images are not split; their results come last.

    A run that was stopped continues where it was. VideotuneError where something would be overwritten and ``overwrite``
    does not allow it, or for settings out of range; a file that cannot be read is a result with its problem.
    """
    settings: ClipAccount = {
        "min_seconds": min_seconds,
        "threshold": CUT_RATIO if threshold is None else threshold,
    }
    _check(source, out, **settings)
    results = _files(source, out, settings)
    videos = [result for result in results if result.info is not None]
    journal = {str(row.get("key")): row for row in files.read_lines(out / JOURNAL)}
    strange = [path for one in videos if not _same(one.row, journal) for path in one.written()]
    if strange and not overwrite:
        there = f"{len(strange)} files are there already (such as {strange[0]})"
        raise VideotuneError(
            f"{there}. Give an empty folder, or allow it to replace them with --overwrite."
        )
    total = math.ceil(sum(one.seconds for one in videos))
    done = 0.0

    def report(seconds: float, name: str) -> None:
        progress(int(done + seconds), total, name)

    for one in videos:
        name = one.file.path.name
        report(0.0, name)
        try:
            _find_scenes(one, out, journal, overwrite)
            report(one.seconds / 2, name)  # finding cuts takes about as long as writing
            for seconds in _write_scenes(one):
                report((one.seconds + seconds) / 2, name)
            targets = [part.path.with_suffix(".txt") for part in one.scenes if part.path]
            one.captions = sum(_write_caption(one.file, target) for target in targets)
        except ClipProblem as problem:
            one.problem = problem
            one.scenes = ()
        done += one.seconds
    report(math.ceil(done) - done, "")
    return results


def _check(source: Path, out: Path, min_seconds: float, threshold: float) -> None:
    if not source.exists():
        raise VideotuneError(f"{source} does not exist. Give a video or a folder of videos.")
    if not 0 <= min_seconds < math.inf:
        raise VideotuneError(
            f"The least length of a scene is {min_seconds} s; it must be 0 or more."
        )
    if not 1 < threshold < math.inf:
        raise VideotuneError(
            f"The threshold for cuts is {threshold:g}; it must be above 1 ({CUT_RATIO:g} is usual)."
        )
    if out.exists() and not out.is_dir():
        raise VideotuneError(f"{out} is a file. Give a folder for the scenes.")
    if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
        raise VideotuneError(
            f"The scenes would go to {out}, inside {source} itself. Give a folder elsewhere."
        )


def _files(source: Path, out: Path, settings: ClipAccount) -> list[SplitFile]:
    """The videos to split, then the images beside them; two of one stem in one folder are distinguished by their suffixes.

    VideotuneError where there is no video, or where two would write the same names.
    """
    root = source if source.is_dir() else source.parent
    found = read_folder(source)[0] if source.is_dir() else [_single(source)]
    images = [file for file in found if not _is_video(file.path)]
    videos = [file for file in found if _is_video(file.path)]
    if not videos:
        hint = (
            f" Images, of which it has {len(images)}, have no scenes to split."
            if images
            else ""
        )
        raise VideotuneError(
            f"No video files in {source}: looked for {' '.join(VIDEO_SUFFIXES)}.{hint}"
        )
    stems = Counter(str(file.path.with_suffix("")).casefold() for file in videos)
    results: list[SplitFile] = []
    taken: dict[tuple[Path, str], Path] = {}
    for file in videos:
        path = file.path
        alone = stems[str(path.with_suffix("")).casefold()] == 1
        stem = path.stem if alone else f"{path.stem}-{path.suffix[1:].lower()}"
        one = SplitFile(file, out / path.parent.relative_to(root), stem)
        other = taken.setdefault((one.folder, stem.casefold()), path)
        if other != path:
            raise VideotuneError(
                f"The scenes of {other} and {path} would have the same names. Rename one of them."
            )
        try:
            if not file.exists:
                raise ClipProblem("missing_file", file.missing)
            one.info = probe(path)
            one.row = {
                "key": (one.folder / stem).relative_to(out).as_posix(),
                "id": files.hash_file(path),
                **settings,
            }
        except ClipProblem as problem:
            one.problem = problem
        results.append(one)
    return results + [SplitFile(file, out, "", image=True) for file in images]


def _is_video(path: Path) -> bool:
    suffix = path.suffix.lower()
    return suffix in VIDEO_SUFFIXES or (suffix == ".gif" and is_animated(path))


def _single(path: Path) -> ClipFile:
    """One video, with the caption that it has below captions/ or beside it."""
    if not _is_video(path):
        raise VideotuneError(
            f"{path} is not a video file: its name ends in none of {' '.join(VIDEO_SUFFIXES)}."
        )
    beside = path.with_suffix(".txt")
    videos = next((folder for folder in path.parents if folder.name == "videos"), None)
    apart = (
        videos.with_name("captions") / beside.relative_to(videos)
        if videos is not None
        else beside
    )
    return ClipFile(
        path, next((place for place in (apart, beside) if place.is_file()), None), apart
    )


def _same(row: ClipAccount, journal: Mapping[str, ClipAccount]) -> bool:
    """Whether the journal has the same file with the same settings."""
    return row.items() <= journal.get(row["key"], {}).items()


def _find_scenes(
    one: SplitFile, out: Path, journal: Mapping[str, ClipAccount], overwrite: bool
) -> None:
    """The scenes between a file's cuts, recalled or found, numbered over those that are long enough."""
    assert one.info is not None
    if not overwrite and _same(one.row, journal):
        cuts = journal[one.row["key"]]["cuts"]
    else:
        found = scan_content(one.info, one.seconds, one.row["threshold"], threads=0)
        if found.damaged_at is not None:
            raise ClipProblem(
                "decode_error", f"its pictures are damaged at {found.damaged_at:.2f} s"
            )
        cuts = found.cuts
        for stale in one.written():
            stale.unlink()
        out.mkdir(parents=True, exist_ok=True)
        with (out / JOURNAL).open(
            "a", encoding="utf-8"
        ) as file:  # after a torn line, a line of its own
            file.write(
                "\n" * (file.tell() > 0)
                + json.dumps(one.row | {"cuts": list(cuts)}, ensure_ascii=False)
            )
        files.sync_file(out / JOURNAL)
    stamps = (*one.info.timestamps, one.seconds)
    edges = [0, *(bisect_left(stamps, cut - 1e-9) for cut in cuts), len(stamps) - 1]
    suffix = ".mp4" if cuts else one.file.path.suffix
    number = 0
    for first, end in pairwise(edges):
        seconds = stamps[end] - stamps[first]
        long_enough = seconds >= one.row["min_seconds"] - 1e-6
        number += long_enough
        path = one.folder / f"{one.stem}-scene-{number:03d}{suffix}" if long_enough else None
        one.scenes += (Scene(first, end, stamps[first], seconds, path),)


def _write_scenes(one: SplitFile) -> Iterator[float]:
    """Write the scenes that are not there yet, in one pass over the file; yields the seconds done after each."""
    assert one.info is not None
    with closing(Reader(one.info)) as reader:
        for part in one.scenes:
            if part.path is not None and not part.path.exists():
                write = partial(shutil.copyfile, one.file.path)
                if len(one.scenes) > 1:
                    frames = reader.frames(range(part.first, part.end))
                    write = partial(_encode, info=one.info, part=part, frames=frames)
                files.write_whole(part.path, write)
            yield part.start + part.seconds


def _write_caption(file: ClipFile, target: Path) -> bool:
    """Give a scene its caption, unless it has one; whether there is any."""
    if target.exists():
        return True
    if file.text is not None:
        files.write_text(target, "\n".join(file.text) + "\n")
    elif file.caption is not None:
        files.write_whole(target, partial(shutil.copyfile, file.caption))
    return target.exists()


def _encode(
    path: Path, info: MediaInfo, part: Scene, frames: Iterator[tuple[int, Any]]
) -> None:
    """Write frames as H.264 in MP4, each at its own time counted from the first."""
    numerator, denominator = info.time_base
    reformatter = av_reformatter.VideoReformatter()
    with av.open(str(path), "w") as container:
        rate = Fraction(info.fps).limit_denominator(1001)
        params = f"{SAME_BITS}:tff=1" if info.interlaced else SAME_BITS
        # without B-frames each frame's duration in the file is its own, the last one's too
        options = {"crf": QUALITY, "preset": "fast", "bf": "0", "x264-params": params}
        stream = container.add_stream("libx264", rate=rate, options=options)
        context = stream.codec_context
        durations = dict[int, int]()

        def mux(packets: list[Any]) -> None:
            for packet in packets:
                packet.duration = durations[packet.pts]
                container.mux(packet)

        last = max(1, round(info.frame_seconds * denominator / numerator))
        ends = (*info.ticks[1:], info.ticks[-1] + last)
        for index, frame in frames:
            picture = _upright(frame, info, reformatter)
            if index == part.first:
                context.width = picture.width
                context.height = picture.height
                context.pix_fmt = "yuv420p"
                context.time_base = Fraction(numerator, denominator)
                context.sample_aspect_ratio = Fraction(1)
                rgb = frame.format.is_rgb
                context.colorspace, context.color_range = (
                    (1, 1) if rgb else (frame.colorspace, frame.color_range)
                )
                context.color_primaries = frame.color_primaries
                context.color_trc = frame.color_trc
            picture.pts = info.ticks[index] - info.ticks[part.first]
            picture.time_base = context.time_base
            durations[picture.pts] = ends[index] - info.ticks[index]
            picture.pict_type = (
                av.video.frame.PictureType.NONE
            )  # the source's choice of keyframes is not ours
            mux(stream.encode(picture))
        mux(stream.encode())


def _upright(frame: Any, info: MediaInfo, reformatter: Any) -> Any:
    """The frame as 8-bit 4:2:0 in its own range: square pixels, even sides (an odd one loses its last line), upright."""
    wide, high = (
        (info.height, info.width) if info.rotation in (90, 270) else (info.width, info.height)
    )
    how: dict[str, Any] = {
        "src_color_range": frame.color_range,
        "dst_color_range": frame.color_range,
    }
    if frame.format.is_rgb:
        how = {
            "dst_colorspace": av_reformatter.Colorspace.ITU709,
            "dst_color_range": av_reformatter.ColorRange.MPEG,
        }
    small = reformatter.reformat(frame, wide, high, "yuv420p", **how)
    if not info.rotation and not info.mirrored and wide % 2 == high % 2 == 0:
        return small
    planes = []
    for plane, scale in zip(small.planes, (1, 2, 2), strict=True):
        lines = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
        cells = lines[: high // 2 * 2 // scale, : wide // 2 * 2 // scale]
        planes.append(np.rot90(cells[::-1] if info.mirrored else cells, info.rotation // 90))
    flat = np.concatenate([plane.ravel() for plane in planes])
    return av.VideoFrame.from_ndarray(flat.reshape(-1, planes[0].shape[1]), format="yuv420p")
