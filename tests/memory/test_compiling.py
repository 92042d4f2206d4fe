"""Compiled blocks beside uncompiled ones: losses, gradients, saved attention, failures."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import families
from tests.support.families import FAMILIES, KINDS, Open
from videotune.memory.checkpointing import ATTENTION_SAVED, OFF, ON, checkpoint_blocks
from videotune.memory.compiling import compile_blocks

Patch = pytest.MonkeyPatch


@pytest.fixture
def inductor(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Patch) -> None:
    """Compiled code of this session is kept in a folder of its own."""
    folder = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))


def losses_and_gradients(
    family: Any, checkpointing: str, compiled: bool
) -> dict[str, torch.Tensor]:
    """The prediction of a network with a LoRA, and the gradients of it, by name."""
    net = families.first_of(family)
    trained = families.noisy_lora(family, net)
    net.train()
    checkpoint_blocks(net, checkpointing)
    if compiled:
        compile_blocks(net, family.spec.block_lists, checkpointing)

    batch = families.batch_of(family, ["a red circle", "a blue one"])
    v = family.predict(net, batch.x0, torch.tensor([0.3, 0.8]), batch)
    v.square().mean().backward()
    found = {"prediction": v.detach()}
    for name, parameter in trained.items():
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found


@KINDS
def test_saved_attention_gives_the_gradients_of_recomputed_attention(
    name: str, variant: str, tiny_family: Open
) -> None:
    """To the bit, without compiling."""
    family = tiny_family(name, variant=variant)
    expected = losses_and_gradients(family, ON, compiled=False)
    found = losses_and_gradients(family, ATTENTION_SAVED, compiled=False)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """A compiled block gives zeros where an output that no loss reads gives nothing."""
    assert all(not bool(found[name].any()) for name in found.keys() - expected.keys())
    for name, value in expected.items():
        scale = float(value.abs().max())
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-4 * scale), name


def assert_traced_is_untraced(family: Any, monkeypatch: Patch) -> None:
    """With the compiler's graphs and without its kernels, which take a minute a graph to
    build.
    """
    partitioned = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", partitioned)
    plain = losses_and_gradients(family, ON, compiled=False)
    for checkpointing in (OFF, ON, ATTENTION_SAVED):
        torch.compiler.reset()
        traced = losses_and_gradients(family, checkpointing, compiled=True)
        assert_close(traced, plain)


def assert_compiled_is_uncompiled(family: Any) -> None:
    torch.compiler.reset()
    plain = losses_and_gradients(family, ON, compiled=False)
    compiled = losses_and_gradients(family, ATTENTION_SAVED, compiled=True)
    assert_close(compiled, plain)


@pytest.mark.long
@KINDS
def test_traced_blocks_equal_untraced_ones(
    name: str, variant: str, tiny_family: Open, monkeypatch: Patch
) -> None:
    assert_traced_is_untraced(tiny_family(name, variant=variant), monkeypatch)


@pytest.mark.long
@FAMILIES
def test_compiled_blocks_equal_uncompiled_ones(
    name: str, tiny_family: Open, inductor: None
) -> None:
    assert_compiled_is_uncompiled(tiny_family(name))


@pytest.mark.slow
def test_blocks_of_wan_traced_and_compiled(
    tiny_family: Open, inductor: None, monkeypatch: Patch
) -> None:
    """What the two above do for every family."""
    assert_compiled_is_uncompiled(tiny_family("wan"))
    assert_traced_is_untraced(tiny_family("wan"), monkeypatch)


PROGRAM = """
import json, sys, torch
from torch import nn
from torch._dynamo.utils import counters
from videotune.errors import VideotuneError
from videotune.memory.compiling import CompiledBlocks, describe_failure

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        heads = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return x + torch.tanh(attended.transpose(1, 2).flatten(2))

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def enable_gradient_checkpointing(self, function):
        self.function = function

    def forward(self, x):
        for block in self.blocks:
            x = self.function(block, x)
        return x

torch.manual_seed(0)
net, compiled = Network(), CompiledBlocks()
compiled.add(net, ["blocks"], sys.argv[1])
with compiled.clock.running():
    net(torch.randn(1, 16, 8, requires_grad=True)).sum().backward()
found = {**counters["inductor"], "seconds": compiled.clock.seconds}
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [ON, ATTENTION_SAVED])
def test_the_next_process_finds_the_compiled_code(
    checkpointing: str, tmp_path: Path
) -> None:
    """In the folder that the user names: what is looked up there is counted."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        words = [sys.executable, "-c", PROGRAM, checkpointing]
        ended = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=True
        )
        found.append(json.loads(ended.stdout.splitlines()[-1]))
    print(found)
    assert found[0]["fxgraph_cache_miss"] == found[1]["fxgraph_cache_hit"] >= 2
    assert "fxgraph_cache_hit" not in found[0]
    assert "fxgraph_cache_miss" not in found[1]
    assert all(one["seconds"] > 0 for one in found)
