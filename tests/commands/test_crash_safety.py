"""Signals, kills and requests, on real processes: what was learnt is saved, or was
saved before; nothing is half there.
"""

import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import interruptions
from tests.support.command_line import Patch, train
from tests.support.run_processes import KILLED, Running, Work, resume, start
from tests.support.run_results import assert_same_run, complete, of_kind, steps_of
from videotune.errors import DONE, FAILED, INTERRUPTED, VideotuneError
from videotune.files import read_json
from videotune.job.overrides import Overrides
from videotune.reporter.build import page
from videotune.reporter.read import read_run
from videotune.runs.heartbeat import Heartbeat, keep_heartbeat
from videotune.runs.journal import read_journal
from videotune.runs.run_life import LATE, life
from videotune.trainer import gradients, setup
from videotune.trainer.ema import EmaWeights

pytestmark = pytest.mark.usefixtures("server")
EACH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


def end_of(run: Path) -> tuple[str, int, str]:
    line = read_journal(run)[-1]
    return line["kind"], line["step"], line["why"]


def asked(running: Running, what: str, number: int) -> float:
    """Wait for the moment, send the signal; the seconds that the process still took,
    having been interrupted.
    """
    running.until_printed(f"at: {what}")
    begun = time.monotonic()
    running.send(number)
    assert running.ended(20) == INTERRUPTED, running.stderr
    assert "Traceback" not in running.stderr
    return time.monotonic() - begun


def heartbeat(run: Path) -> dict[str, Any]:
    return life(run) or {}


# ---- one signal


@EACH
def test_a_signal_in_a_step_lets_it_finish_and_saves_it(
    number: int, work: Work
) -> None:
    run, settings = work.run, ("steps=4", "save_every=0")
    running = start(work.overrides(*settings), run, first=in_short_step)
    asked(running, "step", number)
    assert complete(run) == [3]
    assert end_of(run) == ("end", 3, "interrupted")
    assert "continue with: videotune resume" in running.stderr
    assert resume(run) == DONE
    assert_same_run(run, work.finished(*settings), 4)


def test_a_cache_that_is_damaged_in_mid_training_ends_the_run_with_its_last_step_saved(
    work: Work, monkeypatch: Patch
) -> None:
    run, cache, files, clip, met = (
        work.run,
        work.tmp / "cache",
        {},
        gradients.clip_grad_norm,
        interruptions.nth(3),
    )

    def damage(*given: Any) -> Any:
        """In the third step; nothing of the cache stays in memory."""
        if met():
            files.update(
                {path: path.read_bytes() for path in cache.rglob("*.safetensors")}
            )
            for path, content in files.items():
                begin = 8 + int.from_bytes(content[:8], "little")
                path.write_bytes(content[:begin] + b"\1" * (len(content) - begin))
        return clip(*given)

    monkeypatch.setattr(setup, "CACHE_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(gradients, "clip_grad_norm", damage)
    with pytest.raises(VideotuneError, match="missing or damaged"):
        train(work.overrides("steps=8", "save_every=0", f"cache_dir={cache}"), run)
    last = steps_of(run)[-1]["step"]
    assert last >= 3
    assert complete(run) == [last]
    for path, content in files.items():
        path.write_bytes(content)
    assert resume(run) == DONE
    assert_same_run(run, work.finished("steps=8", "save_every=0"), 8)


def in_short_step() -> None:
    """The third step takes a second."""
    interruptions.LONG = 1.0
    interruptions.in_step(3)


BETWEEN = (
    "save_every=0",
    "validate_every=2",
    "sample_after=2",
    "samples=1",
    "sample.steps=1",
    "ema.decay=0.9",
)


@pytest.mark.parametrize(
    ("moment", "step", "number"),
    [
        ("Validation", 2, signal.SIGINT),
        ("Previews", 2, signal.SIGTERM),
        ("Validation", 0, signal.SIGTERM),
        ("Validation", 4, signal.SIGTERM),
        ("Previews", 4, signal.SIGINT),
    ],
)
def test_a_signal_between_steps_gives_up_what_is_computed_and_saves(
    moment: str, step: int, number: int, work: Work
) -> None:
    """Weights are put back before they are saved, where averages have taken their
    place; a resume makes up for it, also after the last step.
    """
    run, settings = work.run, ("steps=4", *BETWEEN)
    first = (
        interruptions.in_validation
        if moment == "Validation"
        else interruptions.in_preview
    )
    running = start(work.overrides(*settings), run, first=first, given=(step,))
    assert asked(running, moment, number) < 5
    assert complete(run) == ([step] if step else [])
    assert end_of(run) == ("end", step, "interrupted")
    assert resume(run) == DONE
    straight = work.finished(*settings)
    assert_same_run(run, straight, 4)
    names = [
        sorted(path.name for path in (folder / "samples").iterdir())
        for folder in (run, straight)
    ]
    assert names[0] == names[1]
    assert [line["step"] for line in of_kind(run, "sample")] == [0, 2, 4]
    losses = [
        [[line["step"], line["train"]] for line in of_kind(folder, "validation")]
        for folder in (run, straight)
    ]
    assert losses[0] == losses[1]


def test_a_terminal_that_closes_may_say_so_twice(work: Work) -> None:
    running = start(
        work.overrides("steps=6", "save_every=2"),
        work.run,
        first=interruptions.in_save,
        given=(2,),
    )
    running.until_printed("at: saving")
    running.send(signal.SIGHUP)
    running.until_printed("stopping after this step")
    running.send(signal.SIGHUP)
    assert running.ended(0.5) is None
    running.send(signal.SIGTERM)
    assert running.ended(2) == INTERRUPTED


def test_a_run_that_was_started_to_ignore_a_closed_terminal_goes_on(work: Work) -> None:
    run = work.run
    running = start(work.overrides("steps=4"), run, first=under_nohup)
    running.until_printed("at: step")
    running.send(signal.SIGHUP)
    assert running.ended() == DONE
    assert end_of(run) == ("end", 4, "done")


def under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    in_short_step()


def test_weights_are_put_back_whole_when_a_signal_comes_while_they_are_put_back(
    work: Work, monkeypatch: Patch
) -> None:
    """The average takes the weights' place tensor by tensor; between two of them a
    Ctrl-C comes, on the way back.
    """
    run, settings = (
        work.run,
        ("steps=4", "save_every=0", "validate_every=2", "ema.decay=0.9"),
    )
    straight, swap, calls = work.finished(*settings), EmaWeights._swap, []

    def torn(self: EmaWeights) -> None:
        calls.append(1)
        if len(calls) != 4:  # there and back at step 0; there at step 2, and now back
            return swap(self)
        whole = self._parameters
        first = next(iter(whole))
        self._parameters = {first: whole[first]}
        swap(self)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        self._parameters = {
            name: value for name, value in whole.items() if name != first
        }
        swap(self)
        self._parameters = whole
        return None

    with monkeypatch.context() as patch:
        patch.setattr(EmaWeights, "_swap", torn)
        assert train(work.overrides(*settings), run) == INTERRUPTED
    assert len(calls) == 4
    assert complete(run) == [2], "saved after it"
    assert resume(run) == DONE
    assert_same_run(run, straight, 4)


@pytest.mark.parametrize(
    ("number", "behind"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGINT, True)],
)
def test_a_signal_before_the_first_step_ends_at_once(
    number: int, behind: bool, work: Work
) -> None:
    """But for a Ctrl-C where a script began the run in the background: that is for what
    runs in front.
    """
    run = work.run
    first = (
        interruptions.in_encoding_in_the_background
        if behind
        else interruptions.in_encoding
    )
    running = start(work.overrides("steps=4"), run, first=first)
    if behind and number == signal.SIGINT:
        running.until_printed("at: encoding")
        running.send(number)
        assert running.ended(0.3) is None
        number = signal.SIGTERM
    assert asked(running, "encoding", number) < 3
    assert "stopped at once" in running.stderr
    assert not (run / "config.json").exists()
    assert not heartbeat(run)["alive"]
    assert train(work.overrides("steps=4"), run) == DONE, "the folder holds no run yet"


def test_a_signal_during_the_export_leaves_a_run_that_is_done_but_for_it(
    work: Work,
) -> None:
    run = work.run
    running = start(work.overrides("steps=2"), run, first=interruptions.in_export)
    assert asked(running, "export", signal.SIGINT) < 3
    assert complete(run) == [2]
    assert not (run / "exports.json").exists()
    assert resume(run) == DONE
    assert (run / "export" / "run-step-2.safetensors").is_file()
    assert [line["step"] for line in steps_of(run)] == [1, 2]


# ---- a second signal


def test_a_second_signal_ends_at_once_in_the_middle_of_saving(work: Work) -> None:
    number = signal.SIGINT
    run, settings = work.run, ("steps=6", "save_every=2")
    running = start(
        work.overrides(*settings), run, first=interruptions.in_save, given=(2,)
    )
    running.until_printed("at: saving")
    running.send(number)
    assert running.ended(0.5) is None, "one signal lets it finish"
    running.send(number)
    assert running.ended(2) == INTERRUPTED
    assert "stopped at once; what was saved before is complete" in running.stderr
    assert complete(run) == [2]
    assert (run / "checkpoints" / ".step-4.part").is_dir()
    assert not heartbeat(run)["alive"]
    assert resume(run) == DONE
    assert_same_run(run, work.finished(*settings), 6)
    assert list((run / "checkpoints").glob(".*")) == [], (
        "the resume has swept what was unfinished"
    )


# ---- kills


def test_a_killed_run_is_reported_dead_and_a_torn_last_line_is_dropped_by_the_resume(
    work: Work,
) -> None:
    run, settings = work.run, ("steps=6", "save_every=2")
    running = start(
        work.overrides(*settings), run, first=interruptions.in_step, given=(4,)
    )
    running.until_printed("at: ")
    assert heartbeat(run)["alive"]
    assert "running when this page was written" in page(read_run(run))
    running.send(signal.SIGKILL)
    assert running.ended() == KILLED
    dead = heartbeat(run)
    assert not dead["alive"]
    assert "its process is dead" in page(read_run(run))
    assert "running when" not in page(read_run(run))
    with (run / "journal.jsonl").open("ab") as file:
        file.write('{"kind": "step", "step": 3, "caption": "Würf'.encode()[:-3])
    assert resume(run) == DONE
    for line in (run / "journal.jsonl").read_bytes().splitlines():
        json.loads(line)
    assert_same_run(run, work.finished(*settings), 2, 4, 6)
    assert (heartbeat(run)["state"], heartbeat(run)["alive"]) == ("ended", False)


# ---- the heartbeat


def test_the_heartbeat_has_each_state_of_a_run(work: Work, monkeypatch: Patch) -> None:
    """Beats at each change; what the file says then."""
    run, seen = work.run, []

    def beating(change: Callable[..., None]) -> Callable[..., None]:
        def changed(self: Heartbeat, *given: Any) -> None:
            change(self, *given)
            self.beat()
            seen.append(heartbeat(run))

        return changed

    monkeypatch.setattr(Heartbeat, "set", beating(Heartbeat.set))
    monkeypatch.setattr(Heartbeat, "progress", beating(Heartbeat.progress))
    assert (
        train(work.overrides("steps=3", f"cache_dir={work.tmp / 'cache'}"), run) == DONE
    )
    states = [state for state, _ in itertools.groupby(one["state"] for one in seen)]
    named = [
        "encoding",
        "loading",
        "training",
        "saving",
        "training",
        "exporting",
        "reporting",
        "ended",
    ]
    assert states[-len(named) :] == named
    progress = [
        one["progress"]
        for one in seen
        if one["state"] == "encoding" and one["progress"]
    ]
    assert len(progress) > 1
    assert all(one["done"] <= one["total"] for one in progress)
    assert {one["step"] for one in seen if one["state"] == "training"} == {0, 1, 2, 3}
    assert {one["pid"] for one in seen} == {os.getpid()}
    assert [one["alive"] for one in seen] == [True] * (len(seen) - 1) + [False]


def test_a_heartbeat_that_cannot_be_written_is_touched(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """On a full disk the file stays the old one; its process is none the less alive."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with keep_heartbeat(tmp_path) as pulse:
        old = time.time() - 10 * LATE
        pulse.path.write_text(json.dumps(read_json(pulse.path) | {"time": old}))
        os.utime(pulse.path, (old, old))
        assert not heartbeat(tmp_path)["alive"]
        monkeypatch.setattr("videotune.runs.heartbeat.write_json", full)
        pulse.beat()
        assert heartbeat(tmp_path)["alive"]
        assert heartbeat(tmp_path)["age"] < 5


def test_a_heartbeat_of_another_machine_is_judged_by_its_age(tmp_path: Path) -> None:
    assert life(tmp_path) is None
    pulse = Heartbeat(tmp_path)
    pulse.beat()
    facts = read_json(pulse.path) | {"host": "elsewhere", "pid": 2**22 + 1}
    pulse.path.write_text(json.dumps(facts))
    now = time.time()
    alive = [
        bool((life(tmp_path, at) or {})["alive"])
        for at in (now, now + LATE - 1, now + LATE + 1)
    ]
    assert alive == [True, True, False]
    pulse.path.write_text(json.dumps(facts | {"host": socket.gethostname()}))
    assert not heartbeat(tmp_path)["alive"], "here there is no such process"
    pulse.path.write_text("{")
    assert life(tmp_path) is None


# ---- requests


def test_requests_are_met_after_the_step_in_which_they_come(work: Work) -> None:
    """And a second process in the folder is one too many."""
    run, control = work.run, work.run / "control.json"
    running = start(
        work.overrides("steps=100000", "save_every=0", "samples=1", "sample.steps=1"),
        run,
    )
    running.until_step(2)
    control.write_text(json.dumps({"save": True, "sample": True}))
    running.until(
        lambda: of_kind(run, "save") and of_kind(run, "sample"),
        "the checkpoint and the preview",
    )
    (step,) = complete(run)
    assert of_kind(run, "save")[0]["step"] == of_kind(run, "sample")[0]["step"] == step
    assert not control.exists()
    control.write_text('{"stop": tr')  # half written: left alone until it is whole
    other = start(Overrides(), run, "--resume")
    assert other.ended() == FAILED
    assert "another process trains in" in other.stderr
    assert heartbeat(run)["pid"] == running.pid, "the heartbeat stays the first one's"
    control.write_text('{"stop": true}')
    assert running.ended() == INTERRUPTED
    assert end_of(run)[2] == "stopped"
    assert complete(run) == [step, end_of(run)[1]]


def test_killed_while_clips_are_encoded_no_entry_is_encoded_twice(work: Work) -> None:
    cache = work.tmp / "cache"
    words = work.overrides("steps=1", f"cache_dir={cache}")
    assert (
        start(
            words,
            work.run,
            first=interruptions.kill_at,
            given=("latent_cache.encode:_encode_frames", 3),
        ).ended()
        == KILLED
    )
    there = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    assert sum("latents" in path.parts for path in there) == 2
    assert train(words, work.run) == DONE
    assert {path: path.stat().st_mtime_ns for path in there} == there
    assert sum("latents" in path.parts for path in cache.rglob("*.safetensors")) > 2
