"""Caption files that no clip uses are reported, with where they belong."""

import re
from pathlib import Path

import pytest

from videotune.config.data_schema import Dataset
from videotune.data.layouts import read_folder
from videotune.data.remarks import code_of, shown_first

ELSEWHERE = "captions_elsewhere"
WITHOUT_CLIP = "captions_without_clip"


@pytest.mark.parametrize(
    ("files", "code", "words"),
    [
        (
            "a.mp4 b.mp4 captions/a.txt captions/b.txt",
            ELSEWHERE,
            "move captions/a.txt to a.txt, and the others alike",
        ),
        ("clips/a.mp4 texts/a.txt", ELSEWHERE, "move texts/a.txt to clips/a.txt"),
        ("videos/a.mp4 a.txt", ELSEWHERE, "move a.txt to captions/a.txt"),
        ("videos/a.mp4 caption/a.TXT", ELSEWHERE, "move caption/a.TXT to captions"),
        ("a.mp4 a.mp4.txt", ELSEWHERE, "rename a.mp4.txt to a.txt"),
        ("a.mp4 a.caption", ELSEWHERE, "--set datasets.caption_extension=.caption"),
        ("a.mp4 b.mp4 a.caption b.txt", ELSEWHERE, "end with .txt: rename it"),
        ("a.mp4 b.mp4 a.txt c.txt", WITHOUT_CLIP, "no clip of the same name: c.txt"),
        ("a.mp4 b.mp4 c.mp4 d.mp4 a.txt old.txt", WITHOUT_CLIP, "same name: old.txt"),
        ("a.mp4 b.mp4 a_x.txt b_x.txt", WITHOUT_CLIP, "a_x.txt, b_x.txt"),
        ("videos/a.mp4 captions/a_x.txt", WITHOUT_CLIP, "captions/a_x.txt"),
        (
            "kitten_b.mp4 c.mp4 d.mp4 e.mp4 kiten_b.txt",
            WITHOUT_CLIP,
            "kiten_b.txt (nearly kitten_b)",
        ),
        ("horse_01.mp4 horse_02.mp4 horse_14.txt", WITHOUT_CLIP, "horse_14.txt"),
        ("a.mp4 b.mp4 c.mp4 IMG_42.txt", WITHOUT_CLIP, "same name: IMG_42.txt"),
        ("a.mp4 b.mp4 a.txt c.heic c.txt", "unread_media", "first c.heic"),
        ("videos/a.mp4 images/c.avif captions/c.txt", "unread_media", ".avif (1)"),
    ],
)
def test_a_caption_that_no_clip_uses_is_reported(
    tmp_path: Path, files: str, code: str, words: str
) -> None:
    (note,) = _notes(tmp_path, files)
    assert code_of(note) == code
    assert words in note
    others = ["one", "two", "three"]
    assert note in shown_first([*others, note]), "it is told without --verbose"


@pytest.mark.parametrize(
    "files",
    [
        "a.mp4 a.txt",
        "a.mp4 README.txt",
        "a.mp4 a.txt README.txt LICENSE.txt",
        "a.mp4 b.mp4 c.mp4 README.txt",
        "videos/a.mp4 captions/a.txt README.txt",
        "one/a.mp4 two/a.mp4 texts/a.txt",
        "a.mp4 a.txt texts/a.txt",
        "videos/a.mp4 notes/horse.txt",
    ],
)
def test_other_text_files_are_not_taken_for_captions(
    tmp_path: Path, files: str
) -> None:
    assert _notes(tmp_path, files) == []


def test_the_setting_that_is_advised_reads_the_captions(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"x")
    (tmp_path / "a.caption").write_text("a ball")
    _, (note,) = read_folder(tmp_path)
    setting = re.search(r"--set datasets\.(\w+)=(\S+)", note)
    assert setting is not None

    dataset = Dataset.model_validate({"path": str(tmp_path), setting[1]: setting[2]})
    clips, notes = read_folder(tmp_path, caption_suffix=dataset.caption_extension)
    assert clips[0].caption_file == tmp_path / "a.caption"
    assert notes == []


def _notes(folder: Path, files: str) -> list[str]:
    """Return the notes on a folder with these files."""
    for name in files.split():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return read_folder(folder)[1]
