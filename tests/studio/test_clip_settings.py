"""Settings of a project's clips: where they are kept, which datasets have them, and that
captions are read and written where a run reads them.
"""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.clips import noise, write_clip, write_image
from videotune.commands.check import check
from videotune.files import write_json
from videotune.studio import (
    clips,
    form,
    projects,
    queue_page,
    run_settings,
)

SETUP = "/p/cats/setup"


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    """A project of a clip and a folder of frames."""
    project = projects.create(tmp_path, "Cats", preset="toy")
    write_clip(project.folder / "clips/a.mp4", noise(9, 32, 32, seed=1), 24)
    for number, frame in enumerate(noise(9, 32, 32, seed=2)):
        write_image(project.folder / "clips/shot" / f"{number:03}.png", frame)
    return project


def save(client: Any, key: str, value: str, code: int = 200) -> None:
    answer = client.post(
        f"{SETUP}/set", data={"key": f"datasets.{key}", "value": value}
    )
    assert answer.status_code == code, answer.text


def test_settings_of_clips_are_those_of_the_projects_datasets(
    client: Any, cats: projects.Project
) -> None:
    save(client, "flip", "safe")
    save(client, "caption_prefix", "photo of")
    save(client, "caption_extension", ".tags")
    save(client, "max_clips", "0", 422)
    save(client, "path", "/etc", 422)
    keys = {"flip": "safe", "caption_prefix": "photo of", "caption_extension": ".tags"}
    assert projects.draft(cats) == {"datasets": keys}
    page = client.get(SETUP).text
    assert 'data-key="datasets.flip" data-saved="safe"' in page

    # The validation clips have those that make sense for them, and other datasets those
    # that are not on how the files of the project are read.
    (cats.folder / "held-out").mkdir()
    write_clip(cats.folder / "held-out/b.mp4", noise(9, 32, 32, seed=3), 24)
    source = {"path": "user/other", "kind": "train"}
    cats = projects.update(cats, sources=[source])
    own = {"path": str(cats.folder / "clips"), **keys}
    shared = {key: value for key, value in keys.items() if key != "flip"}
    held_out = {"path": str(cats.folder / "held-out"), "kind": "validation", **shared}
    other = {"path": "user/other", "kind": "train", "caption_prefix": "photo of"}
    assert projects.datasets(cats) == [own, held_out, other | {"flip": "safe"}]
    cats = projects.update(
        cats,
        sources=[
            {"path": "user/aside", "kind": "validation"},
            {"path": "user/prior", "kind": "regularization"},
            source | {"settings": {"caption_prefix": "film of"}},
        ],
    )
    assert projects.datasets(cats)[2:] == [
        {"path": "user/aside", "kind": "validation", "caption_prefix": "photo of"},
        {"path": "user/prior", "kind": "regularization"},
        other | {"flip": "safe", "caption_prefix": "film of"},
    ]

    # They hold for other datasets if the project has no clips of its own.
    alone = projects.create(cats.folder.parent, "Alone", preset="toy")
    prior = {"path": "user/prior", "kind": "regularization"}
    alone = projects.update(alone, sources=[source, prior])
    projects.save_draft(alone, {"datasets": keys})
    assert projects.datasets(alone) == [source | keys, prior]

    # A run has them, and so has a sweep.
    cats = projects.update(cats, sources=[])
    arguments = projects.command_arguments(cats)
    command = json.loads(Path(arguments[-1]).read_text())
    assert command["datasets"] == [own, held_out]
    swept = queue_page._config_with(cats, {"datasets.flip": "always"})
    assert projects.datasets(cats, swept)[0]["flip"] == "always"
    run = cats.folder / "runs" / "run-1"
    settings = {"datasets": [{**own, "caption_variants": 8}], "seed": 0}
    write_json(run / "config.json", {"settings": settings, "origins": {"datasets": "user", "seed": "default"}})  # fmt: skip
    assert run_settings.changed_settings(cats, run) == {"datasets": keys}


def test_presets_and_configs_bring_settings_of_clips_and_no_paths() -> None:
    keys = {"flip": "always", "caption_variants": 8}
    row = {"path": "/etc", "repeats": 3, "caption_extension": ".py", **keys}
    assert form.clip_keys_of([row]) == form.clip_keys_of(keys) == {"flip": "always"}
    for other in ([row, row], "x", None, [1]):
        assert form.clip_keys_of(other) == {}
    (dataset,) = form.as_config({"datasets": keys})["datasets"]
    assert dataset == {"path": "clips", "flip": "always"}


def test_captions_are_written_where_training_reads_them(
    client: Any, cats: projects.Project
) -> None:
    assert len(clips.table(cats).rows) == 10
    save(client, "frame_folder_fps", "24")
    save(client, "caption_extension", ".tags")
    rows = clips.table(cats).rows
    assert list(rows) == ["clips/a.mp4", "clips/shot"]
    picture = rows["clips/shot"]["picture"]
    assert picture == "clips/shot/004.png"
    tiles = client.get("/p/cats/data/tiles").text
    assert f"poster?path={quote(picture, safe='')}" in tiles
    assert client.get(f"/p/cats/poster?path={picture}").status_code == 200
    assert "<video" not in client.get("/p/cats/data/clip?path=clips/shot").text

    for path in rows:
        words = {"path": path, "was": "", "text": f"of {path}"}
        assert client.post("/p/cats/data/caption", data=words).status_code == 204
    assert (cats.folder / "clips/shot.tags").read_text() == "of clips/shot\n"
    account = check(Path(projects.command_arguments(cats)[-1]), preset="toy").account
    captions = {Path(clip["path"]).name: clip["captions"] for clip in account["clips"]}
    assert captions == {"a.mp4": ["of clips/a.mp4"], "shot": ["of clips/shot"]}

    # A model's captions go there too.
    assert projects.clip_setting_arguments(cats) == [
        "--set",
        "datasets.frame_folder_fps=24.0",
        "--set",
        'datasets.caption_extension=".tags"',
    ]
    words = {"path": "clips/shot", "to": "held-out"}
    assert client.post("/p/cats/data/move", data=words).status_code == 204
    assert (cats.folder / "held-out/shot/008.png").is_file()
    assert (cats.folder / "held-out/shot.tags").is_file()
    assert client.post("/p/cats/data/cut", data={"path": "held-out/shot"}).status_code == 422  # fmt: skip


def test_a_config_that_was_edited_writes_no_other_files(cats: projects.Project) -> None:
    for extension in (".mp4", ".py", 3, "x/../y"):
        keys = {"datasets": {"caption_extension": extension}}
        projects.save_draft(cats, keys)
        assert projects.clip_settings(cats).caption_extension == ".txt"
    projects.save_draft(cats, {"datasets": [{"path": "/etc"}]})
    assert projects.datasets(cats) == [{"path": str(cats.folder / "clips")}]
    assert form.clip_keys_of(None) == {}
