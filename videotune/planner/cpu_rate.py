"""How fast this machine's CPU computes, to plan a run without a GPU."""

import time

import torch

from videotune.planner.gpus import Card

SIDE = 512
"""Rows and columns of the matrices that are multiplied."""

TRIES = 8
"""Products; the fastest one counts, since other programs slow some of them."""


def measured_cpu() -> Card:
    """Return this machine's CPU as a card, with the rate of a matrix product in float32,
    measured in some milliseconds.
    """
    matrix = torch.ones(SIDE, SIDE)
    best = float("inf")
    for _ in range(TRIES):
        begun = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - begun)

    # Nothing waits on a host: the rate of the link is never used.
    return Card("this CPU", 0, flops=2 * SIDE**3 / best, link=1e10)
