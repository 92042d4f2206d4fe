"""What failed while the cache was filled is named, and only a text encoder without room
makes it be tried again with the encoder's blocks on the host.
"""

import pytest

from tests.support.out_of_memory import OUT_OF_MEMORY
from videotune.data.file_checks import ClipProblem
from videotune.errors import VideotuneError
from videotune.latent_cache.encoder_failures import (
    TextEncoderFull,
    naming_caption,
    naming_window,
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ClipProblem("unreadable", "its sound is gone"), "its sound is gone"),
        (OUT_OF_MEMORY, "use less"),
        (MemoryError(), "use less"),
        (RuntimeError("shapes differ"), "shapes differ"),
    ],
)
def test_a_failure_of_a_window_names_it(error: Exception, words: str) -> None:
    """Also one that the decoder of a file beside the clip raises, which would otherwise
    leave the command without a sentence.
    """
    with (
        pytest.raises(VideotuneError, match=f"^cat.mp4: .*{words}"),
        naming_window("cat.mp4", "use less"),
    ):
        raise error


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, MemoryError()])
def test_a_caption_without_room_is_for_a_second_try(error: Exception) -> None:
    with pytest.raises(TextEncoderFull), naming_caption("a cat"):
        raise error


def test_another_failure_of_a_caption_names_it() -> None:
    with (
        pytest.raises(VideotuneError, match=r"'a cat'.*shapes differ"),
        naming_caption("a cat"),
    ):
        raise RuntimeError("shapes differ")
