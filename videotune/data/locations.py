"""Dataset locations: a folder, an archive, or a dataset of the Hub becomes a folder on
disk.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from videotune.data.archives import ARCHIVE_SUFFIXES, FileProgressFn, silent, unpack
from videotune.data.clip_file import CAPTION_SUFFIX, CLIP_SUFFIXES, ClipFile
from videotune.data.file_checks import ARCHIVES, type_of_file
from videotune.data.layouts import read_folder
from videotune.data.metadata_files import METADATA_NAMES, NO_COLUMNS, Columns
from videotune.data.row_files import ROW_SUFFIXES, read_rows
from videotune.data.shards import shards_of, unpack_clips
from videotune.errors import VideotuneError
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub
from videotune.text import counted_are

ReadClipsFn = Callable[..., tuple[list[ClipFile], list[str]]]
"""``read_folder`` with the settings of a dataset."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>.+))?")
_OTHER_SPLITS = ("test", "val", "valid", "validation", "dev", "eval")


@dataclass(frozen=True)
class Location:
    """A dataset on disk."""

    root: Path
    """Folder of its files."""

    files: list[ClipFile]

    notes: list[str]
    """The first note on a Hub dataset names its commit, so that it can be fetched
    again.
    """

    name: str
    """Name of the dataset, independent of where it is on disk."""


def open_location(
    path: str,
    cache: Path,
    progress: FileProgressFn = silent,
    caption_suffix: str = CAPTION_SUFFIX,
    *,
    frame_folders: bool = False,
    columns: Columns = NO_COLUMNS,
) -> Location:
    """Find the clips of a dataset, after unpacking or downloading it if needed.

    Args:
        path: a folder of clips or of tar files, an archive, a file of rows, or a Hub dataset:
            "hf://datasets/user/name@revision", or "user/name" if no such path exists.
        cache: folder into which an archive is unpacked.
        progress: called while an archive is unpacked.
        caption_suffix: suffix of the caption files.
        frame_folders: a folder of numbered images is one clip.
        columns: the columns of metadata files and files of rows, if the dataset names
            them.

    Raises:
        VideotuneError: if the dataset does not exist or cannot be read.
    """
    read_clips = partial(
        read_folder,
        caption_suffix=caption_suffix,
        frame_folders=frame_folders,
        columns=columns,
    )
    if path.startswith("hf://"):
        return _open_hub(path, cache, progress, caption_suffix, read_clips)

    local_path = Path(path).expanduser()
    if local_path.is_file() and type_of_file(local_path) in ARCHIVES:
        return _open_archive(local_path, cache, progress, read_clips)
    if local_path.is_file() and local_path.suffix.lower() in ROW_SUFFIXES:
        files, notes = read_rows(local_path, columns)
        return Location(local_path.parent, files, notes, name=local_path.stem)
    if not local_path.exists() and may_be_hub_id(path):
        return _open_hub(path, cache, progress, caption_suffix, read_clips)

    shards = shards_of(local_path)
    if shards:
        folder = unpack_clips(shards, cache, caption_suffix, progress)
        files, notes = read_clips(folder)
        return Location(folder, files, notes, name=local_path.absolute().name)

    files, notes = read_clips(local_path)
    return Location(local_path, files, notes, name=local_path.absolute().name)


def _open_archive(
    archive: Path, cache: Path, progress: FileProgressFn, read_clips: ReadClipsFn
) -> Location:
    folder = unpack(archive, cache, progress)
    files, notes = read_clips(folder)

    name = archive.name
    for suffix in ARCHIVE_SUFFIXES:
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
            break
    return Location(folder, files, notes, name)


def _open_hub(
    path: str,
    cache: Path,
    progress: FileProgressFn,
    caption_suffix: str,
    read_clips: ReadClipsFn,
) -> Location:
    """Open a Hub dataset: its clips, or the single archive in it if it has no clips."""
    match = _HUB_ID.fullmatch(path.removeprefix("hf://datasets/"))
    if match is None:
        raise VideotuneError(
            f"{path} is not a Hub dataset. Write hf://datasets/user/name, or "
            "hf://datasets/user/name@revision."
        )

    repo = match["repo"]
    suffixes = (*CLIP_SUFFIXES, caption_suffix)
    try:
        root = _snapshot(
            repo, match["revision"], suffixes=suffixes, names=METADATA_NAMES
        )
    except VideotuneError as error:
        local = (
            "" if path.startswith("hf://") else f"There is no folder {path} here, and "
        )
        raise VideotuneError(f"{local}{error}") from error

    commit_note = f"{path} is hf://datasets/{repo}@{root.name}"
    repo_files = _repo_files(repo, root)
    archives = [file for file in repo_files if file.lower().endswith(ARCHIVE_SUFFIXES)]

    if any(file.lower().endswith(CLIP_SUFFIXES) for file in repo_files):
        # Links in snapshots/ lead to its sibling blobs/.
        files, notes = read_clips(root, root.parent.parent)
        notes = [commit_note, *notes, *_repo_notes(repo, repo_files, archives)]
        return Location(root, files, notes, name=repo.split("/")[-1])

    if len(archives) == 1:
        return _open_hub_archive(
            repo,
            repo_files,
            root=_snapshot(repo, root.name, suffixes=(), names=archives),
            archive_name=archives[0],
            commit_note=commit_note,
            cache=cache,
            progress=progress,
            caption_suffix=caption_suffix,
            read_clips=read_clips,
        )
    raise VideotuneError(_no_clips_message(repo, repo_files))


def _repo_notes(
    repo: str, repo_files: Sequence[str], archives: Sequence[str]
) -> list[str]:
    """Return notes on archives and test splits of a Hub dataset that has clips as
    files.
    """
    notes = []
    if archives:
        notes.append(
            f"{repo}: {len(archives)} archives are not fetched ({archives[0]})"
        )

    clips = [file for file in repo_files if file.lower().endswith(CLIP_SUFFIXES)]
    test_clips = [file for file in clips if file.split("/")[0] in _OTHER_SPLITS]
    if test_clips:
        notes.append(
            f"{repo}: {counted_are(len(test_clips), 'clip')} in test folders ({test_clips[0]}) "
            "and used like all others"
        )
    return notes


def _open_hub_archive(
    repo: str,
    repo_files: Sequence[str],
    *,
    root: Path,
    archive_name: str,
    commit_note: str,
    cache: Path,
    progress: FileProgressFn,
    caption_suffix: str,
    read_clips: ReadClipsFn,
) -> Location:
    """Open the single archive of a Hub dataset; report captions next to it as not used."""
    location = _open_archive(root / archive_name, cache, progress, read_clips)
    text_files = [
        file for file in repo_files if file.endswith((*METADATA_NAMES, caption_suffix))
    ]
    text_notes = [
        f"{repo}: {file} is not used, since the clips are in {archive_name}"
        for file in text_files
    ]
    notes = [f"{commit_note}/{archive_name}", *location.notes, *text_notes]
    return Location(location.root, location.files, notes, name=repo.split("/")[-1])


def _no_clips_message(repo: str, repo_files: Sequence[str]) -> str:
    suffixes = Counter(os.path.splitext(file)[1] or "no suffix" for file in repo_files)
    contents = ", ".join(
        f"{count} {suffix}" for suffix, count in suffixes.most_common(8)
    )
    return (
        f"The Hub dataset {repo} has no video or image files (it has {contents or 'nothing'}) "
        "and not exactly one archive. Save the clips as files and give their folder."
    )


def is_local(path: str) -> bool:
    """Return whether a dataset's path can only be meant as a file or folder."""
    if path.startswith("hf://"):
        return False
    return Path(path).expanduser().exists() or not may_be_hub_id(path)


def may_be_hub_id(path: str) -> bool:
    """Return whether a path that does not exist can be meant as the user/name of a
    dataset.
    """
    is_path = path.lower().endswith(ARCHIVE_SUFFIXES) or path.startswith((".", "~"))
    if is_path or not _HUB_ID.fullmatch(path):
        return False
    # A typo in a path below an existing folder should not cause a network request.
    return not Path(path.split("/")[0]).exists()


def _snapshot(
    repo: str, revision: str | None, *, suffixes: Sequence[str], names: Sequence[str]
) -> Path:
    """Return the folder of a dataset repository's snapshot, named by its commit.

    Files that are not in the Hub's cache are downloaded, unless HF_HUB_OFFLINE is set.

    Args:
        repo: "user/name".
        revision: branch, tag or commit; None is the default branch.
        suffixes: files with these suffixes (in any case) are fetched.
        names: files with these names are fetched, in any folder.

    Raises:
        VideotuneError: with id, cause and remedy.
    """
    patterns = [f"*{_any_case(suffix)}" for suffix in suffixes]
    patterns += names
    patterns += [f"*/{name}" for name in names]
    try:
        folder = hub.snapshot_download(
            repo, repo_type="dataset", revision=revision, allow_patterns=patterns
        )
    except (
        Exception
    ) as error:  # the library raises a dozen types; hub_problem explains each
        raise VideotuneError(
            f"the Hub dataset {hub_problem(repo, error, folder='datasets/')}"
        ) from error
    return Path(folder)


def _any_case(suffix: str) -> str:
    """Return a glob pattern that matches a suffix in any case: ".mp4" -> ".[mM][pP]4"."""
    letters = [f"[{char}{char.upper()}]" if char.isalpha() else char for char in suffix]
    return "".join(letters)


def _repo_files(repo: str, root: Path) -> list[str]:
    """Return all files of the repository at a snapshot's commit, sorted.

    If the cache does not have the list, return the files of the snapshot.
    """
    try:
        tree = hub.get_cached_repo_tree(repo, repo_type="dataset", revision=root.name)
        return sorted(file.path for file in tree)
    except hub.errors.CachedRepoTreeNotFoundError:
        # Written by an older version of the library, or by hand.
        files = [path for path in root.rglob("*") if not path.is_dir()]
        return sorted(path.relative_to(root).as_posix() for path in files)
