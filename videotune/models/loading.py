"""Load weights file by file, straight into the right dtype and device, checked against
the config.

Libraries read folders and Hub repositories without running their code, and errors name
the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.console import doing
from videotune.errors import VideotuneError
from videotune.files import size_text
from videotune.lazy import torch, transformers
from videotune.models import single_file
from videotune.models.model_files import (
    headers,
    note,
    read_config,
    weight_files,
)
from videotune.models.part_check import check_part, refuse_dtypes, shown
from videotune.models.single_file import DTYPES
from videotune.models.skeletons import (
    as_loaded,
    dtype_of,
    explained,
    kept_in_float32,
    pretrained,
    to_fill,
)
from videotune.types import FillFn, LogFn

if TYPE_CHECKING:
    from torch import Tensor, nn

    from videotune.memory.quantization import QuantizedLinear
    from videotune.models.weight_changes import WeightChanges

ANNOUNCED_BYTES = 500_000_000
"""Weights that take seconds to read."""

PROBES = ("a red circle moves left", "a blue square moves up")
"""Two captions that a tokenizer with a vocabulary reads as different tokens."""

WORD_VOCABULARY = 1000
"""Tokens from which a vocabulary has words; tiny models for tests have letters."""


def read_tokenizer(folder: Path, encoder: Path, cls: Any = None) -> Any:
    """Load a tokenizer and check that it works with its text encoder.

    Args:
        folder: the tokenizer's folder.
        encoder: the text encoder's folder.
        cls: class of the tokenizer. None: as the folder says.

    Raises:
        VideotuneError: if it is damaged, reads two captions as the same tokens (it then
            has no vocabulary), or has more tokens than the encoder's table has rows.
    """
    tokenizer = pretrained(cls or transformers.AutoTokenizer, folder)
    with explained(f"{folder} holds no tokenizer that works"):
        longest = min(32, tokenizer.model_max_length)
        probe_ids = []
        for text in PROBES:
            encoding = tokenizer(
                text, truncation=True, max_length=longest, verbose=False
            )
            probe_ids.append(encoding.input_ids)
        last_token = max(tokenizer.get_vocab().values())

    first_ids, second_ids = probe_ids
    if first_ids == second_ids:
        raise VideotuneError(
            f"{folder}: its tokenizer reads {PROBES[0]!r} and {PROBES[1]!r} as the same "
            f"{len(first_ids)} tokens: fetch the model again, or copy all of it"
        )

    with explained(f"{folder} holds no tokenizer that works"):
        fault = _tokenizer_fault(tokenizer, longest)
    if fault is not None:
        raise VideotuneError(
            f"{folder}: its tokenizer {fault}: a part of it is missing."
            " Fetch the model again, or copy all of it"
        )

    config = read_config(encoder / "config.json")
    # A pipeline pads with the end mark if neither the tokenizer nor the encoder has a
    # padding token, as for Llama.
    has_padding = tokenizer.pad_token is not None or (
        tokenizer.eos_token is not None and config.get("pad_token_id") is None
    )
    if not has_padding:
        raise VideotuneError(
            f"{folder} names no token that pads captions: fetch the model again, or copy all of it"
        )

    rows = config.get("vocab_size")
    if isinstance(rows, int) and last_token >= rows:
        raise VideotuneError(
            f"{folder} has a token {last_token}, but {encoder} has only {rows}. "
            "Take both from one checkpoint."
        )

    added = added_words(tokenizer)
    if added:
        first_added = ", ".join(repr(text[:40]) for text in added[:3])
        note(
            f"{folder}: words were added to its tokenizer ({first_added}). A caption with "
            "them gives other tokens than the text encoder was trained with"
        )
    return tokenizer


def added_words(tokenizer: Any) -> list[str]:
    """Return the words and phrases among the tokens that were added to a vocabulary.

    Marks of the authors, such as ``<extra_id_0>``, have other characters than letters.
    """
    added_tokens = tokenizer.added_tokens_decoder.values()
    texts = [token.content for token in added_tokens]
    return [text for text in texts if "".join(text.split()).isalpha()]


def _tokenizer_fault(tokenizer: Any, longest: int) -> str | None:
    """Return what shows that a tokenizer has lost a part of its pipeline, or None.

    Without its normalizer, pre-tokenizer or post-processor it gives other tokens than
    those that its model was trained with, and no error.
    """
    text = PROBES[0]
    marked_ids = tokenizer(
        text, truncation=True, max_length=longest, verbose=False
    ).input_ids
    plain_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if tokenizer.bos_token is not None and marked_ids == plain_ids:
        return f"names a first token {tokenizer.bos_token!r} and does not put it there"

    decoded = tokenizer.decode(plain_ids, skip_special_tokens=True)
    if " ".join(decoded.split()).lower() != text:
        return f"reads {text!r} as {decoded[:60]!r}"

    has_words = len(tokenizer.get_vocab()) >= WORD_VOCABULARY
    if has_words and len(plain_ids) >= len(text.replace(" ", "")):
        return f"has words and reads {text!r} letter by letter"
    return None


ENCODED_TOGETHER = 10_000
"""Captions that are counted at once. A caption's tokens take some kB."""


def count_tokens(folder: Path, captions: Sequence[str]) -> list[int] | None:
    """Return each caption's number of tokens, marks included, without torch.

    None if the folder has no tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer  # keeps the start light

    with explained(f"{path} cannot be read"):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    counts: list[int] = []
    for first in range(0, len(captions), ENCODED_TOGETHER):
        encodings = tokenizer.encode_batch(captions[first : first + ENCODED_TOGETHER])
        counts += [len(encoding.ids) for encoding in encodings]
    return counts


def load_model(
    cls: Any,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    packed: str | None = None,
    blocks: Sequence[str] = (),
    *,
    matmul: str | None = None,
    stay: torch.device | None = None,
    fill: FillFn = None,
    stream: LogFn | None = None,
    changes: WeightChanges | None = None,
) -> nn.Module:
    """Load a part of a base model by its class in diffusers or transformers, frozen.

    The result is that of ``cls.from_pretrained(folder, dtype=dtype)``, with modules in
    float32 if diffusers keeps them so, but never more than the model and one file of
    weights is in memory. On a CPU, weights that already have the dtype are mapped pages
    of the file.

    Args:
        cls: class of the part.
        folder: folder of the part.
        dtype: dtype of the weights.
        device: device of the network.
        packed: quantization of the Linears in ``blocks`` (``memory/quantization.py``),
            applied as each is read. None: no quantization.
        blocks: module paths of lists of blocks. Empty: the largest list.
        matmul: eight-bit dtype in which the Linears in ``blocks`` multiply
            (``memory/eight_bit_matmul.py``). None: as they compute.
        stay: device for the weights of a diffusers network that the caller streams to
            ``device``.
        fill: puts tensors in the place of the parameters, which are on the meta device,
            instead of reading files.
        stream: streams the blocks of a text encoder from the host; gets a line if that
            fails.
        changes: changes of a diffusers network's weights, made before they are rounded
            to ``dtype`` or packed. None: no changes.

    Raises:
        VideotuneError: if weights and config do not belong to the same model.
    """
    if fill is None:
        _announce(folder)
    if fill is not None:
        net = as_loaded(cls, folder, dtype)
        _replace_linears(cls, net, blocks, packed, matmul, dtype)
        fill(net)
    elif hasattr(cls, "load_config"):
        net = _load_network(
            cls,
            folder,
            dtype,
            device,
            (packed, matmul),
            blocks,
            stay or device,
            changes,
        )
    else:
        net = _load_text_encoder(cls, folder, dtype, device, packed, stream)
    return net.eval().requires_grad_(False)


@cache
def _announce(folder: Path) -> None:
    """Name a part whose weights take a while to read, once in a process."""
    count = sum(path.stat().st_size for path in weight_files(folder))
    if count >= ANNOUNCED_BYTES:
        doing(f"loading {folder.name.replace('_', ' ')}: {size_text(count)}")


def _load_text_encoder(
    cls: Any,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    packed: str | None,
    stream: LogFn | None,
) -> nn.Module:
    """Load by transformers, which reads file by file and ties weights that are stored
    once.
    """
    if packed is None:
        first_device = torch.device("cpu") if stream else device
        net = _load_by_transformers(cls, folder, dtype, first_device)
    else:
        net = _load_packed(cls, folder, dtype, device, packed)
    if stream:
        return _streamed(net, device, stream)
    return net.to(device)


def _load_network(
    cls: Any,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    kinds: tuple[str | None, str | None],
    blocks: Sequence[str],
    stay: torch.device,
    changes: WeightChanges | None,
) -> nn.Module:
    """Load file by file; ``kinds``: ``packed`` and ``matmul`` of ``load_model``."""
    net = to_fill(cls, folder, dtype)
    loaded = dict[str, "Tensor"]()
    states: Iterable[dict[str, Tensor]] = read_states(cls, folder, net, echo=note)
    if changes is not None:
        states = changes.apply(states, device)
    layers = _replace_linears(cls, net, blocks, *kinds, dtype)
    for state in states:
        paths = [path for path in layers if f"{path}.weight" in state]
        for path in paths:
            # Packed on the device that computes: fast, and the same bits with and
            # without streaming.
            layers[path].set_weight(state.pop(f"{path}.weight").to(device), stay)
        unmap = bool(layers) or len(state) == 1
        loaded |= _placed(cls, state, dtype, stay, unmap=unmap)

    net.load_state_dict(loaded, strict=False, assign=True)
    for module in net.modules():  # buffers that no file holds
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(stay)
    return net


def _replace_linears(
    cls: Any,
    net: nn.Module,
    blocks: Sequence[str],
    packed: str | None,
    matmul: str | None,
    dtype: torch.dtype,
) -> dict[str, QuantizedLinear]:
    """Replace Linears with empty layers in fewer bits; see ``load_model``."""
    # imports torch
    from videotune.memory.eight_bit_matmul import multiply_linears
    from videotune.memory.quantization import largest_list, pack_linears

    excluded = kept_in_float32(cls, dtype)
    layers: dict[str, QuantizedLinear] = {}
    if matmul is not None:
        layers |= multiply_linears(net, blocks, matmul, dtype, excluded)
    if packed is not None:
        # the rest of the Linears
        paths = blocks or [largest_list(net)]
        layers |= pack_linears(net, paths, packed, dtype, excluded)
    return layers


def _streamed(net: nn.Module, device: torch.device, echo: LogFn) -> nn.Module:
    """Move a network to the device, except for the weights of its largest list of
    blocks.
    """
    from videotune.memory.block_offload import stream_blocks  # imports torch
    from videotune.memory.quantization import largest_list

    streams = stream_blocks(net, [largest_list(net)], device, 1.0, echo=echo)
    net.streams = streams  # type: ignore[assignment]  # lives as long as the network
    return net


def _placed(
    cls: Any,
    state: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    unmap: bool,
) -> dict[str, Tensor]:
    """Return each tensor in its dtype on the device, and empty ``state`` meanwhile.

    ``unmap``: copy tensors that would stay pages of the file.
    """
    result = {}
    for name in list(state):
        tensor = state.pop(name)
        wanted = (
            dtype_of(name, cls, dtype) if tensor.is_floating_point() else tensor.dtype
        )
        moved = tensor.to(device).to(wanted).contiguous()
        # A small tensor that stays a page of the file would keep the entire file
        # mapped.
        if moved is tensor and (unmap or wanted != dtype):
            moved = moved.clone()
        result[name] = moved
    return result


@contextmanager
def quietly() -> Iterator[None]:
    """Hide the progress bars of transformers and diffusers."""
    from diffusers.utils import logging as diffusers_logging  # imports torch
    from transformers.utils import logging as transformers_logging

    enabled = []
    for logging in (transformers_logging, diffusers_logging):
        if logging.is_progress_bar_enabled():
            enabled.append(logging)
            logging.disable_progress_bar()
    try:
        yield
    finally:
        for logging in enabled:
            logging.enable_progress_bar()


def _load_packed(
    cls: Any, folder: Path, dtype: torch.dtype, device: torch.device, packed: str
) -> nn.Module:
    """Load a network of transformers to the CPU, packed on ``device``."""
    # imports torch
    from videotune.memory.quantization import QuantizedLinear, packed_note

    stored_dtypes = {header.dtype for header in headers(weight_files(folder)).values()}
    stored_dtypes &= set(DTYPES)
    # In the file's own dtype, weights are mapped pages that take no memory.
    read_dtype = dtype
    if len(stored_dtypes) == 1:
        read_dtype = getattr(torch, DTYPES[stored_dtypes.pop()])

    net = _load_by_transformers(cls, folder, read_dtype, torch.device("cpu"))
    linears = dict(net.named_modules())
    layers = _replace_linears(cls, net, (), packed, None, dtype)
    for path, layer in layers.items():
        # The last reference, so each weight is freed as soon as it is packed.
        linear = linears.pop(path)
        layer.set_weight(linear.weight.detach().to(device), torch.device("cpu"))
        linear.weight = None

    packed_ids = set()
    for module in net.modules():
        if isinstance(module, QuantizedLinear):
            packed_ids |= {id(tensor) for tensor in module.packed_tensors.values()}
    for name, parameter in net.named_parameters():
        # a page that stays would keep the file mapped
        if id(parameter) not in packed_ids:
            parameter.data = parameter.data.to(dtype_of(name, cls, dtype), copy=True)
    note(packed_note(net, f"text encoder {cls.__name__}", packed))
    return net


def _load_by_transformers(
    cls: Any, folder: Path, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    files = weight_files(folder)
    refuse_dtypes(files, headers(files))
    try:
        with quietly():
            net, info = pretrained(
                cls,
                folder,
                dtype=dtype,
                device_map={"": device},
                use_safetensors=True,
                output_loading_info=True,
            )
    except VideotuneError as error:
        raise VideotuneError(
            f"{shown(files)} does not fit {folder / 'config.json'}: {error}"
        ) from error

    absent = sorted(info["missing_keys"])
    if absent:  # transformers would fill them with random numbers
        raise VideotuneError(
            f"{shown(files)} is not all of a {cls.__name__}: {len(absent)} tensors are missing, "
            f"as {absent[0]}. Take weights and config of one model."
        )
    return net


def read_states(
    cls: Any, folder: Path, net: nn.Module, echo: LogFn | None = None
) -> Iterator[dict[str, Tensor]]:
    """Read the weights of a part by diffusers' keys.

    A file in diffusers' layout is read at once, as mapped pages; another layout tensor
    by tensor. Raises as ``check_part`` does.
    """
    from safetensors.torch import load_file  # imports torch

    sources = check_part(cls, folder, net, echo)
    if single_file.in_diffusers_layout(sources):
        return map(load_file, weight_files(folder))
    return ({name: tensor} for name, tensor in single_file.tensors(sources))
