"""Name a part of a model on disk by a hash of its files."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from videotune.models.model_files import spans_of

SAMPLED_ABOVE = 64 << 20
"""Bytes of a file above which only blocks of it are hashed."""

BLOCKS = 256
"""How many blocks of such a file; of safetensors two of each tensor."""

BLOCK = 64 << 10
"""Bytes of a block."""


def fingerprint(folder: Path) -> str:
    """Return 16 hex digits of a part on disk: of its files' names, sizes and bytes.

    Files up to 64 MB are read whole; of larger safetensors the head, and of each tensor
    the first 64 KB and as much from its middle: so a tensor that was changed is seen,
    wherever it lies in the file. A few numbers in its depth may not be.
    """
    name = hashlib.blake2b(digest_size=8)
    for path in sorted(
        p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")
    ):
        size = path.stat().st_size
        name.update(f"{path.relative_to(folder).as_posix()}:{size}".encode())
        with path.open("rb") as file:
            if size <= SAMPLED_ABOVE:
                name.update(file.read())
                continue
            for start, length in _blocks(path, size):
                file.seek(start)
                name.update(file.read(length))
    return name.hexdigest()


def _blocks(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read of a large file, in the file's order."""
    if path.suffix != ".safetensors":
        yield from (
            ((size - BLOCK) * block // (BLOCKS - 1), BLOCK) for block in range(BLOCKS)
        )
        return
    spans = sorted(spans_of(path).values())
    yield 0, spans[0][0] if spans else BLOCK
    for lo, hi in spans:
        yield lo, min(BLOCK, hi - lo)
        if hi - lo > BLOCK:
            middle = max(lo + BLOCK, (lo + hi - BLOCK) // 2)
            yield middle, min(BLOCK, hi - middle)
