from collections.abc import Callable
from typing import Any

import pytest

from tests.support.sentences import no_error_shows_a_missing_value

__all__ = ["family", "no_error_shows_a_missing_value"]


@pytest.fixture
def family(tiny_family: Callable[..., Any]) -> Any:
    return tiny_family("wan")
