"""One optimizer update: forward and backward over the micro-batches, clip once, step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from videotune.adapters.layers import LiveText
from videotune.adapters.lora import adapter_off
from videotune.diffusion.loss import Objective, denoising_loss, prior_target
from videotune.distributed import DistributedContext
from videotune.latent_cache.batches import StepBatch, share_of
from videotune.memory.accelerator import OVERLAPPING
from videotune.memory.host_weights import to_host
from videotune.memory.sharding import Shards
from videotune.rng import seed32
from videotune.trainer.ema import EmaWeights
from videotune.trainer.low_precision import (
    BackwardOptimizer,
    MasterWeights,
    update_each_rounded,
)
from videotune.trainer.optimizers import (
    AnyOptimizer,
    LRSchedule,
    clip_grad_norm,
    lr_at,
    norm_of,
    step_if_finite,
)
from videotune.trainer.schedule_free import ScheduleFreeWeights
from videotune.types import Batch, Family


@dataclass(frozen=True)
class StepRecord:
    """What a step did. ``values`` = [loss, grad_norm, mse of each sample] is on its way to the host: ``read`` waits for it.

    The engine hands a record over before the device has finished the step, and the reader asks one step late, so that no
    step waits for the host.
    """

    step: int
    values: Tensor
    arrived: torch.Event | None
    t: Tensor
    lr: Mapping[str, float]
    window_ids: tuple[str, ...]
    captions: tuple[str, ...]
    clock: Clock
    expert: str | None = None

    def read(self) -> dict[str, Any]:
        """The step's line of the journal, with plain numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, grad_norm, *mse = self.values.tolist()
        line: dict[str, Any] = {
            "kind": "step",
            "step": self.step,
            "loss": loss,
            "mse": sum(mse) / len(mse),
            "by_t": loss_by_noise_level(self.t.tolist(), mse),
            "lr": dict(self.lr),
            "grad_norm": grad_norm,
            "window_ids": list(self.window_ids),
            "seconds": self.clock.read(),
        }
        line |= {"expert": self.expert} if self.expert else {}
        return (
            line
            if math.isfinite(loss) and math.isfinite(grad_norm)
            else line | {"skipped": True}
        )

    def broken(self) -> tuple[str, ...]:
        """The windows whose own error is not finite; all of them where the gradient alone is not."""
        mse = self.values.tolist()[2:]
        broken = tuple(
            name
            for name, value in zip(self.window_ids, mse, strict=True)
            if not math.isfinite(value)
        )
        return broken or self.window_ids


class Clock:
    """Seconds by phase: ``mark(phase)`` ends one. A device with streams marks by events, read when the step is long over.

    ``on_phase`` is called with each phase that has ended.
    """

    def __init__(
        self, device: torch.device, on_phase: Callable[[str], None] | None = None
    ) -> None:
        self._overlaps = device.type in OVERLAPPING
        self._on_phase = on_phase
        self._marks: list[tuple[str, float, torch.Event | None]] = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        """The time since the last mark was ``phase``."""
        event = None
        if self._on_phase is not None:
            self._on_phase(phase)
        if self._overlaps:
            event = torch.Event(enable_timing=True)
            event.record()
        self._marks.append((phase, time.perf_counter(), event))

    def read(self) -> dict[str, float]:
        """Seconds by phase, micro-batches summed."""
        out: dict[str, float] = {}
        for (_, before, begun), (phase, after, ended) in zip(
            self._marks, self._marks[1:], strict=False
        ):
            seconds = (
                begun.elapsed_time(ended) / 1000
                if begun is not None and ended is not None
                else after - before
            )
            out[phase] = round(out.get(phase, 0.0) + seconds, 6)
        return out


def loss_by_noise_level(t: Sequence[float], mse: Sequence[float]) -> list[float | None]:
    """Mean mse of the samples whose t fell into each ninth of [0, 1]; None where none did."""
    sums = [[0.0, 0] for _ in range(9)]
    for place, value in zip(t, mse, strict=True):
        band = sums[min(8, int(place * 9))]
        band[0] += value
        band[1] += 1
    return [total / count if count else None for total, count in sums]


@dataclass(frozen=True)
class StepSettings:
    """What is the same in every step of a run.

    Micro-batches of a whole step, the norm to clip to, and the seed of draws inside the network (None: it makes none). A
    count and no size, since buckets differ in the samples of a step; ``micro_batch_size`` samples (None: any number) are the
    most that one of them takes.
    """

    family: Family
    objective: Objective
    micro_batches: int
    max_grad_norm: float
    network_seed: int | None = None
    micro_batch_size: int | None = None
    dist: DistributedContext = field(default_factory=DistributedContext)

    def size(self, samples: int) -> int:
        """How many samples a micro-batch takes, of a step that takes so many in all."""
        most = -(-samples // self.micro_batches)
        return most if self.micro_batch_size is None else min(most, self.micro_batch_size)


@dataclass(frozen=True)
class TrainableState:
    """What of a network trains: the parameters that its optimizer holds, by name, and their average if there is one.

    ``rates`` by the optimizer's groups; ``held`` are the parameters in the network's own dtype, where the optimizer holds
    masters; ``text``: captions are encoded in the step, since some of the parameters are of what encodes them.
    ``rounding``: the seed of the draws that round updates of bf16 weights (None: they are not). ``in_backward``: updates
    come with the gradients. ``shards``: the network is cut into rows, and of what trains this process has some.
    """

    parameters: Mapping[str, nn.Parameter]
    optimizer: AnyOptimizer
    rates: Mapping[str, LRSchedule]
    masters: MasterWeights | None = None
    ema: EmaWeights | ScheduleFreeWeights | None = None
    held: Mapping[str, nn.Parameter] | None = None
    expert: str | None = None
    text: LiveText | None = None
    rounding: int | None = None
    in_backward: BackwardOptimizer | None = None
    shards: Shards | None = None


class OutOfMemory(RuntimeError):
    """The device had no room for a step. ``intact``: it happened before the update, so the weights are as they were."""

    def __init__(
        self, step: int, window_ids: tuple[str, ...], tokens: int, intact: bool
    ) -> None:
        super().__init__(f"out of memory in step {step}")
        self.step = step
        self.window_ids = window_ids
        self.tokens = tokens
        self.intact = intact


def train_step(
    settings: StepSettings,
    net: nn.Module,
    trainable: TrainableState,
    prepared: StepBatch,
    clock: Clock,
    own_step: int | None = None,
) -> StepRecord:
    """One update of ``net``. ``own_step``: the number of the step among the expert's own (None: it has them all).

    Each micro-batch adds its sum over the step's sample count, so any split is the same step to rounding.

    Prior-preservation samples first run through the network without its adapter. A non-finite gradient leaves weights,
    optimizer and average as they were. Raises OutOfMemory.
    """
    optimizer = trainable.optimizer
    updates = trainable.in_backward
    samples = len(prepared.window_ids)
    own = prepared.step if own_step is None else own_step
    lr = {
        group["name"]: lr_at(trainable.rates[group["name"]], own)
        for group in optimizer.param_groups
    }
    values = torch.zeros(2 + samples, device=next(net.parameters()).device)
    intact = updates is None
    for group in optimizer.param_groups:
        group["lr"] = lr[group["name"]]
    try:
        if updates is not None:
            assert settings.size(samples) >= samples, "its gradients cannot be summed up"
            updates.begin(own)
        accumulate(settings, net, trainable, prepared, clock, values)
        norm = (
            _gradient_norm(trainable, settings, values) if updates is None else updates.norm()
        )
        # a number of the host goes with the launch, a tensor would be waited for
        values[1].fill_(norm if norm.device == values.device else norm.item())
        good = torch.isfinite(values[:2]).all()
        if updates is None:
            intact = False
            _update(trainable, good, own)
        if trainable.ema is not None:
            trainable.ema.update(own, good)
    except (MemoryError, RuntimeError) as error:
        if not of_memory(error):
            raise
        optimizer.zero_grad(set_to_none=True)
        tokens = 0 if prepared.batch is None else tokens_of(settings.family, prepared.batch)
        raise OutOfMemory(prepared.step, prepared.window_ids, tokens, intact) from error
    optimizer.zero_grad(set_to_none=True)
    clock.mark("optimizer")
    host, arrived = to_host(values) if values.device.type in OVERLAPPING else (values, None)
    return StepRecord(
        prepared.step,
        host,
        arrived,
        prepared.t,
        lr,
        prepared.window_ids,
        prepared.captions,
        clock,
        trainable.expert,
    )


def _gradient_norm(trainable: TrainableState, settings: StepSettings, values: Tensor) -> Tensor:
    """The norm () of the whole gradient, which is summed over processes, as ``values`` is, and clipped."""
    most = settings.max_grad_norm
    dist = settings.dist
    parameters = list(trainable.parameters.values())
    shards = trainable.shards
    cut = list[nn.Parameter]()
    if shards is not None:
        shards.collect()
        cut = [trainable.parameters[name] for name in shards.local]
    if trainable.masters is not None:
        trainable.masters.grads_to_masters()
    if all(
        parameter.grad is None for parameter in parameters
    ):  # nothing that trains was used in this step
        for parameter in parameters:
            parameter.grad = torch.zeros_like(
                parameter
            )  # as where other processes have used it
    if dist.size == 1:
        return clip_grad_norm(parameters, most)
    apart = {id(parameter) for parameter in cut}
    whole = [parameter for parameter in parameters if id(parameter) not in apart]
    dist.all_reduce_gradients(whole)
    dist.all_reduce(values)
    if shards is None or not shards.rows:
        return clip_grad_norm(parameters, most)
    device = parameters[
        0
    ].device  # of a process without a row the sum must go the same way as the others'
    squares = (
        dist.all_reduce(norm_of(cut).float().to(device) ** 2) + norm_of(whole).to(device) ** 2
    )
    return clip_grad_norm(parameters, most, squares.sqrt())


def _update(trainable: TrainableState, good: Tensor, step: int) -> None:
    """The optimizer's step where ``good`` () is true."""
    if trainable.rounding is not None:
        rows = trainable.shards.rows if trainable.shards is not None else {}
        first = {name: shard.first for name, shard in rows.items()}
        update_each_rounded(
            trainable.optimizer, trainable.parameters, good, trainable.rounding, step, first
        )
        return
    step_if_finite(trainable.optimizer, good)
    if trainable.masters is not None:
        trainable.masters.masters_to_model()


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the network together, from number ``first`` of the step's on.

    ``counts``: they are this process's own, else they only run along. ``prior``: some process has samples here that need
    the base model's prediction first.
    """

    batch: Batch
    t: Tensor
    noise: Tensor
    first: int
    counts: bool = True
    prior: bool = False


def passes(prepared: StepBatch, size: int, processes: int = 1) -> list[MicroBatch]:
    """The passes of a process, of at most ``size`` samples each.

    ``processes``: so many run the network together, and each makes as many passes as the one with most samples.
    """
    out: list[MicroBatch] = []
    start = prepared.first
    first = prepared.first
    for part in prepared.batch.split(size) if prepared.batch is not None else ():
        end = first + len(part)
        t = prepared.t[first:end]
        noise = prepared.noise[first - start : end - start]
        out.append(
            MicroBatch(part, t, noise, first, not prepared.spare, any(part.prior_preservation))
        )
        first = end
    if processes == 1:
        return out
    shares = [
        share_of((rank, processes), len(prepared.window_ids)) for rank in range(processes)
    ]
    along = replace(
        out[-1],
        batch=out[-1].batch.split(1)[0],
        t=out[-1].t[:1],
        noise=out[-1].noise[:1],
        counts=False,
    )
    made = []
    for k in range(max(-(-(hi - lo) // size) for lo, hi in shares)):
        rows = {
            i for lo, hi in shares for i in range(lo + k * size, min(lo + (k + 1) * size, hi))
        }
        made.append(
            replace(
                out[k] if k < len(out) else along, prior=not rows.isdisjoint(prepared.prior)
            )
        )
    return made


def accumulate(
    settings: StepSettings,
    net: nn.Module,
    trainable: TrainableState,
    prepared: StepBatch,
    clock: Clock,
    values: Tensor,
) -> None:
    """Forward and backward over this process's micro-batches, whose parts of [loss, norm, mse of each] ``values`` gets.

    Of a sharded network all processes gather the weights from each other, so all go through it equally often.
    """
    family = settings.family
    objective = settings.objective
    text = trainable.text
    device = values.device
    total = len(prepared.window_ids)
    non_blocking = values.device.type in OVERLAPPING
    together = settings.dist.size if trainable.shards is not None else 1
    for one in passes(prepared, settings.size(total), together):
        target = None
        (t, noise) = (x.to(device, non_blocking=non_blocking) for x in (one.t, one.noise))
        batch = condition(
            family, text, one.batch.map(lambda x: x.to(device, non_blocking=non_blocking))
        )
        if one.prior:
            which = [i for i, wanted in enumerate(batch.prior_preservation) if wanted]
            with adapter_off(net):
                target = prior_target(family, net, objective, batch, t, noise, which or [0])
            target = target if which else None
        if settings.network_seed is not None:
            torch.manual_seed(
                seed32(settings.network_seed, "network", prepared.step, one.first)
            )
        if together > 1 and text is not None and not batch.conditioning.text.requires_grad:
            # blocks are gathered in backward too, so every process needs a graph, from its text on
            batch = replace(
                batch,
                conditioning=replace(
                    batch.conditioning, text=batch.conditioning.text.detach().requires_grad_()
                ),
            )
        out = denoising_loss(family, net, objective, batch, t, noise, target)
        clock.mark("forward")
        share = out.loss * (len(batch) / total if one.counts else 0.0)
        if trainable.in_backward is not None:
            trainable.in_backward.loss(share)
        if share.requires_grad:  # no caption of these may hold a new token
            share.backward()
        clock.mark("backward")
        if one.counts:
            values[0] += share.detach()
            values[2 + one.first : 2 + one.first + len(batch)] = out.mse


def condition(family: Family, text: LiveText | None, batch: Batch) -> Batch:
    """The batch with what the denoiser is conditioned on: itself where text is cached (None), else captions encoded now.

    Extras of a clip stay what they were. Validation and training call this alike.
    """
    if text is None:
        return batch
    conditioning = family.encode_in_loop([text.spell(caption) for caption in batch.captions])
    return replace(
        batch,
        conditioning=replace(
            conditioning, extras={**batch.conditioning.extras, **conditioning.extras}
        ),
    )


NO_ROOM = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Parts of the messages with which the driver, cuBLAS and cuDNN report that they got no memory."""


def of_memory(error: BaseException) -> bool:
    """Whether there was no room, on the device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        text in str(error) for text in NO_ROOM
    ):
        return True
    from accelerate.utils.memory import (
        should_reduce_batch_size,
    )  # knows the ways in which torch says so

    readable = isinstance(error, Exception) and all(
        isinstance(word, str) for word in error.args
    )  # it reads no other
    return isinstance(error, Exception) and readable and should_reduce_batch_size(error)


def tokens_of(family: Family, batch: Batch) -> int:
    """Tokens of one sample, by its latents."""
    sides = zip(batch.x0.shape[2:], family.spec.patch, strict=True)
    return math.prod(-(-side // step) for side, step in sides)
