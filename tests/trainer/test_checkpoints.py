"""Checkpoints are complete or absent, whatever the disk does and wherever a kill comes; which of them stay."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.faults import Disk, disk, each_fault
from tests.kills import SAVING, kill_points, killed_at
from videotune.errors import VideotuneError
from videotune.files import hash_file, is_disk_full
from videotune.trainer.checkpoint import (
    MARKER,
    Checkpoint,
    complete_checkpoints,
    incomplete_checkpoints,
    last_checkpoint,
    pick,
    remove,
    superfluous,
    sweep,
)
from videotune.trainer.checkpoint_writer import save_checkpoint
from videotune.trainer.saving import best_step

ADAPTER = {"a.lora_A.weight": torch.arange(6.0).view(2, 3)}
MOMENTS = {"a.lora_A.weight.exp_avg": torch.ones(2, 3), "a.lora_A.weight.step": torch.tensor(7.0)}


def save(run: Path, step: int, state: dict[str, int] | None = None, kind: str = "save") -> Checkpoint:
    return save_checkpoint(run, step, {"weights": ADAPTER, "optimizer": MOMENTS}, state or {}, kind)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, {"seed": 3}).folder
    last = last_checkpoint(tmp_path)
    adapter, moments, state = last.load("weights"), last.load("optimizer"), last.state()
    assert torch.equal(adapter["a.lora_A.weight"], ADAPTER["a.lora_A.weight"])
    assert all(torch.equal(moments[key], value) for key, value in MOMENTS.items())
    assert state == {"step": 7, "seed": 3}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-7"], "nothing is left beside it"
    paths = [path for path in folder.iterdir() if path.name != MARKER]
    there = {path.name: {"bytes": path.stat().st_size, "hash": hash_file(path)} for path in paths}
    assert json.loads((folder / MARKER).read_text()) == {"step": 7, "kind": "save", "files": there}


def test_only_complete_ones_count(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step-100" / MARKER).unlink()
    (tmp_path / "checkpoints" / ".step-200.part").mkdir()
    assert [c.step for c in complete_checkpoints(tmp_path)] == [3, 20]
    assert last_checkpoint(tmp_path).step == 20
    save(tmp_path, 100)
    assert last_checkpoint(tmp_path).step == 100, "an incomplete one is written anew"


def test_what_dead_processes_left_beside_a_file_is_swept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    for pid in (ended.pid, os.getppid()):
        (tmp_path / f".part-{pid}-journal.jsonl").touch()
    (tmp_path / ".part-mine").touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [f".part-{os.getppid()}-journal.jsonl", ".part-mine"]


def test_weights_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match="not finite"):
        save_checkpoint(tmp_path, 1, {"weights": {"w": torch.tensor([1.0, float("nan")])}}, {})
    assert complete_checkpoints(tmp_path) == []


def test_missing_pieces_are_errors(tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match="no complete checkpoint"):
        last_checkpoint(tmp_path)
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-1" / "optimizer.safetensors").unlink()
    with pytest.raises(VideotuneError, match=r"step 1: optimizer\.safetensors is missing"):
        last_checkpoint(tmp_path)


def test_a_torn_file_is_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path, 1).folder
    checkpoint, whole = last_checkpoint(tmp_path), (folder / "weights.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(whole[:-4])
    with pytest.raises(VideotuneError, match="cannot be read"):
        checkpoint.load("weights")
    with pytest.raises(VideotuneError, match=rf"{len(whole) - 4} bytes of {len(whole)}"):
        last_checkpoint(tmp_path)


# ---- whatever the disk does

NEWER = {"a.lora_A.weight": torch.arange(6.0).view(2, 3) + 100}
AVERAGE = {"a.lora_A.weight": torch.arange(6.0).view(2, 3) + 50}


def save_newer(run: Path) -> None:
    """Step 9, of other numbers than ``save`` writes, with an average."""
    save_checkpoint(run, 9, {"weights": NEWER, "optimizer": MOMENTS, "ema": AVERAGE}, {"seed": 3})


def is_whole(checkpoint: Checkpoint) -> bool:
    """Every tensor of it is that of its own step."""
    weights = checkpoint.load("weights")["a.lora_A.weight"]
    moments = checkpoint.load("optimizer")
    own = NEWER if checkpoint.step == 9 else ADAPTER
    return (
        torch.equal(weights, own["a.lora_A.weight"])
        and all(torch.equal(moments[key], value) for key, value in MOMENTS.items())
        and checkpoint.state()["step"] == checkpoint.step
        and (
            not checkpoint.has_ema or torch.equal(checkpoint.load("ema")["a.lora_A.weight"], AVERAGE["a.lora_A.weight"])
        )
    )


def afresh(run: Path, unfinished: bool = False) -> None:
    """A run with a checkpoint of step 5; ``unfinished``: a kill has left one of step 9 without its marker."""
    shutil.rmtree(run, ignore_errors=True)
    save(run, 5)
    if unfinished:
        save_newer(run)
        (run / "checkpoints" / "step-9" / MARKER).unlink()
        (run / "checkpoints" / ".step-7.part").mkdir()


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_disk_that_fails_at_any_operation_leaves_the_older_or_the_newer_checkpoint(
    unfinished: bool, tmp_path: Path
) -> None:
    run, seen = tmp_path / "run", set()

    def check(broken: Disk) -> None:
        last = last_checkpoint(run)
        seen.add(last.step)
        assert last.step in (5, 9)
        assert all(is_whole(one) for one in complete_checkpoints(run))
        save_newer(run)
        sweep(run)
        assert [one.step for one in complete_checkpoints(run)] == [5, 9]
        assert is_whole(last_checkpoint(run))
        assert incomplete_checkpoints(run) == {}
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-5", "step-9"]

    names = each_fault(lambda: save_newer(run), lambda: afresh(run, unfinished), check)
    assert seen == {5, 9}, "faults before and after the marker"
    assert names.count("save_file") == 3
    assert {"fsync", "mkdir", "write", "replace", "rename", "open"} <= set(names)
    assert ("rmdir" in names) == unfinished


def test_a_disk_that_fails_while_a_checkpoint_is_taken_away_leaves_it_whole_or_incomplete(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def again() -> None:
        afresh(run)
        save_newer(run)

    def check(broken: Disk) -> None:
        assert all(is_whole(one) for one in complete_checkpoints(run))
        assert last_checkpoint(run).step == 9
        for folder in (run / "checkpoints").glob("step-5"):
            remove(folder)
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-9"]

    names = each_fault(lambda: remove(run / "checkpoints" / "step-5"), again, check)
    assert names.index("unlink") < names.index("rmdir")


def test_a_disk_that_fails_while_a_backup_becomes_a_save_leaves_one_of_the_two(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def again() -> None:
        shutil.rmtree(run, ignore_errors=True)
        save(run, 5, kind="backup")

    def check(broken: Disk) -> None:
        assert last_checkpoint(run).kind in ("backup", "save")
        assert is_whole(last_checkpoint(run))

    each_fault(lambda: save(run, 5), again, check)
    assert last_checkpoint(run).kind == "save"
    save(run, 5, kind="backup")
    assert last_checkpoint(run).kind == "save", "and a save never becomes a backup"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_from_a_broken_one(number: int, tmp_path: Path) -> None:
    with disk(1, "before", number), pytest.raises(OSError) as full:
        save(tmp_path, 5)
    assert is_disk_full(full.value)
    with disk(1, "before", errno.EIO), pytest.raises(OSError) as broken:
        save(tmp_path, 5)
    assert not is_disk_full(broken.value)


def test_the_library_s_own_error_keeps_the_number_of_the_system(tmp_path: Path) -> None:
    """safetensors has an error of its own kind, with the number in its text alone; nothing is made up here."""
    from videotune.trainer.checkpoint_writer import write_tensors

    with pytest.raises(OSError) as caught:
        write_tensors(tmp_path / "not there" / "weights.safetensors", ADAPTER)
    assert caught.value.errno == errno.ENOENT


# ---- wherever a kill comes


def test_killed_anywhere_in_saving_the_newest_complete_one_is_whole(tmp_path: Path) -> None:
    before = tmp_path / "before"
    afresh(before, unfinished=True)
    points = kill_points(save_newer, shutil.copytree(before, tmp_path / "dry"), SAVING)
    assert len(points) >= 12
    seen = set()
    for number, point in enumerate(points):
        run = shutil.copytree(before, tmp_path / str(number))
        assert killed_at(point, save_newer, run, SAVING)
        seen.add(last_checkpoint(run).step)
        assert all(is_whole(one) for one in complete_checkpoints(run))
        save_newer(run)
        sweep(run)
        assert is_whole(pick(run, 9))
        assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-5", "step-9"}
        assert all(not path.name.startswith(".") for path in (run / "checkpoints" / "step-9").iterdir())
    assert seen == {5, 9}


def test_killed_anywhere_in_taking_away_none_looks_complete_that_is_not(tmp_path: Path) -> None:
    def remove_older(run: Path) -> None:
        remove(run / "checkpoints" / "step-5")

    before = tmp_path / "before"
    afresh(before)
    save_newer(before)
    points = kill_points(remove_older, shutil.copytree(before, tmp_path / "dry"), SAVING)
    assert len(points) >= 5
    for number, point in enumerate(points):
        run = shutil.copytree(before, tmp_path / str(number))
        assert killed_at(point, remove_older, run, SAVING)
        assert [one.step for one in complete_checkpoints(run)] in ([5, 9], [9])
        assert all(is_whole(one) for one in complete_checkpoints(run))


def _save_for_ever(run: Path) -> None:
    big = {"w": torch.zeros(200_000)}
    for step in range(1, 100_000):
        save_checkpoint(run, step, {"weights": {"w": big["w"] + step}, "optimizer": MOMENTS}, {"sum": step})


@pytest.mark.parametrize("number", [0, 1, 2])
def test_killed_at_three_moments_of_the_clock(number: int, tmp_path: Path) -> None:
    """The line tracer above kills between our lines; these come inside the library's writing too."""
    process = multiprocessing.get_context("fork").Process(target=_save_for_ever, args=(tmp_path,))
    process.start()
    begun = time.monotonic()
    while not complete_checkpoints(tmp_path) and time.monotonic() - begun < 20:
        time.sleep(0.001)
    time.sleep(0.003 * number)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    found = complete_checkpoints(tmp_path)
    assert found
    for checkpoint in found:
        assert bool((checkpoint.load("weights")["w"] == checkpoint.state()["sum"]).all())
        assert checkpoint.state()["sum"] == checkpoint.step
    assert save(tmp_path, found[-1].step + 1).step == last_checkpoint(tmp_path).step


# ---- what is no checkpoint


@pytest.mark.parametrize(
    ("marker", "why"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        ('{"step": 5, "kind": "save"}', "cannot be read"),
        ('{"step": "5", "kind": "save", "files": {}}', "cannot be read"),
        ('{"step": 5, "kind": "save", "files": {"weights.safetensors": 3}}', "cannot be read"),
        ('{"step": 5, "kind": "save", "files": {"weights.safetensors": {"bytes": 3, "hash": ""}}}', "bytes of 3"),
        ('{"step": 4, "kind": "save", "files": {}}', "the checkpoint of step 4 under another name"),
    ],
)
def test_a_marker_that_is_damaged_is_no_marker(marker: str, why: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 5).folder
    (folder / MARKER).write_text(marker)
    assert complete_checkpoints(tmp_path) == []
    assert why in incomplete_checkpoints(tmp_path)[5]
    with pytest.raises(VideotuneError, match="step 5: "):
        last_checkpoint(tmp_path)


def test_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 5)
    for name in ("step-", "step-five", "step-5-copy", "other"):
        shutil.copytree(tmp_path / "checkpoints" / "step-5", tmp_path / "checkpoints" / name)
    assert [one.step for one in complete_checkpoints(tmp_path)] == [5]
    assert incomplete_checkpoints(tmp_path) == {}


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    for step in (3, 20):
        save(tmp_path, step)
    with pytest.raises(VideotuneError, match="no complete checkpoint of step 4; complete are those of the steps 3, 20"):
        pick(tmp_path, 4)
    assert pick(tmp_path, None).step == 20


def test_an_optimizer_that_has_no_state_yet_can_be_saved(tmp_path: Path) -> None:
    """So it is where each step so far was skipped."""
    save_checkpoint(tmp_path, 1, {"weights": ADAPTER, "optimizer": {}}, {})
    assert last_checkpoint(tmp_path).load("optimizer") == {}


# ---- which of them stay


def made(kinds: list[str]) -> list[Checkpoint]:
    return [Checkpoint(10 * (i + 1), Path(), kind) for i, kind in enumerate(kinds)]


@settings(max_examples=400, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["save", "backup"]), max_size=12),
    backup_keep=st.integers(1, 5),
    save_keep=st.none() | st.integers(1, 5),
    best=st.none() | st.integers(1, 12),
)
@example(["backup", "backup"], 3, None, None)  # counting from the end of a short list once let the first of two go
def test_the_best_and_the_last_are_never_let_go(
    kinds: list[str], backup_keep: int, save_keep: int | None, best: int | None
) -> None:
    found = made(kinds)
    gone = superfluous(found, backup_keep, save_keep, None if best is None else 10 * best)
    stay = [one for one in found if one not in gone]
    if found:
        assert found[-1] in stay
    assert all(one.step != 10 * (best or 0) for one in gone)
    for kind, most in (("backup", backup_keep), ("save", save_keep)):
        of_kind = [one for one in found if one.kind == kind]
        newest = of_kind if most is None else of_kind[max(0, len(of_kind) - most) :]
        assert [one for one in newest if one in gone] == [], "the newest ones of each kind stay"
        others = [one for one in stay if one.kind == kind and one not in newest]
        assert all(one is found[-1] or one.step == 10 * (best or 0) for one in others), "and nothing else does"
    assert superfluous(stay, backup_keep, save_keep, None if best is None else 10 * best) == [], "asking twice"


def reading(step: int, value: float | None, validation: str = "a") -> dict[str, object]:
    held_out = None if value is None else {"normalised": value}
    return {"kind": "validation", "step": step, "validation": validation, "held_out": held_out}


def test_the_best_one_has_the_lowest_loss_of_the_validation_set_in_use() -> None:
    lines = [reading(0, 1.0), reading(10, 0.7), reading(20, 0.8), reading(30, 0.7)]
    assert best_step(lines, {10, 20, 30}) == 10, "of two alike the earlier"
    assert best_step(lines, {20, 30}) == 30
    assert best_step([*lines, reading(40, 1.0, "b"), reading(50, 0.9, "b")], {10, 40, 50}) == 50
    assert best_step([reading(10, None)], {10}) is None
    assert best_step([], {10}) is None


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
def test_a_file_whose_content_changed_is_never_loaded(name: str, tmp_path: Path) -> None:
    save(tmp_path, 5)
    checkpoint = save(tmp_path, 7)
    path = checkpoint.folder / name
    damaged = bytearray(path.read_bytes())
    damaged[-2] ^= 1
    path.write_bytes(damaged)
    (found,) = [one for one in complete_checkpoints(tmp_path) if one.step == 7]
    with pytest.raises(VideotuneError, match=rf"{name} is damaged.*--from 5"):
        found.state() if name == "state.json" else found.load(name.partition(".")[0])


def test_a_file_that_the_marker_does_not_list_is_never_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path, 7).folder
    marker = json.loads((folder / MARKER).read_text())
    del marker["files"]["weights.safetensors"]
    (folder / MARKER).write_text(json.dumps(marker))
    with pytest.raises(VideotuneError, match="lists no file of weights"):
        last_checkpoint(tmp_path).load("weights")
