from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cog_bases(tiny_bases: Callable[..., Path]) -> Callable[[str], Path]:
    """Variant of CogVideoX -> the folder of its tiny checkpoint."""
    return partial(tiny_bases, "cogvideox")
