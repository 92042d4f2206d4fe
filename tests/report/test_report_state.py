"""How a run stands is told from the journal and the heartbeat: a dead process is never called running."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from report_kit import config, put, start, step, write_journal

from videotune.files import LATE, life
from videotune.report.html import page, state
from videotune.report.markup import moment
from videotune.report.read import read_run

BEGUN, NOW = 1790000000.0, 1790000600.0


@pytest.fixture
def nobody() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def heartbeat(folder: Path, heard: float, **changed: Any) -> None:
    here = {"pid": os.getpid(), "host": socket.gethostname()}
    facts = here | {"started": BEGUN, "step": 7, "state": "training", "since": BEGUN + 60, "time": heard} | changed
    put(folder, "heartbeat.json", facts)
    os.utime(folder / "heartbeat.json", (heard, heard))


def a_run(folder: Path, *more: dict[str, Any]) -> Path:
    write_journal(folder, [start(), *(step(number) for number in range(1, 8)), *more])
    return folder


def told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The badge and the sentence at NOW."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    words = " ".join(unescape(re.sub(r"<[^>]+>", " ", state(read_run(folder)))).split())
    badge = re.search(r'class="badge \w+">([^<]+)<', state(read_run(folder)))
    assert badge is not None
    return badge[1], words


def test_a_living_process_is_running_with_its_number_and_since_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat(a_run(tmp_path), NOW - 3)
    badge, words = told(tmp_path, monkeypatch)
    assert badge == "running"
    assert f"7 of 120 steps, running when this page was written, {moment(NOW)}: training" in words
    assert f"(process {os.getpid()} on {socket.gethostname()}, begun {moment(BEGUN)})." in words


def test_a_process_that_is_gone_is_dead_and_not_running(
    tmp_path: Path, nobody: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat(a_run(tmp_path), NOW - 3, pid=nobody)
    badge, words = told(tmp_path, monkeypatch)
    assert badge == "dead"
    assert f"process {nobody} on {socket.gethostname()} is dead: last heard of {moment(NOW - 3)}" in words
    assert "training, step 7 done" in words
    assert "running" not in words


@pytest.mark.parametrize(("age", "badge"), [(LATE - 1, "running"), (LATE + 1, "dead")])
def test_of_another_machine_the_age_decides(
    age: float, badge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat(a_run(tmp_path), NOW - age, host="elsewhere", pid=1)
    assert told(tmp_path, monkeypatch)[0] == badge


def test_a_number_that_another_process_has_by_now_is_no_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the machine was started anew: a process of that number is there, and its heartbeat is hours old."""
    heartbeat(a_run(tmp_path), NOW - 10 * LATE)
    assert told(tmp_path, monkeypatch)[0] == "dead"


def test_a_run_that_waits_for_room_is_paused_since_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat(a_run(tmp_path), NOW - 3, state="paused", since=NOW - 300)
    badge, words = told(tmp_path, monkeypatch)
    assert badge == "paused"
    assert f"paused since {moment(NOW - 300)} for want of room on its disk (process {os.getpid()}" in words


def test_a_process_that_ended_without_an_end_in_the_journal_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat(a_run(tmp_path), NOW - 9, state="ended")
    badge, words = told(tmp_path, monkeypatch)
    assert badge == "failed"
    assert f"ended {moment(NOW - 9)} without finishing" in words


def test_an_end_in_the_journal_counts_though_its_process_still_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat(a_run(tmp_path, {"kind": "end", "time": NOW - 2, "step": 7, "why": "interrupted"}), NOW - 1)
    badge, words = told(tmp_path, monkeypatch)
    assert badge == "interrupted"
    assert "7 of 120 steps, ended: interrupted." in words


def test_a_process_that_goes_on_after_the_end_is_running(
    tmp_path: Path, nobody: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it loads the model the journal still has the old end; one that died while loading has changed nothing."""
    a_run(tmp_path, {"kind": "end", "time": NOW - 100, "step": 7, "why": "interrupted"})
    heartbeat(tmp_path, NOW - 1, started=NOW - 20, state="starting")
    assert told(tmp_path, monkeypatch)[0] == "running"
    heartbeat(tmp_path, NOW - 1, started=NOW - 20, state="starting", pid=nobody)
    assert told(tmp_path, monkeypatch)[0] == "interrupted"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"pid": 1e400, "host": 3}', '{"time": "x", "state": 1}'])
def test_a_heartbeat_that_says_nothing_is_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (a_run(tmp_path) / "heartbeat.json").write_text(content)
    badge, words = told(tmp_path, monkeypatch)
    assert badge == "no end"
    assert "has no end: still going, or killed" in words


def test_a_number_that_no_process_can_have_is_none(tmp_path: Path) -> None:
    heartbeat(a_run(tmp_path), time.time(), pid=10**30)
    assert life(tmp_path) is None


def test_what_a_heartbeat_says_cannot_become_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "<script>alert(1)</script>"
    heartbeat(a_run(tmp_path), NOW - 1, host=evil, state=evil)
    monkeypatch.setattr(time, "time", lambda: NOW)
    assert "<script" not in page(read_run(tmp_path))
    assert evil in unescape(page(read_run(tmp_path)))


def test_steps_are_counted_against_those_that_the_run_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume with more steps leaves the journal's start as it was."""
    put(a_run(tmp_path, {"kind": "end", "time": 1.0, "step": 7, "why": "done"}), "config.json", config() | {"steps": 7})
    (tmp_path / "journal.jsonl").write_text(
        (tmp_path / "journal.jsonl").read_text().replace(json.dumps({"steps": 120})[1:-1], '"steps": 4')
    )
    badge, words = told(tmp_path, monkeypatch)
    assert badge == "done"
    assert "7 of 7 steps, ended: done." in words
