"""The process that answers plans: quick once it is warm, the newest question wins, an error is an answer."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until
from videotune.studio import plan_server


@pytest.fixture
def question(small_clips: Path) -> dict[str, Any]:
    config = {"datasets": [{"path": str(small_clips)}], "steps": 20}
    return {"what": "plan", "preset": "toy", "card": "RTX 4090", "config": config}


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    if plan_server._process is not None:
        plan_server._process.kill()
        plan_server._process.wait()
    plan_server._process, plan_server._begun = None, -plan_server.AGAIN


def answer(out: Path, question: dict[str, Any]) -> dict[str, Any]:
    until(lambda: plan_server.ask(out, question)["current"], 120)
    return plan_server.ask(out, question)


def test_a_plan_comes_in_two_parts_and_an_error_leaves_the_last_one_in_sight(
    tmp_path: Path, question: dict[str, Any]
) -> None:
    out, parts = tmp_path / ".studio" / "plan.json", []

    def answered() -> bool:
        found = plan_server.ask(out, question)
        parts.append(found["measuring"])
        return bool(found["current"])

    until(answered, 120)
    first = plan_server.ask(out, question)["plan"]
    assert (first["steps"], first["fits"], first["clips"]["used"]) == (20, True, 6)
    assert True in parts, "what needs no measuring came first"
    wrong = question | {"config": {**question["config"], "stepz": 3}}
    found = answer(out, wrong)
    assert found["code"] == 1
    assert "steps" in found["words"]
    assert found["plan"] == first, "the last plan stays in sight"
    for steps in (5, 6, 7):
        newest = question | {"config": {**question["config"], "steps": steps}}
        plan_server.ask(out, newest)
    assert answer(out, newest)["plan"]["steps"] == 7
    server = plan_server._process
    assert server is not None
    server.send_signal(signal.SIGKILL)
    server.wait()
    assert plan_server.ask(out, question)["current"] is False
    plan_server._begun = -plan_server.AGAIN
    assert answer(out, question)["plan"]["steps"] == 20, "a process that died is begun anew"


def test_an_answer_that_is_killed_or_hangs_is_said(tmp_path: Path, question: dict[str, Any]) -> None:
    out = tmp_path / ".studio" / "plan.json"
    assert "more than" in answer(out, question | {"longest": 0.0})["words"]
    plan_server.ask(out, question)
    server = psutil.Process(plan_server._process.pid if plan_server._process else 0)

    def killed() -> bool:
        for child in server.children():
            os.kill(child.pid, signal.SIGKILL)
            return True
        return False

    until(killed, 60)
    found = answer(out, question)
    assert found["code"] == 1
    assert "killed" in found["words"]


def test_the_server_asks_without_torch_and_its_process_ends_with_it(tmp_path: Path) -> None:
    import subprocess
    import sys

    ask = (
        "import sys, pathlib; from videotune.studio import plan_server as one; one.ask(pathlib.Path(sys.argv[1]), {}); "
    )
    tell = "print(one._process.pid, 'torch' in sys.modules)"
    words = [sys.executable, "-c", ask + tell, str(tmp_path / "x" / "plan.json")]
    number, torch = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    assert torch == "False"
    until(
        lambda: not psutil.pid_exists(int(number)) or json.dumps(psutil.Process(int(number)).status()) == '"zombie"', 60
    )
