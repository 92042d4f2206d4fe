"""Hostile and damaged project archives: an import is refused and leaves nothing, or
brings a project of known files whose pages are there; nothing of it acts.

More of them: ``VIDEOTUNE_FUZZ=4000 pytest tests/fuzz``.
"""

import contextlib
import io
import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.damaged_files import limited
from tests.support.studio_fuzz import (
    CONFIG,
    EACH,
    EXPORTED,
    MP4,
    OWN,
    damaged_bytes,
    damaged_file,
    encode_file,
)
from videotune import files
from videotune.errors import VideotuneError
from videotune.queue import jobs
from videotune.studio import projects, transfer, web
from videotune.studio.paths import PathRule

SECONDS = 10.0
"""Time that an import and all pages together may take."""

KNOWN = re.compile(
    r"project\.json|config\.json|(clips|held-out|scenes)/.+|runs/[^/]+/.+|tries/[^/]+/.+"
)
NEVER = re.compile(
    r"(^|/)(jobs|bin|\.[^/]*|sheet)/|(^|/)(history\.jsonl|heartbeat\.json|control\.json"
    r"|report\.html|rc\.json|pid\.json|job\.json|item\.json)$"
    r"|\.(sh|exe|py|pt|pkl|html|zip)$"
)

NAMES = [
    "../x",
    "/etc/x",
    "C:\\x",
    "..\\x",
    "clips/../../x",
    "clips/../jobs/000001-check/job.json",
    "Jobs/000001-check/job.json",
    "jobs\\000001-check\\job.json",
    "./jobs/000001-check/job.json",
    "clips//x.txt",
    "clips/.hidden.mp4",
    "clips/a\0.mp4",
    "clips/\udcff.mp4",
    "clips/" + "x" * 300 + ".mp4",
    "/".join(["clips", *["d"] * 30, "a.mp4"]),
    "runs/../jobs/1/job.json",
    "runs/export/config.json",
    "runs/run-1/before/config-until-step-4.json",
    "runs/.hidden/config.json",
    "runs/a b/config.json",
    "runs/run-1/checkpoints/step-4/weights.pt",
    "runs/run-1/.lock",
    "runs/run-1/control.json",
    "runs/run-1/report.html",
    "runs/run-1",
    "clips",
    "project.json/x",
    "config.json/x",
    "sheet/index.html",
    "presets/x.json",
    ".queue/queue.json",
    "x.sh",
    "clips/x.sh",
    "clips/x.zip",
    "history.jsonl",
]
"""Places at which a stranger may want a file."""

names = st.sampled_from([*NAMES, *EXPORTED, *OWN]) | st.text(max_size=20)


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """A zip of a project with some files damaged, and others added."""
    contents = {name: encode_file(name, value) for name, value in EXPORTED.items()}
    for name in draw(st.lists(st.sampled_from(sorted(contents)), max_size=2)):
        contents[name] = draw(damaged_file(EXPORTED[name]))
    for name in draw(st.lists(names, max_size=3)):
        is_config = "config" in name and name.startswith("runs/")
        known = CONFIG if is_config else {**EXPORTED, **OWN}.get(name, MP4)
        contents[name] = draw(damaged_file(known) | st.just(encode_file(name, known)))

    memory = io.BytesIO()
    kind = draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    with zipfile.ZipFile(memory, "w", kind) as archive:
        for name, content in contents.items():
            with contextlib.suppress(UnicodeEncodeError):
                archive.writestr(f"cats/{name}", content)
    content = memory.getvalue()
    if draw(st.integers(0, 9)) == 0:
        content = draw(damaged_bytes(content))
    return content


class Studio:
    """A studio into which projects are imported, beside one that was there before."""

    def __init__(self, root: Path, client: Any, unexpected: list[Exception]) -> None:
        self.root, self.client, self.unexpected = root, client, unexpected

    def take(self, archive: bytes, *, is_restricted: bool) -> projects.Project | None:
        """Import an archive; None if it is refused."""
        path = self.root.parent / "p.zip"
        path.write_bytes(archive)
        rule = PathRule(self.root, is_restricted)
        try:
            return transfer.import_project(self.root, path, rule).project
        except (VideotuneError, OSError):
            return None

    def look(self, project: projects.Project) -> None:
        """Look at all pages of the project and of the other one."""
        addresses = [
            *(f"/p/{project.name}/{page}" for page in ("data", "setup", "train")),
            f"/p/{project.name}/results",
            f"/p/{project.name}/series?run=run-1",
            "/",
            "/p/dogs/data",
        ]
        for address in addresses:
            headers = {"accept": "text/html", "hx-request": ""}
            answer = self.client.get(address, headers=headers)
            assert answer.status_code == 200, (address, answer.text[:500])
        assert not self.unexpected, repr(self.unexpected)


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    from starlette.testclient import TestClient

    from videotune.studio import clips, plan_server, queue_page
    from videotune.studio.app import make_app

    root = tmp_path_factory.mktemp("imports") / "root"
    root.mkdir()
    projects.create(root, "Dogs", preset="toy")
    unexpected: list[Exception] = []

    def note(error: Exception) -> str:
        unexpected.append(error)
        return "?"

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a job was started, stopped or restarted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_page, "ensure_worker", lambda root: None)
        patch.setattr(clips, "start_check", lambda project: False)
        patch.setattr(plan_server, "request_answer", lambda out, question: {})
        patch.setattr(web, "describe_unexpected", note)
        patch.setattr(files, "sync_file", lambda *_: None)  # a disk that is asked for
        patch.setattr(projects, "sync_folder", lambda _: None)  # each file is slow
        for name in ("start", "restart", "stop", "pause", "unpause"):
            patch.setattr(jobs, name, refuse)
        app = make_app(root, "127.0.0.1", None)
        with TestClient(app, base_url="http://127.0.0.1:7860") as client:
            yield Studio(root, client, unexpected)


def files_of(folder: Path) -> dict[str, bytes]:
    """Each file of a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def check_project(project: projects.Project, *, is_restricted: bool) -> None:
    """AssertionError if a file is there that must not be, or a setting names a place."""
    for name in files_of(project.folder):
        assert KNOWN.fullmatch(name), name
        assert not NEVER.search(name), name
    assert not any(path.is_symlink() for path in project.folder.rglob("*"))
    assert set(project.facts) <= {
        "title",
        "created",
        "archived",
        "preset",
        "card",
        "vram",
        "allow_skips",
        "left_sources",
    }
    for name in project.facts.get("left_sources", []):
        assert not {"/", "\\"} & set(name), "no place of another computer"
        assert name.isprintable()

    rule = PathRule(project.folder.parent, is_restricted)
    for path in project.folder.glob("runs/**/config*.json"):
        config = json.loads(path.read_bytes())
        for key in projects.MANAGED_KEYS:
            for section in ("settings", "asked"):
                assert config.get(section, {}).get(key) is None
        rule.check_config(config)
    keys = projects.draft(project)
    assert not keys.keys() & {*projects.MANAGED_KEYS, "datasets"}
    rule.check_config(keys)


def test_a_whole_project_comes_in(studio: Studio) -> None:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, value in EXPORTED.items():
            archive.writestr(f"cats/{name}", encode_file(name, value))
    project = studio.take(memory.getvalue(), is_restricted=True)
    assert project is not None
    assert set(files_of(project.folder)) == set(EXPORTED)
    shutil.rmtree(project.folder)


@EACH
@given(archive=archives(), is_restricted=st.booleans())
def test_an_archive_is_refused_or_brings_known_files(
    studio: Studio, archive: bytes, is_restricted: bool
) -> None:
    studio.unexpected.clear()
    before = {path.name for path in studio.root.iterdir()}
    outside = {path.name for path in studio.root.parent.iterdir()} | {"p.zip"}
    with limited(SECONDS), contextlib.redirect_stderr(io.StringIO()):
        project = studio.take(archive, is_restricted=is_restricted)
        after = {path.name for path in studio.root.iterdir()}
        assert {path.name for path in studio.root.parent.iterdir()} == outside
        if project is None:
            assert after == before
            return
        try:
            assert after == before | {project.name}
            check_project(project, is_restricted=is_restricted)
            studio.look(project)
        finally:
            shutil.rmtree(project.folder)
