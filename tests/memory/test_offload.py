"""Weights and inputs of blocks on the host: the numbers are those of the plain network
to the bit, and less is kept.

Weights that are away are NaN, and in these tests so is what a block has left in the
ring, so a read outside its window is a loss that is not a number.

Tests on a CUDA device are deselected where there is none.
"""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiny_networks import (
    BLOCKS,
    CPU,
    Rig,
    assert_same_bits,
    batch_of,
    deepen,
    resident_bytes,
    rig,
)
from videotune.adapters.lora import adapter_off, add_lora
from videotune.config.sections import Lora
from videotune.errors import DoesNotFit, VideotuneError
from videotune.memory import host_memory as host
from videotune.memory import host_weights
from videotune.memory.block_offload import spread, stream_blocks
from videotune.memory.host_weights import HostWeights
from videotune.models.registry import find, names

Bases = Callable[..., Path]
Deep = Callable[..., Any]

KINDS = [(name, variant) for name in names() for variant in find(name).variants]
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
PLAIN: dict[tuple[str, str], Rig] = {}
"""What the plain network of a family has measured, by the method."""


@pytest.fixture(scope="module")
def deep(tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Deep:
    """Family, variant and dtype -> the family over a tiny checkpoint of eight blocks."""
    made: dict[tuple[str, str], Path] = {}

    def get(
        name: str = "wan", variant: str = "t2v", dtype: torch.dtype = torch.float32
    ) -> Any:
        if (name, variant) not in made:
            folder = tmp_path_factory.mktemp("deep") / f"{name}-{variant}"
            made[name, variant] = deepen(tiny_bases(name, variant), folder)
        return find(name)(made[name, variant], CPU, dtype)

    return get


def test_which_blocks_are_streamed() -> None:
    assert [spread(8, share) for share in (0, 0.25, 0.5, 1)] == [
        [],
        [2, 6],
        [1, 3, 5, 7],
        list(range(8)),
    ]
    assert spread(40, 0.01) == [20], "never none where some are asked for"
    for count in range(1, 41):
        for chosen in (spread(count, k / 20) for k in range(21)):
            assert len(set(chosen)) == len(chosen)
            assert all(0 <= i < count for i in chosen)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
@pytest.mark.parametrize(("name", "variant"), [("wan", "t2v"), ("cogvideox", "5b")])
def test_three_steps_are_those_of_the_plain_network(
    name: str, variant: str, method: str, fraction: float, deep: Deep
) -> None:
    """Losses, the gradients that the optimizer is given, and weights; the adapter drops
    out at random.
    """
    family, dropout = deep(name, variant), 0.3 if method == "LORA" else 0.0
    batch = batch_of(family)
    if (name, method) not in PLAIN:
        PLAIN[name, method] = rig(family, None, method, dropout).steps(batch)
    mode = {
        0.0: "CPU_OFFLOADED",
        0.25: "OFF",
        0.5: "ON",
        0.75: "CPU_OFFLOADED",
        1.0: "OFF",
    }[fraction]
    assert_same_bits(
        PLAIN[name, method], rig(family, (fraction, mode), method, dropout).steps(batch)
    )


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
@pytest.mark.parametrize(("name", "variant"), [("wan", "t2v"), ("cogvideox", "5b")])
def test_blocks_that_are_computed_in_parts_are_the_plain_network(
    name: str, variant: str, method: str, fraction: float, deep: Deep
) -> None:
    """Losses, gradients and weights, with dropout in the adapter."""
    family = deep(name, variant)
    dropout = 0.3 if method == "LORA" else 0.0
    batch = batch_of(family)
    if (name, method) not in PLAIN:
        PLAIN[name, method] = rig(family, None, method, dropout).steps(batch)
    in_parts = rig(family, (fraction, "IN_PARTS"), method, dropout)
    assert_same_bits(PLAIN[name, method], in_parts.steps(batch))


@pytest.mark.long
@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
@pytest.mark.parametrize(("name", "variant"), KINDS)
def test_every_kind_at_every_setting_is_the_plain_network(
    name: str, variant: str, method: str, deep: Deep
) -> None:
    family = deep(name, variant)
    batch = batch_of(family)
    plain = rig(family, None, method).steps(batch, count=2, parts=2)
    for fraction in FRACTIONS:
        for mode in ("OFF", "ON", "CPU_OFFLOADED", "IN_PARTS"):
            assert_same_bits(
                plain,
                rig(family, (fraction, mode), method).steps(batch, count=2, parts=2),
            )


@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
def test_in_bf16_too(method: str, deep: Deep) -> None:
    """Weights and masters apart: gradients leave in bf16, and are summed in it over two
    micro-batches, as autograd does.
    """
    family = deep("wan", "t2v", torch.bfloat16)
    batch = batch_of(family)
    plain = rig(family, None, method).steps(batch, count=2, parts=2)
    assert_same_bits(
        plain,
        rig(family, (0.75, "CPU_OFFLOADED"), method).steps(batch, count=2, parts=2),
    )


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_prior_samples_and_isolated_frames(name: str, deep: Deep) -> None:
    """The base model is asked first, without the adapter and without a graph, over the
    same ring.
    """
    family = deep(name, find(name).variants[0])
    batch = batch_of(family)
    plain = rig(family, None, dropout=0.3, isolate=True).steps(
        batch, parts=2, prior=True
    )
    assert_same_bits(
        plain,
        rig(family, (0.5, "ON"), dropout=0.3, isolate=True).steps(
            batch, parts=2, prior=True
        ),
    )


def predicted(family: Any, net: nn.Module, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return family.predict(net, batch.x0, torch.full((len(batch),), 0.4), batch)


def test_without_a_graph_blocks_pass_forward_only(deep: Deep) -> None:
    """Previews and validation: each block is loaded once a pass, and the next pass
    begins with what is there.
    """
    family = deep()
    batch, plain = batch_of(family), rig(family, None)
    streamed = rig(family, (1.0, "OFF"))
    ring = streamed.streams.buffers
    wanted = predicted(family, plain.net, batch)
    for _ in range(3):
        assert torch.equal(predicted(family, streamed.net, batch), wanted)
    assert ring.loads == 3 * BLOCKS + 1, (
        "the first block of a fourth pass is there already"
    )
    with adapter_off(plain.net), adapter_off(streamed.net):
        wanted = predicted(family, plain.net, batch)
        assert torch.equal(predicted(family, streamed.net, batch), wanted)


def test_one_block_at_a_time_and_the_ring_turns_round(deep: Deep) -> None:
    """A step needs each of eight blocks twice; the two in the ring are used where a
    pass turns: 14 loads, then 12 a step.
    """
    family = deep()
    batch = batch_of(family)
    loads = []
    streamed = rig(family, (1.0, "OFF"))
    ring = streamed.streams.buffers
    bind, bound = ring._bind, []
    ring._bind = lambda *words: (bind(*words), bound.append(len(ring._bound)))
    for _ in range(3):
        streamed.steps(batch, count=1)
        loads.append(ring.loads)
    assert loads == [14, 26, 38]
    assert max(bound) == 1
    away = [
        p
        for name, p in streamed.net.named_parameters()
        if name.startswith("blocks.") and "lora" not in name
    ]
    assert away
    assert all(
        p.isnan().all() and p.untyped_storage().nbytes() == p.element_size()
        for p in away
    )


def test_inputs_wait_on_the_host_and_what_is_shared_stays(deep: Deep) -> None:
    """Of each block what the block before it gave; text, time and positions are the
    same for all and stay.
    """
    for name, variant, parked, first in (
        ("wan", "t2v", 1, 0),
        ("cogvideox", "5b", 2, 1),
    ):
        family = deep(name, variant)
        batch, entered = batch_of(family), []
        streamed = rig(family, (0.0, "CPU_OFFLOADED"))
        blocks = list(streamed.net.get_submodule(family.spec.blocks[0]))

        def see(
            _: Any,
            words: Any,
            named: Any,
            entered: list[Any] = entered,
            parked: int = parked,
        ) -> None:
            entered.append([*words, *named.values()][:parked])

        handles = [
            block.register_forward_pre_hook(see, with_kwargs=True) for block in blocks
        ]
        streamed.steps(batch, count=1)
        for handle in handles:
            handle.remove()
        sizes = [sum(x.numel() * 4 for x in inputs) for inputs in entered]
        assert len(sizes) == BLOCKS
        # CogVideoX hands its first block two parts of one tensor, which do not lie side
        # by side: they stay
        assert streamed.streams.activation_offload.bytes == sum(sizes[first:])


def test_host_buffers_are_used_again_and_nothing_waits_for_the_collector(
    deep: Deep,
) -> None:
    """Of every step the same eight buffers, free when it is over although no cycle was
    searched for.
    """
    family = deep()
    batch, offloaded = batch_of(family), rig(family, (0.0, "CPU_OFFLOADED"))
    free, buffers = offloaded.streams.activation_offload._free, []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            offloaded.steps(batch, count=1)
            buffers.append(sorted(one.flat.data_ptr() for one in free))
    finally:
        gc.enable()
    assert len(buffers[0]) == BLOCKS
    assert buffers[0] == buffers[1] == buffers[2]


def test_another_network_takes_over_the_weights_that_have_trained(deep: Deep) -> None:
    """As where two experts take turns: the home outlives the network, and the optimizer
    goes on with it.
    """
    family = deep()
    batch = batch_of(family)
    plain = rig(family, None, "FINE_TUNE").steps(batch, count=2)
    first = rig(family, (1.0, "ON"), "FINE_TUNE").steps(batch, count=2)
    home: HostWeights = first.streams.host_weights
    second = rig(family, (1.0, "ON"), "FINE_TUNE", host_weights=home)
    with torch.no_grad():
        for name, parameter in second.net.named_parameters():
            if name not in home.parameters:
                parameter.copy_(first.net.get_parameter(name))
    assert all(
        second.trainable.parameters[name] is parameter
        for name, parameter in home.parameters.items()
    )
    assert torch.equal(
        predicted(family, second.net, batch), predicted(family, plain.net, batch)
    )


def test_letting_go_of_a_network_frees_its_weights(deep: Deep) -> None:
    streamed: Rig = rig(deep(), (0.5, "ON"))
    watched = [
        weakref.ref(streamed.streams.host_weights),
        weakref.ref(streamed.streams.buffers.slots[0].flat),
    ]
    del streamed
    gc.collect()
    assert [known() for known in watched] == [None, None]


def test_what_breaks_off_a_pass_leaves_nothing_behind(deep: Deep) -> None:
    """An error in the middle of a forward or a backward pass: the next step is as if it
    had not been.
    """
    family = deep()
    batch = batch_of(family)
    for method in ("LORA", "FINE_TUNE"):
        plain, streamed = rig(family, None, method), rig(family, (0.75, "ON"), method)
        block = streamed.net.blocks[5].attn1
        calls = []

        def fail(*_: Any, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) in (
                1,
                3,
            ):  # in the first forward pass; in the second one's recomputation
                raise ZeroDivisionError

        handle = block.register_forward_hook(fail)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                streamed.steps(batch, count=1)
            streamed.trainable.optimizer.zero_grad(set_to_none=True)
        handle.remove()
        assert len(calls) == 3
        streamed.gradients, streamed.losses = [], []
        streamed.trainable.optimizer._optimizer_step_pre_hooks.clear()
        assert_same_bits(plain.steps(batch), streamed.steps(batch))


class Block(nn.Module):
    """A block with a buffer of integers, a weight in another order, and a count that it
    may keep of its calls.
    """

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).t())
        self.register_buffer("order", torch.randperm(4))
        self.register_buffer("calls", torch.zeros(1))
        self.counts = counts

    def forward(
        self,
        x: torch.Tensor,
        more: dict[str, torch.Tensor] | None = None,
        *,
        scale: float = 1.0,
    ) -> Any:
        if self.counts:
            self.calls += 1
        return torch.tanh(x[..., self.order] @ self.weight) * scale + (
            more["x"] if more else 0
        )


class Net(nn.Module):
    def __init__(self, counts: bool = False, tie: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Block(counts) for _ in range(4))
        if tie:
            self.blocks[3].weight = self.blocks[0].weight
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, {"x": x}, scale=0.5)
        return x


def test_buffers_strides_and_arguments_that_are_no_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_weights, "PIECE", 256)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(
        True
    )
    plain, streamed = Net(), Net()
    order = streamed.blocks[1].order
    stream_blocks(streamed, ["blocks"], CPU, 1.0)
    assert order.untyped_storage().nbytes() == order.element_size(), (
        "a buffer is away too"
    )
    assert torch.equal(plain(x), streamed(x))
    assert torch.equal(
        *(torch.autograd.grad(net(x).sum(), x)[0] for net in (plain, streamed))
    )


def test_a_weight_in_two_places_stays_on_the_device() -> None:
    plain, streamed = Net(tie=True), Net(tie=True)
    streams = stream_blocks(streamed, ["blocks"], CPU, 1.0)
    away = {
        entry.name
        for entries in streams.host_weights.slots
        for entry in entries
        if "weight" in entry.name
    }
    assert away == {"blocks.1.weight", "blocks.2.weight"}
    x = torch.ones(1, 4)
    assert torch.equal(plain(x), streamed(x))


def test_a_block_that_changes_its_buffers_is_refused() -> None:
    net = Net(counts=True)
    stream_blocks(net, ["blocks"], CPU, 1.0)
    with pytest.raises(
        VideotuneError,
        match=r"layer_offload_fraction: blocks\.0\.calls is changed by its own block",
    ):
        net(torch.ones(1, 4))


def test_a_weight_of_a_kind_of_its_own_is_refused() -> None:
    class Packed(nn.Parameter):
        pass

    net = Net()
    net.blocks[1].weight = Packed(torch.ones(4, 4), requires_grad=False)
    with pytest.raises(
        VideotuneError,
        match=r"blocks\.1\.weight is a Packed, whose bytes cannot be streamed",
    ):
        stream_blocks(net, ["blocks"], CPU, 1.0)


def test_a_weight_that_is_read_outside_its_window_is_not_a_number() -> None:
    net = Net()
    stream_blocks(net, ["blocks"], CPU, 0.5)
    assert torch.isnan(torch.ones(4) @ net.blocks[1].weight).all()
    assert torch.isfinite(torch.ones(4) @ net.blocks[0].weight).all()


class Hoard(torch.autograd.Function):
    """Keeps its weight beside what autograd knows of, which a streamed block must not
    do.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight.detach()
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.weight.t(), None


def test_the_poison_finds_a_function_that_keeps_a_weight_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Block, "forward", lambda self, x, *_, **__: Hoard.apply(x, self.weight)
    )
    net, x = Net(), torch.ones(1, 4, requires_grad=True)
    stream_blocks(net, ["blocks"], CPU, 1.0)
    net(x).sum().backward()
    assert x.grad.isnan().any()


def test_a_host_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100))
    with pytest.raises(
        DoesNotFit,
        match=r"4 of 4 blocks on the host need 0\.0 GB of .* memory, but only 0\.0 GB are free",
    ):
        stream_blocks(Net(), ["blocks"], CPU, 1.0)
    host.refuse_if_short(100, "so many bytes")


PAGEABLE = (
    "warning: cannot pin more host memory (CUDA error: out of memory). The remaining "
    "weights are pageable, which makes steps slower."
)


def test_where_memory_cannot_be_pinned_the_rest_is_pageable_and_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty, said, asked = torch.empty, [], []

    def refuse(*words: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        if pin_memory:
            asked.append(words[0])
            if len(asked) > 1:
                raise RuntimeError("CUDA error: out of memory\nmore")
        return empty(*words, **named)

    monkeypatch.setattr(torch, "empty", refuse)
    weights = {str(i): torch.randn(64) for i in range(4)}
    monkeypatch.setattr(host_weights, "PIECE", 256)
    home = HostWeights([weights], True, said.append)
    for entry in home.slots[0]:
        home.store(entry, weights[entry.name])
    assert asked == [256, 256]
    assert said == [PAGEABLE]
    flat = torch.cat(home.parts(*home.spans[0]))
    assert all(
        torch.equal(entry.view(flat, entry.begin), weights[entry.name])
        for entry in home.slots[0]
    )
    assert max(len(part) for part in home.parts(*home.spans[0])) == 256


@pytest.mark.cuda
def test_homes_are_pinned_and_leave_the_device_free(
    tiny_bases: Bases, tmp_path: Path
) -> None:
    folder, device = (
        deepen(tiny_bases("wan"), tmp_path / "deep", blocks=40),
        torch.device("cuda"),
    )
    family = find("wan")(folder, device, torch.float32)
    net = family.denoiser(device=torch.device("cpu"))
    held = add_lora(net, family.spec, Lora(rank=4), 0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    streams = stream_blocks(
        net, family.spec.blocks, device, 1.0, "OFF", list(held.values())
    )
    assert streams.host_weights is not None
    assert all(
        part.is_pinned()
        for part in streams.host_weights.parts(*streams.host_weights.spans[0])
    )
    assert all(p.is_cuda for p in net.parameters())
    assert (
        torch.cuda.memory_allocated() - before < resident_bytes(streams) + 512 * 60 * 40
    )
