"""What a newcomer stopped at: sizes that read the same, and pages that contradict each
other.
"""

import html
from pathlib import Path
from typing import Any

import pytest

from tests.studio.test_failed_path_browser import add_failed_run
from tests.support.reports import visible_text
from videotune.studio import model_choices, queue_page
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


def test_a_base_model_that_is_not_reached_is_the_same_sentence_everywhere(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    project = add_failed_run(
        tmp_path,
        "base_model_name: me/model is not in /cache/hub, and the Hub is not reached: "
        "check the network. Fetch it where there is a network",
    )
    sentence = (
        "me/model could not be downloaded, because this computer does not reach the "
        "Hugging Face Hub"
    )
    base = f"/p/{project.name}"
    for address in (f"{base}/data", f"{base}/train?run=run-1", "/queue", "/"):
        page = client.get(address).text
        assert sentence in html.unescape(page), address
        first_line = page.partition("<details")[0]
        assert "base_model_name" not in first_line, address


def test_the_bar_at_the_top_has_its_whole_text_as_a_title(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    add_failed_run(tmp_path, "the loss is not finite")
    page = client.get("/queue").text
    title = 'title="A project of a long name: run-1, failed: the loss is not finite"'
    assert title in page
