"""The files of a dataset of the Hub: which it has, and those that are fetched."""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from videotune.data.archives import (
    RESERVE,
)
from videotune.data.clip_file import (
    CLIP_SUFFIXES,
)
from videotune.data.parquet_clips import (
    OTHER_SPLITS,
    is_other_split,
)
from videotune.errors import VideotuneError
from videotune.http_limits import limited_hub
from videotune.hub_errors import hub_problem, is_unreached
from videotune.lazy import huggingface_hub as hub
from videotune.text import counted_are


def fetch_parquet(repo: str, root: Path, names: Sequence[str]) -> None:
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
    snapshot(repo, root.name, suffixes=(), names=train_names)


def _repo_sizes(repo: str, root: Path) -> dict[str, int]:
    """Return the bytes of the files of a repository, as far as they are known."""
    try:
        tree = hub.get_cached_repo_tree(repo, repo_type="dataset", revision=root.name)
    except hub.errors.CachedRepoTreeNotFoundError:
        return {}
    return {file.path: file.size or 0 for file in tree}


def repo_notes(
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


def no_clips_message(repo: str, repo_files: Sequence[str]) -> str:
    """Describe what a Hub dataset without clips contains, with a remedy."""
    suffixes = Counter(os.path.splitext(file)[1] or "no suffix" for file in repo_files)
    contents = ", ".join(
        f"{count} {suffix}" for suffix, count in suffixes.most_common(8)
    )
    return (
        f"The Hub dataset {repo} has no video or image files (it has {contents or 'nothing'}), "
        "not exactly one archive, and no Parquet files that hold clips. Save the clips as files "
        "and give their folder."
    )


def snapshot(
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
            repo,
            repo_type="dataset",
            revision=revision,
            allow_patterns=patterns,
            local_files_only=not _answers(repo, revision),
        )
    except (
        Exception
    ) as error:  # the library raises a dozen types; hub_problem explains each
        raise VideotuneError(
            f"the Hub dataset {hub_problem(repo, error, folder='datasets/')}"
        ) from error
    return Path(folder)


def _answers(repo: str, revision: str | None) -> bool:
    """Return whether the Hub answers what is asked of a dataset; also if it is not to be
    asked, which the library finds out.
    """
    if hub.constants.HF_HUB_OFFLINE:
        return True
    try:
        with limited_hub():
            hub.HfApi().dataset_info(repo, revision=revision)
    except Exception as error:
        if not is_unreached(error):
            raise
        return False
    return True


def _any_case(suffix: str) -> str:
    """Return a glob pattern that matches a suffix in any case: ".mp4" -> ".[mM][pP]4"."""
    letters = [
        f"[{char.lower()}{char.upper()}]" if char.isalpha() else char for char in suffix
    ]
    return "".join(letters)


def list_repo_files(repo: str, root: Path) -> list[str]:
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
