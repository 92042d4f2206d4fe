"""Split videos into a clip of each scene, with its caption; the originals stay as they
are.
"""

import json
import math
import re
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from videotune import files
from videotune.data.archives import FileProgressFn, silent
from videotune.data.clip_file import ClipFile, is_video
from videotune.data.content_scan import scan_content
from videotune.data.cuts import CUT_RATIO
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_reader import FrameReader
from videotune.data.layouts import read_folder
from videotune.data.media_info import MediaInfo
from videotune.data.object_files import refuse_object_store
from videotune.data.probe import VIDEO_SUFFIXES, probe
from videotune.data.scene_encoding import encode_scene
from videotune.data.sound_scan import scan_sound
from videotune.errors import VideotuneError
from videotune.text import counted

JOURNAL = ".videotune-split.jsonl"
"""File in the output folder that records how each video was split, so that a stopped
run can continue and files of other origin are not overwritten.
"""

JournalRow = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """Frames ``first`` to before ``end`` of a video."""

    first: int
    end: int

    start: float
    """Second of the video at which the scene begins."""

    seconds: float

    path: Path | None
    """The file to write; None if the scene is too short and left out."""


@dataclass
class SplitFile:
    """A file of the source; its scenes are ``folder``/``stem``-scene-001.mp4 and so on."""

    file: ClipFile
    folder: Path
    stem: str

    is_image: bool = False
    """An image has no scenes and is not copied."""

    row: JournalRow = field(default_factory=dict)
    """Its line of the journal, without the cuts."""

    info: MediaInfo | None = None

    problem: ClipProblem | None = None
    """Why it could not be split."""

    scenes: tuple[Scene, ...] = ()

    captions: int = 0
    """Scenes that have a caption."""

    @property
    def seconds(self) -> float:
        """Duration of the file; 0 if unknown."""
        return self.info.seconds if self.info is not None else 0.0

    def output_files(self) -> list[Path]:
        """Return existing files with the names of its scenes and captions.

        The scenes of another file, itself called video-scene-001, are not among them.
        """
        pattern = re.compile(
            rf"{re.escape(self.stem)}-scene-(\d{{3}}|[1-9]\d{{3,}})\.[^.]+"
        )
        return sorted(
            path for path in self.folder.glob("*") if pattern.fullmatch(path.name)
        )


class _Progress:
    """Reports progress in seconds of video."""

    def __init__(self, videos: Sequence[SplitFile], progress: FileProgressFn) -> None:
        self._total = math.ceil(sum(video.seconds for video in videos))
        self._done = 0.0
        self._progress = progress

    def report(self, seconds: float, name: str) -> None:
        """Report ``seconds`` of the current video."""
        self._progress(int(self._done + seconds), self._total, name)

    def finish_video(self, seconds: float) -> None:
        """Count a video of this duration as done."""
        self._done += seconds

    def finish(self) -> None:
        """Report that all is done."""
        self.report(math.ceil(self._done) - self._done, "")


def split(
    source: Path,
    out: Path,
    *,
    min_seconds: float = 1.0,
    threshold: float | None = None,
    overwrite: bool = False,
    progress: FileProgressFn = silent,
) -> list[SplitFile]:
    """Write each scene of a video, or of a folder of videos, as a file of its own.

    A scene is out/<folder within source>/<stem>-scene-001.mp4: H.264 that keeps every
    frame, its time, and the declared colours, upright, in square pixels and with even
    sides, with its sound. A file without cuts is copied. Each scene gets the caption of
    its video. A run that was stopped continues where it was.

    Args:
        source: a video or a folder of videos.
        out: folder of the scenes.
        min_seconds: shorter scenes are left out.
        threshold: how many times as much as the frames around it a cut changes the
            picture; default is 3.
        overwrite: whether scenes of other settings, or other files of their names, are
            replaced.
        progress: called with (seconds done, seconds in all, current file).

    Returns:
        One result per file, images last. A video that cannot be read has a problem.

    Raises:
        VideotuneError: if a setting is out of range, or if files would be overwritten
            without ``overwrite``.
    """
    settings: JournalRow = {
        "min_seconds": min_seconds,
        "threshold": CUT_RATIO if threshold is None else threshold,
    }
    _check_settings(source, out, **settings)
    results = _plan_files(source, out, settings)
    videos = [result for result in results if result.info is not None]
    journal = {str(row.get("key")): row for row in files.read_lines(out / JOURNAL)}
    if not overwrite:
        _check_overwriting(videos, journal)

    reporter = _Progress(videos, progress)
    for video in videos:
        try:
            _split_video(video, out, journal, overwrite=overwrite, reporter=reporter)
        except ClipProblem as problem:
            video.problem = problem
            video.scenes = ()
        reporter.finish_video(video.seconds)
    reporter.finish()
    return results


def _split_video(
    video: SplitFile,
    out: Path,
    journal: Mapping[str, JournalRow],
    *,
    overwrite: bool,
    reporter: _Progress,
) -> None:
    """Find the scenes of a video, write them and their captions."""
    name = video.file.path.name
    reporter.report(0.0, name)
    _find_scenes(video, out, journal, overwrite=overwrite)

    # Finding the cuts takes about as long as writing the scenes.
    reporter.report(video.seconds / 2, name)
    for seconds in _write_scenes(video):
        reporter.report((video.seconds + seconds) / 2, name)

    for scene in video.scenes:
        if scene.path is not None:
            video.captions += _write_caption(video.file, scene.path.with_suffix(".txt"))


def _check_settings(
    source: Path, out: Path, min_seconds: float, threshold: float
) -> None:
    """Raise VideotuneError if the paths or numbers make no sense."""
    for path in (source, out):
        refuse_object_store(path, "scenes are written, and films read, as files: they")
    if not source.exists():
        raise VideotuneError(
            f"{source} does not exist. Give a video or a folder of videos."
        )
    if not 0 <= min_seconds < math.inf:
        raise VideotuneError(
            f"The minimum duration of a scene is {min_seconds} s; it must be 0 or more."
        )
    if not 1 < threshold < math.inf:
        raise VideotuneError(
            f"The threshold for cuts is {threshold:g}; it must be above 1 "
            f"({CUT_RATIO:g} is usual)."
        )

    if out.exists() and not out.is_dir():
        raise VideotuneError(f"{out} is a file. Give a folder for the scenes.")
    if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
        raise VideotuneError(
            f"The scenes would be written to {out}, inside {source}. Give a folder elsewhere."
        )


def _check_overwriting(
    videos: Sequence[SplitFile], journal: Mapping[str, JournalRow]
) -> None:
    """Raise VideotuneError if files exist that the journal does not explain."""
    unknown_files: list[Path] = []
    for video in videos:
        if not _is_recorded(video.row, journal):
            unknown_files += video.output_files()
    if unknown_files:
        raise VideotuneError(
            f"the new files would replace {counted(len(unknown_files), 'file')}, such as {unknown_files[0]}. "
            "Give an empty folder, or replace them with --overwrite."
        )


def _plan_files(source: Path, out: Path, settings: JournalRow) -> list[SplitFile]:
    """List the videos to split, then the images next to them.

    Two videos of one stem in one folder are distinguished by their suffixes.

    Raises:
        VideotuneError: if there is no video, or if two would write the same names.
    """
    root = source if source.is_dir() else source.parent
    clip_files = read_folder(source)[0] if source.is_dir() else [_single_video(source)]
    images: list[ClipFile] = []
    videos: list[ClipFile] = []
    for file in clip_files:
        (videos if is_video(file.path) else images).append(file)
    if not videos:
        hint = f" Its {len(images)} images have no scenes to split." if images else ""
        raise VideotuneError(
            f"No video files in {source}: looked for {' '.join(VIDEO_SUFFIXES)}.{hint}"
        )

    stem_counts = Counter(str(file.path.with_suffix("")).casefold() for file in videos)
    results: list[SplitFile] = []
    path_by_name: dict[tuple[Path, str], Path] = {}
    for file in videos:
        path = file.path
        stem = path.stem
        if stem_counts[str(path.with_suffix("")).casefold()] > 1:
            stem = f"{path.stem}-{path.suffix[1:].lower()}"

        video = SplitFile(file, out / path.parent.relative_to(root), stem)
        conflicting_path = path_by_name.setdefault(
            (video.folder, stem.casefold()), path
        )
        if conflicting_path != path:
            raise VideotuneError(
                f"The scenes of {conflicting_path} and {path} would have the same names. "
                "Rename one of them."
            )
        _read_video(video, out, settings)
        results.append(video)

    results += [SplitFile(file, out, "", is_image=True) for file in images]
    return results


def _read_video(video: SplitFile, out: Path, settings: JournalRow) -> None:
    """Set the media info and the journal's row of a video, or its problem."""
    file = video.file
    try:
        if not file.exists:
            raise ClipProblem("missing_file", file.missing_detail)
        video.info = probe(file.path)
        video.row = {
            "key": (video.folder / video.stem).relative_to(out).as_posix(),
            "id": files.hash_file(file.path),
            **settings,
        }
    except ClipProblem as problem:
        video.problem = problem


def _single_video(path: Path) -> ClipFile:
    """Return a video with its caption in captions/ or next to it."""
    if not is_video(path):
        raise VideotuneError(
            f"{path} is not a video file: its suffix is not one of {' '.join(VIDEO_SUFFIXES)}. "
            "Give a video or a folder of videos."
        )

    sibling_caption = path.with_suffix(".txt")
    expected_caption = sibling_caption
    for folder in path.absolute().parents:
        if folder.name == "videos":
            captions_folder = folder.with_name("captions")
            relative_caption = sibling_caption.absolute().relative_to(folder)
            expected_caption = captions_folder / relative_caption
            break

    caption_file = None
    if expected_caption.is_file():
        caption_file = expected_caption
    elif sibling_caption.is_file():
        caption_file = sibling_caption
    return ClipFile(path, caption_file, expected_caption)


def _is_recorded(row: JournalRow, journal: Mapping[str, JournalRow]) -> bool:
    """Return whether the journal has the same file with the same settings."""
    return row.items() <= journal.get(row["key"], {}).items()


def _find_scenes(
    video: SplitFile, out: Path, journal: Mapping[str, JournalRow], *, overwrite: bool
) -> None:
    """Set the scenes of a video by its cuts, numbered over those that are long enough."""
    assert video.info is not None
    if not overwrite and _is_recorded(video.row, journal):
        cuts = journal[video.row["key"]]["cuts"]
    else:
        cuts = _find_cuts(video)
        for stale_file in video.output_files():
            stale_file.unlink()
        _record_cuts(video, cuts, out)

    stamps = (*video.info.timestamps, video.seconds)
    cut_indices = [bisect_left(stamps, cut - 1e-9) for cut in cuts]
    suffix = ".mp4" if cuts else video.file.path.suffix
    number = 0
    scenes = []
    for first, end in pairwise([0, *cut_indices, len(stamps) - 1]):
        seconds = stamps[end] - stamps[first]
        path = None
        if seconds >= video.row["min_seconds"] - 1e-6:
            number += 1
            path = video.folder / f"{video.stem}-scene-{number:03d}{suffix}"
        scenes.append(
            Scene(first, end, start=stamps[first], seconds=seconds, path=path)
        )
    video.scenes = tuple(scenes)


def _find_cuts(video: SplitFile) -> Sequence[float]:
    """Scan a whole video for cuts; raise ClipProblem if it is damaged, or
    if the form of its pictures changes.
    """
    assert video.info is not None
    scan = scan_content(video.info, video.seconds, video.row["threshold"], threads=0)
    if scan.damaged_at is not None:
        raise ClipProblem(
            "decode_error", f"its frames are damaged from {scan.damaged_at:.2f} s on"
        )
    if scan.form_changes_at is not None:
        raise ClipProblem(
            "decode_error",
            f"its pictures have another shape from {scan.form_changes_at:.2f} s on: "
            "cut it there first",
        )
    return scan.cuts


def _record_cuts(video: SplitFile, cuts: Sequence[float], out: Path) -> None:
    """Append the video's row to the journal."""
    row = json.dumps(video.row | {"cuts": list(cuts)}, ensure_ascii=False)
    out.mkdir(parents=True, exist_ok=True)
    with (out / JOURNAL).open("a", encoding="utf-8") as file:
        # The line break comes first: a killed run may have left half a line.
        if file.tell() > 0:
            file.write("\n")
        file.write(row)
    files.sync_file(out / JOURNAL)


def _write_scenes(video: SplitFile) -> Iterator[float]:
    """Write the scenes that do not exist yet, in one pass; yield the seconds done."""
    assert video.info is not None
    has_sound = len(video.scenes) > 1 and _has_readable_sound(video.info)

    with closing(FrameReader(video.info)) as reader:
        for scene in video.scenes:
            if scene.path is not None and not scene.path.exists():
                write: Callable[[Path], Any]
                if len(video.scenes) > 1:
                    write = partial(
                        encode_scene,
                        info=video.info,
                        first=scene.first,
                        frames=reader.frames(range(scene.first, scene.end)),
                        sound_end=scene.start + scene.seconds if has_sound else None,
                    )
                else:
                    write = partial(shutil.copyfile, video.file.path)
                files.write_whole(scene.path, write)
            yield scene.start + scene.seconds


def _has_readable_sound(info: MediaInfo) -> bool:
    """Whether a video has sound, all of which can be decoded; the scenes of others are
    written without.
    """
    if info.sound is None:
        return False
    try:
        return not scan_sound(info, info.seconds).is_silent
    except ClipProblem:
        return False


def _write_caption(file: ClipFile, target: Path) -> bool:
    """Write the caption of a scene unless it has one; return whether it has one now."""
    if target.exists():
        return True
    if file.metadata_captions is not None:
        files.write_text(target, "\n".join(file.metadata_captions) + "\n")
    elif file.caption_file is not None:
        files.write_whole(target, partial(shutil.copyfile, file.caption_file))
    return target.exists()
