"""Whether files of weights are those of a config's model: read from the heads of the files, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.families.parts import Header, has_weights, headers, model_parts, read_config, weight_files
from videotune.families.skeletons import to_fill

if TYPE_CHECKING:
    from torch import Tensor, nn

READ_FROM_ONE_FILE = "Wan, HunyuanVideo, HiDream and LTX-Video"
"""The families whose transformers diffusers reads from one file as the authors or ComfyUI name its tensors."""


DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of torch's for those of a safetensors file."""

_SPARE = 0.01
"""Weights that a model has no place for are left out, and said, up to this share; more is another model."""


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
            check_part(cls, folder / part, to_fill(cls, folder / part, torch.float32))


def refuse_dtypes(files: list[Path], found: Mapping[str, Header]) -> None:
    """Raise VideotuneError for weights of 8 bits, and for integers: what is loaded is a plain network."""
    odd = [name for name, header in found.items() if header.dtype not in DTYPES and not name.endswith("position_ids")]
    if odd:
        raise VideotuneError(
            f"{told(files)} holds weights of the dtype {found[odd[0]].dtype} ({odd[0]}): "
            "take the file in bfloat16, float16 or float32"
        )


Rename = Callable[[dict[str, "Tensor"]], dict[str, "Tensor"]]


def check_part(cls: Any, folder: Path, net: nn.Module, echo: Callable[[str], None] | None = None) -> Rename | None:
    """Compare the heads of a part's files with its config's model.

    Returns how tensors must be renamed, where the file has the authors' names (None: it has diffusers'). ``echo`` is told
    of weights that are left out. Raises VideotuneError that names both models where they differ.
    """
    files = weight_files(folder)
    found = headers(files)
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    refuse_dtypes(files, found)
    rename = None
    if not set(shapes) & set(found):
        rename = _renaming(cls, folder, found)
        found = _renamed(cls, folder, found, rename)
    wrong = [name for name in shapes if name not in found or found[name].shape != shapes[name]]
    spare = [name for name in found if name not in shapes]
    if wrong or sum(found[name].count for name in spare) > _SPARE * sum(header.count for header in found.values()):
        _refuse(cls, folder, found, shapes, wrong or spare)
    if spare and echo:
        echo(
            f"note: {told(files)}: {len(spare)} weights have no place in a {cls.__name__} and are left out: {spare[0]} …"
        )
    return rename


def _renaming(cls: Any, folder: Path, found: Mapping[str, Header]) -> Rename:
    """diffusers' own function from the authors' names of a transformer's tensors to its own."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    files = weight_files(folder)
    if any("lora_" in name for name in found):
        raise VideotuneError(f"{told(files)} is a LoRA, not a transformer: merge it first, or start from its base")
    known = SINGLE_FILE_LOADABLE_CLASSES.get(cls.__name__)
    if known is None:
        raise VideotuneError(
            f"{told(files)}: diffusers reads no {cls.__name__} with the tensors' names of this file (the first is "
            f"{next(iter(found), 'none')!r}); it reads those of {READ_FROM_ONE_FILE}. Save it in diffusers layout first."
        )
    config, convert = cls.load_config(folder), known["checkpoint_mapping_fn"]
    return lambda state: convert(checkpoint=state, config=config)


def _renamed(cls: Any, folder: Path, found: Mapping[str, Header], rename: Rename) -> dict[str, Header]:
    """The headers under diffusers' names: the renaming runs over tensors without memory."""
    import torch

    empty = {
        name: torch.empty(header.shape, dtype=getattr(torch, DTYPES.get(header.dtype, "float32")), device="meta")
        for name, header in found.items()
    }
    files = weight_files(folder)
    try:
        renamed = rename(empty)
    except (KeyError, IndexError, ValueError, RuntimeError, AttributeError) as error:
        raise VideotuneError(
            f"{told(files)} is no transformer that diffusers can read as a {cls.__name__} ({error!r:.200})"
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
        f"{told(weight_files(folder))} does not fit {folder / 'config.json'}: the file holds "
        f"{_billions(sum(header.count for header in found.values()))} parameters, a {cls.__name__} of this config has "
        f"{_billions(count)}. {len(wrong)} tensors differ, as {name}: {theirs} in the file, {ours} by the config. "
        "Take weights and config of one model."
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 5e6 else f"{count:,}"


def told(files: list[Path]) -> str:
    """The file as the person knows it: where a link of ours leads."""
    first = files[0].resolve() if files[0].is_symlink() and "blobs" not in files[0].resolve().parts else files[0]
    return str(first) if len(files) == 1 else f"{first} (and {len(files) - 1} more)"
