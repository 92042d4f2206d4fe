"""A training step at a real model's size: published configs, random weights made on the
device, no clips, no download.

What trains, streams, splits and updates is the run's own code; only where weights and
batches come from is not.
"""

from __future__ import annotations

import math
import os
import pickle
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from videotune.config.nested_keys import unflatten
from videotune.config.resolve import resolve
from videotune.job.experts import trained
from videotune.latent_cache.step_batch import StepBatch
from videotune.memory.compiling import CompiledBlocks
from videotune.memory.quantization import QuantizedLinear
from videotune.models.base import DiffusersModel
from videotune.models.base_model import published, spec_for
from videotune.models.registry import find
from videotune.planner.measure import FakeRun
from videotune.planner.memory import Choice
from videotune.planner.plan_inputs import PlanInputs
from videotune.planner.read_step import read_step_spec
from videotune.planner.step_spec import StepSpec
from videotune.trainer.build import DTYPES, weights_of
from videotune.trainer.expert_pool import arrange_blocks
from videotune.trainer.step import train_step
from videotune.trainer.step_context import StepContext
from videotune.trainer.step_record import Clock
from videotune.trainer.trainable import attach, make_trainable
from videotune.types import BasePlace, ClipShape

ROOT = Path(__file__).parents[1]
GIB = 2**30
TINY = "tiny"
"""A model of a few thousand parameters, for a rehearsal on a CPU."""
TOY = "toy"
"""The toy base model, for a rehearsal with layers that multiply in eight bits."""


MEMORY = ("micro_batch_size", "gradient_checkpointing", "layer_offload_fraction")


def device() -> torch.device:
    """The card, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype() -> str:
    """bfloat16 on a card; float32 on a CPU, which is slow in anything else."""
    return "BFLOAT_16" if device().type == "cuda" else "FLOAT_32"


@dataclass(frozen=True)
class Case:
    """A model, the pixels of its clips, samples of a step, and what of the config is
    set.
    """

    model: str
    frames: int
    height: int
    width: int
    batch: int = 1
    sets: tuple[tuple[str, Any], ...] = ()

    def wanted(self) -> PlanInputs:
        """As a plan wants it: without previews."""
        base = BasePlace(self.model, layout(self.model))
        spec = spec_for(None, base)
        words = {"batch_size": self.batch, "train_dtype": dtype(), **dict(self.sets)}
        config = resolve(unflatten(words), {}, spec).config
        shape = ClipShape(self.frames, self.height, self.width, spec.rules.fps)
        train_dtype = config.train_dtype or dtype()
        return PlanInputs(spec, base.folder, config, train_dtype, (shape,), None)

    def facts(self) -> StepSpec:
        """What its step would hold, read without a device; settings of memory change
        none of it.
        """
        return facts_of(self.without_memory())

    def without_memory(self) -> Case:
        """The case without its settings of memory."""
        kept = tuple(pair for pair in self.sets if pair[0] not in MEMORY)
        return replace(self, sets=kept)

    def chosen(self, choice: Choice, blocks: int) -> Case:
        """The same with settings of memory."""
        new = {
            "micro_batch_size": choice.micro_batch,
            "gradient_checkpointing": choice.checkpointing,
            "layer_offload_fraction": choice.streamed / blocks,
        }
        return replace(self, sets=tuple({**dict(self.sets), **new}.items()))


_specs: dict[Case, StepSpec] = {}
"""What plans have read, by case."""


def facts_of(case: Case) -> StepSpec:
    """Read once for each case; the step alone, without what encoders hold before it."""
    if case not in _specs:
        _specs[case] = replace(read_step_spec(case.wanted()), other_phases={})
    return _specs[case]


def read_specs(cases: Iterable[Case], folder: Path) -> None:
    """Read what plans need by several processes, and keep it in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settled = {case.without_memory() for case in cases}
    files = {
        case: folder / f"{sha256(repr(case).encode()).hexdigest()}.pickle"
        for case in settled
    }
    missing = [case for case, file in files.items() if not file.is_file()]

    workers = max(1, min(len(missing), (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for case, spec in zip(missing, pool.map(facts_of, missing), strict=True):
            files[case].write_bytes(pickle.dumps(spec))
    for case, file in files.items():
        _specs[case] = pickle.loads(file.read_bytes())


@cache
def layout(model: str) -> Path:
    """A model's published configs in diffusers layout."""
    folder = Path(tempfile.mkdtemp()) / model
    if model == TOY:
        return ROOT / "videotune" / "assets" / "toy"
    if model == TINY:
        diffusers.utils.logging.disable_progress_bar()
        return find("wan").tiny(folder)
    folder_of_configs = published(model)
    assert folder_of_configs is not None, model
    return folder_of_configs


def filled(there: torch.device) -> Callable[[nn.Module], object]:
    """Puts random numbers, made on the card, in the place of a network's parameters:
    matrices of unit gain, gains of 1.
    """

    def fill(net: nn.Module) -> None:
        makes = torch.Generator(device()).manual_seed(0)
        for module in net.modules():
            if isinstance(module, QuantizedLinear):
                module.set_weight(matrix(module.shape, module.dtype, makes), there)
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not parameter.is_meta:
                    continue
                if parameter.ndim >= 2:
                    values = matrix(parameter.shape, parameter.dtype, makes)
                else:
                    values = torch.full(
                        parameter.shape, float(name == "weight"), dtype=parameter.dtype
                    )
                module._parameters[name] = nn.Parameter(
                    values.to(there), requires_grad=False
                )
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(there)

    return fill


def matrix(shape: Sequence[int], dtype: torch.dtype, makes: torch.Generator) -> Tensor:
    """Random numbers on the card, so scaled that what goes through keeps its size."""
    values = torch.empty(tuple(shape), dtype=dtype, device=device())
    return values.normal_(0, 1 / math.sqrt(math.prod(shape[1:])), generator=makes)


class Rig:
    """A network with what trains in it and its optimizer, and a batch that ``step``
    trains on.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        wanted = case.wanted()
        self.config = wanted.config
        self.shape = wanted.shapes[0]
        self.family: DiffusersModel = find(wanted.spec.name)(
            wanted.folder,
            device(),
            DTYPES[wanted.dtype],
            weights_of(self.config, wanted.dtype),
        )
        streamed = bool(self.config.layer_offload_fraction)
        several = len(wanted.spec.experts) > 1
        expert = trained(wanted.spec, self.config)[0]
        fill = filled(torch.device("cpu") if streamed else device())
        self.net = self.family.denoiser(expert if several else None, fill=fill)
        held = attach(self.net, wanted.spec, self.config)
        self.compiled = CompiledBlocks() if self.config.compile is True else None
        self.streams = arrange_blocks(
            self.net,
            wanted.spec,
            self.config,
            held,
            None,
            report=False,
            compiled=self.compiled,
        )
        if self.streams is not None:
            held = self.streams.parameters(held)
        self.trainable = make_trainable(
            held, {}, self.family, self.config, expert, 1000
        )
        self.net.train()
        imagination = FakeRun(self.family, self.config)
        prepared = _random(imagination.prepared(self.shape, case.batch), seed)
        self.prepared = prepared.pinned() if device().type == "cuda" else prepared
        size = self.config.micro_batch_size
        self.context = StepContext(
            self.family,
            imagination.objective,
            1,
            self.config.max_grad_norm,
            self.config.seed,
            size,
            compiled=self.compiled,
        )
        self.done = 0

    @property
    def tokens(self) -> int:
        """Tokens of a sample."""
        return self.family.spec.tokens(self.shape)

    def step(self) -> Any:
        """One training step; its record, on its way to the host."""
        self.done += 1
        now = replace(self.prepared, step=self.done)
        clock = Clock(device())
        return train_step(self.context, self.net, self.trainable, now, clock)

    def losses(self, steps: int) -> list[float]:
        """The loss of each of so many steps."""
        return [float(self.step().read()["loss"]) for _ in range(steps)]

    def launches(self) -> int:
        """Kernels that a step starts on the card; on a CPU the operations that it
        makes.
        """
        cuda = device().type == "cuda"
        with profile(
            activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
        ) as seen:
            self.step().read()
            wait()
        if cuda:
            return sum(
                one.device_type == DeviceType.CUDA and not one.name.startswith("Mem")
                for one in seen.events()
            )
        return sum(one.name.startswith("aten::") for one in seen.events())

    def kernel_times(self) -> dict[str, Any]:
        """Milliseconds of a step's kernels by kind, launches, and the card's idle time."""
        if device().type != "cuda":
            return {"launches": self.launches()}
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.step().read()
            wait()
        events = [
            event for event in seen.events() if event.device_type == DeviceType.CUDA
        ]
        times: Counter[str] = Counter()
        for event in events:
            times[kind_of(event.name)] += event.time_range.elapsed_us() / 1e3
        begun = min(event.time_range.start for event in events)
        ended = max(event.time_range.end for event in events)
        busy = busy_time(
            [(event.time_range.start, event.time_range.end) for event in events]
        )
        return {
            "kernel_ms": {kind: round(value, 2) for kind, value in times.most_common()},
            "idle_ms": round((ended - begun - busy) / 1e3, 2),
            "launches": sum(not event.name.startswith("Mem") for event in events),
        }

    def seconds(self, steps: int) -> float:
        """Seconds a step, the middle one of so many, after one that is not counted."""
        self.step().read()
        step_seconds = []
        for _ in range(steps):
            wait()
            begun = time.perf_counter()
            self.step()
            wait()
            step_seconds.append(time.perf_counter() - begun)
        return statistics.median(step_seconds)


KINDS = {
    "copies between host and card": ("Memcpy HtoD", "Memcpy DtoH"),
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "sdpa"),
    "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "splitK"),
    "compiled by Inductor": ("triton_",),
    "copies and casts": ("copy", "Memcpy DtoD", "CatArray"),
    "reductions and norms": ("reduce", "norm"),
    "optimizer and foreach": ("multi_tensor", "foreach"),
}
"""Words in the names of kernels."""


def kind_of(kernel: str) -> str:
    """Return what kind of work a kernel does, by its name."""
    for kind, words in KINDS.items():
        if any(word in kernel for word in words):
            return kind
    return "other elementwise"


def busy_time(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasts."""
    total = 0.0
    covered = -math.inf
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, covered))
        covered = max(covered, ended)
    return total


def _random(prepared: StepBatch, seed: int) -> StepBatch:
    """The batch with random latents, noise and text, and noise levels spread over the
    path.
    """
    assert prepared.batch is not None
    makes = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=makes).to(like.dtype)

    batch = prepared.batch
    text = noise(batch.conditioning.text).mul_(0.1).to(batch.conditioning.text.device)
    batch = replace(
        batch, x0=noise(batch.x0), conditioning=replace(batch.conditioning, text=text)
    )
    t = (torch.arange(len(batch)) + 0.5) / len(batch)
    ids = tuple(f"window {i}" for i in range(len(batch)))
    return replace(
        prepared, batch=batch, t=t, noise=noise(prepared.noise), window_ids=ids
    )


def wait() -> None:
    """Until the card has done all that it was told."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def fresh() -> None:
    """Nothing of what ran before is held, and peaks are counted anew."""
    import gc

    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks() -> Mapping[str, float | None]:
    """GiB that the card has held at the most since ``fresh``; None without a card."""
    if device().type != "cuda":
        return {"allocated_gib": None, "reserved_gib": None}
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
    }


def matrix_rate() -> float:
    """Floating-point operations a second of a large product of matrices: what this card
    itself can do.
    """
    size = 8192 if device().type == "cuda" else 512
    a, b = (
        torch.randn(size, size, device=device()).to(DTYPES[dtype()]) for _ in range(2)
    )
    for _ in range(3):
        a @ b
    times = []
    for _ in range(10):
        wait()
        begun = time.perf_counter()
        for _ in range(5):
            a @ b
        wait()
        times.append((time.perf_counter() - begun) / 5)
    return 2 * size**3 / statistics.median(times)
