"""Keys with one legal value are statements that a config may make: any other value is refused, and the reason is said.

There is none today; ``tests/test_effects_rule.py`` asks for a row here as soon as there is.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.effects.effects_kit import Lab, job_of, pixels
from videotune.config.schema import leaves
from videotune.errors import VideotuneError

OTHERS = {}  # type: ignore[var-annotated]
"""For each such key its legal value and another."""


def refused(lab: Lab, key: str, legal: Any, other: Any) -> None:
    assert len(pixels(job_of(lab, {key: legal}))) == 4
    with pytest.raises(VideotuneError) as caught:
        job_of(lab, {key: other})
    text = str(caught.value)
    assert text.startswith(f"{key}: ")
    assert str(legal) in text
    assert repr(other) in text or json.dumps(other) in text
    assert "\n" not in text


def test_another_value_is_refused_and_the_legal_one_is_named(lab: Lab) -> None:
    assert set(OTHERS) <= set(leaves())
    for key, (legal, other) in OTHERS.items():
        refused(lab, key, legal, other)
