from pathlib import Path

import pytest

from tests.reporter.report_kit import full_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return full_run(tmp_path / "my run & more")
