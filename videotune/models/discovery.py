"""Import the modules that define model families, in this package and in other packages."""

import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

ENTRY_POINT_GROUP = "videotune.models"
"""Entry points of this group name the modules of other packages that define families.
"""


@cache
def import_families() -> None:
    """Import every module that may define a family; none of them imports torch."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"videotune.models.{module.name}")
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()
