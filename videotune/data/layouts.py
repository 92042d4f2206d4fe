"""Dataset layouts: find the clips of a folder and their captions, in any of the usual
layouts."""

import os
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from videotune.data.archives import ARCHIVE_SUFFIXES
from videotune.data.clip_file import (
    CAPTION_SUFFIX,
    CAPTION_SUFFIXES,
    CLIP_SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    ClipFile,
    text_files_by_name,
)
from videotune.data.companion_files import (
    DEFAULT_COMPANIONS,
    CompanionFiles,
    CompanionSettings,
    companion_folders_beside,
)
from videotune.data.folder_listing import (
    check_names,
    expected_captions_folder,
    list_folder,
    walk,
)
from videotune.data.frame_folders import find_frame_folders
from videotune.data.layout_notes import LayoutNotes
from videotune.data.listed_paths import ListedPaths
from videotune.data.metadata_files import (
    METADATA_NAMES,
    METADATA_SUFFIXES,
    NO_COLUMNS,
    Columns,
    MetadataRow,
    read_metadata,
)
from videotune.data.packed_rows import SpilledRows
from videotune.errors import VideotuneError, did_you_mean
from videotune.files import near_paths
from videotune.text import as_argument, counted, counted_are


def require_dataset_path(root: Path) -> None:
    """Raise VideotuneError if a dataset is neither a folder nor a file, such as an
    archive.
    """
    if not root.is_dir() and not root.is_file():
        fault = "is not a folder" if root.exists() else "does not exist"
        near = did_you_mean(near_paths(root), ". Give the folder of the clips.")
        raise VideotuneError(f"The dataset folder {root} {fault}{near}")


def read_folder(
    root: Path,
    within: Path | None = None,
    caption_suffix: str = CAPTION_SUFFIX,
    *,
    frame_folders: bool = False,
    columns: Columns = NO_COLUMNS,
    companions: CompanionSettings = DEFAULT_COMPANIONS,
) -> tuple[Sequence[ClipFile], list[str]]:
    """Find all videos and images in a folder, and those that its metadata files list.

    A clip below a folder ``videos`` or ``images`` has its caption at the same path
    below the sibling folder ``captions``, or else next to itself. A row of a metadata
    file (``METADATA_NAMES``) has precedence over both. Hidden files and folders are
    ignored; links are followed.

    Args:
        root: the dataset's folder.
        within: captions and metadata files that are links may lead out of this folder
            only to a file of the same kind; default is ``root``.
        caption_suffix: suffix of the caption files.
        frame_folders: a folder of numbered images is one clip.
        columns: the columns of metadata files, if the dataset names them.
        companions: which files belong to clips and are no clips themselves.

    Returns:
        The clips in path order, rows of a table that are unpacked one at a time; and
        notes.

    Raises:
        VideotuneError: if the folder does not exist or has no clips, or if a metadata
            file is invalid.
    """
    if root.is_file():
        raise VideotuneError(
            f"The dataset folder {root} is a file. Give the folder of the clips, or split a "
            f"long video into clips: videotune dataset split {as_argument(root)} --out FOLDER"
        )
    require_dataset_path(root)

    folder = _DatasetFolder(
        root, within or root, caption_suffix, frame_folders, columns, companions
    )
    clips = folder.clips()
    output_notes = [
        f"{output_folder} is ignored: it contains {output}"
        for output_folder, output in folder.output_folders.items()
    ]
    layout_notes = LayoutNotes(
        clips, folder.is_linked, folder.rows, folder.prefix, caption_suffix
    )
    notes = [*folder.metadata_notes, *output_notes, *folder.companion_notes(clips)]
    return clips, [*notes, *layout_notes.all()]


class _Layout(NamedTuple):
    """What all clips directly in one folder share."""

    folder: Path
    captions_folder: Path
    metadata_file: str | None
    """Nearest metadata file in the folder or above it."""


class _DatasetFolder:
    """The files of a dataset folder.

    Paths are strings, since a hundred thousand files should take only a second.
    """

    def __init__(
        self,
        root: Path,
        within: Path,
        caption_suffix: str,
        frame_folders: bool,
        columns: Columns,
        companions: CompanionSettings,
    ) -> None:
        self.root = root
        self.caption_suffix = caption_suffix
        self.columns = columns
        self.within = within
        self.prefix = "" if str(root) == "." else os.path.join(root, "")

        listing = list_folder(root)
        self.is_linked = listing.is_linked
        """Whether a link led to a file, by the file's path."""

        self.files = self.is_linked.keys()

        self.output_folders = listing.output_folders
        """Folders that videotune wrote, which are ignored, with what each is."""

        self._refuse_output_folder()
        check_names(self.files)

        self.companions = CompanionFiles(
            self.files, companions, self._companions_outside()
        )

        self.listed_paths = ListedPaths(root, within, self.is_linked)

        self.metadata_files: dict[str, str] = {}
        """Path of the metadata file by folder."""

        self.rows: dict[str, MetadataRow] = {}
        """Row of a metadata file by the path of the clip that it lists."""

        self.metadata_notes: list[str] = []
        for path in sorted(self.files):
            if os.path.basename(path) in METADATA_NAMES:
                self._read_metadata_file(path)

        self.frames: dict[str, tuple[Path, ...]] = {}
        """Images of the folders that are clips, in order."""
        if frame_folders:
            files = self.files - self.companions.paths
            self.frames = find_frame_folders(files, str(root))

        self.caption_files = text_files_by_name(
            [*self.files, *listing.outside_captions], caption_suffix
        )
        """Path of each text file, by the same path with the suffix that the dataset sets: the
        file's own suffix may be in another case.
        """

        caption_is_linked = ChainMap(listing.outside_captions, self.is_linked)
        self.foreign_captions = self._foreign_captions(caption_is_linked)
        """Targets of captions that are links out of the dataset, unless the target has the
        suffix of a caption. They are not read: through such a link a hostile dataset could
        show the content of any file.
        """

    def _companions_outside(self) -> set[str]:
        """Return the companions beside the folder if it is itself a ``videos`` folder."""
        companions: set[str] = set()
        for folder in companion_folders_beside(self.root):
            for path, _ in walk(str(folder), {}):
                if path.lower().endswith(CLIP_SUFFIXES):
                    companions.add(path)
        return companions

    def companion_notes(self, clips: Sequence[ClipFile]) -> list[str]:
        """Return notes on companions that belong to no clip, and on those that metadata
        files replace.
        """
        if not self.companions.paths:
            return []
        paths = [str(clip.path) for clip in clips]
        notes = self._replacement_notes(paths)
        orphans = self.companions.without_clip(paths)
        orphans = [path for path in orphans if path not in self.rows]
        if not orphans:
            return notes
        names = ", ".join(self._relative(path) for path in orphans[:3])
        return [
            *notes,
            f"{counted_are(len(orphans), 'companion file')} of no clip and not used: no clip has the "
            f"same name and place ({names}{', …' if len(orphans) > 3 else ''})",
        ]

    def _replacement_notes(self, paths: Sequence[str]) -> list[str]:
        """Return a note on files of folders in whose place metadata files name others."""
        replaced = []
        for path in paths:
            for role, used, unused in self.companions.replaced_by_names(path):
                position = self._relative(self.rows[path].position)
                replaced.append(
                    f"{position}: {role} {self._relative(used)}, not {self._relative(unused)}"
                )
        if not replaced:
            return []
        examples = "; ".join(replaced[:3])
        return [
            f"{counted(len(replaced), 'companion file')} that metadata files name in the place of those "
            f"in folders beside the clips ({examples}{'; …' if len(replaced) > 3 else ''}): the named ones are used"
        ]

    def _refuse_output_folder(self) -> None:
        """Raise VideotuneError if videotune wrote the dataset folder."""
        output = self.output_folders.get(str(self.root))
        if output is not None:
            raise VideotuneError(
                f"The dataset folder {self.root} contains {output}. "
                "Give a folder that contains only clips."
            )

    def _foreign_captions(self, is_linked: Mapping[str, bool]) -> dict[str, str]:
        """Return the targets of links out of the dataset, by caption file."""
        targets = {}
        for path in self.caption_files.values():
            if is_linked[path]:
                target = self.listed_paths.target_outside(path)
                if target and not self._is_caption(target):
                    targets[path] = target
        return targets

    def _is_caption(self, path: str) -> bool:
        """Return whether a path outside of the dataset can only be that of a caption."""
        suffix = self.caption_suffix.lower()
        return suffix in CAPTION_SUFFIXES and path.lower().endswith(suffix)

    def _read_metadata_file(self, path: str) -> None:
        """Read the rows of one metadata file; raise VideotuneError if it is invalid."""
        folder = os.path.dirname(path) or "."
        if folder in self.metadata_files:
            raise VideotuneError(
                f"{folder} has more than one of {', '.join(METADATA_NAMES)}. Keep one of them."
            )
        self.metadata_files[folder] = path

        target = self.listed_paths.target_outside(path) if self.is_linked[path] else ""
        if target and not target.lower().endswith(METADATA_SUFFIXES):
            raise VideotuneError(
                f"{path} is a link to {target}, outside {self.root}. Put the file itself there."
            )

        rows, notes = read_metadata(Path(path), self.columns, needs_captions=False)
        self.metadata_notes += notes
        relative_folder = os.path.relpath(folder, self.root)
        for row in rows:
            clip_path = self.listed_paths.clip(row, relative_folder)
            if clip_path in self.rows:
                raise VideotuneError(
                    f"{row.position} lists {row.file_name}, which "
                    f"{self.rows[clip_path].position} lists already. Keep one row per clip; "
                    "write several captions as lines of its text."
                )
            self.rows[clip_path] = row
            for role, name in row.companions:
                companion = self.listed_paths.companion(
                    row, role, name, relative_folder
                )
                self.companions.add_named(clip_path, role, companion)

    def clips(self) -> Sequence[ClipFile]:
        """Return the clips in path order; raise VideotuneError if there are none."""
        paths = {path for path in self.files if path.lower().endswith(CLIP_SUFFIXES)}
        paths -= self.companions.paths
        for folder, frames in self.frames.items():
            paths.difference_update(str(frame) for frame in frames)
            paths.add(folder)
        paths |= self.rows.keys()
        if not paths:
            raise VideotuneError(self._no_clips_message())

        ordered_paths = sorted(paths, key=lambda path: path.replace(os.sep, "/"))
        del paths
        layouts: dict[str, _Layout] = {}
        clips: SpilledRows[ClipFile] = SpilledRows()
        for path in ordered_paths:
            folder = os.path.dirname(path)
            if folder not in layouts:
                layouts[folder] = self._layout_of(Path(folder))
            clips.append(self._clip(path, layouts[folder]))
        return clips

    def _layout_of(self, folder: Path) -> _Layout:
        """Find the captions folder and the nearest metadata file of a folder."""
        metadata_file = None
        for ancestor in (folder, *folder.parents):
            if (
                ancestor.is_relative_to(self.root)
                and str(ancestor) in self.metadata_files
            ):
                metadata_file = self.metadata_files[str(ancestor)]
                break
        return _Layout(
            folder, expected_captions_folder(self.root, folder), metadata_file
        )

    def _clip(self, path: str, layout: _Layout) -> ClipFile:
        """Build a clip with its caption by the metadata file or by a text file."""
        # 1. Its text file, unless that is a link which must not be read.
        expected_caption, text_file = self._text_file_of(path, layout)
        caption_file = None
        if text_file is not None and text_file not in self.foreign_captions:
            caption_file = Path(text_file)

        # 2. Its row of a metadata file, and what is missing.
        row = self.rows.get(path)
        has_texts = row is not None and row.texts is not None
        metadata_row = self._relative(row.position) if row is not None else None
        is_known = path in self.files or path in self.frames
        exists = row is None or is_known or os.path.isfile(path)
        missing_detail = ""
        if not exists:
            missing_detail = f"{metadata_row} lists it, and it does not exist"
        elif not has_texts and caption_file is None:
            metadata_file = layout.metadata_file if row is None else None
            missing_detail = self._missing_caption_detail(
                text_file, expected_caption, metadata_file
            )

        return ClipFile(
            path=layout.folder / os.path.basename(path),
            caption_file=caption_file,
            expected_caption=expected_caption,
            metadata_texts=row.texts if row is not None else None,
            metadata_row=metadata_row,
            exists=exists,
            missing_detail=missing_detail,
            frames=self.frames.get(path, ()),
            companions=self.companions.of(path),
        )

    def _text_file_of(self, path: str, layout: _Layout) -> tuple[Path, str | None]:
        """Return the path at which the layout expects a clip's text file, and the text file
        that it has: there, else next to the clip.
        """
        folder, name = os.path.split(path)
        stem = name if path in self.frames else os.path.splitext(name)[0]
        text_name = stem + self.caption_suffix
        expected_caption = layout.captions_folder / text_name
        text_file = self.caption_files.get(str(expected_caption))
        if not text_file:
            text_file = self.caption_files.get(os.path.join(folder, text_name))
        return expected_caption, text_file

    def _missing_caption_detail(
        self,
        text_file: str | None,
        expected_caption: Path,
        metadata_file: str | None,
    ) -> str:
        """Explain why a clip has no caption.

        Args:
            text_file: its text file, if there is one that must not be read.
            expected_caption: path at which the text file should be.
            metadata_file: the metadata file that does not list it, if there is one.
        """
        detail = f"{expected_caption} does not exist"
        if text_file is not None:
            target = self.foreign_captions[text_file]
            detail = f"{text_file} is a link to {target}, which is not a {self.caption_suffix} file"
        if metadata_file:
            detail = f"{self._relative(metadata_file)} does not list it, and {detail}"
        return detail

    def _no_clips_message(self) -> str:
        """Describe what a folder without clips contains, with a remedy."""
        suffixes = (
            os.path.splitext(path)[1].lower() or "no suffix" for path in self.files
        )
        suffix_counts = Counter(suffixes)
        contents = ", ".join(
            f"{count} {suffix}" for suffix, count in suffix_counts.most_common(8)
        )

        archives = [
            path for path in self.files if path.lower().endswith(ARCHIVE_SUFFIXES)
        ]
        unsupported_suffixes = sorted(suffix_counts.keys() & set(UNSUPPORTED_SUFFIXES))
        if archives:
            hint = f"Give the archive itself: {archives[0]}."
        elif ".parquet" in suffix_counts:
            hint = (
                "Its Parquet files hold no clips: they need a column of bytes, "
                "or the clips whose paths they list."
            )
        elif unsupported_suffixes:
            hint = (
                f"Pictures and videos of type {', '.join(unsupported_suffixes)} are not read: "
                "convert them to .png or .mp4."
            )
        else:
            hint = (
                "Give the folder that contains the clips, or that contains videos/ "
                "and captions/."
            )
        return (
            f"No videos or images in {self.root}: looked for {' '.join(CLIP_SUFFIXES)} in it "
            f"and below; found {contents or 'nothing'}. {hint}"
        )

    def _relative(self, path: str) -> str:
        return path.removeprefix(self.prefix)
