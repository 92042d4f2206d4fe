"""Text connectors among the targets of an adapter: off by default, and what it changes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.sounding_clips import write_sounding_clips
from tests.support.trainers import Lab, job_of, source_of, take_steps, trainer_of
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.planner.plan import make_plan
from videotune.trainer.loop import train_steps

BOTH = ["attention", "connectors"]


@pytest.fixture
def talking(lab: Lab, tiny_bases: Callable[..., Path], tmp_path: Path) -> Lab:
    """A tiny LTX-2, clips of which two have sound and one has none."""
    clips = write_sounding_clips(tmp_path / "sounding", sounding=2, silent=1)
    return replace(lab, model=tiny_bases("ltx2"), clips=clips)


def knobs(targets: Any, **more: Any) -> dict[str, Any]:
    return {"video_config.frames": 17, "lora.targets": targets} | more


def moved(lab: Lab, chosen: dict[str, Any], steps: int = 3) -> set[str]:
    """The first two parts of the paths of what has moved, after some steps."""
    trainer = trainer_of(lab, chosen | {"steps": steps, "learning_rate": 0.01})
    before = {name: value.clone() for name, value in trainer.parameters.items()}
    take_steps(trainer, steps)
    return {
        ".".join(name.split(".")[:2])
        for name, value in trainer.parameters.items()
        if not torch.equal(value, before[name])
    }


@pytest.mark.effect("lora.targets")
def test_the_connectors_move_only_if_they_are_named(talking: Lab) -> None:
    blocks = {"transformer_blocks.0", "transformer_blocks.1"}
    video = {"connectors.video_connector"}
    sound = {"connectors.audio_connector"}
    both = {"generate": ["video", "sound"]}
    assert moved(talking, knobs("attention")) == blocks
    assert moved(talking, knobs(BOTH)) == blocks | video
    assert moved(talking, knobs("connectors")) == video
    assert moved(talking, knobs(BOTH, **both)) == blocks | video | sound


def test_silent_clips_leave_the_sounds_connector_as_it_is(talking: Lab) -> None:
    chosen = knobs(BOTH, generate=["video", "sound"], steps=6, learning_rate=0.01)
    trainer = trainer_of(talking, chosen)
    records = train_steps(trainer)
    kinds = set()
    for step in range(1, 7):
        batch = make_step_batch(trainer.source, step).batch
        assert batch is not None
        before = {name: value.clone() for name, value in trainer.parameters.items()}
        next(records).read()
        has_moved = any(
            not torch.equal(value, before[name])
            for name, value in trainer.parameters.items()
            if "audio_connector" in name
        )
        assert has_moved is (batch.sound is not None)
        kinds.add(has_moved)
    assert kinds == {True, False}


def test_captions_of_a_step_are_padded_and_masked(talking: Lab) -> None:
    """Also those that are dropped to the empty caption."""
    for dropout in (0, 1):
        source = source_of(talking, knobs(BOTH, caption_dropout=dropout))
        batch = make_step_batch(source, 1).batch
        assert batch is not None
        mask = batch.conditioning.text_mask
        assert mask is not None
        assert mask.shape == batch.conditioning.text.shape[:2]
        kept = int(mask.sum())
        assert (kept == 1) is bool(dropout)
        assert not batch.conditioning.text[~mask].any()


def test_the_plan_counts_the_connectors(talking: Lab) -> None:
    plans = {}
    for targets in ("attention", "connectors"):
        job = job_of(talking, knobs(targets))
        plans[targets] = make_plan(job)["adapter"]
    groups = plans["connectors"]["groups"]
    start = "connectors.video_connector.transformer_blocks.*"
    assert groups == {
        f"{start}.attn1.to_q": 1,
        f"{start}.attn1.to_k": 1,
        f"{start}.attn1.to_v": 1,
        f"{start}.attn1.to_out.0": 1,
        f"{start}.ff.net.0.proj": 1,
        f"{start}.ff.net.2": 1,
    }
    assert sum(plans["connectors"]["idle"].values()) == 6
    assert not any("connectors" in name for name in plans["attention"]["groups"])


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"lora.variant": "DORA"}, "lora.variant"),
        ({"lora.variant": "LOKR"}, "lora.variant"),
        ({"sharding": "FULL"}, "sharding"),
        ({"output_model_format": ["diffusers", "peft"]}, "output_model_format"),
    ],
)
def test_what_does_not_go_with_connectors_is_refused(
    talking: Lab, wrong: dict[str, Any], key: str
) -> None:
    with pytest.raises(VideotuneError, match=key):
        job_of(talking, knobs(BOTH, **wrong))
    if "output_model_format" not in wrong:
        job_of(talking, knobs("attention", **wrong))


@pytest.mark.parametrize("targets", ["connectors", BOTH, ["connectors.x", "to_k"]])
def test_a_model_without_connectors_refuses_them_by_the_key(
    lab: Lab, targets: Any
) -> None:
    with pytest.raises(VideotuneError, match=r"lora\.targets.*connectors"):
        job_of(lab, {"lora.targets": targets})


def test_other_methods_take_no_notice(talking: Lab) -> None:
    job = job_of(
        talking, {"training_method": "FINE_TUNE", "lora.targets": "connectors"}
    )
    assert not job.spec.connectors_in_step
    assert any("lora.targets" in note for note in job.notes)
