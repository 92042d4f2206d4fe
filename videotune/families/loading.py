"""Loading weights: straight into the wanted dtype and device, shard by shard, after a look at what the files hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.families.parts import Header, has_weights, headers, model_parts, read_config, said, weight_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from videotune.memory.quantization import PackedLinear

READ_FROM_ONE_FILE = "Wan, HunyuanVideo, HiDream and LTX-Video"
"""The families whose transformers diffusers reads from one file as the authors or ComfyUI name its tensors."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")
_SPARE = 0.01
"""Weights that a model has no place for are left out, and said, up to this share; more is another model."""


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
        net = _shape_of(cls, folder, dtype)
        if kept is not None:
            _packed(net, blocks, kept, dtype, _in_float32(cls, dtype))
        given_shape(net)
        return net.eval().requires_grad_(False)
    files, own, device = weight_files(folder), device, _ONTO.get() or device
    if not hasattr(cls, "load_config"):  # transformers streams by itself, and ties weights that stand in a file once
        return _text_encoder(cls, folder, files, dtype, device, own, kept)
    net = skeleton(cls, folder, dtype)
    rename = check_part(cls, folder, net, say=said)
    exact = _in_float32(cls, dtype)
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


def _shape_of(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A part of a base model on the meta device, each parameter in the dtype that it would be loaded in."""
    import torch

    if hasattr(cls, "load_config"):
        net = skeleton(cls, folder, dtype)
    else:
        config = cls.config_class.from_pretrained(folder)
        with _default_dtype(dtype), torch.device("meta"):
            net = cls(config)
        net.tie_weights()
    kept = _in_float32(cls, dtype)
    for name, parameter in net.named_parameters():
        wanted = torch.float32 if any(part in kept for part in name.split(".")) else dtype
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(wanted)
    return net


def _in_float32(cls: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Parts of the paths of modules that a model's authors keep in float32."""
    import torch

    if not hasattr(cls, "load_config") and dtype != torch.float16:  # transformers means half precision alone by that
        return tuple(getattr(cls, "_keep_in_fp32_modules_strict", None) or ())
    return tuple(getattr(cls, "_keep_in_fp32_modules", None) or ())


def _packed(
    net: nn.Module, blocks: Sequence[str], kept: str, dtype: torch.dtype, exact: Sequence[str]
) -> dict[str, PackedLinear]:
    """Packed layers in the place of a network's Linears, empty; of its longest list of modules where no list is named."""
    from videotune.memory.quantization import longest_list, pack_linears

    return pack_linears(net, blocks or [longest_list(net)], kept, dtype, exact)


def skeleton(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model that a part's config describes, parameters on the meta device, buffers real."""
    from accelerate import init_empty_weights

    config = cls.load_config(folder)
    if config.get("quantization_config"):
        raise VideotuneError(f"{folder} is quantized: take the checkpoint in float32, bfloat16 or float16")
    with _default_dtype(dtype), init_empty_weights():
        return cls.from_config(config)


def shape_of(cls: Any, folder: Path) -> nn.Module:
    """A network of diffusers as its config describes it, all of it on the meta device."""
    import torch

    with torch.device("meta"):
        return cls.from_config(cls.load_config(folder))


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
def in_tiles(vae: Any, tiled: bool) -> Iterator[None]:
    """An autoencoder that works in overlapping tiles, or whole; afterwards whole."""
    if tiled:
        vae.enable_tiling()
    try:
        yield
    finally:
        vae.disable_tiling()


@contextmanager
def text_encoders_streamed(say: Callable[[str], None]) -> Iterator[None]:
    """Text encoders that are loaded within keep the weights of their blocks on the host; the numbers are the same.

    ``say`` is told what could not be done as it should.
    """
    before = _STREAMED.set(say)
    try:
        yield
    finally:
        _STREAMED.reset(before)


def _streamed(net: nn.Module, device: torch.device) -> nn.Module:
    """Move a network to the device, but for the weights of its longest list of blocks."""
    from videotune.memory.offload import OffloadSettings, stream_blocks
    from videotune.memory.quantization import longest_list

    streams = stream_blocks(net, [longest_list(net)], device, OffloadSettings(1.0), say=_STREAMED.get() or said)
    net.streams = streams  # type: ignore[assignment]  # what streams lives as long as the network
    return net


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As diffusers does: some models make their buffers in torch's default dtype."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
    """Without transformers' bars of progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
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

    from videotune.memory.quantization import PackedLinear, share_of

    streamed = _STREAMED.get() is not None
    if kept is None:
        net = _transformers_model(cls, folder, files, dtype, torch.device("cpu") if streamed else device)
        return _streamed(net, device) if streamed else net
    found = {header.dtype for header in headers(files).values()} & set(_DTYPES)
    there = getattr(torch, _DTYPES[found.pop()]) if len(found) == 1 else dtype  # then weights are pages, and no memory
    net, exact = _transformers_model(cls, folder, files, there, torch.device("cpu")), _in_float32(cls, dtype)
    linears = dict(net.named_modules())
    for path, layer in _packed(net, (), kept, dtype, exact).items():
        linear = linears.pop(path)  # and with it the only weight there is: one after the other goes as it is packed
        layer.take(linear.weight.detach().to(own), torch.device("cpu"))
        linear.weight = None
    packed = {id(x) for layer in net.modules() if isinstance(layer, PackedLinear) for x in layer.kept.values()}
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
            net, told = cls.from_pretrained(
                folder, dtype=dtype, device_map={"": device}, use_safetensors=True, output_loading_info=True
            )
    except RuntimeError as error:  # sizes differ
        raise VideotuneError(f"{_told(files)} does not fit {folder / 'config.json'}: {error}") from error
    absent = sorted(told["missing_keys"])
    if absent:  # transformers would fill them with random numbers
        raise VideotuneError(
            f"{_told(files)} is not all of a {cls.__name__}: {len(absent)} tensors are missing, as {absent[0]}. "
            "Take weights and config of one model."
        )
    return net.eval().requires_grad_(False)


def check_base(folder: Path) -> None:
    """Raise VideotuneError where the weights of a network of diffusers are not those of its config.

    Only the heads of the files are read, so that a wrong file is known before anything is encoded.
    """
    import diffusers
    import torch

    for part, (library, name) in model_parts(read_config(folder / "model_index.json")).items():
        if library == "diffusers" and has_weights(name):
            cls = getattr(diffusers, name, None)
            if cls is None:
                raise VideotuneError(
                    f"{folder / part}: diffusers {diffusers.__version__} has no {name}: install a newer one"
                )
            check_part(cls, folder / part, skeleton(cls, folder / part, torch.float32))


Rename = Callable[[dict[str, "Tensor"]], dict[str, "Tensor"]]


def check_part(cls: Any, folder: Path, net: nn.Module, say: Callable[[str], None] | None = None) -> Rename | None:
    """Compare the heads of a part's files with its config's model.

    Returns how tensors must be renamed, where the file has the authors' names (None: it has diffusers'). ``say`` is told
    of weights that are left out. Raises VideotuneError that names both models where they differ.
    """
    files = weight_files(folder)
    found = headers(files)
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    eight = [name for name, header in found.items() if header.dtype in _EIGHT_BITS]
    if eight:
        raise VideotuneError(
            f"{_told(files)} holds weights of 8 bits ({eight[0]}: {found[eight[0]].dtype}): "
            "take the file in bfloat16, float16 or float32"
        )
    rename = None
    if not set(shapes) & set(found):
        rename = _renaming(cls, folder, found)
        found = _renamed(cls, folder, found, rename)
    wrong = [name for name in shapes if name not in found or found[name].shape != shapes[name]]
    spare = [name for name in found if name not in shapes]
    if wrong or sum(found[name].count for name in spare) > _SPARE * sum(header.count for header in found.values()):
        _refuse(cls, folder, found, shapes, wrong or spare)
    if spare and say:
        say(
            f"note: {_told(files)}: {len(spare)} weights have no place in a {cls.__name__} and are left out: {spare[0]} …"
        )
    return rename


def _renaming(cls: Any, folder: Path, found: Mapping[str, Header]) -> Rename:
    """diffusers' own function from the authors' names of a transformer's tensors to its own."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    files = weight_files(folder)
    if any("lora_" in name for name in found):
        raise VideotuneError(f"{_told(files)} is a LoRA, not a transformer: merge it first, or start from its base")
    known = SINGLE_FILE_LOADABLE_CLASSES.get(cls.__name__)
    if known is None:
        raise VideotuneError(
            f"{_told(files)}: diffusers reads no {cls.__name__} with the tensors' names of this file (the first is "
            f"{next(iter(found), 'none')!r}); it reads those of {READ_FROM_ONE_FILE}. Save it in diffusers layout first."
        )
    config, convert = cls.load_config(folder), known["checkpoint_mapping_fn"]
    return lambda state: convert(checkpoint=state, config=config)


def _renamed(cls: Any, folder: Path, found: Mapping[str, Header], rename: Rename) -> dict[str, Header]:
    """The headers under diffusers' names: the renaming runs over tensors without memory."""
    import torch

    empty = {
        name: torch.empty(header.shape, dtype=getattr(torch, _DTYPES.get(header.dtype, "float32")), device="meta")
        for name, header in found.items()
    }
    files = weight_files(folder)
    try:
        renamed = rename(empty)
    except (KeyError, IndexError, ValueError, RuntimeError, AttributeError) as error:
        raise VideotuneError(
            f"{_told(files)} is no transformer that diffusers can read as a {cls.__name__} ({error!r:.200})"
        ) from error
    return {name: Header("", tuple(value.shape), files[0].name) for name, value in renamed.items()}


def _refuse(
    cls: Any, folder: Path, found: Mapping[str, Header], shapes: Mapping[str, tuple[int, ...]], wrong: list[str]
) -> None:
    count = sum(Header("", shape, "").count for shape in shapes.values())
    name = wrong[0] if wrong else next(iter(found), "nothing")
    theirs = "x".join(map(str, found[name].shape)) if name in found else "missing"
    ours = "x".join(map(str, shapes[name])) if name in shapes else "not in the model"
    raise VideotuneError(
        f"{_told(weight_files(folder))} does not fit {folder / 'config.json'}: the file holds "
        f"{_billions(sum(header.count for header in found.values()))} parameters, a {cls.__name__} of this config has "
        f"{_billions(count)}. {len(wrong)} tensors differ, as {name}: {theirs} in the file, {ours} by the config. "
        "Take weights and config of one model."
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 5e6 else f"{count:,}"


def _told(files: list[Path]) -> str:
    """The file as the person knows it: where a link of ours leads."""
    first = files[0].resolve() if files[0].is_symlink() and "blobs" not in files[0].resolve().parts else files[0]
    return str(first) if len(files) == 1 else f"{first} (and {len(files) - 1} more)"
