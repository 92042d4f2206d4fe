"""Which denoiser is in memory, and what trains with it."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.trainers import Lab, job_of, trainer_of
from videotune.distributed import DistributedContext
from videotune.job.experts import TEXT
from videotune.latent_cache.sampler import ExpertSchedule
from videotune.trainer.build import make_objective, open_models
from videotune.trainer.expert_pool import (
    ExpertPool,
    arrange_blocks,
    make_expert_schedule,
    open_pool,
)
from videotune.trainer.optimizers import OptimizerList
from videotune.trainer.step_context import TrainableState

TWO = ExpertSchedule(("high", "low"), Fraction(1, 2), turn_length=2)
ONE = ExpertSchedule(("only",))


def pool_of(schedule: ExpertSchedule, *trained: str) -> ExpertPool:
    nets = {name: nn.Linear(1, 1) for name in schedule.names}
    pool = ExpertPool(schedule, schedule.names, nets.__getitem__)
    for name in trained:
        pool.trainables[name] = TrainableState({}, OptimizerList([]), {}, expert=name)
    return pool


def test_a_step_of_one_of_two_experts_counts_that_expert_s_steps() -> None:
    pool = pool_of(TWO, "high", "low")
    counts: dict[str, list[int]] = {"high": [], "low": []}
    for step in range(1, 9):
        active = pool.activate(step)
        name = TWO.at(step)
        assert pool.current == name
        assert active.net is pool.net
        assert active.trainable is pool.trainables[name] is pool.trainable
        counts[name].append(active.expert_step)
    assert counts == {"high": [1, 2, 3, 4], "low": [1, 2, 3, 4]}


def test_text_learns_in_every_step_whichever_expert_runs() -> None:
    pool = pool_of(TWO, TEXT)
    for step in range(1, 9):
        active = pool.activate(step)
        assert active.trainable.expert == TWO.at(step) == pool.current
        assert active.trainable.optimizer is pool.trainables[TEXT].optimizer
        assert active.expert_step == step
    alone = pool_of(ONE, TEXT).activate(3)
    assert alone.trainable.expert is None, "a model without experts has none to name"
    assert alone.expert_step == 3


@pytest.mark.parametrize(
    ("first", "step"), [(0, 1), (1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (9, 4)]
)
def test_the_expert_of_the_first_step_is_the_one_in_memory(
    first: int,
    step: int,
    tmp_path: Path,
    small_clips: Path,
    tiny_bases: Callable[..., Path],
) -> None:
    """After the last step it is the last step's."""
    lab = Lab(tiny_bases("wan", "t2v-a14b"), small_clips, tmp_path / "cache", tmp_path)
    job = job_of(lab, {"expert_share": 0.5, "expert_period": 1, "steps": 4})
    objective = make_objective(job.spec, job.config)
    schedule = make_expert_schedule(job.spec, job.config, objective)
    family = open_models(job.spec, job.base, job.config)
    pool = open_pool(family, job.config, schedule, 4, first, DistributedContext())
    assert schedule.at(1) != schedule.at(2)
    assert pool.current == schedule.at(step)
    assert set(pool.trainables) == {"high", "low"}


def test_how_blocks_are_placed_is_printed_once_for_all_experts(
    tmp_path: Path,
    small_clips: Path,
    tiny_bases: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    lab = Lab(tiny_bases("wan", "t2v-a14b"), small_clips, tmp_path / "cache", tmp_path)
    trainer = trainer_of(lab, {"layer_offload_fraction": 0.5, "weight_dtype": "INT_8"})
    trainer.journal.close()
    assert set(trainer.pool.trainables) == {"high", "low"}
    offload = trainer.pool.block_offload
    assert offload is not None
    streamed = len(offload.streamed)
    assert 0 < streamed < len(trainer.net.blocks)
    text = capsys.readouterr().err
    assert text.count("the denoiser") == 1
    assert text.count(f"{streamed} blocks are streamed from host memory (") == 1
    assert text.count("on a CPU it uses more memory") == 1


@pytest.mark.parametrize(
    ("settings", "mode", "more"),
    [
        ({"gradient_checkpointing": "OFF"}, "OFF", {"draws": False}),
        ({"gradient_checkpointing": None}, "ON", {"draws": False}),
        (
            {"gradient_checkpointing": "ATTENTION_SAVED", "lora.dropout": 0.1},
            "ATTENTION_SAVED",
            {"draws": True},
        ),
        ({"gradient_checkpointing": "CPU_OFFLOADED"}, "OFF", {}),
        ({"layer_offload_fraction": 0.5}, "OFF", {}),
    ],
)
def test_blocks_recompute_inside_of_their_graphs_unless_they_are_streamed(
    settings: dict[str, Any],
    mode: str,
    more: dict[str, Any],
    tmp_path: Path,
    small_clips: Path,
) -> None:
    """``stream_blocks`` recomputes around the graphs."""
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    job = job_of(lab, settings)
    family = open_models(job.spec, job.base, job.config)
    net = family.denoiser()
    added: list[tuple[Any, ...]] = []

    class Compiled:
        def add(self, *arguments: Any, **others: Any) -> None:
            added.append((*arguments, others))

    compiled: Any = Compiled()
    offload = arrange_blocks(
        net, family.spec, job.config, {}, None, report=False, compiled=compiled
    )
    assert added == [(net, family.spec.block_lists, mode, more)]
    assert (offload is not None) is (more == {})
