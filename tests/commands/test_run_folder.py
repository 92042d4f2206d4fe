"""A new run begins in a folder of its own, in which nothing is written over, and which is no dataset."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kills import kill_points, killed_at
from tests.runs import open_run
from tests.shell import check, train
from videotune.errors import DONE, VideotuneError
from videotune.planner.plan import make_plan
from videotune.records import read_record
from videotune.reporter.thumbnails import copy_pictures, keep_pictures
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume
from videotune.trainer.rollback import FACTS
from videotune.trainer.run_dir import OWN, begin, only_process

Say = Callable[..., Overrides]


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", OWN)
def test_a_folder_that_holds_something_a_run_would_write_is_refused(name: str, said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    mine = run / name if "." in name else run / name / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    before = listing(run)
    with pytest.raises(VideotuneError, match="give another --out"):
        train(said("steps=1"), run)
    assert listing(run) == before


def test_what_a_run_writes_is_what_a_new_one_refuses(said: Say, tmp_path: Path) -> None:
    words = said("steps=2", "save_every=1", "validate_every=2", "sample_after=2", "sample.steps=1", "tensorboard=true")
    assert train(words, tmp_path / "run") == DONE
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert there - {".lock", "heartbeat.json"} <= set(OWN)


def test_an_older_run_without_its_config_is_not_trained_over(said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(said("steps=2", "save_every=1"), run) == DONE
    (run / "config.json").unlink()
    before = listing(run)
    with pytest.raises(VideotuneError, match=r"holds .*journal\.jsonl.*checkpoints"):
        train(said("steps=1", "seed=9"), run)
    assert listing(run) == before


def test_killed_anywhere_in_the_start_of_a_run_the_same_command_begins_it(said: Say, tmp_path: Path) -> None:
    job = open_run(said("steps=1"), tmp_path / "run", None).job
    keep_pictures(job)

    def work(run: Path) -> None:
        with only_process(run):
            begin(run, job, {}, make_plan(job), "FLOAT_32")
            copy_pictures(job, run)

    ours = ("trainer/run_dir.py", "reporter/thumbnails.py", "videotune/files.py")
    points = kill_points(work, tmp_path / "dry", ours)
    assert len(points) > 10
    for point in points:
        run = tmp_path / str(point)
        killed = killed_at(point, work, run, ours)
        if killed and not (run / "config.json").is_file():
            work(run)
            assert not list(run.glob(".part-*"))
        copy_pictures(job, run)  # as a resume does
        assert all(read_record(run / f"{name}.json") for name in FACTS)
        assert len(list((run / "pictures").iterdir())) == len(job.library.clips)


def test_an_out_that_cannot_be_used_is_refused_before_any_clip_is_read(said: Say, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / ("x" * 255), tmp_path / ("x" * 400), tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(VideotuneError, match="--out"):
            train(Overrides(sets=("base_model_name=nowhere",)), out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def clips(small_clips: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_clips, tmp_path / "data" / "clips"))


@pytest.mark.parametrize("place", [".", "run", "deep/run", "..", "link"])
def test_a_run_and_its_dataset_do_not_lie_in_one_another(place: str, clips: Path, said: Say, tmp_path: Path) -> None:
    os.symlink(clips, tmp_path / "link")
    out = tmp_path / "link" / "run" if place == "link" else clips / place
    before = listing(tmp_path)
    with pytest.raises(VideotuneError, match="previews would be taken as clips"):
        train(said("steps=1", data=clips), out)
    assert listing(tmp_path) == before


def test_the_folder_of_a_run_in_a_dataset_holds_no_clips(
    clips: Path, said: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = said("steps=2", "sample_after=2", "sample.steps=1", "samples=1", data=clips)
    assert train(words, tmp_path / "run") == DONE
    shutil.move(tmp_path / "run", clips / "deep" / "run")
    capsys.readouterr()
    assert check(words) == DONE
    assert str(clips / "deep" / "run") in "".join(capsys.readouterr())
    assert train(Overrides(sets=("steps=3",)), clips / "deep" / "run", resume=Resume()) == DONE
    assert [line["step"] for line in read_journal(clips / "deep" / "run") if line["kind"] == "step"] == [1, 2, 3]
    with pytest.raises(VideotuneError, match="holds a training run"):
        check(said(data=clips / "deep" / "run"))
