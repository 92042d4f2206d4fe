"""What ``cuda_graphs`` does, with tapes of operations in the place of CUDA graphs."""

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from tests.support.out_of_memory import OUT_OF_MEMORY
from tests.support.taped_graph import TapedGraph, taped
from tests.support.trainers import Lab, run_steps, trainer_of, weights
from videotune.errors import VideotuneError
from videotune.models.wan import Wan
from videotune.trainer.captured_passes import CapturedPasses
from videotune.trainer.network_pass import PassInputs, PassOutput
from videotune.types import Batch, Conditioning

STEPS = 4
SEVERAL_PASSES: dict[str, Any] = {
    "batch_size": 3,
    "micro_batch_size": 1,
    "learning_rate": 0.01,
    "ema": 0.9,
}


@pytest.mark.effect("cuda_graphs")
def test_the_host_makes_a_captured_pass_once(lab: Lab) -> None:
    """Python runs the first pass and the captured one, the graph all others; losses and
    weights are the same to the bit, with gradients summed over three passes a step.
    """
    calls: dict[Any, int] = {}
    losses = {}
    after = {}
    for value in (True, False, "auto"):
        trainer = trainer_of(lab, {**SEVERAL_PASSES, "cuda_graphs": value})
        own = Wan.predict
        calls[value] = 0

        def predict(*arguments: Any, own: Any = own, value: Any = value) -> Any:
            calls[value] += 1
            return own(*arguments)

        with taped() as made, patch.object(Wan, "predict", predict):
            lines = run_steps(trainer, STEPS)
        losses[value] = [line["loss"] for line in lines]
        after[value] = weights(trainer)
        assert [passes.failure for passes in made] == ([] if value is False else [None])

    assert calls == {True: 2, "auto": 2, False: 3 * STEPS}
    assert losses[True] == losses["auto"] == losses[False]
    for name, weight in after[False].items():
        assert torch.equal(after[True][name], weight)


def test_graphs_that_leave_no_room_are_freed_and_the_step_is_repeated(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {}
    for value in (True, False):
        trainer = trainer_of(lab, {**SEVERAL_PASSES, "cuda_graphs": value})
        replay = Mock(side_effect=[None, OUT_OF_MEMORY])
        with taped() as made, patch.object(TapedGraph, "replay", replay):
            lines = run_steps(trainer, STEPS)
        losses[value] = [line["loss"] for line in lines]
        if value:
            assert [len(passes) for passes in made] == [0]
            assert made[0].failure
    assert losses[True] == losses[False]
    assert "cuda_graphs: off" in "".join(capsys.readouterr())


def test_a_cpu_has_no_graphs(lab: Lab) -> None:
    trainer = trainer_of(lab, {"cuda_graphs": True})
    with pytest.raises(VideotuneError):
        run_steps(trainer, 1)


@pytest.mark.parametrize(
    "sets",
    [
        {"layer_offload_fraction": 0.5},
        {"gradient_checkpointing": "CPU_OFFLOADED"},
        {"lora": {"dropout": 0.1}},
        {"training_method": "FINE_TUNE"},
        {"optimizer": {"name": "ADAMW", "step_in_backward": True}},
    ],
)
def test_what_the_host_takes_part_in_is_refused(lab: Lab, sets: dict[str, Any]) -> None:
    with pytest.raises(VideotuneError, match="cuda_graphs"):
        trainer_of(lab, {**sets, "cuda_graphs": True})


class SharingGraph(TapedGraph):
    """A tape that writes over the results of other graphs, as shared memory allows."""

    passes: CapturedPasses

    def replay(self) -> None:
        for captured in self.passes._graphs.values():
            if captured.graph is not self:
                for _, gradient in captured.gradients:
                    gradient.fill_(torch.nan)
        super().replay()


@pytest.mark.parametrize("order", [(1, 2), (2, 1), (1, 2, 1), (2, 1, 1, 2)])
def test_gradients_of_several_graphs_add_up_in_any_order(
    order: tuple[int, ...],
) -> None:
    """Graphs share memory: a replay may write over what another one has returned."""
    net = torch.nn.Linear(3, 2, bias=False)
    passes = CapturedPasses(SharingGraph)
    SharingGraph.passes = passes

    def run_pass(inputs: PassInputs) -> PassOutput:
        error = net(inputs.noise).square().sum() * inputs.weight
        error.backward()
        return PassOutput(error.detach(), error.detach(), None)

    def inputs_of(samples: int, seed: int) -> PassInputs:
        x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed))
        text = Conditioning(torch.zeros(samples, 1, 1))
        batch = Batch.of(torch.zeros(samples, 1, 1, 1, 1), text)
        return PassInputs(batch, torch.zeros(samples), x, None, 1.0)

    for seed, samples in enumerate((1, 2, 1, 2)):
        passes.run(net, inputs_of(samples, seed), run_pass)
    assert len(passes) == 2

    net.zero_grad()
    for seed, samples in enumerate(order):
        passes.run(net, inputs_of(samples, 10 + seed), run_pass)
    gradient = net.weight.grad
    net.zero_grad()
    for seed, samples in enumerate(order):
        run_pass(inputs_of(samples, 10 + seed))
    assert torch.allclose(gradient, net.weight.grad)
