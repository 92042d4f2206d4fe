"""The files of a run's result: which are offered first, and their copy in ComfyUI."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.reports import full_run, write_file
from videotune.errors import VideotuneError
from videotune.reporter import build, inventory
from videotune.reporter.read import read_run
from videotune.studio import project_names, projects
from videotune.studio.projects import Project
from videotune.studio.result_files import (
    COMFYUI_VARIABLE,
    comfyui_loras,
    copy_to_comfyui,
    exported_files,
    files_to_take,
    step_to_take,
)
from videotune.studio.settings import change_settings, read_settings


@pytest.fixture
def cats(tmp_path: Path) -> Project:
    """A project with a run that has exported two steps in two formats, and more."""
    project = projects.create(tmp_path / "root", "Cats")
    run = project.folder / "runs" / "run-1"
    full_run(run)
    write_file(run, "config.json", {"steps": 120, "settings": {}})
    exports = []
    for step in (60, 120):
        for kind in ("diffusers", "comfyui"):
            path = f"export/run-1-step-{step}-{kind}.safetensors"
            (run / path).write_bytes(f"{step} {kind}".encode())
            exports.append({"format": kind, "path": path})
    merged = run / "export" / "run-1-step-120-merged"
    merged.mkdir()
    exports.append({"format": "diffusers", "path": merged.relative_to(run).as_posix()})
    exports.append({"format": "comfyui", "path": "export/gone-step-120.safetensors"})
    exports.append({"format": "comfyui", "path": "../../../../outside-step-120"})
    write_file(run, "exports.json", exports)
    return project


@pytest.fixture
def loras(tmp_path: Path) -> Path:
    folder = tmp_path / "ComfyUI" / "models" / "loras"
    folder.mkdir(parents=True)
    return folder


def test_the_file_for_comfyui_comes_first(cats: Project) -> None:
    files = list(exported_files(cats, cats.folder / "runs" / "run-1"))
    assert len(files) == 5, "what is gone or outside is not offered"
    names = [file.path.name for file in files_to_take(files, 60)]
    assert names == [
        "run-1-step-60-comfyui.safetensors",
        "run-1-step-60-diffusers.safetensors",
    ]
    assert [file.format for file in files_to_take(files, 120)] == [
        *("comfyui", "diffusers")
    ], "a merged model is no LoRA file"
    assert files_to_take(files, 7) == []

    checkpoint = (90, cats.folder)
    assert step_to_take(60, [checkpoint], files) == 60
    assert step_to_take(None, [checkpoint], files) == 90
    assert step_to_take(None, [], files) == 120
    assert step_to_take(None, [], []) is None


def code_of_report(run: Path, step: int) -> str:
    """Return the code of the report of a run that recommends a step."""
    report = build.render("use.html.j2", d=inventory.use(read_run(run)))
    code = html.unescape(report.split("<pre><code>")[1].split("</code>")[0])
    assert f"-step-{step}-" in code
    return code.strip()


def test_the_code_of_a_file_is_the_whole_code_of_the_report(
    client: Any, tmp_path: Path
) -> None:
    """For each step that has files, and with a file of each expert."""
    run = projects.create(tmp_path, "Dogs").folder / "runs" / "run-1"
    full_run(run)
    settings = {"base_model_name": "asset:toy", "training_method": "LORA"}
    write_file(run, "config.json", {"steps": 120, "settings": settings})
    exports_by_step: dict[int, list[dict[str, str]]] = {}
    for step in (60, 120):
        exports = []
        for expert in ("high", "low"):
            path = f"export/run-1-{expert}-step-{step}-diffusers.safetensors"
            (run / path).write_bytes(b"weights")
            loading = "pipe = WanPipeline.from_pretrained('asset:toy')"
            code = f"{loading}; pipe.load_lora_weights(THIS_FILE)"
            exports.append({"format": "diffusers", "path": path, "use": code})
        exports_by_step[step] = exports
    write_file(run, "exports.json", [*exports_by_step[60], *exports_by_step[120]])

    page = client.get("/p/dogs/results?run=run-1").text
    blocks = re.findall(r'<pre tabindex="0" aria-label="Code">(.*?)</pre>', page, re.S)
    shown = [html.unescape(block).strip() for block in blocks]

    expected = []
    for step, exports in exports_by_step.items():
        write_file(run, "exports.json", exports)
        expected += [code_of_report(run, step)] * 2
    assert sorted(shown) == sorted(expected)
    assert "from diffusers import WanPipeline" in shown[0]
    assert "place('asset:toy').folder" in shown[0]
    assert "export_to_video(video, 'video.mp4'" in shown[0]


def test_the_files_of_two_experts_go_behind_two_models(
    client: Any, tmp_path: Path
) -> None:
    run = projects.create(tmp_path, "Dogs").folder / "runs" / "run-1"
    full_run(run)
    exports = []
    for expert in ("high", "low"):
        path = f"export/run-1-step-120-comfyui_{expert}_noise.safetensors"
        (run / path).write_bytes(b"weights")
        exports.append({"format": "comfyui", "path": path, "use": "pipe = 1"})
    write_file(run, "exports.json", exports)

    page = client.get("/p/dogs/results?run=run-1").text
    assert 'id="take-comfyui-high"' in page
    assert 'id="take-comfyui-low"' in page
    steps = page.partition('id="use-steps"')[2].partition("</ol>")[0]
    nodes = [step for step in steps.split("<li>") if "LoraLoaderModelOnly" in step]
    assert ["the high-noise model" in step for step in nodes] == [True, False]
    assert ["the low-noise model" in step for step in nodes] == [False, True]
    all_files = page.partition("All files")[2]
    assert all_files.count("LoraLoaderModelOnly") == 4, "two nodes at each file"


def test_comfyuis_folder_is_its_own_or_that_of_its_loras(
    loras: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert comfyui_loras(None) is None
    assert comfyui_loras(str(loras)) == loras
    assert comfyui_loras(str(loras.parents[1])) == loras
    monkeypatch.setenv(COMFYUI_VARIABLE, str(loras.parents[1]))
    assert comfyui_loras(None) == loras
    for wrong in (loras.parent, loras.parents[2], loras / "nothing"):
        with pytest.raises(VideotuneError):
            comfyui_loras(str(wrong))


def test_a_folder_of_comfyui_without_a_folder_of_loras_gets_one(
    cats: Project, tmp_path: Path
) -> None:
    comfyui = tmp_path / "Fresh"
    (comfyui / "models").mkdir(parents=True)
    loras = comfyui_loras(str(comfyui))
    assert loras == comfyui / "models" / "loras"
    assert not loras.exists(), "made with the first file"
    files = list(exported_files(cats, cats.folder / "runs" / "run-1"))
    (file,) = (file for file in files_to_take(files, 60) if file.format == "comfyui")
    assert copy_to_comfyui(file, cats, loras).parent == loras


def test_a_copy_overwrites_nothing(cats: Project, loras: Path) -> None:
    files = list(exported_files(cats, cats.folder / "runs" / "run-1"))
    (file,) = (file for file in files_to_take(files, 60) if file.format == "comfyui")
    first = copy_to_comfyui(file, cats, loras)
    assert first.name == "cats-run-1-step-60-comfyui.safetensors"
    assert first.read_bytes() == b"60 comfyui"
    assert copy_to_comfyui(file, cats, loras) == first, "it is there already"

    first.write_bytes(b"somebody else's")
    second = copy_to_comfyui(file, cats, loras)
    assert second.name == "cats-run-1-step-60-comfyui-2.safetensors"
    assert first.read_bytes() == b"somebody else's"
    assert len(list(loras.iterdir())) == 2, "no part of a copy stays"

    merged = next(file for file in files if file.format == "merge")
    with pytest.raises(VideotuneError):
        copy_to_comfyui(merged, cats, loras)


def test_the_button_copies_and_remembers_the_folder(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = projects.create(tmp_path, "Cats")
    run = project.folder / "runs" / "run-1"
    full_run(run)
    path = "export/run-1-step-120-comfyui.safetensors"
    (run / path).write_bytes(b"weights")
    write_file(run, "exports.json", [{"format": "comfyui", "path": path}])
    loras = tmp_path / "ComfyUI" / "models" / "loras"
    loras.mkdir(parents=True)

    form = {"run": "run-1", "step": "120"}
    assert client.post("/p/cats/run/copy", data=form).status_code == 422
    wrong = {**form, "comfyui": str(tmp_path)}
    assert client.post("/p/cats/run/copy", data=wrong).status_code == 422
    assert read_settings(tmp_path) == {}, "a wrong folder is not remembered"
    named = {**form, "comfyui": str(loras.parents[1])}
    assert client.post("/p/cats/run/copy", data=named).status_code < 300
    assert [copy.read_bytes() for copy in loras.iterdir()] == [b"weights"]
    assert client.post("/p/cats/run/copy", data=form).status_code < 300
    missing = {**form, "step": "60"}
    assert client.post("/p/cats/run/copy", data=missing).status_code == 422


def test_a_visitor_names_no_folder_outside_of_the_studio(
    visitor: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    projects.create(tmp_path, "Cats")
    loras = tmp_path_factory.mktemp("other") / "ComfyUI" / "models" / "loras"
    loras.mkdir(parents=True)
    form = {"run": "run-1", "step": "120", "comfyui": str(loras)}
    assert visitor.post("/p/cats/run/copy", data=form).status_code == 422
    assert read_settings(tmp_path) == {}


def test_damaged_settings_are_reported_and_hide_nothing(
    client: Any, cats: Project, tmp_path: Path
) -> None:
    root = cats.folder.parent
    change_settings(root, {"comfyui": "/somewhere"})
    assert read_settings(root) == {"comfyui": "/somewhere"}
    change_settings(root, {"comfyui": ""})
    assert read_settings(root) == {}
    write_file(root, ".settings.json", {"comfyui": 3})
    with pytest.raises(VideotuneError):
        read_settings(root)


def test_the_settings_page_shows_the_computer_and_never_the_token(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", tmp_path / "none")
    assert "not logged in" in client.get("/settings").text
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    text = client.get("/settings").text
    assert "not logged in" not in text
    assert "hf_secret" not in text

    loras = tmp_path / "ComfyUI" / "models" / "loras"
    loras.mkdir(parents=True)
    answer = client.post("/settings", data={"comfyui": str(tmp_path / "nothing")})
    assert answer.status_code == 422
    answer = client.post("/settings", data={"comfyui": str(loras)})
    assert answer.status_code < 300
    assert str(loras) in client.get("/settings").text
    client.post("/settings", data={"comfyui": ""})
    assert read_settings(tmp_path) == {}


def test_downloaded_models_are_listed_with_their_sizes(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    snapshot = hub / "models--Wan-AI--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(bytes(300_000_000 // 1000))
    (hub / "models--Wan-AI--tiny" / "refs").mkdir()
    (hub / "models--Wan-AI--tiny" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    text = client.get("/settings").text
    assert "Wan-AI/tiny" in text
    assert str(hub) in text


@pytest.mark.parametrize(
    ("facts", "folder"),
    [
        ({"variant": "LORA"}, "loras"),
        ({"vectors": 4}, "embeddings"),
        ({"step": 60}, "diffusion_models"),
        ([], "diffusion_models"),
        (None, "loras"),
    ],
)
def test_each_kind_of_file_goes_where_comfyui_looks_for_it(
    facts: Any, folder: str, cats: Project, loras: Path
) -> None:
    files = list(exported_files(cats, cats.folder / "runs" / "run-1"))
    (file,) = (file for file in files_to_take(files, 60) if file.format == "comfyui")
    header = {} if facts is None else {"videotune": json.dumps(facts)}
    save_file({"x": torch.ones(1)}, file.path, metadata=header)
    copy = copy_to_comfyui(file, cats, loras)
    assert copy.parent == loras.parent / folder
    assert copy.read_bytes() == file.path.read_bytes()


@pytest.mark.parametrize(
    ("folder", "title", "stem"),
    [
        ("cats", "Cats", "cats"),
        ("cats-2", "Cats", "cats-2"),
        ("cats", "Kätzchen", "katzchen"),
        ("cats", "Cats at night", "cats-at-night"),
        ("cats", "猫", "cats"),
        ("cats", "bin", "project-bin"),
    ],
)
def test_files_outside_of_a_project_have_its_present_name(
    folder: str, title: str, stem: str
) -> None:
    assert project_names.file_stem(folder, title) == stem


def test_after_a_rename_downloads_copies_and_exports_have_the_new_name(
    client: Any, tmp_path: Path
) -> None:
    project = projects.create(tmp_path, "Cats")
    run = project.folder / "runs" / "run-1"
    full_run(run)
    write_file(run, "config.json", {"steps": 120, "settings": {}})
    name = "run-1-step-120-comfyui.safetensors"
    row = {"path": f"export/{name}", "format": "comfyui", "step": 120}
    write_file(run, "exports.json", [row])
    (run / "export").mkdir(exist_ok=True)
    (run / "export" / name).write_bytes(b"a LoRA")

    assert client.post("/p/cats/rename", data={"title": "My dogs"}).status_code == 204
    page = client.get("/p/cats/results?run=run-1").text
    assert f'download="my-dogs-{name}"' in page
    assert "cats-run-1" not in page
    zipped = client.get("/p/cats/export").headers["Content-Disposition"]
    assert "my-dogs.zip" in zipped

    loras = tmp_path / "comfyui"
    (file,) = exported_files(projects.find_project(tmp_path, "cats"), run)
    copied = copy_to_comfyui(file, projects.find_project(tmp_path, "cats"), loras)
    assert copied.name == f"my-dogs-{name}"


def test_the_page_names_the_copy_that_is_really_in_comfyuis_folder(
    client: Any, tmp_path: Path, loras: Path
) -> None:
    project = projects.create(tmp_path, "Cats")
    run = project.folder / "runs" / "run-1"
    full_run(run)
    name = "run-1-step-120-comfyui.safetensors"
    (run / "export" / name).write_bytes(b"weights")
    row = {"path": f"export/{name}", "format": "comfyui", "step": 120}
    write_file(run, "exports.json", [row])
    change_settings(tmp_path, {"comfyui": str(loras)})

    def names() -> str:
        page = client.get("/p/cats/results?run=run-1").text
        return str(page.split('id="copy-names"')[1].split("</p>")[0])

    assert "there is" not in names()
    client.post("/p/cats/run/copy", data={"run": "run-1", "step": "120"})
    assert f"there is <code>cats-{name}</code>" in names()

    client.post("/p/cats/rename", data={"title": "Dogs"})
    assert f"<code>dogs-{name}</code>" in names().partition("there is")[0]
    assert f"there is <code>cats-{name}</code>" in names()
    assert names().count("<code>") == 2

    (loras / f"cats-{name}").write_bytes(b"other")
    assert "there is" not in names(), "it holds something else now"
