"""Where a dataset comes from: a folder, an archive, or a dataset of the Hub, fetched into the Hub's own cache."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.errors import VideotuneError

from .archives import ARCHIVE_SUFFIXES, Progress, unpack
from .captions import METADATA_NAMES
from .file_checks import ARCHIVES, type_of_file
from .layouts import CLIP_SUFFIXES, ClipFile, read_folder

_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>.+))?")
_OTHER_SPLITS = ("test", "val", "valid", "validation", "dev", "eval")


@dataclass(frozen=True)
class Location:
    """A dataset as it lies on disk: the folder of its files, and notes on it.

    ``origin`` says where it came from, exactly (a Hub dataset with its commit); ``name`` is the same wherever it lies.
    """

    root: Path
    files: list[ClipFile]
    notes: list[str]
    origin: str
    name: str


def open_location(path: str, cache: Path, progress: Progress | None = None) -> Location:
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
    return Location(place, files, notes, str(place), place.absolute().name)


def _open_archive(archive: Path, cache: Path, progress: Progress | None) -> Location:
    folder = unpack(archive, cache, progress)
    files, notes = read_folder(folder)
    suffix = next((suffix for suffix in ARCHIVE_SUFFIXES if archive.name.lower().endswith(suffix)), "")
    name = archive.name[: len(archive.name) - len(suffix)]
    return Location(folder, files, notes, str(archive), name)


def _open_hub(path: str, cache: Path, progress: Progress | None) -> Location:
    """A dataset of the Hub: its clips, or where it has none the one archive that it holds."""
    match = _HUB.fullmatch(path.removeprefix("hf://datasets/"))
    if match is None:
        raise VideotuneError(
            f"{path} is no Hub dataset. Write hf://datasets/user/name, with @revision for a certain one."
        )
    repo, revision = match["repo"], match["revision"]
    try:
        root = _snapshot(repo, revision, (*CLIP_SUFFIXES, ".txt"), METADATA_NAMES)
    except VideotuneError as error:
        local = "" if path.startswith("hf://") else f"There is no folder {path} here, and "
        raise VideotuneError(f"{local}{error}") from error
    origin, name = f"hf://datasets/{repo}@{root.name}", repo.split("/")[-1]
    there = _listing(repo, root)
    packed = [file for file in there if file.lower().endswith(ARCHIVE_SUFFIXES)]
    if any(file.lower().endswith(CLIP_SUFFIXES) for file in there):
        files, notes = read_folder(root, within=root.parent.parent)  # links lead to blobs/ beside snapshots/
        return Location(root, files, [*notes, *_notes_on_hub(repo, there, packed)], origin, name)
    if len(packed) == 1:
        archive = _open_archive(_snapshot(repo, root.name, (), packed) / packed[0], cache, progress)
        loose = [f"{repo}: {file} is not used, since the clips are in {packed[0]}" for file in there if _is_text(file)]
        return Location(archive.root, archive.files, [*archive.notes, *loose], f"{origin}/{packed[0]}", name)
    kinds = Counter(os.path.splitext(file)[1] or "no suffix" for file in there)
    found = ", ".join(f"{count} {suffix}" for suffix, count in kinds.most_common(8)) or "nothing"
    raise VideotuneError(
        f"The Hub dataset {repo} has no video or image files (found {found}), nor one archive of them. Clips within "
        "Parquet files or several archives are not read: save them as files and give their folder."
    )


def _is_text(file: str) -> bool:
    return file.endswith((*METADATA_NAMES, ".txt"))


def _notes_on_hub(repo: str, there: Sequence[str], packed: Sequence[str]) -> list[str]:
    """Archives that stay closed, and clips whose folder's name keeps them for tests."""
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


def _snapshot(repo: str, revision: str | None, suffixes: Sequence[str], names: Sequence[str]) -> Path:
    """The folder of a dataset repository at a revision, with its files of these suffixes (in any case) and names.

    Its last part is the commit. What is not in the Hub's cache is downloaded, unless HF_HUB_OFFLINE is set. VideotuneError
    that names the id, the cause and the remedy.
    """
    from huggingface_hub import snapshot_download

    patterns = [*map(_any_case, suffixes), *names, *(f"*/{name}" for name in names)]
    try:
        return Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's library raises a dozen kinds; each is explained to the user
        raise VideotuneError(_explained(repo, revision, error)) from error


def _listing(repo: str, root: Path) -> list[str]:
    """All files of the repository at a snapshot's commit, if the cache knows them; else those in the snapshot."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return sorted(file.path for file in get_cached_repo_tree(repo, repo_type="dataset", revision=root.name))
    except CachedRepoTreeNotFoundError:  # written by an older version of the hub's library, or by hand
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())


def _any_case(suffix: str) -> str:
    return "*" + "".join(f"[{char}{char.upper()}]" if char.isalpha() else char for char in suffix)


def _explained(repo: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    name = f"the Hub dataset {repo}" + (f" at {revision}" if revision else "")
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms on its page, and set HF_TOKEN to your access token."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{name} does not exist, or is private: check the id; for a private one set HF_TOKEN."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the Hub dataset {repo} has no revision {revision or 'main'}: check what stands behind the @."
    if isinstance(error, errors.IncompleteSnapshotError):
        return f"{name} is only partly in {constants.HF_HUB_CACHE}, and the Hub is not reached: {_network()}."
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{name} is not in {constants.HF_HUB_CACHE}, and the Hub is not reached: {_network()}."
    if isinstance(error, errors.HFValidationError):
        return f"{name} is no id that the Hub knows: {error}. Write user/name."
    return f"{name} could not be fetched: {error}. Check the network, the disk and HF_TOKEN."


def _network() -> str:
    from huggingface_hub import constants

    return "unset HF_HUB_OFFLINE to fetch it" if constants.HF_HUB_OFFLINE else "check the network, then run it again"
