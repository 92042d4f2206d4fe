"""What a run leaves in its folder: nothing is written over, and what is damaged is
named in a sentence.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event, current_thread
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.command_line import (
    Bases,
    Patch,
    Printed,
    check,
    compare,
    export,
    options_of,
    train,
)
from tests.support.command_line import run as command
from tests.support.kill_points import kill_points, killed_at
from tests.support.run_parts import open_run
from tests.support.run_processes import Make, Work, refusal, resume
from tests.support.run_results import (
    assert_same_run,
    complete,
    listing,
    of_kind,
    same_tensors,
    state,
    steps_of,
    warnings_of,
)
from videotune.commands import train as train_command
from videotune.commands.export import exported
from videotune.commands.sample import open_sampler
from videotune.commands.sample_options import SampleOptions
from videotune.errors import DONE, INTERRUPTED, DoesNotFit, VideotuneError
from videotune.files import digest, read_json
from videotune.job.overrides import Overrides
from videotune.planner.plan import make_plan
from videotune.reporter.build import write_report
from videotune.reporter.contact_sheet import cache_pictures, copy_pictures
from videotune.reporter.diagnosis import diagnose, repair_journal
from videotune.runs import checkpoint_writer, journal
from videotune.runs.heartbeat import Heartbeat
from videotune.runs.journal import read_journal
from videotune.runs.rollback import RUN_RECORDS
from videotune.runs.run_dir import OWN, SCHEDULER, begin, only_process, poll_control
from videotune.runs.schemas import read_record
from videotune.trainer import checkpoint_parts, loop, saving


@pytest.mark.parametrize("name", OWN)
def test_a_folder_that_holds_something_a_run_would_write_is_refused(
    name: str, work: Work
) -> None:
    run = work.run
    mine = run / name if "." in name else run / name / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    before = listing(run)
    with pytest.raises(VideotuneError, match="choose another --out"):
        train(work.overrides("steps=1"), run)
    assert listing(run) == before


def test_a_new_run_in_the_folder_of_another_is_told_what_that_one_needs(
    work: Work,
) -> None:
    finished = work.copy("steps=3")
    with pytest.raises(VideotuneError) as error:
        train(work.overrides("steps=1"), finished)
    assert "It is finished (3 of 3 steps)" in str(error.value)
    assert f"videotune resume {finished} --set steps=6" in str(error.value)

    journal = finished / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"end"' not in line))
    with pytest.raises(VideotuneError) as error:
        train(work.overrides("steps=1"), finished)
    assert f"videotune resume {finished};" in str(error.value)
    assert "finished" not in str(error.value)


def test_what_a_run_writes_is_what_a_new_one_refuses(work: Work) -> None:
    often = ("save_every=1", "validate_every=2", "sample_after=2", "sample.steps=1")
    there = {
        path.name
        for path in work.train(
            "steps=2", *often, 'trackers=["tensorboard","mlflow"]'
        ).iterdir()
    }
    assert there - {".lock", "heartbeat.json"} <= set(OWN)


def test_a_run_that_another_process_trains_is_not_said_to_wait_for_a_resume(
    work: Work,
) -> None:
    run = work.copy("steps=3")
    Heartbeat(run).beat()  # of this process, which is alive
    with pytest.raises(VideotuneError, match="videotune wait") as told:
        train(work.overrides("steps=1"), run)
    assert "resume" not in str(told.value)


def test_an_older_run_without_its_config_is_not_trained_over(work: Work) -> None:
    run = work.copy("steps=3")
    with pytest.raises(VideotuneError, match="already holds a run"):
        train(work.overrides("steps=1"), run)
    (run / "config.json").unlink()
    before = listing(run)
    with pytest.raises(VideotuneError, match=r"holds .*journal\.jsonl.*checkpoints"):
        train(work.overrides("steps=1", "seed=9"), run)
    assert listing(run) == before


def test_killed_anywhere_in_the_start_of_a_run_the_same_command_begins_it(
    work: Work,
) -> None:
    job = open_run(work.overrides("steps=1"), work.run, None).job
    cache_pictures(job)

    def started(run: Path) -> None:
        with only_process(run):
            begin(run, job, {}, make_plan(job), "FLOAT_32")
            copy_pictures(job, run)

    ours = ("runs/run_dir.py", "reporter/contact_sheet.py", "videotune/files.py")
    points = kill_points(started, work.tmp / "dry", ours)
    assert len(points) > 10
    for point in points:
        run = work.tmp / str(point)
        killed = killed_at(point, started, run, ours)
        if killed and not (run / "config.json").is_file():
            started(run)
            assert not list(run.glob(".part-*"))
        copy_pictures(job, run)  # as a resume does
        assert all(read_record(run / f"{name}.json") for name in RUN_RECORDS)
        assert len(list((run / "pictures").iterdir())) == len(job.library.clips)


def test_an_out_that_cannot_be_used_is_refused_before_any_clip_is_read(
    work: Work,
) -> None:
    (work.tmp / "file").write_text("")
    for out in (
        work.tmp / ("x" * 255),
        work.tmp / ("x" * 400),
        work.tmp / "file" / "run",
        Path("/proc/run"),
    ):
        with pytest.raises(VideotuneError, match="--out"):
            train(Overrides(sets=("base_model_name=nowhere",)), out)
    assert [path.name for path in work.tmp.iterdir()] == ["file"]


@pytest.mark.parametrize("place", [".", "run", "deep/run", "..", "link"])
def test_a_run_and_its_dataset_do_not_lie_in_one_another(
    place: str, clips: Path, work: Work
) -> None:
    os.symlink(clips, work.tmp / "link")
    out = work.tmp / "link" / "run" if place == "link" else clips / place
    before = listing(work.tmp)
    with pytest.raises(VideotuneError, match="previews would be taken for clips"):
        train(work.overrides("steps=1", data=clips), out)
    assert listing(work.tmp) == before


def test_the_folder_of_a_run_in_a_dataset_holds_no_clips(
    clips: Path, work: Work, capsys: Printed
) -> None:
    words = work.overrides(
        "steps=2", "sample_after=2", "sample.steps=1", "samples=1", data=clips
    )
    assert train(words, work.run) == DONE
    shutil.move(work.run, clips / "deep" / "run")
    capsys.readouterr()
    assert check(words, verbose=True) == DONE
    assert str(clips / "deep" / "run") in "".join(capsys.readouterr())
    assert resume(clips / "deep" / "run", "steps=3") == DONE
    assert [line["step"] for line in steps_of(clips / "deep" / "run")] == [1, 2, 3]
    with pytest.raises(VideotuneError, match="contains a training run"):
        check(work.overrides(data=clips / "deep" / "run"))


def test_skipped_clips_stop_a_run_unless_allowed(
    clips: Path, work: Work, capsys: Printed
) -> None:
    """A broken video, and a clip without a caption."""
    run, settings = work.run, work.overrides("steps=1", data=clips)
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
        train(
            work.overrides("steps=1", "missing_caption=error", data=clips),
            run,
            allow_skips="all",
        )
    assert not run.exists()
    assert train(settings, run, allow_skips="all") == DONE
    assert "2 clips are left out, 1 without a usable caption" in capsys.readouterr().err
    assert resume(run) == DONE
    assert check(settings, allow_skips="all") == DONE


def test_a_failing_preview_ends_no_run(work: Work, monkeypatch: Patch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("videotune.validation.callbacks.write_sample", broken)
    work.train("steps=3", "sample_after=3", "sample.steps=1")
    assert ["no space left" in text for text in warnings_of(work.run)] == [True, True]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_request_may_come_from_any_editor(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text(
        '{"save": true, "stop": false, "other": 1}', encoding=encoding
    )
    assert poll_control(tmp_path) == {"save"}
    assert poll_control(tmp_path) == set()
    (tmp_path / "control.json").write_bytes(b"\xff\xfe\x00")
    assert poll_control(tmp_path) == set()


@pytest.fixture(scope="module")
def straight(
    overrides: Make, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of eight steps with checkpoints at 4 and 8, on its own copy of the base
    model.
    """
    home = tmp_path_factory.mktemp("straight")
    base = shutil.copytree(tiny_bases("wan"), home / "base")
    assert (
        train(
            overrides("steps=8", "save_every=4", f"base_model_name={base}"),
            home / "run",
        )
        == DONE
    )
    return home / "run"


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    """A copy of it that was interrupted before its end."""
    copy = Path(shutil.copytree(straight, tmp_path / "run"))
    lines = [
        line
        for line in (copy / "journal.jsonl").read_text().splitlines()
        if '"kind": "end"' not in line
    ]
    (copy / "journal.jsonl").write_text("\n".join(lines) + "\n")
    return copy


def flip(path: Path) -> None:
    """Change a bit near the end of a file."""
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def refused(run: Path, text: str) -> None:
    """A resume is refused with a sentence."""
    assert re.search(text, refusal(run, "steps=10"), re.DOTALL)


# ---- checkpoints


def test_a_checkpoint_under_another_step_s_name_is_refused(
    run: Path, tmp_path: Path
) -> None:
    renamed, copied = (
        Path(shutil.copytree(run, tmp_path / name)) / "checkpoints"
        for name in ("renamed", "copied")
    )
    shutil.rmtree(renamed / "step-8")
    (renamed / "step-4").rename(renamed / "step-8")
    refused(
        renamed.parent,
        "step 8, is not complete: it is the checkpoint of step 4 under another name",
    )
    with pytest.raises(
        VideotuneError, match="the checkpoint of step 4 under another name"
    ):
        export(renamed.parent)
    shutil.copytree(copied / "step-8", copied / "step-12")
    refused(
        copied.parent,
        "step 12, is not complete: it is the checkpoint of step 8.*--from 8",
    )
    assert resume(copied.parent, step=8) == DONE


@pytest.mark.parametrize(
    "name",
    ["weights.safetensors", "optimizer.safetensors", "state.json", "another step's"],
)
def test_a_flipped_bit_in_a_checkpoint_is_found_before_it_is_used(
    name: str, run: Path, straight: Path
) -> None:
    checkpoint = run / "checkpoints" / "step-8"
    if name == "another step's":
        name = "optimizer.safetensors"
        shutil.copy(checkpoint.with_name("step-4") / name, checkpoint)
    else:
        flip(checkpoint / name)
    refused(run, rf"{name} is damaged.*--from 4")
    if name == "weights.safetensors":
        for reader in (
            lambda: export(run),
            lambda: open_sampler(SampleOptions(("x",), 0, run, None)),
        ):
            with pytest.raises(VideotuneError, match="is damaged"):
                reader()
    assert resume(run, step=4) == DONE
    assert same_tensors(state(run, 8), state(straight, 8))


def test_an_export_with_other_bytes_is_not_loaded(run: Path) -> None:
    flip(exported(run, "diffusers"))
    with pytest.raises(VideotuneError, match="damaged"):
        exported(run, "diffusers")


# ---- JSON


DAMAGED: dict[str, Callable[[str], bytes]] = {
    "torn": lambda text: text[: len(text) // 2].encode(),
    "empty": lambda _: b"",
    "list": lambda _: b"[1]",
    "object": lambda _: b"{}",
    "null": lambda _: b"null",
    "utf-16": lambda text: text.encode("utf-16"),
    "deep": lambda _: b"[" * 100_000,
    "types": lambda text: text.replace(": ", ": [").replace(",\n", "],\n").encode(),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *[("config.json", how) for how in DAMAGED],
        *[
            (f"{name}.json", how)
            for name in ("plan", "check", "exports")
            for how in ("torn", "object", "types")
        ],
    ],
)
def test_damaged_json_is_one_sentence_everywhere(
    name: str, how: str, run: Path
) -> None:
    (run / name).write_bytes(DAMAGED[how]((run / name).read_text()))
    refused(run, rf"{name}")
    readers: list[Callable[[], object]] = [lambda: diagnose(run)]
    if name == "config.json":
        readers += [lambda: export(run), lambda: compare(run, "x", 0, None)]
        readers += [lambda: open_sampler(SampleOptions(("x",), 0, run, None))]
    if name in ("plan.json", "exports.json"):
        readers += [lambda: export(run)]
    for reader in readers:
        with pytest.raises(VideotuneError, match=name):
            reader()
    page = write_report(run).read_text()
    assert how == "object" or (name in page and "left out" in page)


def test_a_config_that_was_edited_by_hand_is_refused_unless_allowed(run: Path) -> None:
    config = read_json(run / "config.json")
    config["settings"]["learning_rate"] = 0.5
    (run / "config.json").write_text(json.dumps(config))
    refused(run, r"edited by hand.*--set KEY=VALUE --override")
    assert resume(run, "steps=9", override=True) == DONE
    assert any(
        "edited by hand" in str(line.get("changes")) for line in read_journal(run)
    )
    assert resume(run, "steps=10") == DONE


def test_a_base_with_another_scheduler_is_refused_and_other_versions_are_reported(
    straight: Path, run: Path, capsys: Printed
) -> None:
    config = read_json(run / "config.json")
    assert config["base"]["scheduler"]
    scheduler = Path(config["settings"]["base_model_name"]) / SCHEDULER
    whole = scheduler.read_text()
    try:
        scheduler.write_text(whole + "\n")
        refused(run, "scheduler_config.json is not the one")
    finally:
        scheduler.write_text(whole)
    capsys.readouterr()
    config["versions"]["torch"] = "1.0.0"
    del config["digest"]
    (run / "config.json").write_text(json.dumps(config | {"digest": digest(config)}))
    assert resume(run, "steps=9") == DONE
    assert "versions.torch: 1.0.0 ->" in capsys.readouterr().err


# ---- the journal


DAMAGED_LINES: tuple[Callable[[str], str], ...] = (
    lambda line: line.replace('"kind"', '"kjnd"'),
    lambda line: line.replace('"step": 3', '"step": "3"'),
    lambda line: line.replace('"step": 3', '"step": null'),
    lambda line: line[:40],
    lambda line: "[" * 100_000,
)


def test_a_damaged_line_of_the_journal_is_refused_by_number_and_can_be_removed(
    run: Path,
) -> None:
    """However it is damaged, the journal without it is the same, and is resumed."""
    path = run / "journal.jsonl"
    whole = path.read_text().splitlines()
    number = next(
        i for i, line in enumerate(whole) if '"kind": "step", "step": 3' in line
    )
    for times, damage in enumerate(DAMAGED_LINES, 1):
        lines = [*whole]
        lines[number] = damage(lines[number])
        path.write_text("\n".join(lines) + "\n")
        refused(run, rf"line {number + 1} is damaged.*--repair-journal")
        write_report(run)
        assert f"line {number + 1} of the journal" in (run / "report.html").read_text()
        diagnose(run)
        repair_journal(run)
        aside = run / f"journal.jsonl.damaged-{times}"
        assert aside.read_text().splitlines() == lines
        *rest, note = path.read_text().splitlines()
        assert rest == [*whole[:number], *whole[number + 1 :]]
        assert "repaired" in note

    assert resume(run, "steps=9") == DONE
    assert [line["step"] for line in steps_of(run)] == [1, 2, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("how", ["emptied", "missing", "cut short"])
def test_a_journal_that_lacks_what_was_saved_is_refused_and_can_be_repaired(
    how: str, run: Path
) -> None:
    path = run / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) if how == "cut short" else "")
    if how == "missing":
        path.unlink()
    refused(run, r"lacks the steps.*--repair-journal")
    repair_journal(run)
    assert resume(run, "steps=9") == DONE


def test_the_journal_is_parsed_once_in_a_resume(run: Path, monkeypatch: Patch) -> None:
    parsed: list[bytes] = []
    parse, there = journal.parse_line, len(read_journal(run))
    monkeypatch.setattr(
        journal, "parse_line", lambda line: (parsed.append(line), parse(line))[1]
    )
    assert resume(run, "steps=12") == DONE
    assert len(parsed) == there, (
        "each line of before once; none of those that the process itself wrote"
    )


def test_steps_go_on_while_a_checkpoint_is_written(
    work: Work, monkeypatch: Patch
) -> None:
    """The disk takes none of step 2 until step 4 is done; what it then gets is the
    state after step 2.
    """
    settings, order, later = ("steps=5", "save_every=2"), list[Any](), Event()
    step, sync = loop.train_step, checkpoint_writer.sync_file

    def stepping(*given: Any) -> Any:
        record = step(*given)
        order.append(record.step)
        if record.step == 4:
            later.set()
        return record

    def slow(path: Path) -> None:
        if "step-2." in str(path):
            assert later.wait(60), "the steps wait for the disk"
            order.append(path.stem)
        sync(path)

    straight = work.finished(*settings)
    monkeypatch.setattr(loop, "train_step", stepping)
    monkeypatch.setattr(checkpoint_writer, "sync_file", slow)
    work.train(*settings)
    assert order == [1, 2, 3, 4, "weights", "optimizer", 5]
    assert_same_run(work.run, straight, 2, 4, 5)
    assert [line["step"] for line in of_kind(work.run, "save")] == [2, 4, 5]


def test_what_the_thread_meets_ends_the_run(work: Work, monkeypatch: Patch) -> None:
    def broken(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint_writer, "sync_file", broken)
    with pytest.raises(
        VideotuneError, match=r"step 2 cannot be saved in .*Input/output error"
    ):
        work.train("steps=5", "save_every=2")
    assert complete(work.run) == []


def test_without_room_for_a_copy_a_checkpoint_is_written_at_once(
    work: Work, monkeypatch: Patch
) -> None:
    straight, threads = work.finished("steps=4", "save_every=2"), list[str]()
    write = saving.save_checkpoint

    def noted(*given: Any) -> Any:
        threads.append(current_thread().name)
        return write(*given)

    monkeypatch.setattr(saving, "save_checkpoint", noted)
    monkeypatch.setattr(
        checkpoint_parts.psutil,
        "virtual_memory",
        lambda: SimpleNamespace(available=1000),
    )
    work.train("steps=4", "save_every=2")
    assert threads == ["MainThread"] * 2
    assert_same_run(work.run, straight, 2, 4)


def test_the_report_of_a_run_names_no_folder_above_it_or_its_clips(work: Work) -> None:
    """It is made to be sent to others."""
    run = work.copy("steps=2", "sample_after=1")
    page = (run / "report.html").read_text(encoding="utf-8")
    data = json.loads((run / "config.json").read_text())["settings"]["datasets"]
    for folder in (run, *(Path(dataset["path"]) for dataset in data)):
        assert str(folder.parent) not in page
    (sample, *_) = of_kind(run, "sample")
    assert set(sample["picture"]) >= {"fault", "neighbours", "change"}


def test_a_run_that_is_stopped_before_its_first_step_is_resumed_as_it_was_begun(
    work: Work, monkeypatch: pytest.MonkeyPatch, capfd: Printed, tmp_path: Path
) -> None:
    """Ctrl-C while clips are encoded: the settings are kept, relative paths too."""

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    overrides = work.overrides("steps=3")
    with monkeypatch.context() as patch:
        patch.setattr(train_command, "run_process", interrupt)
        ended = command("train", out=work.run, **options_of(overrides))
    assert ended == INTERRUPTED
    assert f"videotune resume {work.run}" in capfd.readouterr().err
    assert not (work.run / "config.json").exists()

    monkeypatch.chdir(tmp_path)
    assert command("resume", work.run) == DONE
    config = read_json(work.run / "config.json")
    assert config["steps"] == 3
    assert not (work.run / "begun.json").exists()
    assert len(steps_of(work.run)) == 3
    with pytest.raises(VideotuneError):
        command("resume", work.run)


def test_what_was_asked_for_at_the_start_may_be_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for content in ("", "[]", '{"preset": 3}', '{"keys": "x"}'):
        (folder / "begun.json").write_text(content)
        with pytest.raises(VideotuneError):
            command("resume", folder)
