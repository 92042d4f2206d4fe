"""A step that does not fit: said in words with what would help, nothing lost, and the first remedy goes on with the run."""

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.safety_kit import equal, facts_of, furthest, of_kind, start, state, steps_of, warnings_of
from tests.shell import train
from videotune.config.resolve import parse
from videotune.errors import DONE, SKIPPED, DoesNotFit, VideotuneError
from videotune.files import read_json
from videotune.planner.out_of_memory import remedies
from videotune.trainer import loop
from videotune.trainer import step as room
from videotune.trainer import updates as ways
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume
from videotune.trainer.step import of_memory
from videotune.trainer.trainer import Trainer

Say = Callable[..., Overrides]


def complete(run: Path) -> list[int]:
    return [one.step for one in complete_checkpoints(run)]


def fail_in_forward(monkeypatch: pytest.MonkeyPatch, number: int, error: Callable[[], BaseException]) -> None:
    """The number-th forward pass of the network in training raises it, as a device that is too small does."""
    make, passes = loop.step_records, []

    def with_hook(trainer: Trainer) -> Any:
        def hook(module: Any, given: Any) -> None:
            passes.append(1)
            if len(passes) == number:
                raise error()

        trainer.net.register_forward_pre_hook(hook)
        return make(trainer)

    monkeypatch.setattr(loop, "step_records", with_hook)


def cuda_error() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB")


def test_a_step_that_does_not_fit_is_told_its_state_kept_and_the_first_remedy_goes_on(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=6", "save_every=0", "batch_size=4", "ema.decay=0.9", "gradient_checkpointing=OFF")
    assert train(Overrides(data=words.data, sets=(*words.sets, "save_every=3")), straight) == DONE
    fail_in_forward(monkeypatch, 4, cuda_error)
    with pytest.raises(DoesNotFit) as caught:
        train(words, run)
    monkeypatch.undo()
    assert caught.value.exit_code == SKIPPED
    text = str(caught.value)
    shape = re.search(r"(\d+)x(\d+)x(\d+)", text)
    bucket = next(one for one in read_json(run / "plan.json")["buckets"] if shape and one["shape"].startswith(shape[0]))
    assert text.startswith(
        f"out of memory in step 4: 4 samples of {bucket['shape']} pixels, {bucket['tokens']} tokens each."
    )
    assert "Checkpoints: complete are those of the steps 3; go on with: videotune train --out" in text
    first = next(line.strip() for line in text.splitlines() if line.startswith("  "))
    assert first.startswith("--resume --set micro_batch_size=1:")
    assert "gradient_checkpointing=ON" in text
    assert complete(run) == [3]
    assert equal(state(run, 3), state(straight, 3))
    assert [line["step"] for line in steps_of(run)] == [1, 2, 3], "the line that came late is there too"
    assert any("out of memory in step 4" in text for text in warnings_of(run))
    remedy = tuple(re.findall(r"--set (\S+?):?(?: |$)", first))
    assert remedy == ("micro_batch_size=1",)
    assert train(Overrides(sets=remedy), run, resume=Resume()) == DONE
    assert furthest(state(run, 6), state(straight, 6)) < 1e-3
    assert [line["window_ids"] for line in steps_of(run)] == [line["window_ids"] for line in steps_of(straight)]
    for ours, theirs in zip(steps_of(run), steps_of(straight), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    (line,) = of_kind(run, "resume")
    assert line["changes"] == ["micro_batch_size: 4 -> 1"]


def test_the_remedy_that_changes_nothing_else_is_exact(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks computed twice give the same bits on one CPU."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=4", "save_every=0", "gradient_checkpointing=OFF")
    assert train(words, straight) == DONE
    fail_in_forward(monkeypatch, 3, cuda_error)
    with pytest.raises(DoesNotFit, match="--resume --set gradient_checkpointing=ON"):
        train(words, run)
    monkeypatch.undo()
    assert train(Overrides(sets=("gradient_checkpointing=ON",)), run, resume=Resume()) == DONE
    assert equal(state(run, 4), state(straight, 4))
    assert facts_of(run) == facts_of(straight)


def test_in_the_first_step_nothing_is_saved_and_a_resume_begins_at_0(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=2", "batch_size=2")
    assert train(words, straight) == DONE
    fail_in_forward(monkeypatch, 1, MemoryError)
    with pytest.raises(DoesNotFit, match=r"in step 1: .* Nothing was saved before; a resume begins at step 0"):
        train(words, run)
    monkeypatch.undo()
    assert complete(run) == []
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert equal(state(run, 2), state(straight, 2))


def test_a_state_that_may_be_half_updated_is_not_saved(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer ran out of memory in the middle of its update: only what was saved before is good."""
    run, updates, apply = tmp_path / "run", [], ways.apply

    def half(optimizer: Any, good: Any) -> None:
        updates.append(1)
        if len(updates) == 4:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1.0)
            raise cuda_error()
        apply(optimizer, good)

    monkeypatch.setattr(ways, "apply", half)
    with pytest.raises(DoesNotFit, match="complete are those of the steps 2; go on with"):
        train(said("steps=6", "save_every=2"), run)
    assert complete(run) == [2]


def test_another_error_is_no_want_of_memory(said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_forward(monkeypatch, 2, lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(said("steps=3"), tmp_path / "run")


def test_a_real_want_of_memory_on_the_host(server: None, said: Say, tmp_path: Path) -> None:
    """The process may have no more address space: torch's allocator for the CPU says so in words of its own."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=4", "save_every=0")
    assert train(words, straight) == DONE
    running = start(words, run, first=narrow, given=(3,))
    assert running.ended() == SKIPPED
    assert "videotune: out of memory in step 3: 1 samples of " in running.said
    assert "Traceback" not in running.said
    assert complete(run) == [2]
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert equal(state(run, 4), state(straight, 4))


def narrow(step: int) -> None:
    """From this step on the process has 64 MB more than it holds, and the step wants 256."""
    loss, passes = room.denoising_loss, []

    def greedy(*given: Any) -> Any:
        passes.append(1)
        if len(passes) == step:
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), resource.RLIM_INFINITY))
            torch.empty(256 << 20, dtype=torch.uint8).fill_(1)
        return loss(*given)

    room.denoising_loss = greedy  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (cuda_error(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("Expected all tensors to be on the same device"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_errors_say_that_there_was_no_room(error: BaseException, is_memory: bool) -> None:
    assert of_memory(error) == is_memory


def test_what_a_resume_takes_comes_first_and_nothing_is_named_that_would_not_help() -> None:
    small = {"batch_size": 1, "gradient_checkpointing": "ON", "optimizer": {"name": "ADAMW_8BIT"}, "lora": {"rank": 4}}
    new = [
        "a new run with weight_dtype=FLOAT_8",
        "a new run with a smaller resolution",
        "a new run with fewer video_config.frames",
    ]
    assert [line.split(":")[0] for line in remedies(parse(small), gpu=False)] == new
    assert [line.split(":")[0] for line in remedies(parse(small))] == [
        "--resume --set gradient_checkpointing=CPU_OFFLOADED",
        "--resume --set layer_offload_fraction=0.5",
        *new,
    ]
    assert "weight_dtype" not in " ".join(remedies(parse(small | {"weight_dtype": "INT_8"}))), (
        "they are rounded already"
    )
    full = small | {"training_method": "FINE_TUNE", "micro_batch_size": 1, "batch_size": 4}
    assert "layer_offload_fraction" not in " ".join(remedies(parse(full))), "its optimizer takes no weights on the host"
    assert "weight_dtype" not in " ".join(remedies(parse(full))), "what trains is not rounded"
    assert "micro_batch_size" not in " ".join(remedies(parse(full))), "it is that small already"
    lines = remedies(parse({"batch_size": 2, "gradient_accumulation_steps": 3, "gradient_checkpointing": "OFF"}))
    takes = [line.startswith("--resume") for line in lines]
    assert takes == sorted(takes, reverse=True)
    assert lines[0].startswith("--resume --set micro_batch_size=1: the same steps, one sample at a time, about 1/2 of")


def test_another_split_is_refused_where_videos_among_images_would_take_other_samples(
    said: Say, small_clips: Path, tmp_path: Path
) -> None:
    """There the samples of a step follow from batch_size alone, not from its product with the accumulation."""
    import shutil

    from PIL import Image

    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(small_clips, data, ignore=shutil.ignore_patterns(".videotune-cache"))
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 100, 50)).save(data / "videos" / f"still-{number}.png")
        (data / "captions" / f"still-{number}.txt").write_text(f"colour {number}")
    words = said("steps=2", "save_every=1", "batch_size=4", "video_config.video_batch_size_multiplier=0.5", data=data)
    assert train(words, run, allow_skips="all") == DONE
    other = Overrides(sets=("batch_size=1", "gradient_accumulation_steps=4", "steps=3"))
    with pytest.raises(VideotuneError, match=r"batch_size: images and videos are mixed .*Leave it as it was"):
        train(other, run, resume=Resume())
    assert train(Overrides(sets=("steps=3",)), run, resume=Resume()) == DONE
