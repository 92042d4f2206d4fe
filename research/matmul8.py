"""What products in eight bits cost: loss and gradients of the toy, one kind of layer at
a time, and the validation loss after training.

    python research/matmul8.py [--seeds 0 1 2] [--steps 100] [--batches 8]
    [--work runs/matmul8] [--out research/matmul8.json]

Layers: an adapter is trained over the plain toy for 25 steps. Then loss and gradient of
the adapter are computed for the same batches with the layers of one kind in eight bits,
and compared with those in float32. "forward alone" computes gradients in float32, over
the same rounded weights. Training: runs of one seed have the same clips, order, noise
and first weights, and differ by ``transformer.matmul_dtype`` alone. A second call goes
on with what is missing, and then prints the tables.
"""

import argparse
import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from quantised import error, open_trainer
from torch import Tensor, nn

from videotune.commands.demo import TRIGGER
from videotune.files import read_json, write_json
from videotune.latent_cache.step_batch import StepBatch
from videotune.memory.eight_bit_matmul import EightBitLinear
from videotune.toy.dataset import write_dataset
from videotune.trainer.loop import remaining_batches, step_context, train_steps
from videotune.trainer.step import accumulate_gradients
from videotune.trainer.step_record import Clock, empty_values
from videotune.trainer.trainer import Trainer

CPU = torch.device("cpu")
DTYPES = ("FLOAT_8", "INT_8")
STEPS_BEFORE = 25
KINDS = {
    "self-attention: to_q, to_k, to_v": r"blocks\..*attn1\.to_[qkv]",
    "self-attention: to_out": r"blocks\..*attn1\.to_out",
    "cross-attention: to_q": r"blocks\..*attn2\.to_q",
    "cross-attention: to_k, to_v (text)": r"blocks\..*attn2\.to_[kv]",
    "cross-attention: to_out": r"blocks\..*attn2\.to_out",
    "feed-forward: in": r"blocks\..*ffn\.net\.0",
    "feed-forward: out": r"blocks\..*ffn\.net\.2",
    "all of the blocks": r"blocks\.",
    "outside: time": r"condition_embedder\.time",
    "outside: text": r"condition_embedder\.text",
    "outside: last projection": r"proj_out",
}
"""Patterns of the paths of layers."""


class ForwardAlone(nn.Module):
    """A layer that multiplies in eight bits, and its gradient in the layer's dtype."""

    def __init__(self, layer: EightBitLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return x·Wᵀ + bias."""
        plain = nn.functional.linear(x, self.layer.dequantize(), self.layer.bias)
        return plain + (self.layer(x) - plain).detach()


@contextmanager
def in_eight_bits(
    net: nn.Module, pattern: str, dtype: str, backward: bool
) -> Iterator[int]:
    """Within the block, layers of this pattern multiply in eight bits; their number."""
    before = {
        path: module
        for path, module in net.named_modules()
        if type(module) is nn.Linear
        and "lora_" not in path
        and re.search(rf"(^|\.){pattern}", path)
    }
    for path, linear in before.items():
        layer = EightBitLinear(linear, dtype, torch.float32)
        layer.set_weight(linear.weight, CPU)
        net.set_submodule(path, layer if backward else ForwardAlone(layer))
    try:
        yield len(before)
    finally:
        for path, linear in before.items():
            net.set_submodule(path, linear)


def loss_and_gradient(
    trainer: Trainer, prepared: Sequence[StepBatch]
) -> tuple[float, Tensor]:
    """The mean loss of these batches and the gradient of what trains, as one row."""
    losses = []
    active = trainer.pool.activate(1)
    for batch in prepared:
        values = empty_values(batch, CPU)
        accumulate_gradients(
            step_context(trainer),
            trainer.net,
            active.trainable,
            batch,
            Clock(CPU),
            values,
        )
        losses.append(float(values[0]))

    gradients = []
    for parameter in trainer.parameters.values():
        gradient = parameter.grad
        assert gradient is not None
        gradients.append(gradient.flatten().double())
        parameter.grad = None
    return statistics.fmean(losses), torch.cat(gradients)


def layer_rows(told: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Loss and gradient with one kind of layer in eight bits, beside float32."""
    trainer = open_trainer(told, "auto", seed)
    for record in itertools.islice(train_steps(trainer), STEPS_BEFORE):
        record.read()
    prepared = list(itertools.islice(remaining_batches(trainer), told.batches))
    loss, gradient = loss_and_gradient(trainer, prepared)

    rows = []
    for kind, dtype, backward in itertools.product(KINDS, DTYPES, (True, False)):
        with in_eight_bits(trainer.net, KINDS[kind], dtype, backward) as count:
            rounded_loss, rounded = loss_and_gradient(trainer, prepared)
        cosine = nn.functional.cosine_similarity(gradient, rounded, dim=0)
        row = {
            "layers": kind,
            "count": count,
            "dtype": dtype,
            "backward": backward,
            "seed": seed,
            "loss": rounded_loss / loss - 1,
            "gradient_error": float((rounded - gradient).norm() / gradient.norm()),
            "one_less_cosine": 1 - float(cosine),
        }
        rows.append(row)
        print(row, flush=True)
    trainer.journal.close()
    return rows


def training_row(told: argparse.Namespace, dtype: str, seed: int) -> dict[str, Any]:
    """Held-out errors before and after a run with products in this dtype."""
    sets = [f"transformer.matmul_dtype={dtype}"]
    trainer = open_trainer(
        argparse.Namespace(**{**vars(told), "set": sets}), "auto", seed
    )
    base = error(trainer)
    losses = [record.read()["loss"] for record in train_steps(trainer)]
    row = {
        "dtype": dtype,
        "seed": seed,
        "base": base,
        "trained": error(trainer),
        "loss": statistics.fmean(losses[-25:]),
    }
    trainer.journal.close()
    print(row, flush=True)
    return row


def show(result: Mapping[str, Any]) -> None:
    """Print both tables: means over the seeds."""
    print("| layers | dtype | backward | loss | gradient | 1 - cosine |")
    for kind, dtype, backward in itertools.product(KINDS, DTYPES, (True, False)):
        rows = [
            row
            for row in result["layers"]
            if (row["layers"], row["dtype"], row["backward"]) == (kind, dtype, backward)
        ]
        if rows:
            loss = max(abs(row["loss"]) for row in rows)
            gradient = statistics.fmean(row["gradient_error"] for row in rows)
            angle = statistics.fmean(row["one_less_cosine"] for row in rows)
            print(
                f"| {kind} | {dtype} | {backward} | {loss:.2%} | {gradient:.2%} | {angle:.5f} |"
            )

    plain = {row["seed"]: row for row in result["runs"] if row["dtype"] == "auto"}
    for dtype in ("auto", *DTYPES):
        for name in ("base", "trained"):
            ratios = [
                row[name] / plain[row["seed"]][name] - 1
                for row in result["runs"]
                if row["dtype"] == dtype
            ]
            spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
            mean = statistics.fmean(ratios) if ratios else 0.0
            print(f"{dtype} {name}: {mean:+.2%} ± {spread:.2%} ({len(ratios)} seeds)")


def main() -> None:
    """Do what is missing, each row written as soon as it is known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--work", type=Path, default=Path("runs/matmul8"))
    parser.add_argument("--out", type=Path, default=Path("research/matmul8.json"))
    told = parser.parse_args()
    told.set = []
    if not (told.work / "clips").is_dir():
        write_dataset(told.work / "clips", trigger=TRIGGER)
    result = {"steps": told.steps, "batches": told.batches, "layers": [], "runs": []}
    if told.out.is_file():
        result = read_json(told.out)

    for seed in told.seeds[:2]:
        if all(row["seed"] != seed for row in result["layers"]):
            result["layers"] += layer_rows(told, seed)
            write_json(told.out, result)
    done = {(row["dtype"], row["seed"]) for row in result["runs"]}
    for seed, dtype in itertools.product(told.seeds, ("auto", *DTYPES)):
        if (dtype, seed) not in done:
            result["runs"].append(training_row(told, dtype, seed))
            write_json(told.out, result)
    show(result)


if __name__ == "__main__":
    main()
