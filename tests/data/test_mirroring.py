"""Captions that a mirrored picture would contradict."""

import pytest

from videotune.data.mirroring import word_against_mirroring


@pytest.mark.parametrize(
    ("caption", "word"),
    [
        ("a cat walks to the left", "left"),
        ("Right-handed guitarist", "Right"),
        ("turning counterclockwise", "counterclockwise"),
        ("a shop with a neon sign", "sign"),
        ("a shirt with the number 7", "number"),
        ("the wall says “OPEN”", "“OPEN”"),
        ("a bright cleft signal on a bookshelf", ""),
        ("zorble, red, blue", ""),
        ("", ""),
    ],
)
def test_sides_and_writing_forbid_it(caption: str, word: str) -> None:
    assert word_against_mirroring([caption]) == word
    assert word_against_mirroring(["a cat", caption]) == word


def test_hostile_captions_take_no_time() -> None:
    assert word_against_mirroring(['"' * 200_000 + "“" * 200_000]) == ""
