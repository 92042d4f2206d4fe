"""The base models that the Hub's folder of this computer has."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from huggingface_hub import CacheNotFound, constants, scan_cache_dir


@dataclass(frozen=True)
class DownloadedModel:
    """A repository of the Hub that is on this computer."""

    name: str
    size: int


@lru_cache(maxsize=1)
def _scan(folder: Path, changed: int) -> tuple[DownloadedModel, ...]:
    """Return the models below the Hub's folder, as of ``changed``, the largest first."""
    try:
        repos = scan_cache_dir(folder).repos
    except CacheNotFound:
        return ()
    models = [
        DownloadedModel(repo.repo_id, repo.size_on_disk)
        for repo in repos
        if repo.repo_type == "model"
    ]
    return tuple(sorted(models, key=lambda model: -model.size))


def downloaded_models() -> tuple[DownloadedModel, ...]:
    """Return the base models that need no download."""
    folder = Path(constants.HF_HUB_CACHE)
    if not folder.is_dir():
        return ()
    return _scan(folder, folder.stat().st_mtime_ns)
