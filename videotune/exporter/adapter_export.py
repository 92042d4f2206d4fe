"""A trained adapter or new tokens' rows as a file that others read, and such files of any program read into a network.

Adapters are read by diffusers' own loader, or by PEFT's injection where a file brings PEFT's settings;
``exporter/formats.py`` says how they are written. Of rows diffusers' form is one tensor under the token, (n, D); ComfyUI
looks for a key of the text encoder's own, in a file whose name is the word. Our own facts stand in the header under the
key ``videotune``.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videotune.adapters import adapter_types, effect, lora
from videotune.config.schema import token_names
from videotune.errors import VideotuneError
from videotune.exporter import formats
from videotune.exporter.adapter_file import AdapterFile, refuse, warn_of_other_base
from videotune.exporter.adapter_modules import keys_of, lora_of, modules_in, tensor_name
from videotune.exporter.formats import Exported
from videotune.exporter.lora_write import baked, head_of, rounded, settings_of
from videotune.models.base import DiffusersModel
from videotune.models.loading import explained

READ = "read"
"""The adapter's name in a network that a file is read into for a look at it."""


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
    """Write one file, read it back as others do and compare ΔW module by module; ``expert``: whose adapter it is.

    What is compared is the adapter as ``dtype`` (None: float32) holds it.

    Raises VideotuneError where the file would not do elsewhere what was trained here.
    """

    def verify(aside: Path) -> tuple[float, str]:
        found, reader = read_effects(family, aside, expert)
        return formats.check_updates(effect.effects(state, scale), found, path, reader), reader

    if dtype is not None:
        state = rounded(state, scale, dtype)
        scale = 1.0
    tensors = {
        name: value.to(dtype) for name, value in baked(family, format, state, scale).items()
    }
    return formats.write_verified(
        format,
        path,
        len(adapter_types.by_module(state)),
        tensors,
        facts,
        verify,
        head_of(state),
    )


def read_lora(family: DiffusersModel, net: nn.Module, path: Path, name: str) -> str:
    """Read an adapter's file into a network: as ``load_lora_weights`` does, its metadata (an alpha, say) included.

    One with PEFT's settings in its head by PEFT; under ComfyUI's names these are put back into diffusers' first. Returns who
    has read it: PEFT, diffusers, or videotune itself where diffusers does not know the names. Raises ValueError where the
    network has no place for a tensor of it, or lacks one.
    """
    file = AdapterFile(path)
    if is_of_peft(file):
        _read_by_peft(family, net, file, name)
        return "PEFT inject_adapter_in_model"
    loader = family.pipeline_class()
    state, metadata = loader.lora_state_dict(str(path), return_lora_metadata=True)
    known = any(
        key.startswith("transformer.") for key in state
    )  # diffusers has put its own names in the place
    state = state if known else lora_of(family, net, file)
    loader.load_lora_into_transformer(state, net, adapter_name=name, metadata=metadata)
    return "diffusers load_lora_weights" if known else "videotune sample --lora"


def read_file(family: DiffusersModel, net: nn.Module, path: Path, name: str) -> None:
    """Read an adapter's file of any program into a network, alpha included; prints what had to be assumed.

    Raises VideotuneError for a file that cannot be read whole, or changes nothing.
    """
    with explained(
        f"{path} is no LoRA of {family.spec.title}: it was made for another base, or is damaged"
    ):
        file = AdapterFile(path)
        warn_of_other_base(family, file)
        if is_of_peft(file):
            _read_by_peft(family, net, file, name)
        else:
            state = lora_of(family, net, file)
            family.pipeline_class().load_lora_into_transformer(
                state, net, adapter_name=name, metadata=None
            )
    if adapter_types.kind_of(lora.lora_parameters(net, name)) is None:
        raise refuse(family, path, [], "it changes none of its modules")


def is_of_peft(file: AdapterFile) -> bool:
    """Whether an adapter is of a kind that PEFT reads and diffusers does not."""
    return not any({"lora_A", "lora_B"} & set(parts) for parts in keys_of(file)[0].values())


def _read_by_peft(family: DiffusersModel, net: nn.Module, file: AdapterFile, name: str) -> None:
    """An adapter of any kind by PEFT's injection; ValueError where the network has no place for a tensor, or lacks one."""
    import peft

    modules = modules_in(family, net, file)
    state = {
        tensor_name(path, part): value
        for path, own in modules.items()
        for part, value in own.parts.items()
    }
    net.add_adapter(settings_of(modules), adapter_name=name)  # type: ignore[operator]
    mine = {key: value.shape for key, value in lora.lora_parameters(net, name).items()}
    odd = sorted(set(mine) ^ set(state)) or [
        key for key in mine if mine[key] != state[key].shape
    ]
    if odd:
        raise ValueError(f"{len(odd)} of its tensors do not fit the model, such as {odd[0]}")
    peft.set_peft_model_state_dict(net, state, name)


def read_parts(
    family: DiffusersModel, path: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """The tensors of each module by PEFT's names, of a file of any program, and what their update is scaled by."""
    file = AdapterFile(path)
    warn_of_other_base(family, file)
    found = modules_in(family, family.skeleton(), file)
    return {path: own.parts for path, own in found.items()}, {
        path: own.scale for path, own in found.items()
    }


def read_effects(
    family: DiffusersModel, path: Path, expert: str | None = None
) -> tuple[dict[str, Callable[[], Tensor]], str]:
    """What each module's adapter does as its reader applies it, calculated at the call in float64; and the reader.

    See ``adapters.effect.effects``.
    """
    net = family.skeleton(expert)
    zero = torch.zeros(())  # all weights share it, so only the adapter takes memory
    for part in net.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(zero.expand(parameter.shape), requires_grad=False))
    reader = read_lora(family, net, path, READ)
    found: dict[str, Callable[[], Tensor]] = {}
    for module, parts in adapter_types.by_module(lora.lora_parameters(net, READ)).items():
        found[module] = partial(_update, net.get_submodule(module))
        if "lora_magnitude_vector" in parts:
            found[f"{module} magnitude"] = parts["lora_magnitude_vector"].detach().double
    return found, reader


def _update(layer: Any) -> Tensor:
    """PEFT's own answer in float64; of OFT what it makes of unit vectors, less these: R - 1 (blocks, b, b)."""
    for part in layer.adapter_layer_names:
        getattr(layer, part).double()
    with torch.no_grad():
        if hasattr(layer, "oft_R"):
            one = torch.eye(layer.oft_block_size[READ], dtype=torch.float64)
            turned = layer.oft_R[READ](
                one.repeat(1, layer.r[READ])
            )  # each block's rows beside those of the others
            delta = turned.unflatten(1, (-1, len(one))).transpose(0, 1) - one
        else:
            delta = layer.get_delta_weight(READ)
    for part in layer.adapter_layer_names:
        getattr(layer, part).float()
    return delta


EMBEDDING_KEY = "emb_params"
"""The key of rows in files that name neither a token nor an encoder; the file's name is the token."""


def export_embedding(
    family: DiffusersModel,
    format: str,
    rows: Mapping[str, Tensor],
    token: str,
    path: Path,
    facts: Mapping[str, Any],
) -> list[Exported]:
    """Write the rows (n, D) of each text encoder, float32, and read every file back; ``path`` is without its ending.

    In diffusers' form each encoder has a file; where there are several, its name ends in the encoder's. Raises
    VideotuneError for rows that are not finite, and where a file does not read back as it was written.
    """
    formats.check_finite("new tokens' rows", rows)
    whole = {name: value.detach().cpu().float().contiguous() for name, value in rows.items()}
    keys = family.embedding_keys()[format]
    parts = [whole] if keys else [{name: value} for name, value in whole.items()]
    done = []
    for part in parts:
        (name, value), *_ = part.items()
        file = path.with_name(f"{path.name}{f'-{name}' if len(parts) > 1 else ''}.safetensors")
        own = {**facts, "token": token} | ({} if keys else {"text_encoder": name})
        tensors = {keys[key]: x for key, x in part.items()} if keys else {token: value}
        tokenizer = None if keys else family.tokenizers()[name]
        verify = partial(_verify, family, token, part, tokenizer)
        done.append(formats.write_verified(format, file, len(part), tensors, own, verify))
    return done


def _verify(
    family: DiffusersModel, token: str, rows: Mapping[str, Tensor], tokenizer: Any, path: Path
) -> tuple[float, str]:
    """Read a file back, with a tokenizer by diffusers too; VideotuneError where its token or its rows are others."""
    named, found = read_embedding(family, path)
    if named != token:
        raise formats.failed(path, f"its token is {named!r}")
    formats.check_same(rows, found.items(), path)
    if tokenizer is None:
        return 0.0, "safetensors, by the key that ComfyUI asks for"
    from diffusers.loaders.textual_inversion import TextualInversionLoaderMixin as Reader
    from diffusers.loaders.textual_inversion import load_textual_inversion_state_dicts

    (state,) = load_textual_inversion_state_dicts([str(path.parent)], weight_name=path.name)
    names = Reader._retrieve_tokens_and_embeddings([None], [state], tokenizer)
    tokens = zip(*Reader._extend_tokens_and_embeddings(*names, tokenizer), strict=True)
    (own,) = rows.values()
    formats.check_same(dict(zip(token_names(token, len(own)), own, strict=True)), tokens, path)
    return 0.0, "diffusers load_textual_inversion"


def read_embedding(family: DiffusersModel, path: Path) -> tuple[str, dict[str, Tensor]]:
    """The token of a file, and the rows (n, D) of each text encoder in it, float32.

    Read are diffusers' form (one tensor under its token), ComfyUI's (a key for each encoder) and one with the plain key
    ``emb_params``; where no token stands in the file, its name is the token. Raises VideotuneError for another file.
    """
    if not path.is_file():
        raise VideotuneError(f"no such file of new tokens: {path}")
    file = AdapterFile(path)
    facts = file.facts
    tensors = {
        key: value.float()[None] if value.ndim == 1 else value.float()
        for key, value in file.tensors.items()
    }
    encoders = {
        key: name for keys in family.embedding_keys().values() for name, key in keys.items()
    }
    token = facts.get("token", "-".join(path.stem.split()))
    if tensors and set(tensors) <= set(encoders):
        return token, {encoders[key]: value for key, value in tensors.items()}
    names = list(family.text_skeletons())
    own = facts.get("text_encoder", names[0])
    if len(tensors) != 1 or own not in names or next(iter(tensors.values())).ndim != 2:
        keys = ", ".join(sorted(tensors)[:3])
        raise VideotuneError(
            f"{path} holds no new tokens of {family.spec.title}: it has the keys {keys}"
        )
    ((key, value),) = tensors.items()
    return (token if key == EMBEDDING_KEY else key), {own: value}
