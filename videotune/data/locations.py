"""Dataset locations: a folder, an archive, or a dataset of the Hub becomes a folder on
disk.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from videotune.data.archives import (
    ARCHIVE_SUFFIXES,
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
from videotune.data.hub_files import (
    fetch_parquet,
    list_repo_files,
    no_clips_message,
    repo_notes,
    snapshot,
)
from videotune.data.layouts import read_folder
from videotune.data.metadata_files import METADATA_NAMES, NO_COLUMNS, Columns
from videotune.data.object_mirror import mirror_dataset
from videotune.data.object_store import is_object_url
from videotune.data.parquet_clips import (
    Shard,
    clip_column_of,
    find_shards,
)
from videotune.data.parquet_clips import read_clips as read_parquet_clips
from videotune.data.parquet_files import PARQUET_SUFFIX
from videotune.data.row_files import ROW_SUFFIXES, read_rows
from videotune.data.shards import shards_of, unpack_clips
from videotune.data.wildcard_files import WILDCARD_FOLDER, WildcardFiles
from videotune.errors import VideotuneError

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
    """The dataset's own folder, if its clips were unpacked into another one, ``root``; None:
    they are the same.
    """

    within: Path | None = None
    """Folder out of which links of the dataset may not lead; None: ``home`` or ``root``. The
    snapshot of a Hub dataset has links into the Hub's cache.
    """

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

    tar_shards = shards_of(local_path)
    if tar_shards:
        folder = unpack_clips(tar_shards, cache, caption_suffix, progress)
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
        within: Parquet files may be links to any file of this folder, but out of it only to
            other Parquet files.
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
        root = snapshot(repo, match["revision"], suffixes=suffixes, names=names)
    except VideotuneError as error:
        local = (
            "" if path.startswith("hf://") else f"There is no folder {path} here, and "
        )
        raise VideotuneError(f"{local}{error}") from error

    commit_note = f"{path} is hf://datasets/{repo}@{root.name}"
    repo_files = list_repo_files(repo, root)
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
        notes = [commit_note, *notes, *repo_notes(repo, repo_files, archives)]
        name = repo.split("/")[-1]
        return Location(root, files, notes, name, within=root.parent.parent)

    if len(archives) == 1:
        return _open_hub_archive(
            repo,
            repo_files,
            root=snapshot(repo, root.name, suffixes=(), names=archives),
            archive_name=archives[0],
            commit_note=commit_note,
            cache=cache,
            progress=progress,
            caption_suffix=caption_suffix,
            read_clips=read_clips,
        )
    raise VideotuneError(no_clips_message(repo, repo_files))


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
    fetch_parquet(repo, root, names)
    repo_cache = root.parent.parent
    location = _open_by_parquet(root, repo_cache, cache, progress, columns)
    if location is None:
        return None
    return replace(location, name=repo.split("/")[-1])


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
