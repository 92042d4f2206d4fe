"""Checkpoints are complete or absent, whatever the disk does and wherever a kill comes;
which of them stay.
"""

import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.support.failing_disk import Disk, disk, each_fault
from tests.support.kill_points import SAVING, kill_points, killed_at
from videotune.errors import VideotuneError
from videotune.files import hash_file, is_disk_full
from videotune.memory.sharding import Shard
from videotune.runs.checkpoint import (
    MARKER,
    Checkpoint,
    complete_checkpoints,
    incomplete_checkpoints,
    last_checkpoint,
    listed,
    merge_shards,
    pick,
    remove,
    superfluous,
    sweep,
)
from videotune.runs.checkpoint_writer import save_checkpoint
from videotune.trainer.saving import best_step

ADAPTER = {"a.lora_A.weight": torch.arange(6.0).view(2, 3)}
MOMENTS = {
    "a.lora_A.weight.exp_avg": torch.ones(2, 3),
    "a.lora_A.weight.step": torch.tensor(7.0),
}


def save(
    run: Path, step: int, state: dict[str, int] | None = None, kind: str = "save"
) -> Checkpoint:
    return save_checkpoint(
        run, step, {"weights": ADAPTER, "optimizer": MOMENTS}, state or {}, kind
    )


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, {"seed": 3}).folder
    last = last_checkpoint(tmp_path)
    adapter, moments, state = last.load("weights"), last.load("optimizer"), last.state()
    assert torch.equal(adapter["a.lora_A.weight"], ADAPTER["a.lora_A.weight"])
    assert all(torch.equal(moments[key], value) for key, value in MOMENTS.items())
    assert state == {"step": 7, "seed": 3}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-7"], (
        "nothing is left beside it"
    )
    paths = [path for path in folder.iterdir() if path.name != MARKER]
    there = {
        path.name: {"bytes": path.stat().st_size, "hash": hash_file(path)}
        for path in paths
    }
    assert json.loads((folder / MARKER).read_text()) == {
        "step": 7,
        "kind": "save",
        "files": there,
    }


def test_only_complete_ones_count(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step-100" / MARKER).unlink()
    (tmp_path / "checkpoints" / ".step-200.part").mkdir()
    assert [c.step for c in complete_checkpoints(tmp_path)] == [3, 20]
    assert last_checkpoint(tmp_path).step == 20
    with pytest.raises(
        VideotuneError,
        match="no complete checkpoint of step 4; complete checkpoints are those of steps 3, 20",
    ):
        pick(tmp_path, 4)
    (tmp_path / "checkpoints" / "step-20" / MARKER).unlink()
    assert listed(tmp_path) == "the only complete checkpoint is of step 3"
    save(tmp_path, 20)
    save(tmp_path, 100)
    assert last_checkpoint(tmp_path).step == 100, "an incomplete one is written anew"
    save(tmp_path, 100, kind="backup")
    assert last_checkpoint(tmp_path).kind == "save", "a save never becomes a backup"


def test_what_dead_processes_left_beside_a_file_is_swept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    for pid in (ended.pid, os.getppid()):
        (tmp_path / f".part-{pid}-journal.jsonl").touch()
    (tmp_path / ".part-mine").touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [
        f".part-{os.getppid()}-journal.jsonl",
        ".part-mine",
    ]


# ---- whatever the disk does

NEWER = {"a.lora_A.weight": torch.arange(6.0).view(2, 3) + 100}
AVERAGE = {"a.lora_A.weight": torch.arange(6.0).view(2, 3) + 50}


def save_newer(run: Path) -> None:
    """Step 9, of other numbers than ``save`` writes, with an average."""
    save_checkpoint(
        run, 9, {"weights": NEWER, "optimizer": MOMENTS, "ema": AVERAGE}, {"seed": 3}
    )


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
            not checkpoint.has_ema
            or torch.equal(
                checkpoint.load("ema")["a.lora_A.weight"], AVERAGE["a.lora_A.weight"]
            )
        )
    )


def afresh(run: Path, unfinished: bool = False) -> None:
    """A run with a checkpoint of step 5; ``unfinished``: a kill has left one of step 9
    without its marker.
    """
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
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
            "step-5",
            "step-9",
        ]

    names = each_fault(lambda: save_newer(run), lambda: afresh(run, unfinished), check)
    assert seen == {5, 9}, "faults before and after the marker"
    assert names.count("save_file") == 3
    assert {"fsync", "mkdir", "write", "replace", "rename", "open"} <= set(names)
    assert ("rmdir" in names) == unfinished


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_from_a_broken_one(number: int, tmp_path: Path) -> None:
    with disk(1, "before", number), pytest.raises(OSError) as full:
        save(tmp_path, 5)
    assert is_disk_full(full.value)
    with disk(1, "before", errno.EIO), pytest.raises(OSError) as broken:
        save(tmp_path, 5)
    assert not is_disk_full(broken.value)


def test_the_library_s_own_error_keeps_the_number_of_the_system(tmp_path: Path) -> None:
    """safetensors has an error of its own kind, with the number in its text alone;
    nothing is made up here.
    """
    from videotune.runs.checkpoint_writer import write_tensors

    with pytest.raises(OSError) as caught:
        write_tensors(tmp_path / "not there" / "weights.safetensors", ADAPTER)
    assert caught.value.errno == errno.ENOENT


# ---- wherever a kill comes


def test_killed_anywhere_in_saving_the_newest_complete_one_is_whole(
    tmp_path: Path,
) -> None:
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
        assert {path.name for path in (run / "checkpoints").iterdir()} == {
            "step-5",
            "step-9",
        }
        assert all(
            not path.name.startswith(".")
            for path in (run / "checkpoints" / "step-9").iterdir()
        )
    assert seen == {5, 9}


def test_killed_anywhere_in_taking_away_none_looks_complete_that_is_not(
    tmp_path: Path,
) -> None:
    def remove_older(run: Path) -> None:
        remove(run / "checkpoints" / "step-5")

    before = tmp_path / "before"
    afresh(before)
    save_newer(before)
    points = kill_points(
        remove_older, shutil.copytree(before, tmp_path / "dry"), SAVING
    )
    assert len(points) >= 5
    for number, point in enumerate(points):
        run = shutil.copytree(before, tmp_path / str(number))
        assert killed_at(point, remove_older, run, SAVING)
        assert [one.step for one in complete_checkpoints(run)] in ([5, 9], [9])
        assert all(is_whole(one) for one in complete_checkpoints(run))


# ---- what is no checkpoint


WHOLE = '{"step": 5, "kind": "save", "files": {"weights.safetensors": {"bytes": %d, "hash": ""}}}'


@pytest.mark.parametrize(
    ("marker", "why"),
    [
        (None, "it was never finished"),
        *[
            (text, "cannot be read")
            for text in ("", "{", "[1]", WHOLE[:26] + "}", WHOLE % 3 + "}")
        ],
        ('{"step": "5", "kind": "save", "files": {}}', "cannot be read"),
        (WHOLE % 3, "bytes of 3"),
        (WHOLE.replace("weights", "ema") % 3, "ema.safetensors is missing"),
        (
            '{"step": 4, "kind": "save", "files": {}}',
            "the checkpoint of step 4 under another name",
        ),
    ],
)
def test_a_folder_without_a_whole_marker_and_every_file_is_no_checkpoint(
    marker: str | None, why: str, tmp_path: Path
) -> None:
    (save(tmp_path, 5).folder / MARKER).unlink()
    with pytest.raises(VideotuneError, match="no complete checkpoint"):
        last_checkpoint(tmp_path)
    if marker is not None:
        (tmp_path / "checkpoints" / "step-5" / MARKER).write_text(marker)
    assert complete_checkpoints(tmp_path) == []
    assert why in incomplete_checkpoints(tmp_path)[5]
    with pytest.raises(VideotuneError, match="step 5: "):
        last_checkpoint(tmp_path)


def test_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 5)
    for name in ("step-", "step-five", "step-5-copy", "other"):
        shutil.copytree(
            tmp_path / "checkpoints" / "step-5", tmp_path / "checkpoints" / name
        )
    assert [one.step for one in complete_checkpoints(tmp_path)] == [5]
    assert incomplete_checkpoints(tmp_path) == {}


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
@example(
    ["backup", "backup"], 3, None, None
)  # counting from the end of a short list once let the first of two go
def test_the_best_and_the_last_are_never_let_go(
    kinds: list[str], backup_keep: int, save_keep: int | None, best: int | None
) -> None:
    found = made(kinds)
    gone = superfluous(
        found, backup_keep, save_keep, None if best is None else 10 * best
    )
    stay = [one for one in found if one not in gone]
    if found:
        assert found[-1] in stay
    assert all(one.step != 10 * (best or 0) for one in gone)
    for kind, most in (("backup", backup_keep), ("save", save_keep)):
        of_kind = [one for one in found if one.kind == kind]
        newest = of_kind if most is None else of_kind[max(0, len(of_kind) - most) :]
        assert [one for one in newest if one in gone] == [], (
            "the newest ones of each kind stay"
        )
        others = [one for one in stay if one.kind == kind and one not in newest]
        assert all(
            one is found[-1] or one.step == 10 * (best or 0) for one in others
        ), "and nothing else does"
    assert (
        superfluous(stay, backup_keep, save_keep, None if best is None else 10 * best)
        == []
    ), "asking twice"


def reading(step: int, value: float | None, validation: str = "a") -> dict[str, object]:
    held_out = None if value is None else {"normalised": value}
    return {
        "kind": "validation",
        "step": step,
        "validation": validation,
        "held_out": held_out,
    }


def test_the_best_one_has_the_lowest_loss_of_the_validation_set_in_use() -> None:
    lines = [reading(0, 1.0), reading(10, 0.7), reading(20, 0.8), reading(30, 0.7)]
    assert best_step(lines, {10, 20, 30}) == 10, "of two alike the earlier"
    assert best_step(lines, {20, 30}) == 30
    assert (
        best_step([*lines, reading(40, 1.0, "b"), reading(50, 0.9, "b")], {10, 40, 50})
        == 50
    )
    assert best_step([reading(10, None)], {10}) is None
    assert best_step([], {10}) is None


def test_a_file_that_the_marker_does_not_list_is_never_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path, 7).folder
    marker = json.loads((folder / MARKER).read_text())
    del marker["files"]["weights.safetensors"]
    (folder / MARKER).write_text(json.dumps(marker))
    with pytest.raises(VideotuneError, match="lists no file of weights"):
        last_checkpoint(tmp_path).load("weights")


ROWS = torch.arange(12.0).reshape(6, 2)
INDEXES = {
    "the last rows are left out": [["a", 0]],
    "the first rows are left out": [["b", 3]],
    "a gap between the pieces": [["a", 0], ["b", 4]],
    "pieces that overlap": [["a", 0], ["b", 2]],
    "pieces in another order": [["b", 3], ["a", 0]],
    "a piece twice": [["a", 0], ["a", 0]],
}
"""Wrong lists of (file, first row) of a tensor whose rows 0-2 are in a and 3-5 in b."""


@pytest.mark.parametrize("rows", [{}, {"w": Shard((6, 2), 2, 3)}], ids=["all", "some"])
@pytest.mark.parametrize("listing", INDEXES)
def test_rows_that_are_not_exactly_the_tensor_s_are_refused(
    listing: str, rows: dict[str, Shard], tmp_path: Path
) -> None:
    save_file({"w": ROWS[:3].clone()}, tmp_path / "a")
    save_file({"w": ROWS[3:].clone()}, tmp_path / "b")

    def write_index(pieces: list[list[object]]) -> None:
        index = {
            "files": ["a", "b"],
            "tensors": {"w": {"shape": [6, 2], "rows": pieces}},
        }
        (tmp_path / "weights.index.json").write_text(json.dumps(index))

    write_index([["a", 0], ["b", 3]])
    expected = ROWS[2:5] if rows else ROWS
    assert torch.equal(merge_shards(tmp_path, "weights", rows)["w"], expected)
    write_index(INDEXES[listing])
    with pytest.raises(ValueError, match="rows of w"):
        merge_shards(tmp_path, "weights", rows)


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [([], [["a", 0], ["b", 0]]), ([], []), ([], [["c", 0]]), ([3], [["a", 0]])],
    ids=["twice", "nowhere", "a row instead", "a number instead of rows"],
)
def test_a_number_that_the_index_does_not_name_once_is_an_unreadable_checkpoint(
    shape: list[int], pieces: list[list[object]], tmp_path: Path
) -> None:
    for name, value in (("a", torch.tensor(1.0)), ("b", torch.tensor(2.0))):
        save_file({"w": value}, tmp_path / name)
    save_file({"w": torch.ones(3)}, tmp_path / "c")

    def write_index(shape: list[int], pieces: list[list[object]]) -> None:
        index = {
            "files": ["a", "b", "c"],
            "tensors": {"w": {"shape": shape, "rows": pieces}},
        }
        (tmp_path / "optimizer.index.json").write_text(json.dumps(index))

    write_index([], [["b", 0]])
    assert merge_shards(tmp_path, "optimizer", {})["w"] == 2.0
    write_index(shape, pieces)
    with pytest.raises(ValueError, match=r"w\b"):
        merge_shards(tmp_path, "optimizer", {})
