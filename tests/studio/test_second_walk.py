"""What a newcomer stopped at: sizes that read the same, and pages that contradict each
other.
"""

from typing import Any

import pytest

from tests.support.reports import visible_text
from videotune.studio import model_choices
from videotune.studio.model_choices import ChosenCard


@pytest.mark.parametrize("gigabytes", [0.0, 16.0, 24.0, 80.0])
def test_other_sizes_say_what_tells_them_apart(gigabytes: float) -> None:
    card = ChosenCard("x", gigabytes) if gigabytes else ChosenCard()
    for family in model_choices.families_for(card):
        for size in family.others:
            difference = family.difference(size)
            says_what = "instead of" in difference or "weights" in difference
            assert says_what, size.preset


def test_new_project_names_the_preset_of_each_size(client: Any) -> None:
    listed = visible_text(client.get("/models", params={"card": "RTX 4090"}).text)
    for preset in model_choices.presets():
        assert preset in listed
