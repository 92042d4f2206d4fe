"""Keys with one legal value are statements that a config may make: any other value is refused, and the reason is said."""

from __future__ import annotations

import json

import pytest
from effects_kit import Lab, job_of, pixels

from videotune.errors import VideotuneError

OTHERS = {
    "transformer.train": (True, False),
    "text_encoder.train": (False, True),
}


@pytest.mark.parametrize("key", OTHERS)
def test_another_value_is_refused_and_the_legal_one_is_named(lab: Lab, key: str) -> None:
    legal, other = OTHERS[key]
    assert len(pixels(job_of(lab, {key: legal}))) == 4
    with pytest.raises(VideotuneError) as caught:
        job_of(lab, {key: other})
    text = str(caught.value)
    assert text.startswith(f"{key}: ")
    assert str(legal) in text
    assert repr(other) in text or json.dumps(other) in text
    assert "\n" not in text
