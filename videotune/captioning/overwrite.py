"""Remember which captions a stopped ``caption --overwrite`` has written already."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import append_whole, digest, write_text

STATE_FILE = ".videotune-captions"
"""The file in the dataset while captions are overwritten.

The first line is a hash of the settings; each further one names a caption file and the
hash of its new caption.
"""


class OverwriteState:
    """The captions that are finished, in a file of the dataset.

    A caption is recorded before it is written, and counts as finished only if its file
    has that caption. So a process may be killed at any moment, and no clock is compared.
    """

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        """Continue with the same settings, or start anew.

        Args:
            root: the dataset's folder.
            settings: what the captions depend on.
        """
        self._root = root
        self._path = root / STATE_FILE
        self._settings = digest(settings)
        self._recorded: dict[str, str] = self._read()

    def _read(self) -> dict[str, str]:
        """Return the hash of the new caption by file; nothing of other settings."""
        if not self._path.is_file():
            return {}
        settings, *lines = self._path.read_text("utf-8", errors="replace").split("\n")
        if settings != self._settings:
            return {}

        recorded = {}
        for line in lines:
            try:
                name, caption_hash = json.loads(line)
            except (ValueError, TypeError):
                continue  # torn by a kill: that caption is written again
            recorded[str(name)] = str(caption_hash)
        return recorded

    def begin(self) -> None:
        """Write the file, unless it is there with finished captions."""
        if self._path.is_symlink():
            raise VideotuneError(f"{self._path} is a link. Remove it, and start again.")
        if not self._recorded:
            write_text(self._path, f"{self._settings}\n")

    def record(self, file: Path, captions: tuple[str, ...]) -> None:
        """Record what a caption file is about to hold."""
        line = json.dumps([self._name(file), digest(captions)], ensure_ascii=False)
        # Begin on a new line, because a kill may have torn the last one.
        with self._path.open("ab", buffering=0) as state:
            append_whole(state, f"\n{line}\n".encode())

    def is_finished(self, file: Path, captions: tuple[str, ...]) -> bool:
        """Whether a file has the caption that was recorded for it."""
        return self._recorded.get(self._name(file)) == digest(captions)

    def end(self) -> None:
        """Remove the file: all captions are written."""
        self._path.unlink(missing_ok=True)

    def _name(self, file: Path) -> str:
        return file.relative_to(self._root).as_posix()
