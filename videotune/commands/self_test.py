"""``doctor --gpu``: measure the GPU with short trainings of a small model.

It measures rates, the link to the host, memory beside the plan, equal losses, and
whether the GPU slows down under load. ``plan`` uses the measured rates from then on.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import torch

from videotune._version import __version__
from videotune.commands.plan import plan
from videotune.commands.train import train
from videotune.console import bar
from videotune.data.video_writer import write_video
from videotune.errors import VideotuneError
from videotune.files import read_json, write_json, write_text
from videotune.job.overrides import Overrides
from videotune.memory.checkpointing import CPU_OFFLOADED, IN_PARTS, OFF, ON
from videotune.memory.host_weights import pinned
from videotune.models import base_model, loading, registry
from videotune.planner import memory
from videotune.planner.gpus import Card, card_of_table, measured_file
from videotune.planner.memory import Choice, need
from videotune.planner.read_step import step_spec
from videotune.rng import generator_for
from videotune.runs.journal import History
from videotune.toy.shapes import KNOWN, caption, draw_clip
from videotune.trainer.build import dtype_name, has_bf16, local_device

GRAPHS = "CUDA graphs"

WAYS: Mapping[str, tuple[str, float, str]] = {
    "resident": (ON, 0.0, "false"),
    "once more": (ON, 0.0, "false"),
    GRAPHS: (ON, 0.0, "auto"),
    "weights streamed": (ON, 1.0, "false"),
    "block inputs offloaded": (CPU_OFFLOADED, 0.0, "false"),
    "blocks computed in parts": (IN_PARTS, 1.0, "false"),
    "no checkpointing": (OFF, 0.0, "false"),
}
"""What is trained: gradient_checkpointing, layer_offload_fraction and cuda_graphs.

CUDA graphs are auto, because not every GPU has them.
"""

OTHER_LOSS = 0.01
"""Bound of the relative difference of a loss with CUDA graphs. Kernels that add in any
order made 1e-4 on an H200.
"""

WITHIN = 0.05
"""Bound of the memory's difference from its plan."""

SLOWER = 1.10
"""Bound of a step's time with something on the host, over that with everything on the
GPU.
"""

UNDER_LOAD = 0.90
"""Bound of the rate under load, over the first rate."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the small model, its clips, and the measurements."""

    blocks: int = 6
    heads: int = 12
    head: int = 128
    frames: int = 17
    side: int = 768
    steps: int = 8
    matrix: int = 8192
    """Side of the matrices that are multiplied."""
    copied: int = 1 << 28
    """Bytes that are copied."""
    seconds: float = 30.0
    """Seconds of load."""


def self_test(sizes: Sizes | None = None) -> dict[str, Any]:
    """Measure the GPU in use and keep its rates for ``plan``.

    Returns:
        The report. Its key ``wrong`` has a sentence for each figure beyond a bound.

    Raises:
        VideotuneError: if torch finds no GPU.
    """
    sizes = sizes or Sizes()
    device = local_device()
    if device.type == "cpu":
        raise VideotuneError(
            "doctor --gpu: torch finds no GPU here; videotune doctor shows what is installed"
        )

    trainings: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder, bar("self-test") as progress:
        first_rate = matrix_rate(sizes, 1.0, device)
        to_gpu, to_host = link_rates(sizes, device)
        overrides = small_run(Path(folder), sizes)
        for number, (name, way) in enumerate(WAYS.items()):
            progress.update(number, len(WAYS) + 1, name)
            trainings[name] = trained(overrides, Path(folder) / name, *way)
        progress.update(len(WAYS), len(WAYS) + 1, "under load")
        loaded_rate = matrix_rate(sizes, sizes.seconds, device)
        job = plan(overrides).job
        spec = step_spec(job, dtype_name(job.config))

    properties = torch.get_device_module(device).get_device_properties(device)
    step = need(spec, Choice(1, ON, 0))
    step_seconds = trainings["resident"]["seconds"]
    in_table = card_of_table(properties.name, properties.total_memory)
    card = Card(
        properties.name,
        properties.total_memory,
        loaded_rate,
        min(to_gpu, to_host),
        bandwidth=None if in_table is None else in_table.bandwidth,
        reached=step.work.flops / step_seconds / loaded_rate,
        measured=date.today().isoformat(),
    )
    if card.bandwidth is not None:
        card = replace(card, pace=step_seconds / memory.seconds(step, 1, card))
    report: dict[str, Any] = {
        "videotune": __version__,
        "torch": torch.__version__,
        "card": asdict(card),
        "matrix_flops": {"first": first_rate, "under load": loaded_rate},
        "link_bytes_a_second": {"to the card": to_gpu, "to the host": to_host},
        "trainings": trainings,
        "same_losses": trainings["resident"]["losses"]
        == trainings["once more"]["losses"],
    }
    report["wrong"] = wrong(report)
    write_json(measured_file(properties.name), report)
    return report


def small_run(folder: Path, sizes: Sizes) -> Overrides:
    """Return the overrides of a run: a random model, wider than its tiny checkpoint,
    two clips, and nothing but steps.
    """
    base = folder / "base"
    wider = {
        "num_layers": sizes.blocks,
        "num_attention_heads": sizes.heads,
        "attention_head_dim": sizes.head,
        "ffn_dim": 4 * sizes.heads * sizes.head,
    }
    with loading.quietly():
        family = registry.find(
            base_model.spec_for(None, base_model.place("asset:toy")).name
        )
        tiny = family.tiny(base)
        config = read_json(tiny / "transformer" / "config.json") | wider
        network_class = getattr(diffusers, config["_class_name"])
        network_class.from_config(config).save_pretrained(base / "transformer")

    clips = folder / "clips"
    clips.mkdir()
    for number, look in enumerate(KNOWN[:2]):
        generator = generator_for(0, "self-test", number)
        clip = draw_clip(generator, *look, frames=sizes.frames, side=sizes.side)
        write_video(clips / f"{number}.mp4", clip, 16.0)
        write_text(clips / f"{number}.txt", caption(*look))

    sets = (
        f"base_model_name={base}",
        f"cache_dir={folder / 'cache'}",
        f"steps={sizes.steps}",
        "batch_size=1",
        f"resolution={sizes.side}x{sizes.side}",
        f"video_config.frames={sizes.frames}",
        "micro_batch_size=1",
        "sample_after=0",
        "validate_every=0",
        "sample_metrics.budget=0",
        "save_every=0",
        "caption_dropout=0",
    )
    return Overrides(data=str(clips), sets=sets)


def trained(
    overrides: Overrides,
    run: Path,
    checkpointing: str,
    streamed: float,
    cuda_graphs: str,
) -> dict[str, Any]:
    """Train, and return the losses, the seconds of a step, and the bytes held and
    planned.
    """
    sets = (
        f"gradient_checkpointing={checkpointing}",
        f"layer_offload_fraction={streamed}",
        f"cuda_graphs={cuda_graphs}",
    )
    overrides = Overrides(data=overrides.data, sets=(*overrides.sets, *sets))
    with redirect_stderr(StringIO()):  # hides the messages of the trainings
        job = plan(overrides).job
        step_spec(
            job, dtype_name(job.config)
        )  # measured now, so that the training knows its plan
        memory = train(overrides, run).memory or {}

    lines = History(run).steps.recent
    seconds_per_step = [sum(line["seconds"].values()) for line in lines]
    return {
        "losses": [line["loss"] for line in lines],
        "seconds": statistics.median(seconds_per_step[2:]),
        **memory,
    }


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the device takes for work, the median of five."""
    times = []
    for _ in range(5):
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        work()
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matrix_rate(sizes: Sizes, warm_up: float, device: torch.device) -> float:
    """Return the operations per second of matrix products in the training dtype, after
    ``warm_up`` seconds of them.
    """
    side = sizes.matrix
    dtype = torch.bfloat16 if has_bf16(device) else torch.float32
    a = torch.randn(side, side, device=device).to(dtype)
    b = torch.randn(side, side, device=device).to(dtype)

    def multiply() -> None:
        for _ in range(5):
            a @ b

    begun = time.perf_counter()
    rate = 10 * side**3 / seconds(multiply, device)
    while time.perf_counter() - begun < warm_up:
        rate = 10 * side**3 / seconds(multiply, device)
    return rate


def link_rates(sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """Return the bytes per second from pinned memory to the GPU and back."""
    host = pinned([sizes.copied], torch.uint8)
    card = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    to_gpu = sizes.copied / seconds(
        partial(card.copy_, host, non_blocking=True), device
    )
    to_host = sizes.copied / seconds(
        partial(host.copy_, card, non_blocking=True), device
    )
    return to_gpu, to_host


def wrong(report: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each figure of a report that is beyond a bound."""
    faults = []
    trainings = report["trainings"]
    for name, row in trainings.items():
        # What a graph keeps beside a step is not planned.
        if not row["planned_bytes"] or name == GRAPHS:
            continue
        difference = row["planned_bytes"] / row["allocated_bytes"] - 1
        if abs(difference) > WITHIN:
            faults.append(
                f"{name}: the plan is {difference:+.0%} off the memory that was held"
            )

    for name in ("weights streamed", "block inputs offloaded"):
        slowdown = trainings[name]["seconds"] / trainings["resident"]["seconds"]
        if slowdown > SLOWER:
            faults.append(
                f"{name}: a step takes {slowdown:.2f} times as long: the link to the host is slow"
            )
    faults += wrong_with_graphs(trainings)
    rate = report["matrix_flops"]
    if rate["under load"] < UNDER_LOAD * rate["first"]:
        faults.append(
            "the card slows down under load: look at its cooling and its power limit"
        )
    if not report["same_losses"]:
        faults.append(
            "two equal trainings had different losses: deterministic=true makes them equal, and slower"
        )
    return faults


def wrong_with_graphs(trainings: Mapping[str, Any]) -> list[str]:
    """Return a sentence if passes as graphs gave other losses than passes without."""
    usual = trainings["resident"]["losses"]
    with_graphs = trainings[GRAPHS]["losses"]
    for step, (loss, other) in enumerate(zip(usual, with_graphs, strict=True), start=1):
        if not abs(other - loss) <= OTHER_LOSS * abs(loss):
            return [
                f"CUDA graphs: step {step} had the loss {other:g} in place of {loss:g}: train with cuda_graphs=false"
            ]
    return []
