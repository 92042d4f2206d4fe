"""``doctor --gpu``: short trainings of a small Wan on the card in use, and what they say of it.

Rates, the link to the host, memory beside the plan, equal losses, and whether the card slows down under load. ``plan``
calculates with the measured rates from then on.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
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
from videotune.memory.checkpointing import CPU_OFFLOADED, OFF, ON
from videotune.memory.host_weights import pinned
from videotune.models import base_model, loading, registry
from videotune.planner.gpus import Card, measured_file
from videotune.planner.memory import Choice, need, step_spec
from videotune.rng import generator_for
from videotune.runs.journal import History
from videotune.toy.shapes import KNOWN, caption, draw_clip
from videotune.trainer.build import dtype_name, has_bf16, local_device

WAYS: Mapping[str, tuple[str, float]] = {
    "resident": (ON, 0.0),
    "once more": (ON, 0.0),
    "weights streamed": (ON, 1.0),
    "block inputs offloaded": (CPU_OFFLOADED, 0.0),
    "no checkpointing": (OFF, 0.0),
}
"""What is trained: gradient_checkpointing and layer_offload_fraction."""

WITHIN = 0.05
SLOWER = 1.10
UNDER_LOAD = 0.90
"""Bounds: memory off its plan; a step with something on the host over the resident one; the rate under load to the first."""


@dataclass(frozen=True)
class Sizes:
    """The small Wan, its clips and steps; the side of products of matrices, the bytes copied, and the seconds of load."""

    blocks: int = 6
    heads: int = 12
    head: int = 128
    frames: int = 17
    side: int = 768
    steps: int = 8
    matrix: int = 8192
    copied: int = 1 << 28
    seconds: float = 30.0


def self_test(sizes: Sizes | None = None) -> dict[str, Any]:
    """The report on the card in use, whose rates are kept for ``plan``. ``wrong``: what is beyond a bound, in sentences.

    Raises VideotuneError where torch finds no card.
    """
    sizes = sizes or Sizes()
    device = local_device()
    if device.type == "cpu":
        raise VideotuneError(
            "doctor --gpu: torch finds no GPU here; videotune doctor shows what is installed"
        )
    ways: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder, bar("self-test") as progress:
        first = matrix_rate(sizes, 1.0, device)
        link = link_rate(sizes, device)
        words = small_run(Path(folder), sizes)
        for number, way in enumerate(WAYS):
            progress.update(number, len(WAYS) + 1, way)
            ways[way] = trained(words, Path(folder) / way, *WAYS[way])
        progress.update(len(WAYS), len(WAYS) + 1, "under load")
        last = matrix_rate(sizes, sizes.seconds, device)
        job = plan(words).job
        spec = step_spec(job, dtype_name(job.config))
    facts = torch.get_device_module(device).get_device_properties(device)
    reached = need(spec, Choice(1, ON, 0)).flops / ways["resident"]["seconds"] / last
    card = Card(
        facts.name,
        facts.total_memory,
        last,
        min(link),
        reached=reached,
        measured=date.today().isoformat(),
    )
    report: dict[str, Any] = {
        "videotune": __version__,
        "torch": torch.__version__,
        "card": asdict(card),
        "matrix_flops": {"first": first, "under load": last},
        "link_bytes_a_second": dict(zip(("to the card", "to the host"), link, strict=True)),
        "trainings": ways,
        "same_losses": ways["resident"]["losses"] == ways["once more"]["losses"],
    }
    write_json(measured_file(facts.name), report := report | {"wrong": wrong(report)})
    return report


def small_run(folder: Path, sizes: Sizes) -> Overrides:
    """What ``train`` is called with: a random Wan, wider than its tiny checkpoint, two clips, and steps alone."""
    base = folder / "base"
    more = {"num_layers": sizes.blocks, "num_attention_heads": sizes.heads}
    more |= {"attention_head_dim": sizes.head, "ffn_dim": 4 * sizes.heads * sizes.head}
    with loading.quietly():
        family = registry.find(base_model.spec_for(None, base_model.place("asset:toy")).name)
        config = read_json(family.tiny(base) / "transformer" / "config.json") | more
        getattr(diffusers, config["_class_name"]).from_config(config).save_pretrained(
            base / "transformer"
        )
    (folder / "clips").mkdir()
    for number, look in enumerate(KNOWN[:2]):
        clip = draw_clip(
            generator_for(0, "self-test", number), *look, frames=sizes.frames, side=sizes.side
        )
        write_video(folder / "clips" / f"{number}.mp4", clip, 16.0)
        write_text(folder / "clips" / f"{number}.txt", caption(*look))
    sets = (
        f"base_model_name={base}",
        f"cache_dir={folder / 'cache'}",
        f"steps={sizes.steps}",
        "batch_size=1",
    )
    shape = (
        f"resolution={sizes.side}x{sizes.side}",
        f"video_config.frames={sizes.frames}",
        "micro_batch_size=1",
    )
    quiet = (
        "sample_after=0",
        "validate_every=0",
        "sample_metrics.budget=0",
        "save_every=0",
        "caption_dropout=0",
    )
    return Overrides(data=str(folder / "clips"), sets=(*sets, *shape, *quiet))


def trained(words: Overrides, run: Path, checkpointing: str, streamed: float) -> dict[str, Any]:
    """Losses, seconds of a step, and bytes held and planned, of a training."""
    sets = (f"gradient_checkpointing={checkpointing}", f"layer_offload_fraction={streamed}")
    words = Overrides(data=words.data, sets=(*words.sets, *sets))
    with redirect_stderr(StringIO()):  # what five trainings have to say of themselves
        job = plan(words).job
        step_spec(job, dtype_name(job.config))  # so that the training knows its plan
        memory = train(words, run).memory or {}
    lines = History(run).steps.recent
    took = [sum(line["seconds"].values()) for line in lines]
    return {
        "losses": [line["loss"] for line in lines],
        "seconds": statistics.median(took[2:]),
        **memory,
    }


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the device takes for it, the middle of five."""
    times = []
    for _ in range(5):
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        work()
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matrix_rate(sizes: Sizes, load: float, device: torch.device) -> float:
    """Floating-point operations per second of matrix products in the training dtype, after a warm-up in seconds."""
    side = sizes.matrix
    dtype = torch.bfloat16 if has_bf16(device) else torch.float32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    begun = time.perf_counter()
    first = True
    while first or time.perf_counter() - begun < load:
        rate = 10 * side**3 / seconds(lambda: [a @ b for _ in range(5)], device)
        first = False
    return rate


def link_rate(sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """Bytes a second from pinned memory to the card and back."""
    host = pinned([sizes.copied], torch.uint8)
    card = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    there = sizes.copied / seconds(partial(card.copy_, host, non_blocking=True), device)
    return there, sizes.copied / seconds(partial(host.copy_, card, non_blocking=True), device)


def wrong(report: Mapping[str, Any]) -> list[str]:
    """What of a report is beyond a bound."""
    found = []
    ways = report["trainings"]
    rate = report["matrix_flops"]
    for way, row in ways.items():
        if (
            row["planned_bytes"]
            and abs(share := row["planned_bytes"] / row["allocated_bytes"] - 1) > WITHIN
        ):
            found.append(f"{way}: the plan is {share:+.0%} off the memory that was held")
    for way in ("weights streamed", "block inputs offloaded"):
        if (share := ways[way]["seconds"] / ways["resident"]["seconds"]) > SLOWER:
            found.append(
                f"{way}: a step takes {share:.2f} times as long: the link to the host is slow"
            )
    if rate["under load"] < UNDER_LOAD * rate["first"]:
        found.append("the card slows down under load: look at its cooling and its power limit")
    if not report["same_losses"]:
        found.append(
            "two equal trainings had different losses: deterministic=true makes them equal, and slower"
        )
    return found
