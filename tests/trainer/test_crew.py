"""Several processes are one: the same windows and noise, the same gradients to
rounding, one journal, nothing that hangs.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command_line import train
from tests.support.launcher import (
    LOOKING,
    QUIET,
    STEPS,
    assert_runs_close,
    free_port,
    overrides_of,
    processes,
    steps_of,
)
from tests.support.run_processes import KILLED
from tests.support.sounding_clips import write_sounding_clips
from videotune.distributed import DistributedContext, launched
from videotune.errors import DONE, FAILED, VideotuneError
from videotune.job.overrides import Overrides
from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.journal import read_journal

LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port"),
    "accelerate": ("-m", "accelerate.commands.launch", "--multi_gpu", "--mixed_precision=no", "--dynamo_backend=no",
                   "--num_machines=1", "--num_processes=2", "--main_process_port"),
}  # fmt: skip
"""Each begins two processes, and accelerate calls torchrun in its own process."""


def launch(launcher: str, *words: str) -> subprocess.Popen[str]:
    """``videotune train`` by a real launcher, in two processes."""
    launching = (*LAUNCHERS[launcher], str(free_port()))
    return subprocess.Popen(
        [sys.executable, *launching, "-m", "videotune", "train", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def overrides_from(words: Overrides, *sets: str) -> list[str]:
    return [
        "--data",
        str(words.data),
        *(part for text in (*words.sets, *sets) for part in ("--set", text)),
    ]


@pytest.fixture(scope="module")
def words(
    small_clips: Path,
    tiny_bases: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Overrides:
    return overrides_of(
        small_clips, tiny_bases("wan"), tmp_path_factory.mktemp("several") / "cache"
    )


@pytest.fixture(scope="module")
def alone(words: Overrides, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with two samples a step."""
    run = tmp_path_factory.mktemp("alone") / "run"
    sets = (*words.sets, "batch_size=2", *QUIET, "save_every=2")
    assert train(Overrides(data=words.data, sets=sets), run) == DONE
    return run


@pytest.mark.parametrize("sharding", ["FULL", "OFF"])
def test_two_processes_with_one_sample_are_one_with_two(
    sharding: str, words: Overrides, alone: Path, tmp_path: Path
) -> None:
    """With previews, readings and probes on, which the first process makes alone while
    the other waits, or both in step; the sharded ones are begun by torchrun.
    """
    run = tmp_path / "run"
    looking = ("sample_after=2", "validate_every=2", *LOOKING)
    sets = ("batch_size=1", *looking, f"sharding={sharding}")
    arguments = ["--out", str(run), *overrides_from(words, *sets)]
    if sharding == "FULL":
        process = launch("torchrun", *arguments)
        told, _ = process.communicate(timeout=240)
        assert process.returncode == DONE, told
    else:
        ended = processes(2, tmp_path / "logs", ["train", *arguments])
        told = "".join(ended.said)
        assert ended.codes == (DONE, DONE), told
    assert_runs_close(run, alone)
    assert told.count("\ntraining ") == 1, "the first process alone talks"
    kinds = Counter(line["kind"] for line in read_journal(run))
    assert (
        kinds["start"],
        kinds["sample"],
        kinds["validation"],
        kinds["save"],
        kinds["end"],
    ) == (1, 3, 3, 1, 1)
    probes = [line for line in read_journal(run) if line["kind"] == "sample_metrics"]
    assert [(line["step"], len(line["samples"])) for line in probes] == [
        (0, 2),
        (STEPS, 2),
    ]
    assert json.loads((run / "plan.json").read_text())["effective_batch"] == 2
    assert (run / "export" / f"run-step-{STEPS}.safetensors").is_file()


@pytest.mark.parametrize(
    "what_trains",
    [
        ("lora.targets=attention",),
        ('lora.targets=["attention","connectors"]',),
        ("lora.targets=attention", "sharding=FULL"),
        ("training_method=FINE_TUNE", "sharding=FULL", "learning_rate=0.0003"),
    ],
)
def test_two_processes_learn_sound_as_one_does(
    what_trains: tuple[str, ...], tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """Clips without sound have no gradient for its modules in either process, so weight
    decay moves them in neither.
    """
    clips = write_sounding_clips(tmp_path / "clips", sounding=2, silent=2)
    sets = (
        *QUIET,
        'generate=["video", "sound"]',
        "video_config.frames=17",
        "optimizer.weight_decay=0.1",
        *what_trains,
    )
    words = overrides_of(clips, tiny_bases("ltx2"), tmp_path / "cache", *sets)
    whole = tmp_path / "whole"
    both = Overrides(data=words.data, sets=(*words.sets, "batch_size=2"))
    assert train(both, whole) == DONE

    run = tmp_path / "run"
    settings = overrides_from(words, "batch_size=1", "save_every=1")
    ended = processes(2, tmp_path / "logs", ["train", "--out", str(run), *settings])
    assert ended.codes == (DONE, DONE), ended.failures
    assert_runs_close(run, whole)

    # Of three, one has no sample, and so no gradient of anything.
    of_three = shutil.copytree(run, tmp_path / "of three")
    resumed = ["train", "--out", str(of_three), "--resume", "--from", "1"]
    ended = processes(3, tmp_path / "logs", resumed)
    assert ended.codes == (DONE,) * 3, ended.failures
    assert_runs_close(of_three, whole)

    parts = [line.get("sound") for line in steps_of(run)]
    theirs = [line.get("sound") for line in steps_of(whole)]
    assert [part is None for part in parts] == [part is None for part in theirs]
    assert {part is None for part in parts} == {True, False}
    for one, other in zip(parts, theirs, strict=True):
        if one is not None and other is not None:
            assert one["mse"] == pytest.approx(other["mse"], rel=1e-4)


def test_a_resume_may_have_another_number_of_processes(
    words: Overrides, alone: Path, tmp_path: Path
) -> None:
    """Begun by two, killed, gone on with by three, of which one has no sample; then by
    one, which has both.
    """
    run = tmp_path / "run"
    logs = tmp_path / "logs"
    sets = ("batch_size=1", *QUIET, "save_every=1", "warmup_steps=0")
    begin = ["train", "--out", str(run), *overrides_from(words, *sets)]
    killed = processes(2, logs, begin, fault="killed in the third save")
    assert killed.codes[0] == KILLED, killed.said
    assert killed.codes[1] in (KILLED, FAILED), (
        "it may end by itself before it is killed"
    )
    assert complete_checkpoints(run)[-1].step == 2

    for count, steps, step in ((3, STEPS - 1, 2), (1, STEPS, STEPS - 1)):
        resumed = ["--resume", "--from", str(step), "--set", f"steps={steps}"]
        ended = processes(count, logs, ["train", "--out", str(run), *resumed])
        assert ended.codes == (DONE,) * count, ended.failures
    assert_runs_close(run, alone)
    assert [
        line.get("processes", 1)
        for line in read_journal(run)
        if line["kind"] == "resume"
    ] == [3, 1]


def test_asked_to_stop_all_stop_at_the_same_step_and_the_first_one_saves(
    words: Overrides, tmp_path: Path
) -> None:
    """SIGTERM to the launcher, which hands it on to each: to accelerate, in which
    torchrun runs.
    """
    run = tmp_path / "run"
    quiet = ("batch_size=1", *QUIET, "save_every=0", "steps=100000")
    process = launch("accelerate", "--out", str(run), *overrides_from(words, *quiet))
    while not (run / "journal.jsonl").is_file() or len(steps_of(run)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=180)
    last = steps_of(run)[-1]["step"]
    assert [one.step for one in complete_checkpoints(run)] == [last]
    assert read_journal(run)[-1]["why"] == "interrupted"


def test_an_error_of_the_first_process_ends_them_all(
    words: Overrides, tmp_path: Path
) -> None:
    sets = overrides_from(words, "sample.frames=6")
    begin = ["train", "--out", str(tmp_path / "run"), *sets]
    ended = processes(2, tmp_path / "logs", begin)
    assert DONE not in ended.codes, "a launcher ends the others"
    assert 1 in ended.codes
    assert "sample.frames" in ended.said[0]


def test_each_process_sends_the_same_messages_whatever_samples_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one process sends the others wait for: with no sample, or with none of some
    module, it sends zeros.
    """
    monkeypatch.setattr("videotune.distributed.BUFFER_NUMBERS", 100)
    sent: list[tuple[torch.dtype, int]] = []

    def doubled(value: torch.Tensor, *_: Any, **__: Any) -> None:
        sent.append((value.dtype, value.numel()))
        value.mul_(2)

    monkeypatch.setattr("torch.distributed.all_reduce", doubled)
    messages = []
    for has in ((True,) * 5, (True, False, True, False, True), (False,) * 5):
        sizes = (
            (7, 9, torch.float32),
            (30, 1, torch.float32),
            (60, 2, torch.float32),
            (3, 3, torch.bfloat16),
        )
        parameters = [
            torch.nn.Parameter(torch.zeros(n, m, dtype=dtype))
            for n, m, dtype in (*sizes, sizes[0])
        ]
        for number, (parameter, yes) in enumerate(
            zip(parameters, has, strict=True), start=1
        ):
            parameter.grad = torch.full_like(parameter, number) if yes else None
        sent.clear()
        DistributedContext(0, 2).all_reduce_gradients(parameters)
        messages.append(list(sent))
        for number, (parameter, yes) in enumerate(
            zip(parameters, has, strict=True), start=1
        ):
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
            assert (parameter.grad == (2 * number if yes else 0)).all()
    assert messages[0] == messages[1] == messages[2]
    assert messages[0] == [
        (torch.float32, 93),
        (torch.float32, 120),
        (torch.bfloat16, 9),
        (torch.float32, 63),
    ]


def test_what_a_launcher_says_must_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert launched() == (1, 2)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(VideotuneError, match="torchrun"):
        launched()
