from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import NewPage, Studio, started_studio


@pytest.fixture(scope="module")
def browser_studio(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Studio, NewPage]]:
    """One studio and one browser for the tests of a file, each with a project and a page
    of its own. Starting the two takes longer than most tests.
    """
    with started_studio(tmp_path_factory.mktemp("studio")) as (studio, new_page):
        yield studio, new_page


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    """The studio over ``tmp_path``, asked as its own pages ask, without a browser."""
    from starlette.testclient import TestClient

    from videotune.studio.app import make_app

    app, headers = make_app(tmp_path, "127.0.0.1", None), {"HX-Request": "true"}
    with TestClient(app, base_url="http://127.0.0.1:7860", headers=headers) as made:
        yield made


@pytest.fixture
def visitor(tmp_path: Path) -> Iterator[Any]:
    """Somebody on another computer who came in with the password."""
    from starlette.testclient import TestClient

    from videotune.studio.app import make_app

    app, headers = make_app(tmp_path, "0.0.0.0", "a password"), {"HX-Request": "true"}
    with TestClient(app, base_url="http://studio:7860", headers=headers) as made:
        answer = made.post(
            "/login", data={"username": "studio", "password": "a password"}
        )
        assert answer.status_code == 200
        yield made
