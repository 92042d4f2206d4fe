"""videotune beside a bare diffusers + PEFT loop, and beside other trainers that are
installed, on the same card and shapes.

    python benchmarks/gpu_peers.py [--peer NAME='COMMAND'] [--rounds 3] [--steps 20]
    [--out FILE] [--tiny]

Each trainer trains a LoRA of rank 16 on the same random Wan and the same two clips:
batch 1, bfloat16, gradient checkpointing on. A round starts the trainers one after the
other in the same order. Each one runs twice, in two processes: with ``--steps``
updates, and with twice as many. The difference of the two times is the time of the
steps, without that of loading. The benchmark prints seconds a step, the peak in GiB
where the trainer reports it, and ratios to the bare loop.

A peer's COMMAND is a command line in which {base}, {clips}, {steps} and {out} are
replaced: a folder in diffusers layout, a folder of clips with captions beside them, the
number of updates, and an empty folder. None is installed or downloaded. The first round
fills the file cache and is not counted. ``--tiny`` rehearses it on any machine; its
figures mean nothing.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from videotune.commands.self_test import Sizes, small_run
from videotune.config.schema import Config
from videotune.trainer.build import dtype_name, local_device

WAN_1_3B = Sizes(blocks=30, frames=33, side=512)
SMALL = Sizes(blocks=2, heads=2, head=12, frames=5, side=32)
GIB = 2**30


def bare(base: Path, sizes: Sizes, steps: int) -> None:
    """The loop that needs no trainer: load, add a LoRA, cached inputs, forward,
    backward, AdamW.
    """
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig

    device = local_device()
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    net = (
        WanTransformer3DModel.from_pretrained(base / "transformer", dtype=dtype)
        .requires_grad_(False)
        .to(device)
    )
    net.add_adapter(
        LoraConfig(
            r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]
        )
    )
    net.enable_gradient_checkpointing()
    net.train()
    optimizer = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=1e-4, fused=True
    )
    shape = (
        1,
        net.config.in_channels,
        (sizes.frames - 1) // 4 + 1,
        sizes.side // 8,
        sizes.side // 8,
    )
    x0 = torch.randn(shape)
    text = torch.randn(1, 512, net.config.text_dim, device=device, dtype=dtype)
    for _ in range(steps):
        t = torch.rand(1).to(device)
        noise = torch.randn(shape).to(device)
        clean = x0.to(device)
        x_t = ((1 - t) * clean + t * noise).to(dtype)
        with torch.autocast(device.type, dtype, enabled=device.type != "cpu"):
            out = net(
                hidden_states=x_t,
                timestep=t * 1000,
                encoder_hidden_states=text,
                return_dict=False,
            )[0]
        (out.float() - (noise - clean)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(
            [p for p in net.parameters() if p.requires_grad], 1.0
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
        print(json.dumps({"peak": torch.cuda.max_memory_allocated()}))


def seconds(command: Sequence[str]) -> tuple[float, str]:
    """Seconds that a command takes, and what it prints; an error with its last lines
    where it fails.
    """
    begun = time.perf_counter()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(
            f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}"
        )
    return time.perf_counter() - begun, done.stdout


def peak(printed: str, out: Path) -> float | None:
    """GiB at the peak, as a bare loop prints and a run of videotune notes; None of
    other contenders.
    """
    from videotune.runs.journal import History

    lines = [line for line in printed.splitlines() if line.startswith('{"peak"')]
    if lines:
        return json.loads(lines[-1])["peak"] / GIB
    ends = History(out).of_kind("end") if (out / "journal.jsonl").is_file() else []
    memory = ends[-1].get("memory") if ends else None
    return memory["allocated_bytes"] / GIB if memory else None


def measured(
    command: str, places: dict[str, Path], steps: int, folder: Path
) -> dict[str, Any]:
    """Seconds a step of one contender, and its peak."""
    took = []
    printed = ""
    out = folder
    for count in (steps, 2 * steps):
        out = Path(tempfile.mkdtemp(dir=folder)) / "run"
        words = shlex.split(command)
        taken, printed = seconds(
            [word.format(**places, steps=count, out=out) for word in words]
        )
        took.append(taken)
    return {"seconds": (took[1] - took[0]) / steps, "peak_gib": peak(printed, out)}


def contenders(words: argparse.Namespace, sets: Sequence[str]) -> dict[str, str]:
    """The command of each, the bare loop first."""
    python = shlex.quote(sys.executable)
    own = [word for text in sets for word in ("--set", text)]
    ours = f"{python} -m videotune train --data {{clips}} --out {{out}} {shlex.join(own)} --set steps={{steps}}"
    tiny = " --tiny" * words.tiny
    commands = {
        "bare": f"{python} {shlex.quote(__file__)} --bare {{base}} --steps {{steps}}{tiny}",
        "videotune": ours,
    }
    return commands | dict(peer.split("=", 1) for peer in words.peer)


def main() -> None:
    """Measure the contenders in turn, and print their ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    sizes = SMALL if words.tiny else WAN_1_3B
    if words.bare:
        bare(words.bare, sizes, words.steps)
        return
    if local_device().type == "cpu" and not words.tiny:
        sys.exit("no GPU is here: --tiny rehearses on a CPU")
    rounds, steps = (1, 2) if words.tiny else (words.rounds, words.steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = small_run(folder, sizes)
        sets = [text for text in run.sets if not text.startswith("steps=")]
        sets += [
            "gradient_checkpointing=ON",
            "layer_offload_fraction=0",
            "lora.rank=16",
            "lora.targets=attention",
        ]
        places = {"base": folder / "base", "clips": folder / "clips"}
        rows: dict[str, list[dict[str, Any]]] = {}
        commands = contenders(words, sets)
        for _ in range(rounds + (not words.tiny)):
            for who, command in commands.items():
                rows.setdefault(who, []).append(
                    measured(command, places, steps, folder)
                )
                print(json.dumps({who: rows[who][-1]}), flush=True)
    counted = {who: all_rows[not words.tiny :] for who, all_rows in rows.items()}
    middle = {
        who: statistics.median(row["seconds"] for row in counted_rows)
        for who, counted_rows in counted.items()
    }
    figures = {
        "machine": {
            "device": str(local_device()),
            "dtype": dtype_name(Config()),
            "torch": torch.__version__,
        },
        "ratio_to_bare": {
            who: round(value / middle["bare"], 3) for who, value in middle.items()
        },
        "rounds": counted,
    }
    print(json.dumps(figures, indent=1))
    if words.out:
        words.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
