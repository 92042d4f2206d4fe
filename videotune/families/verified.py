"""Weights from the Hub, held once against the sha256 by which the Hub's cache names each large file."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.files import digest, user_cache

_WORTH_A_WORD = 1 << 30
"""Bytes; a smaller file takes about a second."""


def verify(files: Iterable[Path], echo: Callable[[str], None]) -> None:
    """Read files of the Hub's cache once and compare their bytes with their names; others have nothing to compare with.

    A file that is as it was (place, size, time, inode) is not read again. Of several processes the first one reads. Raises
    VideotuneError for a file with other bytes.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for path in files:
        blob = path.resolve()
        if not re.fullmatch("[0-9a-f]{64}", blob.name):
            continue
        facts = blob.stat()
        mark = user_cache() / "verified" / digest([str(blob), facts.st_size, facts.st_mtime_ns, facts.st_ino])
        if mark.exists():
            continue
        if facts.st_size > _WORTH_A_WORD:
            echo(f"checking the bytes of {path.name} ({facts.st_size / 1e9:.1f} GB), once")
        with blob.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != blob.name:
            raise VideotuneError(
                f"base_model_name: {path} is damaged: its bytes are not those of the Hub (sha256 {found[:12]}…, not "
                f"{blob.name[:12]}…). Delete {blob} and start again: it is fetched anew"
            )
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            echo(
                f"note: that {path.name} is whole cannot be remembered ({error}); it is checked again at the next start"
            )
