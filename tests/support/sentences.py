"""What holds for the sentence of every error, in whichever test it is raised."""

import re
from collections.abc import Iterator

import pytest

from videotune.errors import VideotuneError


@pytest.fixture(autouse=True)
def no_error_shows_a_missing_value(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """An error names a file, a key or a reason; "None" would be a name left out."""
    sentences: list[str] = []

    def collect(error: VideotuneError, *arguments: object) -> None:
        ValueError.__init__(error, *arguments)
        sentences.append(str(error))

    monkeypatch.setattr(VideotuneError, "__init__", collect)
    yield
    assert [text for text in sentences if re.search(r"\bNone\b", text)] == []
