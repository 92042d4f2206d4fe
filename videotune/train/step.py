"""One optimizer update: forward and backward over the micro-batches, clip once, step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from videotune.adapters.lora import adapter_off
from videotune.cache.batches import Prepared
from videotune.diffusion.loss import anchored_target, denoising_loss
from videotune.diffusion.objective import Objective
from videotune.randomness import seed32
from videotune.types import Family


@dataclass(frozen=True)
class StepRecord:
    """What a step did. ``values`` = [loss, grad_norm, mse of each sample] is on its way to the host: ``read`` waits for it.

    The engine hands a record over before the device has finished the step, and the reader asks one step late, so that no
    step waits for the host.
    """

    step: int
    values: Tensor
    arrived: torch.cuda.Event | None
    t: Tensor
    lr: Mapping[str, float]
    window_ids: tuple[str, ...]
    captions: tuple[str, ...]
    clock: Clock

    def read(self) -> dict[str, object]:
        """The step's line of the journal, with plain numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, grad_norm, *mse = self.values.tolist()
        line: dict[str, object] = {
            "kind": "step",
            "step": self.step,
            "loss": loss,
            "mse": sum(mse) / len(mse),
            "by_t": by_t(self.t.tolist(), mse),
            "lr": dict(self.lr),
            "grad_norm": grad_norm,
            "window_ids": list(self.window_ids),
            "seconds": self.clock.read(),
        }
        return line if finite(loss) and finite(grad_norm) else line | {"skipped": True}


class Clock:
    """Seconds by phase: ``mark(phase)`` ends a phase. On CUDA the marks are events, read when the step is long over."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, float, torch.cuda.Event | None]] = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        """The time since the last mark was ``phase``."""
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append((phase, time.perf_counter(), event))

    def read(self) -> dict[str, float]:
        """Seconds by phase, micro-batches summed."""
        out: dict[str, float] = {}
        for (_, before, begun), (phase, after, ended) in zip(self._marks, self._marks[1:], strict=False):
            seconds = begun.elapsed_time(ended) / 1000 if begun is not None and ended is not None else after - before
            out[phase] = round(out.get(phase, 0.0) + seconds, 6)
        return out


def finite(value: float) -> bool:
    """Neither NaN nor infinite."""
    return value == value and abs(value) != float("inf")


def by_t(t: Sequence[float], mse: Sequence[float], bands: int = 9) -> list[float | None]:
    """Mean mse of the samples whose t fell into each ninth of [0, 1]; None where none did."""
    sums = [[0.0, 0] for _ in range(bands)]
    for place, value in zip(t, mse, strict=True):
        band = sums[min(bands - 1, int(place * bands))]
        band[0] += value
        band[1] += 1
    return [total / count if count else None for total, count in sums]


@dataclass(frozen=True)
class StepSettings:
    """Micro-batches of a step, the norm to clip to, and the seed of draws inside the network (None: it makes none).

    A count and no size, since buckets differ in the samples of a step.
    """

    accumulation: int
    max_grad_norm: float
    network_seed: int | None


def train_step(
    family: Family,
    net: nn.Module,
    objective: Objective,
    prepared: Prepared,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    settings: StepSettings,
    lr: Mapping[str, float],
    clock: Clock,
) -> StepRecord:
    """Each micro-batch adds its sum over the step's sample count, so any split is the same step to rounding.

    Anchored samples first run through ``net`` without its adapter. A non-finite gradient leaves weights and optimizer as
    they were.
    """
    device, total = parameters[0].device, len(prepared.batch)
    losses, mses, first = [], [], 0
    for part in prepared.batch.split(-(-total // settings.accumulation)):
        rows = slice(first, first + len(part))
        t, noise = _to(prepared.t[rows], device), _to(prepared.noise[rows], device)
        anchored = [i for i, yes in enumerate(part.anchored.tolist()) if yes]  # still on the host: nothing waits
        batch, target = part.map(lambda x: _to(x, device)), None
        if anchored:
            with adapter_off(net):
                target = anchored_target(family, net, objective, batch, t, noise, anchored)
        if settings.network_seed is not None:
            torch.manual_seed(seed32(settings.network_seed, "network", prepared.step, first))
        out = denoising_loss(family, net, objective, batch, t, noise, target)
        clock.mark("forward")
        share = out.loss * (len(batch) / total)
        share.backward()
        clock.mark("backward")
        losses.append(share.detach())
        mses.append(out.mse)
        first += len(batch)
    norm = clip(parameters, settings.max_grad_norm)
    loss = torch.stack(losses).sum()
    optimizer.found_inf = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["lr"] = lr[group["name"]]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    clock.mark("optimizer")
    values, arrived = _send(torch.cat([torch.stack([loss, norm]), *mses]))
    return StepRecord(
        prepared.step, values, arrived, prepared.t, lr, prepared.batch.window_ids, prepared.batch.captions, clock
    )


def clip(parameters: Sequence[nn.Parameter], most: float) -> Tensor:
    """The gradient's norm (), with the gradient scaled down to ``most`` where it is longer.

    On a CPU a gradient that is short enough is not touched; on a device the host does not look, and it is scaled by 1.
    """
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if norm.is_cuda or norm > most:
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


def _to(x: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _send(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start the copy to the host without waiting for it."""
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived
