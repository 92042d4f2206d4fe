"""Configs of other trainers: the table on the page Setup says what Apply does, and Apply
does what the table says.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from videotune.commands.import_config import import_config
from videotune.config.data_schema import Dataset
from videotune.files import write_json
from videotune.studio import plan_server, projects
from videotune.studio.import_rows import import_rows
from videotune.studio.imported_data import foreign_folder, imported_data
from videotune.studio.projects import Project
from videotune.studio.stages import next_stage, stages
from videotune.studio.web import FormData, PageContext

MUSUBI = """[general]
resolution = [256, 256]
batch_size = 1
caption_extension = ".caption"
[[datasets]]
video_directory = "{path}"
cache_directory = "cache"
target_frames = [17]
frame_extraction = "head"
num_repeats = 5
"""
"""A config that names its folder of clips, with keys of the clips."""


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(
        plan_server,
        "request_answer",
        lambda out, question: {**plan_server.read_answer(out), "current": True},
    )
    return projects.create(tmp_path, "Cats", preset="toy")


@pytest.fixture
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of clips that is in no project, and not in the studio's folder."""
    folder = tmp_path_factory.mktemp("elsewhere") / "material"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(b"")
    return folder


def page_of(project: Project, *, is_visitor: bool = False) -> PageContext:
    root = project.folder.parent
    return PageContext(
        root=root,
        is_local=True,
        project=projects.find_project(root, project.name),
        query=FormData({}),
        has_password=is_visitor,
    )


def bring(project: Project, text: str, name: str = "data.toml") -> None:
    """Bring a config to the project, and read it as the plan worker does."""
    folder = foreign_folder(project)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    imported = import_config(sorted(folder.iterdir())).for_studio()
    answer = {
        "key": "x",
        "code": 0,
        "part": "full",
        "trainer": imported.trainer,
        "config": imported.config,
        "rows": [vars(row) for row in imported.rows],
    }
    path = project.folder / ".studio" / "imported.json"
    write_json(path, json.loads(json.dumps(answer, default=str)))


def rows_of(project: Project, *, is_visitor: bool = False) -> dict[str, Any]:
    """The rows of the table, by the short key of the other trainer."""
    answer = plan_server.read_answer(project.folder / ".studio" / "imported.json")
    page = page_of(project, is_visitor=is_visitor)
    rows = import_rows(answer, imported_data(page, answer["config"]))
    return {row.key: row for row in rows}


def apply(client: TestClient) -> str:
    """Press Apply; the line that the page shows then."""
    answer = client.post("/p/cats/setup/apply", headers={"HX-Request": "true"})
    assert answer.status_code == 204, answer.text
    return str(json.loads(answer.headers["HX-Trigger"])["toast"]["words"])


def test_an_existing_folder_is_used_with_its_settings(
    cats: Project, material: Path, client: TestClient
) -> None:
    bring(cats, MUSUBI.format(path=material))
    rows = rows_of(cats)
    assert rows["video_directory"].taken == (
        ("other folders and datasets", str(material)),
    )
    for key in ("num_repeats", "frame_extraction", "caption_extension"):
        assert rows[key].taken, key
    assert "datasets.repeats" in client.get("/p/cats/setup").text

    message = apply(client)
    assert str(material) in message
    assert "cache_directory" in message.partition("Not taken over")[2]

    (row,) = projects.datasets(page_of(cats).current_project)
    assert row == {
        "path": str(material),
        "repeats": 5,
        "windows": "head",
        "caption_extension": ".caption",
    }
    Dataset.model_validate(row)
    page = client.get("/p/cats/data").text
    assert str(material) in page
    assert "repeats = 5" in page


@pytest.mark.parametrize("path", ["/nowhere/at/all", "clips", "x" * 5000])
def test_a_folder_that_is_not_here_is_told_and_its_settings_are_those_of_the_clips(
    cats: Project, client: TestClient, path: str
) -> None:
    bring(cats, MUSUBI.format(path=path))
    rows = rows_of(cats)
    assert rows["video_directory"].verdict == "left"
    assert any("page Data" in note for note in rows["video_directory"].notes)
    assert rows["num_repeats"].verdict == "left"
    assert rows["frame_extraction"].taken == (("video_config.windows", "head"),)

    message = apply(client)
    assert "num_repeats" in message.partition("Not taken over")[2]
    assert "page Data" in message
    keys = projects.draft(cats)
    assert keys["datasets"] == {"caption_extension": ".caption"}
    assert keys["video_config"]["windows"] == "head"
    assert "sources" not in projects.find_project(cats.folder.parent, "cats").facts


def test_what_the_studio_sets_itself_is_not_called_translated(
    cats: Project, material: Path, client: TestClient
) -> None:
    bring(cats, MUSUBI.format(path=material))
    row = rows_of(cats)["cache_directory"]
    assert (row.verdict, row.taken) == ("managed", ())
    assert "the studio decides" in client.get("/p/cats/setup").text


def test_no_key_of_the_table_has_an_empty_part(
    cats: Project, client: TestClient
) -> None:
    bring(cats, MUSUBI.format(path="clips"))
    page = client.get("/p/cats/setup").text
    table = page[page.index('id="import"') :].partition("</section>")[0]
    assert "datasets.caption_extension" in table
    assert ".." not in table


def test_a_visitor_gains_nothing_by_an_import(
    cats: Project,
    material: Path,
    visitor: TestClient,
) -> None:
    """Nor learns whether a folder is there."""
    notes = []
    for path in (material, material.parent / "nowhere"):
        bring(cats, MUSUBI.format(path=path))
        row = rows_of(cats, is_visitor=True)["video_directory"]
        assert row.verdict == "left"
        notes.append([note.replace(str(path), "") for note in row.notes])
    assert notes[0] == notes[1]

    bring(cats, MUSUBI.format(path=material))
    apply(visitor)
    assert projects.datasets(page_of(cats).current_project) == []


def test_images_and_videos_are_two_folders_with_their_own_settings(
    cats: Project, material: Path, client: TestClient
) -> None:
    stills = material.parent / "stills"
    stills.mkdir()
    text = MUSUBI.format(path=material)
    text += f'\n[[datasets]]\nimage_directory = "{stills}"\nnum_repeats = 2\n'
    bring(cats, text)
    apply(client)
    rows = {
        row["path"]: row for row in projects.datasets(page_of(cats).current_project)
    }
    assert rows[str(material)]["repeats"] == 5
    assert rows[str(stills)]["repeats"] == 2
    assert "windows" not in rows[str(stills)]


def test_of_two_folders_one_is_here(
    cats: Project, material: Path, client: TestClient
) -> None:
    """The settings of the missing one do not reach the other."""
    text = MUSUBI.format(path=material).replace('caption_extension = ".caption"', "")
    text += '\n[[datasets]]\nvideo_directory = "/nowhere"\ncaption_extension = ".caption"\nnum_repeats = 9\n'
    bring(cats, text)
    notes = [note for row in rows_of(cats).values() for note in row.notes]
    assert any("/nowhere" in note for note in notes)
    apply(client)
    (row,) = projects.datasets(page_of(cats).current_project)
    assert row["repeats"] == 5
    assert row.get("caption_extension", ".txt") == ".txt"
    assert projects.draft(cats)["datasets"] == {"caption_extension": ".caption"}


def test_clips_of_the_project_keep_their_settings(
    cats: Project, material: Path, client: TestClient
) -> None:
    (cats.folder / "clips" / "b.mp4").write_bytes(b"")
    projects.save_draft(cats, {"datasets": {"trigger": "mycat"}, "steps": 3})
    earlier = {"path": "user/name"}
    projects.update(cats, sources=[earlier, {"path": str(material)}])
    bring(cats, MUSUBI.format(path=material))
    apply(client)

    own, hub, folder = projects.datasets(page_of(cats).current_project)
    assert own == {"path": str(cats.folder / "clips"), "trigger": "mycat"}
    assert hub == earlier | {"trigger": "mycat"}
    assert folder["repeats"] == 5
    assert "steps" not in projects.draft(cats)


def test_settings_of_clips_hold_for_a_folder_that_has_no_such_setting(
    cats: Project, material: Path, client: TestClient
) -> None:
    bring(cats, MUSUBI.format(path=material))
    apply(client)
    keys = projects.draft(cats)
    projects.save_draft(cats, {**keys, "datasets": {"trigger": "x", "flip": "safe"}})
    (row,) = projects.datasets(page_of(cats).current_project)
    assert (row["trigger"], row["caption_extension"]) == ("x", ".caption")


OTHERS = {
    "kohya": (
        "kohya.toml",
        'pretrained_model_name_or_path = "x"\nnetwork_module = "networks.lora"\n'
        "[[datasets]]\nresolution = 512\n[[datasets.subsets]]\n"
        'image_dir = "{path}"\nnum_repeats = 4\ncaption_extension = ".txt"\n',
    ),
    "diffusion-pipe": (
        "pipe.toml",
        "resolutions = [512]\nenable_ar_bucket = true\nframe_buckets = [1, 33]\n"
        '[[directory]]\npath = "{path}"\nnum_repeats = 4\n',
    ),
    "finetrainers": (
        "training.json",
        '{{"datasets": [{{"data_root": "{path}", "dataset_type": "video", "id_token": "CAT",'
        ' "video_resolution_buckets": [[49, 480, 720]]}}]}}',
    ),
}


@pytest.mark.parametrize("trainer", OTHERS)
def test_folders_of_other_trainers_are_used_too(
    cats: Project, material: Path, client: TestClient, trainer: str
) -> None:
    name, text = OTHERS[trainer]
    bring(cats, text.format(path=material), name)
    apply(client)
    (row,) = projects.datasets(page_of(cats).current_project)
    assert row["path"] == str(material)
    assert len(row) > 1
    Dataset.model_validate(row)


def test_an_import_that_was_read_is_the_next_step(
    cats: Project, material: Path, client: TestClient
) -> None:
    def action() -> str:
        step = next_stage(stages(page_of(cats)))
        return "" if step is None else step.action

    assert action() == "Add clips"
    bring(cats, MUSUBI.format(path=material))
    assert action() == "Apply the import"
    apply(client)
    assert action() != "Apply the import"


@pytest.mark.parametrize("trainer", ["musubi", "finetrainers"])
def test_an_object_store_of_a_config_is_not_read_with_the_users_credentials(
    cats: Project, client: TestClient, trainer: str
) -> None:
    name, text = OTHERS.get(trainer, ("data.toml", MUSUBI))
    bring(cats, text.format(path="s3://bucket/clips"), name)
    rows = rows_of(cats).values()
    assert any("your own credentials" in note for row in rows for note in row.notes)
    apply(client)
    assert projects.datasets(page_of(cats).current_project) == []


def test_a_folder_whose_name_is_too_long_is_refused(
    cats: Project, client: TestClient
) -> None:
    """In the form and in a config."""
    path = f"/{'x' * 5000}"
    answer = client.post("/p/cats/data/source", data={"path": path})
    assert answer.status_code == 422
    assert "Errno" not in answer.text
    bring(cats, MUSUBI.format(path=path))
    assert rows_of(cats)["video_directory"].verdict == "left"
