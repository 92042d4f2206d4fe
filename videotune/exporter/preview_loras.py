"""LoRA files that are added to a run's networks, or taken away, while a preview is drawn."""

from collections.abc import Sequence

from torch import nn

from videotune.adapters.side_update import SideUpdate
from videotune.config.sections import BaseLora, LoraFile
from videotune.errors import VideotuneError
from videotune.exporter.base_loras import check_lora_file, expert_of, read_lora_file
from videotune.models.base import DiffusersModel
from videotune.models.model_files import note


def side_update(
    family: DiffusersModel,
    lora: LoraFile,
    key: str,
    *,
    removed: bool = False,
    quiet: bool = False,
) -> tuple[str, SideUpdate]:
    """Return the expert of a LoRA file, and its update for the network's outputs.

    Differences of weights other than linear ones cannot be added to outputs.

    Args:
        family: the model.
        lora: the file.
        key: the key that names it, for errors.
        removed: the update is taken away.
        quiet: print no note about what is assumed or left out.

    Raises:
        VideotuneError: for a file that is not a LoRA of this model, and for adapters of
            other kinds.
    """
    path = check_lora_file(family, lora, key)
    expert = expert_of(family, lora, key)
    modules, differences = read_lora_file(family, expert, path, quiet=quiet)
    strength = -lora.strength if removed else lora.strength

    factors = {}
    for module_path, module in modules.items():
        if set(module.parts) != {"lora_A", "lora_B"}:
            raise VideotuneError(
                f"{key}: {path.name} is no plain LoRA, and only such can be added or taken"
                " away while previews are drawn"
            )
        scaled = module.parts["lora_B"].float() * (module.scale * strength)
        factors[module_path] = (module.parts["lora_A"].float(), scaled)

    net = family.skeleton(expert)
    biases = {}
    left_out = []
    for name, difference in differences.items():
        module_path, _, last = name.rpartition(".")
        if last == "bias" and isinstance(net.get_submodule(module_path), nn.Linear):
            biases[module_path] = difference.float() * strength
        else:
            left_out.append(name)
    if left_out and not quiet:
        note(
            f"note: {path.name}: previews leave out {len(left_out)} differences of other"
            f" weights, such as {left_out[0]}"
        )
    return expert, SideUpdate(factors, biases)


def preview_updates(
    family: DiffusersModel,
    base_loras: Sequence[BaseLora],
    loras: Sequence[LoraFile],
    *,
    with_base_loras: bool,
    quiet: bool = False,
) -> dict[str, list[SideUpdate]]:
    """Return what is added to the networks of a run while a preview is drawn, by expert.

    Args:
        family: the model, with ``base_loras`` merged into it.
        base_loras: the LoRA files under the training.
        loras: the LoRA files that only previews have.
        with_base_loras: False: none of ``base_loras`` is left; True: only those of
            ``training_only`` are taken away.
        quiet: print no note about what is assumed or left out.
    """
    updates: dict[str, list[SideUpdate]] = {}
    for lora in loras:
        expert, update = side_update(family, lora, "sample.loras", quiet=quiet)
        updates.setdefault(expert, []).append(update)
    for base_lora in base_loras:
        if base_lora.training_only or not with_base_loras:
            expert, update = side_update(
                family, base_lora, "base_loras", removed=True, quiet=True
            )
            updates.setdefault(expert, []).append(update)
    return updates
