"""Notes on a dataset folder: files that the user may have meant otherwise."""

import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.data.archives import ARCHIVE_SUFFIXES
from videotune.data.clip_file import UNSUPPORTED_SUFFIXES, ClipFile
from videotune.data.images import IMAGE_SUFFIXES
from videotune.data.metadata_files import MetadataRow
from videotune.data.probe import VIDEO_SUFFIXES
from videotune.data.remarks import Remark
from videotune.data.unused_captions import UnusedCaptions
from videotune.text import counted, counted_are


@dataclass(frozen=True)
class LayoutNotes:
    """Notes on the clips and other files of one dataset folder."""

    clips: Sequence[ClipFile]

    files: Mapping[str, bool]
    """Files of the folder; the values are not used."""

    rows: Mapping[str, MetadataRow]
    """Row of a metadata file by the path of the clip that it lists."""

    prefix: str
    """Beginning of all paths, which notes leave out."""

    caption_suffix: str
    """Suffix of caption files."""

    def clip_paths(self) -> Iterator[str]:
        """Yield the paths of the clips."""
        return (str(clip.path) for clip in self.clips)

    def all(self) -> list[str]:
        """Return the notes in their usual order."""
        return [
            *self._double_caption_notes(),
            *self._thumbnail_notes(),
            *self._misspelling_notes(),
            *self._unsupported_notes(),
            *self._unused_caption_notes(),
            *self._archive_notes(),
        ]

    def _double_caption_notes(self) -> list[str]:
        """Report text files that a metadata file makes useless."""
        doubles = 0
        first_double: Path | None = None
        metadata_files = set()
        for clip in self.clips if self.rows else ():
            if clip.metadata_texts is not None and clip.caption_file:
                doubles += 1
                first_double = first_double or clip.caption_file
                metadata_files.add(str(clip.metadata_row).rpartition(":")[0])
        if not doubles:
            return []
        return [
            f"the .txt files of {counted(doubles, 'clip')} ({first_double}) are not used, "
            f"since {' and '.join(sorted(metadata_files))} has their captions"
        ]

    def _thumbnail_notes(self) -> list[str]:
        """Report images with the name of a video."""
        if not any(path.lower().endswith(IMAGE_SUFFIXES) for path in self.files):
            return []
        image_stems = {}
        for path in self.clip_paths():
            if path.lower().endswith(IMAGE_SUFFIXES):
                image_stems[path] = os.path.splitext(path)[0]
        if not image_stems:
            return []
        video_stems = set()
        for path in self.files:
            if path.lower().endswith(VIDEO_SUFFIXES):
                video_stems.add(os.path.splitext(path)[0])

        thumbnails = [path for path, stem in image_stems.items() if stem in video_stems]
        if not thumbnails:
            return []
        return [
            f"{counted(len(thumbnails), 'image')} with the name of a video next to it "
            f"({self._relative(thumbnails[0])}): used as clips too; move thumbnails "
            "elsewhere"
        ]

    def _misspelling_notes(self) -> list[str]:
        """Report listed files that exist under another spelling, at most five."""
        if not self.rows:
            return []
        missing_paths = [str(clip.path) for clip in self.clips if not clip.exists]
        if not missing_paths:
            return []

        paths_by_spelling = {_fold_spelling(path): path for path in self.files}
        notes = []
        for path in missing_paths:
            similar_path = paths_by_spelling.get(_fold_spelling(path))
            if similar_path is not None:
                notes.append(
                    f"{self.rows[path].position} lists {self._relative(path)}, which does not "
                    f"exist; {self._relative(similar_path)} does: case or accents differ"
                )
        return notes[:5]

    def _unsupported_notes(self) -> list[str]:
        """Report media files of types that are not read."""
        unsupported_files = [
            path
            for path in self.files
            if path.lower().endswith(UNSUPPORTED_SUFFIXES) and path not in self.rows
        ]
        if not unsupported_files:
            return []

        suffix_counts = Counter(
            os.path.splitext(path)[1].lower() for path in unsupported_files
        )
        suffixes = ", ".join(
            f"{suffix} ({count})" for suffix, count in suffix_counts.most_common()
        )
        them = "it" if len(unsupported_files) == 1 else "them"
        text = (
            f"{counted_are(len(unsupported_files), 'file')} not read, though named like media, "
            f"first {self._relative(unsupported_files[0])}: {suffixes}; convert {them} to PNG, "
            "JPEG or MP4"
        )
        return [Remark("unread_media", text)]

    def _unused_caption_notes(self) -> list[str]:
        """Report captions without a clip."""
        return UnusedCaptions(
            self.clips, self.files, self.prefix, self.caption_suffix
        ).notes()

    def _archive_notes(self) -> list[str]:
        """Report archives among the clips."""
        archives = [
            self._relative(path)
            for path in self.files
            if path.lower().endswith(ARCHIVE_SUFFIXES)
        ]
        if not archives:
            return []
        return [
            f"{len(archives)} archives are not unpacked ({archives[0]}); "
            "give each as a dataset of its own"
        ]

    def _relative(self, path: str) -> str:
        return path.removeprefix(self.prefix)


def _fold_spelling(path: str) -> str:
    """Return a path without differences of case and Unicode form."""
    return unicodedata.normalize("NFC", path).casefold()
