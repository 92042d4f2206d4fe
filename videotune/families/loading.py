"""Loading weights: straight into the wanted dtype and device, shard by shard, after a look at what the files hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.families.matching import DTYPES, check_part, refuse_dtypes, told
from videotune.families.parts import headers, said, weight_files
from videotune.families.pretrained import pretrained
from videotune.families.skeletons import as_loaded, in_float32, to_fill

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from videotune.memory.quantization import QuantizedLinear


def load_model(
    cls: Any,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    kept: str | None = None,
    blocks: Sequence[str] = (),
) -> nn.Module:
    """A part of a base model by its class of diffusers or transformers, frozen, in ``dtype`` on ``device``.

    It is what ``cls.from_pretrained(folder, dtype=dtype)`` gives, modules that diffusers keeps in float32 included, but
    never holds more than the model and one file of weights. On a CPU, weights that already have the dtype are the file's
    own pages, mapped. ``kept``: how the weights of the Linears in its lists of ``blocks`` (none named: in its longest one)
    are packed, each as it is read (``memory/quantization.py``); None: they are not. Raises VideotuneError where weights
    and config are not of one model.

    Inside ``without_weights`` it is the model's shape alone, and no file of weights is read.
    """
    given_shape = _WITHOUT.get()
    if given_shape is not None:
        net = as_loaded(cls, folder, dtype)
        if kept is not None:
            _packed(net, blocks, kept, dtype, in_float32(cls, dtype))
        given_shape(net)
        return net.eval().requires_grad_(False)
    files, own, device = weight_files(folder), device, _ONTO.get() or device
    if not hasattr(cls, "load_config"):  # transformers streams by itself, and ties weights that stand in a file once
        return _text_encoder(cls, folder, files, dtype, device, own, kept)
    net = to_fill(cls, folder, dtype)
    rename = check_part(cls, folder, net, echo=said)
    exact = in_float32(cls, dtype)
    layers = {} if kept is None else _packed(net, blocks, kept, dtype, exact)
    for batch in [files] if rename else [[file] for file in files]:
        state = _mapped(batch)
        state = rename(state) if rename else state
        for path in [path for path in layers if f"{path}.weight" in state]:
            # where the run computes, so that what is streamed is what is not, to the bit; and fast
            layers[path].take(state.pop(f"{path}.weight").to(own), device)
        net.load_state_dict(_placed(state, dtype, device, exact, alone=bool(layers)), strict=False, assign=True)
    for module in net.modules():  # buffers that no file holds
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return net.eval().requires_grad_(False)


_WITHOUT: ContextVar[Callable[[nn.Module], object] | None] = ContextVar("without weights", default=None)


@contextmanager
def without_weights(fill: Callable[[nn.Module], object]) -> Iterator[None]:
    """Parts are loaded by their configs alone; ``fill`` puts tensors in the place of parameters on the meta device."""
    before = _WITHOUT.set(fill)
    try:
        yield
    finally:
        _WITHOUT.reset(before)


def _packed(
    net: nn.Module, blocks: Sequence[str], kept: str, dtype: torch.dtype, exact: Sequence[str]
) -> dict[str, QuantizedLinear]:
    """Packed layers in the place of a network's Linears, empty; of its longest list of modules where no list is named."""
    from videotune.memory.quantization import longest_list, pack_linears

    return pack_linears(net, blocks or [longest_list(net)], kept, dtype, exact)


_ONTO: ContextVar[Any] = ContextVar("device", default=None)


@contextmanager
def loading_onto(device: torch.device) -> Iterator[None]:
    """What ``load_model`` loads within stays on this device, whatever its caller says: the CPU, for what is streamed."""
    before = _ONTO.set(device)
    try:
        yield
    finally:
        _ONTO.reset(before)


_STREAMED: ContextVar[Callable[[str], None] | None] = ContextVar("streamed", default=None)


@contextmanager
def text_encoders_streamed(echo: Callable[[str], None]) -> Iterator[None]:
    """Text encoders that are loaded within keep the weights of their blocks on the host; the numbers are the same.

    ``echo`` is told what could not be done as it should.
    """
    before = _STREAMED.set(echo)
    try:
        yield
    finally:
        _STREAMED.reset(before)


def _streamed(net: nn.Module, device: torch.device) -> nn.Module:
    """Move a network to the device, but for the weights of its longest list of blocks."""
    from videotune.memory.quantization import longest_list
    from videotune.memory.weight_streaming import OffloadSettings, stream_blocks

    streams = stream_blocks(net, [longest_list(net)], device, OffloadSettings(1.0), echo=_STREAMED.get() or said)
    net.streams = streams  # type: ignore[assignment]  # what streams lives as long as the network
    return net


def _mapped(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of files, not read yet: they are pages of the files."""
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for path in files:
        state |= load_file(path)
    return state


def _placed(
    state: dict[str, Tensor], dtype: torch.dtype, device: torch.device, kept: tuple[str, ...], alone: bool = False
) -> dict[str, Tensor]:
    """Each tensor in its own dtype on the device; the state is emptied on the way. ``alone``: none stays a file's page."""
    import torch

    placed = {}
    for name in list(state):
        tensor = state.pop(name)
        wanted = tensor.dtype
        if tensor.is_floating_point():
            wanted = torch.float32 if any(part in kept for part in name.split(".")) else dtype
        there = tensor.to(device).to(wanted).contiguous()
        # a small tensor that stayed a page of the file would keep all of the file mapped
        placed[name] = there.clone() if there is tensor and (alone or wanted != dtype) else there
    return placed


@contextmanager
def quietly() -> Iterator[None]:
    """Without the bars of progress of transformers and diffusers."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    shown = [logging for logging in (of_transformers, of_diffusers) if logging.is_progress_bar_enabled()]
    for logging in shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        for logging in shown:
            logging.enable_progress_bar()


def _text_encoder(
    cls: Any,
    folder: Path,
    files: list[Path],
    dtype: torch.dtype,
    device: torch.device,
    own: torch.device,
    kept: str | None,
) -> nn.Module:
    """A network of transformers on a device, or streamed to it. ``own``: where weights that are packed are packed."""
    import torch

    from videotune.memory.quantization import QuantizedLinear, share_of

    streamed, held = _STREAMED.get() is not None, headers(files)
    refuse_dtypes(files, held)
    if kept is None:
        net = _transformers_model(cls, folder, files, dtype, torch.device("cpu") if streamed else device)
        return _streamed(net, device) if streamed else net
    found = {header.dtype for header in held.values()} & set(DTYPES)
    there = getattr(torch, DTYPES[found.pop()]) if len(found) == 1 else dtype  # then weights are pages, and no memory
    net, exact = _transformers_model(cls, folder, files, there, torch.device("cpu")), in_float32(cls, dtype)
    linears = dict(net.named_modules())
    for path, layer in _packed(net, (), kept, dtype, exact).items():
        linear = linears.pop(path)  # and with it the only weight there is: one after the other goes as it is packed
        layer.take(linear.weight.detach().to(own), torch.device("cpu"))
        linear.weight = None
    packed = {id(x) for layer in net.modules() if isinstance(layer, QuantizedLinear) for x in layer.kept.values()}
    for name, parameter in net.named_parameters():
        if id(parameter) not in packed:
            wanted = torch.float32 if any(part in exact for part in name.split(".")) else dtype
            parameter.data = parameter.data.to(wanted, copy=True)  # a page that stayed would keep the file mapped
    net.requires_grad_(False)
    share = share_of(net)
    said(
        f"text encoder {cls.__name__}: {share.packed / share.numbers:.0%} of its weights are kept in {kept}, "
        f"{share.bytes / 1e9:.2f} GB in place of {share.plain / 1e9:.2f}"
    )
    return _streamed(net, device) if streamed else net.to(device)


def _transformers_model(
    cls: Any, folder: Path, files: list[Path], dtype: torch.dtype, device: torch.device
) -> nn.Module:
    try:
        with quietly():
            net, found = pretrained(
                cls, folder, dtype=dtype, device_map={"": device}, use_safetensors=True, output_loading_info=True
            )
    except VideotuneError as error:
        raise VideotuneError(f"{told(files)} does not fit {folder / 'config.json'}: {error}") from error
    absent = sorted(found["missing_keys"])
    if absent:  # transformers would fill them with random numbers
        raise VideotuneError(
            f"{told(files)} is not all of a {cls.__name__}: {len(absent)} tensors are missing, as {absent[0]}. "
            "Take weights and config of one model."
        )
    return net.eval().requires_grad_(False)
