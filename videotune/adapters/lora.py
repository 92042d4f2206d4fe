"""LoRA and related adapters (``adapter_types.py``), added to the diffusers model by
PEFT.

The adapter is part of the model, not a wrapper: the same object trains, is sampled and
is saved.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from videotune.adapters.adapter_types import ZERO, parse_param_name, peft_config
from videotune.adapters.layers import is_named, named_by
from videotune.config.sections import (
    CONNECTORS,
    Lora,
    LoraModules,
    is_connector_target,
)
from videotune.errors import VideotuneError
from videotune.model_spec import ModelSpec
from videotune.rng import generator_for

ADAPTER = "default"


def matching(
    net: nn.Module, spec: ModelSpec, targets: str | Sequence[str]
) -> list[str]:
    """Return the paths of the Linear modules in the family's blocks that the targets
    name.

    Args:
        net: the denoiser.
        spec: its spec.
        targets: name of a set of the family, or a list of such names and of patterns
            (``layers.is_named``).

    Returns:
        Without those that have no effect in a training step (``idle_targets``).

    Raises:
        VideotuneError: if a pattern matches nothing, or nothing is left.
    """
    paths = _named_targets(net, spec, targets)
    acting = [path for path in paths if not spec.is_idle(path)]
    if not acting:
        raise VideotuneError(
            f"lora.targets: all {len(paths)} modules that are named, such as {paths[0]}, have no effect "
            f"in a step that learns {' and '.join(spec.generates)} (generate). Name others"
        )
    return acting


def idle_targets(
    net: nn.Module, spec: ModelSpec, targets: str | Sequence[str]
) -> list[str]:
    """Return the paths that the targets name and that get no adapter, because they have
    no effect in a training step.
    """
    return [path for path in _named_targets(net, spec, targets) if spec.is_idle(path)]


def _named_targets(
    net: nn.Module, spec: ModelSpec, targets: str | Sequence[str]
) -> list[str]:
    """Return the paths of the Linear modules in the blocks that the targets name.

    Those that begin with "connectors" name modules of the text connectors, all others
    modules of the denoiser.
    """
    listed = [targets] if isinstance(targets, str) else targets
    patterns: list[str] = []
    connector_patterns: list[str] = []
    for target in listed:
        if target == CONNECTORS and spec.connectors is not None:
            connector_patterns += spec.connectors.lora_targets
        elif is_connector_target(target):
            connector_patterns.append(target)
        else:
            patterns += spec.lora_targets.get(target, (target,))

    noun = "Linear module of the blocks"
    matches = named_by(linear_paths(net, spec.blocks), patterns, "lora.targets", noun)
    if connector_patterns:
        assert spec.connectors is not None
        paths = linear_paths(net, spec.connectors.blocks)
        noun = "Linear module of the connectors' blocks"
        matches |= named_by(paths, connector_patterns, "lora.targets", noun)
    return [path for path in linear_paths(net, spec.block_lists) if path in matches]


def linear_paths(net: nn.Module, block_lists: Sequence[str]) -> list[str]:
    """Return the paths of the Linear modules in lists of blocks."""
    block_prefixes = tuple(f"{blocks}." for blocks in block_lists)
    return [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(block_prefixes)
    ]


def inject(net: nn.Module, spec: ModelSpec, settings: Lora) -> dict[str, nn.Parameter]:
    """Add the adapter to the network and return its parameters, not yet initialized, by
    name.

    Raises:
        VideotuneError: if OFT's blocks of ``rank`` inputs do not divide a module's
            inputs.
    """
    paths = matching(net, spec, settings.targets)
    rule_patterns = [rule.pattern for rule in settings.modules]
    named_by(paths, rule_patterns, "lora.modules", "module of lora.targets")
    if settings.variant == "OFT":
        refuse_uneven(net, paths, settings.rank)

    config = _config_for_peft(net, spec, settings, paths)
    if settings.variant == "LORA":
        _add_lora_layers(net, spec, config, paths)
    else:
        net.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    return lora_parameters(net)


def _config_for_peft(
    net: nn.Module, spec: ModelSpec, settings: Lora, paths: list[str]
) -> Any:
    """Return PEFT's config of the adapter, with the ranks that ``lora.modules`` sets."""
    config = peft_config(
        settings.variant,
        rank=settings.rank,
        scale=settings.scale,
        dropout=settings.dropout,
        paths=paths,
    )
    rank_pattern = {}
    alpha_pattern = {}
    for path in paths:
        if rule_of(settings, path):
            module_settings = of_module(settings, path)
            pattern = f"^{re.escape(path)}"
            rank_pattern[pattern] = module_settings.rank
            alpha_pattern[pattern] = module_settings.scale * module_settings.rank
    if rank_pattern:
        config.rank_pattern = rank_pattern
        config.alpha_pattern = alpha_pattern

    if spec.connectors_in_step:
        config.exclude_modules = _connectors_without_adapter(net, spec, paths)
    return config


def _add_lora_layers(
    net: nn.Module, spec: ModelSpec, config: Any, paths: list[str]
) -> None:
    """Add LoRA's layers. They multiply by their float32 factors in the network's dtype.

    PEFT would cast the activations to float32 in each layer. Here the factors are cast,
    at one of three places:

    - before each pass: a hook rounds the factors of all fused layers at once, which is
      the usual case;
    - in a fused layer, if it is called outside of such a pass, or in another dtype;
    - in PEFT's own forward (with dropout, merged weights, several adapters), where the
      factors are ``LinearInInputDtype``.
    """
    # PEFT takes a second to import.
    from videotune.adapters.fused_lora import (
        round_factors_before_passes,
        use_fused_layers,
    )

    use_fused_layers(config)
    net.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    multiply_in_input_dtype(net, paths)
    round_factors_before_passes(net, spec.block_lists, ADAPTER)


def _connectors_without_adapter(
    net: nn.Module, spec: ModelSpec, paths: Sequence[str]
) -> list[str]:
    """Return the Linear modules of the connectors that get no adapter.

    PEFT has to be told: it compares the ends of paths, and the connectors' blocks are
    named as the denoiser's.
    """
    assert spec.connectors is not None
    adapted = set(paths)
    linears = linear_paths(net, spec.connectors.blocks)
    return [path for path in linears if path not in adapted]


def rule_of(settings: Lora, path: str) -> LoraModules | None:
    """Return the first rule of ``lora.modules`` that names a module, or None."""
    for rule in settings.modules:
        if is_named(path, rule.pattern):
            return rule
    return None


def of_module(settings: Lora, path: str) -> Lora:
    """Return the settings of a module, with the rank and alpha of its rule if it has
    them.
    """
    rule = rule_of(settings, path)
    changes = {}
    if rule is not None:
        changes = rule.model_dump(include={"rank", "alpha"}, exclude_none=True)
    return settings.model_copy(update=changes)


def in_one_scale(state: Mapping[str, Tensor], settings: Lora) -> dict[str, Tensor]:
    """Scale an adapter's B so that each module's update is ``settings.scale`` · B A.

    Names may have a prefix.
    """
    result = dict(state)
    for name, value in state.items():
        parsed = parse_param_name(name)
        if parsed is None:
            continue
        path, part = parsed
        # What is zero at first is the factor B, or what takes its place in other types.
        if part not in ZERO:
            continue
        module_scale = of_module(settings, path).scale
        if module_scale != settings.scale:
            result[name] = value.float() * (module_scale / settings.scale)
    return result


class LinearInInputDtype(nn.Linear):
    """A float32 linear layer whose product is in its input's dtype; its gradient is
    float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Round the weight (out, in) to the dtype of the input (…, in)."""
        return nn.functional.linear(input, self.weight.to(input.dtype))


def multiply_in_input_dtype(net: nn.Module, paths: Sequence[str]) -> None:
    """Multiply by LoRA's factors in the network's dtype; PEFT would cast activations to
    float32.
    """
    for path in paths:
        layer: Any = net.get_submodule(path)
        layer.cast_input_dtype_enabled = False
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.__class__ = LinearInInputDtype


def refuse_uneven(net: nn.Module, paths: Sequence[str], side: int) -> None:
    """Raise VideotuneError if OFT's block size does not divide a module's inputs.

    PEFT would silently use another size.
    """
    inputs = {path: int(net.get_submodule(path).in_features) for path in paths}  # type: ignore[arg-type]
    for path, count in inputs.items():
        if count % side == 0:
            continue
        divisors = []
        for n in range(2, min(inputs.values()) + 1):
            if all(module_inputs % n == 0 for module_inputs in inputs.values()):
                divisors.append(n)
        nearest = sorted(sorted(divisors, key=lambda n: abs(n - side))[:4])
        raise VideotuneError(
            f"lora.rank: OFT turns {side} inputs at a time, and {path} has {count}; "
            f"take one of {', '.join(map(str, nearest))}"
        )


def add_lora(
    net: nn.Module, spec: ModelSpec, settings: Lora, seed: int
) -> dict[str, nn.Parameter]:
    """Add the adapter and return its parameters, float32, by name.

    Names are ``{module path}.lora_A.weight`` and so on. Step 0 is exactly the base
    model: the tensors in ``ZERO`` are zero, and DoRA's magnitudes are the norms of the
    weight's rows. All others are uniform in ±1/√columns, drawn by (seed, name).
    """
    parameters = inject(net, spec, settings)
    for name, parameter in parameters.items():
        parsed = parse_param_name(name)
        assert parsed is not None, name
        path, part = parsed
        if part == "lora_magnitude_vector":
            parameter.data = row_norms(net.get_submodule(path)).to(parameter.device)
        elif part in ZERO:
            parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
        else:
            bound = parameter.shape[1] ** -0.5
            generator = generator_for(seed, "lora", name)
            values = generator.uniform(-bound, bound, size=tuple(parameter.shape))
            parameter.data = torch.tensor(
                values, dtype=torch.float32, device=parameter.device
            )
    return parameters


def row_norms(layer: nn.Module) -> Tensor:
    """Return the norms (out,) of the base weight's rows, float32, computed as PEFT's
    DoRA does.

    DoRA scales by the magnitude over the norm, which is then exactly 1 at first.
    """
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(layer.get_base_layer())  # type: ignore[operator]
    return torch.linalg.norm(weight.detach().to(torch.float32), dim=1)


@contextmanager
def adapter_off(net: nn.Module) -> Iterator[None]:
    """Make ``net`` the base model within the block: no adapter and no dropout."""
    training = [(module, module.training) for module in net.modules()]
    trains = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
    net.disable_adapters()  # type: ignore[operator]
    net.eval()
    try:
        yield
    finally:
        net.enable_adapters()  # type: ignore[operator]
        # PEFT turns gradients off and on with the adapter
        for parameter, before in trains:
            parameter.requires_grad_(before)
        for module, before in training:
            module.training = before


def locate_parameters(
    net: nn.Module, adapter: str = ADAPTER
) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and attribute of each of an adapter's parameters.

    They are by the parameters' names without PEFT's adapter name.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    locations: dict[str, tuple[nn.Module, str]] = {}
    for path, layer in net.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        for part in layer.adapter_layer_names:
            # PEFT has either a ModuleDict of modules with a weight ("default.weight"), or a
            # ParameterDict of the parameters themselves ("default").
            container = getattr(layer, part)
            for name, _ in container.named_parameters():
                adapter_name, _, attribute = name.partition(".")
                if adapter_name != adapter:
                    continue
                key = ".".join(filter(None, (path, part, attribute)))
                if attribute:
                    locations[key] = (container[adapter_name], attribute)
                else:
                    locations[key] = (container, adapter_name)
    return locations


def lora_parameters(net: nn.Module, adapter: str = ADAPTER) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by name, without PEFT's adapter name."""
    return {
        name: getattr(module, attribute)
        for name, (module, attribute) in locate_parameters(net, adapter).items()
    }


def bind_parameters(net: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace the network's parameters of the same names, so that updating them updates
    the network.

    An adapter's names do not contain the adapter's name.
    """
    locations = locate_parameters(net)
    for name, parameter in parameters.items():
        if name in locations:
            module, attribute = locations[name]
        else:
            path, _, attribute = name.rpartition(".")
            module = net.get_submodule(path)
        assert getattr(module, attribute).shape == parameter.shape, name
        setattr(module, attribute, parameter)
