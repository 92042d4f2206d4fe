"""What a run leaves in its folder, in which nothing is written over, and which is no dataset."""

import os
import shutil
from pathlib import Path

import pytest

from tests.commands.safety_kit import Finished, Make, listing, resume, steps_of, warnings_of
from tests.kills import kill_points, killed_at
from tests.runs import open_run
from tests.shell import check, train
from videotune.errors import DONE, DoesNotFit, VideotuneError
from videotune.planner.plan import make_plan
from videotune.records import read_record
from videotune.reporter.thumbnails import copy_pictures, keep_pictures
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.rollback import FACTS
from videotune.trainer.run_dir import OWN, begin, only_process, poll_control


@pytest.mark.parametrize("name", OWN)
def test_a_folder_that_holds_something_a_run_would_write_is_refused(name: str, overrides: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    mine = run / name if "." in name else run / name / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    before = listing(run)
    with pytest.raises(VideotuneError, match="give another --out"):
        train(overrides("steps=1"), run)
    assert listing(run) == before


def test_what_a_run_writes_is_what_a_new_one_refuses(overrides: Make, tmp_path: Path) -> None:
    words = overrides(
        "steps=2", "save_every=1", "validate_every=2", "sample_after=2", "sample.steps=1", "tensorboard=true"
    )
    assert train(words, tmp_path / "run") == DONE
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert there - {".lock", "heartbeat.json"} <= set(OWN)


def test_an_older_run_without_its_config_is_not_trained_over(
    overrides: Make, finished: Finished, tmp_path: Path
) -> None:
    run = shutil.copytree(finished("steps=3"), tmp_path / "run")
    with pytest.raises(VideotuneError, match="holds a run already"):
        train(overrides("steps=1"), run)
    (run / "config.json").unlink()
    before = listing(run)
    with pytest.raises(VideotuneError, match=r"holds .*journal\.jsonl.*checkpoints"):
        train(overrides("steps=1", "seed=9"), run)
    assert listing(run) == before


def test_killed_anywhere_in_the_start_of_a_run_the_same_command_begins_it(overrides: Make, tmp_path: Path) -> None:
    job = open_run(overrides("steps=1"), tmp_path / "run", None).job
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


def test_an_out_that_cannot_be_used_is_refused_before_any_clip_is_read(overrides: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / ("x" * 255), tmp_path / ("x" * 400), tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(VideotuneError, match="--out"):
            train(Overrides(sets=("base_model_name=nowhere",)), out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def clips(small_clips: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_clips, tmp_path / "data" / "clips"))


@pytest.mark.parametrize("place", [".", "run", "deep/run", "..", "link"])
def test_a_run_and_its_dataset_do_not_lie_in_one_another(
    place: str, clips: Path, overrides: Make, tmp_path: Path
) -> None:
    os.symlink(clips, tmp_path / "link")
    out = tmp_path / "link" / "run" if place == "link" else clips / place
    before = listing(tmp_path)
    with pytest.raises(VideotuneError, match="previews would be taken as clips"):
        train(overrides("steps=1", data=clips), out)
    assert listing(tmp_path) == before


def test_the_folder_of_a_run_in_a_dataset_holds_no_clips(
    clips: Path, overrides: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = overrides("steps=2", "sample_after=2", "sample.steps=1", "samples=1", data=clips)
    assert train(words, tmp_path / "run") == DONE
    shutil.move(tmp_path / "run", clips / "deep" / "run")
    capsys.readouterr()
    assert check(words) == DONE
    assert str(clips / "deep" / "run") in "".join(capsys.readouterr())
    assert resume(clips / "deep" / "run", "steps=3") == DONE
    assert [line["step"] for line in steps_of(clips / "deep" / "run")] == [1, 2, 3]
    with pytest.raises(VideotuneError, match="holds a training run"):
        check(overrides(data=clips / "deep" / "run"))


def test_skipped_clips_stop_a_run_unless_allowed(
    clips: Path, overrides: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken video, and a clip without a caption."""
    run, settings = tmp_path / "run", overrides("steps=1", data=clips)
    (clips / "videos" / "broken.mp4").write_bytes(b"not a video")
    (clips / "captions" / "broken.txt").write_text("x")
    with pytest.raises(DoesNotFit, match=r"broken\.mp4(.|\n)*--allow-skips 1"):
        train(settings, run)
    sorted((clips / "captions").iterdir())[0].unlink()
    with pytest.raises(VideotuneError, match="caption"):
        train(settings, run)
    with pytest.raises(DoesNotFit, match="2 of the clips would be skipped"):
        train(settings, run, allow_skips="1")
    with pytest.raises(VideotuneError, match="caption"):
        train(overrides("steps=1", "missing_caption=error", data=clips), run, allow_skips="all")
    assert not run.exists()
    assert train(settings, run, allow_skips="all") == DONE
    assert "2 clips are left out, 1 of them without a usable caption" in capsys.readouterr().err
    assert resume(run) == DONE
    assert check(settings, allow_skips="all") == DONE


def test_a_failing_preview_ends_no_run(overrides: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("videotune.validation.callbacks.write_video", broken)
    assert train(overrides("steps=3", "sample_after=3", "sample.steps=1"), tmp_path / "run") == DONE
    assert ["no space left" in text for text in warnings_of(tmp_path / "run")] == [True, True]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_request_may_come_from_any_editor(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text('{"save": true, "stop": false, "other": 1}', encoding=encoding)
    assert poll_control(tmp_path) == {"save"}
    assert poll_control(tmp_path) == set()
    (tmp_path / "control.json").write_bytes(b"\xff\xfe\x00")
    assert poll_control(tmp_path) == set()
