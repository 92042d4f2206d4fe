"""Whether a new run's folder can be written is tried by all its processes at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from videotune.errors import VideotuneError
from videotune.runs.run_dir import refuse_run


def test_processes_that_try_a_folder_at_once_do_not_disturb_each_other(
    tmp_path: Path,
) -> None:
    """Nothing is left of the tries, neither of the folder nor of those above it."""
    run = tmp_path / "runs" / "of today" / "first"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(refuse_run, [run] * 400))
    assert not list(tmp_path.iterdir())


def test_a_try_does_not_remove_what_another_has_made(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ThreadPoolExecutor(8) as pool:
        tries = pool.map(refuse_run, [run] * 400)
        run.mkdir()
        list(tries)
    assert run.is_dir()


@pytest.mark.parametrize("name", ["file", "file/run", "file/of today/run"])
def test_a_folder_below_a_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(VideotuneError, match="file"):
        refuse_run(tmp_path / name)
