"""Projects as one file: what leaves, what comes in, and what of a stranger's never
does.
"""

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.journal_lines import step_line
from videotune.errors import VideotuneError
from videotune.files import digest, read_json, write_json
from videotune.queue import jobs
from videotune.queue.processes import mark_process
from videotune.studio import project_names, projects, transfer, trash
from videotune.studio.downloads import stream_zip
from videotune.studio.paths import PathRule

MP4 = b"\0\0\0\x20ftypisom" + b"\0" * 64
FACTS = {"title": "Cats", "created": 1.0, "preset": "toy"}
RUN_CONFIG: dict[str, Any] = {
    "settings": {"base_model_name": "asset:toy", "family": "wan"},
    "origins": {},
    "base": {"name": "asset:toy", "fingerprints": {}},
    "data": "0",
    "steps": 4,
}


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    return projects.create(tmp_path, "My cats", preset="toy")


def packed(files: dict[str, Any]) -> bytes:
    """A zip of a project; values that are no text or bytes become JSON."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            if not isinstance(content, (str, bytes)):
                content = json.dumps(content)
            archive.writestr(name, content)
    return memory.getvalue()


def take(root: Path, files: dict[str, Any], *, is_restricted: bool = False) -> Any:
    """Import a project with a clip and these files."""
    root.mkdir(exist_ok=True)
    files = {"project.json": FACTS, "clips/a.mp4": MP4, "clips/a.txt": "a cat"} | files
    archive = root.parent / f"{root.name}.zip"
    archive.write_bytes(packed({f"x/{name}": value for name, value in files.items()}))
    rule = PathRule(root, is_restricted)
    return transfer.import_project(root, archive, rule)


def names(folder: Path) -> set[str]:
    """Every file of a folder."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    }


def tensors(**shapes: tuple[int, ...]) -> bytes:
    """A safetensors file of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [end, end + size],
        }
        end += size
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + bytes(end)


def test_a_project_is_duplicated_without_its_runs(
    tmp_path: Path, cats: projects.Project
) -> None:
    for name, content in (("a.mp4", MP4), ("a.txt", b"a cat")):
        (cats.folder / "clips" / name).write_bytes(content)
    projects.save_draft(cats, {"steps": 7})
    (cats.folder / "runs" / "run-1").mkdir()
    copy = transfer.duplicate(tmp_path, projects.update(cats, card="rtx 4090"))
    assert copy.title == "My cats (copy)"
    assert copy.facts["card"] == "rtx 4090"
    assert projects.draft(copy) == {"steps": 7}
    assert (copy.folder / "clips/a.mp4").read_bytes() == MP4
    assert not list((copy.folder / "runs").iterdir())
    (cats.folder / "clips/a.txt").unlink()
    assert (copy.folder / "clips/a.txt").read_text() == "a cat", "each has its own"


def test_an_exported_project_is_imported_elsewhere_with_its_runs(
    tmp_path: Path, cats: projects.Project
) -> None:
    (cats.folder / "clips" / "a.mp4").write_bytes(MP4)
    run = cats.folder / "runs" / "run-1"
    config = RUN_CONFIG | {"datasets": [{"path": str(cats.folder / "clips")}]}
    write_json(run / "config.json", config | {"digest": digest(config)})
    (run / "journal.jsonl").write_text(json.dumps(step_line(1)) + '\n{"kind": "st')
    write_json(run / "heartbeat.json", {"pid": 1})
    checkpoint = run / "checkpoints" / "step-4"
    write_json(checkpoint / "COMPLETE", {"step": 4, "kind": "save", "files": {}})
    (checkpoint / "weights.safetensors").write_bytes(tensors(a=(2, 3)))
    (cats.folder / "bin").mkdir()
    (cats.folder / "bin" / "old.mp4").write_bytes(MP4)
    projects.save_draft(cats, {"steps": 3, "output_model_destination": "/elsewhere"})
    moved = projects.update(
        cats, folder=str(cats.folder), sources=[{"path": "/elsewhere/farm"}]
    )
    archive = tmp_path / "cats.zip"
    archive.write_bytes(
        b"".join(stream_zip(moved.folder, moved.name, transfer.is_exported))
    )

    root = tmp_path / "other"
    root.mkdir()
    rule = PathRule(root, is_restricted=False)
    imported = transfer.import_project(root, archive, rule)
    new = imported.project
    assert imported.notes == ["the clips of 1 other folder (farm) are not in its file"]
    assert new.facts["left_sources"] == ["farm"]
    assert new.title == "My cats"
    assert (new.folder / "clips/a.mp4").read_bytes() == MP4
    copied = read_json(new.folder / "runs/run-1/config.json")
    assert copied["datasets"] == [{"path": str(new.folder / "clips")}]
    content = {key: value for key, value in copied.items() if key != "digest"}
    assert copied["digest"] == digest(content), "a resume takes it"
    assert names(new.folder / "runs/run-1") == {
        "config.json",
        "journal.jsonl",
        "checkpoints/step-4/COMPLETE",
        "checkpoints/step-4/weights.safetensors",
    }
    assert projects.draft(new) == {"steps": 3}, "where files go is the studio's"
    assert projects.datasets(new) == [{"path": str(new.folder / "clips")}], (
        "folders of another computer are not named"
    )
    assert transfer.import_project(root, archive, rule).project.name == "my-cats-2"
    assert sorted(path.name for path in root.iterdir()) == ["my-cats", "my-cats-2"]


JOB = {"kind": "check", "about": "clips/a.mp4", "words": ["x"], "started": 1.0}
ACTING = {
    "jobs/000001-check/job.json": JOB,
    "jobs/000001-check/rc.json": {"code": 0, "ended": 2.0},
    "jobs/000002-split/job.json": JOB | {"kind": "split"},
    "jobs/000002-split/rc.json": {"code": 0, "ended": 2.0},
    "jobs/000003-caption/job.json": JOB | {"kind": "caption"},
    "jobs/000003-caption/before.json": {"clips/a.mp4": "a dog"},
    ".studio/plan.json": {"key": "x"},
    ".queue/queue.json": {},
    "bin/1/item.json": {"id": "1"},
    "history.jsonl": '{"batch": "1", "name": "a.mp4"}',
    "command.json": {"datasets": []},
    "sheet/index.html": "<script>alert(1)</script>",
    "runs/r/report.html": "<script>alert(1)</script>",
    "runs/r/control.json": {"stop": True},
    "runs/r/heartbeat.json": {"pid": 1},
    "runs/r/.lock": "",
    "runs/r/checkpoints/step-1/weights.pt": "x",
    "runs/../clips/b.exe": "MZ",
    "presets/x.json": {},
    "program.sh": "#!/bin/sh",
}


@pytest.mark.parametrize("name", [name for name in ACTING if ".." not in name])
def test_only_files_of_known_places_enter_a_project(tmp_path: Path, name: str) -> None:
    imported = take(tmp_path / "root", {name: ACTING[name]})
    assert names(imported.project.folder) == {
        "project.json",
        "clips/a.mp4",
        "clips/a.txt",
    }
    # unpacking leaves hidden files out by itself
    is_usual = transfer.USUALLY_LEFT_OUT.search(name) is not None
    assert bool(imported.notes) != (is_usual or "/." in f"/{name}")


def test_no_job_of_another_studio_ends_a_process_or_moves_a_clip(
    tmp_path: Path, client: Any
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        mark = mark_process(process.pid, process.args)
        pids = (
            {"runner": process.pid, "command": process.pid, "time": 9e9},
            {"folder": "1", "runner": mark, "command": mark},
        )
        for number, pid in enumerate(pids):
            files = {f"x/{name}": value for name, value in ACTING.items()}
            files |= {"x/project.json": FACTS, "x/clips/a.mp4": MP4}
            del files["x/runs/../clips/b.exe"]
            files["x/jobs/000001-check/pid.json"] = pid
            files.pop("x/jobs/000001-check/rc.json")
            answer = client.post("/import?name=p.zip", content=packed(files))
            assert answer.status_code == 204
            name = "cats" if number == 0 else "cats-2"
            for _ in range(2):
                assert client.get(f"/p/{name}/data").status_code == 200
            assert (tmp_path / name / "clips" / "a.mp4").is_file()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_copied_folder_has_no_hold_on_the_processes_of_the_first(
    tmp_path: Path,
) -> None:
    import shutil

    (tmp_path / "a").mkdir()
    job = jobs.start(tmp_path / "a", "wait", ["wait", str(tmp_path), "--timeout", "60"])
    try:
        while not (job.folder / "pid.json").is_file():
            pass
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        (copy,) = jobs.all_jobs(tmp_path / "b")
        assert not copy.is_running
        assert not jobs.stop(copy)
        assert jobs.read_job(job.folder).is_running
    finally:
        jobs.stop(job)


DAMAGED: dict[str, Any] = {
    "clips/b.mp4": "these are notes",
    "clips/b.zip": packed({"a.txt": "x"}),
    "clips/b.txt": MP4,
    "held-out/b.sh": "#!/bin/sh",
    "runs/r/config.json": RUN_CONFIG | {"settings": 3},
    "runs/r/check.json": {"clips": [{"path": 3}]},
    "runs/r/plan.json": "[" * 100_000,
    "runs/r/demo.json": '{"a": NaN}',
    "runs/r/exports.json": [{"format": "x", "path": "/etc/passwd", "hash": "x"}],
    "runs/r/compare/compare.json": [
        {"prompt": "x", "seed": 1, "video": "../../x.mp4", "sheet": "x"}
    ],
    "runs/r/checkpoints/step-1/COMPLETE": {"step": "x"},
    "runs/r/checkpoints/step-1/state.json": {"step": -1},
    "runs/r/checkpoints/step-1/weights.safetensors": struct.pack("<Q", 2**63) + b"{}",
    "runs/r/checkpoints/step-1/optimizer.safetensors": tensors(a=(2,)) + b"more",
    "runs/r/samples/x.mp4": "no video",
    "tries/r/1f/try.json": {"prompt": 3},
    "tries/r/1f/x.mp4": "no video",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_left_out_in_words(tmp_path: Path, name: str) -> None:
    imported = take(tmp_path / "root", {name: DAMAGED[name]})
    assert name not in names(imported.project.folder)
    assert len(imported.notes) == 1
    assert name.split("/")[-1] in imported.notes[0]
    assert len(list((tmp_path / "root").iterdir())) == 1


JOURNAL: list[Any] = [
    step_line(5 * 10**9),
    step_line(1, seconds={"step": 1e308}),
    step_line(1, lr={"x": float("inf")}),
    {"kind": "sample", "step": 1, "prompt": "x", "path": "/etc/passwd"},
    {"kind": "sample", "step": 1, "prompt": "x", "path": "../../a.mp4"},
    {"kind": "sample_metrics", "step": 1, "samples": [{"path": "/etc/passwd"}]},
    {"kind": "other", "value": float("nan")},
    [],
    "x",
]


def test_folders_that_an_export_does_not_hold_are_named_until_they_are_decided_on(
    tmp_path: Path, client: Any
) -> None:
    names = ["farm", "more films", "bad\u202ename"]
    sources = [{"path": f"/films/{name}/"} for name in names]
    sources.append({"path": "D:\\clips\\winter"})
    imported = take(tmp_path, {"project.json": FACTS | {"sources": sources}})
    project = imported.project
    assert "4 other folders (farm, more films, " in imported.notes[0]
    address = f"/p/{project.name}/data"
    page = client.get(address).text
    notice = page.partition('id="left-sources"')[2].partition("</div>")[0]
    for name in ("farm", "more films", "winter"):
        assert name in notice
    assert "\u202e" not in page
    assert "Add 4 folders, or train without" in page
    card = client.get("/").text
    assert "without the clips of other folders" not in card

    (tmp_path / "elsewhere/farm").mkdir(parents=True)
    added = {"path": str(tmp_path / "elsewhere/farm")}
    assert client.post(f"{address}/source", data=added).status_code == 204
    assert "without the clips of other folders" in client.get("/").text
    left = projects.find_project(tmp_path, project.name).facts["left_sources"]
    assert len(left) == 3
    assert "farm" not in left
    assert client.post(f"{address}/without-sources").status_code == 204
    assert "left-sources" not in client.get(address).text
    assert "left_sources" not in projects.find_project(tmp_path, project.name).facts


def test_lines_of_a_journal_are_taken_one_by_one(tmp_path: Path) -> None:
    good = [step_line(1), {"kind": "sample", "step": 1, "prompt": "x", "path": "a.mp4"}]
    lines = [json.dumps(line) for line in [good[0], *JOURNAL, good[1]]]
    lines[3:3] = ['{"a":' * 100_000, "\0"]
    imported = take(tmp_path / "root", {"runs/r/journal.jsonl": "\n".join(lines)})
    content = (imported.project.folder / "runs/r/journal.jsonl").read_text()
    assert [json.loads(line) for line in content.split("\n")] == good


REFUSED: list[dict[str, Any]] = [
    {"project.json": FACTS | {"created": "abc"}},
    {"project.json": json.dumps(FACTS | {"created": float("nan")})},
    {"project.json": '{"title": "\\ud800"}'},
    {"project.json": FACTS | {"vram": "x"}},
    {"project.json": FACTS | {"sources": [1]}},
    {"project.json": FACTS | {"left_sources": ["a"] * 21}},
    {"project.json": FACTS | {"captioning": "x"}},
    {"project.json": '{"a":' * 100_000},
    {"project.json": [1]},
    {"/".join(["clips"] * 40) + "/a.mp4": MP4},
]


@pytest.mark.parametrize("files", REFUSED)
def test_a_project_with_damaged_facts_is_refused_and_leaves_nothing(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    with pytest.raises(VideotuneError):
        take(tmp_path / "root", files)
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("member", ["x.txt", "a/project.jsonl", "../project.json"])
def test_an_archive_that_is_no_project_is_refused_and_leaves_nothing(
    tmp_path: Path, member: str
) -> None:
    archive = tmp_path / "odd.zip"
    (root := tmp_path / "root").mkdir()
    for content in (packed({member: "{}"}), b"no zip"):
        archive.write_bytes(content)
        with pytest.raises(VideotuneError):
            transfer.import_project(root, archive, PathRule(root, is_restricted=False))
        assert list(root.iterdir()) == []


def test_a_zip_of_too_many_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_MEMBERS", 10)
    with pytest.raises(VideotuneError):
        take(tmp_path / "root", {f"clips/{n}.txt": "x" for n in range(20)})


@pytest.mark.parametrize("is_restricted", [False, True])
def test_no_imported_setting_says_where_files_go(
    tmp_path: Path, is_restricted: bool
) -> None:
    settings = RUN_CONFIG["settings"] | {
        "output_model_destination": str(tmp_path / "target"),
        "cache_dir": str(tmp_path / "target"),
        "datasets": [{"path": "/srv/clips"}],
        "samples": ["a cat", "../../../../etc/passwd"],
        "notify": ["json://10.0.0.1/x"],
    }
    asked = {"output_model_destination": str(tmp_path / "target")}
    config = RUN_CONFIG | {"settings": settings, "asked": asked}
    files = {
        "config.json": {"steps": 3, "output_model_destination": "/x", "cache_dir": "x"},
        "runs/r/config.json": config,
        "runs/r/branches/1/config.json": config,
        "runs/r/before/config-until-step-4.json": config,
        "runs/export/config.json": config,
        "runs/checkpoints/config.json": config,
    }
    project = take(tmp_path / "root", files, is_restricted=is_restricted).project
    assert projects.draft(project) == {"steps": 3}
    configs = [path for path in files if path.startswith("runs/")]
    for path in configs:
        config = read_json(project.folder / path)
        assert config["settings"]["output_model_destination"] is None
        assert config["settings"]["cache_dir"] is None
        assert config["settings"]["notify"] == []
        assert config["asked"]["output_model_destination"] is None
        elsewhere = str(project.folder / "elsewhere")
        dataset = config["settings"]["datasets"][0]["path"]
        assert dataset == (f"{elsewhere}/clips" if is_restricted else "/srv/clips")
        prompts = config["settings"]["samples"]
        assert prompts[0] == "a cat"
        assert prompts[1].startswith(elsewhere if is_restricted else "../../")


@pytest.mark.parametrize(
    "keys",
    [
        {"samples": "/etc/passwd"},
        {"prior_preservation": "../../../elsewhere"},
        {"init_from": "~/x.safetensors"},
        {"transformer": {"file": ["/x", None]}},
        {"nonsense": 1},
        {"steps": "x"},
        [1],
    ],
)
def test_settings_that_may_not_be_named_stay_outside(tmp_path: Path, keys: Any) -> None:
    imported = take(tmp_path / "root", {"config.json": keys}, is_restricted=True)
    assert projects.draft(imported.project) == {}
    assert len(imported.notes) == 1


@pytest.mark.parametrize(
    ("draft", "run_settings"),
    [
        (
            {"optimizer": "prodigyopt:Prodigy"},
            {"optimizer": {"name": "prodigyopt:Prodigy"}},
        ),
        (
            {"prior_preservation": "s3://bucket/clips"},
            {"datasets": [{"path": "s3://bucket/clips"}]},
        ),
    ],
    ids=["code that is imported", "an object store"],
)
def test_no_imported_project_names_what_acts_for_the_user(
    tmp_path: Path, draft: dict[str, Any], run_settings: dict[str, Any]
) -> None:
    """Also for the user at the computer, who did not write it, and whose credentials it
    would use.
    """
    settings = RUN_CONFIG["settings"] | run_settings
    files = {
        "config.json": draft,
        "runs/a/config.json": RUN_CONFIG | {"settings": settings},
        "runs/b/config.json": RUN_CONFIG,
    }
    imported = take(tmp_path / "root", files, is_restricted=False)
    assert projects.draft(imported.project) == {}
    folder = imported.project.folder
    assert not (folder / "runs" / "a" / "config.json").exists()
    assert (folder / "runs" / "b" / "config.json").exists()
    assert len(imported.notes) == 2


RESERVED = ("presets", "Presets!", "bin", "CON", "nul", "LPT1")


@pytest.mark.parametrize("title", RESERVED)
def test_no_project_has_the_name_of_another_folder(tmp_path: Path, title: str) -> None:
    made = [
        projects.create(tmp_path, title),
        take(tmp_path, {"project.json": FACTS | {"title": title}}).project,
    ]
    assert [project.title for project in made] == [title, f"{title} 2"]
    for project in made:
        assert project.name not in project_names.RESERVED_NAMES
        assert projects.find_project(tmp_path, project.name).title == project.title


def test_what_a_kill_has_left_is_cleared_at_the_start(tmp_path: Path) -> None:
    from videotune.studio.app import make_app

    project = projects.create(tmp_path, "Cats", preset="toy")
    clip = project.folder / "clips" / "a.mp4"
    clip.write_bytes(MP4)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for left in (
        tmp_path / ".uploads" / "1" / "a.zip",
        tmp_path / ".new-1" / "project.json",
        tmp_path / "bin" / ".deleted-1" / "0",
        project.folder / ".unpacking-1" / "a.mp4",
        project.folder / "bin" / ".deleted-1" / "0",
        project.folder / "clips" / "sub" / ".coming-1-a.mp4",
        project.folder / "clips" / f".part-{gone.pid}-a.txt",
        project.folder / f".part-{10**30}-project.json",
    ):
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_bytes(b"x")
    make_app(tmp_path, "127.0.0.1", None)
    assert names(tmp_path) == {"cats/project.json", "cats/clips/a.mp4"}


def test_a_project_appears_complete_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill before the last act leaves a hidden folder, which the next start clears."""
    archive = tmp_path / "cats.zip"
    archive.write_bytes(packed({"x/project.json": FACTS, "x/clips/a.mp4": MP4}))
    root = tmp_path / "root"
    root.mkdir()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    rename = os.rename
    monkeypatch.setattr(os, "rename", killed)
    monkeypatch.setattr(projects.shutil, "rmtree", lambda *_, **__: None)
    for make in (
        lambda: projects.create(root, "Cats", preset="toy"),
        lambda: transfer.import_project(root, archive, PathRule(root, True)),
    ):
        with pytest.raises(KeyboardInterrupt):
            make()
        assert projects.list_projects(root) == []

    monkeypatch.undo()
    assert os.rename is rename
    projects.clear_leftovers(root)
    assert list(root.iterdir()) == []


def test_a_damaged_item_of_the_bin_is_shown_and_can_be_deleted(
    tmp_path: Path, cats: projects.Project, client: Any
) -> None:
    clip = cats.folder / "clips" / "a.mp4"
    clip.write_bytes(MP4)
    id = trash.move_to_trash(cats.folder, "clip", "a.mp4", [clip])
    path = cats.folder / "bin" / id / "item.json"
    for changes in ({"when": 1e300}, {"bytes": "x"}, {"lay": [1]}, {"lay": ["\0"]}):
        write_json(path, read_json(path) | changes)
        assert client.get("/p/my-cats/data").status_code == 200
        (item,) = trash.list_items(cats.folder)
        assert (item.kind, item.id) == ("damaged", id)
        with pytest.raises(VideotuneError):
            trash.restore(cats.folder, id)
    trash.delete(cats.folder, id)
    assert not list((cats.folder / "bin").iterdir())
