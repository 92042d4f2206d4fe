"""Loading weights: straight into the wanted dtype and device, file by file, their heads compared with the config first.

What libraries read from a folder or a Hub repository is read without its code, and an error names the place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import torch, transformers
from videotune.models import single_file
from videotune.models.model_files import (
    CONFIGS,
    Header,
    headers,
    note,
    read_config,
    weight_files,
)
from videotune.models.single_file import DTYPES, FP8, WeightSource
from videotune.types import FillFn, LogFn

if TYPE_CHECKING:
    from torch import Tensor, nn

    from videotune.memory.quantization import QuantizedLinear

PROBES = ("a red circle moves left", "a blue square moves up")
"""Two captions that every tokenizer tells apart which has its vocabulary."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """An error that a library raises of a damaged file becomes a VideotuneError that begins with ``what``.

    That the memory is full stays the error that it is.
    """
    try:
        yield
    except VideotuneError:
        raise
    except Exception as error:  # each library has kinds of its own, tokenizers' has none
        if isinstance(error, MemoryError) or re.search(
            "out of memory|allocate memory", str(error)
        ):
            raise
        if "trust_remote_code" in str(error):
            raise VideotuneError(
                f"{what}: it names code of its own, which videotune never runs"
            ) from error
        why = " ".join((str(error) or type(error).__name__).split())[:200]
        raise VideotuneError(f"{what}: {why}") from error


def pretrained(cls: Any, place: Path | str, **words: Any) -> Any:
    """``cls.from_pretrained(place)``, without code that lies there; nobody is asked whether to run it.

    Raises VideotuneError where the library cannot read it.
    """
    adapter = Path(place) / "adapter_config.json"
    if adapter.is_file():
        raise VideotuneError(
            f"{adapter}: the weights of another model would be read in place of this one's: remove it"
        )
    with explained(f"{place} cannot be read by {cls.__name__}"):
        return cls.from_pretrained(place, trust_remote_code=False, **words)


def read_tokenizer(folder: Path, encoder: Path, cls: Any = None) -> Any:
    """The tokenizer in a folder, by its own class or by ``cls``, for the text encoder in another.

    Raises VideotuneError where it is damaged, does not tell two captions apart (it has no vocabulary then), or has more
    tokens than the encoder's table has rows.
    """
    tokenizer = pretrained(cls or transformers.AutoTokenizer, folder)
    with explained(f"{folder} holds no tokenizer that works"):
        most = min(32, tokenizer.model_max_length)
        one, other = (
            tokenizer(text, truncation=True, max_length=most, verbose=False).input_ids
            for text in PROBES
        )
        last = max(tokenizer.get_vocab().values())
    if one == other:
        fault = (
            f"its tokenizer reads {PROBES[0]!r} and {PROBES[1]!r} as the same {len(one)} tokens"
        )
        raise VideotuneError(f"{folder}: {fault}: fetch the model again, or copy all of it")
    config = read_config(encoder / "config.json")
    # a pipeline pads with the end mark where neither the tokenizer nor its encoder names a token for it, as Llama's
    if tokenizer.pad_token is None and (
        tokenizer.eos_token is None or config.get("pad_token_id") is not None
    ):
        raise VideotuneError(
            f"{folder} names no token that pads captions: fetch the model again, or copy all of it"
        )
    rows = config.get("vocab_size")
    if isinstance(rows, int) and last >= rows:
        raise VideotuneError(
            f"{folder} has a token {last}, and {encoder} knows {rows}: take both from one checkpoint"
        )
    return tokenizer


def count_tokens(folder: Path, captions: Sequence[str]) -> list[int] | None:
    """How many tokens each caption has, marks included, without torch; None where the folder has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer  # light to start

    with explained(f"{path} cannot be read"):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(captions))]


_SPARE = 0.01
"""Weights that a model has no place for are left out, and said, up to this share; more is another model."""


def load_model(
    cls: Any,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    packed: str | None = None,
    blocks: Sequence[str] = (),
    *,
    stay: torch.device | None = None,
    fill: FillFn = None,
    stream: LogFn | None = None,
) -> nn.Module:
    """A part of a base model by its class of diffusers or transformers, frozen, in ``dtype`` on ``device``.

    It is what ``cls.from_pretrained(folder, dtype=dtype)`` gives, modules that diffusers keeps in float32 included, but
    never holds more than the model and one file of weights. On a CPU, weights that already have the dtype are the file's
    own pages, mapped. ``packed``: how the weights of the Linears in its lists of ``blocks`` (none named: in its longest
    one) are packed, each as it is read (``memory/quantization.py``); None: they are not.

    ``stay``: the weights of a network of diffusers stay on this device, for whoever streams them to ``device``.
    ``stream``: those of a text encoder's blocks are streamed from the host, with the same numbers; it is told what could
    not be done as it should. ``fill``: no file of weights is read, and it puts tensors in the place of the parameters,
    which are on the meta device. Raises VideotuneError where weights and config are not of one model.
    """
    if fill is not None:
        net = as_loaded(cls, folder, dtype)
        if packed is not None:
            _pack(cls, net, blocks, packed, dtype)
        fill(net)
    elif hasattr(cls, "load_config"):
        net = _load_network(cls, folder, dtype, device, packed, blocks, stay or device)
    else:  # transformers streams by itself, and ties weights that stand in a file once
        if packed is None:
            net = _load_by_transformers(
                cls, folder, dtype, torch.device("cpu") if stream else device
            )
        else:
            net = _load_packed(cls, folder, dtype, device, packed)
        net = _streamed(net, device, stream) if stream else net.to(device)
    return net.eval().requires_grad_(False)


def _load_network(
    cls: Any, folder: Path, dtype: torch.dtype, device: torch.device, packed: str | None, blocks: Sequence[str],
    stay: torch.device,
) -> nn.Module:  # fmt: skip
    net = to_fill(cls, folder, dtype)
    placed = dict[str, "Tensor"]()
    states = read_states(cls, folder, net, echo=note)
    layers = {} if packed is None else _pack(cls, net, blocks, packed, dtype)
    for state in states:
        for path in [path for path in layers if f"{path}.weight" in state]:
            # where the run computes, so that what is streamed is what is not, to the bit; and fast
            layers[path].set_weight(state.pop(f"{path}.weight").to(device), stay)
        placed |= _placed(cls, state, dtype, stay, alone=bool(layers) or len(state) == 1)
    net.load_state_dict(placed, strict=False, assign=True)
    for module in net.modules():  # buffers that no file holds
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(stay)
    return net


def _pack(
    cls: Any, net: nn.Module, blocks: Sequence[str], kind: str, dtype: torch.dtype
) -> dict[str, QuantizedLinear]:
    """Packed layers in the place of a network's Linears, empty; of its longest list of modules where no list is named."""
    from videotune.memory.quantization import longest_list, pack_linears  # imports torch

    return pack_linears(
        net, blocks or [longest_list(net)], kind, dtype, kept_in_float32(cls, dtype)
    )


def _streamed(net: nn.Module, device: torch.device, echo: LogFn) -> nn.Module:
    """Move a network to the device, but for the weights of its longest list of blocks."""
    from videotune.memory.block_offload import stream_blocks  # imports torch
    from videotune.memory.quantization import longest_list

    streams = stream_blocks(net, [longest_list(net)], device, 1.0, echo=echo)
    net.streams = streams  # type: ignore[assignment]  # what streams lives as long as the network
    return net


def _placed(
    cls: Any, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device, alone: bool
) -> dict[str, Tensor]:
    """Each tensor in its own dtype on the device; the state is emptied on the way. ``alone``: none stays a file's page."""
    placed = {}
    for name in list(state):
        tensor = state.pop(name)
        wanted = dtype_of(name, cls, dtype) if tensor.is_floating_point() else tensor.dtype
        there = tensor.to(device).to(wanted).contiguous()
        # a small tensor that stayed a page of the file would keep all of the file mapped
        placed[name] = (
            there.clone() if there is tensor and (alone or wanted != dtype) else there
        )
    return placed


@contextmanager
def quietly() -> Iterator[None]:
    """Without the bars of progress of transformers and diffusers."""
    from diffusers.utils import logging as of_diffusers  # imports torch
    from transformers.utils import logging as of_transformers

    shown = [
        logging
        for logging in (of_transformers, of_diffusers)
        if logging.is_progress_bar_enabled()
    ]
    for logging in shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        for logging in shown:
            logging.enable_progress_bar()


def _load_packed(
    cls: Any, folder: Path, dtype: torch.dtype, device: torch.device, packed: str
) -> nn.Module:
    """A network of transformers on the CPU, packed on ``device``."""
    from videotune.memory.quantization import QuantizedLinear, packed_note  # imports torch

    found = {header.dtype for header in headers(weight_files(folder)).values()} & set(DTYPES)
    there = (
        getattr(torch, DTYPES[found.pop()]) if len(found) == 1 else dtype
    )  # then weights are pages, and no memory
    net = _load_by_transformers(cls, folder, there, torch.device("cpu"))
    linears = dict(net.named_modules())
    for path, layer in _pack(cls, net, (), packed, dtype).items():
        linear = linears.pop(
            path
        )  # and with it the only weight there is: one after the other goes as it is packed
        layer.set_weight(linear.weight.detach().to(device), torch.device("cpu"))
        linear.weight = None
    kept = {
        id(x)
        for layer in net.modules()
        if isinstance(layer, QuantizedLinear)
        for x in layer.kept.values()
    }
    for name, parameter in net.named_parameters():
        if id(parameter) not in kept:  # a page that stayed would keep the file mapped
            parameter.data = parameter.data.to(dtype_of(name, cls, dtype), copy=True)
    note(packed_note(net, f"text encoder {cls.__name__}", packed))
    return net


def _load_by_transformers(
    cls: Any, folder: Path, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    files = weight_files(folder)
    refuse_dtypes(files, headers(files))
    try:
        how = {"device_map": {"": device}, "use_safetensors": True, "output_loading_info": True}
        with quietly():
            net, found = pretrained(cls, folder, dtype=dtype, **how)
    except VideotuneError as error:
        raise VideotuneError(
            f"{shown(files)} does not fit {folder / 'config.json'}: {error}"
        ) from error
    absent = sorted(found["missing_keys"])
    if absent:  # transformers would fill them with random numbers
        lacks = f"{len(absent)} tensors are missing, as {absent[0]}. Take weights and config of one model"
        raise VideotuneError(f"{shown(files)} is not all of a {cls.__name__}: {lacks}.")
    return net


def refuse_dtypes(
    files: list[Path], found: Mapping[str, Header], known: Collection[str] = tuple(DTYPES)
) -> None:
    """Raise VideotuneError for integers, and for dtypes that are not ``known``: what is loaded is a plain network."""
    odd = [
        name
        for name, header in found.items()
        if header.dtype not in known and not name.endswith("position_ids")
    ]
    if odd:
        kind = f"weights of the dtype {found[odd[0]].dtype} ({odd[0]})"
        raise VideotuneError(
            f"{shown(files)} holds {kind}: take the file in bfloat16, float16 or float32"
        )


def read_states(
    cls: Any, folder: Path, net: nn.Module, echo: LogFn | None = None
) -> Iterator[dict[str, Tensor]]:
    """The weights of a part by diffusers' names, file by file as the files' own pages; of a file in another layout tensor
    by tensor. ``net`` is the part's network, of which the shapes count. Raises VideotuneError as ``check_part`` does.
    """
    from safetensors.torch import load_file  # imports torch

    sources = check_part(cls, folder, net, echo)
    if single_file.in_diffusers_layout(sources):
        return map(load_file, weight_files(folder))
    return ({name: tensor} for name, tensor in single_file.tensors(sources))


def check_part(
    cls: Any, folder: Path, net: nn.Module, echo: LogFn | None = None
) -> dict[str, WeightSource]:
    """Compare the heads of a part's files with its config's model.

    Returns where each tensor of the model lies. ``echo`` is told of weights in 8 bits, and of those that are left out.
    Raises VideotuneError that names both models where they differ.
    """
    files = weight_files(folder)
    stored = {Path(shown([path])): headers([path]) for path in files}
    every = headers(files)
    wanted = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    for path, one in stored.items():
        single_file.refuse_packed(path, one)
    sources = single_file.find_sources(cls.__name__, wanted, stored)
    if not sources:
        what = f"is {single_file.kind_of(every) or 'of no known kind'}, not a transformer"
        raise VideotuneError(f"{shown(files)} {what}: it has no tensor of a {cls.__name__}")
    refuse_dtypes(
        files, {source.name: source.stored for source in sources.values()}, {*DTYPES, *FP8}
    )
    found = {name: source.shape for name, source in sources.items()}
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    spare = single_file.left_over(sources, every)
    extra = sum(every[name].count for name in spare)
    held = sum(map(math.prod, found.values()))
    if wrong or extra > _SPARE * (held + extra):
        name = (wrong or spare)[0]
        theirs = (
            "x".join(map(str, found.get(name, every[name].shape if name in every else ())))
            or "missing"
        )
        ours = "x".join(map(str, wanted[name])) if name in wanted else "not in the model"
        counts = [held + extra, sum(map(math.prod, wanted.values()))]
        there, mine = (
            f"{count / 1e9:.2f} billion" if count >= 5e6 else f"{count:,}" for count in counts
        )
        fault = f"it holds {there} parameters, a {cls.__name__} of this config {mine}. {len(wrong or spare)} tensors"
        pair = f"{name}: {theirs} in the file, {ours} by the config.{_published(cls, stored)}"
        raise VideotuneError(
            f"{shown(files)} does not fit {shown([folder / 'config.json'])}: {fault} differ: {pair}"
        )
    eight = sum(source.stored.dtype in FP8 for source in sources.values())
    if eight and echo:
        echo(
            f"note: {shown(files)}: {eight} of {len(sources)} weights are in fp8; the base model is what these give"
        )
    if spare and echo:
        echo(
            f"note: {shown(files)}: {len(spare)} weights that no {cls.__name__} has are left out: {spare[0]} …"
        )
    return sources


def _published(cls: Any, stored: Mapping[Path, Mapping[str, Header]]) -> str:
    """Which published model has the shapes of these files, in words."""
    for path in sorted(CONFIGS.glob("*/transformer/config.json")):
        if read_config(path).get("_class_name") == cls.__name__:
            shapes = {
                name: tuple(value.shape)
                for name, value in on_meta(cls, path.parent).state_dict().items()
            }
            found = single_file.find_sources(cls.__name__, shapes, stored)
            if shapes == {name: source.shape for name, source in found.items()}:
                return f" Its shapes are those of {path.parents[1].name}."
    return ""


def shown(files: list[Path]) -> str:
    """The file as the user knows it: where a link of ours leads."""
    first = (
        files[0].resolve()
        if files[0].is_symlink() and "blobs" not in files[0].resolve().parts
        else files[0]
    )
    return str(first) if len(files) == 1 else f"{first} (and {len(files) - 1} more)"


def on_meta(cls: Any, folder: Path) -> nn.Module:
    """A network of diffusers or transformers as its config describes it, all of it on the meta device."""
    with torch.device("meta"):
        return built(cls, folder)


def to_fill(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model that a part's config describes, parameters on the meta device, buffers real."""
    from accelerate import init_empty_weights  # torch comes with it

    if read_config(folder / "config.json").get("quantization_config"):
        raise VideotuneError(
            f"{folder} is quantized: take the checkpoint in float32, bfloat16 or float16"
        )
    # some models make their buffers in torch's default dtype
    with transformers.modeling_utils.local_torch_dtype(dtype), init_empty_weights():
        return built(cls, folder)


def built(cls: Any, folder: Path) -> Any:
    """A network of diffusers or transformers as the config in its folder describes it.

    Raises VideotuneError where there is no such network.
    """
    with explained(f"{folder / 'config.json'} describes no {cls.__name__}"):
        if hasattr(cls, "load_config"):
            return cls.from_config(cls.load_config(folder))
        return cls(pretrained(cls.config_class, folder))


def as_loaded(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A part of a base model on the meta device, each parameter in the dtype that it would be loaded in."""
    if hasattr(cls, "load_config"):
        net = to_fill(cls, folder, dtype)
    else:
        with transformers.modeling_utils.local_torch_dtype(dtype):
            net = on_meta(cls, folder)
        net.tie_weights()  # type: ignore[operator]
    for name, parameter in net.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype_of(name, cls, dtype))
    return net


def kept_in_float32(cls: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Parts of the paths of modules that a model's authors keep in float32."""
    if (
        not hasattr(cls, "load_config") and dtype != torch.float16
    ):  # transformers means half precision alone by that
        return tuple(getattr(cls, "_keep_in_fp32_modules_strict", None) or ())
    return tuple(getattr(cls, "_keep_in_fp32_modules", None) or ())


def dtype_of(name: str, cls: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter, by its name, of a model that is loaded in ``dtype``."""
    return (
        torch.float32
        if any(part in kept_in_float32(cls, dtype) for part in name.split("."))
        else dtype
    )
