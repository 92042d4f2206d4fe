"""LoRA and its kin (``adapters/kinds.py``), injected into the diffusers model by PEFT.

The adapter is part of the model, never a wrapper around it: one object trains, is sampled and is saved.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from videotune.adapters.adapter_types import ZERO, parse_param_name, peft_config
from videotune.adapters.layers import is_named, named_by
from videotune.config.schema import Lora, LoraModules
from videotune.errors import VideotuneError
from videotune.rng import generator_for
from videotune.types import ModelSpec

ADAPTER = "default"


def matching(net: nn.Module, spec: ModelSpec, targets: str | Sequence[str]) -> list[str]:
    """Paths of the Linear modules inside the family's blocks that the targets name, in the model's order.

    ``targets`` is a named set of the family, or patterns: a whole path as a regular expression, or its last parts.
    Raises VideotuneError where a pattern matches nothing.
    """
    patterns = spec.lora_targets[targets] if isinstance(targets, str) else targets
    inside = tuple(f"{blocks}." for blocks in spec.blocks)
    paths = [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(inside)
    ]
    found = named_by(paths, patterns, "lora.targets", "Linear module of the blocks")
    return [path for path in paths if path in found]


def inject(net: nn.Module, spec: ModelSpec, settings: Lora) -> dict[str, nn.Parameter]:
    """Put the adapter's modules into the network; its parameters by name, with whatever PEFT fills them with.

    Raises VideotuneError where rotations of ``rank`` inputs do not cover a module's.
    """
    paths = matching(net, spec, settings.targets)
    named_by(
        paths,
        [rule.pattern for rule in settings.modules],
        "lora.modules",
        "module of lora.targets",
    )
    if settings.variant == "OFT":
        refuse_uneven(net, paths, settings.rank)
    config = peft_config(
        settings.variant, settings.rank, settings.scale, settings.dropout, paths
    )
    own = {
        f"^{re.escape(path)}": of_module(settings, path)
        for path in paths
        if rule_of(settings, path)
    }
    if own:
        config.rank_pattern = {name: one.rank for name, one in own.items()}
        config.alpha_pattern = {name: one.scale * one.rank for name, one in own.items()}
    net.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    if settings.variant == "LORA":
        multiply_in_input_dtype(net, paths)
    return lora_parameters(net)


def rule_of(settings: Lora, path: str) -> LoraModules | None:
    """The first of ``lora.modules`` that names a module; None: none does."""
    return next((rule for rule in settings.modules if is_named(path, rule.pattern)), None)


def of_module(settings: Lora, path: str) -> Lora:
    """The settings of a module, with its own rank and alpha where a rule gives them."""
    rule = rule_of(settings, path)
    given = rule.model_dump(include={"rank", "alpha"}, exclude_none=True) if rule else {}
    return settings.model_copy(update=given)


def in_one_scale(state: Mapping[str, Tensor], settings: Lora) -> dict[str, Tensor]:
    """An adapter's tensors with B such that every module's update is ``settings.scale`` B A; names may begin otherwise."""
    out = dict(state)
    for name, value in state.items():
        place = parse_param_name(name)
        if (
            place
            and place[1] in ZERO
            and (own := of_module(settings, place[0]).scale) != settings.scale
        ):
            out[name] = value.float() * (own / settings.scale)
    return out


class LinearInInputDtype(nn.Linear):
    """A float32 linear layer whose product is in its input's dtype; its gradient is float32."""

    def forward(self, input: Tensor) -> Tensor:
        """Rounds the weight (out, in) to the dtype of the input (…, in)."""
        return nn.functional.linear(input, self.weight.to(input.dtype))


def multiply_in_input_dtype(net: nn.Module, paths: Sequence[str]) -> None:
    """Multiply by LoRA's factors in the network's dtype, where PEFT makes float32 copies of each layer's activations."""
    for path in paths:
        layer: Any = net.get_submodule(path)
        layer.cast_input_dtype_enabled = False
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.__class__ = LinearInInputDtype


def refuse_uneven(net: nn.Module, paths: Sequence[str], side: int) -> None:
    """Raise VideotuneError where a module's inputs are not whole rotations: PEFT would take another size by itself."""
    inputs = {path: int(net.get_submodule(path).in_features) for path in paths}  # type: ignore[arg-type]
    for path, count in inputs.items():
        if count % side:
            fits = [
                n
                for n in range(2, min(inputs.values()) + 1)
                if all(many % n == 0 for many in inputs.values())
            ]
            near = sorted(sorted(fits, key=lambda n: abs(n - side))[:4])
            fault = f"OFT turns {side} inputs at a time, and {path} has {count}"
            raise VideotuneError(f"lora.rank: {fault}; take one of {', '.join(map(str, near))}")


def add_lora(
    net: nn.Module, spec: ModelSpec, settings: Lora, seed: int
) -> dict[str, nn.Parameter]:
    """Inject the adapter and return its parameters, float32, by name: ``{module path}.lora_A.weight`` and so on.

    Step 0 is the base model exactly: what ``ZERO`` lists is zero, and DoRA's magnitudes are the norms of the weight's rows.
    Everything else is uniform in ±1/√columns by the counted draw of its name.
    """
    parameters = inject(net, spec, settings)
    for name, parameter in parameters.items():
        place = parse_param_name(name)
        assert place is not None, name
        if place[1] == "lora_magnitude_vector":
            parameter.data = row_norms(net.get_submodule(place[0])).to(parameter.device)
        elif place[1] in ZERO:
            parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
        else:
            bound = parameter.shape[1] ** -0.5
            values = generator_for(seed, "lora", name).uniform(
                -bound, bound, size=tuple(parameter.shape)
            )
            parameter.data = torch.tensor(values, dtype=torch.float32, device=parameter.device)
    return parameters


def row_norms(layer: nn.Module) -> Tensor:
    """The norms (out,) of the base weight's rows in float32, calculated as PEFT's DoRA does: their ratio is 1 exactly."""
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(layer.get_base_layer())  # type: ignore[operator]
    return torch.linalg.norm(weight.detach().to(torch.float32), dim=1)


@contextmanager
def adapter_off(net: nn.Module) -> Iterator[None]:
    """The base model as it predicts: without the adapter and without dropout. After it ``net`` is as it was."""
    training = [(module, module.training) for module in net.modules()]
    trains = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
    net.disable_adapters()  # type: ignore[operator]
    net.eval()
    try:
        yield
    finally:
        net.enable_adapters()  # type: ignore[operator]
        for parameter, before in trains:  # PEFT turns gradients off and on with the adapter
            parameter.requires_grad_(before)
        for module, before in training:
            module.training = before


def places(net: nn.Module, adapter: str = ADAPTER) -> dict[str, tuple[nn.Module, str]]:
    """Where each of an adapter's parameters is held, module and attribute, by its name without PEFT's adapter name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[str, tuple[nn.Module, str]] = {}
    for path, layer in net.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        for part in layer.adapter_layer_names:
            holder = getattr(
                layer, part
            )  # by adapter's name a module with a weight, or the parameter itself
            for name, _ in holder.named_parameters():
                own, _, rest = name.partition(".")
                if own == adapter:
                    key = ".".join(filter(None, (path, part, rest)))
                    found[key] = (holder[own], rest) if rest else (holder, own)
    return found


def lora_parameters(net: nn.Module, adapter: str = ADAPTER) -> dict[str, nn.Parameter]:
    """The adapter's parameters by name, without PEFT's adapter name in it."""
    return {
        name: getattr(module, last) for name, (module, last) in places(net, adapter).items()
    }


def bind_parameters(net: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Put these parameters in the place of the network's own of their names; an adapter's without its adapter's name.

    Whatever updates them then updates the network, as if it had been there from the beginning.
    """
    held = places(net)
    for name, parameter in parameters.items():
        path, _, own = name.rpartition(".")
        module, last = held[name] if name in held else (net.get_submodule(path), own)
        assert getattr(module, last).shape == parameter.shape, name
        setattr(module, last, parameter)
