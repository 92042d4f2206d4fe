"""A network that has no memory for one of its forward passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from videotune.trainer import loop
from videotune.trainer.trainer import Trainer

OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 8 GiB"
)


@contextmanager
def fail_forward(number: int, error: BaseException = OUT_OF_MEMORY) -> Iterator[None]:
    """The number-th forward pass of the network in training raises it, as a device that
    is too small does.
    """
    make, passes = loop.train_steps, []

    def with_hook(trainer: Trainer) -> Any:
        def hook(module: Any, given: Any) -> None:
            passes.append(1)
            if len(passes) == number:
                raise error

        trainer.net.register_forward_pre_hook(hook)
        return make(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_steps", with_hook)
        yield
