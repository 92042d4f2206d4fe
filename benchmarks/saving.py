"""How long steps wait for a checkpoint that several processes write together: written at
once, and by threads.

    python benchmarks/saving.py [--processes 2] [--width 512] [--blocks 8] [--json FILE] [--tiny]

Real processes over gloo train every weight of a Wan with random weights, sharded
(FSDP2). Each run saves every few steps. The journal says for each checkpoint how many
seconds it took until it was on the disk (seconds), and for how many of them the steps
waited (waited). The last checkpoint of a run is left out: its end waits for it.

- ratio: the seconds that steps wait for a checkpoint that is written at once, over those
  for one that threads write.
- steps: the median seconds of the steps while threads write, over those of all other
  steps. The threads use the same cores and memory here.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import videotune  # noqa: F401  (before bitsandbytes, which it tells not to ask for a package)

# isort: split
import torch
from scale import run_processes, write_clips

SAVE_EVERY = 6
SAVES = 4

SETTINGS = (
    "video_config.frames=9",
    "resolution=32x32",
    "train_dtype=FLOAT_32",
    "sample_after=0",
    "validate_every=0",
    "sample_metrics.budget=0",
    "forgetting.budget=0",
)


def write_base(folder: Path, width: int, blocks: int) -> Path:
    """Write a Wan checkpoint whose weights are large and whose steps are short."""
    from videotune.models.registry import find

    network = {
        "num_attention_heads": width // 64,
        "attention_head_dim": 64,
        "ffn_dim": 4 * width,
        "num_layers": blocks,
    }
    family = find("wan")
    transformer = {**family.tiny_parts["transformer"], **network}
    parts = {**family.tiny_parts, "transformer": transformer}
    wide: Any = type("WideWan", (family,), {"tiny_parts": parts})
    return wide.tiny(folder)


def train_as_process(work: Path, out: Path, *, at_once: bool) -> None:
    """Train as one of the processes."""
    from videotune.commands.train import train
    from videotune.job.overrides import Overrides
    from videotune.trainer import saving

    if at_once:
        saving.has_room_for_copy = lambda *_, **__: False
    sets = (
        f"base_model_name={work / 'base'}",
        f"cache_dir={work / 'cache'}",
        f"steps={SAVE_EVERY * SAVES}",
        f"save_every={SAVE_EVERY}",
        "save_keep=1",
        "batch_size=1",
        "training_method=FINE_TUNE",
        "sharding=FULL",
        "warmup_steps=0",
        *SETTINGS,
    )
    train(Overrides(data=str(work / "clips"), sets=sets), out / "run")


def run(work: Path, processes: int, *, at_once: bool) -> dict[str, Any]:
    """Train in ``processes`` processes, and return what the journal says."""
    out = Path(tempfile.mkdtemp(dir=work))
    arguments = [str(work), str(out), str(int(at_once))]
    run_processes(__file__, processes, arguments)
    return read_run(out / "run")


def read_run(folder: Path) -> dict[str, Any]:
    """Return the seconds of a run's checkpoints and steps."""
    from videotune.runs.checkpoint import complete_checkpoints
    from videotune.runs.journal import read_journal

    lines = read_journal(folder)
    saves = [line for line in lines if line["kind"] == "save"]
    begun: set[int] = set()
    writing: list[float] = []
    others: list[float] = []
    for line in lines:
        if line["kind"] == "save":
            begun.discard(line["step"])
        if line["kind"] != "step":
            continue
        step = line["step"]
        if step > SAVE_EVERY:  # the first ones warm up
            seconds = sum(line["seconds"].values())
            (writing if begun else others).append(seconds)
        if step % SAVE_EVERY == 0:
            begun.add(step)

    checkpoint = complete_checkpoints(folder)[-1]
    size = sum(entry["bytes"] for entry in checkpoint.files.values())
    return {
        "bytes": size,
        "seconds": statistics.median(line["seconds"] for line in saves[:-1]),
        "waited": statistics.median(line["waited"] for line in saves[:-1]),
        "steps_while_written": _median(writing),
        "other_steps": _median(others),
    }


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def describe(name: str, row: dict[str, Any]) -> str:
    """Return a run in one line."""
    return (
        f"{name}: {row['bytes'] / 1e6:.0f} MB a checkpoint, {row['seconds']:.3f} s until it is "
        f"on the disk, steps wait {row['waited']:.3f} s"
    )


def main() -> None:
    """Run both, and print and write the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--as-process", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.as_process:
        work, out, at_once = chosen.as_process
        train_as_process(Path(work), Path(out), at_once=at_once == "1")
        return

    width, blocks = (64, 1) if chosen.tiny else (chosen.width, chosen.blocks)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_base(work / "base", width, blocks)
        write_clips(work / "clips", side=32)
        rows = {}
        for name, at_once in (("written at once", True), ("by threads", False)):
            rows[name] = run(work, chosen.processes, at_once=at_once)
            print(describe(name, rows[name]), flush=True)

    waits = [row["waited"] for row in rows.values()]
    ratio = round(waits[0] / max(waits[1], 1e-3), 1)
    print(f"ratio: steps wait {ratio} times as long if it is written at once")
    by_threads = rows["by threads"]
    if by_threads["steps_while_written"] and by_threads["other_steps"]:
        slower = by_threads["steps_while_written"] / by_threads["other_steps"]
        print(f"steps: {slower:.2f} times as long while threads write")
    if chosen.json:
        content = {
            "command": f"python benchmarks/saving.py --processes {chosen.processes} "
            f"--width {width} --blocks {blocks} --json docs/benchmarks-saving.json",
            "torch": torch.__version__,
            "processes": chosen.processes,
            "rows": rows,
            "ratio": ratio,
        }
        chosen.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
