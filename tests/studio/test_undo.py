"""Undo and redo on the page Data: the last action is taken back, and nothing that was
typed is lost.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from videotune.errors import VideotuneError
from videotune.studio import captions_edit, clip_history, clips, projects, trash, undo

MP4 = b"\0\0\0\x20ftypisom" + b"\0" * 64
DATA = "/p/my-cats/data"


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    """A project of three files that are named like clips, without captions."""
    project = projects.create(tmp_path, "My cats", preset="toy")
    for number, name in enumerate(("cat", "kitten", "painter")):
        (project.folder / "clips" / f"{name}.mp4").write_bytes(MP4 + bytes([number]))
    return project


def captions(project: projects.Project) -> dict[str, str]:
    return {row["name"]: row["caption"] for row in clips.table(project).rows.values()}


def write(client: Any, name: str, text: str, was: str = "") -> None:
    fields = {"path": f"clips/{name}.mp4", "was": was, "text": text}
    assert client.post(f"{DATA}/caption", data=fields).status_code == 204


def buttons(client: Any) -> dict[str, tuple[str, str]]:
    """The words and the batch of the page's Undo and Redo."""
    page = client.get(DATA).text
    pattern = (
        r'<button[^>]*id="(undo|redo)"[^>]*hx-vals="([^"]*)"[^>]*>.*?<span>(.*?)</span>'
    )
    shown = re.findall(pattern, page, re.DOTALL)
    return {
        kind: (words, json.loads(html.unescape(values))["batch"])
        for kind, values, words in shown
    }


def press(client: Any, kind: str) -> str:
    """Press Undo or Redo as the page shows it; return the message."""
    _, batch = buttons(client)[kind]
    return message(client.post(f"{DATA}/{kind}", data={"batch": batch}))


def message(answer: Any) -> str:
    return str(json.loads(answer.headers["HX-Trigger"])["toast"]["words"])


def test_the_undo_after_a_removal_brings_the_clip_back_and_keeps_all_captions(
    client: Any, cats: projects.Project
) -> None:
    write(client, "kitten", "a kitten")
    write(client, "painter", "a painter")
    before = captions(cats)
    answer = client.post(f"{DATA}/move", data={"path": "clips/kitten.mp4", "to": "bin"})
    assert buttons(client)["undo"][0] == "Undo removal of kitten.mp4"

    assert press(client, "undo") == "kitten.mp4 is back"
    assert captions(cats) == before
    assert trash.list_items(cats.folder) == []

    assert buttons(client)["redo"][0] == "Redo removal of kitten.mp4"
    assert press(client, "redo") == "kitten.mp4 is in the bin again"
    assert "kitten.mp4" not in captions(cats)

    action = json.loads(answer.headers["HX-Trigger"])["toast"]["action"]
    assert action["words"] == "Undo"
    assert client.post(action["post"], data=action["values"]).status_code == 204
    assert captions(cats) == before, "the button of the message takes it back too"


def test_a_text_that_undo_takes_away_comes_back(
    client: Any, cats: projects.Project
) -> None:
    write(client, "cat", "a cat")
    write(client, "painter", "a painter")
    assert buttons(client)["undo"][0] == "Undo caption of painter.mp4"
    assert "redo" not in buttons(client)

    assert press(client, "undo") == "The caption of painter.mp4 is empty again"
    assert press(client, "undo") == "The caption of cat.mp4 is empty again"
    assert set(captions(cats).values()) == {""}

    assert buttons(client)["redo"][0] == "Redo caption of cat.mp4"
    assert press(client, "redo") == "The caption of cat.mp4 is written again"
    assert press(client, "redo") == "The caption of painter.mp4 is written again"
    assert captions(cats)["painter.mp4"] == "a painter"

    write(client, "painter", "he paints", was="a painter")
    assert press(client, "undo") == "The caption of painter.mp4 is as before"
    write(client, "cat", "the cat", was="a cat")
    assert "redo" not in buttons(client), "something else was done since"
    shown = client.get(f"{DATA}/clip", params={"path": "clips/painter.mp4"}).text
    assert "he paints" in shown, "the earlier captions of the clip still have it"


def test_what_was_redone_keeps_its_name(client: Any, cats: projects.Project) -> None:
    write(client, "cat", "a cat")
    press(client, "undo")
    press(client, "redo")
    name, _ = buttons(client)["undo"]
    assert name == "Undo caption of cat.mp4"


def test_a_second_press_of_the_same_button_takes_nothing_else_away(
    client: Any, cats: projects.Project
) -> None:
    write(client, "cat", "a cat")
    write(client, "painter", "a painter")
    _, batch = buttons(client)["undo"]
    assert client.post(f"{DATA}/undo", data={"batch": batch}).status_code == 204
    assert client.post(f"{DATA}/undo", data={"batch": batch}).status_code == 422
    assert captions(cats)["cat.mp4"] == "a cat"


def test_clips_kept_aside_are_trained_on_again(
    client: Any, cats: projects.Project
) -> None:
    write(client, "cat", "a cat")
    paths = ["clips/cat.mp4", "clips/kitten.mp4"]
    client.post(f"{DATA}/move", data={"path": paths, "to": "held-out"})
    assert buttons(client)["undo"][0] == "Undo keeping 2 clips aside"
    assert press(client, "undo") == "2 clips are back"
    assert (cats.folder / "clips/cat.txt").read_text() == "a cat\n"
    assert press(client, "redo") == "2 clips are moved again"
    assert set(clips.table(cats).rows) == {
        "held-out/cat.mp4",
        "held-out/kitten.mp4",
        "clips/painter.mp4",
    }


def test_a_removal_that_was_restored_or_deleted_in_the_bin_is_passed_over(
    client: Any, cats: projects.Project
) -> None:
    write(client, "cat", "a cat")
    for act in ("restore", "destroy"):
        client.post(f"{DATA}/move", data={"path": "clips/painter.mp4", "to": "bin"})
        item = trash.list_items(cats.folder)[0].id
        client.post(f"{DATA}/bin/{act}", data={"id": item})
        assert buttons(client)["undo"][0] == "Undo caption of cat.mp4"
        assert ("redo" in buttons(client)) == (act == "restore")


def test_many_captions_are_counted(client: Any, cats: projects.Project) -> None:
    write(client, "cat", "a cat")
    write(client, "painter", "a painter")
    edit = {"all": "1", "how": "add", "word": "ohwx"}
    assert message(client.post(f"{DATA}/captions", data=edit)) == "2 captions changed"
    assert buttons(client)["undo"][0] == "Undo trigger word of 2 clips"
    captions_edit.change(cats, {"clips/cat.mp4": "another text"}, "elsewhere")
    assert press(client, "undo") == "The caption of cat.mp4 is as before"
    (cats.folder / "clips/cat.txt").write_text("by another program\n")
    assert press(client, "undo") == (
        "The caption of painter.mp4 is as before; "
        "1 caption was changed since then and stayed"
    )
    assert press(client, "redo").startswith("The caption of painter.mp4 is written")


def test_a_history_from_elsewhere_moves_nothing_outside(cats: projects.Project) -> None:
    outside = cats.folder.parent / "evil.mp4"
    for target in ("../evil.mp4", "clips/..", str(outside)):
        clip_history.record_move(
            cats,
            {
                "batch": clip_history.new_batch(),
                "kind": "clip",
                "names": ["cat.mp4"],
                "files": [target],
                "targets": ["clips/cat.mp4"],
                "item": "",
            },
        )
        with pytest.raises(VideotuneError):
            undo.undo(cats)
    assert not outside.exists()
    assert (cats.folder / "clips/cat.mp4").exists()
