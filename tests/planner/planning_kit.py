"""What a real step really allocates."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from videotune.adapters.lora import add_lora
from videotune.config.schema import Config
from videotune.memory.checkpointing import checkpoint_blocks
from videotune.planner.measure import FakeRun
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
    assert batch is not None

    def step() -> None:
        train_step(settings, net, trainable, prepared, clock)

    step()
    states = [t for state in trainable.optimizer.state.values() for t in state.values()]
    inputs = [batch.x0, prepared.noise, batch.cond.text, *batch.cond.extras.values()]
    return allocated(step, bytes_of(net, states, inputs))
