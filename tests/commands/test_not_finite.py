"""A loss or gradient that is not finite: not applied, counted, its clips named; never saved; and the way on from there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.safety_kit import equal, facts_of, of_kind, state, steps_of, warnings_of
from tests.shell import train
from videotune.errors import DONE, FAILED, VideotuneError
from videotune.files import read_json
from videotune.latent_cache.batches import Source
from videotune.trainer import loop
from videotune.trainer import step as room
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume
from videotune.trainer.trainer import Trainer
from videotune.types import Moments

Say = Callable[..., Overrides]
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
    ],
    ids=["lora", "8 bit", "masters"],
)


def complete(run: Path) -> list[int]:
    return [one.step for one in complete_checkpoints(run)]


def spoil_clip(monkeypatch: pytest.MonkeyPatch, stem: str, when: Callable[[int], bool] = lambda _: True) -> None:
    """The latents of a clip are NaN at these steps, as a VAE in half precision leaves them."""
    sample = Source.sample

    def spoilt(self: Source, window: Any, variant: int, *name: Any) -> Moments:
        moments = sample(self, window, variant, *name)
        clip = self.clips[window.clip_id]
        bad = Path(clip.path).stem == stem and isinstance(name[0], int) and when(name[0])
        return replace(moments, mean=torch.full_like(moments.mean, float("nan"))) if bad else moments

    monkeypatch.setattr(Source, "sample", spoilt)


def spoil_gradient(monkeypatch: pytest.MonkeyPatch, steps: set[int], value: float) -> None:
    """The loss is finite at these steps, and the gradient is not."""
    clip, taken = room.clip, []

    def spoilt(parameters: Any, most: float) -> torch.Tensor:
        taken.append(1)
        if len(taken) in steps:
            parameters[-1].grad.view(-1)[0] = value
        return clip(parameters, most)

    monkeypatch.setattr(room, "clip", spoilt)


def stems(run: Path) -> list[str]:
    return sorted(Path(clip["path"]).stem for clip in read_json(run / "check.json")["clips"])


@METHODS
def test_a_clip_that_is_not_finite_is_named_and_its_steps_are_not_applied(
    method: tuple[str, ...], said: Say, small_clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments and average are bit for bit as before; the step counters of the optimizer too."""
    run, stem = tmp_path / "run", sorted((small_clips / "videos").iterdir())[2].stem
    spoil_clip(monkeypatch, stem)
    assert train(said("steps=9", "save_every=1", "learning_rate=0.001", *method), run) == DONE
    ids = {clip["id"]: Path(clip["path"]).stem for clip in read_json(run / "check.json")["clips"]}
    shown = [{ids[name] for name in ids if line["window_ids"][0].startswith(name[:12])} for line in steps_of(run)]
    skipped = [line["step"] for line in steps_of(run) if line.get("skipped")]
    assert skipped == [step for step, stems in enumerate(shown, 1) if stem in stems]
    assert 1 <= len(skipped) < 5
    for step in range(2, 10):
        same = equal(state(run, step), state(run, step - 1))
        assert same == (step in skipped), f"step {step}"
    assert [line["loss"] for line in steps_of(run) if line["step"] in skipped] == [None] * len(skipped)
    named = [text for text in warnings_of(run) if "not finite, step not applied" in text]
    assert len(named) == len(skipped)
    assert all(f"{stem}.mp4" in text for text in named)
    other = stems(run)
    other.remove(stem)
    assert not any(f"{name}.mp4" in text for text in named for name in other)
    assert [line["step"] for line in of_kind(run, "warning")] == skipped


@METHODS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_alone_that_is_not_finite_is_not_applied(
    value: float, method: tuple[str, ...], said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step on, where the optimizer has no state yet."""
    run = tmp_path / "run"
    spoil_gradient(monkeypatch, {1, 3}, value)
    assert train(said("steps=4", "save_every=1", "batch_size=2", *method), run) == DONE
    assert [bool(line.get("skipped")) for line in steps_of(run)] == [True, False, True, False]
    assert all(isinstance(line["loss"], float) for line in steps_of(run))
    assert not equal(state(run, 2), state(run, 1))
    assert equal(state(run, 3), state(run, 2))
    assert not equal(state(run, 4), state(run, 3))
    assert all(bool(value.isfinite().all()) for value in state(run, 4).values() if value.is_floating_point())
    for line in (line for line in steps_of(run) if line.get("skipped")):
        (text,) = [one["text"] for one in of_kind(run, "warning") if one["step"] == line["step"]]
        assert all(name in text for name in line["window_ids"]), "which of them it was cannot be known: all are named"


@pytest.mark.parametrize("optimizer", ["ADAMW", "ADAMW_8BIT"])
def test_a_run_whose_first_step_was_skipped_can_be_resumed_exactly(
    optimizer: str, said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the optimizer may have no state to save."""
    run = tmp_path / "run"
    spoil_gradient(monkeypatch, {1}, float("nan"))
    assert train(said("steps=3", "save_every=1", f"optimizer.name={optimizer}"), run) == DONE
    assert bool(steps_of(run)[0]["skipped"])
    first, facts = state(run, 3), facts_of(run)
    assert train(Overrides(), run, resume=Resume(step=1)) == DONE
    assert equal(state(run, 3), first)
    assert facts_of(run) == facts


@METHODS
def test_five_in_a_row_end_the_run_with_the_last_good_state_saved(
    method: tuple[str, ...], said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=20", "save_every=0", *method)
    assert train(Overrides(data=words.data, sets=(*words.sets, "steps=3")), straight) == DONE
    spoil_gradient(monkeypatch, {2, 4, 5, 6, 7, 8, 9, 10}, float("nan"))
    with pytest.raises(VideotuneError) as caught:
        train(words, run)
    monkeypatch.undo()
    assert caught.value.exit_code == FAILED
    text = str(caught.value)
    assert text.startswith("5 steps in a row had a loss or gradient that is not finite; the journal names their clips.")
    assert "complete are those of the steps 3; go on with:" in text
    assert "--set learning_rate=" in text
    assert [bool(line.get("skipped")) for line in steps_of(run)] == [False, True, False, *[True] * 5]
    assert complete(run) == [3]
    assert train(Overrides(sets=("steps=4",)), run, resume=Resume()) == DONE, "the hook is gone, so it goes on"
    assert [bool(line.get("skipped")) for line in steps_of(run)] == [False, True, False, False]


def test_four_before_a_resume_and_one_after_it_are_five(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil_gradient(patch, {2, 3, 4, 5}, float("nan"))
        assert train(said("steps=5"), run) == DONE
    spoil_gradient(monkeypatch, {1}, float("nan"))
    with pytest.raises(VideotuneError, match="5 steps in a row"):
        train(Overrides(sets=("steps=9",)), run, resume=Resume())
    assert steps_of(run)[-1]["step"] == 6


def test_a_rate_that_was_too_high_is_lowered_by_a_resume_from_before_it(said: Say, tmp_path: Path) -> None:
    """No hook: at a rate of 1e30 the weights explode, and the losses after it are not finite."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    assert train(said("steps=6", "save_every=2"), straight) == DONE
    assert train(said("steps=2", "save_every=2"), run) == DONE
    high = Overrides(sets=("learning_rate=1e30", "steps=20", "save_every=0"))
    with pytest.raises(VideotuneError, match="5 steps in a row"):
        train(high, run, resume=Resume(override=True))
    assert complete(run) == [2, 3], "the last good state: its numbers are finite, if huge"
    low = Overrides(sets=("learning_rate=0.01", "steps=6", "save_every=2"))
    with pytest.raises(VideotuneError, match=r"learning_rate: 1e\+30 -> 0\.01\n.*add --override"):
        train(low, run, resume=Resume(step=2))
    assert train(low, run, resume=Resume(step=2, override=True)) == DONE
    assert facts_of(run) == facts_of(straight)
    assert equal(state(run, 6), state(straight, 6))


@pytest.mark.parametrize("part", ["weights", "optimizer", "ema"])
def test_a_state_that_is_not_finite_is_never_saved(
    part: str, said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever made it so: here somebody writes a NaN into it before step 3."""
    make, run = loop.step_records, tmp_path / "run"

    def spoilt(trainer: Trainer) -> Any:
        for number, record in enumerate(make(trainer), 1):
            if number == 4:
                (trainable,) = trainer.pool.trainables.values()
                name, parameter = next(iter(trainable.parameters.items()))
                assert trainable.ema is not None
                where = {"weights": parameter.data, "optimizer": trainable.optimizer.state[parameter]["exp_avg"]}
                where["ema"] = trainable.ema.values[name]
                where[part].view(-1)[1] = float("nan")
            yield record

    monkeypatch.setattr(loop, "step_records", spoilt)
    with pytest.raises(VideotuneError, match=rf"step 4: 1 tensors are not finite, the first: {part} of .*: not saved"):
        train(said("steps=6", "save_every=2", "ema.decay=0.9"), run)
    assert complete(run) == [2]
    assert all(bool(value.isfinite().all()) for value in state(run, 2).values() if value.is_floating_point())
    assert not (run / "export").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-2"]


def test_a_reading_that_is_not_finite_ends_nothing(said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ruler meets the same clip; the journal says null, and later readings are still read."""
    run, plain = tmp_path / "run", Source.plain

    def spoilt(self: Source, window: Any) -> Moments:
        moments = plain(self, window)
        return replace(moments, mean=torch.full_like(moments.mean, float("nan")))

    monkeypatch.setattr(Source, "plain", spoilt)
    assert train(said("steps=2", "validate_every=1"), run) == DONE
    readings = of_kind(run, "ruler")
    assert [line["step"] for line in readings] == [0, 1, 2]
    assert all(line["train"]["mean"] is None and line["train"]["normalised"] is None for line in readings)
