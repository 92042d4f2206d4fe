"""Clip files: a clip on disk with its caption, as a dataset layout finds it."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from videotune.data.captions import split_variants
from videotune.data.folder_walk import walk_folders
from videotune.data.images import IMAGE_SUFFIXES, is_animated
from videotune.data.probe import VIDEO_SUFFIXES
from videotune.files import read_json

Role = Literal["loss_mask", "mask", "start_image", "reference", "control"]
"""What a file that belongs to a clip is for.

loss_mask: white where the loss counts ``loss_mask.inside``, black where it counts
``loss_mask.outside``. mask: white where a sample conditioned on the rest is to be
painted. A file in ``masks/`` has both roles. start_image: the image that a clip is
conditioned on instead of its first frame. reference: pictures of what the clip shows.
control: a video that guides it frame by frame, such as depth or poses.
"""

ROLE_LABELS: Mapping[str, str] = {
    "loss_mask": "loss mask",
    "mask": "mask",
    "reference": "reference",
    "control": "control clip",
    "start_image": "start image",
}
"""How pages and sheets name a file that belongs to a clip, by its role."""

CLIP_FOLDERS = ("videos", "images")
"""Folders whose clips have their captions in a sibling folder ``captions``."""

CAPTION_SUFFIX = ".txt"
"""Suffix of caption files, unless a dataset sets another."""

CAPTION_SUFFIXES = (".txt", ".caption", ".captions", ".cap", ".tags", ".prompt")
"""Suffixes of files that hold nothing but captions, to which a link may lead anywhere."""

CLIP_SUFFIXES = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
"""Suffixes of clips in a dataset, in lower case."""

UNSUPPORTED_SUFFIXES = tuple(
    read_json(Path(__file__).with_name("unsupported_suffixes.json"))
)
"""Suffixes of pictures and videos that are not clips; a note reports them as not read.
"""

MAX_REPEATS = 1000
"""A larger number at the beginning of a folder's name is a year, or the like."""


@dataclass(frozen=True, slots=True)
class ClipFile:
    """A clip of a dataset and its caption."""

    path: Path

    caption_file: Path | None
    """Text file of the caption, or None."""

    expected_caption: Path
    """Path at which the layout expects the text file."""

    metadata_texts: tuple[str, ...] | None = None
    """Captions of the clip's row in a metadata file, each of one or more lines; () if the row
    has no text. The clip's text file is then ignored.

    None: the text file counts, because there is no row, or one that only names companions.
    """

    metadata_row: str | None = None
    """Row of the metadata file that lists the clip, such as "metadata.csv:3"."""

    exists: bool = True
    """Whether the file is on disk. A metadata file may list one that is not."""

    missing_detail: str = ""
    """What is missing, the file or the caption; "" if nothing is."""

    frames: tuple[Path, ...] = ()
    """Images of a clip that is a folder of frames, in order."""

    joined_video: Path | None = None
    """Video in the cache that the ``frames`` were joined into; None for other clips."""

    content_id: str = ""
    """Hash of the frames that ``joined_video`` was made of."""

    companions: tuple[tuple[Role, Path], ...] = ()
    """Files that belong to the clip, by their role."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A path as its text takes a third of the time and of the bytes.
        values = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            values.append(str(value) if name in _PATH_FIELDS and value else value)
        return _restore_clip_file, tuple(values)

    @property
    def metadata_captions(self) -> tuple[str, ...] | None:
        """Captions of the clip's row in a metadata file, split into the lines of its
        texts; None if it has none.
        """
        if self.metadata_texts is None:
            return None
        return split_variants("\n".join(self.metadata_texts))


_PATH_FIELDS = frozenset(["path", "caption_file", "expected_caption", "joined_video"])


def _restore_clip_file(
    path: str, caption_file: str | None, expected_caption: str, *values: Any
) -> ClipFile:
    """Return a clip file that was pickled."""
    caption_path = None if caption_file is None else Path(caption_file)
    file = ClipFile(Path(path), caption_path, Path(expected_caption), *values)
    if file.joined_video is not None:
        file = replace(file, joined_video=Path(file.joined_video))
    return file


def is_video(path: Path) -> bool:
    """Return whether a file is a video by its suffix; a GIF, by its pictures."""
    suffix = path.suffix.lower()
    return suffix in VIDEO_SUFFIXES or (suffix == ".gif" and is_animated(path))


def has_clip_files(folder: Path) -> bool:
    """Return whether a folder has clips as files, at any depth."""
    for _, names in walk_folders(folder):
        if any(name.lower().endswith(CLIP_SUFFIXES) for name in names):
            return True
    return False


def repeats_of(root: Path, path: Path) -> tuple[str, int]:
    """Return how often a clip is shown per epoch by its folder's name, as kohya's
    scripts do.

    "10_ohwx_horse" sets 10 repeats. The folder is the one in ``root``, or ``root``
    itself for clips directly in it. Numbers that begin with 0 or exceed 1000 mean
    something else, such as an order or a year.

    Returns:
        Name of the folder and number of repeats; ("", 1) if the name sets none.
    """
    parts = path.relative_to(root).parts
    folder = parts[0] if len(parts) > 1 else root.absolute().name

    match = re.fullmatch(r"([1-9][0-9]{0,3})_.+", folder)
    if match is None or int(match[1]) > MAX_REPEATS:
        return "", 1
    return folder, int(match[1])


def text_files_by_name(files: Collection[str], suffix: str) -> dict[str, str]:
    """Map NAME + suffix (spelled as the dataset sets it) to the real path of the text file,
    whose suffix may be in another case.

    If there are both NAME.txt and NAME.TXT, the one that is spelled as set is used.
    """
    lower_case = suffix.lower()
    text_files = sorted(path for path in files if path.lower().endswith(lower_case))
    exact_case_last = sorted(text_files, key=lambda path: path.endswith(suffix))
    return {_with_suffix(path, suffix): path for path in exact_case_last}


def _with_suffix(path: str, suffix: str) -> str:
    """Return a path with its suffix spelled as ``suffix``; the same object if it is."""
    if path.endswith(suffix):
        return path
    return path[: -len(suffix)] + suffix
