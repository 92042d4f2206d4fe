"""What the keys do that act on the ruler's verdict, or show the run elsewhere."""

from __future__ import annotations

import json
import shutil
import sys
from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.effects.effects_kit import BASE, Lab, trainer_of
from tests.shell import train
from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.logging.tensorboard import FOLDER
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.run_spec import open_job

HELD = (1.0, 0.8, 0.6, 0.5, 0.6, 0.7, 0.8, 0.9)
TRAIN = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Readings before the first step and after each: held-out clips turn at the third. tests/field has a run that does so."""


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ruler reads what is planted, after each step the next."""

    def planted(validation: Any, family: Any, nets: Any, objective: Any, batch_of: Any) -> dict[str, Any]:
        lora = [value for name, value in nets.net.named_parameters() if "lora_B" in name]
        step = planted.seen.setdefault(float(lora[0].detach().double().abs().sum()), len(planted.seen))  # type: ignore[attr-defined]

        def part(value: float, hard: tuple[float, ...]) -> dict[str, Any]:
            clips = {f"{n:012x}": [value * h] * 9 for n, h in enumerate(hard)}
            return {"mean": value, "by_quantile": [value] * 9, "windows": len(hard), "clips": clips}

        return {"held_out": part(HELD[step], (0.9, 1.0, 1.1)), "train": part(TRAIN[step], (1.0, 1.0))}

    planted.seen = {}  # type: ignore[attr-defined]
    monkeypatch.setattr("videotune.validation.callbacks.read_validation", planted)


def run_of(lab: Lab, data: list[dict[str, str]], **knobs: Any) -> list[dict[str, Any]]:
    """The journal of a whole run."""
    places = {"base_model_name": str(lab.model), "cache_dir": str(lab.cache), "datasets": data}
    settings = BASE | places | knobs
    train(Overrides(sets=tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())), lab.tmp / "run")
    return read_journal(lab.tmp / "run")


@pytest.mark.effect("early_stopping")
@pytest.mark.parametrize(("readings", "last"), [(None, 7), (1, 5), (2, 6)])
def test_a_run_that_copies_is_ended_and_its_best_checkpoint_exported(
    lab: Lab, copying: None, readings: int | None, last: int
) -> None:
    """A rise is believed at its second reading, after step 5."""
    lines = run_of(lab, [{"path": str(lab.clips)}], steps=7, validate_every=1, early_stopping=readings)
    run, end = lab.tmp / "run", lines[-1]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, last + 1))
    assert (end["kind"], end["why"]) == ("end", "done" if readings is None else "early")
    told = [(line["step"], line["verdict"]) for line in lines if line["kind"] == "verdict"]
    words = [None, None, "LEARNING", "LEARNING", "PLATEAU", "OVERFITTING", "OVERFITTING", "OVERFITTING"]
    assert told == list(enumerate(words[: last + 1])), "one line a reading"
    (exported,) = read_json(run / "exports.json")
    if readings is None:  # nothing was saved but the end
        assert end["take"]["step"] == 7
        assert "best at step 3" in end["take"]["why"]
        assert "step-7." in exported["path"]
        return
    assert end["take"] == {"step": 3, "why": "held-out clips were best there"}
    assert "step-3." in exported["path"]
    kept = load_file(run / "checkpoints" / "step-3" / "weights.safetensors")
    now = load_file(run / "checkpoints" / f"step-{last}" / "weights.safetensors")
    written = load_file(run / exported["path"])
    assert {float(x.double().abs().sum()) for x in kept.values() if x.any()} & {
        float(x.double().abs().sum()) for x in written.values() if x.any()
    }
    assert any(not torch.equal(kept[name], now[name]) for name in kept)
    assert read_json(run / "exports.json")[0]["path"] != f"export/run-step-{last}.safetensors"


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("validate_every=0",), "validate_every is 0, and only readings can say when to stop"),
        ((), "fewer than two clips are held out"),
    ],
)
def test_early_stopping_that_cannot_come_is_told(lab: Lab, sets: tuple[str, ...], why: str) -> None:
    place = (f"base_model_name={lab.model}", f"cache_dir={lab.cache}")
    for asked in (True, False):
        said = Overrides(data=str(lab.clips), sets=(*place, *sets, *(("early_stopping=2",) if asked else ())))
        told = [note for note in open_job(*resolve_config(said)).notes if note.startswith("early_stopping is unused")]
        assert [why in note for note in told] == [True] * asked


UP = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7)


@pytest.mark.parametrize(
    ("held", "train", "step", "why"),
    [(HELD, HELD, 3, "held-out clips were best there"), (UP, TRAIN, 1, "best under the base model itself")],
    ids=["flies apart", "base was best"],
)
def test_which_checkpoint_to_take(
    held: tuple[float, ...], train: tuple[float, ...], step: int, why: str,
    lab: Lab, copying: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where training clips get worse as well it is no copying, but the last state is not the one to take."""
    monkeypatch.setattr(sys.modules[__name__], "HELD", held)
    monkeypatch.setattr(sys.modules[__name__], "TRAIN", train)
    end = run_of(lab, [{"path": str(lab.clips)}], steps=7, validate_every=1, save_every=1)[-1]
    assert end["take"]["step"] == step
    assert why in end["take"]["why"]


@pytest.mark.effect("tensorboard")
def test_curves_readings_and_previews_stand_in_tensorboard(lab: Lab) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    knobs = {"steps": 3, "validate_every": 3, "sample_after": 3, "samples": ["a cat"], "sample.frames": 5}
    for wanted in (False, True):
        shutil.rmtree(lab.tmp / "run", ignore_errors=True)
        lines = run_of(lab, [{"path": str(lab.clips)}], tensorboard=wanted, **knobs)
        folder = lab.tmp / "run" / FOLDER
        assert folder.exists() == wanted
    board = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    board.Reload()
    tags = board.Tags()
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    for tag, key in (("train/loss", "loss"), ("train/mse", "mse"), ("train/grad_norm", "grad_norm")):
        found = {event.step: event.value for event in board.Scalars(tag)}
        assert found == {step: pytest.approx(line[key]) for step, line in steps.items()}
    assert {"ruler/train", "views/max_window", "seconds/forward", "lr/transformer"} <= set(tags["scalars"])
    assert any(tag.startswith("mse_by_t/") for tag in tags["scalars"])
    (preview,) = tags["images"]
    assert preview == "a cat (seed 42)"
    assert [event.step for event in board.Images(preview)] == [0, 3]
    assert board.Images(preview)[0].encoded_image_string.startswith(b"GIF89a")
    gif: Any = Image.open(BytesIO(board.Images(preview)[0].encoded_image_string))
    assert gif.n_frames == 5
    assert [tag for tag in tags["tensors"] if tag.startswith("verdict")], "no validation possible, said in words"


@pytest.mark.effect("tensorboard")
def test_without_its_package_it_is_said_before_any_work(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(VideotuneError, match=r"videotune\[tensorboard\]"):
        trainer_of(lab, {"tensorboard": True})
