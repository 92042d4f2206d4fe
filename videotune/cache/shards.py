"""The files of a store: entries alone, shards of many, the manifest, and the lock of whoever writes.

Every file of entries says itself what it holds (in its safetensors metadata), so the manifest can be lost and made again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from videotune import __version__
from videotune.errors import VideotuneError
from videotune.files import digest, system_errors, write_text, write_whole

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("latents", "text")
SHARD = "shard-"
PART = ".part-"
SUFFIX = ".safetensors"
LABEL = "videotune"
"""The one key of our metadata; with a single key the order in the file is settled, and so are its bytes."""

LOCK = "lock"

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


@dataclass
class Contents:
    """What a cache folder holds, as its manifest and its files say together.

    ``shards`` maps files to the bytes that they must have; ``gone`` are files that count no more; ``leftovers`` of killed
    writers nobody needs; ``strays`` are none of our entries. ``untidy``: the manifest does not say all of this.
    """

    entries: dict[Name, Entry] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)
    origins: dict[str, dict[str, str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    leftovers: set[str] = field(default_factory=set)
    strays: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    damaged_lines: int = 0
    untidy: bool = False

    def whole(self, entry: Entry) -> bool:
        """Whether its file was there with the right size when the folder was read."""
        wanted = self.shards.get(entry.file) if entry.shard else entry.file_bytes
        return wanted is not None and self.sizes.get(entry.file) == wanted


def read_contents(folder: Path) -> Contents:
    """Read the manifest, and adopt what lies in the folder without a line in it. Writes nothing."""
    contents = Contents()
    for kind in KINDS:
        _list(folder, kind, contents)
    lines = _bytes_of(folder / "manifest.jsonl").split(b"\n")
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            _take(contents, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            contents.untidy = True
            contents.damaged_lines += i + 1 < len(lines)  # the last one is torn by a kill, which is no news
    files = sorted(file for file in contents.sizes if file not in contents.gone)
    in_shards = [file for file in files if f"/{SHARD}" in file]
    for file in in_shards:
        if file not in contents.shards:
            _adopt(folder, file, contents)
    own = {entry.file for entry in contents.entries.values() if entry.shard is None and contents.whole(entry)}
    for file in files:
        if f"/{SHARD}" not in file and file not in own:
            kind, _, name = file.partition("/")
            known = contents.entries.get((kind, name.removesuffix(SUFFIX)))
            if known is not None and contents.whole(known):
                contents.leftovers.add(file)
            else:
                _adopt(folder, file, contents)
    living = {entry.file for entry in contents.entries.values() if contents.whole(entry)}
    contents.leftovers |= {file for file in in_shards if file in contents.shards and file not in living}
    return contents


def _list(folder: Path, kind: str, contents: Contents) -> None:
    """Which files there are, with their sizes."""
    if not (folder / kind).is_dir():
        return
    with os.scandir(folder / kind) as items:
        for item in items:
            file = f"{kind}/{item.name}"
            if item.name.startswith(PART):
                contents.parts.add(file)
            elif not item.name.endswith(SUFFIX) or not item.is_file():
                contents.strays.add(file)
            else:
                try:
                    contents.sizes[file] = item.stat().st_size
                except FileNotFoundError:  # another process has just packed it
                    continue


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _take(contents: Contents, value: dict[str, Any]) -> None:
    """Add what one line of the manifest says; a later line counts more than an earlier one."""
    if "entry" in value:
        entry = entry_of(value["entry"])
        contents.entries[entry.name] = entry
        contents.gone.discard(entry.file)
    elif "shard" in value:
        file, size, keys = str(value["shard"]), int(value["bytes"]), [str(key) for key in value["keys"]]
        kind, _, name = file.partition("/")
        contents.gone.discard(file)
        if all((kind, key) in contents.entries for key in keys):  # else the shard itself is asked
            contents.shards[file] = size
        for key in keys:
            if (kind, key) in contents.entries:
                shard = name.removesuffix(SUFFIX)
                contents.entries[kind, key] = replace(contents.entries[kind, key], shard=shard, file_bytes=0)
    elif "origin" in value:
        contents.origins[str(value["origin"])] = dict(value["of"])
    else:
        contents.gone.add(str(value["gone"]))
        contents.untidy = True


def _adopt(folder: Path, file: str, contents: Contents) -> None:
    """Take over the entries of a file that the manifest does not know, but for those that are whole elsewhere."""
    kind, _, name = file.removesuffix(SUFFIX).partition("/")
    try:
        entries, origins = read_label(folder / file)
    except FileNotFoundError:
        return
    except UNREADABLE:
        contents.strays.add(file)
        return
    is_shard = name.startswith(SHARD)
    if any(entry.kind != kind or not (is_shard or entry.key == name) for entry in entries):
        contents.strays.add(file)
        return
    contents.untidy = True
    if is_shard:
        contents.shards[file] = contents.sizes[file]
    for entry in entries:
        known = contents.entries.get(entry.name)
        if known is None or not contents.whole(known):
            own = {"shard": name} if is_shard else {"file_bytes": contents.sizes[file]}
            contents.entries[entry.name] = replace(entry, **own)
            contents.origins[entry.origin] = origins.get(entry.origin, {})


def entry_line(entry: Entry) -> dict[str, Any]:
    """The manifest's line of an entry in a file of its own."""
    return {"entry": entry.to_json()}


def shard_line(file: str, size: int, keys: Iterable[str]) -> dict[str, Any]:
    """The manifest's line that says: these entries are in this shard now."""
    return {"shard": file, "bytes": size, "keys": list(keys)}


def origin_line(name: str, of: Mapping[str, str]) -> dict[str, Any]:
    """The manifest's line of the versions that made the entries naming it."""
    return {"origin": name, "of": dict(of)}


def append(folder: Path, line: Mapping[str, Any], *, durable: bool = False) -> None:
    """Add a line to the manifest in one write; after a line that a kill has torn, on a line of its own."""
    path = folder / "manifest.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        data = (b"\n" if torn else b"") + _line(line)
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, "the manifest could not be written to its end", str(path))
        if durable:
            os.fsync(file.fileno())


def write_manifest(folder: Path, contents: Contents, gone: Iterable[str] = ()) -> None:
    """Write the manifest anew, whole."""
    used = {entry.origin for entry in contents.entries.values()}
    lines = [origin_line(name, of) for name, of in contents.origins.items() if name in used]
    keys: dict[str, list[str]] = {}
    for entry in contents.entries.values():
        lines.append(entry_line(entry))
        if entry.shard:
            keys.setdefault(entry.file, []).append(entry.key)
    lines += [shard_line(file, contents.shards[file], keys[file]) for file in keys]
    lines += [{"gone": file} for file in sorted(gone)]
    write_text(folder / "manifest.jsonl", b"".join(map(_line, lines)).decode())


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


@contextmanager
def only_writer(folder: Path) -> Iterator[str | None]:
    """Hold the folder's lock; the system frees it when the process ends, however it ends.

    Yields a sentence where the file system keeps no locks. Raises VideotuneError that names whoever holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        note = None
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise VideotuneError(
                    f"the cache {folder} is being written by {_holder(path)}. Wait until that is done, "
                    "or set cache_dir elsewhere."
                ) from error
            note = f"{folder} is on a file system without locks: let no two runs fill this cache at a time"
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
        yield note
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Take the lock at once or raise OSError. It lies far behind the text, which others read."""
    if os.name == "nt":
        import msvcrt

        os.lseek(descriptor, 1 << 30, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
