"""In which order a training is put together, what it asks of callbacks, and what it prints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.trainers import Lab, job_of, trainer_of
from videotune.config.resolve import parse
from videotune.distributed import DistributedContext
from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.latent_cache.cache_items import CacheItems
from videotune.models.base import DiffusersModel
from videotune.planner.plan import make_plan
from videotune.runs.heartbeat import Heartbeat
from videotune.trainer import setup
from videotune.trainer.build import plain_batch
from videotune.trainer.cache_filling import missing_of_run
from videotune.trainer.resume import OpenedRun
from videotune.trainer.setup import FLOAT_16_NOTE, build_trainer
from videotune.trainer.trainer import Callback, Trainer
from videotune.types import DETERMINISTIC_VARIANT, Window


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)


class Noting(Callback):
    """Notes what it is asked, and what is loaded by then."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.events: list[Any] = []

    def prompts(self) -> Sequence[str]:
        return ("a prompt of its own",)

    def windows(self) -> Sequence[Window]:
        return (self.window,)

    def check(self, family: DiffusersModel, *, takes_part: bool) -> None:
        self.events.append(("check", takes_part))

    def encode(self, family: DiffusersModel) -> None:
        self.events.append("encode")

    def built(self, trainer: Trainer) -> None:
        self.events.append(("built", trainer.pool.loaded is not None))


class NotingHeartbeat(Heartbeat):
    """Notes the states, and whether progress is told in them."""

    states: list[str]

    def set(self, state: str, *more: Any, **others: Any) -> None:
        self.states.append(state)
        super().set(state, *more, **others)

    def progress(self, *more: Any) -> None:
        if self.states[-1] != "progress":
            self.states.append("progress")
        super().progress(*more)


@dataclass(frozen=True)
class SecondOfTwo(DistributedContext):
    """A process that hears nothing of the first one but what it says itself."""

    rank: int = 1
    size: int = 2

    def any_process(self, *flags: bool) -> tuple[bool, ...]:
        return flags

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.size


def built_by(
    lab: Lab, dist: DistributedContext | None, **knobs: Any
) -> tuple[Trainer, Noting, list[str]]:
    job = job_of(lab, knobs)
    first = job.library.windows[0]
    # No step reads this window.
    noting = Noting(replace(first, end=(first.start + first.end) / 2))
    heartbeat = NotingHeartbeat(lab.tmp)
    heartbeat.states = []
    trainer = build_trainer(
        OpenedRun(job),
        lab.tmp / "run",
        make_plan(job),
        [noting],
        dist=dist,
        heartbeat=heartbeat,
    )
    trainer.journal.close()
    return trainer, noting, heartbeat.states


def test_callbacks_are_checked_first_then_encode_and_then_find_the_networks(
    lab: Lab,
) -> None:
    """What they read is in the cache by then."""
    # Variants of what is mirrored are encoded in the steps, so only callbacks read these.
    mirrored = [{"path": str(lab.clips), "flip": "always"}]
    knobs = {"datasets": mirrored, "video_config.variants": 0}
    trainer, noting, states = built_by(lab, None, **knobs)
    assert noting.events == [("check", True), "encode", ("built", True)]
    assert states == ["encoding", "progress", "loading"]
    assert trainer.callbacks == (noting,)
    assert (trainer.first_step, trainer.last_step) == (1, 0)
    assert trainer.text_states("a prompt of its own")
    assert len(plain_batch(trainer.source, noting.window)) == 1
    plain = CacheItems((), ((noting.window, DETERMINISTIC_VARIANT),))
    family, store = trainer.family, trainer.source.store
    assert not missing_of_run(trainer.job, family, store, plain)
    assert (trainer.run / "config.json").is_file()


def test_all_callbacks_prompts_are_encoded_in_their_order(lab: Lab) -> None:
    window = job_of(lab).library.windows[0]
    first, second = Noting(window), Noting(window)
    second.prompts = lambda: ["one", "two"]  # type: ignore[method-assign]
    assert setup._prompts([first, second]) == ["a prompt of its own", "one", "two"]
    assert setup._prompts([]) == []


def test_a_process_beside_the_main_one_runs_no_callback_and_writes_no_run(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, noting, _ = built_by(lab, SecondOfTwo())
    assert noting.events == [("check", False)]
    assert not trainer.run.exists()
    assert "note:" not in "".join(capsys.readouterr())


def test_what_the_run_has_to_say_of_its_settings_is_printed_once(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    built_by(lab, None, sharding="FULL")
    text = "".join(capsys.readouterr())
    assert text.count("note: sharding FULL has no effect") == 1


def test_updates_during_backward_are_refused_before_any_work(lab: Lab) -> None:
    job = job_of(lab, {"optimizer.step_in_backward": True})
    with pytest.raises(VideotuneError, match=r"^optimizer\.step_in_backward: 2 proc"):
        build_trainer(OpenedRun(job), lab.tmp / "run", {}, dist=SecondOfTwo())
    assert list(lab.cache.rglob("*.safetensors")) == []


def printed(job: Job, dist: DistributedContext, capsys: Any) -> list[str]:
    setup._print_notes(job, dist)
    return "".join(capsys.readouterr()).splitlines()


def test_a_note_is_printed_once_a_day(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    one = DistributedContext()
    job = replace(job_of(lab), notes=("the first",))
    assert printed(job, one, capsys) == ["note: the first"]
    job = replace(job, notes=("the first", "the second"))
    new, repeated = printed(job, one, capsys)
    assert new == "note: the second"
    assert repeated.startswith("1 note as ")
    (repeated,) = printed(job, one, capsys)
    assert repeated.startswith("2 notes as ")


@pytest.mark.parametrize(
    ("settings", "size", "notes"),
    [
        ({}, 1, []),
        ({"train_dtype": "FLOAT_16"}, 1, [FLOAT_16_NOTE]),
        ({"sharding": "FULL"}, 1, ["sharding FULL has no effect"]),
        ({"sharding": "FULL"}, 2, []),
    ],
)
def test_what_has_another_effect_than_its_name_is_noted(
    settings: dict[str, Any],
    size: int,
    notes: list[str],
    lab: Lab,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = replace(job_of(lab, settings), notes=())
    lines = printed(job, DistributedContext(0, size), capsys)
    assert len(lines) == len(notes)
    for line, note in zip(lines, notes, strict=True):
        assert line.startswith(f"note: {note}")


@pytest.mark.parametrize(("device", "times"), [("cpu", 1), ("meta", 0)])
def test_freed_memory_is_kept_where_the_host_computes(
    device: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc does not say what it was set to."""
    calls: list[None] = []
    monkeypatch.setattr(setup, "keep_freed_memory", lambda: calls.append(None))
    family: Any = SimpleNamespace(device=torch.device(device))
    setup._keep_memory_on_cpu(family)
    assert len(calls) == times


def test_a_resume_needs_the_same_base(lab: Lab) -> None:
    trainer = trainer_of(lab)
    trainer.journal.close()
    fingerprints = trainer.family.fingerprints()
    setup._refuse_other_base(trainer.run, fingerprints)
    part = next(iter(fingerprints))
    with pytest.raises(VideotuneError, match="the base model has changed"):
        setup._refuse_other_base(trainer.run, fingerprints | {part: "another"})


def test_initial_weights_are_those_of_a_run_s_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_family: Callable[..., Any]
) -> None:
    """A run that resumes after that step already has its own weights."""
    monkeypatch.setenv("HOME", str(tmp_path))
    family = tiny_family("wan")
    config = parse({"init_from": "~/checkpoint"})
    assert setup._initial_weights(parse({}), 1, family) is None
    assert setup._initial_weights(config, 2, family) is None
    source = tmp_path / "checkpoint"
    with pytest.raises(VideotuneError, match=f"no such file or folder: {source}"):
        setup._initial_weights(config, 1, family)
    source.mkdir()
    assert setup._initial_weights(config, 1, family) == source
