"""What a real step really allocates."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


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
