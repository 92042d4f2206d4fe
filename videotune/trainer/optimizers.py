"""Optimizers from libraries: built, stepped and clipped as one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from videotune.config.optimizer_classes import is_class
from videotune.config.optimizers import Optimizer, kind_of

FALLBACK_RATE = 1e-3
"""The rate with which a class is built where none is given."""


class OptimizerList:
    """Optimizers that step as one. Each parameter belongs to one of them."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts.

        They are the parts' own, so a rate that is set in one takes effect.
        """
        groups = []
        for part in self.parts:
            groups += part.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)


class ClassOptimizers(OptimizerList):
    """Optimizers of a class that the config names, one a group or a parameter.

    A checkpoint keeps every number of their ``param_groups``. Of videotune's own optimizers
    it keeps only those that updates change (``optimizer_state.UPDATED_GROUP_KEYS``).
    """


AnyOptimizer = torch.optim.Optimizer | OptimizerList


def parts_of(optimizer: AnyOptimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the library's own optimizers that an optimizer consists of."""
    return optimizer.parts if isinstance(optimizer, OptimizerList) else (optimizer,)


def make_optimizer(
    groups: Mapping[str, Sequence[nn.Parameter]],
    settings: Optimizer,
    *,
    one_per_parameter: bool = False,
    rates: Mapping[str, float] | None = None,
) -> AnyOptimizer:
    """Build the optimizer that the settings name (``config/optimizers.py``).

    Args:
        groups: parameters by group; each becomes a parameter group with that name.
        settings: the optimizer's settings.
        one_per_parameter: give each parameter an optimizer of its own, so that it can be updated
            separately.
        rates: the peak rate of each group, for a class that reads it when it is built.

    Raises:
        VideotuneError: if the optimizer does not support the device, or refuses its
            arguments.
    """
    build = kind_of(settings.name).build
    param_groups: list[dict[str, Any]] = [
        {"params": list(parameters), "name": name}
        for name, parameters in groups.items()
    ]
    if is_class(settings.name):
        # Some classes read the rate when they are built. Steps set it anew for all.
        for group in param_groups:
            group["lr"] = (rates or {}).get(group["name"], FALLBACK_RATE)
    if one_per_parameter:
        param_groups = _one_group_per_parameter(param_groups)

    if is_class(settings.name):
        return ClassOptimizers(build(param_groups, settings))
    if one_per_parameter:
        single_parts: list[torch.optim.Optimizer] = []
        for group in param_groups:
            single_parts += build([group], settings)
        return OptimizerList(single_parts)
    parts = build(param_groups, settings)
    return parts[0] if len(parts) == 1 else OptimizerList(parts)


def _one_group_per_parameter(
    param_groups: Iterable[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return a group for each parameter."""
    singles = []
    for group in param_groups:
        for parameter in group["params"]:
            singles.append(group | {"params": [parameter]})
    return singles


def step_if_finite(optimizer: AnyOptimizer, grads_finite: Tensor) -> None:
    """Take the step if ``grads_finite`` () is true; if not, weights and moments stay as
    they are.

    A fused kernel reads ``grads_finite`` on the device, except on MPS. For other kernels, and
    for parameters on the host beside a device, the host waits for the answer once a step.
    """
    unfused = []
    for part in parts_of(optimizer):
        is_fused = _skips_on_device(part) and grads_finite.device.type != "mps"
        if is_fused and _is_on(grads_finite.device, part):
            part.found_inf = (~grads_finite).float()  # type: ignore[attr-defined]
            part.step()
        else:
            unfused.append(part)

    if unfused and bool(grads_finite):
        for part in unfused:
            part.step()


def _skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's kernel reads ``found_inf`` on the device and skips the
    step by itself.
    """
    is_fused = bool(optimizer.defaults.get("fused"))
    return is_fused and getattr(optimizer, "_step_supports_amp_scaling", False)


def _is_on(device: torch.device, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all parameters of an optimizer are on a device."""
    for group in optimizer.param_groups:
        if any(parameter.device != device for parameter in group["params"]):
            return False
    return True


def clip_grad_norm(
    parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor | None = None
) -> Tensor:
    """Scale the gradient down to ``max_norm`` if it is longer, and return its norm
    before that, a float32 scalar.

    On a CPU a gradient that is short enough is not touched. On a device the host does
    not look, so it is scaled by 1.

    Args:
        parameters: whose gradients are clipped together.
        max_norm: the norm to clip to.
        norm: the norm of the gradient, if it is known.
    """
    if norm is None:
        norm = norm_of(parameters)
    device = norm.device
    if device.type == "cpu" and not isinstance(norm, FakeTensor):
        is_too_long = bool(norm > max_norm)  # False if the norm is not a number
        if not is_too_long:
            return norm

    with_norm = [parameter for parameter in parameters if parameter.device == device]
    nn.utils.clip_grads_with_norm_(with_norm, max_norm, norm)

    # If parameters are on several devices, the norm is on the host.
    on_other_devices = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.device != device:
            on_other_devices.append(parameter.grad)
    if on_other_devices:
        # Here norm > max_norm: a shorter one on the host has returned above.
        torch._foreach_mul_(on_other_devices, (max_norm / (norm + 1e-6)).item())
    return norm


def norm_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients that exist, a float32 scalar.

    It is on their device, or on the host if some of them are there. Then the host waits
    once, for the norm of those on the device.
    """
    gradients: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.setdefault(parameter.device, []).append(parameter.grad)
    if not gradients:
        return torch.zeros((), device=parameters[0].device if parameters else None)

    norms = [_norm(on_one_device) for on_one_device in gradients.values()]
    if len(norms) == 1:
        return norms[0]
    return torch.stack([norm.cpu() for norm in norms]).norm()


def _norm(gradients: list[Tensor]) -> Tensor:
    if all(gradient.dtype != torch.bfloat16 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    # A norm that is summed in bf16 is a few percent off.
    return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).norm()
