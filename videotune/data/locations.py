"""Dataset locations: a folder, an archive, or a dataset of the Hub becomes a folder on
disk.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from videotune.data.archives import (
    ARCHIVE_SUFFIXES,
    RESERVE,
    FileProgressFn,
    silent,
    unpack,
)
from videotune.data.clip_file import (
    CAPTION_SUFFIX,
    CLIP_SUFFIXES,
    ClipFile,
    has_clip_files,
)
from videotune.data.companion_files import DEFAULT_COMPANIONS, CompanionSettings
from videotune.data.file_checks import ARCHIVES, type_of_file
from videotune.data.folder_walk import walk_folders
from videotune.data.layouts import read_folder
from videotune.data.metadata_files import METADATA_NAMES, NO_COLUMNS, Columns
from videotune.data.object_mirror import mirror_dataset
from videotune.data.object_store import is_object_url
from videotune.data.parquet_clips import (
    OTHER_SPLITS,
    Shard,
    clip_column_of,
    find_shards,
    is_other_split,
)
from videotune.data.parquet_clips import read_clips as read_parquet_clips
from videotune.data.parquet_files import PARQUET_SUFFIX
from videotune.data.row_files import ROW_SUFFIXES, read_rows
from videotune.data.shards import shards_of, unpack_clips
from videotune.data.wildcard_files import WILDCARD_FOLDER, WildcardFiles
from videotune.errors import VideotuneError
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub
from videotune.text import counted_are

ReadClipsFn = Callable[..., tuple[Sequence[ClipFile], list[str]]]
"""``read_folder`` with the settings of a dataset."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>.+))?")


@dataclass(frozen=True)
class Location:
    """A dataset on disk."""

    root: Path
    """Folder of its files."""

    files: Sequence[ClipFile]

    notes: list[str]
    """The first note on a Hub dataset names its commit, so that it can be fetched
    again.
    """

    name: str
    """Name of the dataset, independent of where it is on disk."""

    home: Path | None = None
    """Folder of a dataset that is unpacked elsewhere; None: ``root``."""

    within: Path | None = None
    """Folder to which links of the dataset may lead; None: ``home`` or ``root``."""

    @cached_property
    def wildcards(self) -> WildcardFiles:
        """The files of wildcards."""
        home = self.home or self.root
        return WildcardFiles(home, self.within or home)


def open_location(
    path: str,
    cache: Path,
    progress: FileProgressFn = silent,
    caption_suffix: str = CAPTION_SUFFIX,
    *,
    frame_folders: bool = False,
    columns: Columns = NO_COLUMNS,
    companions: CompanionSettings = DEFAULT_COMPANIONS,
) -> Location:
    """Find the clips of a dataset, after unpacking or downloading it if needed.

    Args:
        path: a folder of clips, tar files or Parquet files, an archive, a file of rows, a Hub dataset
            ("hf://datasets/user/name@revision", or "user/name" if no such path exists), or a folder or
            archive of an object store ("s3://bucket/folder").
        cache: folder into which an archive is unpacked.
        progress: called while an archive is unpacked.
        caption_suffix: suffix of the caption files.
        frame_folders: a folder of numbered images is one clip.
        columns: the columns of metadata files and files of rows, if the dataset names
            them.
        companions: which files belong to clips and are no clips themselves.

    Raises:
        VideotuneError: if the dataset does not exist or cannot be read.
    """
    read_clips = partial(
        read_folder,
        caption_suffix=caption_suffix,
        frame_folders=frame_folders,
        columns=columns,
        companions=companions,
    )
    if path.startswith("hf://"):
        return _open_hub(path, cache, progress, caption_suffix, read_clips, columns)

    if is_object_url(path):
        mirror = mirror_dataset(path, caption_suffix, columns, progress)
        mirrored = open_location(
            str(mirror.path),
            cache,
            progress,
            caption_suffix,
            frame_folders=frame_folders,
            columns=columns,
            companions=companions,
        )
        return replace(mirrored, notes=[*mirror.notes, *mirrored.notes])

    local_path = Path(path).expanduser()
    if local_path.is_file() and type_of_file(local_path) in ARCHIVES:
        return _open_archive(local_path, cache, progress, read_clips)
    if local_path.is_file() and local_path.suffix.lower() in ROW_SUFFIXES:
        return _open_rows(local_path, cache, progress, columns)
    if not local_path.exists() and may_be_hub_id(path):
        return _open_hub(path, cache, progress, caption_suffix, read_clips, columns)

    shards = shards_of(local_path)
    if shards:
        folder = unpack_clips(shards, cache, caption_suffix, progress)
        files, notes = read_clips(folder)
        name = local_path.absolute().name
        return Location(folder, files, notes, name, home=local_path)

    location = _open_by_parquet(local_path, local_path, cache, progress, columns)
    if location is not None:
        return location
    files, notes = read_clips(local_path)
    return Location(local_path, files, notes, name=local_path.absolute().name)


def _open_rows(
    path: Path, cache: Path, progress: FileProgressFn, columns: Columns
) -> Location:
    """Open a file of rows: paths of clips, or the clips themselves."""
    is_parquet = path.suffix.lower() == PARQUET_SUFFIX
    if is_parquet and clip_column_of(path, columns) is not None:
        shards = [Shard(path, path.name)]
        root, files, notes = read_parquet_clips(shards, cache, columns, progress)
        return Location(root, files, notes, name=path.stem, home=path.parent)
    files, notes = read_rows(path, columns)
    return Location(path.parent, files, notes, name=path.stem)


def _open_by_parquet(
    folder: Path,
    within: Path,
    cache: Path,
    progress: FileProgressFn,
    columns: Columns,
) -> Location | None:
    """Open a folder by its Parquet files, if they hold its clips or list them; None if
    its clips are its own files, as in most datasets.

    Args:
        folder: the dataset's folder.
        within: Parquet files that are links may lead out of this folder only to other
            Parquet files.
        cache: folder into which clips are unpacked.
        progress: called while they are unpacked.
        columns: the columns that the dataset names.
    """
    if not folder.is_dir():
        return None

    # If the folder has clips, its Parquet files count only if the dataset names their
    # columns and there is no metadata file.
    has_clips = has_clip_files(folder)
    lists_clips = columns != NO_COLUMNS and not _has_metadata(folder)
    if has_clips and not lists_clips:
        return None

    shards, notes = find_shards(folder, within)
    if not shards:
        return None
    if has_clips:
        return _clips_listed_by_parquet(folder, within, shards, notes, columns)
    if all(clip_column_of(shard.path, columns) is None for shard in shards):
        return None
    root, files, clip_notes = read_parquet_clips(shards, cache, columns, progress)
    name = folder.absolute().name
    all_notes = [*notes, *clip_notes]
    return Location(root, files, all_notes, name, home=folder, within=within)


def _clips_listed_by_parquet(
    folder: Path,
    within: Path,
    shards: Sequence[Shard],
    notes: list[str],
    columns: Columns,
) -> Location:
    """Open a folder whose clips are files of their own, one in each row.

    Raises:
        VideotuneError: if two rows name one clip.
    """
    clips: dict[Path, ClipFile] = {}
    for shard in shards:
        files, row_notes = read_rows(shard.path, columns, folder)
        notes += row_notes
        for file in files:
            if file.path in clips:
                raise VideotuneError(
                    f"{file.path} is listed by {clips[file.path].metadata_row} and by "
                    f"{file.metadata_row}. Keep one row per clip."
                )
            clips[file.path] = file
    name = folder.absolute().name
    return Location(folder, list(clips.values()), notes, name, within=within)


def _has_metadata(folder: Path) -> bool:
    """Return whether a folder has a metadata file, at any depth."""
    return any(
        not set(METADATA_NAMES).isdisjoint(names) for _, names in walk_folders(folder)
    )


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
    columns: Columns,
) -> Location:
    """Open a Hub dataset: its clips, or if it has none the single archive or the Parquet
    files in it.
    """
    match = _HUB_ID.fullmatch(path.removeprefix("hf://datasets/"))
    if match is None:
        raise VideotuneError(
            f"{path} is not a Hub dataset. Write hf://datasets/user/name, or "
            "hf://datasets/user/name@revision."
        )

    repo = match["repo"]
    suffixes = (*CLIP_SUFFIXES, caption_suffix)
    names = (*METADATA_NAMES, f"{WILDCARD_FOLDER}/*.txt")
    try:
        root = _snapshot(repo, match["revision"], suffixes=suffixes, names=names)
    except VideotuneError as error:
        local = (
            "" if path.startswith("hf://") else f"There is no folder {path} here, and "
        )
        raise VideotuneError(f"{local}{error}") from error

    commit_note = f"{path} is hf://datasets/{repo}@{root.name}"
    repo_files = _repo_files(repo, root)
    archives = [file for file in repo_files if file.lower().endswith(ARCHIVE_SUFFIXES)]

    has_clips = any(file.lower().endswith(CLIP_SUFFIXES) for file in repo_files)

    lists_clips = has_clips and columns != NO_COLUMNS and not _has_metadata(root)
    if lists_clips or not (has_clips or archives):
        location = _open_hub_parquet(repo, repo_files, root, cache, progress, columns)
        if location is not None:
            return replace(location, notes=[commit_note, *location.notes])

    if has_clips:
        # Links in snapshots/ lead to its sibling blobs/.
        files, notes = read_clips(root, root.parent.parent)
        notes = [commit_note, *notes, *_repo_notes(repo, repo_files, archives)]
        name = repo.split("/")[-1]
        return Location(root, files, notes, name, within=root.parent.parent)

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


def _open_hub_parquet(
    repo: str,
    repo_files: Sequence[str],
    root: Path,
    cache: Path,
    progress: FileProgressFn,
    columns: Columns,
) -> Location | None:
    """Open the Parquet files of a Hub dataset; None if it has none of clips."""
    names = [file for file in repo_files if file.lower().endswith(PARQUET_SUFFIX)]
    if not names:
        return None
    _fetch_parquet(repo, root, names)
    repo_cache = root.parent.parent
    location = _open_by_parquet(root, repo_cache, cache, progress, columns)
    if location is None:
        return None
    return replace(location, name=repo.split("/")[-1])


def _fetch_parquet(repo: str, root: Path, names: Sequence[str]) -> None:
    """Download the Parquet files of a Hub dataset, those of training if it has splits.

    Raises:
        VideotuneError: if they do not fit on the disk.
    """
    train_names = [name for name in names if not is_other_split(name)] or list(names)
    missing_bytes = sum(
        size
        for name, size in _repo_sizes(repo, root).items()
        if name in train_names and not (root / name).exists()
    )
    free_bytes = max(0, shutil.disk_usage(root).free - RESERVE)
    if missing_bytes > free_bytes:
        raise VideotuneError(
            f"The Hub dataset {repo} has {missing_bytes / 1e9:.1f} GB of Parquet files to download, and "
            f"{free_bytes / 1e9:.1f} GB are free on the disk of {root}. Free some space, or download "
            "some of the files and give their folder."
        )
    _snapshot(repo, root.name, suffixes=(), names=train_names)


def _repo_sizes(repo: str, root: Path) -> dict[str, int]:
    """Return the bytes of the files of a repository, as far as they are known."""
    try:
        tree = hub.get_cached_repo_tree(repo, repo_type="dataset", revision=root.name)
    except hub.errors.CachedRepoTreeNotFoundError:
        return {}
    return {file.path: file.size or 0 for file in tree}


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
    test_clips = [file for file in clips if file.split("/")[0] in OTHER_SPLITS]
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
        f"The Hub dataset {repo} has no video or image files (it has {contents or 'nothing'}), "
        "not exactly one archive, and no Parquet files that hold clips. Save the clips as files "
        "and give their folder."
    )


def is_local(path: str) -> bool:
    """Return whether a dataset's path can only be meant as a file or folder."""
    if path.startswith("hf://") or is_object_url(path):
        return False
    return Path(path).expanduser().exists() or not may_be_hub_id(path)


def may_be_hub_id(path: str) -> bool:
    """Return whether a path that does not exist can be meant as the user/name of a
    dataset.
    """
    suffixes = (*ARCHIVE_SUFFIXES, *ROW_SUFFIXES)
    is_path = path.lower().endswith(suffixes) or path.startswith((".", "~"))
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
    letters = [
        f"[{char.lower()}{char.upper()}]" if char.isalpha() else char for char in suffix
    ]
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
