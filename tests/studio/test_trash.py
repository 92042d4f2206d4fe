"""The bin: what is removed can be brought back, and nothing is written over."""

from pathlib import Path

import pytest

from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.studio import trash


def put(path: Path, content: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_an_item_is_listed_and_restored(tmp_path: Path) -> None:
    clip, text = (
        put(tmp_path / "clips/a/b.mp4", "clip"),
        put(tmp_path / "clips/a/b.txt", "a cat"),
    )
    put(tmp_path / "runs/run-1/log", "12345")
    trash.move_to_trash(tmp_path, "clip", "b.mp4", [clip, text])
    trash.move_to_trash(tmp_path, "run", "run-1", [tmp_path / "runs/run-1"])
    assert not clip.exists()
    assert [
        (one.kind, one.title, one.bytes > 4) for one in trash.list_items(tmp_path)
    ] == [
        ("run", "run-1", True),
        ("clip", "b.mp4", True),
    ]
    for item in trash.list_items(tmp_path):
        trash.restore(tmp_path, item.id)
    assert (
        clip.read_text(),
        text.read_text(),
        (tmp_path / "runs/run-1/log").read_text(),
    ) == (
        "clip",
        "a cat",
        "12345",
    )
    assert trash.list_items(tmp_path) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    clip, text = put(tmp_path / "clips/b.mp4", "old"), put(tmp_path / "clips/b.txt")
    item = trash.move_to_trash(tmp_path, "clip", "b.mp4", [clip, text])
    put(text, "another")
    with pytest.raises(VideotuneError, match=r"clips/b\.txt"):
        trash.restore(tmp_path, item)
    assert not clip.exists(), "nothing is moved then"
    text.unlink()
    trash.restore(tmp_path, item)
    assert clip.read_text() == "old"


def test_an_interrupted_move_is_restored(tmp_path: Path) -> None:
    clip, text = (
        put(tmp_path / "clips/b.mp4", "clip"),
        put(tmp_path / "clips/b.txt", "a cat"),
    )
    item = trash.move_to_trash(tmp_path, "clip", "b.mp4", [clip, text])
    (tmp_path / "bin" / item / "1").rename(
        text
    )  # as if the process had ended before the second move
    trash.restore(tmp_path, item)
    assert (clip.read_text(), text.read_text()) == ("clip", "a cat")


def test_an_item_is_deleted_for_good(tmp_path: Path) -> None:
    item = trash.move_to_trash(
        tmp_path, "run", "run-1", [put(tmp_path / "runs/run-1/log").parent]
    )
    trash.delete(tmp_path, item)
    assert trash.list_items(tmp_path) == []
    with pytest.raises(VideotuneError, match="no longer"):
        trash.restore(tmp_path, item)


def test_clips_of_the_former_folders_are_items_too(tmp_path: Path) -> None:
    (
        put(tmp_path / "removed/in/a.mp4"),
        put(tmp_path / "removed/in/a.txt"),
        put(tmp_path / "originals/film.mp4"),
    )
    assert {one.id for one in trash.list_items(tmp_path)} == {
        "removed/in/a.mp4",
        "originals/film.mp4",
    }
    trash.restore(tmp_path, "removed/in/a.mp4")
    trash.delete(tmp_path, "originals/film.mp4")
    assert trash.list_items(tmp_path) == []
    assert {path.name for path in (tmp_path / "clips/in").iterdir()} == {
        "a.mp4",
        "a.txt",
    }


@pytest.mark.parametrize(
    "id", ["../clips", "", ".", "/etc", "removed/../clips/b.mp4", ".hidden", "nothing"]
)
def test_no_id_leads_out_of_the_bin(tmp_path: Path, id: str) -> None:
    clip = put(tmp_path / "clips/b.mp4")
    for act in (trash.restore, trash.delete):
        with pytest.raises(VideotuneError):
            act(tmp_path, id)
    assert clip.exists()


def test_an_item_from_elsewhere_cannot_name_a_place_outside(tmp_path: Path) -> None:
    home = tmp_path / "home"
    put(home / "bin/1/0")
    write_json(
        home / "bin/1/item.json",
        {
            "kind": "clip",
            "title": "x",
            "when": 1.0,
            "bytes": 1,
            "lay": ["../evil.mp4"],
            "id": "1",
        },
    )
    with pytest.raises(VideotuneError, match="not a path"):
        trash.restore(home, "1")
    assert not (tmp_path / "evil.mp4").exists()
