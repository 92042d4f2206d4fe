"""A training repeats no note that was shown within the day, and hides none that was not."""

import json
import time
from pathlib import Path

import pytest

from videotune.job.shown_notes import DAY, FILE, remember, unseen

NOTES = ("no clip is kept aside for checking", "most clips are slower")


def test_only_what_was_shown_within_the_day_is_not_repeated(tmp_path: Path) -> None:
    assert unseen(tmp_path, NOTES) == list(NOTES)
    remember(tmp_path, NOTES[:1])
    assert unseen(tmp_path, NOTES) == [NOTES[1]]
    remember(tmp_path, NOTES[1:])
    assert unseen(tmp_path, NOTES) == []

    times = json.loads((tmp_path / FILE).read_text())
    old = {key: value - DAY - 1 for key, value in times.items()}
    (tmp_path / FILE).write_text(json.dumps(old))
    assert unseen(tmp_path, NOTES) == list(NOTES)


@pytest.mark.parametrize("content", ["{", "[]", '{"a": "b"}', "null"])
def test_a_damaged_file_hides_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert unseen(tmp_path, NOTES) == list(NOTES)
    remember(tmp_path, NOTES)
    assert unseen(tmp_path, NOTES) == []


def test_a_time_to_come_hides_nothing(tmp_path: Path) -> None:
    remember(tmp_path, NOTES)
    times = json.loads((tmp_path / FILE).read_text())
    later = dict.fromkeys(times, time.time() + DAY)
    (tmp_path / FILE).write_text(json.dumps(later))
    assert unseen(tmp_path, NOTES) == list(NOTES)


def test_nothing_is_written_where_there_is_no_cache(tmp_path: Path) -> None:
    remember(tmp_path / "none", NOTES)
    assert not (tmp_path / "none").exists()
