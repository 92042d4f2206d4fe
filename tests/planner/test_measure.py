"""Bytes that are read under tensors without memory, against a real allocator and against published figures."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.offload_kit import deepen, resident_bytes
from videotune.adapters.lora import add_lora
from videotune.config.schema import Config
from videotune.memory.checkpointing import checkpoint_blocks
from videotune.memory.weight_streaming import stream_blocks
from videotune.models.base_model import published
from videotune.models.registry import find
from videotune.planner.measure import FakeRun, Ledger, fake_mode, to_fake
from videotune.planner.memory import Choice, StepSpec, need
from videotune.trainer.components import weights_of
from videotune.trainer.step import Clock, StepSettings, train_step
from videotune.types import ClipShape


def allocated(step: Any, standing: int) -> int:
    """Bytes that were held at the most while ``step()`` ran on the CPU, by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    held, most = standing, standing
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def bytes_of(net: nn.Module, *more: Any) -> int:
    """Bytes of a network's storages and of other tensors."""
    tensors = [*net.parameters(), *net.buffers(), *(t for group in more for t in group if isinstance(t, torch.Tensor))]
    return sum(s.nbytes() for s in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())


def held_by_a_real_step(real: Any, config: Config, shape: ClipShape, samples: int, checkpointing: str) -> int:
    """The most bytes that the step of a run holds on the CPU, the optimizer's state already there."""
    net, like, clock = real.denoiser(), FakeRun(real, config), Clock(torch.device("cpu"))
    lora = config.training_method == "LORA"
    held = add_lora(net, real.spec, config.lora, 0) if lora else dict(net.requires_grad_(True).named_parameters())
    checkpoint_blocks(net, checkpointing)
    net.train()
    trainable, prepared = like.trainable(held), like.prepared(shape, samples)
    settings = StepSettings(real, like.objective, 1, 1.0)
    batch = prepared.batch

    def step() -> None:
        train_step(settings, net, trainable, prepared, clock)

    step()
    states = [t for state in trainable.optimizer.state.values() for t in state.values()]
    inputs = [batch.x0, prepared.noise, batch.cond.text, *batch.cond.extras.values()]
    return allocated(step, bytes_of(net, states, inputs))


GIB = 2**30
BASES = Callable[..., Path]


def test_what_is_held_is_counted_and_what_is_freed_is_not() -> None:
    mode, ledger = fake_mode(), Ledger()
    with mode, ledger:
        ledger.phase("first")
        a = torch.empty(1000)
        ledger.name([a], "weights")
        b = a * 2
        del b
        c = a.view(10, 100)  # the same storage
        ledger.phase("second")
        del c
    (first, second) = (ledger.phases[name] for name in ("first", "second"))
    assert first == {"weights": 4096, "activations": 4096}, "in pieces of 512 bytes"
    assert second == {"weights": 4096}


def test_operations_are_counted_as_torch_counts_them() -> None:
    mode, ledger = fake_mode(), Ledger()
    with mode:
        x, w = torch.empty(3, 5, requires_grad=True), torch.empty(5, 7)
        q = torch.empty(2, 4, 16, 8)
        with ledger:
            (x @ w).sum().backward()
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert ledger.flops == 2 * 3 * 5 * 7 * 2 + 2 * 2 * 4 * 16 * 16 * 8 * 2


def test_a_parameter_that_stands_in_two_places_stays_one() -> None:
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    net["b"].weight = net["a"].weight
    to_fake(net, fake_mode())
    assert net["b"].weight is net["a"].weight
    assert len(list(net.parameters())) == 3


def fake_run(folder: Path, family: str, dtype: torch.dtype, **config: Any) -> FakeRun:
    kept = weights_of(Config(**config), {torch.float32: "FLOAT_32", torch.bfloat16: "BFLOAT_16"}[dtype])
    return FakeRun(find(family)(folder, torch.device("cpu"), dtype, kept), Config(**config))


@pytest.mark.parametrize("checkpointing", ["OFF", "ON"])
@pytest.mark.parametrize(
    ("family", "method", "kind"),
    [
        ("wan", "LORA", "auto"),
        ("wan", "FINE_TUNE", "auto"),
        ("cogvideox", "LORA", "auto"),
        ("wan", "LORA", "NFLOAT_4"),
        ("cogvideox", "LORA", "FLOAT_8"),
        ("hidream", "LORA", "auto"),  # tensors without numbers cannot be routed: its experts have a stand-in in a plan
        ("hidream", "FINE_TUNE", "auto"),
    ],
)
def test_a_real_step_holds_what_was_read(
    checkpointing: str, family: str, method: str, kind: str, tiny_bases: BASES
) -> None:
    """Within 2 % (HiDream: 5 %): the very step on real tensors, by the allocator's own events."""
    folder, image = tiny_bases(family), family == "hidream"
    shape = ClipShape(1, 96, 96, 1.0) if image else ClipShape(17, 256, 256, 16.0)
    run = fake_run(folder, family, torch.float32, training_method=method, weight_dtype=kind)
    run.piece = 1  # as a CPU's allocator
    real = find(family)(folder, torch.device("cpu"), torch.float32, run.family.weights)
    held = held_by_a_real_step(real, run.config, shape, 2, checkpointing)
    assert run.deep_step(shape, 2, checkpointing).peak == pytest.approx(held, rel=0.05 if image else 0.02)


def test_a_plan_reads_all_text_encoders_and_their_blocks(tiny_bases: BASES) -> None:
    run = fake_run(tiny_bases("hidream"), "hidream", torch.float32)
    run.piece = 1
    parts, _, blocks = run.read_text()
    family: Any = run.family
    encoders = [part.encoder for part in family.text_parts().values()]
    assert parts["text encoder"] == pytest.approx(sum(bytes_of(net) for net in encoders), rel=1e-3)
    assert [len(one) for one in blocks] == [1, 1, 2, 2]  # the tiny T5's one block is a list of two layers itself


def test_how_weights_are_updated_is_read_too(tiny_bases: BASES) -> None:
    """FINE_TUNE in bf16, by part, at the worst moment: masters, none, or gradients that do not stay."""
    shape, found = ClipShape(9, 64, 64, 16.0), {}
    for name, knobs in {
        "masters": {},
        "rounded": {"masters": "STOCHASTIC_ROUNDING"},
        "within": {"step_in_backward": True},
    }.items():
        config: dict[str, Any] = {"training_method": "FINE_TUNE", "optimizer": knobs}
        seen = fake_run(tiny_bases("wan"), "wan", torch.bfloat16, **config)
        found[name] = seen.step(shape, 1, "ON", tuple(seen.depths.items())).phases["optimizer"]
    assert found["masters"]["trained"] > 2 * found["rounded"]["trained"], "float32 copies beside the weights, or none"
    assert found["within"].get("gradients", 0) == 0 < found["masters"]["gradients"]
    assert found["within"]["activations"] < found["masters"]["activations"], "one gradient at a time is made float32"


def test_published_figures_of_what_stands_still() -> None:
    """GiB before the first step, as finetrainers logged it: CogVideoX-5B with a LoRA of rank 128, in bfloat16: 10.622."""
    seen = fake_run(published("cogvideox-5b"), "cogvideox", torch.bfloat16, lora={"rank": 128})
    net = seen.network(tuple(seen.depths.items()))
    lora = {id(p) for p in net.held.values()}
    frozen = sum(p.nbytes for p in net.net.parameters() if id(p) not in lora)
    count = sum(p.numel() for p in net.held.values())
    assert count == 132_120_576
    assert (frozen + 2 * count) / GIB == pytest.approx(10.622, abs=0.011), "their adapter was kept in bfloat16"


def test_a_deep_network_is_read_from_shallow_ones(tiny_bases: BASES, tmp_path: Path) -> None:
    """Six blocks, from two and four of them."""
    folder = shutil.copytree(tiny_bases("wan"), tmp_path / "deep")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 6}))
    seen = fake_run(folder, "wan", torch.bfloat16)
    shape, depths = ClipShape(9, 192, 192, 16.0), tuple(seen.depths.items())
    assert [count for _, count in depths] == [6]
    shallow, really = seen.deep_step(shape, 1, "ON"), seen.step(shape, 1, "ON", depths)
    assert shallow.peak == pytest.approx(really.peak, rel=0.005)
    assert shallow.flops == pytest.approx(really.flops, rel=1e-6)
    for phase, parts in really.phases.items():
        assert sum(shallow.phases[phase].values()) == pytest.approx(sum(parts.values()), rel=0.005), phase


@pytest.mark.parametrize(("fraction", "kind"), [(0.5, "auto"), (1.0, "auto"), (1.0, "INT_8"), (0.5, "NFLOAT_4")])
def test_streamed_weights_leave_what_the_plan_says(
    fraction: float, kind: str, tiny_bases: BASES, tmp_path: Path
) -> None:
    """The very bytes of a real network whose blocks stream through a real ring, adapters in it."""
    folder, shape = deepen(tiny_bases("wan"), tmp_path / "deep"), ClipShape(5, 64, 64, 16.0)
    seen = fake_run(folder, "wan", torch.float32, lora={"rank": 4}, weight_dtype=kind)
    seen.piece = 1
    blocks = tuple(size for sizes in seen.blocks.values() for size in sizes)
    reading = seen.step(shape, 1, "ON", tuple(seen.depths.items()))
    one = dict.fromkeys(("OFF", "ON"), reading)
    facts = StepSpec(one, one, blocks, (0,) * len(blocks), {"OFF": 0, "ON": 0})
    planned = need(facts, Choice(1, "ON", round(fraction * len(blocks)))).device["end"]

    family = find("wan")(folder, torch.device("cpu"), torch.float32, seen.family.weights)
    net = family.denoiser()
    held = add_lora(net, family.spec, seen.config.lora, 0)
    streams = stream_blocks(net, family.spec.blocks, torch.device("cpu"), fraction, resident=list(held.values()))
    gaps = sum(slot.flat.numel() for slot in streams.buffers.slots) - planned["ring"]
    assert 0 <= gaps < 256 * len(streams.buffers.slots) * len(streams.buffers.tensors[0]), (
        "each tensor begins at 256 bytes"
    )
    assert resident_bytes(streams) - gaps == planned["weights"] + planned["trained"] + planned["ring"]
