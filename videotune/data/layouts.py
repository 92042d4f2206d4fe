"""Where a dataset comes from: a folder, an archive, or a dataset of the Hub."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from videotune.errors import VideotuneError

from .archives import ARCHIVE_SUFFIXES, archive_kind, unpack
from .captions import METADATA_NAMES
from .folders import CLIP_SUFFIXES, ClipFile, read_folder
from .hub import listing, snapshot

if TYPE_CHECKING:
    from .index import Progress

_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>.+))?")
_OTHER_SPLITS = ("test", "val", "valid", "validation", "dev", "eval")


@dataclass(frozen=True)
class Layout:
    """A dataset as it lies on disk: the folder of its files, and what is to be said about it.

    ``origin`` says where it came from, exactly (a Hub dataset with its commit); ``name`` is the same wherever it lies.
    """

    root: Path
    files: list[ClipFile]
    notes: list[str]
    origin: str
    name: str


def open_layout(path: str, cache: Path, progress: Progress | None = None) -> Layout:
    """The clips of a folder, of an archive (unpacked into ``cache``), or of a Hub dataset: "user/name" where no such path
    exists, or "hf://datasets/user/name@revision". VideotuneError where there is none or it cannot be read.
    """
    if path.startswith("hf://"):
        return _open_hub(path, cache, progress)
    place = Path(path).expanduser()
    if place.is_file() and archive_kind(place) is not None:
        return _open_archive(place, cache, progress)
    if not place.exists() and _may_be_hub_id(path):
        return _open_hub(path, cache, progress)
    files, notes = read_folder(place)
    return Layout(place, files, notes, str(place), place.absolute().name)


def _open_archive(archive: Path, cache: Path, progress: Progress | None) -> Layout:
    unpacked = unpack(archive, cache, progress)
    files, notes = read_folder(unpacked.folder)
    suffix = next((suffix for suffix in ARCHIVE_SUFFIXES if archive.name.lower().endswith(suffix)), "")
    name = archive.name[: len(archive.name) - len(suffix)]
    return Layout(unpacked.folder, files, [*unpacked.notes, *notes], str(archive), name)


def _open_hub(path: str, cache: Path, progress: Progress | None) -> Layout:
    """A dataset of the Hub: its clips, or where it has none the one archive that it holds."""
    match = _HUB.fullmatch(path.removeprefix("hf://datasets/"))
    if match is None:
        raise VideotuneError(
            f"{path} is no Hub dataset. Write hf://datasets/user/name, with @revision for a certain one."
        )
    repo, revision = match["repo"], match["revision"]
    try:
        root = snapshot(repo, revision, (*CLIP_SUFFIXES, ".txt"), METADATA_NAMES)
    except VideotuneError as error:
        local = "" if path.startswith("hf://") else f"There is no folder {path} here, and "
        raise VideotuneError(f"{local}{error}") from error
    origin, name = f"hf://datasets/{repo}@{root.name}", repo.split("/")[-1]
    there = listing(repo, root)
    packed = [file for file in there if file.lower().endswith(ARCHIVE_SUFFIXES)]
    if any(file.lower().endswith(CLIP_SUFFIXES) for file in there):
        files, notes = read_folder(root, within=root.parent.parent)  # links lead to blobs/ beside snapshots/
        return Layout(root, files, [*notes, *_notes_on_hub(repo, there, packed)], origin, name)
    if len(packed) == 1:
        layout = _open_archive(snapshot(repo, root.name, (), packed) / packed[0], cache, progress)
        loose = [f"{repo}: {file} is not used, since the clips are in {packed[0]}" for file in there if _is_text(file)]
        return Layout(layout.root, layout.files, [*layout.notes, *loose], f"{origin}/{packed[0]}", name)
    kinds = Counter(os.path.splitext(file)[1] or "no suffix" for file in there)
    found = ", ".join(f"{count} {suffix}" for suffix, count in kinds.most_common(8)) or "nothing"
    raise VideotuneError(
        f"The Hub dataset {repo} has no video or image files (found {found}), nor one archive of them. Clips within "
        "Parquet files or several archives are not read: save them as files and give their folder."
    )


def _is_text(file: str) -> bool:
    return file.endswith((*METADATA_NAMES, ".txt"))


def _notes_on_hub(repo: str, there: Sequence[str], packed: Sequence[str]) -> list[str]:
    """Archives that stay closed, and clips that their folder's name keeps for tests."""
    notes = [f"{repo}: {len(packed)} archives are not fetched ({packed[0]})"] if packed else []
    tests = [file for file in there if file.lower().endswith(CLIP_SUFFIXES) and file.split("/")[0] in _OTHER_SPLITS]
    if tests:
        notes.append(
            f"{repo}: {len(tests)} clips lie in folders for validation or tests ({tests[0]}) and are used like all others"
        )
    return notes


def _may_be_hub_id(path: str) -> bool:
    """Whether a path that is not there can be meant as user/name of a Hub dataset."""
    if path.lower().endswith(ARCHIVE_SUFFIXES) or path.startswith((".", "~")) or not _HUB.fullmatch(path):
        return False
    return not Path(path.split("/")[0]).exists()  # a slip in a path is no reason to ask the network
