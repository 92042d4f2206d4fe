"""Optimizers from libraries: built, stepped and clipped as one."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from videotune.adapters.layers import Parameters
from videotune.config.optimizers import OPTIMIZERS, Optimizer


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


AnyOptimizer = torch.optim.Optimizer | OptimizerList


def parts_of(optimizer: AnyOptimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the library's own optimizers that an optimizer consists of."""
    return optimizer.parts if isinstance(optimizer, OptimizerList) else (optimizer,)


def make_optimizer(
    groups: Mapping[str, Sequence[nn.Parameter]],
    settings: Optimizer,
    *,
    apart: bool = False,
) -> AnyOptimizer:
    """Build the optimizer that the settings name (``config/optimizers.py``).

    Args:
        groups: parameters by group; each becomes a parameter group with that name.
        settings: the optimizer's settings.
        apart: give each parameter an optimizer of its own, so that it can be updated
            separately.

    Raises:
        VideotuneError: if the optimizer does not support the device.
    """
    build = OPTIMIZERS[settings.name].build
    param_groups: list[dict[str, Any]] = [
        {"params": list(parameters), "name": name}
        for name, parameters in groups.items()
    ]
    if not apart:
        parts = build(param_groups, settings)
        return parts[0] if len(parts) == 1 else OptimizerList(parts)

    single_parts: list[torch.optim.Optimizer] = []
    for group in param_groups:
        for parameter in group["params"]:
            single_parts += build([group | {"params": [parameter]}], settings)
    return OptimizerList(single_parts)


def step_if_finite(optimizer: AnyOptimizer, grads_finite: Tensor) -> None:
    """Take the step if ``grads_finite`` () is true; if not, weights and moments stay as
    they are.

    A fused kernel reads ``grads_finite`` on the device (that of MPS does not). For others, and for
    parameters on the host beside a device, the host waits for the answer once a step.
    """
    unfused = []
    for part in parts_of(optimizer):
        is_fused = part.defaults.get("fused") and grads_finite.device.type != "mps"
        if is_fused and _is_on(grads_finite.device, part):
            part.found_inf = (~grads_finite).float()  # type: ignore[attr-defined]
            part.step()
        else:
            unfused.append(part)

    if unfused and bool(grads_finite):
        for part in unfused:
            part.step()


def _is_on(device: torch.device, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all parameters of an optimizer are on a device."""
    for group in optimizer.param_groups:
        if any(parameter.device != device for parameter in group["params"]):
            return False
    return True


def clip_grad_norm(
    parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor | None = None
) -> Tensor:
    """Scale the gradient down to ``max_norm`` if it is longer, and return its norm ()
    before that, float32.

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

    beside_norm = [parameter for parameter in parameters if parameter.device == device]
    nn.utils.clip_grads_with_norm_(beside_norm, max_norm, norm)
    # The norm is on the host if parameters are on several devices; there it is known
    # to be too long by now, so the factor is below 1.
    elsewhere = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.device != device:
            elsewhere.append(parameter.grad)
    if elsewhere:
        torch._foreach_mul_(elsewhere, (max_norm / (norm + 1e-6)).item())
    return norm


def norm_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm () of the gradients that exist, float32.

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
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).norm()


GROUP = "@"
"""Prefix of the last part of a saved name if the value belongs to a parameter group,
which its first parameter names.
"""

COUNTED = frozenset(
    ("d", "d_max", "d_numerator", "d_denom", "d_hat", "k", "lr_max", "weight_sum")
)
"""What optimizers count in their groups: Prodigy its estimate of the distance,
schedule-free AdamW its weights' sum.
"""


def optimizer_state(optimizer: AnyOptimizer, names: Parameters) -> dict[str, Tensor]:
    """Return the optimizer's state as flat tensors ``{parameter}.{key}``.

    An int becomes ``{key}#``, int64, and a float ``{key}~``, float64. Of a group's own
    numbers those that updates change (``COUNTED``) are kept as ``{its first
    parameter}.@{key}``. Raises ValueError for any other type.
    """
    states: dict[int, dict[str, Any]] = {}
    for part in parts_of(optimizer):
        states.update((id(parameter), state) for parameter, state in part.state.items())

    flat: dict[str, Tensor] = {}
    for name, parameter in names.items():
        for key, value in states.get(id(parameter), {}).items():
            flat |= _flat(f"{name}.{key}", value)

    names_by_id = {id(parameter): name for name, parameter in names.items()}
    for group in optimizer.param_groups:
        first = names_by_id.get(id(group["params"][0]))
        has_been_updated = bool(group.get("k"))
        if first is not None and has_been_updated:
            for key in sorted(COUNTED & set(group)):
                flat |= _flat(f"{first}.{GROUP}{key}", group[key])
    return flat


def _flat(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, int):
        return {f"{name}#": torch.tensor(value, dtype=torch.int64)}
    if isinstance(value, float):
        return {f"{name}~": torch.tensor(value, dtype=torch.float64)}
    raise ValueError(
        f"optimizer state {name} is a {type(value).__name__}: it cannot be saved exactly"
    )


def _unflat(key: str, value: Tensor, device: torch.device) -> int | float | Tensor:
    if key.endswith("#"):
        return int(value)
    if key.endswith("~"):
        return float(value)
    return value.to(device)


def load_optimizer_state(
    optimizer: AnyOptimizer,
    names: Parameters,
    state: Mapping[str, Tensor],
    without: Collection[str] = (),
) -> None:
    """Restore an optimizer's state bit for bit, on each parameter's device.

    Args:
        optimizer: a new optimizer over the same parameters.
        names: the parameters by name.
        state: what ``optimizer_state`` returned.
        without: the parameters that had no state.

    Raises:
        ValueError: if another parameter has no state, or a state has no parameter.
    """
    groups: dict[int, dict[str, Any]] = {}
    owners: dict[int, torch.optim.Optimizer] = {}
    for part in parts_of(optimizer):
        for group in part.param_groups:
            groups[id(group["params"][0])] = group
            owners.update((id(parameter), part) for parameter in group["params"])

    state_of: dict[str, dict[str, Any]] = {name: {} for name in names}
    for full_key, tensor in state.items():
        name, _, key = full_key.rpartition(".")
        if name not in state_of:
            raise ValueError(f"optimizer state of no parameter: {full_key}")
        value = _unflat(key, tensor, names[name].device)
        if key.startswith(GROUP):
            groups[id(names[name])][key.strip(f"{GROUP}#~")] = value
        else:
            state_of[name][key.rstrip("#~")] = value

    for name, parameter in names.items():
        if not state_of[name] and name not in without:
            raise ValueError(f"no optimizer state for {name}")
        if state_of[name] and name in without:
            raise ValueError(f"optimizer state for {name}, which had none")
        if state_of[name]:
            owner = owners[id(parameter)]
            owner.state[parameter] = _paged(owner, parameter, state_of[name])


def _paged(
    owner: Any, parameter: nn.Parameter, state: dict[str, Any]
) -> dict[str, Any]:
    """Return the same state, with what a paging optimizer pages in its unified memory
    again.
    """
    if not getattr(owner, "is_paged", False):
        return state
    for key in {"state1", "state2"} & set(state):
        buffer = owner.get_state_buffer(parameter, dtype=state[key].dtype)
        state[key] = buffer.copy_(state[key])
    return state
