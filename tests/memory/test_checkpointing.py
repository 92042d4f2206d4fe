"""Blocks whose inputs alone are kept: the numbers are those of torch's checkpoint to the
bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torchs

from tests.support.families import batch_of
from tests.support.tiny_networks import CPU, Rig, assert_same_bits, deepen, rig
from videotune.memory import input_checkpoint
from videotune.memory.checkpointing import ON, checkpoint_blocks
from videotune.memory.input_checkpoint import InputCheckpoint
from videotune.models.registry import find, names

Bases = Callable[..., Path]
Deep = Callable[..., Any]
KINDS = [(name, variant) for name in names() for variant in find(name).variants]


@pytest.fixture(scope="module")
def deep(tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Deep:
    """Family, variant and dtype -> the family over a tiny checkpoint of three blocks."""
    made: dict[tuple[str, str], Path] = {}

    def get(name: str, variant: str, dtype: torch.dtype = torch.float32) -> Any:
        if (name, variant) not in made:
            folder = tmp_path_factory.mktemp("deep") / f"{name}-{variant}"
            made[name, variant] = deepen(tiny_bases(name, variant), folder, blocks=3)
        return find(name)(made[name, variant], CPU, dtype)

    return get


@pytest.fixture
def torchs_calls(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The blocks that went through torch's checkpoint."""
    calls: list[nn.Module] = []

    def record(block: nn.Module, *args: Any, **options: Any) -> Any:
        calls.append(block)
        return torchs.checkpoint(block, *args, **options)

    monkeypatch.setattr(input_checkpoint, "checkpoint", record)
    return calls


CAPTIONS = ["a red circle", "a blue square moves up"]


def steps_of(
    family: Any,
    *,
    whole_graph: bool,
    method: str = "LORA",
    layers: list[str] | None = None,
) -> Rig:
    """Two steps of two micro-batches; the adapter drops out at random."""
    made = rig(family, None, method, 0.3 if method == "LORA" else 0.0, layers=layers)
    checkpoint_blocks(made.net, ON, whole_graph=whole_graph)
    return made.steps(batch_of(family, CAPTIONS), count=2, parts=2)


@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
@pytest.mark.parametrize(("name", "variant"), [("wan", "t2v"), ("cogvideox", "5b")])
def test_steps_are_those_of_torchs_checkpoint(
    name: str, variant: str, method: str, deep: Deep, torchs_calls: list[nn.Module]
) -> None:
    """Losses, gradients and weights. A gradient that enters the blocks from outside, as
    that of a trained embedding of time, goes torch's way.
    """
    family = deep(name, variant)
    plain = steps_of(family, whole_graph=True, method=method)
    assert_same_bits(plain, steps_of(family, whole_graph=False, method=method))
    assert bool(torchs_calls) == (method == "FINE_TUNE")


@pytest.mark.long
@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
@pytest.mark.parametrize(("name", "variant"), KINDS)
def test_every_kind_is_that_of_torchs_checkpoint(
    name: str, variant: str, method: str, deep: Deep, torchs_calls: list[nn.Module]
) -> None:
    """Text that Kandinsky's own blocks have changed is read by all blocks of its video."""
    family = deep(name, variant)
    plain = steps_of(family, whole_graph=True, method=method)
    assert_same_bits(plain, steps_of(family, whole_graph=False, method=method))
    assert bool(torchs_calls) == (method == "FINE_TUNE" or name == "kandinsky5")


def test_trained_weights_of_blocks(deep: Deep, torchs_calls: list[nn.Module]) -> None:
    """If no other weight trains, no gradient enters from outside."""
    family = deep("wan", "t2v")
    layers = ["blocks.1", "blocks.2.attn2.to_q"]
    plain = steps_of(family, whole_graph=True, method="FINE_TUNE", layers=layers)
    light = steps_of(family, whole_graph=False, method="FINE_TUNE", layers=layers)
    assert_same_bits(plain, light)
    assert not torchs_calls


class Draws(nn.Module):
    """A block that draws, multiplies in autocast's dtype, and returns what it was given
    beside its result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.passes = 0

    def forward(self, x: torch.Tensor, text: torch.Tensor, scale: float) -> Any:
        self.passes += 1
        drawn = torch.rand(4) + torch.nn.functional.dropout(x)
        return self.linear(drawn * scale).float(), text


def gradients_of_draws(call: Any, *, autocast: bool) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    blocks = [Draws(), Draws()]
    blocks[0].requires_grad_(False)
    x = torch.rand(2, 4)
    text = torch.rand(2, 4)
    with torch.autocast("cpu", enabled=autocast):
        for block in (*blocks, Draws()):
            x, text = call(block, x, text, 3.0)
    drawn_after_forward = torch.rand(1)

    loss = (x * text).sum()
    loss.backward()
    grads = [parameter.grad for parameter in blocks[1].parameters()]
    return blocks, [x.detach(), *grads, drawn_after_forward, torch.rand(1)]


@pytest.mark.parametrize("autocast", [False, True])
def test_draws_and_autocast_are_those_of_the_first_pass(autocast: bool) -> None:
    """Computing again draws the same numbers, and leaves the generator as it was. A block
    in which nothing trains is computed once.
    """

    def torchs_call(block: nn.Module, *args: Any) -> Any:
        return torchs.checkpoint(block, *args, use_reentrant=False)

    _, wanted = gradients_of_draws(torchs_call, autocast=autocast)
    blocks, values = gradients_of_draws(InputCheckpoint(), autocast=autocast)
    assert all(map(torch.equal, values, wanted))
    assert [block.passes for block in blocks] == [1, 2]


def test_hooks_of_gradients_run_once(deep: Deep) -> None:
    """Updates during the backward pass and sums over processes hang on them."""
    family = deep("wan", "t2v")
    made = rig(family, None, "LORA")
    checkpoint_blocks(made.net, ON)
    calls: list[int] = []
    for parameter in made.trainable.parameters.values():
        parameter.register_post_accumulate_grad_hook(lambda p: calls.append(id(p)))
    made.steps(batch_of(family, CAPTIONS), count=1)
    assert sorted(calls) == sorted(map(id, made.trainable.parameters.values()))
