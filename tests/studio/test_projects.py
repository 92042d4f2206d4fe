"""Projects, what is sent to them, and paths that cannot leave them."""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from videotune.errors import VideotuneError
from videotune.studio import projects, trash, uploads


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    return projects.create(tmp_path, "My cats")


def sent(folder: Path, name: str, content: bytes) -> Path:
    path = folder / uploads.UPLOADS / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


MP4 = b"\0\0\0\x20ftypisom" + b"\0" * 64


def test_a_project_is_made_listed_renamed_and_put_aside(
    tmp_path: Path, cats: projects.Project, client: Any
) -> None:
    other = projects.create(tmp_path, "My cats!")
    assert (cats.name, other.name) == ("my-cats", "my-cats-2")
    assert [one.name for one in projects.list_projects(tmp_path)] == [
        "my-cats-2",
        "my-cats",
    ]
    assert (
        client.post("/p/my-cats/rename", data={"title": "Kätzchen"}).status_code == 204
    )
    assert projects.find_project(tmp_path, "my-cats").title == "Kätzchen"
    removed = client.post("/p/my-cats/remove")
    assert removed.status_code == 204
    undo = json.loads(removed.headers["HX-Trigger"])["toast"]["action"]
    assert (undo["words"], undo["post"]) == ("Undo", "/bin/restore")
    assert [one.name for one in projects.list_projects(tmp_path)] == ["my-cats-2"]
    assert (
        client.post(
            "/bin/restore", data={"id": trash.list_items(tmp_path)[0].id}
        ).status_code
        == 204
    )
    assert projects.find_project(tmp_path, "my-cats").title == "Kätzchen"
    with pytest.raises(VideotuneError, match="needs a name"):
        projects.create(tmp_path, "  ")


OUTSIDE = (
    "../x",
    "/etc/passwd",
    "a/../../x",
    "",
    ".",
    "C:\\x",
    "a\0b",
    ".hidden",
    "clips/.x",
    "..\\x",
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_leaves_a_project(cats: projects.Project, path: str) -> None:
    with pytest.raises(VideotuneError):
        projects.inside(cats.folder, path)


def test_a_link_that_leads_to_itself_is_no_path(cats: projects.Project) -> None:
    (cats.folder / "loop").symlink_to("loop")
    with pytest.raises(VideotuneError):
        projects.inside(cats.folder, "loop/x")


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_not_waited_for(
    tmp_path: Path, cats: projects.Project, client: Any, kind: str
) -> None:
    for path in (cats.folder / "config.json", cats.folder / ".studio" / "plan.json"):
        path.parent.mkdir(exist_ok=True)
        make = os.mkfifo if kind == "pipe" else os.mkdir
        make(path)
    assert client.get("/").status_code == 200
    for page in ("data", "setup", "train", "results"):
        assert client.get(f"/p/my-cats/{page}").status_code == 200


@pytest.mark.parametrize("name", ["..", "a/b", "", "nothing"])
def test_a_name_that_is_no_project_is_refused(
    tmp_path: Path, cats: projects.Project, name: str
) -> None:
    with pytest.raises(VideotuneError):
        projects.find_project(tmp_path, name)


def test_files_are_taken_by_what_they_are_and_not_by_their_names(
    tmp_path: Path, cats: projects.Project
) -> None:
    files = {
        "a.mp4": MP4,
        "a.txt": b"a cat",
        "notes.mp4": b"these are notes",
        "nothing.mp4": b"",
        "caption.txt": MP4,
    }
    files |= {"program.exe": b"MZ\0\0"}
    files["photo.heic"] = b"\0\0\0\x24ftypheic" + bytes(32)
    files["phone.heic"] = b"\xff\xd8\xff" + bytes(32)
    files["film.vob"] = b"\0\0\1\xba" + bytes(32)
    got = {
        one.name: one
        for one in uploads.accept(
            cats, [sent(tmp_path, *file) for file in files.items()]
        )
    }
    assert {name for name, one in got.items() if one.taken} == {"a.mp4", "a.txt"}
    assert "content is text" in got["notes.mp4"].reason
    assert "empty" in got["nothing.mp4"].reason
    for name in ("photo.heic", "phone.heic"):
        assert "save it as a .png or .jpg" in got[name].reason
    assert ".mp4" in got["film.vob"].reason
    assert "plain text" in got["caption.txt"].reason
    assert sorted(path.name for path in (cats.folder / "clips").iterdir()) == [
        "a.mp4",
        "a.txt",
    ]


def test_what_is_there_is_never_written_over(
    tmp_path: Path, cats: projects.Project
) -> None:
    uploads.accept(cats, [sent(tmp_path, "a.mp4", MP4)])
    same, other = (
        uploads.accept(cats, [sent(tmp_path, "a.mp4", content)])[0]
        for content in (MP4, MP4 + b"x")
    )
    assert same.taken
    assert "already" in same.reason
    assert not other.taken
    assert "another file" in other.reason
    assert (cats.folder / "clips" / "a.mp4").read_bytes() == MP4


def packed(*members: tuple[str, bytes]) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return memory.getvalue()


def test_an_archive_is_unpacked_and_each_file_looked_at(
    tmp_path: Path, cats: projects.Project
) -> None:
    content = packed(
        ("in/a.mp4", MP4), ("in/a.txt", b"a cat"), ("in/run.sh", b"#!/bin/sh")
    )
    got = uploads.accept(cats, [sent(tmp_path, "pets.zip", content)])
    assert got[0].taken
    assert got[0].reason == "2 files unpacked into clips/pets"
    assert [one.name for one in got[1:]] == ["pets.zip: in/run.sh"]
    assert (cats.folder / "clips/pets/in/a.mp4").read_bytes() == MP4
    assert not (cats.folder / ".unpacking").exists()


def test_an_archive_cannot_escape(tmp_path: Path, cats: projects.Project) -> None:
    got = uploads.accept(
        cats, [sent(tmp_path, "evil.zip", packed(("../../evil.mp4", MP4)))]
    )
    assert not got[0].taken
    assert "leads out" in got[0].reason
    assert not list(tmp_path.rglob("evil.mp4"))


NAMES = {
    "a/b\\c.mp4": "c.mp4",
    "..mp4": "mp4",
    "a\nb?.mp4": "a_b_.mp4",
    "<i>.mp4": "_i_.mp4",
}


@pytest.mark.parametrize(("name", "safe"), NAMES.items())
def test_names_of_sent_files_are_made_safe(name: str, safe: str) -> None:
    assert uploads.safe_name(name) == safe


def test_a_damaged_project_is_listed_beside_the_others(
    tmp_path: Path, cats: projects.Project
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / projects.PROJECT_FILE).write_text("{")
    assert {one.name for one in projects.list_projects(tmp_path)} == {
        "broken",
        cats.name,
    }


def test_the_card_of_a_project_shows_its_clips_without_their_masks(
    client: Any, cats: projects.Project
) -> None:
    for folder in ("videos", "masks"):
        (cats.folder / "clips" / folder).mkdir()
        (cats.folder / "clips" / folder / "a.mp4").write_bytes(MP4)
    (cats.folder / "clips/videos/a.txt").write_text("a cat")
    text = client.get("/").text
    assert "1 clip ·" in text
    assert text.count("/poster?path=") == 1
    assert "a.mp4" in text
    assert "masks" not in text
