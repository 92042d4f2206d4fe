"""What is said of a folder that is taken for a run and is none."""

from pathlib import Path

import pytest

from videotune.errors import VideotuneError
from videotune.runs.run_dir import read_run_config


@pytest.mark.parametrize(
    ("name", "names", "says_no"),
    [
        ("runs/tyo", ["runs/toy"], ["runs/other"]),
        ("runs", ["runs/toy", "runs/other"], []),
        ("nothing", [], ["runs/toy"]),
        ("clips", [], ["runs/toy"]),
    ],
)
def test_a_folder_that_holds_no_run_names_those_that_may_be_meant(
    tmp_path: Path, name: str, names: list[str], says_no: list[str]
) -> None:
    for folder in ("runs/toy", "runs/other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "clips").mkdir()
    with pytest.raises(VideotuneError) as caught:
        read_run_config(tmp_path / name)
    assert all(str(tmp_path / meant) in str(caught.value) for meant in names)
    assert not any(str(tmp_path / other) in str(caught.value) for other in says_no)
