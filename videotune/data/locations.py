"""Where a dataset comes from: a folder, an archive, or a dataset of the Hub, fetched into the Hub's own cache."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.data.archives import ARCHIVE_SUFFIXES, FileProgressFn, silent, unpack
from videotune.data.captions import METADATA_NAMES
from videotune.data.file_checks import ARCHIVES, type_of_file
from videotune.data.layouts import CLIP_SUFFIXES, ClipFile, read_folder
from videotune.errors import VideotuneError
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub

_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>.+))?")
_OTHER_SPLITS = ("test", "val", "valid", "validation", "dev", "eval")


@dataclass(frozen=True)
class Location:
    """A dataset as it lies on disk: the folder of its files, and notes on it.

    ``name`` is the same wherever it lies. The first note on a Hub dataset says its commit, so that it can be had again.
    """

    root: Path
    files: list[ClipFile]
    notes: list[str]
    name: str


def open_location(path: str, cache: Path, progress: FileProgressFn = silent) -> Location:
    """The clips of a folder, of an archive (unpacked into ``cache``), or of a Hub dataset: "user/name" where no such path
    exists, or "hf://datasets/user/name@revision". VideotuneError where there is none or it cannot be read.
    """
    if path.startswith("hf://"):
        return _open_hub(path, cache, progress)
    place = Path(path).expanduser()
    if place.is_file() and type_of_file(place) in ARCHIVES:
        return _open_archive(place, cache, progress)
    if not place.exists() and _may_be_hub_id(path):
        return _open_hub(path, cache, progress)
    files, notes = read_folder(place)
    return Location(place, files, notes, place.absolute().name)


def _open_archive(archive: Path, cache: Path, progress: FileProgressFn) -> Location:
    folder = unpack(archive, cache, progress)
    files, notes = read_folder(folder)
    suffix = next(
        (suffix for suffix in ARCHIVE_SUFFIXES if archive.name.lower().endswith(suffix)), ""
    )
    return Location(folder, files, notes, archive.name[: len(archive.name) - len(suffix)])


def _open_hub(path: str, cache: Path, progress: FileProgressFn) -> Location:
    """A dataset of the Hub: its clips, or where it has none the one archive that it holds."""
    match = _HUB.fullmatch(path.removeprefix("hf://datasets/"))
    if match is None:
        raise VideotuneError(
            f"{path} is no Hub dataset. Write hf://datasets/user/name, or …/name@revision."
        )
    repo = match["repo"]
    revision = match["revision"]
    try:
        root = _snapshot(repo, revision, (*CLIP_SUFFIXES, ".txt"), METADATA_NAMES)
    except VideotuneError as error:
        local = "" if path.startswith("hf://") else f"There is no folder {path} here, and "
        raise VideotuneError(f"{local}{error}") from error
    note = f"{path} is hf://datasets/{repo}@{root.name}"
    name = repo.split("/")[-1]
    listed = _listing(repo, root)
    packed = [file for file in listed if file.lower().endswith(ARCHIVE_SUFFIXES)]
    media = [file for file in listed if file.lower().endswith(CLIP_SUFFIXES)]
    if media:
        files, notes = read_folder(
            root, within=root.parent.parent
        )  # links lead to blobs/ beside snapshots/
        if packed:
            notes.append(f"{repo}: {len(packed)} archives are not fetched ({packed[0]})")
        tests = [file for file in media if file.split("/")[0] in _OTHER_SPLITS]
        if tests:
            notes.append(
                f"{repo}: {len(tests)} clips of test folders ({tests[0]}) are used like all others"
            )
        return Location(root, files, [note, *notes], name)
    if len(packed) == 1:
        archive = _open_archive(
            _snapshot(repo, root.name, (), packed) / packed[0], cache, progress
        )
        texts = [file for file in listed if file.endswith((*METADATA_NAMES, ".txt"))]
        notes = [
            f"{repo}: {file} is not used, since the clips are in {packed[0]}" for file in texts
        ]
        return Location(
            archive.root, archive.files, [f"{note}/{packed[0]}", *archive.notes, *notes], name
        )
    kinds = Counter(os.path.splitext(file)[1] or "no suffix" for file in listed)
    has = ", ".join(f"{count} {suffix}" for suffix, count in kinds.most_common(8)) or "nothing"
    what = f"no video or image files (it has {has}), nor one archive of them"
    raise VideotuneError(
        f"The Hub dataset {repo} has {what}. Save the clips as files and give their folder."
    )


def _may_be_hub_id(path: str) -> bool:
    """Whether a path that is not there can be meant as user/name of a Hub dataset."""
    if (
        path.lower().endswith(ARCHIVE_SUFFIXES)
        or path.startswith((".", "~"))
        or not _HUB.fullmatch(path)
    ):
        return False
    return not Path(
        path.split("/")[0]
    ).exists()  # a slip in a path is no reason to ask the network


def _snapshot(
    repo: str, revision: str | None, suffixes: Sequence[str], names: Sequence[str]
) -> Path:
    """The folder of a dataset repository at a revision, with its files of these suffixes (in any case) and names.

    Its last part is the commit. What is not in the Hub's cache is downloaded, unless HF_HUB_OFFLINE is set. VideotuneError
    that names the id, the cause and the remedy.
    """
    cases = (
        "".join(f"[{x}{x.upper()}]" if x.isalpha() else x for x in suffix)
        for suffix in suffixes
    )  # any case
    patterns = [*(f"*{suffix}" for suffix in cases), *names, *(f"*/{name}" for name in names)]
    try:
        return Path(
            hub.snapshot_download(
                repo, repo_type="dataset", revision=revision, allow_patterns=patterns
            )
        )
    except (
        Exception
    ) as error:  # the hub's library raises a dozen kinds; each is explained to the user
        raise VideotuneError(
            f"the Hub dataset {hub_problem(repo, error, folder='datasets/')}"
        ) from error


def _listing(repo: str, root: Path) -> list[str]:
    """All files of the repository at a snapshot's commit, if the cache knows them; else those in the snapshot."""
    try:
        return sorted(
            file.path
            for file in hub.get_cached_repo_tree(repo, repo_type="dataset", revision=root.name)
        )
    except (
        hub.errors.CachedRepoTreeNotFoundError
    ):  # written by an older version of the hub's library, or by hand
        return sorted(
            path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()
        )
