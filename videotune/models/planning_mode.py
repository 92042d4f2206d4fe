"""Run code on fake tensors that asks for their values."""

from functools import cache
from typing import Any

from videotune.lazy import torch


def select_all() -> Any:
    """Return a mode under which a mask of fake tensors selects everything.

    Within it the inverse of a mask selects nothing, and a fake number is false. So both
    halves of what a mask divides have together the size that they have in a real run.
    """
    return _mode_class()()


@cache
def _mode_class() -> Any:
    """Return the class, which can only be defined once torch is imported."""
    from torch._subclasses.fake_tensor import FakeTensor  # imports torch

    class SelectAll(torch.overrides.TorchFunctionMode):
        """Answer what depends on the values of fake tensors."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            is_fake = bool(args) and isinstance(args[0], FakeTensor)
            if is_fake and func is torch.Tensor.__bool__:
                return False
            if is_fake and func is torch.Tensor.__getitem__ and _is_mask(args[1]):
                selects_nothing = getattr(args[1], "selects_nothing", False)
                return args[0][:0] if selects_nothing else args[0][:]
            result = func(*args, **(kwargs or {}))
            if is_fake and func is torch.Tensor.__invert__:
                result.selects_nothing = True
            return result

    return SelectAll


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool
