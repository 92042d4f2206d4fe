"""Dataset layouts: where the clips of a folder and their captions lie, in any of the usual ways."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.data.archives import ARCHIVE_SUFFIXES
from videotune.data.captions import METADATA_NAMES, MetadataRow, read_metadata
from videotune.data.images import IMAGE_SUFFIXES
from videotune.data.media_info import VIDEO_SUFFIXES
from videotune.errors import VideotuneError
from videotune.files import read_json

CLIP_SUFFIXES = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
"""What counts as a clip in a dataset (compared in lower case)."""

_UNREAD = tuple(read_json(Path(__file__).with_name("unread.json")))
"""Suffixes of pictures and videos that do not count as clips: a note reports that they are ignored."""

RUN_FILES = ("config.json", "journal.jsonl")
"""A folder that has both holds a training run."""

CLIP_FOLDERS = ("videos", "images")
"""Folders whose clips have their captions in a folder ``captions`` beside them."""

MAX_REPEATS = 1000
"""A greater number at the beginning of a folder's name is a year, or the like."""


@dataclass(frozen=True)
class ClipFile:
    """A clip of a dataset and its caption.

    ``caption`` is its text file, or None, and ``expected`` where that would have to be. ``listed`` is the row of a metadata
    file that names it ("metadata.csv:3"), and ``text`` that row's variants, none where the row has no text; a listed clip
    takes them alone. ``exists`` is False where it is listed and not on disk; ``missing`` explains what lacks, the file or
    the caption.
    """

    path: Path
    caption: Path | None
    expected: Path
    text: tuple[str, ...] | None = None
    listed: str | None = None
    exists: bool = True
    missing: str = ""


def repeats_of(root: Path, path: Path) -> tuple[str, int]:
    """The folder of a clip whose name says how often it is shown in an epoch, as kohya's scripts have it, and that number
    (10_ohwx_horse: 10); ("", 1) where none does.

    It is the one in ``root``, or ``root`` itself for clips that lie there. Numbers that begin with 0 or are greater than
    1000 name something else: a place in an order, a year.
    """
    inside = path.relative_to(root).parts
    folder = inside[0] if len(inside) > 1 else root.absolute().name
    found = re.fullmatch(r"([1-9][0-9]{0,3})_.+", folder)
    return (folder, int(found[1])) if found and int(found[1]) <= MAX_REPEATS else ("", 1)


def read_folder(root: Path, within: Path | None = None) -> tuple[list[ClipFile], list[str]]:
    """All videos and images below ``root``, and those its metadata files list, in path order; and notes.

    A clip somewhere below a folder ``videos`` or ``images`` has its caption at the same place below ``captions`` beside it,
    or else beside itself; a row of a metadata.csv or .jsonl wins over both. Hidden files and folders are ignored; links
    are followed, but what a metadata file lists must lie in ``root``, or in ``within`` where that is wider.

    VideotuneError for a folder that does not exist or has no clips, and for metadata that cannot be understood.
    """
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        cut = (
            f" A long video becomes one by: videotune dataset split {root} --out FOLDER"
            if root.exists()
            else ""
        )
        raise VideotuneError(
            f"The dataset folder {root} {what}. Give the folder that holds the clips.{cut}"
        )
    folder = _Folder(root, within or root)
    clips = folder.clips()
    return clips, folder.notes(clips)


class _Folder:
    """The files of a dataset folder: by path, whether a link led there; ``tables`` are its metadata files by folder, and
    ``rows`` what those list, by path. Paths are strings, cut as such: a hundred thousand files are to take a second."""

    def __init__(self, root: Path, within: Path) -> None:
        self.root = root
        self.within = within
        self.prefix = "" if str(root) == "." else os.path.join(root, "")
        self.runs: list[str] = []
        try:
            walked = _walk(str(root), frozenset(), False, self.runs)
            self.files = {path.removeprefix(f".{os.sep}"): by_link for path, by_link in walked}
            beside = _captions_folder(root, root)
            is_apart = beside != root and beside.is_dir()
            apart = dict(_walk(str(beside), frozenset(), False, [])) if is_apart else {}
        except OSError as error:
            raise VideotuneError(
                f"The folder {error.filename} cannot be read: {error.strerror}."
            ) from error
        if str(root) in self.runs:
            raise VideotuneError(
                f"The dataset folder {root} holds a training run. Give a folder of clips alone."
            )
        for path in self.files:
            try:
                path.encode()
            except UnicodeEncodeError as error:
                raise VideotuneError(
                    f"The file name {path!r} is not valid UTF-8. Rename the file."
                ) from error
        self.tables: dict[str, str] = {}
        self.rows: dict[str, MetadataRow] = {}
        self.table_notes: list[str] = []
        for table in sorted(
            path for path in self.files if os.path.basename(path) in METADATA_NAMES
        ):
            self._read_table(table)
        self.texts = _texts([*self.files, *apart])
        # a dataset may bring captions that are links out of it to what has no caption's name, to show their first line
        self.foreign = {
            text: real
            for text in self.texts.values()
            if (self.files | apart)[text]
            and (real := self._leads_out(text))
            and not real.lower().endswith(".txt")
        }

    def _leads_out(self, path: str) -> str:
        """Where a link leads, if that is outside of the dataset, else nothing."""
        real = os.path.realpath(path)
        return "" if Path(real).is_relative_to(os.path.realpath(self.within)) else real

    def _read_table(self, table: str) -> None:
        folder = os.path.dirname(table) or "."
        if folder in self.tables:
            raise VideotuneError(
                f"{folder} has both {' and '.join(METADATA_NAMES)}. Keep one of them."
            )
        self.tables[folder] = table
        if (
            self.files[table]
            and (real := self._leads_out(table))
            and not real.endswith((".csv", ".jsonl"))
        ):
            raise VideotuneError(
                f"{table} is a link to {real}, outside {self.root}. Put the file itself there."
            )
        rows, notes = read_metadata(Path(table))
        self.table_notes += notes
        for row in rows:
            path = self._listed_path(row, os.path.relpath(folder, self.root))
            if path in self.rows:
                twice = f"{row.place} lists {row.file_name}, which {self.rows[path].place} lists already"
                raise VideotuneError(
                    f"{twice}. Keep one row a clip; several captions are lines of its text."
                )
            self.rows[path] = row

    def _listed_path(self, row: MetadataRow, sub: str) -> str:
        """The path that a row in the folder ``sub`` of the root names; VideotuneError where it leads out of the dataset."""
        name = row.file_name.replace("\\", "/")
        where = f"{row.place} lists {row.file_name!r}"
        if name.startswith("/") or re.match("[A-Za-z]:", name) or "\0" in name:
            raise VideotuneError(
                f"{where}, which is not relative to that file's folder. Write a relative path."
            )
        path = os.path.normpath(os.path.join(sub, name))
        if path == ".." or path.startswith(f"..{os.sep}"):
            raise VideotuneError(
                f"{where}, which lies outside {self.root}. A dataset's clips must lie within it."
            )
        path = self.prefix + path
        met = self.files.get(path, True) and os.path.lexists(
            path
        )  # what the walk met without a link lies within
        if met and (real := self._leads_out(path)):
            raise VideotuneError(
                f"{where}, a link to {real}, outside {self.root}. Put the clip itself there."
            )
        return path

    def clips(self) -> list[ClipFile]:
        """The clips in path order; VideotuneError where there is none. What is the same for a folder is found once."""
        found = {
            path for path in self.files if path.lower().endswith(CLIP_SUFFIXES)
        } | self.rows.keys()
        if not found:
            raise VideotuneError(self._nothing_found())
        places: dict[str, tuple[Path, Path, str | None]] = {}
        clips = []
        for path in sorted(found, key=lambda path: path.replace(os.sep, "/")):
            folder, name = os.path.split(path)
            if folder not in places:
                here = Path(folder)
                above = (
                    str(one) for one in (here, *here.parents) if one.is_relative_to(self.root)
                )
                table = next((self.tables[one] for one in above if one in self.tables), None)
                places[folder] = here, _captions_folder(self.root, here), table
            here, captions, table = places[folder]
            row = self.rows.get(path)
            text_name = os.path.splitext(name)[0] + ".txt"
            expected = captions / text_name
            text = self.texts.get(str(expected)) or self.texts.get(
                os.path.join(folder, text_name)
            )
            caption = Path(text) if text and text not in self.foreign else None
            listed = self._short(row.place) if row else None
            exists = row is None or path in self.files or os.path.isfile(path)
            missing = "" if exists else f"{listed} lists it, and it does not exist"
            if row is None and caption is None:
                fault = (
                    f"is a link to {self.foreign[text]}, no .txt file"
                    if text
                    else "does not exist"
                )
                unlisted = f"{self._short(table)} does not list it, and " if table else ""
                missing = f"{unlisted}{text or expected} {fault}"
            clips.append(
                ClipFile(
                    here / name,
                    caption,
                    expected,
                    row.text if row else None,
                    listed,
                    exists,
                    missing,
                )
            )
        return clips

    def _nothing_found(self) -> str:
        there = Counter(os.path.splitext(path)[1].lower() or "no suffix" for path in self.files)
        listing = (
            ", ".join(f"{count} {suffix}" for suffix, count in there.most_common(8))
            or "nothing"
        )
        hint = "Give the folder that holds the clips, or that holds videos/ and captions/."
        archives = [path for path in self.files if path.lower().endswith(ARCHIVE_SUFFIXES)]
        if archives:
            hint = f"Give the archive itself: {archives[0]}."
        elif ".parquet" in there:
            hint = "Clips within Parquet files are not read: they are needed as files of their own."
        elif unread := sorted(there.keys() & set(_UNREAD)):
            hint = f"Pictures and videos of the kind {', '.join(unread)} are not read: convert them to .png or .mp4."
        looked = f"looked for {' '.join(CLIP_SUFFIXES)} in it and below; found {listing}"
        return f"No video files in {self.root}, nor images: {looked}. {hint}"

    def notes(self, clips: Sequence[ClipFile]) -> list[str]:
        """What may not be as the user thinks: two captions, thumbnails as clips, names that nearly match, archives."""
        notes = self.table_notes + [
            f"{run} is left out: it holds a training run" for run in self.runs
        ]
        both = [clip for clip in clips if clip.listed and clip.caption]
        if both:
            tables = " and ".join(
                sorted({str(clip.listed).rpartition(":")[0] for clip in both})
            )
            files = f"the .txt files of {len(both)} clips ({both[0].caption})"
            notes.append(f"{files} are not used, since {tables} has their captions")
        videos = {
            os.path.splitext(path)[0]
            for path in self.files
            if path.lower().endswith(VIDEO_SUFFIXES)
        }
        images = [
            str(clip.path) for clip in clips if clip.path.name.lower().endswith(IMAGE_SUFFIXES)
        ]
        twins = [path for path in images if os.path.splitext(path)[0] in videos]
        if twins:
            named = f"{len(twins)} images have the name of a video beside them ({self._short(twins[0])})"
            notes.append(
                f"{named}; they are clips too: move them elsewhere if they are thumbnails"
            )
        lost = [str(clip.path) for clip in clips if not clip.exists]
        alike = {_loosely(path): path for path in self.files} if lost else {}
        near = [
            (self.rows[path].place, path, alike[_loosely(path)])
            for path in lost
            if _loosely(path) in alike
        ]
        notes += [
            f"{place} lists {self._short(path)}, which does not exist; {self._short(other)} does: case or accents differ"
            for place, path, other in near[:5]
        ]
        unread = [
            path
            for path in self.files
            if path.lower().endswith(_UNREAD) and path not in self.rows
        ]
        if unread:
            kinds = Counter(os.path.splitext(path)[1].lower() for path in unread)
            which = ", ".join(f"{suffix} ({count})" for suffix, count in kinds.most_common())
            notes.append(f"{len(unread)} files look like media and are not read: {which}")
        alone = [self._short(path) for path in self._captions_of_no_clip(clips)]
        if alone:
            more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
            files_have = (
                "1 caption file has" if len(alone) == 1 else f"{len(alone)} caption files have"
            )
            notes.append(f"{files_have} the name of no clip: {', '.join(alone[:3])}{more}")
        packed = [
            self._short(path) for path in self.files if path.lower().endswith(ARCHIVE_SUFFIXES)
        ]
        if packed:
            notes.append(
                f"{len(packed)} archives stay closed ({packed[0]}); give each as a dataset of its own"
            )
        return notes

    def _captions_of_no_clip(self, clips: Sequence[ClipFile]) -> list[str]:
        """Texts in folders called captions, and in folders where half of the clips or more have one beside them, that have
        no clip's name. Other texts are none of ours."""
        texts = _texts(self.files)
        beside = [os.path.splitext(str(clip.path))[0] + ".txt" for clip in clips]
        named = {*beside, *(str(clip.expected) for clip in clips)}
        in_folder = Counter(os.path.dirname(path) for path in beside)
        with_text = Counter(os.path.dirname(path) for path in beside if path in texts)
        ours = {folder for folder, count in in_folder.items() if 2 * with_text[folder] >= count}
        return [
            texts[path]
            for path in sorted(texts.keys() - named)
            if (folder := os.path.dirname(path)) in ours
            or "captions" in Path(self._short(folder)).parts
        ]

    def _short(self, path: str) -> str:
        return path.removeprefix(self.prefix)


def _walk(
    folder: str, above: frozenset[str], linked: bool, runs: list[str]
) -> Iterator[tuple[str, bool]]:
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


def _texts(files: Collection[str]) -> Mapping[str, str]:
    """Text files by their path with the suffix in lower case, since NAME.TXT is a caption too; NAME.txt wins."""
    texts = sorted(path for path in files if path.lower().endswith(".txt"))
    return {
        path[:-4] + ".txt": path
        for path in sorted(texts, key=lambda path: path.endswith(".txt"))
    }


def _captions_folder(root: Path, folder: Path) -> Path:
    """Where the captions of a folder's clips belong: below captions/ beside the nearest videos/ or images/, or there."""
    for above in (folder, *folder.parents):
        if above.name in CLIP_FOLDERS:
            return above.with_name("captions") / folder.relative_to(above)
        if above == root:
            break
    return folder


def _loosely(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()
