"""The state of optimizers as flat tensors by name, and back, bit for bit.

A checkpoint holds tensors only, so a value of another type becomes a tensor, and a mark
in its name says what it was. ``w`` is the name of a parameter:

    w.exp_avg             a tensor of the parameter's state
    w.step#               an int, as int64
    w.lr~                 a float, as float64
    w.is_first?           a bool
    w.step&               a tensor () on the host, of a parameter on a device
    w.history%            a list, dict or text: its description in JSON, as bytes
    w.history%0 …         the tensors in it
    w.@d~                 the float ``d`` of the parameter group whose first parameter is w
    w.@@step#             the int ``step`` that the optimizer of w keeps for no parameter

Values of groups and shared ones have the type suffixes, too. Checkpoints depend on these
marks, so they never change.
"""

import json
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from videotune.adapters.layers import Parameters
from videotune.trainer.optimizers import AnyOptimizer, ClassOptimizers, parts_of

GROUP_PREFIX = "@"
"""Begins the key of a value of a parameter group."""

SHARED_PREFIX = "@@"
"""Begins the key of a value that belongs to no parameter."""

INT_SUFFIX = "#"
FLOAT_SUFFIX = "~"
BOOL_SUFFIX = "?"
"""End the key of a plain number, by its type."""

HOST_SUFFIX = "&"
"""Ends the key of a tensor () that is on the host although its parameter is not, such as
torch's step.
"""

NESTED_SUFFIX = "%"
"""Ends the key of a list, dict or text."""

TYPE_SUFFIXES = INT_SUFFIX + FLOAT_SUFFIX + BOOL_SUFFIX + HOST_SUFFIX

UPDATED_GROUP_KEYS = frozenset(
    ("d", "d_max", "d_numerator", "d_denom", "d_hat", "k", "lr_max", "weight_sum")
)
"""Values of a parameter group that updates change: Prodigy's estimate of the distance,
the sum of weights of schedule-free AdamW.
"""

SET_BY_RUN = frozenset(("params", "name", "lr"))
"""Keys of a group that the run sets."""

MOST_NESTED = 1 << 20
"""Bytes of the description of a nested value, at most."""


def optimizer_state(optimizer: AnyOptimizer, names: Parameters) -> dict[str, Tensor]:
    """Return the optimizer's state as flat tensors by name (see the module).

    Of its parameter groups only values that updates change are kept
    (``UPDATED_GROUP_KEYS``), since the config sets the others. An optimizer that a config
    names by its class may change any of them, so all are kept, and also what it keeps for
    no parameter.

    Raises:
        ValueError: if a value has any other type.
    """
    states: dict[int, dict[str, Any]] = {}
    for part in parts_of(optimizer):
        for owner, state in part.state.items():
            if isinstance(owner, Tensor):
                states[id(owner)] = state

    is_of_class = isinstance(optimizer, ClassOptimizers)
    flat: dict[str, Tensor] = {}
    for name, parameter in names.items():
        state_of_parameter = states.get(id(parameter), {})
        for key, value in state_of_parameter.items():
            stays_on_host = is_of_class and _stays_on_host(value, parameter)
            host_suffix = HOST_SUFFIX if stays_on_host else ""
            flat |= _flat(f"{name}.{key}{host_suffix}", value)

    names_by_id = {id(parameter): name for name, parameter in names.items()}
    if isinstance(optimizer, ClassOptimizers):
        return flat | _state_of_groups(optimizer, names_by_id)

    for group in optimizer.param_groups:
        first_parameter = group["params"][0]
        first = names_by_id.get(id(first_parameter))
        # Optimizers with such values count their updates in "k".
        has_been_updated = bool(group.get("k"))
        if first is not None and has_been_updated:
            for key in sorted(UPDATED_GROUP_KEYS & set(group)):
                flat |= _flat(f"{first}.{GROUP_PREFIX}{key}", group[key])
    return flat


def names_with_state(flat: Iterable[str]) -> set[str]:
    """Return the parameters that have a state of their own in flat tensors."""
    names = set()
    for full_key in flat:
        name, _, key = full_key.rpartition(".")
        if not key.startswith(GROUP_PREFIX):
            names.add(name)
    return names


def _stays_on_host(value: Any, parameter: Tensor) -> bool:
    if parameter.device.type == "cpu":
        return False
    is_on_host = isinstance(value, Tensor) and value.device.type == "cpu"
    return is_on_host and value.ndim == 0


def _state_of_groups(
    optimizer: ClassOptimizers, names_by_id: Mapping[int, str]
) -> dict[str, Tensor]:
    """Return the values of parameter groups, and what optimizers keep for no parameter."""
    flat: dict[str, Tensor] = {}
    for part in optimizer.parts:
        # What belongs to no parameter is kept under the name of the first one.
        first_parameter = part.param_groups[0]["params"][0]
        first = names_by_id.get(id(first_parameter))
        if first is None:
            continue

        for group in part.param_groups:
            owner_parameter = group["params"][0]
            owner = names_by_id[id(owner_parameter)]
            own_keys = set(group) - SET_BY_RUN
            for key in sorted(own_keys):
                if _can_change(group[key]):
                    flat |= _flat(f"{owner}.{GROUP_PREFIX}{key}", group[key])

        for owner_or_key, state in part.state.items():
            if not isinstance(owner_or_key, Tensor):
                flat |= _flat(f"{first}.{SHARED_PREFIX}{owner_or_key}", state)
    return flat


def _can_change(value: Any) -> bool:
    """Return whether a value of a group may be one that updates change."""
    return isinstance(value, int | float | Tensor | list | deque | dict)


def _flat(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ValueError(f"optimizer state {name} is sparse: it cannot be saved")
        return {name: value}

    if isinstance(value, bool):
        return {f"{name}{BOOL_SUFFIX}": torch.tensor(value)}
    if isinstance(value, int):
        return {f"{name}{INT_SUFFIX}": torch.tensor(value, dtype=torch.int64)}
    if isinstance(value, float):
        return {f"{name}{FLOAT_SUFFIX}": torch.tensor(value, dtype=torch.float64)}

    if value is None or isinstance(value, str | list | tuple | dict | deque):
        return _flat_nested(name, value)
    raise ValueError(
        f"optimizer state {name} is a {type(value).__name__}: it cannot be saved exactly"
    )


def _flat_nested(name: str, value: Any) -> dict[str, Tensor]:
    """Return a nested value as the bytes of its description in JSON, and its tensors."""
    tensors: list[Tensor] = []
    text = json.dumps(_described(name, value, tensors))
    characters = list(text.encode())
    description = torch.tensor(characters, dtype=torch.uint8)
    flat = {f"{name}{NESTED_SUFFIX}": description}
    for index, tensor in enumerate(tensors):
        flat[f"{name}{NESTED_SUFFIX}{index}"] = tensor
    return flat


def _described(name: str, value: Any, tensors: list[Tensor]) -> Any:
    """Return a value as JSON: plain ones as they are, others as [type, content]."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]

    if isinstance(value, dict):
        pairs = []
        for key, inner in value.items():
            described_key = _described(name, key, tensors)
            described_inner = _described(name, inner, tensors)
            pairs.append([described_key, described_inner])
        return ["dict", pairs]

    for kind in (list, tuple, deque):
        if type(value) is kind:
            content = [_described(name, inner, tensors) for inner in value]
            limit = [value.maxlen] if isinstance(value, deque) else []
            return [kind.__name__, content, *limit]
    raise ValueError(
        f"optimizer state {name} holds a {type(value).__name__}: it cannot be saved exactly"
    )


def _nested(described: Any, tensors: Mapping[int, Tensor]) -> Any:
    """Return the value of a description. Raises ValueError if it is not one."""
    match described:
        case None | bool() | int() | str():
            return described
        case ["float", str(text)]:
            return float.fromhex(text)
        case ["tensor", int(index)] if index in tensors:
            return tensors[index]
        case ["list", list(content)]:
            return [_nested(inner, tensors) for inner in content]
        case ["tuple", list(content)]:
            return tuple(_nested(inner, tensors) for inner in content)
        case ["deque", list(content), limit]:
            return deque((_nested(inner, tensors) for inner in content), limit)
        case ["dict", list(pairs)]:
            values = {}
            for key, inner in pairs:
                nested_key = _nested(key, tensors)
                values[nested_key] = _nested(inner, tensors)
            return values
    raise ValueError("a nested value of the optimizer's state is damaged")


def _unflat(key: str, value: Tensor, device: torch.device) -> Any:
    if key.endswith(INT_SUFFIX):
        return int(value)
    if key.endswith(FLOAT_SUFFIX):
        return float(value)
    if key.endswith(BOOL_SUFFIX):
        return bool(value)
    if key.endswith(HOST_SUFFIX):
        return value.cpu()
    return value.to(device)


def _joined(flat: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """Return the values of one parameter by their keys, nested ones put together."""
    values: dict[str, Any] = {}
    tensors: dict[str, dict[int, Tensor]] = {}
    descriptions: dict[str, Tensor] = {}
    for key, tensor in flat.items():
        name, is_nested, index = key.rpartition(NESTED_SUFFIX)
        if is_nested and index:
            tensors.setdefault(name, {})[int(index)] = tensor.to(device)
        elif is_nested:
            descriptions[name] = tensor
        else:
            values[key.rstrip(TYPE_SUFFIXES)] = _unflat(key, tensor, device)

    for name, tensor in descriptions.items():
        if tensor.numel() > MOST_NESTED:
            raise ValueError(f"optimizer state {name} is described at great length")
        try:
            text = bytes(tensor.cpu().tolist())
            described = json.loads(text)
            values[name] = _nested(described, tensors.get(name, {}))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"optimizer state {name} is damaged") from error
    return values


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
            parameters = group["params"]
            groups[id(parameters[0])] = group
            for parameter in parameters:
                owners[id(parameter)] = part

    flat_of: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for full_key, tensor in state.items():
        name, _, key = full_key.rpartition(".")
        if name not in flat_of:
            raise ValueError(f"optimizer state of no parameter: {full_key}")
        flat_of[name][key] = tensor

    for name, parameter in names.items():
        values: dict[str, Any] = {}
        joined = _joined(flat_of[name], parameter.device)
        for key, value in joined.items():
            # The prefix of shared values begins with that of groups, so it comes first.
            if key.startswith(SHARED_PREFIX):
                shared: dict[Any, Any] = owners[id(parameter)].state
                shared[key.removeprefix(SHARED_PREFIX)] = value
            elif key.startswith(GROUP_PREFIX):
                groups[id(parameter)][key.removeprefix(GROUP_PREFIX)] = value
            else:
                values[key] = value

        # ``without`` is saved apart, so that a missing state is not taken for a new one.
        if not values and name not in without:
            raise ValueError(f"no optimizer state for {name}")
        if values and name in without:
            raise ValueError(f"optimizer state for {name}, which had none")
        if values:
            owner = owners[id(parameter)]
            owner.state[parameter] = _paged(owner, parameter, values)


def _paged(
    owner: Any, parameter: nn.Parameter, state: dict[str, Any]
) -> dict[str, Any]:
    """Return the same state, with what a paging optimizer pages in its unified memory
    again.
    """
    if not getattr(owner, "is_paged", False):
        return state
    for key in {"state1", "state2"} & set(state):
        if state[key].shape != parameter.shape:
            continue  # AdEMAMix keeps two means in one tensor, which is not paged again
        buffer = owner.get_state_buffer(parameter, dtype=state[key].dtype)
        state[key] = buffer.copy_(state[key])
    return state
