"""One encoded thing and its file, which says itself what it holds (in its safetensors metadata)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor
from typing_extensions import TypedDict

from videotune._version import __version__
from videotune.files import Count, checked, system_errors, write_whole
from videotune.types import PLAIN

KINDS = ("latents", "text")
SUFFIX = ".safetensors"
LABEL = "videotune"
"""The one key of our metadata; with a single key the order in the file is settled, and so are its bytes."""

UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""What reading a damaged file can raise: safetensors and torch each have their own; deep JSON is a RuntimeError."""

Name = tuple[str, str]
"""(kind, key)."""


class About(TypedDict, total=False):
    """What an entry was made of."""

    clip: str
    window: str
    caption: str
    encoder: str
    variant: int
    length: int
    cut: int


@dataclass(frozen=True)
class Entry:
    """One encoded thing. ``tensors`` maps its names to (dtype, shape); ``bytes`` counts their data, ``hash`` names it.

    ``about`` says what it was made of, ``versions`` by what.
    """

    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    key: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,200}$")]
    tensors: Mapping[str, tuple[str, tuple[Count, ...]]]
    bytes: Count
    hash: str
    about: About
    made: str
    versions: Mapping[str, str]

    @property
    def name(self) -> Name:
        """(kind, key)."""
        return self.kind, self.key

    @property
    def file(self) -> str:
        """Its file, below the cache folder."""
        return file_of(*self.name)

    @property
    def of(self) -> str:
        """What it was made of, in a few words: the caption, or the clip, the window and its variant."""
        if self.kind == "text":
            return str(self.about.get("caption", ""))
        variant = self.about.get("variant", 0)
        drawn = "" if variant == 0 else " plain" if variant == PLAIN else f" variant {variant}"
        clip = str(self.about.get("clip", "")).replace("\\", "/").rpartition("/")[2]
        return f"{clip} {self.about.get('window', '')}{drawn}".strip()


def file_of(kind: str, key: str) -> str:
    """The file of an entry, below the cache folder."""
    return f"{kind}/{key}{SUFFIX}"


def describe(kind: str, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Entry:
    """The entry of these tensors (on the CPU, contiguous), not yet in a file."""
    size, made = sum(x.nbytes for x in tensors.values()), datetime.now().astimezone().isoformat(timespec="seconds")
    return Entry(kind, key, form_of(tensors), size, hash_of(tensors), cast(About, dict(about)), made, versions())


def form_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape)."""
    return {name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items()}


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits that name the tensors: names, dtypes, shapes and every byte."""
    mark = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        x = tensors[name]
        mark.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        mark.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return mark.hexdigest()


@cache
def versions() -> dict[str, str]:
    """What makes an entry: the libraries whose versions may change its bits."""
    libraries = {name: version(name) for name in ("torch", "diffusers", "transformers", "av")}
    return {"videotune": __version__} | libraries


def write_entry(folder: Path, entry: Entry, tensors: Mapping[str, Tensor]) -> None:
    """Write an entry into its file, whole or not at all."""
    path, label = folder / entry.file, json.dumps(vars(entry), ensure_ascii=False)

    def write(aside: Path) -> None:
        with system_errors(path):
            save_file(dict(tensors), aside, metadata={LABEL: label})

    write_whole(path, write, durable=False)


def read_entry(folder: Path, kind: str, key: str) -> Entry:
    """What a file of the cache says that it holds, without its data.

    Raises one of UNREADABLE where it is missing, cut short or none of ours. A dataset may bring a cache that others made.
    """
    with safe_open(folder / file_of(kind, key), framework="np") as file:
        entry: Entry = checked(Entry, (file.metadata() or {})[LABEL])
    if entry.name != (kind, key):
        raise ValueError(f"it says that it is {entry.file}")
    return entry


def read_tensors(folder: Path, entry: Entry, *, check: bool = True) -> dict[str, Tensor]:
    """An entry's tensors by plain reading, since a memory map of a bad disk would kill the process.

    Raises one of UNREADABLE; with ``check`` also where they are not those that were written. Of what somebody else wrote
    the hash may be right: dtypes and shapes must be those that were promised, numbers finite.
    """
    own = load((folder / entry.file).read_bytes())
    if not check:
        return own
    if hash_of(own) != entry.hash:
        raise ValueError("holds other bytes than were written")
    if form_of(own) != entry.tensors:
        raise ValueError("holds tensors of another kind than it says")
    if not all(
        x.sum(dtype=torch.float32).isfinite() for x in own.values()
    ):  # a third of the time of asking each number
        raise ValueError("holds infinite or undefined numbers")
    return own


def alone(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and sharing memory with no other, as a file needs it."""
    whole = tensor.detach().cpu().contiguous()
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()
