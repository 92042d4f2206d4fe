"""Read LoRA files whose names are not in our table by diffusers' converters."""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile, not_a_lora
from videotune.exporter.read_scale import flat_name, paths_by_name, read_scale
from videotune.models.base import DiffusersModel
from videotune.models.model_files import note, some

State = Mapping[str, Tensor]

_PEFT_BIAS = re.compile(r"(.+)\.(?:lora_B|lora_up)(?:\.\w+)??\.bias")
"""The bias of a B, which PEFT multiplies by alpha / rank, as it does B.

A whole bias (``diff_b``) is added as it is.
"""


def convert_with_diffusers(
    family: DiffusersModel,
    net: nn.Module,
    file: AdapterFile,
    modules: Mapping[str, dict[str, Tensor]],
    other_tensors: State,
) -> dict[str, Tensor]:
    """Convert a file that has biases, or modules that our table lacks.

    Prints a warning that names the tensors that no converter takes.

    Args:
        family: the family of the base model.
        net: its transformer.
        file: the file.
        modules: the tensors of each module, alpha included.
        other_tensors: the tensors that are not an adapter's factors.

    Raises:
        VideotuneError: if the file is not a LoRA that diffusers reads.
    """
    unreadable = not_a_lora(
        family,
        file.path,
        list(file.tensors),
        "it has modules or tensors that are not read",
    )
    state = _scaled_state(family, net, file, modules, other_tensors, unreadable)
    for key in state:
        if "alpha" in key or "dora_scale" in key or key.startswith("text_encoder"):
            raise unreadable

    # Each converter refuses a file with another kind of error.
    converter_errors = (IndexError, KeyError, RuntimeError, TypeError, ValueError)
    try:
        converted: dict[str, Tensor] = family.lora_reader().lora_state_dict(dict(state))
        lost = lost_tensors(family.lora_reader().lora_state_dict, state)
    except converter_errors as error:
        raise unreadable from error

    model_paths = {path for path, _ in net.named_modules()} - {""}
    converted_paths = {
        key.removeprefix("transformer.").rpartition(".lora_")[0] for key in converted
    }
    unknown_paths = converted_paths - model_paths
    if unknown_paths:
        raise unreadable
    if lost:
        note(
            f"warning: {file.path.name}: {len(lost)} of {len(file.tensors)} tensors are left"
            f" out, because diffusers has no layer for them: {some(lost)}. Programs that"
            " apply them draw something else"
        )
    return converted


def _scaled_state(
    family: DiffusersModel,
    net: nn.Module,
    file: AdapterFile,
    modules: Mapping[str, dict[str, Tensor]],
    other_tensors: State,
    unreadable: VideotuneError,
) -> dict[str, Tensor]:
    """Return the tensors with alpha / rank multiplied into each B and its bias."""
    paths_of = paths_by_name(family, net)
    scales: dict[str, float] = {}
    state: dict[str, Tensor] = {}
    for name, parts in modules.items():
        factors = {part: value for part, value in parts.items() if part != "alpha"}
        if set(factors) != {"lora_A", "lora_B"}:
            raise unreadable
        path = paths_of.get(flat_name(name), (name,))[0]
        scale, _ = read_scale(file, factors, parts.get("alpha"), path)
        scales[name] = scale
        state[f"{name}.lora_A.weight"] = factors["lora_A"]
        state[f"{name}.lora_B.weight"] = factors["lora_B"].float() * scale

    for key, value in other_tensors.items():
        match = _PEFT_BIAS.fullmatch(key)
        if match is None:
            state[key] = value
        elif match[1] in scales:
            state[f"{match[1]}.lora_B.bias"] = value.float() * scales[match[1]]
        else:
            raise unreadable  # a bias without its factors
    return state


def lost_tensors(
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]], state: State
) -> list[str]:
    """Return the tensors that a converter drops, by their names in the file.

    Each tensor is replaced by one that holds only its own number; what is lost is in no
    tensor that comes out.
    """
    numbered = {}
    for number, (key, value) in enumerate(state.items(), start=1):
        numbered[key] = torch.tensor(float(number)).expand(value.shape)

    numbers: set[float] = set()
    for value in convert(numbered).values():
        # Converters join and split tensors by rows or columns.
        table = value.reshape(len(value), -1) if value.ndim else value.reshape(1, 1)
        numbers.update(table[:, 0].tolist(), table[0].tolist())
    return [
        key for number, key in enumerate(state, start=1) if float(number) not in numbers
    ]
