from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def family(tiny_family: Callable[..., Any]) -> Any:
    return tiny_family("wan")
