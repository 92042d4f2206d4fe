"""Isolated frames: processor time of a forward and backward pass as a share of the
whole attention's, on one CPU thread.

``python benchmarks/frames.py [--tiny]``: a random Wan transformer of width 256 with two
blocks, 256 tokens a latent frame.
"""

import sys
import time

import videotune  # noqa: F401  (before bitsandbytes, which it tells not to ask for a package)

# isort: split
import torch
from diffusers import WanTransformer3DModel

from videotune.models.frame_attention import isolate


def seconds(net: torch.nn.Module, latents: torch.Tensor, text: torch.Tensor) -> float:
    """Processor seconds of one pass forward and back."""
    begun = time.process_time()
    net(latents, torch.tensor([500.0]), text, return_dict=False)[
        0
    ].square().mean().backward()
    net.zero_grad()
    return time.process_time() - begun


def main(lengths: tuple[int, ...] = (5, 13, 21), side: int = 32) -> None:
    """Print a line for each length: the better of two passes each, taken in turn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=64,
        text_dim=64,
        freq_dim=64,
        ffn_dim=1024,
        num_layers=2,
    )
    text = torch.randn(1, 512, 64)
    for frames in lengths:
        latents = torch.randn(1, 16, frames, side, side)
        took = {False: 1e9, True: 1e9}
        for _ in range(2):
            for on in took:
                isolate(
                    net,
                    [block.attn1 for block in net.blocks],
                    on,
                    lambda hidden_states, **_: hidden_states.shape[2],
                )
                took[on] = min(took[on], seconds(net, latents, text))
        isolate(net, [block.attn1 for block in net.blocks], False, lambda **_: 0)
        print(
            f"{frames} latent frames: whole {took[False]:.2f} s, isolated {took[True]:.2f} s, {took[True] / took[False]:.2f}"
        )


if __name__ == "__main__":
    main(*(((2,), 8) if "--tiny" in sys.argv else ()))
