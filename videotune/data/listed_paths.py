"""Paths that the metadata files of a folder list, which lead nowhere outside of it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from videotune.data.clip_file import Role
from videotune.data.companion_files import companion_folders_beside
from videotune.data.metadata_files import MetadataRow
from videotune.errors import VideotuneError


class ListedPaths:
    """Resolves the paths in the metadata files of a dataset's folder.

    Args:
        root: the dataset's folder.
        within: links may lead to files of this folder.
        is_linked: whether a link led to a file, by the file's path.
    """

    def __init__(self, root: Path, within: Path, is_linked: Mapping[str, bool]) -> None:
        self._root = root
        self._within = within
        self._is_linked = is_linked
        self._prefix = "" if str(root) == "." else os.path.join(root, "")

    def clip(self, row: MetadataRow, folder: str) -> str:
        """Return the path of the clip that a row lists.

        Args:
            row: a row of a metadata file.
            folder: the metadata file's folder, relative to the root.

        Raises:
            VideotuneError: if the path leads out of the dataset.
        """
        listing = f"{row.position} lists {row.file_name!r}"
        return self._resolve(listing, row.file_name, folder)

    def companion(self, row: MetadataRow, role: Role, name: str, folder: str) -> str:
        """Return the path of a file that a row names for its clip.

        If the root is a ``videos`` folder, the file may be in a folder of companions
        beside it.

        Args:
            row: a row of a metadata file.
            role: what the file is for.
            name: its path, as the row has it.
            folder: the metadata file's folder, relative to the root.

        Raises:
            VideotuneError: if the path leads out of the dataset.
        """
        listing = f"{row.position} lists {name!r} as {role}"
        path_beside_root = self._path_beside(name, folder)
        return path_beside_root or self._resolve(listing, name, folder)

    def target_outside(self, path: str) -> str:
        """Return the target of a link if it is outside the dataset, else ""."""
        target = os.path.realpath(path)
        is_inside = Path(target).is_relative_to(os.path.realpath(self._within))
        return "" if is_inside else target

    def _resolve(self, listing: str, name: str, folder: str) -> str:
        """Return the path of a listed file.

        Args:
            listing: file, line and name, for the error.
            name: the path as it is written.
            folder: the metadata file's folder, relative to the root.
        """
        name = name.replace("\\", "/")
        if name.startswith("/") or re.match("[A-Za-z]:", name) or "\0" in name:
            raise VideotuneError(
                f"{listing}, which is not relative to that file's folder. "
                "Write a relative path."
            )

        relative_path = os.path.normpath(os.path.join(folder, name))
        if relative_path == ".." or relative_path.startswith(f"..{os.sep}"):
            raise VideotuneError(
                f"{listing}, which is outside {self._root}. "
                "The files of a dataset must be in its folder."
            )

        # Files that were found without following a link are inside. A path that was not
        # found, such as a hidden one, may be a link too.
        path = self._prefix + relative_path
        may_be_link = self._is_linked.get(path, True) and os.path.lexists(path)
        target = self.target_outside(path) if may_be_link else ""
        if target:
            raise VideotuneError(
                f"{listing}, a link to {target}, outside {self._root}. "
                "Put the file itself there."
            )
        return path

    def _path_beside(self, name: str, folder: str) -> str | None:
        """Return the path of a file in a folder of companions beside the root; None if
        the name leads elsewhere.
        """
        name = name.replace("\\", "/")
        if name.startswith("/") or "\0" in name:
            return None
        path = os.path.normpath(os.path.join(self._root.absolute(), folder, name))
        for companion_folder in companion_folders_beside(self._root):
            real_path = Path(os.path.realpath(path))
            is_real = real_path.is_relative_to(os.path.realpath(companion_folder))
            if is_real and Path(path).is_relative_to(companion_folder):
                return path
        return None
