"""Several real processes of one run, as a launcher starts them
(``tests/trainer/test_crew.py`` has the real launchers).

What a launcher does is done here: its variables, and that all end when one has died.
"""

import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fork_server, interruptions
from tests.support.run_results import steps_of
from videotune.errors import DONE, FAILED
from videotune.job.overrides import Overrides
from videotune.runs.checkpoint import complete_checkpoints

STEPS = 4
QUIET = ("sample_after=0", "validate_every=0", "sample_metrics.budget=0")
LOOKING = (
    "sample_metrics.budget=100000",
    "sample_metrics.steps=1",
    "sample_metrics.samples=2",
)

LONGEST = 300.0
"""Seconds after which processes that wait for each other are given up."""

WAITING = 120.0
"""Seconds until a process that should have ended by itself is given up."""


@dataclass(frozen=True)
class Ended:
    """How the processes of a run ended, and what they said, in the order of their
    ranks.
    """

    codes: tuple[int, ...]
    said: tuple[str, ...]

    @property
    def failures(self) -> str:
        """What the processes said that failed, those first that nobody killed."""
        failed = [rank for rank, code in enumerate(self.codes) if code != DONE]
        failed.sort(key=lambda rank: self.codes[rank] == -signal.SIGKILL)
        return "\n".join(
            f"process {rank} ended with {self.codes[rank]}: {self.said[rank]}"
            for rank in failed
        )


def overrides_of(clips: Path, base: Path, cache: Path, *sets: str) -> Overrides:
    """Runs of a few steps of samples of 32x32, with an average."""
    own = (
        f"base_model_name={base}",
        f"cache_dir={cache}",
        "resolution=32x32",
        f"steps={STEPS}",
        "caption_dropout=0.3",
    )
    sets = (
        *own,
        "learning_rate=0.003",
        "ema=0.5",
        "sample.steps=1",
        "samples=1",
        *sets,
    )
    return Overrides(data=str(clips), sets=sets)


def assert_runs_close(
    run: Path,
    other: Path,
    parts: Sequence[str] = ("weights", "ema"),
    rounding: float = 5e-3,
) -> None:
    """The same windows, captions and noise levels; losses, gradients and what a
    checkpoint holds to rounding.

    A tensor is compared by the norm of the difference: where a gradient is near zero,
    Adam makes a whole step of its rounding, which differs between processors.
    """
    ours, theirs = steps_of(run), steps_of(other)
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for one, two in zip(ours, theirs, strict=True):
        assert (one["window_ids"], one["captions"]) == (
            two["window_ids"],
            two["captions"],
        )
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
        assert one["by_t"] == [
            pytest.approx(value, rel=1e-4) if value is not None else None
            for value in two["by_t"]
        ]
    for part in parts:
        a, b = (complete_checkpoints(folder)[-1].load(part) for folder in (run, other))
        assert set(a) == set(b)
        for name in b:
            assert a[name].shape == b[name].shape, name
            difference = (a[name].double() - b[name].double()).norm()
            assert difference <= rounding * b[name].double().norm(), f"{part}: {name}"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def processes(count: int, folder: Path, words: Sequence[str], fault: str = "") -> Ended:
    """``videotune`` with these words in so many processes, told of each other as
    torchrun does; ``fault`` as in FAULTS.
    """
    crowd, logs = begin(count, folder, words, fault)
    until = time.monotonic() + LONGEST
    while any(process.is_alive() for process in crowd):
        if any(process.exitcode for process in crowd) or time.monotonic() > until:
            for process in crowd:
                process.kill()
        time.sleep(0.02)
    for process in crowd:
        process.join()
    return Ended(
        tuple(int(p.exitcode or 0) for p in crowd),
        tuple(log.read_text() for log in logs),
    )


def begin(
    count: int, folder: Path, words: Sequence[str], fault: str = ""
) -> tuple[list[ForkServerProcess], list[Path]]:
    """Start the processes, and return them with the files of what they say."""
    port, logs = free_port(), [folder / f"rank-{rank}.log" for rank in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    crowd = [
        fork_server.start(one, rank, count, port, list(words), str(logs[rank]), fault)
        for rank in range(count)
    ]
    return crowd, logs


def said_by_all(
    count: int, logs: Path, words: Sequence[str], fault: str = ""
) -> list[str]:
    """Return what processes say that all fail by themselves; none kills another."""
    crowd, files = begin(count, logs, words, fault)
    for process in crowd:
        process.join(WAITING)
    is_stuck = [process.is_alive() for process in crowd]
    for process in crowd:
        process.kill()
        process.join(WAITING)
    said = [file.read_text() for file in files]
    assert not any(is_stuck), said
    assert [process.exitcode for process in crowd] == [FAILED] * count, said
    return said


def one(
    rank: int, count: int, port: int, words: list[str], log: str, fault: str
) -> None:
    """One of the processes, from its start to its end."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", buffering=1),
        os.fdopen(2, "w", buffering=1),
    )
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": 0,
    }
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    os.environ.update({name: str(value) for name, value in told.items()} | place)
    torch.set_num_threads(1)
    sys.argv = ["videotune", *words]
    if fault:
        FAULTS[fault](rank)
    from videotune.cli.main import main

    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def killed_in_the_second_save(rank: int) -> None:
    """The last process is killed while it writes its part of its second checkpoint."""
    from videotune.runs import checkpoint_writer as pieces

    write, saves = pieces._write_own, []

    def dying(aside: Path, *rest: object) -> object:
        saves.append(aside)
        if rank == 1 and len(saves) == 2:
            (aside / "weights-00002-of-00002.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(aside, *rest)  # type: ignore[arg-type]

    pieces._write_own = dying  # type: ignore[assignment]


def killed_in_the_third_save(rank: int) -> None:
    """The process that saves weights, average and optimizer is killed when it begins
    its third checkpoint.
    """
    interruptions.kill_at("runs.checkpoint_writer:write_tensors", 7)


def without_room_twice(rank: int) -> None:
    """The last process finds its disk full when a thread writes its part of the first
    checkpoint, and when that is tried again.
    """
    from videotune.runs import checkpoint_writer as pieces
    from videotune.trainer import saving as keeping

    write, tries = pieces._write_own, []
    keeping.TRY_AGAIN = 0.2

    def full(aside: Path, *rest: object) -> object:
        tries.append(aside)
        if rank == 1 and len(tries) <= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(aside))
        return write(aside, *rest)  # type: ignore[arg-type]

    pieces._write_own = full  # type: ignore[assignment]


def writes_at_once(rank: int) -> None:
    """No host has room for a copy of a checkpoint."""
    from videotune.trainer import saving

    saving.has_room_for_copy = lambda *_, **__: False  # type: ignore[assignment]


def writes_slowly(rank: int, *, seconds: float, first_call: int = 1) -> None:
    """Each file of a checkpoint takes so long, from one on, and is half there all the
    while.
    """
    from videotune.runs import checkpoint_writer

    write_tensors, calls = checkpoint_writer.write_tensors, []

    def slow(path: Path, tensors: Any) -> None:
        calls.append(path)
        if len(calls) >= first_call:
            path.write_bytes(b"half")
            time.sleep(seconds)
        write_tensors(path, tensors)

    checkpoint_writer.write_tensors = slow


def with_a_broken_disk(rank: int) -> None:
    """The disk of the last process fails when it writes its second checkpoint."""
    from videotune.runs import checkpoint_writer

    write, saves = checkpoint_writer._write_own, []

    def failing(aside: Path, *rest: object) -> object:
        saves.append(aside)
        if rank == 1 and len(saves) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(aside))
        return write(aside, *rest)  # type: ignore[arg-type]

    checkpoint_writer._write_own = failing  # type: ignore[assignment]


def killed_in_the_second_preview(rank: int, *, is_done: bool) -> None:
    """The last process is killed within its second preview: before the network runs, or
    when it has run.
    """
    from videotune.validation import decoding

    draw_samples, previews = decoding.draw_samples, []

    def dying(*arguments: Any, **named: Any) -> Any:
        previews.append(arguments)
        is_killed = rank == 1 and len(previews) == 2
        if is_killed and not is_done:
            os.kill(os.getpid(), signal.SIGKILL)
        latents = draw_samples(*arguments, **named)
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return latents

    decoding.draw_samples = dying


def not_finite_from_the_third_step(rank: int) -> None:
    """The gradients of all processes are not finite from the third step on."""
    from videotune.trainer import step

    sum_and_clip, steps = step.sum_and_clip, []

    def spoilt(trainable: Any, *rest: Any, **named: Any) -> Any:
        steps.append(rank)
        for parameter in trainable.parameters.values():
            if len(steps) > 2 and parameter.grad is not None:
                parameter.grad.mul_(float("nan"))
        return sum_and_clip(trainable, *rest, **named)

    step.sum_and_clip = spoilt


def results_noted(rank: int) -> None:
    """Each process notes the result of its training, beside its run."""
    from videotune.commands import train

    train_once = train.train_once

    def noting(overrides: Any, run: Path, **named: Any) -> Any:
        result = train_once(overrides, run, **named)
        note = {"why": result.why, "step": result.step}
        (run.parent / f"result-{rank}.json").write_text(json.dumps(note))
        return result

    train.train_once = noting


def without_a_compiler(rank: int) -> None:
    """Every call of the C++ compiler fails, and nothing is compiled already."""
    from torch._inductor import config

    config.cpp.cxx = (None, "false")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] += "-empty"


def without_kernels(rank: int) -> None:
    """Blocks are traced into the compiler's graphs, which run without its kernels: they
    take minutes to build on a CPU.
    """
    torch.compile = partial(torch.compile, backend="aot_eager_decomp_partition")


def feed_forward_spoilt(rank: int, *, is_cut: bool) -> None:
    """The feed-forward modules have no gradient, or no optimizer updates them."""
    from videotune.trainer.trainer import Trainer
    from videotune.validation.part_movement import PartMovement

    built = PartMovement.built

    def spoiling(movement: PartMovement, trainer: Trainer) -> None:
        built(movement, trainer)
        for name, module in trainer.net.named_modules():
            if is_cut and name.endswith(".ffn"):
                module.register_forward_hook(lambda *called: called[-1].detach())

        (trainable,) = trainer.pool.trainables.values()
        chosen = {
            id(parameter)
            for name, parameter in trainable.parameters.items()
            if ".ffn." in name
        }
        for group in trainable.optimizer.param_groups:
            group["weight_decay"] = 0.0  # it would move a part without a gradient
            if not is_cut:
                group["params"] = [
                    each for each in group["params"] if id(each) not in chosen
                ]

    PartMovement.built = spoiling  # type: ignore[method-assign]


def entries_noted(rank: int, *, last_entry: int = 0) -> None:
    """Each entry that is written to a cache is noted beside it; with ``last_entry`` the
    process of rank 1 is killed after so many of its own.
    """
    from videotune.latent_cache.store import LatentCache

    put = LatentCache.put
    written: list[str] = []

    def noting(store: LatentCache, kind: str, key: str, *content: Any) -> None:
        put(store, kind, key, *content)
        written.append(key)
        with (store.folder.parent / "written.log").open("a") as notes:
            notes.write(f"{kind}/{key} {rank}\n")
        if rank == 1 and len(written) == last_entry:
            os.kill(os.getpid(), signal.SIGKILL)

    LatentCache.put = noting  # type: ignore[method-assign]


def shares_noted(rank: int) -> None:
    """Each process notes the windows of its samples in each step, beside the run."""
    from videotune.trainer import loop

    train_step = loop.train_step
    run = Path(sys.argv[sys.argv.index("--out") + 1])

    def noting(settings: Any, net: Any, trainable: Any, batch: Any, *rest: Any) -> Any:
        windows = [] if batch.batch is None else list(batch.batch.window_ids)
        note = {"rank": rank, "step": batch.step, "window_ids": windows}
        with (run.parent / "shares.jsonl").open("a") as notes:
            notes.write(f"{json.dumps(note)}\n")
        return train_step(settings, net, trainable, batch, *rest)

    loop.train_step = noting  # type: ignore[assignment]


def slow_in_each_step(rank: int, *, others_seconds: float) -> None:
    """The process of rank 1 sleeps in each of its steps; the others sleep less."""
    from videotune.trainer import step

    forward_pass = step.forward_pass

    def delayed(*arguments: Any) -> Any:
        time.sleep(0.4 if rank == 1 else others_seconds)
        return forward_pass(*arguments)

    step.forward_pass = delayed


def writes_and_steps_slowly(rank: int) -> None:
    """A checkpoint takes longer than a step, and is written long before the next one."""
    writes_slowly(rank, seconds=0.2)
    slow_in_each_step(rank, others_seconds=0.4)


FAULTS: dict[str, Callable[[int], None]] = {
    "entries noted": entries_noted,
    "killed after an entry": partial(entries_noted, last_entry=1),
    "feed-forward cut": partial(feed_forward_spoilt, is_cut=True),
    "feed-forward not updated": partial(feed_forward_spoilt, is_cut=False),
    "no kernels": without_kernels,
    "no compiler": without_a_compiler,
    "killed in the second save": killed_in_the_second_save,
    "killed in the third save": killed_in_the_third_save,
    "no room twice": without_room_twice,
    "shares noted": shares_noted,
    "writes at once": writes_at_once,
    "writes and steps slowly": writes_and_steps_slowly,
    "writes slowly": partial(writes_slowly, seconds=0.3),
    "stuck in the second save": partial(writes_slowly, seconds=120.0, first_call=4),
    "killed before the second preview": partial(
        killed_in_the_second_preview, is_done=False
    ),
    "killed after the second preview": partial(
        killed_in_the_second_preview, is_done=True
    ),
    "not finite from the third step": not_finite_from_the_third_step,
    "results noted": results_noted,
    "broken disk": with_a_broken_disk,
    "one slow in each step": partial(slow_in_each_step, others_seconds=0.0),
    "all slow in each step": partial(slow_in_each_step, others_seconds=0.4),
}
