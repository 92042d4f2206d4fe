"""The fastest function that computes attention: ``attention: auto``."""

import time

import torch

from videotune.console import echo
from videotune.latent_cache.batches import prepare
from videotune.memory.accelerator import local_device, overlaps
from videotune.memory.attention import set_attention, switchable
from videotune.trainer.step import Clock, StepSettings, accumulate_gradients
from videotune.trainer.trainer import Trainer

TRIED = ("native", "_native_cudnn", "_native_flash", "flash", "_flash_3")
"""What ``auto`` measures, as far as it is installed; the sparse and the rounding ones compute something else."""

SHORT = 200
"""Steps of a run that is too short for a measurement, which takes up to ten passes."""


def choose_attention(trainer: Trainer, settings: StepSettings) -> None:
    """On a GPU ``attention: auto`` becomes the fastest one at the next step's batch, told in a line; nothing is learnt."""
    config = trainer.job.config
    net = trainer.net
    trainable = trainer.pool.trainable
    left = trainer.job.steps - trainer.first + 1
    if (
        config.attention != "auto"
        or not overlaps(local_device())
        or left < SHORT
        or not switchable(net)
    ):
        return
    # all processes need the same one, and where updates come with gradients a backward pass would be one
    if (
        trainer.dist.size > 1
        or config.deterministic
        or trainable.backward_optimizer is not None
    ):
        return
    found: dict[str, float] = {}
    for name in TRIED:
        try:
            set_attention(net, name)
            found[name] = min(
                _seconds(trainer, settings) for _ in range(2)
            )  # the first one may set kernels up
        except (
            RuntimeError,
            ValueError,
        ) as error:  # not installed, or it has no kernel for this model's masks
            echo(f"attention: {name} is not taken: {str(error).splitlines()[0][:100]}")
        finally:
            trainable.optimizer.zero_grad(set_to_none=True)
    best = min(found, key=lambda name: found[name]) if found else "native"
    echo(
        f"attention: {best} ({', '.join(f'{name} {seconds:.3g} s' for name, seconds in found.items())} a step)"
    )
    trainer.pool.attention = best
    set_attention(net, best)


def _seconds(trainer: Trainer, settings: StepSettings) -> float:
    """Seconds of the next step's passes; their gradients are left."""
    prepared = prepare(trainer.source, trainer.first)
    net = trainer.net
    device = next(net.parameters()).device
    net.train()
    values = torch.zeros(2 + len(prepared.window_ids), device=device)
    torch.accelerator.synchronize()
    begun = time.perf_counter()
    with torch.compiler.set_stance(
        "force_eager"
    ):  # none but the one that is taken is worth compiling
        accumulate_gradients(
            settings, net, trainer.pool.trainable, prepared, Clock(device), values
        )
    torch.accelerator.synchronize()
    return time.perf_counter() - begun
