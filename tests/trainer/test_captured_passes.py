"""Passes that are captured: which have a graph of their own, until when a graph holds, and
whose gradients it writes. Tapes of operations take the place of CUDA graphs.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.taped_graph import TapedGraph
from tests.support.trainers import Lab, trainer_of
from videotune.distributed import DistributedContext
from videotune.errors import VideotuneError
from videotune.trainer import captured_passes, loop
from videotune.trainer.captured_passes import CapturedPasses, no_cuda_graphs
from videotune.trainer.loop import new_graph_cache
from videotune.trainer.network_pass import PassInputs, PassOutput
from videotune.types import Batch, Conditioning


class Net(nn.Module):
    """A matrix that trains, one that does not, and a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.Linear(3, 2, bias=False)
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.trained(x)) + self.shift


def inputs_of(samples: int, seed: int = 0, weight: float = 1.0) -> PassInputs:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed))
    text = Conditioning(torch.zeros(samples, 1, 1))
    batch = Batch.of(torch.zeros(samples, 1, 1, 1, 1), text)
    return PassInputs(batch, torch.zeros(samples), x, None, weight)


class Passes:
    """A network's passes with graphs, and how often the host has made one."""

    def __init__(self) -> None:
        self.net = Net()
        self.captured = CapturedPasses(TapedGraph)
        self.calls = 0

    def run_pass(self, inputs: PassInputs) -> PassOutput:
        self.calls += 1
        error = self.net(inputs.noise).square().sum(dim=1)
        loss = error.sum() * inputs.weight
        loss.backward()
        return PassOutput(loss.detach(), error.detach(), None)

    def run(self, inputs: PassInputs) -> tuple[Tensor, Tensor]:
        """The loss of a pass, and its gradient."""
        self.net.zero_grad()
        output = self.captured.run(self.net, inputs, self.run_pass)
        return output.weighted_loss.clone(), self.net.trained.weight.grad.clone()

    def expected(self, inputs: PassInputs) -> tuple[Tensor, Tensor]:
        """The same by hand: d/dW Σ(F(Wx) + s)² = 2 Fᵀ(F(Wx) + s) xᵀ."""
        weight, frozen = self.net.trained.weight.data, self.net.frozen.weight.data
        x = inputs.noise
        answer = x @ weight.T @ frozen.T + self.net.shift
        gradient = 2 * inputs.weight * (answer @ frozen).T @ x
        return answer.square().sum() * inputs.weight, gradient

    def check(self, inputs: PassInputs) -> None:
        for actual, expected in zip(
            self.run(inputs), self.expected(inputs), strict=True
        ):
            torch.testing.assert_close(actual, expected)


def test_the_first_pass_of_a_shape_runs_the_second_is_captured_and_the_rest_replayed() -> (
    None
):
    passes = Passes()
    host_passes = []
    for seed, samples in enumerate((1, 1, 1, 2, 2, 2, 1)):
        passes.check(inputs_of(samples, seed))
        host_passes.append(passes.calls)
    assert host_passes == [1, 2, 2, 3, 4, 4, 4]
    assert len(passes.captured) == 2


def test_a_factor_of_the_loss_has_a_graph_of_its_own_and_names_of_samples_have_not() -> (
    None
):
    passes = Passes()
    for seed, weight in enumerate((1.0, 1.0, 0.5, 0.5, 1.0)):
        passes.check(inputs_of(1, seed, weight))
    assert len(passes.captured) == 2
    plain = inputs_of(1)
    named = replace(
        plain.batch, captions=("a",), window_ids=("w",), prior_preservation=(True,)
    )
    passes.check(replace(plain, batch=named))
    assert len(passes.captured) == 2
    assert passes.calls == 4


def test_beyond_the_most_graphs_passes_run_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured_passes, "MAX_GRAPHS", 2)
    passes = Passes()
    for samples in (1, 2, 3):
        for seed in range(3):
            passes.check(inputs_of(samples, seed))
    assert len(passes.captured) == 2
    assert passes.calls == 2 + 2 + 3


def move_weight(net: Net) -> None:
    net.trained.weight.data = 2 * net.trained.weight.data


def move_frozen(net: Net) -> None:
    net.frozen.weight.data = 2 * net.frozen.weight.data


def move_buffer(net: Net) -> None:
    net.shift.data = net.shift + 1


@pytest.mark.parametrize("move", [move_weight, move_frozen, move_buffer])
def test_a_graph_of_a_network_that_has_moved_is_captured_again(
    move: Callable[[Net], None],
) -> None:
    passes = Passes()
    for seed in range(3):
        passes.check(inputs_of(1, seed))
    before = passes.captured._pool
    move(passes.net)
    for seed in range(3):
        passes.check(inputs_of(1, seed))
    # Libraries are set up, so the next pass is captured at once, in new memory.
    assert passes.calls == 3
    assert passes.captured._pool is not before


def test_graphs_that_are_freed_are_captured_again_with_the_next_pass() -> None:
    passes = Passes()
    for seed in range(2):
        passes.check(inputs_of(1, seed))
    pool = passes.captured._pool
    for seed in range(2):
        passes.check(inputs_of(2, seed))
    assert passes.captured._pool is pool, "graphs share memory"
    passes.captured.clear()
    assert len(passes.captured) == 0
    assert passes.captured._pool is None
    for seed in range(2):
        passes.check(inputs_of(1, seed))
    assert passes.calls == 5


def test_the_inputs_of_a_captured_pass_stay_as_they_were() -> None:
    """Later inputs are copied into memory of the graph's own."""
    passes = Passes()
    batches = [inputs_of(1, seed) for seed in range(4)]
    noises = [inputs.noise.clone() for inputs in batches]
    for inputs in batches:
        passes.check(inputs)
    for inputs, noise in zip(batches, noises, strict=True):
        assert torch.equal(inputs.noise, noise)


def test_earlier_gradients_stay_beside_what_a_graph_adds() -> None:
    """Also while it is captured, and those of what is frozen are not touched."""
    passes = Passes()
    net = passes.net
    for seed in range(4):
        earlier = torch.full((2, 3), 7.0)
        net.trained.weight.grad = earlier.clone()
        inputs = inputs_of(1, seed)
        passes.captured.run(net, inputs, passes.run_pass)
        _, gradient = passes.expected(inputs)
        torch.testing.assert_close(net.trained.weight.grad, earlier + gradient)
        assert net.frozen.weight.grad is None


def test_a_pass_that_cannot_be_captured_runs_without_graphs_from_then_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class FailingGraph(TapedGraph):
        captures = 0

        def capture(self, run: Callable[[], None], pool: Any) -> None:
            FailingGraph.captures += 1
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    passes = Passes()
    passes.captured = CapturedPasses(FailingGraph)
    for seed in range(4):
        inputs = inputs_of(1, seed)
        passes.net.trained.weight.grad = torch.full((2, 3), 7.0)
        passes.captured.run(passes.net, inputs, passes.run_pass)
        _, gradient = passes.expected(inputs)
        torch.testing.assert_close(passes.net.trained.weight.grad, 7.0 + gradient)
    assert FailingGraph.captures == 1
    assert len(passes.captured) == 0
    assert passes.captured.failure is not None
    assert passes.captured.failure.endswith("operation not permitted")
    assert "".join(capsys.readouterr()).count("cuda_graphs: off") == 1


@pytest.mark.parametrize(
    ("device", "cuda", "hip", "has_graphs"),
    [
        ("cpu", "13.0", None, False),
        ("mps", "13.0", None, False),
        ("cuda", "13.0", None, True),
        ("cuda", None, "7.0", True),
        ("cuda", None, None, False),
    ],
)
def test_which_devices_have_graphs(
    device: str,
    cuda: str | None,
    hip: str | None,
    has_graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (no_cuda_graphs(torch.device(device)) is None) is has_graphs


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)


def test_a_run_has_graphs_where_they_are_possible_and_not_refused(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(lab)
    trainer.journal.close()
    plain = trainer.job.config
    dropout = plain.lora.model_copy(update={"dropout": 0.5})

    def cache_of(
        value: Any = "auto", processes: int = 1, family: str | None = None, **sets: Any
    ) -> CapturedPasses | None:
        config = plain.model_copy(update={"cuda_graphs": value, **sets})
        trainer.job = replace(
            trainer.job, resolved=replace(trainer.job.resolved, config=config)
        )
        trainer.dist = DistributedContext(0, processes)
        monkeypatch.setattr(type(trainer.family), "no_cuda_graphs", family)
        return new_graph_cache(trainer)

    assert cache_of() is None, "a CPU has none"
    with pytest.raises(VideotuneError, match="only a CUDA GPU"):
        cache_of(True)

    monkeypatch.setattr(loop, "no_cuda_graphs", lambda device: None)
    for value in (True, "auto"):
        cache = cache_of(value)
        assert cache is not None
        assert len(cache) == 0
    assert cache_of(False) is None
    assert cache_of(processes=2) is None
    assert cache_of(family="the host waits") is None
    assert cache_of(lora=dropout) is None
    with pytest.raises(VideotuneError, match="several processes"):
        cache_of(True, processes=2)
    with pytest.raises(VideotuneError, match="the host waits"):
        cache_of(True, processes=2, family="the host waits")
