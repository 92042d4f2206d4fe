"""What ``notify`` and ``notify_on`` send, received by a real server; one that is slow,
refuses or is gone costs a run nothing but a warning.
"""

import json
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Patch, Printed, train
from tests.support.command_line import run as run_command
from tests.support.message_server import message_server
from tests.support.run_results import facts_of, of_kind, warnings_of
from tests.support.trainers import Lab, overrides_of
from videotune.commands.train import train as train_run
from videotune.config.resolve import parse
from videotune.errors import DONE, FAILED, VideotuneError
from videotune.job.overrides import Overrides, user_keys
from videotune.runs import notification_sender, notifications
from videotune.runs.notifications import ADDRESS_FILE, Address, Notifier
from videotune.trainer import loop
from videotune.trainer.resume import Resume

SECRET = "secret-word"


def titles(server: Any) -> list[str]:
    return [message["title"].removeprefix("videotune: ") for message in server.messages]


@pytest.mark.effect("notify")
@pytest.mark.parametrize("is_named", [True, False])
def test_a_message_says_that_the_run_is_done_and_no_file_has_the_secret(
    is_named: bool, lab: Lab, monkeypatch: Patch
) -> None:
    run = lab.tmp / "run"
    with message_server() as server:
        monkeypatch.setenv("MY_PHONE", server.address)
        address = "MY_PHONE" if is_named else server.address
        assert train(overrides_of(lab, {"notify": [address]}), run) == DONE
        assert titles(server) == ["run is done"]
    assert server.messages[0]["message"].startswith("Step 4.")
    assert warnings_of(run) == []

    leaks = []
    for path in run.rglob("*"):
        if path.is_file() and SECRET.encode() in path.read_bytes():
            leaks.append(path.name)
    assert leaks == ([] if is_named else [ADDRESS_FILE])
    settings = json.loads((run / "config.json").read_text())["settings"]
    assert settings["notify"] == ["MY_PHONE" if is_named else "json://(hidden)"]
    if not is_named:
        assert stat.S_IMODE(os.stat(run / ADDRESS_FILE).st_mode) == 0o600


@pytest.mark.effect("notify", "notify_on")
@pytest.mark.parametrize(
    ("events", "sent"), [(["failed"], []), (["done"], ["run is done"])]
)
def test_messages_are_sent_of_the_named_events(
    events: list[str], sent: list[str], lab: Lab
) -> None:
    with message_server() as server:
        knobs = {"notify": server.address, "notify_on": events}
        assert train(overrides_of(lab, knobs), lab.tmp / "run") == DONE
        assert titles(server) == sent


def test_a_failure_is_sent_and_raised(lab: Lab, monkeypatch: Patch) -> None:
    def fail(*_: Any) -> None:
        raise VideotuneError("step 3: /home/somebody/clips/a.mp4 cannot be read")

    monkeypatch.setattr(loop, "train_steps", fail)
    with message_server() as server:
        with pytest.raises(VideotuneError, match=r"step 3"):
            train_run(overrides_of(lab, {"notify": server.address}), lab.tmp / "run")
        assert titles(server) == ["run has failed"]
    assert server.messages[0]["message"] == "step 3: …/a.mp4 cannot be read"


def test_an_interrupt_is_sent_and_hardly_waits(lab: Lab, monkeypatch: Patch) -> None:
    times: list[float] = []

    def interrupt(*_: Any) -> None:
        times.append(time.monotonic())
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train_steps", interrupt)
    with message_server(silent=True) as server:
        with pytest.raises(KeyboardInterrupt):
            train_run(overrides_of(lab, {"notify": server.address}), lab.tmp / "run")
        assert time.monotonic() - times[0] < 4
        assert titles(server) == ["run was interrupted"]


def test_a_config_of_the_python_api_keeps_its_address(lab: Lab) -> None:
    with message_server() as server:
        keys = user_keys(overrides_of(lab, {"notify": server.address}))
        train_run(parse(keys), lab.tmp / "run")
        assert titles(server) == ["run is done"]


def test_a_resume_knows_the_address_of_the_run(lab: Lab) -> None:
    run = lab.tmp / "run"
    with message_server() as server:
        assert train(overrides_of(lab, {"notify": server.address}), run) == DONE
        longer = Overrides(sets=("steps=5",))
        assert train(longer, run, resume=Resume()) == DONE
        assert titles(server) == ["run is done"] * 2

        (run / ADDRESS_FILE).unlink()  # as in a copy of the run
        assert train(Overrides(sets=("steps=6",)), run, resume=Resume()) == DONE
        assert len(server.messages) == 2


@pytest.fixture
def gone() -> str:
    """The address of a server that is not there any more."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return f"json://user:{SECRET}@127.0.0.1:{port}/x"


def test_a_server_that_is_gone_refuses_or_is_silent_costs_a_warning(
    lab: Lab, gone: str, monkeypatch: Patch
) -> None:
    assert train(overrides_of(lab), lab.tmp / "run") == DONE
    straight = facts_of(lab.tmp / "run")
    monkeypatch.setattr(notifications, "LAST_SECONDS", 5.0)
    with message_server(code=403) as refusing:
        knobs = {"notify": [gone, refusing.address]}
        run = lab.tmp / "run2"
        assert train(overrides_of(lab, knobs), run) == DONE
    assert facts_of(run) == straight
    assert of_kind(run, "end")[0]["why"] == "done"


@pytest.mark.parametrize(
    ("code", "silent", "problem"),
    [
        (403, False, "the server answered 403"),
        (200, True, "no answer in 2 s"),
        (None, False, "the server cannot be reached"),
    ],
)
def test_what_went_wrong_is_one_line_without_the_address(
    code: int | None, silent: bool, problem: str, gone: str, tmp_path: Path
) -> None:
    warnings: list[str] = []
    with message_server(code=code or 200, silent=silent) as server:
        address = Address("MY_PHONE", gone if code is None else server.address)
        notifier = Notifier(tmp_path / "run", [address], ["verdict"], seconds=2)
        notifier.warn = warnings.append
        began = time.monotonic()
        for step, verdict in ((1, "LEARNING"), (2, "OVERFITTING"), (3, "PLATEAU")):
            notifier.line(
                {"kind": "verdict", "step": step, "verdict": verdict, "reason": "so"}
            )
        assert time.monotonic() - began < 0.5, "no step waits"
        for thread in notifier._threads:
            thread.join()
        notifier.line({"kind": "save", "step": 4})
    assert warnings == [f"notify: MY_PHONE got no message: {problem}"]


def test_a_library_that_hangs_is_killed(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(notifications, "_PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(notifications, "_GRACE", 0.2)
    began = time.monotonic()
    problem = notifications.send(Address("A", "json://x"), "t", "b", 0.3)
    assert problem == "no answer in 0.3 s"
    assert time.monotonic() - began < 5


def test_the_end_of_a_run_waits_for_a_silent_server_only_so_long(
    tmp_path: Path,
) -> None:
    with message_server(silent=True) as server:
        notifier = Notifier(tmp_path, [Address("A", server.address)], ["done"])
        notifier.line({"kind": "end", "step": 1, "why": "done", "take": {"step": 1}})
        began = time.monotonic()
        notifier.close(0.3)
        assert 0.3 <= time.monotonic() - began < 2


def test_a_verdict_is_sent_when_it_changes(tmp_path: Path) -> None:
    with message_server() as server:
        notifier = Notifier(tmp_path, [Address("A", server.address)], ["verdict"])
        labels = (None, "LEARNING", "LEARNING", "OVERFITTING", "OVERFITTING")
        for step, label in enumerate(labels):
            line = {"kind": "verdict", "step": step, "verdict": label, "reason": "so"}
            notifier.line(line)
        notifier.close()
        assert titles(server) == [f"{tmp_path.name}: OVERFITTING"]
    assert server.messages[0]["message"] == "Verdict at step 3: OVERFITTING. so"


def test_addresses_that_cannot_work_are_refused_before_any_work(lab: Lab) -> None:
    for address, match in (
        ("NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE is not set"),
        ("json://(hidden)", "Give it again"),
        ("secret word", "neither the name of an environment variable nor a URL"),
    ):
        with pytest.raises(VideotuneError, match=match) as refusal:
            train_run(overrides_of(lab, {"notify": [address]}), lab.tmp / "run")
        assert "secret word" not in str(refusal.value)
    assert not (lab.tmp / "run").exists()


def test_an_unknown_kind_of_address_is_told() -> None:
    problem = notification_sender.send("nosuchservice://x", "t", "b")
    assert problem == notification_sender.NOT_AN_ADDRESS


def test_doctor_sends_a_test_message(monkeypatch: Patch, capsys: Printed) -> None:
    with message_server() as server:
        monkeypatch.setenv("MY_PHONE", server.address)
        assert run_command("doctor", "--notify", "MY_PHONE") == DONE
        assert titles(server) == ["test"]
    assert capsys.readouterr().out == "MY_PHONE: the message was taken\n"
    with message_server(code=500) as server:
        monkeypatch.setenv("MY_PHONE", server.address)
        assert run_command("doctor", "--notify", "MY_PHONE") == FAILED
    assert capsys.readouterr().out == "MY_PHONE: the server answered 500\n"
    monkeypatch.delenv("MY_PHONE")
    with pytest.raises(VideotuneError, match="MY_PHONE is not set"):
        run_command("doctor", "--notify", "MY_PHONE")
    assert capsys.readouterr().err == "", "refused before anything is announced"
