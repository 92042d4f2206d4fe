"""The process that answers plans: quick once it is warm, the newest question wins, an
error is an answer.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import wait_until
from videotune.studio import plan_server


@pytest.fixture
def question(small_clips: Path) -> dict[str, Any]:
    config = {
        "datasets": [{"path": str(small_clips)}],
        "steps": 20,
        "lora": {"dropout": 0.1},  # no table has its step, so it is measured
    }
    return {"what": "plan", "preset": "toy", "card": "RTX 4090", "config": config}


def server() -> psutil.Process:
    """The process whose forks answer."""
    return psutil.Process(_forkserver._forkserver_pid)  # type: ignore[attr-defined]


def answer(out: Path, question: dict[str, Any]) -> dict[str, Any]:
    wait_until(lambda: plan_server.request_answer(out, question)["current"], 120)
    return plan_server.request_answer(out, question)


def test_a_plan_comes_in_two_parts_and_an_error_has_none(
    tmp_path: Path, question: dict[str, Any]
) -> None:
    out = tmp_path / ".studio" / "plan.json"
    parts: list[bool] = []
    asked_at: list[float] = []
    begun = time.time()

    def answered() -> bool:
        found = plan_server.request_answer(out, question)
        parts.append(found["measuring"])
        if found["computing"]:
            asked_at.append(found["asked"])
        return bool(found["current"])

    wait_until(answered, 120)
    first = plan_server.request_answer(out, question)["plan"]
    assert (first["steps"], first["fits"], first["clips"]["used"]) == (20, True, 6)
    assert True in parts, "what needs no measuring came first"
    assert begun <= min(asked_at), "the page says since when it waits"
    assert max(asked_at) <= time.time()
    assert plan_server.request_answer(out, question)["asked"] is None, (
        "it waits no more"
    )
    changed_at = time.time()
    longer = question | {"config": {**question["config"], "steps": 30}}
    assert plan_server.request_answer(out, longer)["asked"] >= changed_at
    wrong = question | {"config": {**question["config"], "stepz": 3}}
    found = answer(out, wrong)
    assert found["code"] == 1
    assert "steps" in found["words"]
    assert not found.get("plan"), "a plan of other settings is not shown"
    for steps in (5, 6, 7):
        newest = question | {"config": {**question["config"], "steps": steps}}
        plan_server.request_answer(out, newest)
    assert answer(out, newest)["plan"]["steps"] == 7
    (ended := server()).kill()
    wait_until(lambda: ended.status() == psutil.STATUS_ZOMBIE, 60)
    assert answer(out, question)["plan"]["steps"] == 20, (
        "a process that died is begun anew"
    )


@pytest.mark.parametrize(
    ("name", "text"), [("theirs.json", "{"), ("theirs.toml", "a ="), ("theirs.txt", "")]
)
def test_a_refused_import_names_the_file_without_the_servers_folder(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    files = [str(tmp_path / name)]
    for within in (None, str(tmp_path)):
        question = {"what": "import", "files": files, "seen": [1], "within": within}
        refusal = answer(tmp_path / f"{within is None}.json", question)
        assert refusal["code"] == 1
        assert name in refusal["words"]
        assert str(tmp_path) not in refusal["words"]


def test_a_damaged_clip_is_left_out_of_the_calculation(
    tmp_path: Path, question: dict[str, Any], small_clips: Path
) -> None:
    folder = tmp_path / "clips"
    shutil.copytree(small_clips, folder)
    clip = next((folder / "videos").iterdir())
    clip.with_name("zz-damaged.mp4").write_bytes(clip.read_bytes()[:700])
    config = {**question["config"], "datasets": [{"path": str(folder)}]}
    found = answer(
        tmp_path / ".studio" / "plan.json",
        {
            **question,
            "config": config | {"missing_caption": "empty"},
            "allow_skips": "all",
        },
    )
    assert found["code"] == 0, found["words"]
    assert (found["plan"]["clips"]["used"], found["plan"]["clips"]["skipped"]) == (6, 1)


def test_hours_come_one_by_one_and_stay_when_they_are_stopped(
    tmp_path: Path, question: dict[str, Any]
) -> None:
    out = tmp_path / ".studio" / "hours.json"
    presets = ["toy", "wan 2.1 14B LoRA 48GB"]
    asked = {**question, "what": "hours", "presets": presets, "card_name": "RTX 4090"}
    plan_server.request_answer(out, asked)
    wait_until(lambda: "toy" in plan_server.read_answer(out).get("presets", {}), 120)
    plan_server.stop(out)
    wait_until(lambda: not plan_server._workers[out].is_alive(), 60)

    found = plan_server.read_answer(out)
    assert found["presets"]["toy"]["fits"] is True
    assert (found["card"], found["total"], found["part"]) == ("RTX 4090", 2, "known")
    assert not plan_server.is_computing(out)


def test_an_answer_that_is_killed_or_hangs_is_said_until_the_next_start(
    tmp_path: Path, question: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / ".studio" / "plan.json"
    assert "more than" in answer(out, question | {"longest": 0.0})["words"]
    plan_server.request_answer(out, question)

    def killed() -> bool:
        children = server().children()  # of other questions too, if others still run
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
        return bool(children)

    wait_until(killed, 60)
    found = answer(out, question)
    assert found["code"] == 1
    assert "killed" in found["words"]
    assert plan_server.answer_so_far(out, question)["current"]

    # As after the studio has ended during the calculation: the next one begins it anew.
    monkeypatch.setattr(plan_server, "_STUDIO_START", "the next start")
    monkeypatch.setattr(plan_server, "_current_key", {})
    assert not plan_server.answer_so_far(out, question)["current"]
    assert answer(out, question)["code"] == 0
    assert "died_in" not in plan_server.read_answer(out)


def test_the_studio_asks_without_torch_and_its_processes_end_with_it(
    tmp_path: Path, question: dict[str, Any]
) -> None:
    ask = "import json, sys; from pathlib import Path; from videotune.studio import plan_server as one; "
    ask += "one.request_answer(Path(sys.argv[1]), json.loads(sys.argv[2])); print('torch' in sys.modules, flush=True); input()"
    words = [
        sys.executable,
        "-c",
        ask,
        str(tmp_path / ".studio" / "plan.json"),
        json.dumps(question),
    ]
    studio = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert studio.stdout
    assert studio.stdout.readline() == "False\n"
    wait_until(
        lambda: any(one.children() for one in psutil.Process(studio.pid).children()), 60
    )
    forks = psutil.Process(studio.pid).children(recursive=True)
    studio.kill()
    studio.communicate()
    wait_until(
        lambda: (
            not any(
                one.is_running() and one.status() != psutil.STATUS_ZOMBIE
                for one in forks
            )
        ),
        60,
    )


def test_the_time_limit_is_of_computing_not_of_waiting() -> None:
    """A busy machine is no reason to refuse a plan."""
    before = plan_server._seconds_computed(os.getpid())
    time.sleep(0.3)
    waited = plan_server._seconds_computed(os.getpid()) - before
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    computed = plan_server._seconds_computed(os.getpid()) - before - waited
    assert waited < 0.2 < computed
    assert plan_server._seconds_computed(2**22 + 1) == 0
