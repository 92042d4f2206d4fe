"""One entry of the cache: a safetensors file whose metadata say what it holds."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor
from typing_extensions import TypedDict

from videotune._version import __version__
from videotune.files import Count, checked
from videotune.types import DETERMINISTIC_VARIANT

KINDS = ("latents", "text", "masks", "conditions")
SUFFIX = ".safetensors"
SUBFOLDER_LETTERS = 3
"""Letters of an entry's key that name the subfolder of its file."""
METADATA_KEY = "videotune"
"""The only metadata key of a file.

With a single key the order in the file, and so its bytes, are fixed.
"""

USUAL_HEADER_BYTES = 16 << 10
"""Bytes that hold the header of nearly every entry."""

MAX_HEADER_BYTES = 4 << 20

UNREADABLE = (
    OSError,
    SafetensorError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
)
"""Errors that reading a damaged file can raise. safetensors and torch each have their
own; deeply nested JSON raises RecursionError, a RuntimeError.
"""

EntryName = tuple[str, str]
"""(kind, key)."""

TensorForm = tuple[str, tuple[int, ...]]
"""(dtype, shape)."""


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
class CacheEntry:
    """An encoding of one of the ``KINDS``: a window's latents, a caption, a loss mask or a
    condition.
    """

    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    key: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,200}$")]
    tensors: Mapping[str, tuple[str, tuple[Count, ...]]]
    """(dtype, shape) by name."""
    bytes: Count
    """Bytes of the tensors' data."""
    hash: str
    """Hash of the tensors."""
    about: About
    """What it was made of."""
    made: str
    """When it was made."""
    versions: Mapping[str, str]
    """Versions of the libraries that made it."""

    @property
    def name(self) -> EntryName:
        """(kind, key)."""
        return self.kind, self.key

    @property
    def made_of(self) -> str:
        """What it was made of, in a few words: the caption, or the clip, the window and
        its variant.
        """
        if self.kind == "text":
            return str(self.about.get("caption", ""))

        variant = self.about.get("variant", 0)
        if variant == 0:
            suffix = ""
        elif variant == DETERMINISTIC_VARIANT:
            suffix = " plain"
        else:
            suffix = f" variant {variant}"
        clip = str(self.about.get("clip", "")).replace("\\", "/").rpartition("/")[2]
        return f"{clip} {self.about.get('window', '')}{suffix}".strip()


def file_of(kind: str, key: str) -> str:
    """Return the file of an entry, relative to the cache folder.

    Keys are hashes, so 4,096 subfolders of a kind share its entries evenly: one of a
    million entries has some 250 files.
    """
    return f"{kind}/{key[:SUBFOLDER_LETTERS]}/{key}{SUFFIX}"


def old_file_of(kind: str, key: str) -> str:
    """Return the file that earlier versions gave an entry, which is still read."""
    return f"{kind}/{key}{SUFFIX}"


def existing_file_of(folder: Path, kind: str, key: str) -> str:
    """Return the file that an entry has in a cache folder, or would get."""
    file = file_of(kind, key)
    old_file = old_file_of(kind, key)
    if not (folder / file).is_file() and (folder / old_file).is_file():
        return old_file
    return file


def entry_of_file(file: str) -> EntryName | None:
    """Return the (kind, key) of a file that may be an entry; None if no entry has such a
    file.

    Args:
        file: relative to the cache folder, with forward slashes.
    """
    kind, _, rest = file.partition("/")
    file_name = rest.rpartition("/")[2]
    key = file_name.removesuffix(SUFFIX)
    if kind in KINDS and file in (file_of(kind, key), old_file_of(kind, key)):
        return kind, key
    return None


def new_entry(
    kind: str, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]
) -> CacheEntry:
    """Return the entry of tensors (on the CPU, contiguous) that are not in a file yet."""
    return CacheEntry(
        kind=kind,
        key=key,
        tensors=form_of(tensors),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        hash=hash_of(tensors),
        about=cast(About, dict(about)),
        made=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions=versions(),
    )


def form_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorForm]:
    """Return (dtype, shape) of each tensor."""
    forms = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        forms[name] = (dtype, tuple(tensor.shape))
    return forms


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """Return 16 hex digits that depend on the names, dtypes, shapes and every byte of
    tensors.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries that may change an entry's bits."""
    libraries = {
        name: version(name) for name in ("torch", "diffusers", "transformers", "av")
    }
    return {"videotune": __version__} | libraries


def read_entry(folder: Path, kind: str, key: str) -> CacheEntry:
    """Read the metadata of a file of the cache, without its tensors.

    A dataset may bring a cache that somebody else made.

    Raises:
        UNREADABLE: one of these, if the file is missing, cut short or was not written
            by videotune.
    """
    path = folder / existing_file_of(folder, kind, key)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
    return _entry_of_metadata(metadata, (kind, key))


def read_entry_from_beginning(
    read_beginning: Callable[[int], bytes], name: EntryName
) -> CacheEntry:
    """Read the metadata of an entry whose file is elsewhere.

    A safetensors file begins with the length of its header, 8 bytes, and the header in
    JSON.

    Args:
        read_beginning: returns the first bytes of the file, as many as it is given.
        name: the entry's name.

    Raises:
        UNREADABLE: one of these, if the file was not written by videotune.
    """
    beginning = read_beginning(USUAL_HEADER_BYTES)
    header_end = 8 + int.from_bytes(beginning[:8], "little")
    if header_end > MAX_HEADER_BYTES:
        raise ValueError("its header is too long")
    if header_end > len(beginning):
        beginning = read_beginning(header_end)

    header = json.loads(beginning[8:header_end])
    return _entry_of_metadata(header["__metadata__"], name)


def _entry_of_metadata(metadata: Mapping[str, str], name: EntryName) -> CacheEntry:
    """Return the entry that a file's metadata state.

    Raises:
        UNREADABLE: one of these, if it is not the entry of this name.
    """
    entry: CacheEntry = checked(CacheEntry, metadata[METADATA_KEY])
    if entry.name != name:
        raise ValueError(f"its metadata name another entry, {entry.kind}/{entry.key}")
    return entry


def read_tensors(
    folder: Path, entry: CacheEntry, *, check: bool = True
) -> dict[str, Tensor]:
    """Read an entry's tensors without a memory map, which on a failing disk would kill
    the process.

    Args:
        folder: the cache folder.
        entry: the entry.
        check: compare them with the entry. A foreign file can have a correct hash,
            so dtypes and shapes are compared too, and numbers must be finite.

    Raises:
        UNREADABLE: one of these, if the tensors cannot be read or are not those that
            were written.
    """
    file = existing_file_of(folder, *entry.name)
    tensors = load((folder / file).read_bytes())
    if not check:
        return tensors
    if hash_of(tensors) != entry.hash:
        raise ValueError("holds other bytes than were written")
    if form_of(tensors) != entry.tensors:
        raise ValueError("holds tensors of another kind than its metadata say")

    # A sum is finite only if all numbers are, and takes a third of the time of asking
    # each.
    for tensor in tensors.values():
        if not tensor.sum(dtype=torch.float32).isfinite():
            raise ValueError("holds infinite or undefined numbers")
    return tensors


def own_storage(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, contiguous, and sharing memory with no other, as a
    file needs it.
    """
    tensor = tensor.detach().cpu().contiguous()
    shares_memory = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone() if shares_memory else tensor
