"""Streaming on a CUDA device: deselected where there is none; none of it has run on one yet."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cuda_kit import no_host_sync
from tests.offload_kit import batch_of, deepen, resident_bytes
from tests.runs import open_run, prepare
from videotune.adapters.lora import add_lora
from videotune.config.schema import Lora
from videotune.memory.weight_streaming import Streams, stream_blocks
from videotune.models.registry import find
from videotune.trainer.loop import step_records
from videotune.trainer.resolve_config import Overrides

pytestmark = pytest.mark.cuda
Bases = Callable[..., Path]
GPU = torch.device("cuda")


def opened(folder: Path, settings: tuple[float, str] | None, full: bool) -> tuple[Any, nn.Module, dict, Streams | None]:
    """A tiny network with what trains in it, on the device, streamed or plain."""
    family = find("wan")(folder, GPU, torch.float32)
    net = family.denoiser(device=torch.device("cpu") if settings else GPU)
    if full:
        held = dict(net.requires_grad_(True).named_parameters())
    else:
        held = add_lora(net, family.spec, Lora(rank=4), 0)
    streams = None
    if settings is not None:
        streams = stream_blocks(net, family.spec.blocks, GPU, *settings, () if full else list(held.values()))
        held = streams.parameters(held)
    return family, net, held, streams


def gradients(folder: Path, settings: tuple[float, str] | None, full: bool) -> list[torch.Tensor]:
    """Of two passes over the same batch."""
    family, net, held, _ = opened(folder, settings, full)
    batch = batch_of(family).map(lambda x: x.to(GPU))
    for _ in range(2):
        out = family.predict(net, batch.x0, torch.full((len(batch),), 0.4, device=GPU), batch)
        out.square().sum().backward()
    assert all(p.grad is not None for p in held.values())
    return [out.detach().cpu(), *(p.grad.cpu() for p in held.values() if p.grad is not None)]


@pytest.mark.parametrize("checkpointing", ["ON", "CPU_OFFLOADED"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_streamed_gradients_are_the_plain_ones(
    fraction: float, full: bool, checkpointing: str, tiny_bases: Bases, tmp_path: Path
) -> None:
    folder = deepen(tiny_bases("wan"), tmp_path / "deep")
    plain = gradients(folder, None, full)
    streamed = gradients(folder, (fraction, checkpointing), full)
    for one, other in zip(plain, streamed, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)
        assert torch.isfinite(other).all()


def test_homes_are_pinned_and_leave_the_device_free(tiny_bases: Bases, tmp_path: Path) -> None:
    folder = deepen(tiny_bases("wan"), tmp_path / "deep", blocks=40)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    _, net, _, streams = opened(folder, (1.0, "OFF"), False)
    assert streams is not None
    assert streams.host_weights is not None
    assert all(part.is_pinned() for part in streams.host_weights.parts(0))
    assert all(p.is_cuda for p in net.parameters())
    assert torch.cuda.memory_allocated() - before < resident_bytes(streams) + 512 * 60 * 40


def test_no_step_waits_for_the_host(small_clips: Path, tiny_bases: Bases, tmp_path: Path) -> None:
    """torch raises at any operation that makes the host wait for the device, from the second step on."""
    fixed = ("resolution=32x32", "sample_after=0", "validate_every=0", "steps=12", f"cache_dir={tmp_path / 'cache'}")
    streamed = ("layer_offload_fraction=0.5", "gradient_checkpointing=CPU_OFFLOADED")
    base = deepen(tiny_bases("wan"), tmp_path / "deep")
    said = Overrides(data=str(small_clips), sets=(f"base_model_name={base}", *fixed, *streamed))
    trainer = prepare(open_run(said, tmp_path / "run").job, tmp_path / "run", False)
    records: Any = step_records(trainer)
    late = [next(records)]
    with no_host_sync():
        late += [next(records) for _ in range(10)]
    assert all(math.isfinite(record.read()["loss"]) for record in late)
    trainer.journal.close()
