"""Where a page of the documentation is read: the one place that knows its address."""

from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

PUBLISHED = "Documentation"
"""The name of the site's address in pyproject.toml's ``project.urls``."""


def docs_page(name: str, anchor: str = "") -> str:
    """Return where a user reads a page.

    It is the page of the published site, if ``project.urls`` of pyproject.toml names
    one; else the file, if videotune runs in a clone of its repository; else the page's
    name.

    Args:
        name: file name of the page without its suffix.
        anchor: anchor of a heading.
    """
    fragment = f"#{anchor}" if anchor else ""
    site = _site()
    if site:
        return f"{site.rstrip('/')}/{name}/{fragment}"
    file = Path(__file__).parents[1] / "docs" / f"{name}.md"
    if file.is_file():
        return f"{file}{fragment}"
    return f"the page {name!r} of videotune's documentation (docs/{name}.md in its repository)"


def _site() -> str:
    """Return the address of the published site; empty if there is none."""
    try:
        addresses = metadata("videotune").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    for entry in addresses:
        label, _, address = entry.partition(",")
        if label.strip() == PUBLISHED:
            return str(address.strip())
    return ""
