"""Signals, kills and requests, on real processes: what was learnt is saved, or was saved before; nothing is half there."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import moments
from tests.commands.safety_kit import Running, equal, facts_of, of_kind, start, state, steps_of
from tests.shell import train
from videotune.errors import DONE, FAILED, INTERRUPTED
from videotune.files import LATE, life, read_json
from videotune.reporter.build import page
from videotune.reporter.read import read_run
from videotune.trainer import setup as trainer
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.ema import Ema
from videotune.trainer.logging.heartbeat import Heartbeat, keep_heartbeat
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume
from videotune.trainer.run_dir import Interrupted, signals

Say = Callable[..., Overrides]
pytestmark = pytest.mark.usefixtures("server")
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
EACH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


def complete(run: Path) -> list[int]:
    return [one.step for one in complete_checkpoints(run)]


def end_of(run: Path) -> tuple[str, int, str]:
    line = read_journal(run)[-1]
    return line["kind"], line["step"], line["why"]


def asked(running: Running, what: str, number: int) -> float:
    """Wait for the moment, send the signal, and say how long the process still took."""
    running.until_said(f"at: {what}")
    begun = time.monotonic()
    running.send(number)
    assert running.ended(20) is not None, running.said
    return time.monotonic() - begun


# ---- one signal


@EACH
def test_a_signal_in_a_step_lets_it_finish_and_saves_it(number: int, said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(said("steps=4", "save_every=0"), run, first=in_short_step)
    running.until_said("at: step")
    running.send(number)
    assert running.ended() == INTERRUPTED
    assert complete(run) == [3]
    assert end_of(run) == ("end", 3, "interrupted")
    assert "continue with: videotune train --out" in running.said
    assert "Traceback" not in running.said
    assert train(said("steps=4", "save_every=0"), tmp_path / "straight") == DONE
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert facts_of(run) == facts_of(tmp_path / "straight")
    assert equal(state(run, 4), state(tmp_path / "straight", 4))


def test_a_cache_that_is_damaged_in_mid_training_ends_the_run_with_its_last_step_saved(
    said: Say, tmp_path: Path
) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    words = said("steps=8", "save_every=0", f"cache_dir={cache}")
    running = start(words, run, first=in_short_step_from_disk)
    running.until_said("at: step")
    files = {path: path.read_bytes() for path in cache.rglob("*.safetensors")}
    for path, content in files.items():
        begin = 8 + int.from_bytes(content[:8], "little")
        path.write_bytes(content[:begin] + b"\1" * (len(content) - begin))
    assert running.ended() == FAILED
    assert "missing or damaged" in running.said
    assert "Traceback" not in running.said
    last = steps_of(run)[-1]["step"]
    assert last >= 3
    assert complete(run) == [last]
    for path, content in files.items():
        path.write_bytes(content)
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert train(words, tmp_path / "straight") == DONE
    assert equal(state(run, 8), state(tmp_path / "straight", 8))


def in_short_step_from_disk() -> None:
    """Nothing of the cache stays in memory."""
    trainer.KEPT_IN_MEMORY = 0
    in_short_step()


def in_short_step() -> None:
    """The third step takes a second."""
    moments.LONG = 1.0
    moments.in_step(3)


@BOTH
def test_a_signal_while_the_ruler_reads_gives_the_reading_up_and_saves(number: int, said: Say, tmp_path: Path) -> None:
    """With an average of the weights, which take its place while it reads: they are put back before they are saved."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=6", "save_every=0", "validate_every=3", "ema.decay=0.9")
    assert train(words, straight) == DONE
    running = start(words, run, first=moments.in_ruler, given=(3,))
    assert asked(running, "ruler", number) < 5
    assert running.ended() == INTERRUPTED
    assert complete(run) == [3]
    assert [line["step"] for line in of_kind(run, "ruler")] == [0]
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert equal(state(run, 6), state(straight, 6))
    assert facts_of(run) == facts_of(straight)
    readings = [[line["step"], line["train"]] for line in of_kind(run, "ruler")]
    assert readings == [[line["step"], line["train"]] for line in of_kind(straight, "ruler")], "it is made up for"


@EACH
def test_a_signal_while_a_preview_is_drawn_gives_it_up_and_saves(number: int, said: Say, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=4", "save_every=0", "sample_after=2", "samples=1", "sample.steps=1", "ema.decay=0.9")
    assert train(words, straight) == DONE
    running = start(words, run, first=moments.in_preview, given=(2,))
    assert asked(running, "preview", number) < 5
    assert running.ended() == INTERRUPTED
    assert "the previews at step 2 are given up" in running.said
    assert complete(run) == [2]
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert equal(state(run, 4), state(straight, 4))
    names = [sorted(path.name for path in (folder / "samples").iterdir()) for folder in (run, straight)]
    assert names[0] == names[1]
    assert [line["step"] for line in of_kind(run, "sample")] == [0, 2, 4], "the one given up is drawn by the resume"


def test_a_terminal_that_closes_may_say_so_twice(said: Say, tmp_path: Path) -> None:
    running = start(said("steps=6", "save_every=2"), tmp_path / "run", first=moments.in_save, given=(2,))
    running.until_said("at: saving")
    running.send(signal.SIGHUP)
    running.until_said("stopping after this step")
    running.send(signal.SIGHUP)
    assert running.ended(0.5) is None
    running.send(signal.SIGTERM)
    assert running.ended(2) == INTERRUPTED


def test_a_run_that_was_started_to_ignore_a_closed_terminal_goes_on(said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(said("steps=4"), run, first=under_nohup)
    running.until_said("at: step")
    running.send(signal.SIGHUP)
    assert running.ended() == DONE
    assert end_of(run) == ("end", 4, "done")


def under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    in_short_step()


def test_weights_are_put_back_whole_when_a_signal_comes_while_they_are_put_back(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average takes the weights' place tensor by tensor; between two of them a Ctrl-C comes, on the way back."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=4", "save_every=0", "validate_every=2", "ema.decay=0.9")
    assert train(words, straight) == DONE
    swap, calls = Ema._swap, []

    def torn(self: Ema) -> None:
        calls.append(1)
        if len(calls) != 4:  # there and back at step 0; there at step 2, and now back
            return swap(self)
        whole = self._parameters
        first = next(iter(whole))
        self._parameters = {first: whole[first]}
        swap(self)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        self._parameters = {name: value for name, value in whole.items() if name != first}
        swap(self)
        self._parameters = whole
        return None

    monkeypatch.setattr(Ema, "_swap", torn)
    assert train(words, run) == INTERRUPTED
    assert len(calls) == 4
    assert complete(run) == [2], "saved after it"
    monkeypatch.undo()
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert equal(state(run, 4), state(straight, 4))


def test_a_signal_just_before_something_that_can_be_given_up_gives_it_up() -> None:
    with signals() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert asked.stop
        with pytest.raises(Interrupted), asked.breaking():
            pytest.fail("it was begun")


@EACH
def test_a_signal_before_the_first_step_ends_at_once(number: int, said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(said("steps=4"), run, first=moments.in_encoding)
    assert asked(running, "encoding", number) < 3
    assert running.ended() == INTERRUPTED
    assert "Traceback" not in running.said
    assert "stopped at once" in running.said
    assert not (run / "config.json").exists()
    told = life(run)
    assert told is not None
    assert not told["alive"]
    assert train(said("steps=4"), run) == DONE, "the folder holds no run yet"


def test_what_a_script_began_in_the_background_is_ended_as_any_other(said: Say, tmp_path: Path) -> None:
    running = start(said("steps=4"), tmp_path / "run", first=moments.in_encoding_in_the_background)
    running.until_said("at: encoding")
    running.send(signal.SIGINT)
    assert running.ended(0.3) is None, "a Ctrl-C is for what runs in front"
    assert asked(running, "encoding", signal.SIGTERM) < 3
    assert running.ended() == INTERRUPTED
    assert "stopped at once" in running.said


def test_a_signal_during_the_reading_of_step_0_ends_with_a_run_that_can_go_on(said: Say, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=2", "validate_every=2")
    assert train(words, straight) == DONE
    running = start(words, run, first=moments.in_ruler, given=(0,))
    assert asked(running, "ruler", signal.SIGINT) < 5
    assert running.ended() == INTERRUPTED
    assert "interrupted and nothing to save yet" in running.said
    assert end_of(run) == ("end", 0, "interrupted")
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert equal(state(run, 2), state(straight, 2))
    assert [line["step"] for line in of_kind(run, "ruler")] == [0, 2]


def test_a_signal_during_the_export_leaves_a_run_that_is_done_but_for_it(said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(said("steps=2"), run, first=moments.in_export)
    assert asked(running, "export", signal.SIGINT) < 3
    assert running.ended() == INTERRUPTED
    assert complete(run) == [2]
    assert not (run / "exports.json").exists()
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert (run / "export" / "run-step-2.safetensors").is_file()
    assert [line["step"] for line in steps_of(run)] == [1, 2]


# ---- a second signal


@BOTH
def test_a_second_signal_ends_at_once_in_the_middle_of_saving(number: int, said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = said("steps=6", "save_every=2")
    running = start(words, run, first=moments.in_save, given=(2,))
    running.until_said("at: saving")
    running.send(number)
    assert running.ended(0.5) is None, "one signal lets it finish"
    begun = time.monotonic()
    running.send(number)
    assert running.ended(2) == INTERRUPTED
    assert time.monotonic() - begun < 2
    assert "stopped at once; the last checkpoint is whole" in running.said
    assert complete(run) == [2]
    assert (run / "checkpoints" / ".step-4.part").is_dir()
    told = life(run)
    assert told is not None
    assert not told["alive"]
    assert train(words, tmp_path / "straight") == DONE
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert equal(state(run, 6), state(tmp_path / "straight", 6))
    assert facts_of(run) == facts_of(tmp_path / "straight")
    assert list((run / "checkpoints").glob(".*")) == [], "the resume has swept what was unfinished"


# ---- kills


@pytest.mark.parametrize("moment", [moments.in_step, moments.in_save, moments.in_ruler, moments.in_preview])
def test_killed_in_the_middle_of_anything_and_resumed_it_ends_the_same(
    moment: Callable[[int], None], said: Say, tmp_path: Path
) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    more = (
        ("sample_after=4", "samples=1", "sample.steps=1", "validate_every=4") if "save" not in moment.__name__ else ()
    )
    words = said("steps=6", "save_every=2", "ema.decay=0.9", "batch_size=2", *more)
    assert train(words, straight) == DONE
    running = start(words, run, first=moment, given=(2 if moment is moments.in_save else 4,))
    running.until_said("at: ")
    alive = life(run)
    assert alive is not None
    assert alive["alive"]
    assert f"(process {running.pid} on " in page(read_run(run))
    running.send(signal.SIGKILL)
    assert running.ended() == -signal.SIGKILL
    dead = life(run)
    assert dead is not None
    assert not dead["alive"]
    assert f"process {running.pid} on {dead['host']} is dead" in page(read_run(run))
    assert "running when" not in page(read_run(run)), "no page says running of a dead process"
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert facts_of(run) == facts_of(straight)
    assert all(equal(state(run, step), state(straight, step)) for step in (2, 4, 6))
    for kind in ("ruler", "sample"):
        assert [line["step"] for line in of_kind(run, kind)] == [line["step"] for line in of_kind(straight, kind)]
    told = life(run)
    assert told is not None
    assert (told["state"], told["alive"]) == ("ended", False)


def test_a_last_line_that_a_kill_has_torn_is_dropped_by_the_resume(said: Say, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=4", "save_every=2")
    assert train(words, straight) == DONE
    running = start(words, run, first=moments.in_step, given=(4,))
    running.until_said("at: ")
    running.send(signal.SIGKILL)
    running.ended()
    with (run / "journal.jsonl").open("ab") as file:
        file.write('{"kind": "step", "step": 3, "caption": "Würf'.encode()[:-3])
    assert train(Overrides(), run, resume=Resume()) == DONE
    for line in (run / "journal.jsonl").read_bytes().splitlines():
        json.loads(line)
    assert facts_of(run) == facts_of(straight)


# ---- the heartbeat


def test_the_heartbeat_says_what_a_run_does(said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(said("steps=8", "save_every=4"), run, first=quick_pulse)
    running.until_said("at: step")

    def told() -> dict[str, Any]:
        return life(run) or {}

    running.until(lambda: told().get("step") == 4 and told().get("state") == "training", "the heartbeat")
    facts = told()
    assert facts["pid"] == running.pid
    assert facts["alive"]
    assert facts["age"] < 5
    running.send(signal.SIGINT)
    assert running.ended() == INTERRUPTED
    assert (told()["state"], told()["alive"]) == ("ended", False)


def test_the_heartbeat_says_how_far_encoding_is_and_that_the_report_is_written(said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(said("steps=1", f"cache_dir={tmp_path / 'cache'}"), run, first=slow_encoding_and_report)

    def told() -> dict[str, Any]:
        return life(run) or {}

    running.until(lambda: (told().get("progress") or {}).get("done", 0) > 1, "some captions")
    assert told()["state"] == "encoding"
    assert told()["progress"]["done"] <= told()["progress"]["total"]
    running.until(lambda: told().get("state") == "reporting", "the report")
    assert end_of(run) == ("end", 1, "done")
    assert (told()["alive"], told()["progress"]) == (True, None)
    assert running.ended() == DONE
    assert told()["state"] == "ended"


def slow_encoding_and_report() -> None:
    """Beats at each moment; a caption takes a while, and so does the report."""
    from videotune.latent_cache.store import Store
    from videotune.reporter import build
    from videotune.trainer.logging import heartbeat

    heartbeat.EVERY, put, write = 0.02, Store.put, build.write_report

    def slowly(work: Callable[..., Any]) -> Callable[..., Any]:
        def late(*given: Any) -> Any:
            time.sleep(0.1)
            return work(*given)

        return late

    Store.put, build.write_report = slowly(put), slowly(write)  # type: ignore[method-assign]


def quick_pulse() -> None:
    """Beats at each moment, and the fifth step takes a while."""
    from videotune.trainer.logging import heartbeat

    heartbeat.EVERY = 0.02
    moments.LONG = 3.0
    moments.in_step(5)


def test_a_heartbeat_that_cannot_be_written_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the file stays the old one; its process is none the less alive."""
    with keep_heartbeat(tmp_path) as pulse:
        old = time.time() - 10 * LATE
        facts = read_json(pulse.path) | {"time": old}
        pulse.path.write_text(json.dumps(facts))
        os.utime(pulse.path, (old, old))
        late = life(tmp_path)
        assert late is not None
        assert not late["alive"]

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("videotune.trainer.logging.heartbeat.write_json", full)
        pulse.beat()
        touched = life(tmp_path)
        assert touched is not None
        assert touched["alive"]
        assert touched["age"] < 5


def test_life_of_another_machine_is_its_age(tmp_path: Path) -> None:
    assert life(tmp_path) is None
    pulse = Heartbeat(tmp_path)
    pulse.beat()
    facts = read_json(pulse.path) | {"host": "elsewhere", "pid": 2**22 + 1}
    pulse.path.write_text(json.dumps(facts))
    now = time.time()
    assert [bool((life(tmp_path, at) or {})["alive"]) for at in (now, now + LATE - 1, now + LATE + 1)] == [
        True,
        True,
        False,
    ]
    pulse.path.write_text(json.dumps(facts | {"host": read_json_host()}))
    here = life(tmp_path)
    assert here is not None
    assert not here["alive"], "here there is no such process"
    pulse.path.write_text("{")
    assert life(tmp_path) is None


def read_json_host() -> str:
    import socket

    return socket.gethostname()


# ---- requests


def test_requests_are_met_after_the_step_in_which_they_come(said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = said("steps=100000", "save_every=0", "samples=1", "sample.steps=1")
    running = start(words, run)
    running.until_step(2)
    ask(run, save=True)
    running.until(lambda: of_kind(run, "save"), "the checkpoint")
    (step,) = complete(run)
    assert of_kind(run, "save")[0]["step"] == step
    ask(run, sample=True)
    running.until(lambda: of_kind(run, "sample"), "the preview")
    ask(run, stop=True)
    assert running.ended() == INTERRUPTED
    assert end_of(run)[2] == "stopped"
    assert complete(run) == [step, end_of(run)[1]]
    assert not (run / "control.json").exists()


def ask(run: Path, **what: bool) -> None:
    (run / "control.part").write_text(json.dumps(what))
    (run / "control.part").rename(run / "control.json")


def test_two_processes_in_one_folder_are_one_too_many(said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    one = start(said("steps=100000"), run)
    one.until_step(2)
    pid = (life(run) or {})["pid"]
    other = start(Overrides(), run, "--resume")
    assert other.ended() == FAILED
    assert "another process trains in" in other.said
    assert (life(run) or {})["pid"] == pid == one.pid, "the heartbeat stays the first one's"
    one.send(signal.SIGTERM)
    assert one.ended() == INTERRUPTED
