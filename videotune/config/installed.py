"""Whether a module is that of an installed package, and no file that lies about."""

import importlib.machinery
import importlib.metadata
import json
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from videotune.errors import VideotuneError


def refuse_what_is_not_installed(module: str, key: str) -> None:
    """Raise VideotuneError for a module that no installed package has.

    A file in the current folder, or beside a config, is never imported: what a config
    names must have been installed by the user.

    Args:
        module: its dotted name.
        key: of the config, which names it.
    """
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or not _is_installed(package):
        raise VideotuneError(
            f"{key}: no installed package has a module {package!r}. Install it with pip; files of a folder are not read"
        )


def _is_installed(package: str) -> bool:
    """Return whether a top-level module would be imported from an installed package."""
    distributions = importlib.metadata.packages_distributions().get(package, [])
    if not distributions:
        return False
    origin = _origin(package)
    if origin is None:
        return False
    folders = [*_site_folders(), *_editable_folders(distributions)]
    return any(origin.is_relative_to(folder) for folder in folders)


def _origin(package: str) -> Path | None:
    """Return the file from which Python would import a module, without importing it."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(package, None) if find_spec else None
        if spec is None:
            continue
        if spec.origin and spec.origin not in ("built-in", "frozen", "namespace"):
            return Path(spec.origin).resolve()
        return next(
            (Path(p).resolve() for p in spec.submodule_search_locations or ()), None
        )
    return None


def _site_folders() -> Iterator[Path]:
    """Yield the folders that pip installs into."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    paths += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    for path in paths:
        yield Path(path).resolve()


def _editable_folders(distributions: list[str]) -> Iterator[Path]:
    """Yield the folders of packages that were installed with ``pip install -e``."""
    for name in distributions:
        text = importlib.metadata.distribution(name).read_text("direct_url.json")
        record = json.loads(text) if text else {}
        url = urlsplit(str(record.get("url", "")))
        if record.get("dir_info", {}).get("editable") and url.scheme == "file":
            yield Path(url2pathname(url.path)).resolve()
