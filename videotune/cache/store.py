"""The cache on disk: one safetensors file an entry, and a manifest that says what each was made from.

An entry's name is a hash of what decides its content (clip, place, size, encoder, dtype; not library versions): what
changes gets another name, so no entry is ever stale. An entry counts only if the manifest knows it and its size is the
one that was written.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.files import digest, read_lines, write_whole
from videotune.types import Window

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
"""Raised when the meaning of an entry changes, so that older entries are made anew."""


@lru_cache(maxsize=1 << 16)
def latent_key(window: Window, vae: str) -> str:
    """Names a window's latents: the clip's bytes, the frames shown, their size, and the VAE."""
    shape = window.shape
    place = [window.clip_id, round(window.start, 6), shape.frames, shape.height, shape.width, round(shape.fps, 6)]
    return digest({"schema": SCHEMA, "window": place, "resize": "cover, centre crop", "vae": vae})


@lru_cache(maxsize=1 << 16)
def text_key(caption: str, encoder: str, tokens: int) -> str:
    """Names a caption's states: the text, the encoder and how many tokens it may have."""
    return digest({"schema": SCHEMA, "text": caption, "encoder": encoder, "tokens": tokens})


class Store:
    """A cache folder. ``kind`` is "latents" or "text".

    Up to ``keep_bytes`` of what was read last stay in memory: a small dataset is then read from the disk once.
    """

    def __init__(self, folder: Path, keep_bytes: int = 0) -> None:
        self.folder = folder
        self._keep, self._kept_bytes = keep_bytes, 0
        self._kept: OrderedDict[tuple[str, str], dict[str, Tensor]] = OrderedDict()
        self._lock = Lock()
        self._manifest = folder / "manifest.jsonl"
        self._known: dict[tuple[str, str], dict[str, Any]] = {}
        for entry in read_lines(self._manifest):  # an entry whose line is torn is simply made again
            self._known[entry["kind"], entry["key"]] = entry

    def path(self, kind: str, key: str) -> Path:
        """Where the entry lies."""
        return self.folder / kind / f"{key}.safetensors"

    def has(self, kind: str, key: str) -> bool:
        """Whether the entry is there whole."""
        entry = self._known.get((kind, key))
        if entry is None:
            return False
        try:
            return self.path(kind, key).stat().st_size == entry["bytes"]
        except FileNotFoundError:
            return False

    def about(self, kind: str, key: str) -> dict[str, Any]:
        """What the manifest says of an entry."""
        return self._known[kind, key]

    def put(self, kind: str, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write an entry whole, then its line in the manifest.

        Raises VideotuneError where the folder cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self.path(kind, key)
        try:
            write_whole(path, lambda aside: save_file(dict(tensors), aside), durable=False)
            entry = {"kind": kind, "key": key, "bytes": path.stat().st_size, "about": dict(about)}
            with self._manifest.open("a", encoding="utf-8") as file:
                file.write("\n" if self._torn() else "")
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        except (OSError, SafetensorError) as error:
            raise VideotuneError(
                f"the cache {self.folder} cannot be written: {error}. Set cache_dir elsewhere."
            ) from error
        self._known[kind, key] = entry
        with self._lock:
            self._forget(kind, key)

    def _torn(self) -> bool:
        """Whether the manifest's last line lacks its end, after a kill."""
        if not self._manifest.is_file() or self._manifest.stat().st_size == 0:
            return False
        with self._manifest.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) != b"\n"

    def get(self, kind: str, key: str) -> dict[str, Tensor]:
        """Read an entry; its tensors are shared with whoever asks again and must not be written to.

        Raises VideotuneError where it is missing or damaged.
        """
        with self._lock:
            if (kind, key) in self._kept:
                self._kept.move_to_end((kind, key))
                return self._kept[kind, key]
        tensors = self._read(kind, key)
        with self._lock:
            if (kind, key) not in self._kept:
                self._kept[kind, key] = tensors
                self._kept_bytes += _bytes(tensors)
            while self._kept_bytes > self._keep:
                self._forget(*next(iter(self._kept)))
        return tensors

    def _forget(self, kind: str, key: str) -> None:
        tensors = self._kept.pop((kind, key), None)
        self._kept_bytes -= _bytes(tensors or {})

    def _read(self, kind: str, key: str) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path(kind, key)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise VideotuneError(
                f"cache entry {path} is missing or damaged ({error}). Delete it and start again; it will be made anew."
            ) from error


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
