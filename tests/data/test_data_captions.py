"""Both layouts, captions read or refused with a code, the trigger word, hints."""

import os
from pathlib import Path

import pytest

from videotune.data.captions import find_clips, lint, read_caption, with_trigger
from videotune.data.probe import ClipProblem
from videotune.errors import VideotuneError


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def listing(root: Path) -> list[tuple[str, str | None]]:
    return [
        (clip.path.relative_to(root).as_posix(), clip.caption and clip.caption.relative_to(root).as_posix())
        for clip in find_clips(root)
    ]


def test_the_guides_layout(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "videos/b.mp4",
        "videos/a.MOV",
        "videos/sub/c.webm",
        "captions/a.txt",
        "captions/sub/c.txt",
        "notes.txt",
    )
    assert listing(tmp_path) == [
        ("videos/a.MOV", "captions/a.txt"),
        ("videos/b.mp4", None),
        ("videos/sub/c.webm", "captions/sub/c.txt"),
    ]
    assert find_clips(tmp_path)[1].expected == tmp_path / "captions" / "b.txt"
    assert find_clips(tmp_path / "videos")[0].caption == tmp_path / "captions" / "a.txt"


def test_side_cars_at_any_depth(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "a.txt", "x/y/b.v2.mkv", "x/y/b.v2.txt", "x/c.avi", "x/readme.md")
    assert listing(tmp_path) == [("a.mp4", "a.txt"), ("x/c.avi", None), ("x/y/b.v2.mkv", "x/y/b.v2.txt")]


def test_hidden_things_are_passed_over(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", ".b.mp4", ".trash/c.mp4", "._a.mp4")
    assert [name for name, _ in listing(tmp_path)] == ["a.mp4"]


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    touch(tmp_path, "real/a.mp4", "set/b.mp4")
    os.symlink(tmp_path / "real", tmp_path / "set" / "linked")
    os.symlink(tmp_path / "set", tmp_path / "set" / "circle")
    assert [name for name, _ in listing(tmp_path / "set")] == ["b.mp4", "linked/a.mp4"]


def test_a_folder_without_videos_says_what_was_there(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", "b.txt", "c.jpg", "d")
    with pytest.raises(VideotuneError, match=r"looked for \.mp4 .* found 2 \.txt, 1 .*, 1 "):
        find_clips(tmp_path)
    with pytest.raises(VideotuneError, match="does not exist"):
        find_clips(tmp_path / "nowhere")
    with pytest.raises(VideotuneError, match="is a file"):
        find_clips(tmp_path / "a.txt")


@pytest.mark.skipif(os.name == "nt", reason="names are always Unicode there")
def test_a_name_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.mp4")).write_text("x")
    with pytest.raises(VideotuneError, match="not valid UTF-8"):
        find_clips(tmp_path)


def test_lines_are_variants(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeff  a cat \r\n\n  eine Kätze, 猫\n \n".encode())
    assert read_caption(file) == ("a cat", "eine Kätze, 猫")


def test_captions_that_are_none(tmp_path: Path) -> None:
    for name, content, reason in [
        ("a", None, "missing_caption"),
        ("b", b" \n\t\n", "empty_caption"),
        ("c", b"\xff\xfea\x00", "undecodable_caption"),
        ("d", "ein Bär".encode("latin-1"), "undecodable_caption"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ClipProblem) as caught:
            read_caption(tmp_path / name)
        assert caught.value.reason == reason


def test_the_trigger_word_comes_once() -> None:
    assert with_trigger("a cat on a roof", "zorble") == "zorble, a cat on a roof"
    assert with_trigger("A Zorble on a roof", "zorble") == "A Zorble on a roof"
    assert with_trigger("zorbles everywhere", "zorble") == "zorble, zorbles everywhere"
    assert with_trigger("a <zorble> sits", "<zorble>") == "a <zorble> sits"
    assert with_trigger("", "zorble") == "zorble"
    assert with_trigger("a cat", None) == "a cat"


def test_hints() -> None:
    assert lint("A person walking through a forest with sunlight filtering through trees") == []
    assert lint("First he sits, then he stands")[0].startswith('the caption tells a sequence ("first", "then")')
    assert lint("the firstborn thenar") == []
    assert "600 words" in lint("word " * 600)[0]
