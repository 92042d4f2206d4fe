"""The passes of a step: which samples a process counts, what draws inside the network,
and which norms of gradients are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.taped_graph import TapedGraph
from tests.trainer.test_step import CPU, Setup
from videotune.adapters.layers import LiveText
from videotune.config.schema import Optimizer
from videotune.diffusion.base_targets import BaseGuidance
from videotune.distributed import DistributedContext
from videotune.latent_cache.step_batch import StepBatch
from videotune.memory.sharding import Shards
from videotune.rng import torch_seed
from videotune.trainer.captured_passes import CapturedPasses
from videotune.trainer.gradient_norms import GradientNorms
from videotune.trainer.low_precision import BackwardOptimizer
from videotune.trainer.lr_schedule import LRSchedule
from videotune.trainer.optimizers import make_optimizer
from videotune.trainer.step import accumulate_gradients, train_step
from videotune.trainer.step_context import StepContext, TrainableState
from videotune.trainer.step_record import FIRST_MSE, LOSS, Clock, empty_values
from videotune.types import Conditioning

Open = Callable[..., Any]
SECOND_OF_TWO = DistributedContext(1, 2)


def rows_of(whole: StepBatch, begin: int, end: int) -> StepBatch:
    """A process's samples of a step."""
    assert whole.batch is not None
    rows = whole.batch.take(range(begin, end))
    return replace(whole, first_sample=begin, batch=rows, noise=whole.noise[begin:end])


def trainable_of(setup: Setup, **fields: Any) -> TrainableState:
    schedules = {"transformer": LRSchedule(setup.lr, "CONSTANT", 0, 1)}
    return TrainableState(setup.parameters, setup.optimizer, schedules, **fields)


def passes_of(
    setup: Setup, step_batch: StepBatch, context: StepContext, **fields: Any
) -> tuple[Tensor, Tensor, int]:
    """The gradient of a process's passes, the step's values, and the network's calls."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    setup.optimizer.zero_grad(set_to_none=True)
    values = empty_values(step_batch, CPU)
    handle = setup.net.register_forward_pre_hook(count)
    trainable = trainable_of(setup, **fields)
    accumulate_gradients(context, setup.net, trainable, step_batch, Clock(CPU), values)
    handle.remove()
    gradients = [p.grad.flatten() for p in setup.parameters.values()]
    return torch.cat(gradients).clone(), values, calls


def test_a_process_with_fewer_samples_makes_as_many_passes_and_counts_its_own(
    tiny_family: Open,
) -> None:
    """The first of two processes has one sample of a step of three, the second two: with
    sharded weights the first one's second pass adds nothing, anywhere.
    """
    setup = Setup(tiny_family("wan"))
    whole = setup.prepared(1, count=3)
    context = StepContext(setup.family, setup.objective, 3, 1.0)
    plain, values, calls = passes_of(setup, rows_of(whole, 0, 1), context)
    assert calls == 1
    assert values[FIRST_MSE] > 0
    assert not values[FIRST_MSE + 1 :].any()

    first = replace(context, dist=DistributedContext(0, 2))
    padded = passes_of(setup, rows_of(whole, 0, 1), first, shards=Shards())
    assert padded[2] == 2
    assert torch.equal(padded[0], plain)
    assert torch.equal(padded[1], values)

    # With the whole network in each process, none waits for another's passes.
    alone = passes_of(setup, rows_of(whole, 0, 1), first)
    assert alone[2] == 1
    assert torch.equal(alone[0], plain)


def test_the_shares_of_two_processes_add_up_to_the_step(tiny_family: Open) -> None:
    setup = Setup(tiny_family("wan"))
    whole = setup.prepared(1, count=3)
    context = StepContext(setup.family, setup.objective, 3, 1.0)
    expected_gradient, expected_values, _ = passes_of(setup, whole, context)
    parts = []
    for rank, (begin, end) in enumerate(((0, 1), (1, 3))):
        own = replace(context, dist=DistributedContext(rank, 2))
        parts.append(passes_of(setup, rows_of(whole, begin, end), own, shards=Shards()))
    assert [calls for _, _, calls in parts] == [2, 2]
    torch.testing.assert_close(parts[0][0] + parts[1][0], expected_gradient)
    torch.testing.assert_close(parts[0][1] + parts[1][1], expected_values)


def test_sharded_processes_ask_the_base_model_in_the_same_passes(
    tiny_family: Open,
) -> None:
    """Only the second process's second sample is one of prior preservation; the first
    process runs the base model beside it, in its padding.
    """
    setup = Setup(tiny_family("wan"))
    whole = replace(setup.prepared(1, count=3, prior=(2,)), prior_samples=(2,))
    context = StepContext(setup.family, setup.objective, 3, 1.0)
    calls = []
    for rank, (begin, end) in enumerate(((0, 1), (1, 3))):
        own = replace(context, dist=DistributedContext(rank, 2))
        result = passes_of(setup, rows_of(whole, begin, end), own, shards=Shards())
        calls.append(result[2])
    assert calls == [3, 3]


def test_a_process_without_a_sample_of_its_own_adds_nothing(tiny_family: Open) -> None:
    """It runs another process's sample, so that the others need not wait for it."""
    setup = Setup(tiny_family("wan"))
    whole = replace(rows_of(setup.prepared(1, count=1), 0, 1), is_padding=True)
    dist = DistributedContext(0, 2)
    context = StepContext(setup.family, setup.objective, 1, 1.0, dist=dist)
    gradient, values, calls = passes_of(setup, whole, context, shards=Shards())
    assert calls == 1
    assert not gradient.any()
    assert not values.any()


def test_another_process_s_prior_sample_leaves_the_targets_of_this_one(
    tiny_family: Open,
) -> None:
    """The base model runs beside them, and its result is dropped."""
    setup = Setup(tiny_family("wan"))
    whole = setup.prepared(1, count=4, prior=(3,))
    context = StepContext(setup.family, setup.objective, 2, 1.0)
    plain, values, calls = passes_of(setup, rows_of(whole, 0, 2), context)
    assert calls == 1
    first = replace(context, dist=DistributedContext(0, 2))
    beside = replace(rows_of(whole, 0, 2), prior_samples=(3,))
    beside_prior = passes_of(setup, beside, first, shards=Shards())
    assert beside_prior[2] == 2
    assert torch.equal(beside_prior[0], plain)
    assert torch.equal(beside_prior[1], values)


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_text_has_a_graph_only_where_sharded_processes_need_one(
    is_live: bool, is_sharded: bool, tiny_family: Open
) -> None:
    """Where text is encoded in the step: there a process may have nothing else to train."""
    setup = Setup(tiny_family("wan"))
    whole = setup.prepared(1, count=2)
    requires_grad = []
    handle = setup.net.register_forward_pre_hook(
        lambda _, args, kwargs: requires_grad.append(
            kwargs["encoder_hidden_states"].requires_grad
        ),
        with_kwargs=True,
    )
    dist = DistributedContext(0, 2) if is_sharded else DistributedContext()
    context = StepContext(setup.family, setup.objective, 1, 1.0, dist=dist)
    fields = {
        "text": LiveText() if is_live else None,
        "shards": Shards() if is_sharded else None,
    }
    passes_of(setup, rows_of(whole, 0, 1) if is_sharded else whole, context, **fields)
    handle.remove()
    assert requires_grad == [is_live and is_sharded]


def masks_of(
    setup: Setup, step_batch: StepBatch, context: StepContext
) -> Sequence[Tensor]:
    """Which numbers the adapter's dropout removes in each pass."""
    masks: list[Tensor] = []
    layer = next(
        module
        for name, module in setup.net.named_modules()
        if name.endswith("lora_dropout.default")
    )
    handle = layer.register_forward_hook(lambda _, args, out: masks.append(out == 0))
    passes_of(setup, step_batch, context)
    handle.remove()
    return masks


def test_dropout_is_drawn_by_seed_step_sample_and_share_of_the_tokens(
    tiny_family: Open,
) -> None:
    """And by nothing else: not by what has been drawn before, nor by the process that has
    the sample.
    """
    setup = Setup(tiny_family("wan"), dropout=0.5)
    first_step = setup.prepared(1, count=2)
    context = StepContext(setup.family, setup.objective, 2, 1.0, network_seed=5)
    drawn = masks_of(setup, first_step, context)
    torch.manual_seed(77)
    again = masks_of(setup, first_step, context)
    assert [torch.equal(*pair) for pair in zip(drawn, again, strict=True)] == [True] * 2

    # The second of two processes draws for its sample what one process draws for it.
    shared = replace(context, dist=SECOND_OF_TWO)
    (second,) = masks_of(setup, rows_of(first_step, 1, 2), shared)
    assert torch.equal(second, drawn[1])

    other_seed = masks_of(setup, first_step, replace(context, network_seed=6))
    other_step = masks_of(setup, replace(first_step, step=2), context)
    of_two = DistributedContext(1, 2, context_parallel=2)
    other_tokens = masks_of(setup, first_step, replace(context, dist=of_two))
    first_tokens = DistributedContext(0, 2, context_parallel=2)
    same_tokens = masks_of(setup, first_step, replace(context, dist=first_tokens))
    assert torch.equal(same_tokens[0], drawn[0])
    others = [drawn[1], other_seed[0], other_step[0], other_tokens[0]]
    for mask in others:
        assert not torch.equal(mask, drawn[0])


def test_a_resumed_run_draws_inside_the_network_as_before(tiny_family: Open) -> None:
    """Under a name that no version changes."""
    setup = Setup(tiny_family("wan"), dropout=0.5)
    context = StepContext(setup.family, setup.objective, 2, 1.0, network_seed=5)
    states: list[Tensor] = []
    handle = setup.net.register_forward_pre_hook(
        lambda *_: states.append(torch.get_rng_state())
    )
    passes_of(setup, setup.prepared(3, count=2), context)
    handle.remove()
    for sample, state in enumerate(states):
        torch.manual_seed(torch_seed(5, "network", 3, sample))
        assert torch.equal(state, torch.get_rng_state())
    assert len(states) == 2


def test_without_dropout_the_step_leaves_the_process_s_draws_alone(
    tiny_family: Open,
) -> None:
    setup = Setup(tiny_family("wan"))
    context = StepContext(setup.family, setup.objective, 2, 1.0)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    passes_of(setup, setup.prepared(1, count=2), context)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("is_within_backward", [False, True])
def test_the_norms_of_a_step_that_is_due_are_those_of_its_gradients(
    is_within_backward: bool, tiny_family: Open
) -> None:
    """Updates during backward use the gradients up, and the norms are the same."""
    setup = Setup(tiny_family("wan"))
    expected: dict[str, Tensor] = {}

    def measure(name: str, gradient: Tensor) -> None:
        expected[name] = gradient.double().norm()

    for name, parameter in setup.parameters.items():
        parameter.register_hook(partial(measure, name))
    backward_optimizer = None
    if is_within_backward:
        setup.optimizer = make_optimizer(
            {"transformer": list(setup.parameters.values())},
            Optimizer(),
            one_per_parameter=True,
        )
        backward_optimizer = BackwardOptimizer(1e9).attach(
            setup.parameters, setup.optimizer
        )
    count = len(setup.parameters)
    norms = GradientNorms(lambda step: step == 2, count + 1, CPU)
    context = StepContext(setup.family, setup.objective, 1, 1e9, gradient_norms=norms)
    trainable = trainable_of(setup, backward_optimizer=backward_optimizer, expert="low")

    for step in (1, 2, 3):
        expected.clear()
        prepared = setup.prepared(step, count=2)
        record = train_step(context, setup.net, trainable, prepared, Clock(CPU))
        if step == 1:
            assert norms.read(1) is None
        if step == 2:
            of_second_step = torch.stack([expected[name] for name in setup.parameters])
            norm = record.read()["grad_norm"]

    assert norms.read(3) is None
    kept = norms.read(2)
    assert kept is not None
    assert norms.expert == "low"
    assert kept[count] == 0
    assert kept.count_nonzero() == count
    torch.testing.assert_close(kept[:count], of_second_step, rtol=1e-5, atol=0)
    assert float(kept.norm()) == pytest.approx(norm, rel=1e-5)
    assert record.values[LOSS] > 0


def test_samples_of_prior_preservation_are_none_of_a_guided_base_s(
    tiny_family: Open,
) -> None:
    """Each sample has the target that it has where all have the same kind."""
    setup = Setup(tiny_family("wan"))
    generator = torch.Generator().manual_seed(9)
    empty = Conditioning(torch.randn(1, 8, 16, generator=generator))
    plain = StepContext(setup.family, setup.objective, 1, 1.0)
    guided = replace(plain, base_guidance=BaseGuidance(4.0, empty))

    def errors(context: StepContext, prior: Sequence[int]) -> Tensor:
        values = passes_of(setup, setup.prepared(1, count=2, prior=prior), context)[1]
        return values[FIRST_MSE : FIRST_MSE + 2]

    both = errors(guided, (0,))
    only_guided = errors(guided, ())
    torch.testing.assert_close(both[0], errors(plain, (0, 1))[0])
    torch.testing.assert_close(both[1], only_guided[1])
    for others in (errors(plain, ()), errors(plain, (0,))):
        assert abs(float(only_guided[1] - others[1])) > 1e-4
    assert abs(float(only_guided[0] - both[0])) > 1e-4


def test_norms_are_kept_on_the_device_of_their_gradients() -> None:
    """So that none waits for it; those of weights on the host are there."""
    meta = torch.device("meta")
    norms = GradientNorms(lambda step: step == 1, 2, meta)
    parameters = [nn.Parameter(torch.zeros(3, device=meta)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(3, device=meta)
    norms.keep(1, parameters, None)
    on_host = nn.Parameter(torch.zeros(4))
    on_host.grad = torch.ones(4)
    norms.keep(1, [nn.Parameter(torch.zeros(1)), on_host], None)
    assert norms._norms_by_device["cpu"].tolist() == [0.0, 2.0]
    assert norms._norms_by_device["meta"].device == meta


@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_time_of_a_pass_is_that_of_its_two_halves(
    has_graphs: bool, tiny_family: Open
) -> None:
    """With graphs, what precedes the graph and the graph."""
    setup = Setup(tiny_family("wan"))
    step_batch = setup.prepared(1, count=2)
    context = StepContext(setup.family, setup.objective, 2, 1.0)
    if has_graphs:
        context = replace(context, captured=CapturedPasses(TapedGraph))
    clock = Clock(CPU)
    values = empty_values(step_batch, CPU)
    accumulate_gradients(
        context, setup.net, trainable_of(setup), step_batch, clock, values
    )
    seconds = clock.read()
    assert list(seconds) == ["forward", "backward"]
    assert min(seconds.values()) > 0
