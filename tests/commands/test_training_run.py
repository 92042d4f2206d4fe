"""Whole runs on a tiny base: what is promised of a run folder, of a kill, of being asked to stop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.shell import check, train
from videotune.errors import DONE, INTERRUPTED, DoesNotFit, VideotuneError
from videotune.files import read_json, write_json
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.checkpoint_writer import entry_of
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume
from videotune.trainer.run_dir import only_process, poll_control

QUIET = ("sample_after=0", "validate_every=0")
Run = Callable[..., Path]


@pytest.fixture
def words(
    small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Overrides]:
    """Words of a run on the tiny base and the small clips, over one cache."""
    cache = tmp_path_factory.getbasetemp() / "cache"

    def make(*sets: str) -> Overrides:
        fixed = (f"base_model_name={tiny_bases('wan')}", f"cache_dir={cache}", "resolution=32x32", "learning_rate=0.01")
        return Overrides(data=str(small_clips), sets=(*fixed, *sets))

    return make


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_journal(run) if line["kind"] == "step"]


def facts_of(run: Path) -> list[Any]:
    """What must be equal in two runs that are the same: all but times."""
    names = ("step", "loss", "mse", "by_t", "lr", "grad_norm", "window_ids")
    return [[line[name] for name in names] for line in steps_of(run)]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step}"
    return {**load_file(folder / "weights.safetensors"), **load_file(folder / "optimizer.safetensors")}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def command(words: Overrides, run: Path) -> list[str]:
    out = [sys.executable, "-m", "videotune", "train", "--data", str(words.data), "--out", str(run)]
    return out + [part for text in words.sets for part in ("--set", text)]


def wait_for_step(process: subprocess.Popen[Any], run: Path, step: int) -> None:
    while process.poll() is None:
        if (run / "journal.jsonl").is_file() and any(line["step"] >= step for line in steps_of(run)):
            return
        time.sleep(0.002)
    pytest.fail(f"the run ended with {process.returncode} before step {step}")


@pytest.mark.parametrize("threads", [0, 2])
def test_killed_and_resumed_is_never_having_stopped(
    threads: int, words: Callable[..., Overrides], tmp_path: Path
) -> None:
    """kill -9 in the middle of things, --resume: weights, optimizer, losses, window ids, each step once."""
    said = words(*QUIET, "steps=24", "save_every=5", "batch_size=2", f"dataloader_threads={threads}", "warmup_steps=6")
    said = Overrides(data=said.data, sets=(*said.sets, "learning_rate_scheduler=COSINE", "lora.dropout=0.1"))
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert train(said, straight) == DONE
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(said, killed), env=environment, stderr=subprocess.DEVNULL)
    wait_for_step(process, killed, 8)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    reached, saved = steps_of(killed)[-1]["step"], complete_checkpoints(killed)[-1].step
    assert saved <= reached < 24
    assert train(Overrides(), killed, resume=Resume()) == DONE
    assert facts_of(killed) == facts_of(straight)
    assert [line["step"] for line in steps_of(killed)] == list(range(1, 25))
    assert equal(weights(killed, 24), weights(straight, 24))
    resumed = [line["from_step"] for line in read_journal(killed) if line["kind"] == "resume"]
    assert resumed == [saved]
    name = "killed-step-24.safetensors"
    theirs = load_file(straight / "export" / name.replace("killed", "straight"))
    assert equal(load_file(killed / "export" / name), theirs)


def test_weights_alone_would_not_be_a_resume(words: Callable[..., Overrides], tmp_path: Path) -> None:
    """The check above can fail: without its optimizer a checkpoint is refused, with a wrong one the run differs."""
    straight, other = tmp_path / "straight", tmp_path / "other"
    assert train(words(*QUIET, "steps=12", "save_every=6"), straight) == DONE
    assert train(words(*QUIET, "steps=12", "save_every=6"), other) == DONE
    import shutil

    from safetensors.torch import save_file

    shutil.rmtree(other / "checkpoints" / "step-12")
    moments = other / "checkpoints" / "step-6" / "optimizer.safetensors"
    wrong = {
        name: torch.zeros_like(value) if "exp_avg" in name else value for name, value in load_file(moments).items()
    }
    save_file(wrong, moments)
    marker = read_json(moments.with_name("COMPLETE"))
    marker["files"][moments.name] = entry_of(moments)
    write_json(moments.with_name("COMPLETE"), marker)
    train(Overrides(), other, resume=Resume(step=6))
    assert not equal(weights(other, 12), weights(straight, 12))
    shutil.rmtree(other / "checkpoints" / "step-12")
    moments.unlink()
    with pytest.raises(VideotuneError, match=r"step 12, is not whole: its folder is missing; none is complete"):
        train(Overrides(), other, resume=Resume())
    with pytest.raises(VideotuneError, match=r"step 6; none is complete\n.*optimizer\.safetensors is missing"):
        train(Overrides(), other, resume=Resume(step=6))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_can_go_on(number: int, words: Callable[..., Overrides], tmp_path: Path) -> None:
    said, run = words(*QUIET, "steps=4000", "save_every=0"), tmp_path / "run"
    process = subprocess.Popen(command(said, run), stderr=subprocess.PIPE, text=True)
    wait_for_step(process, run, 3)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    last = steps_of(run)[-1]["step"]
    assert [checkpoint.step for checkpoint in complete_checkpoints(run)] == [last]
    end = read_journal(run)[-1]
    assert (end["kind"], end["step"], end["why"]) == ("end", last, "interrupted")
    assert "--resume" in told
    assert "Traceback" not in told


def test_control_json_is_obeyed(words: Callable[..., Overrides], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(words("validate_every=0", "sample_after=100000", "steps=100000", "save_every=0"), run),
        stderr=subprocess.DEVNULL,
    )
    wait_for_step(process, run, 2)
    (run / "control.json").write_text(json.dumps({"save": True, "sample": True}))

    def done(kind: str) -> list[int]:
        return [line["step"] for line in read_journal(run) if line["kind"] == kind]

    while process.poll() is None and (not done("save") or len(done("sample")) < 4):
        time.sleep(0.01)
    saved = done("save")[0]
    assert done("sample") == [0, 0, saved, saved]
    assert not (run / "control.json").exists()
    (run / "control.json").write_text('{"stop": tr')  # half written: left alone until it is whole
    time.sleep(0.3)
    assert process.poll() is None
    (run / "control.json").write_text('{"stop": true}')
    assert process.wait(timeout=60) == INTERRUPTED
    assert read_journal(run)[-1]["why"] == "stopped"
    assert len(complete_checkpoints(run)) == 2


def test_previews_and_ruler_change_nothing(words: Callable[..., Overrides], tmp_path: Path) -> None:
    on, off = tmp_path / "on", tmp_path / "off"
    both = ("steps=9", "save_every=0", "lora.dropout=0.2", "sample.steps=2")
    assert train(words(*both, "sample_after=3", "validate_every=2"), on) == DONE
    assert train(words(*both, *QUIET), off) == DONE
    assert facts_of(on) == facts_of(off)
    assert equal(weights(on, 9), weights(off, 9))
    kinds = [line["kind"] for line in read_journal(on)]
    assert kinds.count("sample") == 2 * 4
    assert kinds.count("ruler") == 6
    assert len(list((on / "samples").glob("*.mp4"))) == 8


def test_a_failing_preview_ends_no_run(
    words: Callable[..., Overrides], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import videotune.validation.callbacks as room

    def broken(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(room, "write_video", broken)
    assert train(words("steps=3", "sample_after=3", "validate_every=0", "sample.steps=1"), tmp_path / "run") == DONE
    warnings = [line["text"] for line in read_journal(tmp_path / "run") if line["kind"] == "warning"]
    assert len(warnings) == 2
    assert "no space left" in warnings[0]


def test_a_run_folder_is_never_overwritten(words: Callable[..., Overrides], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(words(*QUIET, "steps=2"), run) == DONE
    before = (run / "journal.jsonl").read_bytes()
    with pytest.raises(VideotuneError, match="holds a run already"):
        train(words(*QUIET, "steps=2"), run)
    assert (run / "journal.jsonl").read_bytes() == before


def test_changed_data_is_no_resume(small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(small_clips, data, ignore=shutil.ignore_patterns(".videotune-cache"))
    sets = (*QUIET, f"base_model_name={tiny_bases('wan')}", "resolution=32x32", "steps=4", "save_every=2")
    assert train(Overrides(data=str(data), sets=sets), run) == DONE
    sorted((data / "captions").iterdir())[0].write_text("another caption")
    with pytest.raises(VideotuneError, match="has changed"):
        train(Overrides(), run, resume=Resume())


def test_skipped_clips_stop_a_run_unless_allowed(
    small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    import shutil

    data = tmp_path / "data"
    shutil.copytree(small_clips, data, ignore=shutil.ignore_patterns(".videotune-cache"))
    (data / "videos" / "broken.mp4").write_bytes(b"not a video")
    (data / "captions" / "broken.txt").write_text("x")
    sets = (*QUIET, f"base_model_name={tiny_bases('wan')}", "resolution=32x32", "steps=2")
    said = Overrides(data=str(data), sets=sets)
    with pytest.raises(DoesNotFit, match=r"broken\.mp4") as caught:
        train(said, tmp_path / "run")
    assert "--allow-skips 1" in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert train(said, tmp_path / "run", allow_skips="1") == DONE


def test_allowed_skips_are_also_clips_without_a_caption(
    small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    data = tmp_path / "data"
    shutil.copytree(small_clips, data, ignore=shutil.ignore_patterns(".videotune-cache"))
    (data / "videos" / "broken.mp4").write_bytes(b"not a video")
    sorted((data / "captions").iterdir())[0].unlink()
    sets = (*QUIET, f"base_model_name={tiny_bases('wan')}", "resolution=32x32", "steps=1")
    said, run = Overrides(data=str(data), sets=sets), tmp_path / "run"
    with pytest.raises(VideotuneError, match="caption"):
        train(said, run)
    with pytest.raises(DoesNotFit, match="2 of the clips would be skipped"):
        train(said, run, allow_skips="1")
    with pytest.raises(VideotuneError, match="caption"):
        train(replace(said, sets=(*sets, "missing_caption=error")), run, allow_skips="all")
    capsys.readouterr()
    assert train(said, run, allow_skips="all") == DONE
    assert "2 clips are left out, 1 of them without a usable caption" in capsys.readouterr().err
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert check(said, allow_skips="all") == DONE


def test_steps_that_are_never_finite_end_the_run(
    words: Callable[..., Overrides], tmp_path: Path, tiny_bases: Callable[[str], Path]
) -> None:
    import shutil

    from safetensors.torch import save_file

    base = tmp_path / "base"
    shutil.copytree(tiny_bases("wan"), base)
    path = base / "transformer" / "diffusion_pytorch_model.safetensors"
    broken = load_file(path)
    broken["proj_out.weight"][0, 0] = float("nan")
    save_file(broken, path, metadata={"format": "pt"})
    run = tmp_path / "run"
    with pytest.raises(VideotuneError, match="5 steps in a row"):
        train(words(*QUIET, "steps=50", f"base_model_name={base}"), run)
    assert [line.get("skipped") for line in steps_of(run)] == [True] * 5
    warnings = [line["text"] for line in read_journal(run) if line["kind"] == "warning"]
    assert steps_of(run)[0]["window_ids"][0] in warnings[0]


def test_killed_before_anything_was_saved_it_begins_again(words: Callable[..., Overrides], tmp_path: Path) -> None:
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    said = words(*QUIET, "steps=4", "save_every=0")
    assert train(said, straight) == DONE
    assert train(said, cut) == DONE
    import shutil

    shutil.rmtree(cut / "checkpoints")
    lines = [line for line in (cut / "journal.jsonl").read_text().splitlines() if '"save"' not in line]
    (cut / "journal.jsonl").write_text("\n".join(lines[1:4]) + "\n")  # the start line is lost as well
    assert train(Overrides(), cut, resume=Resume()) == DONE
    assert facts_of(cut) == facts_of(straight)
    assert [line["kind"] for line in read_journal(cut)].count("start") == 1


def test_resuming_what_is_done_trains_nothing(words: Callable[..., Overrides], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(words(*QUIET, "steps=3"), run) == DONE
    before = weights(run, 3)
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert equal(weights(run, 3), before)
    assert [line["step"] for line in steps_of(run)] == [1, 2, 3]
    assert [line["why"] for line in read_journal(run) if line["kind"] == "end"] == ["done"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_request_may_come_from_any_editor(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text('{"save": true, "stop": false, "other": 1}', encoding=encoding)
    assert poll_control(tmp_path) == {"save"}
    assert poll_control(tmp_path) == set()
    (tmp_path / "control.json").write_bytes(b"\xff\xfe\x00")
    assert poll_control(tmp_path) == set()


def test_a_folder_belongs_to_one_process(words: Callable[..., Overrides], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with only_process(run), pytest.raises(VideotuneError, match="another process trains"):
        train(words(*QUIET, "steps=2"), run)
    assert train(words(*QUIET, "steps=2"), run) == DONE


def test_readings_that_a_kill_prevented_are_made_after_the_resume(
    words: Callable[..., Overrides], tmp_path: Path
) -> None:
    """The last step is read though it is no multiple of validate_every, and only the preview that is missing is drawn."""
    run = tmp_path / "run"
    said = words("steps=6", "validate_every=4", "sample_after=4", "sample.steps=1", "save_every=0")
    assert train(said, run) == DONE
    lines = (run / "journal.jsonl").read_text().splitlines()
    of_them = ('"kind": "ruler"', '"kind": "sample"')
    at_6 = [line for line in lines if '"step": 6' in line and any(kind in line for kind in of_them)]
    assert len(at_6) == 3
    kept = [line for line in lines if line not in (at_6[0], at_6[2]) and '"end"' not in line]
    (run / "journal.jsonl").write_text("\n".join(kept) + "\n")
    assert train(Overrides(), run, resume=Resume()) == DONE
    after = [line for line in read_journal(run) if line["kind"] in ("ruler", "sample") and line["step"] == 6]
    assert sorted(line["kind"] for line in after) == ["ruler", "sample", "sample"]
    assert len({line["prompt"] for line in after if line["kind"] == "sample"}) == 2
