"""What ``videotune check`` prints, draws and returns."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from clips import noise, numbered, read_numbers, write_clip
from PIL import Image

from videotune.families.find import find
from videotune.run.check import check
from videotune.run.job import Words

SETS = ("resolution=64x96", "video_config.frames=9")


def words(data: Path, base: Path, *sets: str) -> Words:
    return Words(data=str(data), sets=(f"base_model_name={base}", *SETS, *sets))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, frames in (("a", numbered(40)), ("b", noise(20, seed=2)), ("short", noise(3, seed=3))):
        write_clip(tmp_path / "data" / f"{name}.mp4", frames, 16).with_suffix(".txt").write_text(f"the clip {name}")
    return tmp_path / "data"


def test_the_row_of_a_clip(
    data: Path, tiny_bases: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    assert check(words(data, tiny_bases("wan"))) == 2
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "a.mp4" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells[:8] == ["a.mp4", "used", "40 @ 16 = 2.50 s", "96x64", "40", "9x64x96", "4", "36 (4 cut)"]
    assert "found 3 = used 2 + held out 0 + skipped 1;  6 windows in 1 buckets" in out
    monkeypatch.setenv("COLUMNS", "80")
    assert check(words(data, tiny_bases("wan")), allow_skips="1") == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines()[1:8])) <= 80
    assert "short.mp4: has 3 frames at 16 fps" in narrow


def test_captions_that_the_model_cuts_are_said(
    data: Path, tiny_bases: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_bases("wan")
    long = "word " * 300
    (data / "a.txt").write_text(long)
    lengths = find("wan").token_lengths(base, [long.strip(), "short"])
    assert lengths is not None
    check(words(data, base), as_json=True)
    rows = {Path(row["path"]).stem: row for row in json.loads(capsys.readouterr().out)["clips"]}
    assert f"a caption has {lengths[0]} tokens; the model reads 512, the rest is cut" in rows["a"]["warnings"]
    assert not any("tokens" in warning for warning in rows["b"]["warnings"])


def test_tokens_are_counted_as_the_pipeline_does(
    tiny_family: Callable[..., object], tiny_bases: Callable[[str], Path]
) -> None:
    captions = ["a cat", "  two   spaces &amp; an entity &lt;3 ", "ﬁne “quotes” …", "", "word " * 700]
    family = tiny_family("wan")
    assert find("wan").token_lengths(tiny_bases("wan"), captions) == [family.text_length(c) for c in captions]  # type: ignore[attr-defined]


def test_a_base_without_a_fast_tokenizer_is_said(
    data: Path, tiny_bases: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = shutil.copytree(tiny_bases("wan"), tmp_path / "base")
    (base / "tokenizer" / "tokenizer.json").unlink()
    check(words(data, base))
    assert "captions were not counted in tokens: it has no tokenizer.json" in capsys.readouterr().out
    check(Words(family="wan", data=str(data), sets=SETS))
    assert "captions were not counted in tokens: no base model is named" in capsys.readouterr().out


def test_the_contact_sheet_shows_what_is_trained(data: Path, tiny_bases: Callable[[str], Path], tmp_path: Path) -> None:
    """The clip's frames carry their numbers: windows of 9 begin at 0, 9, 18 and 27."""
    sheet = tmp_path / "sheet"
    assert check(words(data, tiny_bases("wan")), contact_sheet=sheet, allow_skips="all") == 0
    pictures = sorted((sheet / "clips").iterdir())
    assert len(pictures) == 6
    page = (sheet / "index.html").read_text(encoding="utf-8")
    assert all(f"clips/{path.name}" in page for path in pictures)
    assert "skipped: too_short" in page
    import numpy as np

    read = {}
    for path in pictures:
        read.setdefault(path.name.rsplit("-", 1)[0], {})[path.stem.rsplit("-", 1)[1]] = np.asarray(Image.open(path))
    numbers = [[read_numbers(shots[k][None])[0] for k in ("first", "middle", "last")] for shots in read.values()]
    assert [0, 22, 35] in numbers
    with Image.open(sheet / "sheet-001.jpg") as image:
        assert image.height > 2 * 160
