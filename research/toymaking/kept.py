"""What a stage keeps on disk so that it can go on after a kill: one file, whole or
absent.
"""

from pathlib import Path
from typing import Any

import torch

from videotune.files import write_whole


def keep(path: Path, state: dict[str, Any]) -> None:
    """Write a stage's state."""
    write_whole(path, lambda aside: torch.save(state, aside))


def kept(path: Path) -> dict[str, Any] | None:
    """The state that was kept, None before the first."""
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state
