"""Which denoiser is in memory, and what trains with it."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.trainers import Lab, job_of, trainer_of
from videotune.config.resolve import parse
from videotune.distributed import DistributedContext
from videotune.job.experts import TEXT
from videotune.latent_cache.sampler import ExpertSchedule
from videotune.memory.eight_bit_matmul import matmul_note
from videotune.memory.quantization import packed_note
from videotune.trainer import expert_pool
from videotune.trainer.build import make_objective, open_models
from videotune.trainer.expert_pool import (
    ExpertLoader,
    ExpertPool,
    arrange_blocks,
    make_expert_schedule,
    open_pool,
)
from videotune.trainer.optimizers import OptimizerList
from videotune.trainer.step_context import TrainableState
from videotune.types import WeightDtypes

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
    monkeypatch: pytest.MonkeyPatch,
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

    checkpointed: list[tuple[Any, ...]] = []

    def checkpoint(*arguments: Any, **others: Any) -> None:
        checkpointed.append((*arguments, others))

    compiled: Any = Compiled()
    monkeypatch.setattr(expert_pool, "checkpoint_blocks", checkpoint)
    offload = arrange_blocks(
        net, family.spec, job.config, {}, None, report=False, compiled=compiled
    )
    lists = family.spec.block_lists
    assert added == [(net, lists, mode, more)]
    is_offloaded = more == {}
    assert (offload is not None) is is_offloaded
    if not is_offloaded:
        arrange_blocks(net, family.spec, job.config, {}, None, report=False)
        assert checkpointed == [
            (net, mode, lists, {**more, "whole_graph": whole_graph})
            for whole_graph in (True, False)
        ]


def test_a_pool_begins_empty_and_is_empty_again() -> None:
    pool = pool_of(TWO, "high")

    def state() -> tuple[Any, ...]:
        return pool.loaded, pool.block_offload, pool.captured, pool.compiled

    assert state() == (None, None, None, None)
    assert pool.attention == "native"
    assert pool.text_params == frozenset()
    assert list(pool) == ["high", "low"]
    assert pool["high"] is pool.net
    cleared: list[None] = []
    captured: Any = SimpleNamespace(clear=lambda: cleared.append(None))
    offload: Any = object()
    pool.captured = captured
    pool.block_offload = offload
    pool.load("high")
    assert pool.block_offload is offload, "what is loaded is not loaded again"
    pool.drop()
    assert state() == (None, None, captured, None)
    assert len(cleared) == 1


class Opening:
    """A family that notes how its network is opened."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.weights = WeightDtypes(None, None, None)

    def denoiser(self, name: str, device: torch.device | None) -> nn.Module:
        self.calls.append((name, device))
        return nn.Linear(1, 1)

    def isolate_frames(self, net: nn.Module, isolated: bool) -> None:
        self.calls.append(isolated)


@pytest.mark.parametrize(
    ("settings", "is_sharded", "on_host", "isolated"),
    [
        ({}, False, False, False),
        ({"layer_offload_fraction": 0.5}, False, True, False),
        ({}, True, True, False),
        ({"video_config": {"use_temporal_attention": False}}, False, False, True),
    ],
)
def test_a_network_is_read_onto_the_host_if_its_blocks_go_to_the_device_one_by_one(
    settings: dict[str, Any], is_sharded: bool, on_host: bool, isolated: bool
) -> None:
    family: Any = Opening()
    loader = ExpertLoader(family, parse(settings), ("high",), None)
    if is_sharded:
        mesh: Any = object()
        loader._weights_mesh = mesh
    loader._open(is_first=False, name="high")
    device = torch.device("cpu") if on_host else None
    assert family.calls == [("high", device), isolated]


def test_attention_stays_as_the_network_is_opened_unless_it_is_set(
    tmp_path: Path, small_clips: Path
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    for setting, backend in (("auto", None), ("_native_math", "_native_math")):
        trainer = trainer_of(lab, {"attention": setting})
        trainer.journal.close()
        block = trainer.net.blocks[0]
        assert block.attn1.processor._attention_backend == backend
        assert trainer.pool.attention == backend or setting == "auto"


@pytest.mark.parametrize(("method", "trained"), [("LORA", False), ("FINE_TUNE", True)])
def test_only_streamed_weights_that_train_outlive_their_network(
    method: str, trained: bool, tmp_path: Path, small_clips: Path
) -> None:
    """Frozen ones are read again."""
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    job = job_of(lab, {"training_method": method, "layer_offload_fraction": 1.0})
    family = open_models(job.spec, job.base, job.config)
    loader = ExpertLoader(family, job.config, ("transformer",), None)
    pool = pool_of(ExpertSchedule(("transformer",)))
    loader.load(pool, "transformer")
    assert (list(loader._host_weights) == ["transformer"]) is trained
    assert list(loader.new_parameters) == ["transformer"]


def test_how_a_denoiser_is_stored_and_multiplies_is_printed(
    tmp_path: Path, small_clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    for knobs, multiplies in (
        ({"weight_dtype": "INT_8"}, False),
        ({"transformer.matmul_dtype": "INT_8"}, True),
        ({}, None),
    ):
        job = job_of(lab, knobs)
        family = open_models(job.spec, job.base, job.config)
        loader = ExpertLoader(family, job.config, ("transformer",), None)
        net = family.denoiser()
        capsys.readouterr()
        loader._echo_dtypes(net)
        lines = capsys.readouterr().err.splitlines()
        expected = []
        if multiplies is not None:
            expected.append(packed_note(net, "the denoiser", "INT_8"))
        if multiplies:
            expected.append(matmul_note(net, "the denoiser", "INT_8"))
        assert lines == expected
