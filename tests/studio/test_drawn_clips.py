"""Clips that the check keeps aside by itself: the page says why, and they can be taken back."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_folders import ended_job
from videotune.files import write_json
from videotune.studio import clip_row, clips, projects
from videotune.studio.projects import Project

DATA = "/p/cats/data"
REASON = "Kept aside by itself"
DRAWN = ("b", "c", "d")


def checked_row(path: Path, *, held_out: bool) -> dict[str, Any]:
    return {
        "path": str(path), "used": not held_out, "held_out": held_out, "reason": None, "detail": None,
        "source_seconds": 2.0, "captions": ["a cat"], "warnings": [], "notes": [],
    }  # fmt: skip


@pytest.fixture
def cats(tmp_path: Path) -> Project:
    """Five clips, of which the last check has kept three aside."""
    project = projects.create(tmp_path, "Cats", preset="toy")
    rows = []
    for name in "abcde":
        path = project.folder / f"clips/{name}.mp4"
        path.write_bytes(b"\0\0\0\x20ftypisom" + name.encode())
        path.with_suffix(".txt").write_text("a cat\n")
        rows.append(checked_row(path, held_out=name in DRAWN))
    folder = ended_job(project, "check", 0, started=time.time() + 60)
    write_json(folder / "out", {"clips": rows, "notes": [], "blockers": []})
    return project


def names_aside(project: Project) -> set[str]:
    rows = clips.table(project).rows.values()
    return {
        Path(row["name"]).stem for row in rows if clip_row.state_of(row) == "held out"
    }


def names_in(project: Project, part: str) -> set[str]:
    return {path.stem for path in (project.folder / part).glob("*.mp4")}


def train_on(client: Any, *names: str) -> Any:
    data = {"to": "clips", "path": [f"clips/{name}.mp4" for name in names]}
    return client.post(f"{DATA}/move", data=data)


def test_its_card_and_the_player_say_why_and_have_the_button(
    client: Any, cats: Project
) -> None:
    tiles = client.get(DATA).text.split('<article class="tile clip"')[1:]
    for tile, name in zip(tiles, "abcde", strict=True):
        assert (REASON in tile) == (name in DRAWN)
        assert (f'aria-label="Train on {name}.mp4 again"' in tile) == (name in DRAWN)
        assert (f'aria-label="Keep {name}.mp4 aside' in tile) == (name not in DRAWN)
        player = client.get(f"{DATA}/clip", params={"path": f"clips/{name}.mp4"}).text
        assert (REASON in player) == (name in DRAWN)
        assert ('data-act="clips"' in player) == (name in DRAWN)


def test_one_is_taken_back_and_the_others_stay_aside(
    client: Any, cats: Project
) -> None:
    answer = train_on(client, "c")
    assert answer.status_code == 204
    assert "2 other clips" in answer.headers["HX-Trigger"]
    assert names_in(cats, "held-out") == names_aside(cats) == {"b", "d"}
    assert "c" in names_in(cats, "clips")
    assert REASON not in client.get(DATA).text, "the others are kept aside by hand"

    assert client.post(f"{DATA}/undo").status_code == 204
    assert names_in(cats, "held-out") == set()
    assert names_aside(cats) == set(DRAWN)


def test_several_are_taken_back_and_not_all_of_them(client: Any, cats: Project) -> None:
    answer = train_on(client, *DRAWN)
    assert answer.status_code == 422
    assert "validation_fraction" in answer.headers["HX-Trigger"]
    assert names_in(cats, "held-out") == set()

    assert train_on(client, "a", "b", "c").status_code == 204
    assert names_aside(cats) == {"d"}


def test_none_is_drawn_as_soon_as_the_user_keeps_one_aside(
    client: Any, cats: Project
) -> None:
    client.post(f"{DATA}/move", data={"to": "held-out", "path": "clips/a.mp4"})
    assert names_aside(cats) == {"a"}
    assert client.post(f"{DATA}/undo").status_code == 204
    assert names_aside(cats) == set(DRAWN)
