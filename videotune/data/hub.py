"""Datasets of the Hugging Face Hub: fetched into the Hub's own cache, or found there without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from videotune.errors import VideotuneError


def snapshot(repo: str, revision: str | None, suffixes: Sequence[str], names: Sequence[str]) -> Path:
    """The folder of a dataset repository at a revision, with its files of these suffixes (in any case) and names.

    Its last part is the commit. What is not in the Hub's cache is downloaded, unless HF_HUB_OFFLINE is set. VideotuneError
    that says the id, the cause and the remedy.
    """
    from huggingface_hub import snapshot_download

    patterns = [*map(_any_case, suffixes), *names, *(f"*/{name}" for name in names)]
    try:
        return Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's library raises a dozen kinds; each is told to the person
        raise VideotuneError(_told(repo, revision, error)) from error


def listing(repo: str, root: Path) -> list[str]:
    """All files of the repository at a snapshot's commit, if the cache knows them; else those in the snapshot."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return sorted(file.path for file in get_cached_repo_tree(repo, repo_type="dataset", revision=root.name))
    except CachedRepoTreeNotFoundError:  # written by an older version of the hub's library, or by hand
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())


def _any_case(suffix: str) -> str:
    return "*" + "".join(f"[{char}{char.upper()}]" if char.isalpha() else char for char in suffix)


def _told(repo: str, revision: str | None, error: Exception) -> str:
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
