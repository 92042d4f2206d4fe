"""A fine-tuned model as a folder in diffusers layout, which ``from_pretrained`` opens like the one that it came from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from videotune.exporter.verify import Exported, check_finite, check_same
from videotune.files import system_errors, whole_folder, write_json
from videotune.models.loading import dtype_of, load_model, quietly
from videotune.models.model_files import weight_files
from videotune.types import Family

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def export_full(
    family: Family,
    expert: str,
    state: Mapping[str, Tensor],
    base: Path,
    folder: Path,
    facts: Mapping[str, Any],
    text: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Exported:
    """Write the model with the trained weights ``state`` of an expert, all else as in ``base``, and read them back.

    ``text``: trained weights of text encoders, by their folders and by name; ``state`` is empty where these alone trained.

    The weights have the run's dtype, but those that diffusers keeps in float32. Raises VideotuneError for NaN, and where the
    weights read back are not the ones written.
    """
    text = {name: own for name, own in (text or {}).items() if own}
    check_finite("model", state, *text.values())
    part = family.spec.part_of(expert)
    with model_folder(base, folder, [part] * bool(state) + list(text), facts) as aside:
        if state:
            shell: Any = family.skeleton(expert)
            weights = rounded(shell, family.dtype, state, base / part)
            shell.load_state_dict(weights, assign=True)
            with system_errors(folder):
                shell.save_pretrained(aside / part)
            check_same(weights, tensors_in(aside / part), folder)
        for name, own in text.items():
            with system_errors(folder):
                write_text_encoder(family, name, own, base / name, aside / name)
    count = len(state) + sum(len(own) for own in text.values())
    return Exported("diffusers", folder, count, 0.0, "diffusers from_pretrained", facts.get("use", ""))


@contextmanager
def model_folder(base: Path, folder: Path, parts: Collection[str], facts: Mapping[str, Any]) -> Iterator[Path]:
    """A folder that takes its place at the block's end: the base's files but ``parts`` and hidden ones, and our facts.

    What the block adds are these parts. The others are linked where the disk allows it, so that they take no room twice.
    """

    def left_out(place: str, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith(".") or (Path(place) == base and name in parts)]

    with whole_folder(folder) as aside:
        shutil.copytree(base, aside, copy_function=link, ignore=left_out, dirs_exist_ok=True)
        yield aside
        write_json(aside / "videotune.json", dict(facts))


def write_text_encoder(family: Family, name: str, state: Mapping[str, Tensor], base: Path, folder: Path) -> None:
    """A text encoder with trained weights, all else as in ``base``, in the layout of transformers, in the run's dtype.

    Raises VideotuneError where the weights read back are not the ones written.
    """
    encoder: Any = load_model(type(family.text_skeletons()[name]), base, family.dtype, torch.device("cpu"))
    held = dict(encoder.named_parameters())
    with torch.no_grad():
        for key, value in state.items():
            held[key].copy_(value)
    with quietly():
        encoder.save_pretrained(folder)
    check_same(encoder.state_dict(), tensors_in(folder), folder, needed=state)  # tied weights are in the file once


def rounded(shell: Any, dtype: torch.dtype, state: Mapping[str, Tensor], base: Path) -> dict[str, Tensor]:
    """The weights in the dtypes of their use; what is no parameter (a table of positions) as in the base's file."""
    whole = {name: value for name, value in tensors_in(base) if name not in state} | dict(state)
    dtypes = {name: dtype_of(name, type(shell), dtype) for name in shell.state_dict()}
    return {name: whole[name].detach().to("cpu", own).contiguous() for name, own in dtypes.items()}


def tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a part on disk, one after the other."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def link(source: str, target: str) -> str:
    """A second name for a file's bytes where both lie on one disk, else a copy; never a link to a link."""
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(real, target)
    return target
