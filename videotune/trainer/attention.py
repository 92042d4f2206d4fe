"""Choose the fastest attention backend: ``attention: auto``."""

import time

import torch

from videotune.console import echo
from videotune.latent_cache.batches import make_step_batch
from videotune.latent_cache.step_batch import StepBatch
from videotune.memory.accelerator import has_streams, local_device
from videotune.memory.attention import set_attention, switchable
from videotune.memory.out_of_memory import is_out_of_memory
from videotune.trainer.gradients import forget_gradients
from videotune.trainer.step import accumulate_gradients
from videotune.trainer.step_context import StepContext
from videotune.trainer.step_record import Clock, empty_values
from videotune.trainer.trainer import Trainer

CANDIDATES = ("native", "_native_cudnn", "_native_flash", "flash", "_flash_3")
"""The backends that ``auto`` measures if they are installed.

Sparse and low-precision backends compute something else.
"""

MIN_STEPS = 200
"""Steps from which a run is long enough for a measurement, which takes the
passes of up to ten steps.
"""


def choose_attention(trainer: Trainer, context: StepContext) -> None:
    """On a GPU, set ``attention: auto`` to the fastest backend for the next step's
    batch, and print it.

    Nothing is learnt while it is measured.
    """
    if not _can_measure(trainer):
        return
    assert context.captured is None, "a graph would keep the first backend"

    net = trainer.net
    trainable = trainer.pool.trainable
    step_batch = make_step_batch(trainer.source, trainer.first_step)
    seconds: dict[str, float] = {}
    for name in CANDIDATES:
        try:
            set_attention(net, name)
            # The first time may include setting kernels up.
            first = _seconds(trainer, context, step_batch)
            seconds[name] = min(first, _seconds(trainer, context, step_batch))
        except (RuntimeError, ValueError) as error:
            # A VideotuneError (it is not installed), or it has no kernel for this model's
            # masks, or no memory.
            reason = str(error).splitlines()[0][:100]
            if is_out_of_memory(error):
                reason = "a step with it does not fit on the device"
            echo(f"attention: {name} is skipped: {reason}")
        finally:
            forget_gradients(trainable)

    best = "native"
    if seconds:
        best = min(seconds, key=lambda name: seconds[name])
        measured = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
        echo(f"attention: {best} ({measured} a step)")
    trainer.pool.attention = best
    set_attention(net, best)


def _can_measure(trainer: Trainer) -> bool:
    """Return whether the backends can be measured, and the run is long enough for it."""
    config = trainer.job.config
    steps_left = trainer.job.steps - trainer.first_step + 1
    if config.attention != "auto" or steps_left < MIN_STEPS:
        return False
    if not has_streams(local_device()) or not switchable(trainer.net):
        return False

    # All processes need the same backend, and with updates during backward a
    # measurement would be an update.
    updates_in_backward = trainer.pool.trainable.backward_optimizer is not None
    return (
        trainer.dist.size == 1 and not config.deterministic and not updates_in_backward
    )


def _seconds(trainer: Trainer, context: StepContext, step_batch: StepBatch) -> float:
    """Return the seconds of a step's passes. The caller clears their gradients."""
    net = trainer.net
    device = trainer.device
    net.train()
    values = empty_values(step_batch, device)

    torch.accelerator.synchronize()
    begun = time.perf_counter()
    # Only the backend that is chosen is worth compiling.
    with torch.compiler.set_stance("force_eager"):
        accumulate_gradients(
            context, net, trainer.pool.trainable, step_batch, Clock(device), values
        )
    torch.accelerator.synchronize()
    return time.perf_counter() - begun
