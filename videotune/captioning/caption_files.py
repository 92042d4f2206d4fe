"""Where the captions of a dataset's clips lie, and how they are written so that nothing that a person wrote is lost."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.data.captions import read_caption
from videotune.data.file_checks import ClipProblem
from videotune.data.layouts import read_folder
from videotune.errors import VideotuneError
from videotune.files import append_whole, digest, path_from, read_lines, write_text

JOURNAL = ".videotune-captions.jsonl"
"""In the dataset while an --overwrite is under way: what it has written, so that after a stop it continues there."""


@dataclass(frozen=True)
class CaptionFile:
    """The text file of a clip (``clip``: its path), and the captions in it."""

    clip: str
    root: Path
    file: Path
    texts: tuple[str, ...]

    def write(self, caption: str, settings: str) -> None:
        """Put the caption there, whole; captions of before stay as NAME.txt.bak (.bak2 …), which no layout reads.

        A stop between any two steps leaves the old caption there or in the backup, and the journal names only texts that
        are in place.
        """
        if self.texts:
            journal = self.root / JOURNAL
            line = {"file": path_from(self.root, self.file), "text": digest([caption]), "settings": settings}
            with journal.open("ab", buffering=0) as lines:
                append_whole(lines, json.dumps(line).encode() + b"\n")
            number = 1
            while (backup := self.file.with_name(f"{self.file.name}.bak{'' if number == 1 else number}")).exists():
                number += 1
            self.file.rename(backup)
        write_text(self.file, f"{caption}\n")


def caption_files(root: Path) -> list[CaptionFile]:
    """The caption files of a dataset's clips, one each.

    VideotuneError where a metadata file holds the captions, and where a link leads out of the dataset.
    """
    files: dict[Path, CaptionFile] = {}
    for one in read_folder(root)[0]:
        if one.listed:
            table = one.listed.rpartition(":")[0]
            raise VideotuneError(
                f"{table} holds the captions of {root}, and this command writes text files. Write them to that file, or "
                "move it away: then each clip has its own .txt."
            )
        file = one.caption or one.expected
        if not file.parent.resolve().is_relative_to(root.resolve()):
            raise VideotuneError(f"{file.parent} is a link out of {root}. Give the folder itself that it leads to.")
        files.setdefault(file, CaptionFile(str(one.path), root, file, _texts(one.caption)))
    if (root / JOURNAL).is_symlink():
        raise VideotuneError(f"{root / JOURNAL} is a link. Delete it.")
    return list(files.values())


def rewritten(root: Path, files: Sequence[CaptionFile], settings: str) -> set[Path]:
    """The files of ``root`` whose captions an --overwrite with these settings has put there before it was stopped."""
    known = {
        (row.get("file"), row.get("text")) for row in read_lines(root / JOURNAL) if row.get("settings") == settings
    }
    ours = (one for one in files if one.root == root)
    return {one.file for one in ours if (path_from(root, one.file), digest(list(one.texts))) in known}


def _texts(file: Path | None) -> tuple[str, ...]:
    try:
        return read_caption(file) if file is not None else ()
    except ClipProblem as problem:
        if problem.reason == "empty_caption":
            return ()
        raise VideotuneError(f"{problem.detail}.") from problem
