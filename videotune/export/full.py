"""A fine-tuned model as a folder in diffusers layout, which ``from_pretrained`` opens like the one that it came from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.export.lora import Exported
from videotune.files import write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

from videotune.types import Family


def export_full(
    family: Family, net: nn.Module, state: Mapping[str, Tensor], base: Path, folder: Path, facts: Mapping[str, Any]
) -> Exported:
    """Write the model with the trained weights ``state``, the other parts as in ``base``, and read the weights back.

    The other parts' files are linked where the disk allows it, so that they take no room twice. The weights are kept in the
    dtypes of ``net``. Raises VideotuneError for NaN, and where the weights read back are not the ones written.
    """
    if any(not bool(value.isfinite().all()) for value in state.values()):
        raise VideotuneError("the model holds NaN or infinite weights: it is not exported")
    aside = folder.with_name(f".part-{os.getpid()}-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        shutil.copytree(base, aside, copy_function=link, ignore=_but_transformer, dirs_exist_ok=True)
        shell: Any = family.skeleton()
        shell.load_state_dict(rounded(net, state), assign=True)
        shell.save_pretrained(aside / "transformer")
        write_json(aside / "videotune.json", dict(facts))
        compare(net, state, aside / "transformer")
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported("diffusers", folder, len(state), 0.0, "diffusers from_pretrained")


def rounded(net: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in the network's own dtypes; its buffers beside them."""
    dtypes: dict[str, torch.dtype] = {name: value.dtype for name, value in net.state_dict().items()}
    whole = net.state_dict() | dict(state)
    return {name: whole[name].detach().to("cpu", dtypes[name]).contiguous() for name in dtypes}


def _but_transformer(folder: str, names: list[str]) -> list[str]:
    """The base's own weights of what was trained, and what downloads leave behind."""
    top = (Path(folder) / "model_index.json").is_file()
    return [name for name in names if name.startswith(".") or (top and name == "transformer")]


def link(source: str, target: str) -> str:
    """A second name for a file's bytes where both lie on one disk, else a copy; never a link to a link."""
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(real, target)
    return target


def compare(net: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Read the weights back as ``from_pretrained`` does, shard by shard.

    Raises VideotuneError where one is missing or not the one that was trained.
    """
    from safetensors import safe_open

    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
    wanted, seen = rounded(net, state), set()
    for shard in sorted(shards or {"diffusion_pytorch_model.safetensors"}):
        with safe_open(folder / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                seen.add(name)
                if name not in wanted or not bool((file.get_tensor(name) == wanted[name]).all()):
                    raise VideotuneError(f"{folder}: {name} reads back as something else: not exported")
    if seen != set(wanted):
        raise VideotuneError(f"{folder}: {len(set(wanted) - seen)} weights are missing: not exported")
