from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    """The studio over ``tmp_path``, asked as its own pages ask, without a browser."""
    from starlette.testclient import TestClient

    from videotune.studio.app import make_app

    app, headers = make_app(tmp_path, "127.0.0.1", None), {"HX-Request": "true"}
    with TestClient(app, base_url="http://127.0.0.1:7860", headers=headers) as made:
        yield made
