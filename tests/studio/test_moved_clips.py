"""Clips that the page Data has moved: until the next check they have the state of their
new place, and what the last check said of them.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_folders import ended_job
from videotune.files import write_json
from videotune.studio import clip_words, clips, projects
from videotune.studio.clip_row import row_of_check, state_of
from videotune.studio.form import fields

DATA = "/p/cats/data"

CHECKED: dict[str, Any] = {
    "used": True, "held_out": False, "reason": None, "detail": None, "source_seconds": 2.0,
    "source_fps": 12.0, "source_frames": 24, "width": 48, "height": 32, "shape": "9x32x48",
    "windows": 1, "spans": [[0.0, 1.0]], "notes": [], "captions": ["a cat"], "kind": "train",
    "warnings": ["1.0 s of it are black"], "warning_codes": ["black"],
}  # fmt: skip

TOO_SHORT: dict[str, Any] = {
    "used": False,
    "reason": "too_short",
    "detail": "has 3 frames at 16 fps; the smallest window is 5",
    "source_frames": 3,
    "warnings": [],
    "warning_codes": [],
}


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    """Five checked clips: four are used, one is too short."""
    project = projects.create(tmp_path, "Cats", preset="toy")
    for name in "abcde":
        content = b"\0\0\0\x20ftypisom" + name.encode()
        (project.folder / f"clips/{name}.mp4").write_bytes(content)
        (project.folder / f"clips/{name}.txt").write_text("a cat\n")
    time.sleep(0.02)  # the clock of files has coarse steps

    rows = [
        CHECKED | {"path": str(project.folder / f"clips/{name}.mp4")}
        for name in "abcde"
    ]
    rows[0]["warnings"] = rows[1]["warnings"] = []
    rows[2]["start_image"] = str(project.folder / "clips/c.png")
    rows[4] |= TOO_SHORT
    folder = ended_job(project, "check", 0, started=time.time())
    account = {"clips": rows, "notes": [], "note_codes": [], "blockers": []}
    write_json(folder / "out", account)
    return project


def move(client: Any, name: str, to: str, part: str = "clips") -> None:
    form = {"path": f"{part}/{name}.mp4", "to": to}
    assert client.post(f"{DATA}/move", data=form).status_code == 204


def states(project: projects.Project) -> dict[str, str]:
    rows = clips.table(project).rows
    return {path: state_of(row) for path, row in rows.items()}


def test_a_clip_is_kept_aside_at_once_with_its_remarks(
    client: Any, cats: projects.Project
) -> None:
    move(client, "d", "held-out")
    row = clips.table(cats).rows["held-out/d.mp4"]
    assert state_of(row) == "held out"
    assert (row["shape"], row["source_seconds"]) == ("9x32x48", 2.0)
    assert row["warned"] == ["1.0 s of it are black"]

    found = client.get(f"{DATA}/tiles?state=held+out").text
    assert "d.mp4" in found
    assert "are black" in found
    assert "No clip matches" not in found


def test_a_clip_of_before_the_first_check_is_kept_aside_at_once(
    client: Any, tmp_path: Path
) -> None:
    project = projects.create(tmp_path, "Cats", preset="toy")
    (project.folder / "clips/a.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    (project.folder / "clips/a.txt").write_text("a cat\n")
    assert states(project) == {"clips/a.mp4": "new"}
    move(client, "a", "held-out")
    assert states(project) == {"held-out/a.mp4": "held out"}


def test_a_clip_that_a_check_met_between_two_moves_needs_no_caption(
    client: Any, cats: projects.Project
) -> None:
    """The check saw the clip at its new place, and its caption not yet."""
    move(client, "d", "held-out")
    alone = {"used": False, "reason": "missing_caption", "captions": []}
    alone["path"] = str(cats.folder / "held-out/d.mp4")
    time.sleep(0.02)
    folder = ended_job(cats, "check", 0, started=time.time())
    account = {"clips": [CHECKED | alone], "notes": [], "note_codes": []}
    write_json(folder / "out", account | {"blockers": []})

    assert states(cats)["held-out/d.mp4"] == "held out"
    (cats.folder / "held-out/d.txt").unlink()
    assert states(cats)["held-out/d.mp4"] == "without"


@pytest.mark.parametrize("to", ["held-out", "bin"])
def test_counts_after_an_undo_are_those_of_before(
    client: Any, cats: projects.Project, to: str
) -> None:
    before = states(cats)
    move(client, "a", to)
    assert clip_words.count_states(clips.table(cats).rows.values())["used"] == 3
    client.post(f"{DATA}/undo")
    assert states(cats) == before
    assert "4 used" in client.get(DATA).text
    client.post(f"{DATA}/redo")
    assert states(cats) == {
        ("held-out/a.mp4" if path == "clips/a.mp4" else path): (
            "held out" if path == "clips/a.mp4" else state
        )
        for path, state in before.items()
        if to == "held-out" or path != "clips/a.mp4"
    }


def test_a_clip_that_changed_besides_its_move_is_new(
    client: Any, cats: projects.Project
) -> None:
    move(client, "a", "held-out")
    move(client, "a", "clips", part="held-out")
    assert states(cats)["clips/a.mp4"] == "used"
    time.sleep(0.02)
    (cats.folder / "clips/a.mp4").write_bytes(b"\0\0\0\x20ftypisom, another one")
    (cats.folder / "clips/z.txt").write_text("the folder changes, so it is read again")
    assert states(cats)["clips/a.mp4"] == "new"

    (cats.folder / "clips/b.txt").write_text("another caption\n")
    move(client, "b", "held-out")
    row = clips.table(cats).rows["held-out/b.mp4"]
    assert row["why"] == "changed since the last check"
    assert state_of(row) == "held out"


def test_a_start_image_is_no_clip_of_its_own_after_a_move(
    client: Any, cats: projects.Project
) -> None:
    (cats.folder / "clips/c.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert "clips/c.png" not in clips.table(cats).rows
    move(client, "c", "held-out")
    rows = clips.table(cats).rows
    names = [path for path in rows if path.endswith(".png")]
    assert names == []
    (companion,) = rows["held-out/c.mp4"]["companions"]
    assert (cats.folder / companion.path).is_file()


def test_a_count_of_a_state_is_the_length_of_its_list(
    client: Any, cats: projects.Project
) -> None:
    (cats.folder / "clips/f.mp4").write_bytes(b"\0\0\0\x20ftypisom, no caption")
    (cats.folder / "clips/g.mp4").write_bytes(b"\0\0\0\x20ftypisom, new")
    (cats.folder / "clips/g.txt").write_text("a cat\n")
    rows = list(clips.table(cats).rows.values())
    counts = clip_words.count_states(rows)
    assert counts == {"used": 4, "without": 1, "unusable": 1, "new": 1}
    for state, count in counts.items():
        assert len(clips.select(cats, {"state": state})) == count, state


def test_the_hint_on_clips_kept_aside_says_what_is_left_to_do(
    client: Any, cats: projects.Project
) -> None:
    def hint() -> str:
        text = client.get(f"{DATA}/tiles?state=used&aside=1").text
        return text.partition('id="aside-how"')[2].partition("</p>")[0]

    assert "Press “Keep aside” below each clip" in hint()
    move(client, "a", "held-out")
    assert "1 clip is kept aside" in hint()
    move(client, "b", "held-out")
    assert "2 clips are kept aside: enough" in hint()
    assert "Press" not in hint()

    for name in "cd":
        move(client, name, "bin")
    move(client, "b", "bin", part="held-out")
    assert hint() == "", "no clip is left in the list"


def test_a_clip_that_is_too_short_has_its_remedy(
    client: Any, cats: projects.Project
) -> None:
    for address in (f"{DATA}/tiles?state=unusable", f"{DATA}/clip?path=clips/e.mp4"):
        text = client.get(address).text
        assert "Is too short: has 3 frames" in text
        assert "Add a longer clip in its place" in text
        assert "/p/cats/setup#f-video_config.pad_short" in text
    assert 'id="f-video_config.pad_short"' in client.get("/p/cats/setup").text
    assert "Mend or remove 1 clip" in client.get(DATA).text


def test_reasons_that_the_page_has_no_words_for_are_no_codes() -> None:
    row: Any = CHECKED | TOO_SHORT | {"path": "/a.mp4", "reason": "bad_mask"}
    assert row_of_check("/a.mp4", row)["why"].startswith("bad mask: ")


def test_all_remedies_of_reasons_name_settings_of_the_form() -> None:
    keys = {field.key for field in fields()}
    for remedy in clip_words.REMEDY_BY_REASON.values():
        assert remedy.setting in ("", *keys)


@pytest.fixture
def thumbnail(cats: projects.Project) -> str:
    """A picture that shares the caption and the mask of the clip a.mp4."""
    masks = cats.folder / "clips/masks"
    masks.mkdir()
    (masks / "a.mp4").write_bytes(b"\0\0\0\x20ftypisom mask of a")
    (cats.folder / "clips/a.png").write_bytes(b"\x89PNG\r\n\x1a\n a")
    return "clips/a.png"


def test_a_picture_that_is_removed_leaves_the_caption_to_its_video(
    client: Any, cats: projects.Project, thumbnail: str
) -> None:
    """The video lost its caption and its mask."""
    form = {"path": thumbnail, "to": "bin"}
    assert client.post(f"{DATA}/move", data=form).status_code == 204
    assert not (cats.folder / thumbnail).exists()
    row = clips.table(cats).rows["clips/a.mp4"]
    assert row["caption"] == "a cat"
    assert (cats.folder / "clips/masks/a.mp4").is_file()


def test_a_picture_and_its_video_go_to_the_bin_with_their_files(
    client: Any, cats: projects.Project, thumbnail: str
) -> None:
    form = {"path": [thumbnail, "clips/a.mp4"], "to": "bin"}
    assert client.post(f"{DATA}/move", data=form).status_code == 204
    assert not list((cats.folder / "clips").rglob("a.*"))


def test_a_picture_is_kept_aside_with_its_video(
    client: Any, cats: projects.Project, thumbnail: str
) -> None:
    form = {"path": thumbnail, "to": "held-out"}
    assert client.post(f"{DATA}/move", data=form).status_code == 204
    names = {path.name for path in (cats.folder / "held-out").rglob("a.*")}
    assert names == {"a.mp4", "a.png", "a.txt"}
    assert not list((cats.folder / "clips").rglob("a.*"))
