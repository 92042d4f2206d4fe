"""Give every Python process of a command the stand-in card: a folder for PYTHONPATH."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]

AT_START = """
from importlib import import_module

from tests.simcuda import card
from tests.simcuda.child import LIBRARIES

for library in LIBRARIES:
    import_module(library)
card.enable()
"""
"""What Python imports before anything else. Some libraries look for a real card's kernels
when they are imported, and come first.
"""


def environment_with_card(folder: Path) -> dict[str, str]:
    """Return the environment of such processes; ``folder`` is made."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(AT_START, encoding="utf-8")
    return {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        # bitsandbytes would compile its kernels for half a minute
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
