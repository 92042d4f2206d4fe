"""What the keys about steps, batches and draws do to the samples that the network is given."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.effects.effects_kit import Lab, run_steps, trainer_of, watched, weights
from videotune.latent_cache.batches import StepBatch, prepare
from videotune.rng import draws


@pytest.mark.effect("steps")
def test_so_many_updates_are_made(lab: Lab) -> None:
    for steps in (2, 5):
        trainer = trainer_of(lab, {"steps": steps})
        run_steps(trainer)
        counts = {int(state["step"]) for state in trainer.pool.trainable.optimizer.state.values()}
        assert counts == {steps}


@pytest.mark.effect("epochs")
@pytest.mark.parametrize(("epochs", "updates"), [(1, 2), (3, 6), (0.6, 2)])
def test_epochs_are_passes_over_the_four_windows(lab: Lab, epochs: float, updates: int) -> None:
    """Batches of two: 4 windows are two updates; what is left of a pass is an update of its own."""
    trainer = trainer_of(lab, {"epochs": epochs, "batch_size": 2, "steps": 99})
    lines = run_steps(trainer)
    assert len(lines) == updates
    views = [line["window_ids"].count(name) for line in lines for name in line["window_ids"]]
    assert set(views) == {1}
    if epochs >= 1:
        seen = [name for line in lines for name in line["window_ids"]]
        assert {seen.count(window.id) for window in trainer.job.library.windows} == {epochs}


@pytest.mark.effect("batch_size", "gradient_accumulation_steps")
@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_step_takes_exactly_batch_times_accumulation_samples(lab: Lab, batch: int, accumulation: int) -> None:
    trainer = trainer_of(lab, {"batch_size": batch, "gradient_accumulation_steps": accumulation, "steps": 2})
    with watched(trainer.net) as calls:
        lines = run_steps(trainer)
    assert [len(call["x_t"]) for call in calls] == [batch] * (2 * accumulation)
    assert [len(line["window_ids"]) for line in lines] == [batch * accumulation] * 2
    assert {int(state["step"]) for state in trainer.pool.trainable.optimizer.state.values()} == {2}


@pytest.mark.effect("seed")
def test_the_seed_names_every_draw(lab: Lab) -> None:
    """Noise, noise levels, order and the adapter's start: the counted draws of this seed, and others for another."""

    def first(seed: int) -> tuple[StepBatch, torch.Tensor, list[str]]:
        trainer = trainer_of(lab, {"seed": seed})
        order = [prepare(trainer.source, step).batch.window_ids[0] for step in range(1, 13)]
        return prepare(trainer.source, 1), weights(trainer)["blocks.0.attn1.to_q.lora_A.weight"], order

    one, again, other = first(1), first(1), first(2)
    wanted = draws(1, "noise", 1, 0).standard_normal(one[0].noise.shape[1:], "float32")
    assert np.array_equal(one[0].noise[0].numpy(), wanted)
    assert torch.equal(one[0].noise, again[0].noise)
    assert torch.equal(one[0].t, again[0].t)
    assert torch.equal(one[1], again[1])
    assert one[2] == again[2]
    assert not torch.equal(one[0].noise, other[0].noise)
    assert not torch.equal(one[0].t, other[0].t)
    assert not torch.equal(one[1], other[1])
    assert one[2] != other[2]


@pytest.mark.effect("dataloader_threads")
def test_batches_are_read_ahead_by_threads_and_are_the_same(lab: Lab) -> None:
    def train(threads: int) -> tuple[list[tuple[float, ...]], set[threading.Thread]]:
        """What each step measured, and who read the batches."""
        trainer, readers = trainer_of(lab, {"dataloader_threads": threads, "steps": 12}), set()

        def condition(states: Any) -> Any:
            readers.add(threading.current_thread())
            return trainer.family.condition(states)

        trainer.source = replace(trainer.source, condition=condition)
        return [(line["loss"], line["grad_norm"], *line["window_ids"]) for line in run_steps(trainer)], readers

    here = threading.current_thread()
    alone, who = train(0)
    assert (len(alone), who) == (12, {here})
    for threads in (1, 3):
        lines, who = train(threads)
        assert here not in who
        assert 1 <= len(who) <= threads
        assert lines == alone


@pytest.mark.effect("video_config.temporal_consistency_weight")
@pytest.mark.parametrize("weight", [0, 0.5, 2])
def test_the_error_may_be_weighed_by_its_change_from_frame_to_frame(lab: Lab, weight: float) -> None:
    """(‖e‖² + λ‖Δe‖²) / (1 + 2λ(F - 1)/F), from what the network answered; the plain mse is logged too."""
    trainer = trainer_of(lab, {"video_config.temporal_consistency_weight": weight})
    with watched(trainer.net) as calls:
        (line,) = run_steps(trainer, 1)
    prepared = prepare(trainer.source, 1)
    error = (calls[0]["answer"] - (prepared.noise - prepared.batch.x0)).double()
    frames = error.shape[2]
    plain = error.square().mean().item()
    flicker = error.diff(dim=2).square().sum().item() / error.numel()
    wanted = (plain + weight * flicker) / (1 + 2 * weight * (frames - 1) / frames)
    assert line["loss"] == pytest.approx(wanted, rel=1e-5)
    assert line["mse"] == pytest.approx(plain, rel=1e-5)
