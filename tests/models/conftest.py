from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cog_bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Variant of CogVideoX -> the folder of its tiny checkpoint, written once."""
    from videotune.models.cogvideox import CogVideoX

    made: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in made:
            made[variant] = CogVideoX.tiny(tmp_path_factory.mktemp("cogvideox") / variant, variant=variant)
        return made[variant]

    return get
