"""A step that is not finite, or does not fit: not applied, told with its clips or
remedies, and the way on from there.
"""

import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command_line import Patch, train
from tests.support.out_of_memory import OUT_OF_MEMORY, fail_forward
from tests.support.run_processes import Work, resume, start
from tests.support.run_results import (
    assert_same_run,
    complete,
    largest_weight_difference,
    of_kind,
    same_tensors,
    state,
    steps_of,
    warnings_of,
)
from videotune.config.resolve import parse
from videotune.errors import DONE, FAILED, SKIPPED, DoesNotFit, VideotuneError
from videotune.files import read_json
from videotune.latent_cache.batch_source import BatchSource
from videotune.memory.out_of_memory import is_out_of_memory
from videotune.planner.out_of_memory import remedies
from videotune.trainer import gradients as gradients_module
from videotune.trainer import loop, network_pass
from videotune.trainer import step as step_module
from videotune.trainer import trainable as trainable_module
from videotune.trainer.loss_scale import LossScale
from videotune.trainer.trainer import Trainer
from videotune.types import LatentDistribution

METHODS = pytest.mark.parametrize(
    "method",
    [
        ("lora.rank=2", "ema.decay=0.9"),
        (
            "optimizer.name=ADAMW_8BIT",
            "lora.rank=128",
            "ema.decay=0.9",
        ),  # large enough for moments in 8 bits
        ("training_method=FINE_TUNE", "train_dtype=BFLOAT_16"),
        ("optimizer.step_in_backward=true",),
    ],
    ids=["lora", "8 bit", "masters", "within backward"],
)


def spoil_clip(
    monkeypatch: Patch, stem: str, when: Callable[[int], bool] = lambda _: True
) -> None:
    """The latents of a clip are NaN at these steps, as a VAE in half precision leaves
    them.
    """
    sample = BatchSource.draw_latents

    def spoilt(
        self: BatchSource, window: Any, variant: int, name: tuple[Any, ...]
    ) -> LatentDistribution:
        moments = sample(self, window, variant, name)
        clip = self.clips[window.clip_id]
        bad = (
            Path(clip.path).stem == stem and isinstance(name[0], int) and when(name[0])
        )
        return (
            replace(moments, mean=torch.full_like(moments.mean, float("nan")))
            if bad
            else moments
        )

    monkeypatch.setattr(BatchSource, "draw_latents", spoilt)


def spoil_gradient(monkeypatch: Patch, steps: set[int], value: float) -> None:
    """The loss is finite at these steps, and the gradient is not."""
    clip, taken = gradients_module.clip_grad_norm, []

    def spoilt(parameters: Any, most: float, norm: Any = None) -> torch.Tensor:
        taken.append(1)
        if len(taken) in steps:
            parameters[-1].grad.view(-1)[0] = value
        return clip(parameters, most, norm)

    monkeypatch.setattr(gradients_module, "clip_grad_norm", spoilt)


@METHODS
def test_a_clip_that_is_not_finite_is_named_and_its_steps_are_not_applied(
    method: tuple[str, ...], work: Work, small_clips: Path, monkeypatch: Patch
) -> None:
    """Weights, moments and average are bit for bit as before; the step counters of the
    optimizer too.
    """
    run, stem = work.run, sorted((small_clips / "videos").iterdir())[2].stem
    spoil_clip(monkeypatch, stem)
    assert (
        train(
            work.overrides("steps=9", "save_every=1", "learning_rate=0.001", *method),
            run,
        )
        == DONE
    )
    ids = {
        clip["id"][:12]: Path(clip["path"]).stem
        for clip in read_json(run / "check.json")["clips"]
    }
    skipped = [line["step"] for line in steps_of(run) if line.get("skipped")]
    assert skipped == [
        line["step"]
        for line in steps_of(run)
        if ids[line["window_ids"][0][:12]] == stem
    ]
    assert 1 <= len(skipped) < 5
    for step in range(2, 10):
        same = same_tensors(state(run, step), state(run, step - 1))
        assert same == (step in skipped), f"step {step}"
    assert [line["loss"] for line in steps_of(run) if line["step"] in skipped] == [
        None
    ] * len(skipped)
    named = {line["step"]: line["text"] for line in of_kind(run, "warning")}
    assert list(named) == skipped
    for text in named.values():
        assert "not finite, step not applied" in text
        assert [name for name in ids.values() if f"{name}.mp4" in text] == [stem]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_alone_that_is_not_finite_is_not_applied(
    value: float, work: Work, monkeypatch: Patch
) -> None:
    """From the first step on, where the optimizer has no state yet."""
    spoil_gradient(monkeypatch, {1, 3}, value)
    run = work.train("steps=4", "save_every=1", "batch_size=2", "ema.decay=0.9")
    assert [bool(line.get("skipped")) for line in steps_of(run)] == [
        True,
        False,
        True,
        False,
    ]
    assert all(isinstance(line["loss"], float) for line in steps_of(run))
    assert not same_tensors(state(run, 2), state(run, 1))
    assert same_tensors(state(run, 3), state(run, 2))
    assert not same_tensors(state(run, 4), state(run, 3))
    assert all(
        bool(value.isfinite().all())
        for value in state(run, 4).values()
        if value.is_floating_point()
    )
    for line in (line for line in steps_of(run) if line.get("skipped")):
        (text,) = [
            one["text"]
            for one in of_kind(run, "warning")
            if one["step"] == line["step"]
        ]
        assert all(name in text for name in line["window_ids"]), (
            "which of them it was cannot be known: all are named"
        )


@pytest.mark.parametrize("optimizer", ["ADAMW", "ADAMW_8BIT"])
def test_a_run_whose_first_step_was_skipped_can_be_resumed_exactly(
    optimizer: str, work: Work, monkeypatch: Patch
) -> None:
    """There the optimizer may have no state to save."""
    spoil_gradient(monkeypatch, {1}, float("nan"))
    run = work.train("steps=3", "save_every=1", f"optimizer.name={optimizer}")
    assert bool(steps_of(run)[0]["skipped"])
    first = shutil.copytree(run, work.tmp / "first")
    assert resume(run, step=1) == DONE
    assert_same_run(run, first, 3)


def test_five_in_a_row_end_the_run_with_the_last_good_state_saved(
    work: Work, monkeypatch: Patch
) -> None:
    run = work.run
    with monkeypatch.context() as patch:
        spoil_gradient(patch, {2, 4, 5, 6, 7, 8, 9, 10}, float("nan"))
        with pytest.raises(VideotuneError) as caught:
            train(work.overrides("steps=20", "save_every=0"), run)
    assert caught.value.exit_code == FAILED
    text = str(caught.value)
    assert text.startswith(
        "5 steps in a row had no finite loss or gradient; the journal names their clips."
    )
    assert "only complete checkpoint is of step 3; resume with:" in text
    assert "--set learning_rate=" in text
    assert text.endswith(str(run)), "nothing follows the command that a user copies"
    assert [bool(line.get("skipped")) for line in steps_of(run)] == [
        False,
        True,
        False,
        *[True] * 5,
    ]
    assert complete(run) == [3]
    assert resume(run, "steps=4") == DONE, "the gradients are finite again"
    assert [bool(line.get("skipped")) for line in steps_of(run)] == [
        False,
        True,
        False,
        False,
    ]


def test_four_before_a_resume_and_one_after_it_are_five(
    work: Work, monkeypatch: Patch
) -> None:
    run = work.run
    with monkeypatch.context() as patch:
        spoil_gradient(patch, {2, 3, 4, 5}, float("nan"))
        assert train(work.overrides("steps=5"), run) == DONE
    spoil_gradient(monkeypatch, {1}, float("nan"))
    with pytest.raises(VideotuneError, match="5 steps in a row"):
        resume(run, "steps=9")
    assert steps_of(run)[-1]["step"] == 6


def test_float16_looks_for_its_scale_without_ending_the_run(
    work: Work, monkeypatch: Patch
) -> None:
    """Eight steps in a row and more are not applied; the scale then grows and falls
    again, and a resume amid both is the same run.
    """

    def make(config: Any, family: Any) -> LossScale:
        return LossScale(family.device, first=2.0**40, growth_interval=4)

    monkeypatch.setattr(trainable_module, "_make_loss_scale", make)
    run = work.train(
        "steps=32", "save_every=4", "train_dtype=FLOAT_16", "learning_rate=0.001"
    )
    lines = steps_of(run)
    first_applied = next(line["step"] for line in lines if not line.get("skipped"))
    assert first_applied > 8
    assert all(isinstance(line["loss"], float) for line in lines)
    factor, finite = 2.0**40, 0
    for line in lines:
        assert line["loss_scale"] == factor
        finite = 0 if line.get("skipped") else finite + 1
        if line.get("skipped"):
            factor /= 2
        elif finite == 4:
            factor, finite = 2 * factor, 0
    assert factor < 2.0**32
    for line in of_kind(run, "warning"):
        assert "left float16's range" in line["text"]

    whole = shutil.copytree(run, work.tmp / "whole")
    for step in (4, 4 * (first_applied // 4 + 1)):
        assert resume(run, step=step) == DONE
        assert_same_run(run, whole, 32)


@pytest.mark.parametrize("part", ["weights", "optimizer", "ema"])
def test_a_state_that_is_not_finite_is_never_saved(
    part: str, work: Work, monkeypatch: Patch
) -> None:
    """Whatever made it so: here somebody writes a NaN into it before step 3."""
    make, run = loop.train_steps, work.run

    def spoilt(trainer: Trainer) -> Any:
        for number, record in enumerate(make(trainer), 1):
            if number == 4:
                (trainable,) = trainer.pool.trainables.values()
                name, parameter = next(iter(trainable.parameters.items()))
                assert trainable.ema is not None
                where = {
                    "weights": parameter.data,
                    "optimizer": trainable.optimizer.state[parameter]["exp_avg"],
                }
                where["ema"] = trainable.ema.values[name]
                where[part].view(-1)[1] = float("nan")
            yield record

    monkeypatch.setattr(loop, "train_steps", spoilt)
    with pytest.raises(
        VideotuneError,
        match=rf"step 4 is not saved: 1 tensors are not finite, the first is {part} of",
    ):
        train(work.overrides("steps=6", "save_every=2", "ema.decay=0.9"), run)
    assert complete(run) == [2]
    assert all(
        bool(value.isfinite().all())
        for value in state(run, 2).values()
        if value.is_floating_point()
    )
    assert not (run / "export").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-2"]


def test_a_validation_loss_that_is_not_finite_ends_nothing(
    work: Work, monkeypatch: Patch
) -> None:
    """It is null in the journal, and later ones are still measured."""
    run, plain = work.run, BatchSource.plain_latents

    def spoilt(self: BatchSource, window: Any) -> LatentDistribution:
        moments = plain(self, window)
        return replace(moments, mean=torch.full_like(moments.mean, float("nan")))

    monkeypatch.setattr(BatchSource, "plain_latents", spoilt)
    assert train(work.overrides("steps=2", "validate_every=1"), run) == DONE
    losses = of_kind(run, "validation")
    assert [line["step"] for line in losses] == [0, 1, 2]
    assert all(
        line["train"]["mean"] is None and line["train"]["normalised"] is None
        for line in losses
    )


def test_a_step_that_does_not_fit_is_reported_its_state_kept_and_the_first_remedy_resumes(
    work: Work,
) -> None:
    run, settings = (
        work.run,
        ("steps=6", "batch_size=4", "ema.decay=0.9", "gradient_checkpointing=OFF"),
    )
    straight = work.finished(*settings, "save_every=3")
    with fail_forward(4), pytest.raises(DoesNotFit) as caught:
        train(work.overrides(*settings, "save_every=0"), run)
    text = str(caught.value)
    shape = re.search(r"(\d+)x(\d+)x(\d+)", text)
    bucket = next(
        one
        for one in read_json(run / "plan.json")["buckets"]
        if shape and one["shape"].startswith(shape[0])
    )
    samples = f"4 samples of {bucket['shape']} pixels, {bucket['tokens']} tokens each."
    assert text.startswith(f"out of memory in step 4: {samples}")
    assert (
        "only complete checkpoint is of step 3; resume with: videotune resume" in text
    )
    first = next(line.strip() for line in text.splitlines() if line.startswith("  "))
    assert first.startswith("--resume --set micro_batch_size=1:")
    assert "gradient_checkpointing=ON" in text
    assert complete(run) == [3]
    assert same_tensors(state(run, 3), state(straight, 3))
    assert [line["step"] for line in steps_of(run)] == [1, 2, 3], (
        "the line that came late is there too"
    )
    assert any("out of memory in step 4" in text for text in warnings_of(run))
    assert resume(run, "micro_batch_size=1") == DONE
    assert largest_weight_difference(state(run, 6), state(straight, 6)) < 1e-3
    assert [line["window_ids"] for line in steps_of(run)] == [
        line["window_ids"] for line in steps_of(straight)
    ]
    for ours, theirs in zip(steps_of(run), steps_of(straight), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    (line,) = of_kind(run, "resume")
    assert line["changes"] == ["micro_batch_size: 4 -> 1"]


def test_a_state_that_may_be_half_updated_is_not_saved(
    work: Work, monkeypatch: Patch
) -> None:
    """The optimizer ran out of memory in the middle of its update: only what was saved
    before is good.
    """
    run, updates, apply = work.run, [], step_module.step_if_finite

    def half(optimizer: Any, good: Any) -> None:
        updates.append(1)
        if len(updates) == 4:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1.0)
            raise OUT_OF_MEMORY
        apply(optimizer, good)

    monkeypatch.setattr(step_module, "step_if_finite", half)
    with pytest.raises(
        DoesNotFit, match="only complete checkpoint is of step 2; resume with"
    ):
        train(work.overrides("steps=6", "save_every=2"), run)
    assert complete(run) == [2]


def test_another_error_is_raised_as_it_is(work: Work) -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with (
        fail_forward(2, error),
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        train(work.overrides("steps=3"), work.run)


def test_out_of_memory_on_the_host(server: None, work: Work) -> None:
    """The process has no more address space: torch's CPU allocator raises its own
    error.
    """
    run, settings = work.run, ("steps=4", "save_every=0")
    running = start(work.overrides(*settings), run, first=narrow, given=(3,))
    assert running.ended() == SKIPPED
    assert "videotune: out of memory in step 3: 1 sample of " in running.stderr
    assert "Traceback" not in running.stderr
    assert complete(run) == [2]
    assert resume(run) == DONE
    assert_same_run(run, work.finished(*settings), 4)


def narrow(step: int) -> None:
    """From this step on the process has 64 MB more than it holds, and the step wants
    256.
    """
    loss, passes = network_pass.denoising_loss, []

    def greedy(*given: Any) -> Any:
        passes.append(1)
        if len(passes) == step:
            held = (
                int(Path("/proc/self/statm").read_text().split()[0])
                * resource.getpagesize()
            )
            resource.setrlimit(
                resource.RLIMIT_AS, (held + (64 << 20), resource.RLIM_INFINITY)
            )
            torch.empty(256 << 20, dtype=torch.uint8).fill_(1)
        return loss(*given)

    network_pass.denoising_loss = greedy  # type: ignore[attr-defined]


ON_THE_HOST = "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (OUT_OF_MEMORY, True),
        (RuntimeError(ON_THE_HOST), True),
        (
            RuntimeError(
                "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
            ),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("Expected all tensors to be on the same device"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_errors_say_that_there_was_no_room(
    error: BaseException, is_memory: bool
) -> None:
    assert is_out_of_memory(error) == is_memory


def test_remedies_for_a_resume_come_first_and_useless_ones_are_not_named() -> None:
    small = {
        "batch_size": 1,
        "gradient_checkpointing": "ON",
        "optimizer": {"name": "ADAMW_8BIT"},
        "lora": {"rank": 4},
    }
    smaller = (
        "weight_dtype=FLOAT_8",
        "a smaller resolution",
        "fewer video_config.frames",
    )
    new = [f"a new run with {what}" for what in smaller]
    assert [line.split(":")[0] for line in remedies(parse(small), gpu=False)] == new
    assert [line.split(":")[0] for line in remedies(parse(small))] == [
        "--resume --set gradient_checkpointing=CPU_OFFLOADED",
        "--resume --set layer_offload_fraction=0.5",
        *new,
    ]
    assert "weight_dtype" not in " ".join(
        remedies(parse(small | {"weight_dtype": "INT_8"}))
    ), "they are rounded"
    full = remedies(
        parse(
            small
            | {"training_method": "FINE_TUNE", "micro_batch_size": 1, "batch_size": 4}
        )
    )
    for key in ("layer_offload_fraction", "weight_dtype", "micro_batch_size"):
        assert key not in " ".join(full)
    lines = remedies(
        parse(
            {
                "batch_size": 2,
                "gradient_accumulation_steps": 3,
                "gradient_checkpointing": "OFF",
            }
        )
    )
    resumes = [line.startswith("--resume") for line in lines]
    assert resumes == sorted(resumes, reverse=True)
    assert lines[0].startswith(
        "--resume --set micro_batch_size=1: the same steps, one sample at a time, about 1/2 of"
    )


def test_another_split_is_refused_where_videos_among_images_would_be_other_samples(
    work: Work, clips: Path
) -> None:
    """There the samples of a step follow from batch_size alone, not from its product
    with the accumulation.
    """
    from PIL import Image

    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 100, 50)).save(
            clips / "videos" / f"still-{number}.png"
        )
        (clips / "captions" / f"still-{number}.txt").write_text(f"colour {number}")
    sets = (
        "steps=2",
        "save_every=1",
        "batch_size=4",
        "video_config.video_batch_size_multiplier=0.5",
    )
    words = work.overrides(*sets, data=clips)
    assert train(words, work.run, allow_skips="all") == DONE
    with pytest.raises(
        VideotuneError,
        match=r"batch_size: images and videos are mixed .*Leave it as it was",
    ):
        resume(work.run, "batch_size=1", "gradient_accumulation_steps=4", "steps=3")
    assert resume(work.run, "steps=3") == DONE
