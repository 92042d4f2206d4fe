"""The dialog that chooses a folder: what each user sees, and how much of it."""

import html
import os
from pathlib import Path
from typing import Any

import pytest

from videotune.errors import VideotuneError
from videotune.studio import folders_page, projects
from videotune.studio.folders_page import list_folder
from videotune.studio.paths import PathRule


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A studio's folder with a project, and links that lead out of it and nowhere."""
    project = projects.create(tmp_path, "Cats", preset="toy").folder
    (project / "clips/a.mp4").write_bytes(b"x" * 2_000_000)
    (project / "clips/more").mkdir()
    (project / "out").symlink_to("/etc")
    (project / "passwd").symlink_to("/etc/passwd")
    (project / "loop").symlink_to("loop")
    (project / "gone").symlink_to("nothing")
    (project / "inner").symlink_to("clips")
    (tmp_path / ".queue").mkdir(exist_ok=True)
    return tmp_path


def names(rule: PathRule, path: Path | str, **how: Any) -> list[str]:
    return [entry.name for entry in list_folder(rule, str(path), **how).entries]


def test_a_visitor_sees_only_what_is_below_the_root(root: Path) -> None:
    rule = PathRule(root, is_restricted=True)
    assert list_folder(rule, "").folder == root.resolve()
    assert names(rule, root) == ["cats"]
    inside = names(rule, root / "cats", with_files=True)
    assert {"clips", "inner", "project.json"} <= set(inside)
    assert not {"out", "passwd", "loop", "gone"} & set(inside)
    assert list_folder(rule, str(root / "cats")).above == (root,)
    assert folders_page.known_folders(rule) == {"Projects": root.resolve()}
    linked = list_folder(rule, str(root / "cats/inner"))
    assert linked.folder == (root / "cats/clips").resolve(), "a link within is followed"


@pytest.mark.parametrize(
    "path",
    ["/", "/etc", "~", "{root}/..", "{root}/cats/out", "{root}/cats/loop", "a\0b"],
)
def test_a_visitor_is_refused_elsewhere(root: Path, path: str) -> None:
    rule = PathRule(root, is_restricted=True)
    with pytest.raises(VideotuneError, match="the folder"):
        list_folder(rule, path.format(root=root))


def test_a_visitor_sees_nothing_hidden(root: Path) -> None:
    listing = list_folder(PathRule(root, is_restricted=True), str(root / ".queue"))
    assert listing.folder == root.resolve()


def test_the_user_of_the_computer_sees_what_the_studio_can_read(root: Path) -> None:
    rule = PathRule(root, is_restricted=False)
    assert "out" in names(rule, root / "cats")
    assert list_folder(rule, "/").above == ()
    assert list_folder(rule, "").folder == Path.home()
    assert list_folder(rule, "Wan-AI/Wan2.1").folder == Path.home(), "a name of the Hub"
    nearest = list_folder(rule, str(root / "cats/no/such"))
    assert (nearest.folder, bool(nearest.note)) == ((root / "cats").resolve(), True)
    of_file = list_folder(rule, str(root / "cats/clips/a.mp4"), with_files=True)
    assert (of_file.folder, of_file.note) == ((root / "cats/clips").resolve(), "")
    assert [entry.name for entry in of_file.entries] == ["more", "a.mp4"]


@pytest.mark.parametrize("is_restricted", [False, True])
def test_the_dialog_may_begin_in_the_project(root: Path, is_restricted: bool) -> None:
    rule = PathRule(root, is_restricted=is_restricted)
    project = root / "cats"
    for text, folder in (
        ("", project),
        ("clips/a.mp4", project / "clips"),
        (str(root), root),
    ):
        listing = list_folder(rule, text, start=str(project), with_files=True)
        assert (listing.folder, listing.note) == (folder.resolve(), "")
    if is_restricted:
        with pytest.raises(VideotuneError, match="the folder"):
            list_folder(rule, "", start="/etc")


def test_the_start_image_is_looked_for_in_the_project(client: Any, root: Path) -> None:
    text = html.unescape(client.get("/p/cats/setup").text)
    assert f'data-kind="file" data-start="{root / "cats"}"' in text


def test_what_cannot_be_read_is_said(root: Path) -> None:
    closed = root / "closed"
    closed.mkdir(mode=0o000)
    if os.access(closed, os.R_OK):
        closed.rmdir()
        pytest.skip("this user may read everything")
    with pytest.raises(VideotuneError, match="cannot be read"):
        list_folder(PathRule(root, is_restricted=False), str(closed))


def test_a_folder_of_many_entries_is_bounded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders_page, "MAX_SHOWN", 5)
    monkeypatch.setattr(folders_page, "MAX_READ", 30)
    many = root / "many"
    for number in range(40):
        (many / f"f{number:02d}").mkdir(parents=True)
    rule = PathRule(root, is_restricted=False)
    listing = list_folder(rule, str(many))
    assert (len(listing.entries), listing.count, listing.is_cut) == (5, 30, True)
    few = list_folder(rule, str(many), search="F0")
    assert few.count <= 10
    assert all("f0" in entry.name for entry in few.entries)


def test_the_dialog_is_the_same_rule(client: Any, visitor: Any, root: Path) -> None:
    local = client.get("/folders", params={"path": "/etc"}).text
    assert 'data-path="/etc"' in local
    refused = visitor.get("/folders", params={"path": "/etc"})
    assert refused.status_code == 200
    assert 'role="alert"' in refused.text
    assert "folder-here" not in refused.text
    assert f'data-folder="{root}"' in refused.text, "it offers what may be seen"
    inside = visitor.get(
        "/folders", params={"path": str(root / "cats"), "kind": "file"}
    ).text
    assert 'data-folder="' in inside
    assert "/etc" not in inside


def test_names_are_escaped(client: Any, root: Path) -> None:
    (root / 'cats/<b onclick="x">').mkdir()
    assert (
        "<b onclick"
        not in client.get("/folders", params={"path": str(root / "cats")}).text
    )
