"""Clips of other folders: the page says what they lack, and that it is mended there."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_clip
from tests.support.command_line import Printed, run
from tests.support.job_folders import ended_job
from tests.support.reports import visible_text
from tests.support.waiting import wait_until
from videotune.studio import clips, projects
from videotune.studio.project_plan import plan_question
from videotune.studio.projects import Project

DATA = "/p/cats/data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clip, one that is broken, one without a caption, and a caption of no clip."""
    folder = tmp_path / "holiday"
    folder.mkdir()
    write_clip(folder / "one.mp4", noise(24))
    write_clip(folder / "bare.mp4", noise(36))
    (folder / "broken.mp4").write_bytes(b"\0\0\0\x20ftypisom" + b"\0" * 64)
    for name in ("one", "broken", "toyship"):
        (folder / f"{name}.txt").write_text("a cat\n")
    return folder


@pytest.fixture
def cats(tmp_path: Path, folder: Path) -> Project:
    project = projects.create(tmp_path, "Cats", preset="toy")
    return projects.update(project, sources=[{"path": str(folder)}])


def check(project: Project, printed: Printed) -> None:
    """Write what a check of the project finds, as the studio's own job does."""
    printed.readouterr()
    run("check", "--json", *projects.command_arguments(project))
    job = ended_job(project, "check", 0, started=time.time())
    (job / "out").write_text(printed.readouterr().out)


def path_bar(client: Any) -> str:
    page = client.get(DATA).text
    return visible_text(page.partition('<nav class="path"')[2].partition("</nav>")[0])


def test_the_page_says_which_clips_of_another_folder_stop_a_training(
    client: Any, cats: Project, capsys: Printed
) -> None:
    check(cats, capsys)
    rows = clips.table(cats).rows.values()
    names = [row["name"] for row in rows]
    assert names == ["holiday/bare.mp4", "holiday/broken.mp4", "holiday/one.mp4"]

    page = client.get(DATA).text
    assert "This part cannot be shown" not in page
    notice = page.partition('id="outside"')[2].partition("</div>")[0]
    assert "2 clips of other folders" in notice
    assert "holiday/broken.mp4" in notice
    assert "holiday/bare.mp4" in notice
    assert "Leave out 1 clip" in path_bar(client)
    assert 'href="/p/cats/data#outside"' in page

    plan = client.get("/p/cats/setup").text
    unusable = plan.partition('id="unusable"')[2].partition("</div>")[0]
    assert "Leave them out" in unusable
    assert "Remove" not in unusable, "the studio removes no file of another folder"


def test_clips_that_are_left_out_stop_nothing(
    client: Any, cats: Project, capsys: Printed
) -> None:
    check(cats, capsys)
    assert client.post(f"{DATA}/leave-out").status_code == 204
    assert 'id="outside"' not in client.get(DATA).text
    assert "missing" not in path_bar(client)


def test_missing_captions_of_another_folder_stand_in_the_path(
    client: Any, cats: Project, folder: Path, capsys: Printed
) -> None:
    (folder / "broken.mp4").unlink()
    check(cats, capsys)
    bar = path_bar(client)
    assert "1 of 2 missing, in other folders" in bar
    assert "Leave out 1 clip" in bar

    (folder / "bare.txt").write_text("a dog\n")
    check(cats, capsys)
    assert "come with the datasets" in path_bar(client)


def test_a_set_of_other_folders_is_checked_on_another_folder(
    client: Any, cats: Project, folder: Path, capsys: Printed
) -> None:
    """No clip of them can be kept aside by hand."""
    for name in ("bare", "broken"):
        (folder / f"{name}.mp4").unlink()
    check(cats, capsys)
    note = client.get(DATA).text.partition('id="note-none_held_out"')[2]
    remedy = note.partition("</div>")[0]
    assert 'data-open="sources"' in remedy
    assert "aside=1" not in remedy
    assert "Keep aside" not in visible_text(remedy)


def test_a_stray_caption_of_another_folder_is_named(
    client: Any, cats: Project, capsys: Printed
) -> None:
    check(cats, capsys)
    page = client.get(DATA).text
    note = page.partition('id="note-captions_without_clip"')[2].partition("</div>")[0]
    assert "toyship.txt" in note
    assert "<button" not in note, "the studio removes no file of another folder"


def test_no_address_of_the_page_changes_or_breaks_at_a_clip_of_another_folder(
    client: Any, cats: Project, folder: Path, capsys: Printed
) -> None:
    check(cats, capsys)
    before = {
        path.name: path.read_bytes() for path in folder.glob("*.*") if path.is_file()
    }
    path = str(folder / "one.mp4")
    assert client.get(f"{DATA}/clip", params={"path": path}).status_code == 200
    forms: list[tuple[str, dict[str, Any]]] = [
        ("caption", {"path": path, "text": "a dog", "was": "a cat"}),
        ("move", {"path": path, "to": "bin"}),
        ("move", {"path": path, "to": "held-out"}),
        ("cut", {"path": path}),
        ("use-text", {"path": str(folder / "toyship.txt")}),
        ("remove-text", {"path": str(folder / "toyship.txt")}),
        ("captions", {"find": "cat", "replace": "dog"}),
    ]
    for address, form in forms:
        answer = client.post(f"{DATA}/{address}", data=form)
        assert answer.status_code < 500, address
    assert {
        path.name: path.read_bytes() for path in folder.glob("*.*") if path.is_file()
    } == before


def test_a_folder_that_is_not_there_is_named_and_can_be_left_out(
    client: Any, cats: Project, folder: Path, capsys: Printed
) -> None:
    """Its clips counted as used, and the way out stood on no page."""
    check(cats, capsys)
    folder.rename(folder.with_name("moved"))

    page = client.get(DATA).text
    notice = page.partition('id="missing-sources"')[2].partition("</div>")[0]
    assert str(folder) in notice
    assert "Leave out holiday" in notice
    assert not clips.table(cats).rows, "clips that are not there are not used"
    assert "1 folder not there" in path_bar(client)
    assert 'href="/p/cats/data#missing-sources"' in page
    assert not clips.start_check(cats), "it would fail"

    form = {"path": str(folder), "drop": "1"}
    assert client.post(f"{DATA}/source", data=form).status_code == 204
    assert 'id="missing-sources"' not in client.get(DATA).text


def test_a_folder_that_is_there_again_is_used_as_before(
    client: Any, cats: Project, folder: Path, capsys: Printed
) -> None:
    check(cats, capsys)
    moved = folder.rename(folder.with_name("moved"))
    assert not clips.table(cats).rows
    moved.rename(folder)
    assert len(clips.table(cats).rows) == 3
    assert 'id="missing-sources"' not in client.get(DATA).text


def test_other_folders_are_checked_again_by_a_button(
    client: Any, cats: Project, folder: Path, capsys: Printed
) -> None:
    """The page said "mend them there" and never looked there again."""
    check(cats, capsys)
    assert 'hx-post="/p/cats/data/check"' in client.get(DATA).text
    question = plan_question(cats, "plan")

    for name in ("bare", "broken"):
        (folder / f"{name}.mp4").unlink()
    assert client.post(f"{DATA}/check").status_code == 204
    wait_until(lambda: len(clips.table(cats).rows) == 1)
    assert plan_question(cats, "plan") != question, "a plan of other clips"


def test_an_edit_of_captions_says_which_it_does_not_change(
    client: Any, cats: Project, capsys: Printed
) -> None:
    """Those of other folders are read, and stay as they are."""
    write_clip(cats.folder / "clips/own.mp4", noise(30))
    (cats.folder / "clips/own.txt").write_text("a cat\n")
    check(cats, capsys)
    words = {"how": "add", "word": "ohwx", "all": "1"}
    shown = visible_text(client.get(f"{DATA}/captions", params=words).text)
    assert "1 caption will change" in shown
    assert "1 caption of other folders or lists stays as it is" in shown
    words |= {"how": "replace", "word": "dog", "to": "cat"}
    shown = client.get(f"{DATA}/captions", params=words).text
    assert "edit-fixed" not in shown, "it would change none of them"
