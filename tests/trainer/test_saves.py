"""When a checkpoint is due, which one is best, and what a resume restores, bit for bit."""

import errno
import os
import re
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.support.run_results import of_kind
from tests.support.thread_processes import in_threads
from tests.support.trainers import Lab, run_steps, trainer_of, weights
from videotune.config.sections import Lora
from videotune.console import size
from videotune.distributed import DistributedContext
from videotune.errors import VideotuneError
from videotune.runs.checkpoint import Checkpoint, complete_checkpoints, pick
from videotune.trainer import checkpoint_parts, saving
from videotune.trainer.checkpoint_parts import has_room_for_copy
from videotune.trainer.loop import train_steps
from videotune.trainer.optimizer_state import optimizer_state
from videotune.trainer.restoring import restore_state
from videotune.trainer.saving import (
    SPARE,
    Saving,
    _all_have_room,
    best_step,
    is_kept,
    refuse_full,
    retire,
    save,
)
from videotune.trainer.trainer import Trainer

PARTS = {
    "weights": {"a": torch.zeros(100), "b": torch.zeros(10, dtype=torch.float64)},
    "ema": {"a": torch.zeros(3, 2, dtype=torch.bfloat16)},
}
BYTES = 4 * 100 + 8 * 10 + 2 * 6


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)


def reading(step: int, loss: float | None, validation: str = "v") -> dict[str, Any]:
    held_out = None if loss is None else {"normalised": loss}
    return {
        "kind": "validation",
        "step": step,
        "held_out": held_out,
        "validation": validation,
    }


@pytest.mark.parametrize(
    ("readings", "best"),
    [
        ([reading(2, 0.9), reading(4, 0.5), reading(6, 0.7)], 4),
        ([reading(2, 0.5), reading(4, 0.5), reading(6, 0.5)], 2),
        ([reading(3, 0.1), reading(2, 0.9), reading(4, 0.5)], 4),
        ([reading(2, 0.1), reading(4, 0.5), reading(2, None)], 4),
        ([reading(2, 0.1), reading(4, 0.5), reading(2, 0.8)], 4),
        ([reading(2, 0.1, "earlier"), reading(4, 0.5), reading(6, 0.7)], 4),
        ([reading(2, None), reading(4, 0.5)], 4),
        ([reading(2, None)], None),
        ([reading(3, 0.1)], None),
        ([], None),
    ],
)
def test_the_best_step_has_the_lowest_loss_of_those_that_are_kept(
    readings: list[dict[str, Any]], best: int | None
) -> None:
    """Steps 2, 4 and 6 are kept; the latest reading of a step counts, and of equal steps
    the earliest.
    """
    lines = [{"kind": "save", "step": 2}, *readings]
    assert best_step(lines, {2, 4, 6}) == best


def due_of(step: int, **fields: Any) -> tuple[bool, str]:
    """Whether a checkpoint is due after a step of ten, and of which kind."""
    config = SimpleNamespace(
        backup_every=fields.get("backup_every", 0),
        backup_after=fields.get("backup_after", 0),
    )
    trainer: Any = SimpleNamespace(
        job=SimpleNamespace(steps=10, config=config),
        signals=SimpleNamespace(stop=fields.get("stop", False)),
        dist=SimpleNamespace(is_main=fields.get("is_main", True)),
        saved_at=time.monotonic() - fields.get("minutes", 0.0) * 60,
    )
    saving = Saving(fields.get("every", 0))
    return saving.due(trainer, step, fields.get("requests", ())), saving._kind


@pytest.mark.parametrize(
    ("step", "fields", "expected"),
    [
        (3, {}, (False, "save")),
        (10, {}, (True, "save")),
        (3, {"every": 3}, (True, "save")),
        (4, {"every": 3}, (False, "save")),
        (3, {"stop": True}, (True, "save")),
        (3, {"requests": ("stop",)}, (True, "save")),
        (3, {"requests": ("save",)}, (True, "save")),
        (3, {"requests": ("sample",)}, (False, "save")),
        (3, {"backup_every": 3}, (True, "backup")),
        (4, {"backup_every": 3}, (False, "save")),
        (3, {"backup_every": 3, "every": 3}, (True, "save")),
        (3, {"backup_every": 3, "is_main": False}, (False, "save")),
        (3, {"backup_after": 5, "minutes": 5.01}, (True, "backup")),
        (3, {"backup_after": 5, "minutes": 4.9}, (False, "save")),
        (3, {"backup_after": 0.5, "minutes": 0.6}, (True, "backup")),
        (3, {"minutes": 1000}, (False, "save")),
    ],
)
def test_saves_and_backups_are_due_by_steps_time_and_request(
    step: int, fields: dict[str, Any], expected: tuple[bool, str]
) -> None:
    assert due_of(step, **fields) == expected


@pytest.mark.parametrize(
    ("every", "step", "saves"), [(0, 3, 1), (0, 9, 1), (0, 10, 0), (4, 3, 3), (4, 8, 1)]
)
def test_the_time_left_counts_the_saves_to_come(
    every: int, step: int, saves: int
) -> None:
    trainer: Any = SimpleNamespace(job=SimpleNamespace(steps=10))
    assert Saving(every).seconds_left(trainer, step, took=2.0) == 2.0 * saves


def test_a_checkpoint_needs_its_room_on_the_disk_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = BYTES + SPARE
    monkeypatch.setattr(shutil, "disk_usage", lambda run: SimpleNamespace(free=free))
    refuse_full(tmp_path, PARTS)
    free -= 1
    with pytest.raises(OSError, match="free") as error:
        refuse_full(tmp_path, PARTS)
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(tmp_path)
    text = f"{size(BYTES + SPARE)} are needed, {size(free)} free"
    assert error.value.strerror == f"{os.strerror(errno.ENOSPC)}: {text}"


def test_copies_take_at_most_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of all processes of the machine together."""
    memory = SimpleNamespace(available=2 * 3 * BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert has_room_for_copy(PARTS, processes=3)
    assert not has_room_for_copy(PARTS, processes=4)
    memory.available -= 1
    assert not has_room_for_copy(PARTS, processes=3)


def test_all_copy_or_none_does_where_processes_save_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their steps would wait for the one that writes at once."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    memory = SimpleNamespace(available=2 * 2 * BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def room(dist: DistributedContext, rows: Any, parts: list[Any]) -> bool:
        trainer: Any = SimpleNamespace(shard_rows=rows, dist=dist)
        return _all_have_room(trainer, parts[dist.rank])

    larger = PARTS | {"weights": PARTS["weights"] | {"c": torch.zeros(1)}}
    for parts, has_room in (([PARTS, PARTS], True), ([PARTS, larger], False)):
        together = in_threads(2, partial(room, rows={"a": None}, parts=parts))
        assert together == [has_room] * 2
    # A process that saves alone has the memory for itself.
    assert room(DistributedContext(), {}, [larger])
    memory.available = 2 * BYTES
    assert not room(DistributedContext(), {}, [larger])


def test_processes_that_save_together_save_what_the_main_one_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the main one knows that a backup is due."""
    saved: list[tuple[int, int, str]] = []
    monkeypatch.setattr(
        saving,
        "save",
        lambda trainer, step, kind: saved.append((trainer.dist.rank, step, kind)),
    )

    def run(dist: DistributedContext) -> None:
        config = SimpleNamespace(backup_every=3, backup_after=0)
        trainer: Any = SimpleNamespace(
            job=SimpleNamespace(steps=10, config=config),
            signals=SimpleNamespace(stop=False),
            dist=dist,
            shard_rows={"a": None},
            saved_at=time.monotonic(),
        )
        callback = Saving(0)
        assert callback.due(trainer, 3, ()) is dist.is_main
        callback.run(trainer, 3)

    in_threads(2, run)
    assert sorted(saved) == [(0, 3, "backup"), (1, 3, "backup")]


def test_a_save_counts_as_a_backup_and_a_backup_not_as_a_save(lab: Lab) -> None:
    trainer = trainer_of(lab, {"steps": 4, "resolution": "32x32"})
    save(trainer, 0, thread=False)
    assert complete_checkpoints(trainer.run) == [], "step 0 has nothing to save"
    save(trainer, 2, kind="backup", thread=False)
    save(trainer, 4, kind="save", thread=False)
    trainer.journal.close()
    kept = {
        (step, kind): is_kept(trainer.run, step, kind)
        for step in (2, 3, 4)
        for kind in ("save", "backup")
    }
    assert kept == {
        (2, "save"): False,
        (2, "backup"): True,
        (3, "save"): False,
        (3, "backup"): False,
        (4, "save"): True,
        (4, "backup"): True,
    }
    assert pick(trainer.run, 4).state()["lora_scale"] == trainer.job.config.lora.scale


def test_a_checkpoint_has_what_a_resume_compares(lab: Lab) -> None:
    """Names without a moment are kept apart, so that a lost one is not taken for new."""
    settings = {"seed": 7, "batch_size": 2, "gradient_accumulation_steps": 3}
    trainer = trainer_of(lab, settings)
    for step in (1, 2):
        if step == 2:
            next(train_steps(trainer))
        save(trainer, step, thread=False)
    trainer.journal.close()
    expected = {"seed": 7, "effective_batch": 6, "lora_scale": 1.0}
    assert trainer.job.config.lora.scale == 1.0
    names = sorted(trainer.parameters)
    for step, without_state in ((1, names), (2, [])):
        state = pick(trainer.run, step).state()
        for key, value in (expected | {"without_state": without_state}).items():
            assert state[key] == value, key


@pytest.mark.parametrize("has_room", [True, False])
def test_a_thread_writes_a_copy_if_there_is_room_for_it(
    has_room: bool, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the next step changes is not in it."""
    trainer = trainer_of(lab, {"ema": 0.9, "save_keep": 1})
    memory = SimpleNamespace(available=1 << 40 if has_room else 0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    before = weights(trainer)
    trainer.saved_at = 0.0
    begun = time.monotonic()
    save(trainer, 3, "backup")
    assert begun <= trainer.saved_at <= time.monotonic()
    pending = trainer.pending_save
    assert (pending is not None) is has_room
    if pending is not None:
        assert (pending.step, pending.is_shared) == (3, False)
        assert pending.written is not None
        assert 0 < pending.waited < time.monotonic() - begun + 1e-3
        for parameter in trainer.parameters.values():
            parameter.data.zero_()
        saving.finish_pending_save(trainer)
    trainer.journal.close()
    checkpoint = pick(trainer.run, 3)
    assert checkpoint.kind == "backup"
    assert checkpoint.has_ema
    saved = checkpoint.load("weights")
    assert saved.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(saved[name], value)
    (line,) = of_kind(trainer.run, "save")
    assert 0 <= line["waited"] <= line["seconds"] < time.monotonic() - begun + 1e-3


def test_the_seconds_that_steps_wait_for_a_save_add_up(lab: Lab) -> None:
    """For its copy when it begins, and for its thread when it ends."""
    trainer = trainer_of(lab)
    save(trainer, 3, "save")
    pending = trainer.pending_save
    assert pending is not None
    pending.waited = 100.0
    saving.finish_pending_save(trainer)
    trainer.journal.close()
    (line,) = of_kind(trainer.run, "save")
    assert 100 <= line["waited"] < 160


def test_what_has_no_moment_is_named_by_all_processes_that_save_together() -> None:
    def state(dist: DistributedContext) -> dict[str, Any]:
        own = ("both", f"only {dist.rank}", f"with {dist.rank}")
        config = SimpleNamespace(seed=1, training_method="FINE_TUNE")
        trainer: Any = SimpleNamespace(
            parameters=dict.fromkeys(own),
            shard_rows={"a": None},
            dist=dist,
            job=SimpleNamespace(config=config, effective_batch=2),
        )
        parts = {"optimizer": {f"with {dist.rank}.step#": torch.zeros(())}}
        return saving._state_of(trainer, parts)

    for content in in_threads(2, state):
        assert content == {
            "seed": 1,
            "effective_batch": 2,
            "without_state": ["both", "only 0", "only 1"],
            "lora_scale": None,
        }


def test_the_best_step_stays_beside_the_newest_of_each_kind(lab: Lab) -> None:
    trainer = trainer_of(lab, {"steps": 9, "save_keep": 1, "backup_keep": 2})
    for step, kind in enumerate(("save", "save", *["backup"] * 4, "save", "save"), 1):
        save(trainer, step, kind, thread=False)
        if step in (1, 2):
            held_out = {"normalised": 0.5 * step}
            trainer.journal.event("validation", step=step, held_out=held_out)
    retire(trainer)
    trainer.journal.close()
    kept = [checkpoint.step for checkpoint in complete_checkpoints(trainer.run)]
    assert kept == [1, 5, 6, 8]


def test_scales_that_modules_may_have_of_their_own_are_saved_by_module() -> None:
    names = ("a.lora_A", "a.lora_B", "b.lora_A", "b.lora_B")
    trainables = {"transformer": SimpleNamespace(parameters=dict.fromkeys(names))}

    def scale_of(lora: Lora, method: str = "LORA") -> Any:
        config = SimpleNamespace(training_method=method, lora=lora)
        trainer: Any = SimpleNamespace(
            job=SimpleNamespace(config=config),
            pool=SimpleNamespace(trainables=trainables),
        )
        return checkpoint_parts.lora_scale(trainer)

    assert scale_of(Lora(rank=4, alpha=2)) == 0.5
    assert scale_of(Lora(rank=4, alpha=2), "FINE_TUNE") is None
    modules = [{"pattern": "b", "rank": 8, "alpha": 8.0}]
    by_module = scale_of(
        Lora.model_validate({"rank": 4, "alpha": 2, "modules": modules})
    )
    assert by_module == {"a": 0.5, "b": 1.0}


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Everything that the next step depends on."""
    state = {f"weights.{name}": value for name, value in weights(trainer).items()}
    trainable = trainer.pool.trainable
    moments = optimizer_state(trainable.optimizer, trainable.parameters)
    state |= {f"optimizer.{name}": value for name, value in moments.items()}
    state |= {f"average.{name}": value for name, value in trainer.averages.items()}
    if trainable.loss_scale is not None:
        state |= trainable.loss_scale.state()
    state |= {f"net.{name}": value for name, value in trainer.net.state_dict().items()}
    return {name: value.detach().clone() for name, value in state.items()}


class WithoutNames(Checkpoint):
    """A checkpoint that does not say which parameters had no moment."""

    def state(self) -> dict[str, Any]:
        return {}


def test_a_checkpoint_that_does_not_fit_is_named(lab: Lab) -> None:
    trainer = trainer_of(lab)
    save(trainer, 1, thread=False)
    checkpoint = pick(trainer.run, 1)
    folder = re.escape(str(checkpoint.folder))
    larger = trainer_of(lab, {"lora.rank": 4})
    with pytest.raises(VideotuneError, match=folder):
        restore_state(larger, checkpoint)

    same = trainer_of(lab)
    restore_state(same, checkpoint)
    lossy = WithoutNames(**vars(checkpoint))
    message = f"^checkpoint {folder} is not complete, .*: no optimizer state for "
    with pytest.raises(VideotuneError, match=message):
        restore_state(same, lossy)
    for each in (trainer, larger, same):
        each.journal.close()


@pytest.mark.parametrize(
    "knobs",
    [
        {"ema": 0.9},
        {"train_dtype": "FLOAT_16"},
        {"training_method": "FINE_TUNE", "ema": 0.9},
        {"optimizer": "SCHEDULE_FREE"},
    ],
    ids=["average", "float16", "fine-tuning", "schedule free"],
)
def test_a_restored_run_is_where_the_saved_one_was(
    knobs: dict[str, Any], lab: Lab
) -> None:
    """Weights, moments, average, the loss's factor and the network's own weights; its
    next step is the same one.
    """
    settings = {"steps": 3, "resolution": "32x32", "learning_rate": 0.01, **knobs}
    trainer = trainer_of(lab, settings)
    steps = train_steps(trainer)
    for _ in range(2):
        next(steps)
    save(trainer, 2, thread=False)
    saved = state_of(trainer)
    next(steps)
    ended = state_of(trainer)
    trainer.journal.close()

    again = trainer_of(lab, settings)
    restore_state(again, pick(trainer.run, 2))
    restored = state_of(again)
    assert restored.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(restored[name], value), name
    again.first_step = 3
    run_steps(again)
    again.journal.close()
    for name, value in state_of(again).items():
        assert torch.equal(value, ended[name]), name
