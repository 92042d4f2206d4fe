"""What the keys do that act on the verdict, or show the run elsewhere."""

import shutil
import sys
from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.effects.effects_kit import Lab, job_of, overrides_of, trainer_of
from tests.shell import train
from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.logging.tensorboard import FOLDER

HELD = (1.0, 0.8, 0.6, 0.5, 0.6, 0.7, 0.8, 0.9)
TRAIN = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Readings before the first step and after each: held-out clips turn at the third. tests/field has a run that does so."""


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation losses are planted, after each step the next."""

    def planted(validation: Any, family: Any, nets: Any, objective: Any, batch_of: Any) -> dict[str, Any]:
        lora = [value for name, value in nets.net.named_parameters() if "lora_B" in name]
        step = planted.seen.setdefault(float(lora[0].detach().double().abs().sum()), len(planted.seen))  # type: ignore[attr-defined]

        def part(value: float, hard: tuple[float, ...]) -> dict[str, Any]:
            clips = {f"{n:012x}": [value * h] * 9 for n, h in enumerate(hard)}
            return {"mean": value, "by_quantile": [value] * 9, "windows": len(hard), "clips": clips}

        return {"held_out": part(HELD[step], (0.9, 1.0, 1.1)), "train": part(TRAIN[step], (1.0, 1.0))}

    planted.seen = {}  # type: ignore[attr-defined]
    monkeypatch.setattr("videotune.validation.callbacks.read_validation", planted)


def run_of(lab: Lab, **knobs: Any) -> list[dict[str, Any]]:
    """The journal of a whole run."""
    train(overrides_of(lab, knobs), lab.tmp / "run")
    return read_journal(lab.tmp / "run")


@pytest.mark.effect("early_stopping")
@pytest.mark.parametrize(("readings", "last"), [(None, 7), (1, 5), (2, 6)])
def test_a_run_that_copies_is_ended_and_its_best_checkpoint_exported(
    lab: Lab, copying: None, readings: int | None, last: int
) -> None:
    """A rise is believed at its second reading, after step 5."""
    lines = run_of(lab, steps=7, validate_every=1, early_stopping=readings)
    run, end = lab.tmp / "run", lines[-1]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, last + 1))
    assert (end["kind"], end["why"]) == ("end", "done" if readings is None else "early")
    verdicts = [(line["step"], line["verdict"]) for line in lines if line["kind"] == "verdict"]
    words = [None, None, "LEARNING", "LEARNING", "PLATEAU", "OVERFITTING", "OVERFITTING", "OVERFITTING"]
    assert verdicts == list(enumerate(words[: last + 1])), "one line a validation"
    (exported,) = read_json(run / "exports.json")
    if readings is None:  # nothing was saved but the end
        assert end["take"]["step"] == 7
        assert "no checkpoint of step 3" in end["take"]["why"]
        assert "step-7." in exported["path"]
        return
    assert end["take"] == {"step": 3, "why": "held-out clips were best there"}
    assert "step-3." in exported["path"]
    best, end = (run / "checkpoints" / f"step-{step}" / "weights.safetensors" for step in (3, last))
    name, value = next((name, value) for name, value in load_file(best).items() if "lora_B" in name)
    assert torch.equal(load_file(run / exported["path"])[f"transformer.{name}"], value)
    assert not torch.equal(load_file(end)[name], value)


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({}, "validate_every is 0, and only readings can say when to stop"),
        ({"validate_every": 2}, "fewer than two clips are held out"),
    ],
)
def test_early_stopping_that_cannot_come_is_reported(lab: Lab, knobs: dict[str, Any], why: str) -> None:
    for patience in (2, None):
        notes = job_of(lab, knobs | {"early_stopping": patience}).notes
        unused = [note for note in notes if note.startswith("early_stopping is unused")]
        assert [why in note for note in unused] == [True] * (patience is not None)


UP = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7)


@pytest.mark.parametrize(
    ("held", "train", "step", "why"),
    [(HELD, HELD, 3, "held-out clips were best there"), (UP, TRAIN, 1, "best under the base model itself")],
    ids=["flies apart", "base was best"],
)
def test_the_recommended_checkpoint(
    held: tuple[float, ...], train: tuple[float, ...], step: int, why: str,
    lab: Lab, copying: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where training clips get worse as well it is no copying, but the last state is not the one to take."""
    monkeypatch.setattr(sys.modules[__name__], "HELD", held)
    monkeypatch.setattr(sys.modules[__name__], "TRAIN", train)
    end = run_of(lab, steps=7, validate_every=1, save_every=1)[-1]
    assert end["take"]["step"] == step
    assert why in end["take"]["why"]


@pytest.mark.effect("tensorboard")
def test_tensorboard_has_curves_validation_and_previews(lab: Lab) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    knobs = {"steps": 3, "validate_every": 3, "sample_after": 3, "samples": ["a cat"], "sample.frames": 5}
    for wanted in (False, True):
        shutil.rmtree(lab.tmp / "run", ignore_errors=True)
        lines = run_of(lab, tensorboard=wanted, **knobs)
        folder = lab.tmp / "run" / FOLDER
        assert folder.exists() == wanted
    board = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    board.Reload()
    tags = board.Tags()
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    for tag, key in (("train/loss", "loss"), ("train/mse", "mse"), ("train/grad_norm", "grad_norm")):
        found = {event.step: event.value for event in board.Scalars(tag)}
        assert found == {step: pytest.approx(line[key]) for step, line in steps.items()}
    assert {"validation/train", "views/max_window", "seconds/forward", "lr/transformer"} <= set(tags["scalars"])
    assert any(tag.startswith("mse_by_t/") for tag in tags["scalars"])
    (preview,) = tags["images"]
    assert preview == "a cat (seed 42)"
    assert [event.step for event in board.Images(preview)] == [0, 3]
    assert board.Images(preview)[0].encoded_image_string.startswith(b"GIF89a")
    gif: Any = Image.open(BytesIO(board.Images(preview)[0].encoded_image_string))
    assert gif.n_frames == 5
    assert [tag for tag in tags["tensors"] if tag.startswith("verdict")], "no validation possible, said in words"


@pytest.mark.effect("tensorboard")
def test_a_missing_tensorboard_is_an_error_before_any_work(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(VideotuneError, match=r"videotune\[tensorboard\]"):
        trainer_of(lab, {"tensorboard": True})
