"""Several tabs at once: each write that was reported as saved is there."""

import io
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from videotune.files import write_json, write_text
from videotune.studio import clips, projects

TABS = 12


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    return projects.create(tmp_path, "Cats")


def at_once(act: Callable[[int], Any], count: int = TABS) -> list[Any]:
    """The results of an action that so many threads begin at the same moment."""
    barrier = Barrier(count)

    def run(number: int) -> Any:
        barrier.wait()
        return act(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_files_that_threads_write_at_once_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for _ in range(20):
        at_once(lambda number: write_text(path, str(number) * 10_000, durable=False))
        content = path.read_text()
        assert len(content) in (10_000, 20_000)
        assert len(set(content)) <= 2
    assert list(tmp_path.iterdir()) == [path]


def test_every_source_is_kept(
    tmp_path: Path, cats: projects.Project, client: Any
) -> None:
    folders = [tmp_path / f"s{number}" for number in range(TABS)]
    for folder in folders:
        folder.mkdir()
    codes = at_once(
        lambda number: (
            client.post(
                "/p/cats/data/source", data={"path": str(folders[number])}
            ).status_code
        )
    )
    assert codes == [204] * TABS
    facts = projects.find_project(tmp_path, "cats").facts
    assert sorted(row["path"] for row in facts["sources"]) == sorted(map(str, folders))


def test_a_title_a_preset_and_consent_that_change_at_once_are_kept(
    tmp_path: Path, cats: projects.Project, client: Any
) -> None:
    requests = [
        ("rename", {"title": "Dogs"}),
        ("data/leave-out", {}),
        ("setup/fact", {"key": "vram", "value": "24"}),
        ("setup/set", {"key": "steps", "value": "7"}),
        ("setup/set", {"key": "seed", "value": "8"}),
        ("data/source", {"path": str(tmp_path)}),
    ]
    for _ in range(5):
        codes = at_once(
            lambda number: (
                client.post(
                    f"/p/cats/{requests[number][0]}", data=requests[number][1]
                ).status_code
            ),
            len(requests),
        )
        assert set(codes) <= {200, 204}
        project = projects.find_project(tmp_path, "cats")
        expected = {"title": "Dogs", "allow_skips": True, "vram": 24.0}
        assert expected.items() <= project.facts.items()
        assert len(project.facts["sources"]) == 1
        keys = {"missing_caption": "skip", "steps": 7, "seed": 8}
        assert projects.draft(project) == keys
        projects.save_draft(project, {})
        write_json(project.folder / "project.json", cats.facts)


def test_one_of_two_tabs_saves_a_caption_and_the_other_sees_it(
    cats: projects.Project, client: Any
) -> None:
    clip = cats.folder / "clips" / "a.mp4"
    clip.write_bytes(b"\0\0\0\x20ftypisom" + bytes(64))
    clip.with_suffix(".txt").write_text("a cat\n")
    assert list(clips.table(cats).rows) == ["clips/a.mp4"]
    answers = at_once(
        lambda number: client.post(
            "/p/cats/data/caption",
            data={"path": "clips/a.mp4", "was": "a cat", "text": f"tab {number}"},
        )
    )
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [204] + [409] * (TABS - 1)
    saved = clip.with_suffix(".txt").read_text().strip()
    assert {answer.json()["theirs"] for answer in answers if answer.content} == {saved}


def test_of_several_files_of_one_name_the_first_stays(
    cats: projects.Project, client: Any
) -> None:
    def send(number: int) -> bool:
        answer = client.post(
            "/p/cats/data/upload?name=a.txt", content=b"%d" % number * 1000
        )
        (result,) = answer.json()
        return bool(result["taken"])

    for _ in range(3):
        taken = at_once(send)
        assert sum(taken) == 1
        (path,) = (cats.folder / "clips").iterdir()
        assert path.read_bytes() == b"%d" % taken.index(True) * 1000
        path.unlink()


def test_projects_that_are_imported_at_once_are_each_complete(
    tmp_path: Path, client: Any
) -> None:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("x/project.json", '{"title": "Same"}')
        archive.writestr("x/clips/a.txt", "a cat")
    codes = at_once(
        lambda _: (
            client.post("/import?name=p.zip", content=memory.getvalue()).status_code
        )
    )
    assert codes == [204] * TABS
    made = projects.list_projects(tmp_path)
    assert len(made) == TABS
    for project in made:
        assert (project.folder / "clips" / "a.txt").read_text() == "a cat"
    assert {path.name[0] for path in tmp_path.iterdir()} == {".", "s"}
    assert not list(tmp_path.glob(".new-*"))


def test_projects_of_one_title_get_names_of_their_own(
    tmp_path: Path, client: Any
) -> None:
    codes = at_once(
        lambda _: client.post("/create", data={"title": "Same"}).status_code
    )
    assert codes == [204] * TABS
    assert len(projects.list_projects(tmp_path)) == TABS
