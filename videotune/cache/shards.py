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
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from videotune import __version__
from videotune.files import digest, system_errors, write_whole

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("latents", "text")
SHARD = "shard-"
PART = ".part-"
SUFFIX = ".safetensors"
LABEL = "videotune"
"""The one key of our metadata; with a single key the order in the file is settled, and so are its bytes."""

UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""What reading a damaged file can raise: safetensors and torch each have their own."""

Name = tuple[str, str]
"""(kind, key)."""


@dataclass(frozen=True)
class Entry:
    """One encoded thing. ``tensors`` maps its names to (dtype, shape); ``bytes`` counts their data, ``hash`` names it.

    ``about`` says what it was made of, ``origin`` names the versions that made it. ``shard`` is the file that it shares, or
    None while it lies alone in a file of ``file_bytes``.
    """

    kind: str
    key: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    bytes: int
    hash: str
    about: Mapping[str, Any]
    origin: str
    shard: str | None = None
    file_bytes: int = 0

    @property
    def name(self) -> Name:
        """(kind, key)."""
        return self.kind, self.key

    @property
    def file(self) -> str:
        """Where it lies, below the cache folder."""
        return f"{self.kind}/{self.shard or self.key}{SUFFIX}"

    def to_json(self) -> dict[str, Any]:
        """Its line in the manifest; the shard has a line of its own."""
        return {k: v for k, v in vars(self).items() if k != "shard"}


def entry_of(value: Mapping[str, Any]) -> Entry:
    """The entry that ``to_json`` wrote; KeyError, TypeError, ValueError or AttributeError where it is something else."""
    tensors = {str(name): (str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in value["tensors"].items()}
    texts = [value[name] for name in ("kind", "key", "hash", "origin")]
    if not all(isinstance(text, str) for text in texts) or value["kind"] not in KINDS:
        raise ValueError("no entry")
    kind, key, mark, origin = texts
    about = dict(value["about"])
    return Entry(kind, key, tensors, int(value["bytes"]), mark, about, origin, None, int(value["file_bytes"]))


def describe(kind: str, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any], origin: str) -> Entry:
    """The entry of these tensors (on the CPU, contiguous), not yet in a file."""
    kinds = {name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items()}
    size = sum(x.nbytes for x in tensors.values())
    return Entry(kind, key, kinds, size, hash_of(tensors), dict(about), origin)


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


def read_label(path: Path) -> tuple[list[Entry], dict[str, dict[str, str]]]:
    """What a file of entries says that it holds, and the origins; without torch, and without its data.

    Raises OSError, SafetensorError, or what ``entry_of`` raises, where it is cut short or none of ours.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        label = json.loads((file.metadata() or {})[LABEL])
    return [entry_of(value) for value in label["entries"]], dict(label["origins"])


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


def true_to(entry: Entry, tensors: Mapping[str, Tensor], label: str | None) -> tuple[dict[str, Tensor] | None, str]:
    """The entry's tensors from its file, or None and what is wrong; ``label`` is the hash that the file itself names."""
    try:
        own = pick(entry, tensors)
    except KeyError as error:
        return None, f"lacks {error}"
    if hash_of(own) != entry.hash or label != entry.hash:
        return None, "holds other bytes than were written"
    return own, ""
