"""What each kind of adapter costs on one layer: forward and backward, as a ratio to the
frozen layer in the same run.

python benchmarks/kinds.py [--tiny]
"""

import sys
import time

import videotune  # noqa: F401  (before bitsandbytes, which it tells not to ask for a package)

# isort: split
import torch
from peft import inject_adapter_in_model
from torch import nn

from videotune.adapters.adapter_types import PARTS, peft_config

WIDTH = 1536
RANK = 16
ROUNDS = 7


class One(nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's answer (tokens, WIDTH)."""
        return self.layer(x)


def seconds(kind: str | None, tokens: int) -> float:
    """The second-best of some rounds, in seconds of this process; the input wants a
    gradient, as inside a network.
    """
    net = One().requires_grad_(False)
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    if kind is not None:
        inject_adapter_in_model(peft_config(kind, RANK, 1.0, 0.0, ["layer"]), net)
    took = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        net(x).sum().backward()
        took.append(time.process_time() - begun)
    return sorted(took)[1]


def main(lengths: tuple[int, ...]) -> None:
    """Print the ratios."""
    torch.set_num_threads(1)
    for tokens in lengths:
        base = seconds(None, tokens)
        ratios = ", ".join(
            f"{kind} {seconds(kind, tokens) / base:.2f}" for kind in PARTS
        )
        print(
            f"{tokens} tokens, {WIDTH} wide, rank {RANK}, frozen layer {base:.3f} s: {ratios}"
        )


if __name__ == "__main__":
    main((64,) if "--tiny" in sys.argv else (1024, 4096))
