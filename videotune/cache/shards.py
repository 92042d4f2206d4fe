"""The files of a store: entries alone, and shards of many.

Every file of entries says itself what it holds (in its safetensors metadata), so the manifest can be lost and made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field
from safetensors import SafetensorError
from typing_extensions import TypedDict

from videotune import __version__
from videotune.files import Count, checked, digest, system_errors, write_whole
from videotune.types import PLAIN

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("latents", "text")
SHARD = "shard-"
PART = ".part-"
SUFFIX = ".safetensors"
LABEL = "videotune"
"""The one key of our metadata; with a single key the order in the file is settled, and so are its bytes."""

UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""What reading a damaged file can raise: safetensors and torch each have their own; deep JSON is a RuntimeError."""

File = Annotated[str, Field(pattern=rf"^({'|'.join(KINDS)})/[A-Za-z0-9_-]{{1,200}}\{SUFFIX}$")]
"""A file of entries, below the cache folder. A dataset may bring a manifest, and files that it names are deleted."""

Origins = dict[str, dict[str, str]]


class About(TypedDict, total=False):
    """What an entry was made of."""

    clip: str
    window: str
    caption: str
    encoder: str
    variant: int
    length: int
    cut: int


Name = tuple[str, str]
"""(kind, key)."""


@dataclass(frozen=True)
class Entry:
    """One encoded thing. ``tensors`` maps its names to (dtype, shape); ``bytes`` counts their data, ``hash`` names it.

    ``about`` says what it was made of, ``origin`` names the versions that made it. ``shard`` is the file that it shares, or
    None while it lies alone in a file of ``file_bytes``.
    """

    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    key: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,200}$")]
    tensors: Mapping[str, tuple[str, tuple[Count, ...]]]
    bytes: Count
    hash: str
    about: About
    origin: str
    shard: str | None = None
    file_bytes: Count = 0

    @property
    def name(self) -> Name:
        """(kind, key)."""
        return self.kind, self.key

    @property
    def file(self) -> str:
        """Where it lies, below the cache folder."""
        return f"{self.kind}/{self.shard or self.key}{SUFFIX}"

    @property
    def of(self) -> str:
        """What it was made of, in a few words: the caption, or the clip, the window and its variant."""
        if self.kind == "text":
            return str(self.about.get("caption", ""))
        variant = self.about.get("variant", 0)
        drawn = "" if variant == 0 else " plain" if variant == PLAIN else f" variant {variant}"
        clip = str(self.about.get("clip", "")).replace("\\", "/").rpartition("/")[2]
        return f"{clip} {self.about.get('window', '')}{drawn}".strip()

    def to_json(self) -> dict[str, Any]:
        """Its line in the manifest; the shard has a line of its own."""
        return {k: v for k, v in vars(self).items() if k != "shard"}


class Label(TypedDict):
    """What a file of entries says of itself."""

    entries: list[Entry]
    origins: Origins


def describe(kind: str, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any], origin: str) -> Entry:
    """The entry of these tensors (on the CPU, contiguous), not yet in a file."""
    kinds = {name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items()}
    size = sum(x.nbytes for x in tensors.values())
    return Entry(kind, key, kinds, size, hash_of(tensors), cast(About, dict(about)), origin)


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits that name the tensors: names, dtypes, shapes and every byte."""
    import torch

    mark = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        x = tensors[name]
        mark.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        mark.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return mark.hexdigest()


def versions() -> dict[str, str]:
    """What makes an entry, and when: the libraries whose versions may change its bits."""
    made = datetime.now().astimezone().isoformat(timespec="seconds")
    libraries = {name: version(name) for name in ("torch", "diffusers", "transformers", "av")}
    return {"made": made, "videotune": __version__} | libraries


def write_entry(folder: Path, entry: Entry, origin: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Entry:
    """Write an entry into a file of its own, whole; the entry with the size of that file."""
    path = folder / entry.file
    _save(path, [entry], {entry.origin: origin}, tensors, durable=False)
    return replace(entry, file_bytes=path.stat().st_size)


def write_shard(
    folder: Path, pairs: Sequence[tuple[Entry, Mapping[str, Tensor]]], origins: Mapping[str, Mapping[str, str]]
) -> str:
    """Write entries of one kind with their tensors into a shard, whole and synced -> where it lies, below the folder.

    Its name is a hash of what it holds; a tensor in it is called KEY.NAME.
    """
    held = [replace(entry, shard=None, file_bytes=0) for entry, _ in pairs]
    name = SHARD + digest(sorted([entry.key, entry.hash] for entry in held))[:16]
    data = {f"{entry.key}.{part}": x for entry, tensors in pairs for part, x in tensors.items()}
    used = {entry.origin: origins.get(entry.origin, {}) for entry in held}
    file = f"{held[0].kind}/{name}{SUFFIX}"
    _save(folder / file, held, used, data, durable=True)
    return file


def _save(
    path: Path,
    entries: Sequence[Entry],
    origins: Mapping[str, Mapping[str, str]],
    data: Mapping[str, Tensor],
    *,
    durable: bool,
) -> None:
    from safetensors.torch import save_file

    label = json.dumps({"entries": [entry.to_json() for entry in entries], "origins": origins}, ensure_ascii=False)

    def write(aside: Path) -> None:
        with system_errors(path):
            save_file(dict(data), aside, metadata={LABEL: label})

    write_whole(path, write, durable=durable)


def read_label(path: Path) -> Label:
    """What a file of entries says that it holds, and the origins; without torch, and without its data.

    Raises OSError, SafetensorError, KeyError or ValueError where it is cut short or none of ours.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        label: Label = checked(Label, (file.metadata() or {})[LABEL])
    return label


def read_file(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, read by plain reading (a memory map of a bad disk would kill the process).

    Raises OSError or SafetensorError.
    """
    from safetensors.torch import load

    return load(path.read_bytes())


def pick(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entry's own among the tensors of its file; KeyError where one is not there."""
    prefix = f"{entry.key}." if entry.shard else ""
    return {name: tensors[prefix + name] for name in entry.tensors}


def wrong_with(entry: Entry, own: Mapping[str, Tensor]) -> str:
    """What is wrong with an entry's tensors as they were read; nothing where they are those that were written.

    Of what somebody else wrote the hash may be right: dtypes and shapes must be those that were promised, numbers finite.
    """
    import torch

    if hash_of(own) != entry.hash:
        return "holds other bytes than were written"
    if {name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in own.items()} != entry.tensors:
        return "holds tensors of another kind than it says"
    if not all(
        x.sum(dtype=torch.float32).isfinite() for x in own.values()
    ):  # three times as fast as to ask each number
        return "holds infinite or undefined numbers"
    return ""


def true_to(entry: Entry, tensors: Mapping[str, Tensor], label: str | None) -> tuple[dict[str, Tensor] | None, str]:
    """The entry's tensors from its file, or None and what is wrong; ``label`` is the hash that the file itself names."""
    try:
        own = pick(entry, tensors)
    except KeyError as error:
        return None, f"lacks {error}"
    wrong = wrong_with(entry, own) if label == entry.hash else "holds other bytes than were written"
    return (None, wrong) if wrong else (own, "")


def alone(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and sharing memory with no other, as a file needs it."""
    whole = tensor.detach().cpu().contiguous()
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()
