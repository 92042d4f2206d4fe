"""--resume --from N: what came after is kept whole in a folder of its own, whatever the
disk or a kill does meanwhile.

After public threads of other trainers too: musubi-tuner #927 (a resume counts from 0
again), diffusion-pipe #263 (there is no way back to an earlier step), SimpleTuner #2613
(a damaged checkpoint is loaded).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command_line import Printed
from tests.support.failing_disk import Disk, each_fault
from tests.support.journal_lines import step_line
from tests.support.kill_points import SAVING, kill_points, killed_at
from tests.support.run_processes import Work, resume
from tests.support.run_results import (
    assert_same_run,
    complete,
    facts_of,
    of_kind,
    same_tensors,
    state,
    steps_of,
)
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json, write_json
from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.checkpoint_writer import save_checkpoint
from videotune.runs.journal import History, Journal, read_journal
from videotune.runs.rollback import archive_steps
from videotune.trainer.resume import checkpoint_of

LATER = {"step-9", "step-12"}
NAMES = ("config", "check", "plan")


def entry(path: str) -> dict[str, str]:
    return {"format": "diffusers", "path": path, "hash": ""}


COMPARED = {"11112222-seed42": (0, 3, 6), "33334444-seed7": (0, 3, 6, 9, 12)}
"""Comparisons of checkpoints by their name, with the steps that they show."""


def compared(name: str) -> dict[str, Any]:
    return {
        "prompt": "a ball",
        "seed": int(name.rpartition("seed")[2]),
        "steps": list(COMPARED[name]),
        "video": f"compare/{name}.mp4",
        "sheet": f"compare/{name}.png",
    }


def made(run: Path) -> Path:
    """A run of 12 steps as it lies on the disk, changed at steps 3, 9 and 11, exported
    at the end, here and elsewhere.
    """
    run.mkdir(parents=True)
    for name in NAMES:
        write_json(run / f"{name}.json", {"what": f"{name} now"}, durable=False)
        for step in (3, 9, 11):
            path = run / "before" / f"{name}-until-step-{step}.json"
            write_json(path, {"what": f"{name} until {step}"}, durable=False)
    journal = Journal(run)
    journal.event("start", steps=12)
    (run / "samples").mkdir()
    for step in range(1, 13):
        journal.write(step_line(step, loss=1 / step))
        if step % 3 == 0:
            save_checkpoint(
                run, step, {"weights": {"w": torch.full((3,), float(step))}}, {}
            )
            journal.event("save", step=step, path=f"checkpoints/step-{step}")
            (run / "samples" / f"step-{step:06d}-0123abcd-seed42.mp4").write_bytes(
                b"%d" % step
            )
    (run / "compare").mkdir()
    for name, steps in COMPARED.items():
        for step in steps:
            (run / "compare" / f"{name}-step-{step:06d}.mp4").write_bytes(b"%d" % step)
        for ending in ("mp4", "png"):
            (run / "compare" / f"{name}.{ending}").write_text(name)
    write_json(
        run / "compare" / "compare.json",
        [compared(name) for name in COMPARED],
        durable=False,
    )
    (run / "export").mkdir()
    elsewhere = run.with_name(f"{run.name}-elsewhere")
    elsewhere.mkdir(exist_ok=True)
    for place in (run / "export", elsewhere):
        for step in (6, 12):
            (place / f"run-step-{step}.safetensors").write_bytes(b"%d" % step)
    lines = [entry(f"export/run-step-{step}.safetensors") for step in (6, 12)]
    write_json(
        run / "exports.json",
        [*lines, entry(str(elsewhere / "run-step-12.safetensors"))],
        durable=False,
    )
    with (run / "journal.jsonl").open("ab") as file:
        # torn inside a letter
        file.write('{"kind": "sample", "prompt": "Würf'.encode()[:-1])
    return run


def nothing_is_lost(run: Path) -> None:
    """Wherever it was stopped: each checkpoint and sample is there once, whole; each
    line of the journal somewhere.
    """
    for step in (3, 6, 9, 12):
        (folder,) = [path for path in run.rglob(f"step-{step}") if path.is_dir()]
        (one,) = [c for c in complete_checkpoints(folder.parents[1]) if c.step == step]
        assert bool((one.load("weights")["w"] == step).all())
        (sample,) = run.rglob(f"step-{step:06d}-*.mp4")
        assert sample.read_bytes() == b"%d" % step
        for name, steps in COMPARED.items():
            assert len(list(run.rglob(f"{name}-step-{step:06d}.mp4"))) == (
                step in steps
            )
    for name in COMPARED:
        assert len(list(run.rglob(f"{name}.mp4"))) == 1
    for step in (6, 12):
        assert (
            next(run.rglob(f"run-step-{step}.safetensors")).read_bytes() == b"%d" % step
        )
    assert max(len(steps_of(path.parent)) for path in run.rglob("journal.jsonl")) == 12
    found = {
        read_json(path)["what"]
        for path in run.rglob("*.json")
        if path.name.startswith(NAMES)
    }
    assert found >= {
        f"{name} {when}"
        for name in NAMES
        for when in ("now", "until 3", "until 9", "until 11")
    }


def is_set_aside(run: Path) -> None:
    """It is at step 6, and what came after it lies in one folder."""
    nothing_is_lost(run)
    (branch,) = [
        path
        for path in (run / "branches").iterdir()
        if (path / "journal.jsonl").is_file()
    ]
    assert {path.name for path in (branch / "checkpoints").iterdir()} == LATER
    assert complete(run) == [3, 6]
    assert complete(branch) == [9, 12]
    assert len(steps_of(branch)) == 12
    for name in NAMES:
        assert read_json(run / f"{name}.json") == {"what": f"{name} until 9"}, (
            "as it was when step 7 was made"
        )
        assert read_json(branch / f"{name}.json") == {"what": f"{name} now"}
        for step in (9, 11):
            assert read_json(branch / "before" / f"{name}-until-step-{step}.json") == {
                "what": f"{name} until {step}"
            }
    assert {path.name for path in (run / "before").iterdir()} == {
        f"{name}-until-step-3.json" for name in NAMES
    }
    assert [line["path"] for line in read_json(run / "exports.json")] == [
        "export/run-step-6.safetensors"
    ]
    assert len(read_json(branch / "exports.json")) == 3
    assert (branch / "export" / "run-step-12.safetensors").read_bytes() == b"12"

    early, late = COMPARED
    for folder, name in ((run, early), (branch, late)):
        assert read_json(folder / "compare" / "compare.json") == [compared(name)]
        assert (folder / "compare" / f"{name}.mp4").read_text() == name
        assert (folder / "compare" / f"{name}.png").read_text() == name
    steps_of_late = {
        folder: sorted(
            int(path.stem.rpartition("-")[2])
            for path in (folder / "compare").glob(f"{late}-step-*.mp4")
        )
        for folder in (run, branch)
    }
    assert steps_of_late == {run: [0, 3, 6], branch: [9, 12]}


def roll_back(run: Path) -> None:
    archive_steps(run, 6, History(run).largest_step)


def test_what_came_after_lies_in_a_folder_of_its_own(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    whole = (run / "journal.jsonl").read_bytes()
    assert archive_steps(run, 6, History(run).largest_step) == run / "branches" / "1"
    is_set_aside(run)
    assert (run / "branches" / "1" / "journal.jsonl").read_bytes() == whole
    History(run).cut(6)
    assert archive_steps(run, 6, History(run).largest_step) is None, (
        "nothing came after"
    )
    assert archive_steps(run, 3, History(run).largest_step) == run / "branches" / "2"
    assert complete(run / "branches" / "2") == [6]
    assert read_json(run / "config.json") == {"what": "config until 9"}
    History(run).cut(3)
    assert archive_steps(run, 0, History(run).largest_step) == run / "branches" / "3"
    assert read_json(run / "config.json") == {"what": "config until 3"}


def test_an_export_that_lies_elsewhere_is_copied_before_its_name_is_used_again(
    tmp_path: Path,
) -> None:
    run = made(tmp_path / "run")
    (run / "export" / "run-step-12.safetensors").unlink()
    archive_steps(run, 6, History(run).largest_step)
    assert (
        run / "branches" / "1" / "export" / "run-step-12.safetensors"
    ).read_bytes() == b"12"
    assert (tmp_path / "run-elsewhere" / "run-step-12.safetensors").is_file()


def test_a_disk_that_fails_while_things_are_set_aside_loses_nothing_and_asking_again_finishes(
    tmp_path: Path,
) -> None:
    run, before = tmp_path / "run", made(tmp_path / "before")

    def again() -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(before, run)

    def check(broken: Disk) -> None:
        nothing_is_lost(run)
        archive_steps(run, 6, History(run).largest_step)
        is_set_aside(run)

    names = each_fault(lambda: roll_back(run), again, check, ("half",))
    assert {"copyfile", "rename", "replace", "mkdir"} <= set(names)


def test_killed_anywhere_in_setting_aside_nothing_is_lost_and_asking_again_finishes(
    tmp_path: Path,
) -> None:
    made(tmp_path / "before")
    # What is computed once in a process would be lines of the first run alone.
    roll_back(shutil.copytree(tmp_path / "before", tmp_path / "warm"))
    points = kill_points(
        roll_back, shutil.copytree(tmp_path / "before", tmp_path / "dry"), SAVING
    )
    assert len(points) > 25
    for number, point in enumerate(points):
        run = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        assert killed_at(point, roll_back, run, SAVING)
        nothing_is_lost(run)
        if [one.step for one in complete_checkpoints(run)] != [3, 6, 9, 12]:
            with pytest.raises(
                VideotuneError,
                match=r"the newest checkpoint .*, step 12, is not complete",
            ):
                checkpoint_of(
                    run, None, History(run)
                )  # a plain resume does not go on as if nothing were missing
        archive_steps(run, 6, History(run).largest_step)
        is_set_aside(run)
        shutil.rmtree(run)


# ---- on real runs


def test_a_rollback_repeats_the_first_run_and_keeps_it_whole(
    work: Work, capfd: Printed
) -> None:
    """Bit for bit: weights, moments, average, losses and windows; and the first run can
    itself be resumed.
    """
    preview = ("sample_after=6", "samples=1", "sample.steps=1", "sample.frames=5")
    run = work.train(
        "steps=6", "save_every=2", "lora.dropout=0.1", "ema.decay=0.9", *preview
    )
    first = {step: state(run, step) for step in (2, 4, 6)}
    facts, journal = facts_of(run), (run / "journal.jsonl").read_bytes()
    files = {
        path.name: path.read_bytes()
        for folder in ("samples", "export")
        for path in (run / folder).iterdir()
    }
    assert resume(run, step=2) == DONE
    assert "resuming from step 2" in capfd.readouterr().err
    branch = run / "branches" / "1"
    assert (branch / "journal.jsonl").read_bytes() == journal
    assert complete(branch) == [4, 6]
    assert all(same_tensors(state(branch, step), first[step]) for step in (4, 6))
    later = {
        path.name: path.read_bytes()
        for folder in ("samples", "export")
        for path in (branch / folder).iterdir()
    }
    assert {name for name in files if "step-000006" in name or "step-6" in name} == set(
        later
    )
    assert len(later) == 3, "a preview, and the file in two formats"
    assert all(later[name] == files[name] for name in later)
    assert facts_of(run) == facts
    assert all(same_tensors(state(run, step), first[step]) for step in (2, 4, 6))
    assert [line["from_step"] for line in of_kind(run, "resume")] == [2]
    assert "changes" not in of_kind(run, "resume")[0]
    (branch / "checkpoints" / "step-6").rename(work.tmp / "step-6")
    lines = [
        line
        for line in read_journal(branch)
        if not (line["kind"] == "save" and line["step"] == 6)
    ]
    (branch / "journal.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert resume(branch) == DONE
    assert same_tensors(state(branch, 6), first[6])


def test_a_rollback_to_before_a_change_restores_the_config_of_then(work: Work) -> None:
    """Not the rate that a later resume has set: the config belongs to the step.

    What is kept of a step stays.
    """
    run = work.copy("steps=4", "save_every=2")
    straight, branch = work.finished("steps=6", "save_every=2"), run / "branches" / "1"
    assert resume(run, "learning_rate=0.02", "steps=6", override=True) == DONE
    assert steps_of(run)[-1]["lr"] == {"transformer": 0.02}
    assert not same_tensors(state(run, 6), state(straight, 6))
    assert resume(run, "steps=6", step=2) == DONE
    assert_same_run(run, straight, 6)
    assert read_json(run / "config.json")["settings"]["learning_rate"] == 0.01
    assert read_json(branch / "config.json")["settings"]["learning_rate"] == 0.02
    for rate in (0.03, 0.04):
        assert (
            resume(run, f"learning_rate={rate}", "steps=4", step=2, override=True)
            == DONE
        )
    assert (
        read_json(run / "before" / "config-until-step-2.json")["settings"][
            "learning_rate"
        ]
        == 0.01
    )
    assert (
        read_json(run / "branches" / "3" / "config.json")["settings"]["learning_rate"]
        == 0.03
    )
    assert [line["lr"]["transformer"] for line in steps_of(run)] == [
        0.01,
        0.01,
        0.04,
        0.04,
    ]


def test_a_missing_checkpoint_is_an_error_that_names_the_complete_ones(
    work: Work,
) -> None:
    run = work.copy("steps=6", "save_every=2")
    before = sorted(str(path) for path in run.rglob("*"))
    for step in (3, 7):
        with pytest.raises(
            VideotuneError,
            match=rf"no complete checkpoint of step {step}; complete .* 2, 4, 6",
        ):
            resume(run, step=step)
    assert sorted(str(path) for path in run.rglob("*")) == before
    shutil.rmtree(run / "checkpoints" / "step-6")
    with pytest.raises(
        VideotuneError,
        match=r"step 6, is not complete: its folder is missing; .* 2, 4. .*--from 4",
    ):
        resume(run)
    assert resume(run, step=2) == DONE
    assert [line["step"] for line in steps_of(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["weights", "optimizer"])
def test_simpletuner_2613_a_damaged_checkpoint_is_named_and_never_loaded(
    name: str, work: Work
) -> None:
    """It does not count as one; an older one is taken when the person says so."""
    run = work.copy("steps=6", "save_every=2")
    path = run / "checkpoints" / "step-6" / f"{name}.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    cut = rf"step 6.*{name}\.safetensors has {len(whole) // 2} bytes of {len(whole)}"
    with pytest.raises(VideotuneError, match=rf"(?s){cut}.*--from 4"):
        resume(run)
    with pytest.raises(VideotuneError, match=cut):
        resume(run, step=6)
    assert resume(run, step=4) == DONE
    assert_same_run(run, work.finished("steps=6", "save_every=2"), 6)
