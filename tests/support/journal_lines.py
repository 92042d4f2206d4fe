"""Lines as a training writes them into its journal."""

from typing import Any


def step_line(step: int, **changed: Any) -> dict[str, Any]:
    """A step's line."""
    line = {
        "kind": "step",
        "step": step,
        "loss": 1.0,
        "mse": 1.0,
        "by_t": [None] * 9,
        "lr": {"lora": 1e-3},
    }
    more = {
        "grad_norm": 0.5,
        "window_ids": ["a@0+1x2x2"],
        "captions": [0],
        "seconds": {"forward": 0.25},
    }
    return line | more | changed
