"""Where the clips of a folder and their captions lie, in any of the usual layouts."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.errors import VideotuneError

from .archives import ARCHIVE_SUFFIXES
from .captions import METADATA_NAMES, Listed, read_metadata
from .probe import IMAGE_SUFFIXES, VIDEO_SUFFIXES

CLIP_SUFFIXES = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
"""What counts as a clip in a dataset (compared in lower case)."""

_UNREAD = (
    *(".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".exr", ".hdr", ".tga", ".dpx", ".psd", ".svg"),
    *(".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"),
    *(".braw", ".r3d", ".ari", ".mxf", ".ogv", ".ogm", ".vob", ".m2v", ".m1v", ".dv", ".rm", ".rmvb", ".f4v"),
    *(".asf", ".3g2", ".y4m", ".yuv", ".264", ".265", ".h264", ".h265", ".hevc", ".ivf", ".insv"),
    *(".divx", ".mod", ".tod"),
)
"""Suffixes of pictures and videos that do not count as clips: that they are passed over is said."""

RUN_FILES = ("config.json", "journal.jsonl")
"""A folder that has both holds a training run."""

PARTS = ("videos", "images")
"""Folders whose clips have their captions in a folder ``captions`` beside them."""


MOST_REPEATS = 1000
"""A greater number at the beginning of a folder's name is a year, or the like."""


@dataclass(frozen=True)
class ClipFile:
    """A clip of a dataset and its caption.

    ``caption`` is its text file, or None, and ``expected`` where that would have to be. ``listed`` is the row of a metadata
    file that names it ("metadata.csv:3"), and ``text`` that row's variants, none where the row has no text; a listed clip
    takes them alone. ``there`` is False where it is listed and not on disk; ``why_missing`` says what lacks, the file or
    the caption.
    """

    path: Path
    caption: Path | None
    expected: Path
    text: tuple[str, ...] | None = None
    listed: str | None = None
    there: bool = True
    why_missing: str = ""


@dataclass(frozen=True)
class _Row:
    """A clip that a metadata file lists: the row, and that file's path."""

    listed: Listed
    table: str


def repeats_of(root: Path, path: Path) -> tuple[str, int]:
    """The folder of a clip whose name says how often it stands in a pass, as kohya's scripts have it (10_ohwx_horse: 10),
    and that number; ("", 1) where none does.

    It is the one in ``root``, or ``root`` itself for clips that lie there. Numbers that begin with 0 or are greater than
    1000 name something else: a place in an order, a year.
    """
    inside = path.relative_to(root).parts
    folder = inside[0] if len(inside) > 1 else root.absolute().name
    found = re.fullmatch(r"([1-9][0-9]{0,3})_.+", folder)
    return (folder, int(found[1])) if found and int(found[1]) <= MOST_REPEATS else ("", 1)


def find_clips(root: Path) -> list[ClipFile]:
    """All clips below ``root`` in path order, each with its caption, as ``read_folder`` finds them."""
    return read_folder(root)[0]


def read_folder(root: Path, within: Path | None = None) -> tuple[list[ClipFile], list[str]]:
    """All videos and images below ``root``, and those its metadata files list, in path order; and notes.

    A clip somewhere below a folder ``videos`` or ``images`` has its caption at the same place below ``captions`` beside it,
    or else beside itself; a row of a metadata.csv or .jsonl wins over both. Hidden files and folders are passed over; links
    are followed, but what a metadata file lists must lie in ``root``, or in ``within`` where that is wider.

    VideotuneError for a folder that is not there or has no clips, and for metadata that cannot be understood.
    """
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        film = root.exists() and root.name.lower().endswith(CLIP_SUFFIXES)
        cut = f" A long video becomes one by: videotune dataset split {root} --out FOLDER" if film else ""
        raise VideotuneError(f"The dataset folder {root} {what}. Give the folder that holds the clips.{cut}")
    runs: list[str] = []
    try:
        files = {
            path.removeprefix(f".{os.sep}"): by_link for path, by_link in _walk(str(root), frozenset(), False, runs)
        }
        beside = _captions_folder(root, root)
        is_apart = beside != root and beside.is_dir()
        apart = dict(_walk(str(beside), frozenset(), False, [])) if is_apart else {}
    except OSError as error:
        raise VideotuneError(f"The folder {error.filename} cannot be read: {error.strerror}.") from error
    if str(root) in runs:
        raise VideotuneError(
            f"The dataset folder {root} is the folder of a training run ({' and '.join(RUN_FILES)}), whose previews are no "
            "clips to train on. Give a folder that holds clips alone."
        )
    _check_names(files)
    tables, rows, notes = _read_tables(root, files, within or root)
    found = {path for path in files if path.lower().endswith(CLIP_SUFFIXES)}
    if not found and not rows:
        raise VideotuneError(_nothing_found(root, files))
    texts = _texts([*files, *apart])
    elsewhere = _links_to_no_text({path: (files | apart)[path] for path in texts.values()}, within or root)
    clips = _with_captions(root, sorted(found | rows.keys(), key=_posix), files, texts, elsewhere, tables, rows)
    left_out = [f"{run} is left out: it is the folder of a training run, whose previews are no clips" for run in runs]
    return clips, [*notes, *left_out, *_notes(root, files, clips, rows)]


def _posix(path: str) -> str:
    return path.replace(os.sep, "/")


def _texts(files: Collection[str]) -> dict[str, str]:
    """Text files by their path with the suffix in lower case, since NAME.TXT is a caption too; NAME.txt wins."""
    there = [path for path in files if path.endswith(".txt")]
    others = [path for path in files if path.lower().endswith(".txt") and not path.endswith(".txt")]
    return {path[:-4] + ".txt": path for path in sorted(others)} | dict(zip(there, there, strict=True))


def _leads_out(path: str, within: Path) -> str:
    """Where a link leads, if that is outside of ``within``, else nothing."""
    real = os.path.realpath(path)
    return "" if Path(real).is_relative_to(os.path.realpath(within)) else real


def _links_to_no_text(texts: Mapping[str, bool], within: Path) -> dict[str, str]:
    """Captions that are links out of the dataset to what has no caption's name, and where they lead: a dataset may bring
    them, and their first line would be shown."""
    led = {path: _leads_out(path, within) for path, by_link in texts.items() if by_link}
    return {path: real for path, real in led.items() if real and not real.lower().endswith(".txt")}


def _walk(folder: str, above: frozenset[str], linked: bool, runs: list[str]) -> Iterator[tuple[str, bool]]:
    """Files below a folder, and whether a link led there; ``above`` are the real paths of the folders on the way, against
    links in a circle. Folders of training runs are put into ``runs`` instead."""
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        there = [entry for entry in entries if not entry.name.startswith(".")]
    if {entry.name for entry in there}.issuperset(RUN_FILES):
        runs.append(folder)
        return
    for entry in there:
        by_link = linked or entry.is_symlink()
        if entry.is_dir():
            yield from _walk(entry.path, above | {real}, by_link, runs)
        else:
            yield entry.path, by_link


def _check_names(files: Mapping[str, bool]) -> None:
    for path in files:
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise VideotuneError(f"The file name {path!r} is not valid UTF-8. Rename the file.") from error


def _nothing_found(root: Path, files: Mapping[str, bool]) -> str:
    there = Counter(os.path.splitext(path)[1].lower() or "no suffix" for path in files)
    listing = ", ".join(f"{count} {suffix}" for suffix, count in there.most_common(8)) or "nothing"
    hint = "Give the folder that holds the clips, or that holds videos/ and captions/."
    archives = [path for path in files if path.lower().endswith(ARCHIVE_SUFFIXES)]
    if archives:
        hint = f"Give the archive itself: {archives[0]}."
    elif ".parquet" in there:
        hint = "Clips within Parquet files are not read: they are needed as files of their own."
    elif unread := sorted(there.keys() & set(_UNREAD)):
        hint = f"Pictures and videos of the kind {', '.join(unread)} are not read: convert them to .png or .mp4."
    return (
        f"No video files in {root}, nor images: looked for {' '.join(CLIP_SUFFIXES)} in it and all folders below; "
        f"found {listing}. {hint}"
    )


def _read_tables(
    root: Path, files: Mapping[str, bool], within: Path
) -> tuple[dict[str, str], dict[str, _Row], list[str]]:
    """The metadata files by their folder, the clips that they list by path, and notes."""
    tables: dict[str, str] = {}
    rows: dict[str, _Row] = {}
    notes: list[str] = []
    for table in sorted(path for path in files if path.endswith(METADATA_NAMES)):
        folder, name = os.path.split(table)
        if name not in METADATA_NAMES:
            continue
        folder = folder or "."
        if folder in tables:
            raise VideotuneError(f"{folder} has both {' and '.join(METADATA_NAMES)}. Keep one of them.")
        tables[folder] = table
        if files[table] and (real := _leads_out(table, within)) and not real.endswith((".csv", ".jsonl")):
            raise VideotuneError(f"{table} is a link to {real}, outside {root}. Put the file itself there.")
        listed, more = read_metadata(Path(table))
        notes += more
        sub = os.path.relpath(folder, root)
        for row in listed:
            path = _inside(root, files, within, f"{table}:{row.line} lists {row.file_name!r}", sub, row.file_name)
            if path in rows:
                one = rows[path]
                raise VideotuneError(
                    f"{table}:{row.line} lists {row.file_name}, which {one.table}:{one.listed.line} lists already. Keep "
                    "one row a clip; several captions are lines of its text."
                )
            rows[path] = _Row(row, table)
    return tables, rows, notes


def _inside(root: Path, files: Mapping[str, bool], within: Path, where: str, sub: str, file_name: str) -> str:
    """The path that a row in the folder ``sub`` of ``root`` names; VideotuneError where it leads out of the dataset."""
    name = file_name.replace("\\", "/")
    if name.startswith("/") or re.match("[A-Za-z]:", name) or "\0" in name:
        raise VideotuneError(f"{where}, which is not relative to the folder of that file. Write it as a relative path.")
    path = os.path.normpath(os.path.join(sub, name))
    if path == ".." or path.startswith(f"..{os.sep}"):
        raise VideotuneError(f"{where}, which lies outside {root}. A dataset's clips must lie within it.")
    path = _prefix(root) + path
    met = files.get(path, True) and os.path.lexists(path)  # what the walk met without a link lies within for sure
    if met and (real := _leads_out(path, within)):
        raise VideotuneError(f"{where}, a link to {real}, outside {root}. A dataset's clips must lie within it.")
    return path


def _with_captions(
    root: Path,
    paths: Sequence[str],
    files: Mapping[str, bool],
    texts: Mapping[str, str],
    elsewhere: Mapping[str, str],
    tables: Mapping[str, str],
    rows: Mapping[str, _Row],
) -> list[ClipFile]:
    """A ClipFile for each path. What is the same for a folder's clips is found once, and names are cut as strings: a
    hundred thousand files are to take a second."""
    places: dict[str, tuple[Path, Path, str | None]] = {}
    clips = []
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in places:
            here = Path(folder)
            places[folder] = here, _captions_folder(root, here), _table_above(root, here, tables)
        here, captions, table = places[folder]
        text_name = os.path.splitext(name)[0] + ".txt"
        expected = captions / text_name
        row = rows.get(path)
        text = texts.get(str(expected)) or texts.get(os.path.join(folder, text_name))
        caption = Path(text) if text and text not in elsewhere else None
        listed = f"{_short(root, row.table)}:{row.listed.line}" if row else None
        there = row is None or path in files or os.path.isfile(path)
        lacks = ""
        if not there:
            lacks = f"{listed} lists it, and it is not there"
        elif row is None and caption is None:
            lacks = f"{text} is a link to {elsewhere[text]}, no .txt file" if text else f"{expected} is not there"
            lacks = f"{_short(root, table)} does not list it, and {lacks}" if table else lacks
        clips.append(ClipFile(here / name, caption, expected, row.listed.text if row else None, listed, there, lacks))
    return clips


def _prefix(root: Path) -> str:
    """What the paths of all files in ``root`` begin with."""
    return "" if str(root) == "." else os.path.join(root, "")


def _short(root: Path, path: str) -> str:
    return path.removeprefix(_prefix(root))


def _captions_folder(root: Path, folder: Path) -> Path:
    """Where the captions of a folder's clips belong: below captions/ beside the nearest videos/ or images/, or there."""
    for above in (folder, *folder.parents):
        if above.name in PARTS:
            return above.with_name("captions") / folder.relative_to(above)
        if above == root:
            break
    return folder


def _table_above(root: Path, folder: Path, tables: Mapping[str, str]) -> str | None:
    """The metadata file of the folder, or else of the nearest above it."""
    for above in (folder, *folder.parents):
        if str(above) in tables:
            return tables[str(above)]
        if above == root:
            break
    return None


def _notes(root: Path, files: Mapping[str, bool], clips: Sequence[ClipFile], rows: Mapping[str, _Row]) -> list[str]:
    """What may not be as the person thinks: two captions, thumbnails taken for clips, names that nearly match, archives."""
    notes = []
    both = [clip for clip in clips if clip.listed and clip.caption]
    if both:
        one = both[0]
        tables = " and ".join(sorted({str(clip.listed).rpartition(":")[0] for clip in both}))
        notes.append(
            f"{len(both)} clips have a caption in {tables} and in a .txt file too ({one.path.name}: {one.caption}); "
            "the .txt files are not used"
        )
    images = [str(clip.path) for clip in clips if clip.path.name.lower().endswith(IMAGE_SUFFIXES)]
    cut = {os.path.splitext(path)[0] for path in files if path.lower().endswith(VIDEO_SUFFIXES)} if images else set()
    twins = [path for path in images if os.path.splitext(path)[0] in cut]
    if twins:
        notes.append(
            f"{len(twins)} images bear the name of a video beside them ({_short(root, twins[0])}); they are clips of "
            "one frame like all images: move them elsewhere if they are thumbnails"
        )
    lost = [str(clip.path) for clip in clips if not clip.there]
    if lost:
        alike = {_loosely(path): path for path in files}
        near = [(path, alike[_loosely(path)]) for path in lost if _loosely(path) in alike]
        notes += [
            f"{rows[path].table}:{rows[path].listed.line} lists {_short(root, path)}, which is not there, while "
            f"{_short(root, other)} is: the names differ in case or in how accents are written"
            for path, other in near[:5]
        ]
    unread = [path for path in files if path.lower().endswith(_UNREAD) and path not in rows]
    if unread:
        kinds = Counter(os.path.splitext(path)[1].lower() for path in unread)
        which = ", ".join(f"{suffix} ({count})" for suffix, count in kinds.most_common())
        notes.append(f"{len(unread)} files look like media and are not read: {which}")
    alone = [_short(root, path) for path in _captions_of_no_clip(root, files, clips)]
    if alone:
        more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
        files_have = "1 caption file has" if len(alone) == 1 else f"{len(alone)} caption files have"
        notes.append(f"{files_have} the name of no clip: {', '.join(alone[:3])}{more}")
    packed = [path for path in files if path.lower().endswith(ARCHIVE_SUFFIXES)]
    if packed:
        notes.append(
            f"{len(packed)} archives in {root} stay closed ({_short(root, packed[0])}); give each as a dataset of its own"
        )
    return notes


def _captions_of_no_clip(root: Path, files: Mapping[str, bool], clips: Sequence[ClipFile]) -> list[str]:
    """Texts in folders called captions, and in folders where half of the clips or more have one beside them, that have no
    clip's name. Other texts are none of ours."""
    texts = _texts(files)
    beside = [os.path.splitext(str(clip.path))[0] + ".txt" for clip in clips]
    named = {*beside, *(str(clip.expected) for clip in clips)}
    in_folder = Counter(os.path.dirname(path) for path in beside)
    with_text = Counter(os.path.dirname(path) for path in beside if path in texts)
    ours = {folder for folder, count in in_folder.items() if 2 * with_text[folder] >= count}
    alone = []
    for path in sorted(texts.keys() - named):
        folder = os.path.dirname(path)
        if folder in ours or "captions" in Path(_short(root, folder)).parts:
            alone.append(texts[path])
    return alone


def _loosely(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()
