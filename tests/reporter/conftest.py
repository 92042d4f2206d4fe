from pathlib import Path

import pytest

from tests.support.reports import full_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return full_run(tmp_path / "my run & more")
