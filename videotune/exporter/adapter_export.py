"""Export adapters and new tokens, and load such files of any program into a network.

Adapters are loaded by diffusers' loader, or by PEFT's injection if the file has PEFT's
settings; ``exporter/formats.py`` describes how they are written. diffusers' form of a
token's rows is one tensor (n, D) under the token; ComfyUI looks for one key per text
encoder, in a file named after the token. videotune's facts are in the header under the
key ``videotune``.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videotune.adapters import adapter_types, effect, lora
from videotune.config.sections import token_names
from videotune.errors import VideotuneError
from videotune.exporter import formats
from videotune.exporter.adapter_file import AdapterFile, not_a_lora, warn_if_other_base
from videotune.exporter.adapter_modules import (
    DORA_HEADER,
    group_by_module,
    lora_state_dict,
    modules_by_path,
    tensor_name,
)
from videotune.exporter.comfyui_dora import bake_dora, verify_dora
from videotune.exporter.formats import Exported, refuse_format
from videotune.exporter.lora_write import (
    bake_adapter,
    peft_header,
    peft_settings,
    round_adapter,
)
from videotune.models.base import DiffusersModel
from videotune.models.skeletons import explained

READ = "read"
"""The adapter's name in a network that a file is loaded into for verification."""

EMBEDDING_KEY = "emb_params"
"""The key of rows in files without a token; the file is named after the token."""


def export_lora(
    family: DiffusersModel,
    format: str,
    state: Mapping[str, Tensor],
    scale: float,
    path: Path,
    facts: Mapping[str, Any],
    expert: str | None = None,
    dtype: torch.dtype | None = None,
) -> Exported:
    """Write an adapter to a file, load it as other programs do, and compare ΔW of each
    module.

    Args:
        family: the family of the base model.
        format: one of ``formats.formats_of``.
        state: the adapter's tensors.
        scale: alpha / rank.
        path: the file.
        facts: written into the header.
        expert: the expert that the adapter belongs to.
        dtype: the tensors' dtype in the file; the adapter is rounded to it before the
            comparison. None: float32.

    Raises:
        VideotuneError: if the file would have another effect than what was trained.
    """
    if dtype is not None:
        state = round_adapter(state, scale, dtype)
        scale = 1.0
    is_comfyui_dora = format == "comfyui" and adapter_types.kind_of(state) == "DORA"
    network = expert or family.spec.experts[0].name
    header = peft_header(state)
    if is_comfyui_dora:
        refuse_format(family, "DORA", format)
        baked = bake_dora(family, state, scale, network)
        header = {DORA_HEADER: "comfyui"}
    else:
        baked = bake_adapter(family, format, state, scale)
    tensors = {
        name: value if name.endswith("dora_scale") else value.to(dtype)
        for name, value in baked.items()
    }

    def verify(written_path: Path) -> tuple[float, str]:
        if is_comfyui_dora:
            return verify_dora(family, state, scale, network, written_path)
        expected = effect.effects(state, scale)
        effects, reader = read_effects(family, written_path, expert)
        return formats.check_updates(expected, effects, path, reader), reader

    return formats.write_verified(
        format=format,
        path=path,
        modules=len(adapter_types.by_module(state)),
        tensors=tensors,
        facts=facts,
        verify=verify,
        header=header,
    )


def read_lora(family: DiffusersModel, net: nn.Module, path: Path, name: str) -> str:
    """Load an adapter's file into a network as ``load_lora_weights`` does, with its
    metadata.

    A file with PEFT's settings in its header is loaded by PEFT; ComfyUI's names are
    converted to diffusers' first.

    Args:
        family: the family of the base model.
        net: the network.
        path: the file.
        name: the adapter's name in the network.

    Returns:
        The program that loaded it: PEFT, diffusers, or videotune if diffusers does not
        know the names.

    Raises:
        ValueError: if the adapter has tensors that the network lacks, or the other way
            around.
    """
    file = AdapterFile(path)
    if needs_peft(file):
        _load_with_peft(family, net, file, name)
        return "PEFT inject_adapter_in_model"

    loader = family.lora_reader()
    state, metadata = loader.lora_state_dict(str(path), return_lora_metadata=True)
    # diffusers puts its own names in place of those that it knows.
    is_known = any(key.startswith(("transformer.", "connectors.")) for key in state)
    if family.spec.connectors_in_step:
        is_known = is_known and _names_modules_of(net, state)
    if not is_known:
        state = lora_state_dict(family, net, file)
    _load_as_pipeline(family, net, state, name, metadata)
    return "diffusers load_lora_weights" if is_known else "videotune sample --lora"


def _names_modules_of(net: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Return whether each tensor belongs to a module of a network."""
    paths = {path for path, _ in net.named_modules()}
    return all(
        key.removeprefix("transformer.").rpartition(".lora_")[0] in paths
        for key in state
    )


def _load_as_pipeline(
    family: DiffusersModel,
    net: nn.Module,
    state: Mapping[str, Tensor],
    name: str,
    metadata: Any,
) -> None:
    """Load an adapter with the calls of ``load_lora_weights``: one for each part of the
    pipeline.
    """
    loader = family.lora_reader()
    of_connectors: dict[str, Tensor] = {}
    of_transformer: dict[str, Tensor] = {}
    for key, value in state.items():
        part = of_connectors if family.spec.is_connector(key) else of_transformer
        part[key] = value

    with _without_connectors(family, net):
        if of_transformer or not of_connectors:
            loader.load_lora_into_transformer(
                of_transformer, net, adapter_name=name, metadata=metadata
            )
    if of_connectors:
        assert family.spec.connectors is not None
        path = family.spec.connectors.path
        loader.load_lora_into_transformer(
            of_connectors,
            net.get_submodule(path),
            adapter_name=name,
            metadata=metadata,
            prefix=path,
        )


@contextmanager
def _without_connectors(family: DiffusersModel, net: nn.Module) -> Iterator[None]:
    """Take the connectors out of a network within the block.

    PEFT compares the ends of paths, and their blocks are named as the network's.
    """
    if not family.spec.connectors_in_step:
        yield
        return
    assert family.spec.connectors is not None
    path = family.spec.connectors.path
    connectors = net.get_submodule(path)
    delattr(net, path)
    try:
        yield
    finally:
        setattr(net, path, connectors)


def read_adapter(family: DiffusersModel, net: nn.Module, path: Path, name: str) -> None:
    """Load any program's adapter file into a network, with its alpha.

    Prints a note about what had to be assumed.

    Raises:
        VideotuneError: if the file cannot be read completely, or changes nothing.
    """
    with explained(
        f"{path} is not a LoRA of {family.spec.title}:"
        " it was made for another base, or is damaged"
    ):
        file = AdapterFile(path)
        warn_if_other_base(family, file)
        if needs_peft(file):
            _load_with_peft(family, net, file, name)
        else:
            state = lora_state_dict(family, net, file)
            _load_as_pipeline(family, net, state, name, metadata=None)
            _refuse_unloaded(family, file, state, net, name)

    if adapter_types.kind_of(lora.lora_parameters(net, name)) is None:
        raise not_a_lora(family, path, [], "it changes none of its modules")


def _refuse_unloaded(
    family: DiffusersModel,
    file: AdapterFile,
    state: Mapping[str, Tensor],
    net: nn.Module,
    name: str,
) -> None:
    """Raise VideotuneError for tensors that diffusers has not loaded; it only logs them."""
    adapter = re.compile(rf"(\.lora_\w+)\.{re.escape(name)}(?=\.|$)")
    loaded = {adapter.sub(r"\1", key) for key, _ in net.named_parameters()}
    unloaded = []
    for key in state:
        path = key.removeprefix("transformer.")
        if not {path, f"{path}.weight"} & loaded:
            unloaded.append(key)
    if unloaded:
        fault = "it has modules or tensors that are not read"
        raise not_a_lora(family, file.path, unloaded, fault)


def needs_peft(file: AdapterFile) -> bool:
    """Return whether an adapter is of a kind that PEFT can load and diffusers cannot."""
    modules, _ = group_by_module(file)
    return not any({"lora_A", "lora_B"} & set(parts) for parts in modules.values())


def _load_with_peft(
    family: DiffusersModel, net: nn.Module, file: AdapterFile, name: str
) -> None:
    """Load an adapter of any kind with PEFT's injection.

    Raises:
        ValueError: if the adapter has tensors that the network lacks, or the other way
            around.
    """
    import peft

    modules = modules_by_path(family, net, file)
    state = {}
    for path, module in modules.items():
        for part, value in module.parts.items():
            state[tensor_name(path, part)] = value

    net.add_adapter(peft_settings(modules), adapter_name=name)  # type: ignore[operator]
    shapes = {
        key: value.shape for key, value in lora.lora_parameters(net, name).items()
    }
    misfits = sorted(set(shapes) ^ set(state))
    if not misfits:
        misfits = [key for key, shape in shapes.items() if shape != state[key].shape]
    if misfits:
        raise ValueError(
            f"{len(misfits)} of its tensors do not fit the model, such as {misfits[0]}"
        )
    peft.set_peft_model_state_dict(net, state, name)


def read_parts(
    family: DiffusersModel, path: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """Read any program's adapter file.

    Returns:
        The tensors of each module by PEFT's names, and the scale of each module.
    """
    file = AdapterFile(path)
    warn_if_other_base(family, file)
    modules = modules_by_path(family, family.skeleton(), file)
    parts = {module_path: module.parts for module_path, module in modules.items()}
    scales = {module_path: module.scale for module_path, module in modules.items()}
    return parts, scales


def read_effects(
    family: DiffusersModel, path: Path, expert: str | None = None
) -> tuple[dict[str, Callable[[], Tensor]], str]:
    """Load a file and return each module's update as its reader applies it.

    Returns:
        Functions that calculate the updates in float64, as ``adapters.effect.effects``
        has them; and the program that loaded the file.
    """
    net = family.skeleton(expert)
    # All weights share one zero, so only the adapter takes memory.
    zero = torch.zeros(())
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shared_weight = nn.Parameter(zero.expand(parameter.shape))
            setattr(module, name, shared_weight)

    reader = read_lora(family, net, path, READ)
    effects: dict[str, Callable[[], Tensor]] = {}
    for module_path, parts in adapter_types.by_module(
        lora.lora_parameters(net, READ)
    ).items():
        effects[module_path] = partial(_update, net.get_submodule(module_path))
        if "lora_magnitude_vector" in parts:
            magnitude = parts["lora_magnitude_vector"].detach()
            effects[f"{module_path} magnitude"] = magnitude.double
    return effects, reader


def _update(layer: Any) -> Tensor:
    """Return the update that PEFT applies, in float64; for OFT R - 1 (blocks, b, b)."""
    for part in layer.adapter_layer_names:
        getattr(layer, part).double()

    with torch.no_grad():
        if hasattr(layer, "oft_R"):
            # Rotate the unit vectors of all blocks at once, then subtract them.
            unit_vectors = torch.eye(layer.oft_block_size[READ], dtype=torch.float64)
            rotated = layer.oft_R[READ](unit_vectors.repeat(1, layer.r[READ]))
            blocks = rotated.unflatten(1, (-1, len(unit_vectors))).transpose(0, 1)
            delta = blocks - unit_vectors
        else:
            delta = layer.get_delta_weight(READ)

    for part in layer.adapter_layer_names:
        getattr(layer, part).float()
    return delta


def export_embedding(
    family: DiffusersModel,
    format: str,
    rows: Mapping[str, Tensor],
    token: str,
    path: Path,
    facts: Mapping[str, Any],
) -> list[Exported]:
    """Write a new token's rows, float32, and read every file back.

    Args:
        family: the family of the base model.
        format: a key of ``family.embedding_keys()``. diffusers' form has one file per
            encoder, whose name ends in the encoder's if there are several.
        rows: the rows (n, D) of each text encoder.
        token: the token.
        path: the file without its ending.
        facts: written into the header.

    Raises:
        VideotuneError: for rows that are not finite, or if a file reads back
            differently.
    """
    formats.check_finite("new tokens' rows", rows)
    stored_rows = {
        name: value.detach().cpu().float().contiguous() for name, value in rows.items()
    }
    keys = family.embedding_keys()[format]
    token_facts = {**facts, "token": token}
    if keys:
        # One file for all encoders.
        file = path.with_name(f"{path.name}.safetensors")
        exported = formats.write_verified(
            format=format,
            path=file,
            modules=len(stored_rows),
            tensors={keys[name]: value for name, value in stored_rows.items()},
            facts=token_facts,
            verify=partial(_verify_rows, family, token, stored_rows, None),
        )
        return [exported]

    exports = []
    for name, value in stored_rows.items():
        suffix = f"-{name}" if len(stored_rows) > 1 else ""
        file = path.with_name(f"{path.name}{suffix}.safetensors")
        tokenizer = family.tokenizers()[name]
        exported = formats.write_verified(
            format=format,
            path=file,
            modules=1,
            tensors={token: value},
            facts={**token_facts, "text_encoder": name},
            verify=partial(_verify_rows, family, token, {name: value}, tokenizer),
        )
        exports.append(exported)
    return exports


def _verify_rows(
    family: DiffusersModel,
    token: str,
    rows: Mapping[str, Tensor],
    tokenizer: Any,
    path: Path,
) -> tuple[float, str]:
    """Read a token's file back; with a tokenizer also by diffusers.

    Raises:
        VideotuneError: if its token or its rows differ.
    """
    file_token, file_rows = read_embedding(family, path)
    if file_token != token:
        raise formats.verification_error(path, f"its token is {file_token!r}")
    formats.check_same(rows, file_rows.items(), path)
    if tokenizer is None:
        return 0.0, "safetensors, by the key that ComfyUI asks for"

    from diffusers.loaders.textual_inversion import (
        TextualInversionLoaderMixin as Loader,
    )
    from diffusers.loaders.textual_inversion import load_textual_inversion_state_dicts

    (state,) = load_textual_inversion_state_dicts(
        [str(path.parent)], weight_name=path.name
    )
    loaded = Loader._retrieve_tokens_and_embeddings([None], [state], tokenizer)
    loaded_rows = zip(
        *Loader._extend_tokens_and_embeddings(*loaded, tokenizer), strict=True
    )
    (encoder_rows,) = rows.values()
    names = token_names(token, len(encoder_rows))
    formats.check_same(dict(zip(names, encoder_rows, strict=True)), loaded_rows, path)
    return 0.0, "diffusers load_textual_inversion"


def read_embedding(family: DiffusersModel, path: Path) -> tuple[str, dict[str, Tensor]]:
    """Read a file of a new token.

    diffusers' form (one tensor under its token), ComfyUI's (one key per encoder) and
    files with the key ``emb_params`` are read.

    Returns:
        The token (the file's name if the file has none), and the rows (n, D) of each
        text encoder, float32.

    Raises:
        VideotuneError: for any other file.
    """
    if not path.is_file():
        raise VideotuneError(f"no such file of new tokens: {path}")
    file = AdapterFile(path)
    facts = file.facts
    tensors = {}
    for key, value in file.tensors.items():
        rows = value.float()
        tensors[key] = rows[None] if rows.ndim == 1 else rows

    encoder_of_key = {}
    for keys in family.embedding_keys().values():
        for name, key in keys.items():
            encoder_of_key[key] = name
    token = facts.get("token", "-".join(path.stem.split()))
    if tensors and set(tensors) <= set(encoder_of_key):
        return token, {encoder_of_key[key]: value for key, value in tensors.items()}

    encoders = list(family.text_skeletons())
    encoder = facts.get("text_encoder", encoders[0])
    is_one_matrix = len(tensors) == 1 and next(iter(tensors.values())).ndim == 2
    if not is_one_matrix or encoder not in encoders:
        listed_keys = ", ".join(sorted(tensors)[:3])
        raise VideotuneError(
            f"{path} holds no new tokens of {family.spec.title}: it has the keys {listed_keys}"
        )
    ((key, value),) = tensors.items()
    return (token if key == EMBEDDING_KEY else key), {encoder: value}
