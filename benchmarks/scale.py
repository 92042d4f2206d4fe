"""What each process of a run computes and sends, against the theory: data parallel,
sharded weights, and samples that processes share by their tokens (context parallel).

    python benchmarks/scale.py [--processes 1 2 4 8] [--steps 1] [--json FILE] [--tiny]

Real processes over gloo train a small Wan with random weights; a step always has the
same samples. In each process the operations of matrix products and attention are counted,
the tokens that go through its last block, and the bytes of all collectives, each as a
ring sends them (videotune/planner/traffic.py). Seconds are not measured: the processes
share the cores of one machine.

- work: the operations of all processes over those of one process. 1 is perfect. With
  shared samples diffusers computes attention once more in the backward pass, and each
  process computes the captions' keys and values: of 512 states, here beside 576 video
  tokens, in a real run beside tens of thousands.
- tokens: those of all processes over the samples' own.
- sent: the bytes that a process sends over those that `videotune plan` calculates.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import videotune  # noqa: F401  (before bitsandbytes, which it tells not to ask for a package)

# isort: split
import torch
import torch.distributed as torch_dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

SAMPLES = 8
"""Samples of a step."""

FRAMES = 33
SIDE = 128
TINY_SIDE = 64

NETWORK = {
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "ffn_dim": 256,
    "num_layers": 4,
}

SETTINGS = (
    f"video_config.frames={FRAMES}",
    "train_dtype=FLOAT_32",
    "gradient_checkpointing=ON",
    "layer_offload_fraction=0",
    "sample_after=0",
    "validate_every=0",
    "sample_metrics.budget=0",
    "forgetting.budget=0",
    "caption_dropout=0",
    "save_every=0",
)


@dataclass(frozen=True)
class Way:
    """How the processes of a run share its work."""

    name: str
    parts: int
    """Processes that share a sample; 0: all of them."""
    settings: tuple[str, ...]

    def parts_of(self, processes: int) -> int:
        """Return the processes that share a sample."""
        return self.parts or processes

    def runs_in(self, processes: int) -> bool:
        """Whether that many processes can share the work in this way."""
        return processes == 1 or 1 <= self.parts_of(processes) <= processes


WAYS = (
    Way("data parallel, LoRA", 1, ("training_method=LORA",)),
    Way("sharded, all weights", 1, ("training_method=FINE_TUNE", "sharding=FULL")),
    Way("context parallel, LoRA", 0, ("training_method=LORA",)),
    Way(
        "context 2, sharded, all weights",
        2,
        ("training_method=FINE_TUNE", "sharding=FULL"),
    ),
)


class SentBytes(TorchDispatchMode):
    """While entered, count the bytes that this process sends, by collective."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self._processes = processes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count it if it is a collective."""
        namespace, name = func.namespace, func._schema.name.split("::")[1]
        if namespace in ("c10d", "_c10d_functional"):
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name == "all_to_all_single":
            group = torch_dist.distributed_c10d._resolve_process_group(args[3])
            size = group.size()
            self.sent["attention"] += args[0].nbytes * (size - 1) // size
        elif name == "all_gather_into_tensor":
            self.sent["prediction"] += args[0].nbytes * (args[1] - 1)
        elif name == "_allgather_base_":
            self.sent["weights"] += args[0].nbytes - args[1].nbytes
        elif name == "_reduce_scatter_base_":
            self.sent["weights"] += args[1].nbytes - args[0].nbytes
        elif name == "allreduce_":
            size = self._processes
            total = sum(tensor.nbytes for tensor in args[0])
            self.sent["gradients"] += 2 * total * (size - 1) // size
        elif name not in ("wait_tensor", "_wrap_tensor_autograd"):
            raise AssertionError(f"a collective that is not counted: {name}")


def write_base(folder: Path) -> Path:
    """Write a small Wan checkpoint with eight heads."""
    from videotune.models.registry import find

    family = find("wan")
    transformer = {**family.tiny_parts["transformer"], **NETWORK}
    parts = {**family.tiny_parts, "transformer": transformer}
    small: Any = type("SmallWan", (family,), {"tiny_parts": parts})
    return small.tiny(folder)


def write_clips(folder: Path, side: int) -> Path:
    """Write as many clips as a step has samples."""
    from videotune.rng import generator_for
    from videotune.toy.dataset import encode_clip
    from videotune.toy.shapes import COMBINATIONS, caption, draw_clip

    (folder / "videos").mkdir(parents=True)
    (folder / "captions").mkdir()
    for index, look in enumerate(COMBINATIONS[:SAMPLES]):
        generator = generator_for(0, "scale", index)
        clip = draw_clip(generator, *look, frames=FRAMES, side=side)
        encode_clip(folder / "videos" / f"{index}.mp4", clip, 16.0)
        (folder / "captions" / f"{index}.txt").write_text(caption(*look))
    return folder


def overrides_of(work: Path, way: Way, processes: int, steps: int) -> Any:
    """Return the settings of a run."""
    from videotune.job.overrides import Overrides

    parts = way.parts_of(processes) if processes > 1 else 1
    side = json.loads((work / "side.json").read_text())
    sets = (
        f"resolution={side}x{side}",
        f"base_model_name={work / 'base'}",
        f"cache_dir={work / 'cache'}",
        f"steps={steps}",
        f"batch_size={SAMPLES * parts // processes}",
        f"context_parallel={parts}",
        *SETTINGS,
        *way.settings,
    )
    return Overrides(data=str(work / "clips"), sets=sets)


def count_as_process(work: Path, way: Way, steps: int, out: Path) -> None:
    """Train as one of the processes, and write what the last step computed and sent."""
    from videotune.commands.train import train
    from videotune.trainer import loop

    processes = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    counts: dict[str, Any] = {}
    plain_step = loop.train_step

    def counted_step(settings: Any, net: Any, *args: Any) -> Any:
        tokens: list[int] = []
        hook = net.blocks[-1].register_forward_pre_hook(
            lambda _, inputs: tokens.append(inputs[0].shape[0] * inputs[0].shape[1])
        )
        sent = SentBytes(processes)
        with FlopCounterMode(display=False) as flops, sent:
            record = plain_step(settings, net, *args)
        hook.remove()
        counts.update(
            flops=flops.get_total_flops(),
            tokens=sum(tokens[: len(tokens) // 2]),  # each is computed twice
            sent=dict(sent.sent),
        )
        return record

    loop.train_step = counted_step  # type: ignore[assignment]
    overrides = overrides_of(work, way, processes, steps)
    train(overrides, out / "run")
    (out / f"rank-{rank}.json").write_text(json.dumps(counts))


def theory(work: Path, way: Way, processes: int) -> dict[str, float]:
    """Return the bytes that the planner calculates for a process."""
    from videotune.job.job import open_job
    from videotune.job.overrides import resolve_config
    from videotune.memory.checkpointing import ON
    from videotune.planner import memory
    from videotune.planner.fit import process_share
    from videotune.planner.read_step import step_spec
    from videotune.planner.traffic import traffic

    overrides = overrides_of(work, way, processes, steps=1)
    resolved, spec, base = resolve_config(overrides)
    groups = processes // resolved.config.context_parallel
    job = open_job(resolved, spec, base, processes=groups)
    whole_step = step_spec(job, "FLOAT_32")
    choice = memory.Choice(job.config.batch_size, ON, streamed=0)
    training = memory.need(process_share(job, whole_step, "FLOAT_32"), choice)
    return asdict(traffic(job, whole_step, training, "FLOAT_32"))


def run_processes(script: str, processes: int, arguments: Sequence[str]) -> None:
    """Run a benchmark's own script in several processes of one run, as a launcher does.

    Args:
        script: its file, which takes ``--as-process`` and the arguments.
        processes: how many.
        arguments: for each of them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    started = []
    for rank in range(processes):
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        environment = {name: str(value) for name, value in variables.items()}
        started.append(
            subprocess.Popen(
                [sys.executable, script, "--as-process", *arguments],
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    errors = [process.communicate()[1] for process in started]
    codes = [process.returncode for process in started]
    if any(codes):
        ends = "\n".join(text[-1500:] for text in errors)
        raise SystemExit(f"the processes ended with {codes}:\n{ends}")


def run(work: Path, way: Way, processes: int, steps: int) -> list[dict[str, Any]]:
    """Train in ``processes`` processes, and return the counts of each."""
    out = Path(tempfile.mkdtemp(dir=work))
    arguments = [str(work), str(WAYS.index(way)), str(steps), str(out)]
    run_processes(__file__, processes, arguments)
    files = [out / f"rank-{rank}.json" for rank in range(processes)]
    return [json.loads(file.read_text()) for file in files]


def compare(
    counts: list[dict[str, Any]], alone: dict[str, Any], expected: dict[str, float]
) -> dict[str, Any]:
    """Return the ratios of a run in several processes."""
    sent: dict[str, Any] = {}
    for name, calculated in expected.items():
        counted = max(count["sent"].get(name, 0) for count in counts)
        # Losses and counts are summed, too: some bytes that no plan is about.
        if calculated:
            ratio = round(counted / calculated, 3)
            sent[name] = {"bytes": counted, "over_theory": ratio}
        else:
            assert counted < 1000, f"{name}: {counted} bytes that no plan has"
    flops = [count["flops"] for count in counts]
    tokens = [count["tokens"] for count in counts]
    return {
        "work": round(sum(flops) / alone["flops"], 3),
        "most_work_of_a_process": round(max(flops) * len(flops) / alone["flops"], 3),
        "tokens": round(sum(tokens) / alone["tokens"], 3),
        "sent": sent,
    }


def main() -> None:
    """Count, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--as-process", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.as_process:
        work, index, steps, out = chosen.as_process
        count_as_process(Path(work), WAYS[int(index)], int(steps), Path(out))
        return

    counts = [1, 2] if chosen.tiny else chosen.processes
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_base(work / "base")
        side = TINY_SIDE if chosen.tiny else SIDE
        write_clips(work / "clips", side)
        (work / "side.json").write_text(json.dumps(side))
        for way in WAYS[-1:] if chosen.tiny else WAYS:
            (alone,) = run(work, way, 1, chosen.steps)
            for processes in counts:
                if processes == 1 or not way.runs_in(processes):
                    continue
                found = run(work, way, processes, chosen.steps)
                ratios = compare(found, alone, theory(work, way, processes))
                row = {"way": way.name, "processes": processes, **ratios}
                rows.append(row)
                print(describe(row), flush=True)
    if chosen.json:
        command = "python benchmarks/scale.py --json docs/benchmarks-scale.json"
        content = {
            "command": command,
            "torch": torch.__version__,
            "samples_of_a_step": SAMPLES,
            "rows": rows,
        }
        chosen.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def describe(row: dict[str, Any]) -> str:
    """Return a row in one line."""
    sent = ", ".join(
        f"{name} {part['bytes'] / 1e6:.3f} MB ({part['over_theory']} of the theory)"
        for name, part in row["sent"].items()
    )
    return (
        f"{row['way']}, {row['processes']} processes: work {row['work']}, tokens {row['tokens']}; "
        f"each sends {sent}"
    )


if __name__ == "__main__":
    main()
