"""Companion files of clips: masks and references in folders beside ``videos``, and start
images.

A companion has the name of its clip with any suffix of an image or video, at the same
place below its folder: ``masks/a/001.png`` belongs to ``videos/a/001.mp4``. Or a row of a
metadata file names it. It is not a clip itself.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.data.clip_file import CLIP_FOLDERS, CLIP_SUFFIXES, Role
from videotune.data.folder_listing import named_path
from videotune.data.images import IMAGE_SUFFIXES
from videotune.errors import VideotuneError

ROLES: tuple[Role, ...] = ("loss_mask", "mask", "reference", "control", "start_image")
"""Roles in the order in which companions are listed."""

LOSS_FOLDERS = ("loss_masks",)
"""Folders of masks that are only for the loss."""

MASK_FOLDERS = (*LOSS_FOLDERS, "masks")
"""Folders of masks for the loss. If a clip has a file in both, the first one counts."""

CONDITION_FOLDERS = ("masks",)
"""Folders of masks that say what a sample is conditioned on. A file of ``masks`` serves
both uses.
"""

FOLDER_OF_ROLE: dict[Role, str] = {"reference": "references", "control": "controls"}
"""Folders of the files that some conditions show, by role."""

COMPANION_FOLDERS = (*MASK_FOLDERS, *FOLDER_OF_ROLE.values())
"""Folders of files that belong to clips."""

MASK_LABEL = "-masklabel"
"""End of the name of a mask that is next to its image, as OneTrainer writes them."""

MAX_EXTRA_MASKS = 1_000_000
"""Most files of a folder of masks that a dataset names."""


@dataclass(frozen=True)
class CompanionSettings:
    """Which files of a dataset are companions."""

    loss_masks: Path | None = None
    """A folder of masks elsewhere. None: those beside the clips."""
    start_images: bool = False
    """Whether an image in ``images`` with the name of a video in ``videos`` is that
    video's start image. Otherwise it is trained as a clip.
    """


DEFAULT_COMPANIONS = CompanionSettings()


class CompanionFiles:
    """The companions among the files of a dataset.

    Args:
        files: paths of all files of the dataset.
        settings: what counts as a companion.
        outside: files of folders of companions beside a root that is itself ``videos``.
    """

    def __init__(
        self,
        files: Collection[str],
        settings: CompanionSettings = DEFAULT_COMPANIONS,
        outside: Collection[str] = (),
    ) -> None:
        self._settings = settings
        media = [path for path in files if path.lower().endswith(CLIP_SUFFIXES)]
        folders = {os.path.dirname(path) for path in media}
        self._folders = self._find_companion_folders(media, folders)

        self.paths: set[str] = set()
        """All companions: such a file is no clip."""
        self._by_stem: dict[str, str] = {}
        """Path of a companion by that path without its suffix."""
        # Most datasets have no folder of companions: then no path is looked at.
        has_folders = bool(outside or self._folders)
        searched_paths = sorted([*media, *outside]) if has_folders else []
        for path in searched_paths:
            if path in outside or self._is_in_companion_folder(path):
                stem = os.path.splitext(path)[0]
                self._by_stem.setdefault(stem, path)
                self.paths.add(path)

        # Places for a companion are looked up only below these folders: a clip has many
        # such places, and most datasets have no companions.
        self._used_names: set[str] = set()
        """Names of the folders that companions are in, at any depth."""
        for path in self.paths:
            self._used_names.update(path.split(os.sep)[:-1])

        self._labels = self._find_labels(media)
        self.paths.update(self._labels.values())
        self._start_images = self._find_start_images(media)
        self.paths.update(self._start_images.values())
        self._extra_masks = _masks_in(settings.loss_masks)
        self._named: dict[str, dict[Role, str]] = {}
        """Files that metadata files name, by the path of their clip."""

    def add_named(self, clip: str, role: Role, path: str) -> None:
        """Add a file that a metadata file names for a clip."""
        self._named.setdefault(clip, {})[role] = path
        self.paths.add(path)

    def of(self, clip: str) -> tuple[tuple[Role, Path], ...]:
        """Return the companions of a clip by its path in the dataset."""
        named = self._named.get(clip, {})
        companions = self._in_folders(clip) | named

        # A file only for the loss (loss_masks/, datasets.loss_masks, column loss_mask) wins
        # over a mask that serves both uses.
        stem = os.path.splitext(clip)[0]
        if self._settings.loss_masks is not None:
            companions.pop("loss_mask", None)
            extra_mask = self._extra_mask_of(stem)
            if extra_mask is not None:
                companions["loss_mask"] = extra_mask
        elif "mask" in named and "loss_mask" not in named:
            in_folder = self._beside(stem, LOSS_FOLDERS)
            companions["loss_mask"] = in_folder or named["mask"]
        return tuple(
            (role, Path(companions[role])) for role in ROLES if role in companions
        )

    def replaced_by_names(self, clip: str) -> list[tuple[Role, str, str]]:
        """Return (role, used file, unused file) for each companion of a clip for which a
        metadata file names another file than a folder has.
        """
        if clip not in self._named:
            return []
        in_folders = self._in_folders(clip)
        # A file in masks/ that the row replaces as loss_mask is still used as condition
        # mask, so only loss_masks/ counts as replaced.
        loss_mask = self._beside(os.path.splitext(clip)[0], LOSS_FOLDERS)
        in_folders.pop("loss_mask", None)
        if loss_mask is not None:
            in_folders["loss_mask"] = loss_mask

        used = dict(self.of(clip))
        replaced = []
        for role, path in self._named.get(clip, {}).items():
            unused_path = in_folders.get(role, path)
            if unused_path != path and used.get(role) == Path(path):
                replaced.append((role, path, unused_path))
        return replaced

    def without_clip(self, clips: Collection[str]) -> list[str]:
        """Return the companions that belong to none of the clips, sorted."""
        if not self.paths:
            return []
        used: set[str] = set()
        for clip in clips:
            used.update(str(path) for _, path in self.of(clip))
            used.update(unused for _, _, unused in self.replaced_by_names(clip))
        return sorted(self.paths - used)

    def _in_folders(self, clip: str) -> dict[Role, str]:
        """Return the companions of a clip by their names, without those of metadata."""
        stem = os.path.splitext(clip)[0]
        paths: dict[Role, str | None] = {
            "loss_mask": self._beside(stem, MASK_FOLDERS) or self._labels.get(stem),
            "mask": self._beside(stem, CONDITION_FOLDERS),
            "start_image": self._start_images.get(clip),
        }
        for role, folder in FOLDER_OF_ROLE.items():
            paths[role] = self._beside(stem, (folder,))
        return {role: path for role, path in paths.items() if path is not None}

    def _extra_mask_of(self, stem: str) -> str | None:
        """Return a clip's mask in the folder that the dataset names."""
        for name in _names_below(stem):
            mask = self._extra_masks.get(name)
            if mask is not None:
                return mask
        return None

    def _beside(self, stem: str, folder_names: Sequence[str]) -> str | None:
        """Return a clip's file in the first of these folders that has one."""
        used_names = [name for name in folder_names if name in self._used_names]
        for candidate in _stems_in(stem, used_names) if used_names else ():
            path = self._by_stem.get(candidate)
            if path is not None:
                return path
        return None

    def _find_companion_folders(
        self, media: Sequence[str], folders: Collection[str]
    ) -> set[str]:
        """Return the folders whose files are companions.

        A folder with such a name counts if it is beside ``videos`` or ``images``, or has a
        file with the name of a clip one folder up. A folder of clips that only happens to
        be called masks does not.
        """
        all_folders = _with_parents(folders)
        companion_folders = set()
        undecided = set()
        for folder in all_folders:
            parent, name = os.path.split(folder)
            if name not in COMPANION_FOLDERS:
                continue
            siblings = {os.path.join(parent, sibling) for sibling in CLIP_FOLDERS}
            if siblings & all_folders:
                companion_folders.add(folder)
            else:
                undecided.add(folder)

        if not undecided:
            return companion_folders
        stems = {os.path.splitext(path)[0] for path in media}
        for path in media:
            for folder in undecided.intersection(_parents(path)):
                name = os.path.relpath(os.path.splitext(path)[0], folder)
                if os.path.join(os.path.dirname(folder), name) in stems:
                    companion_folders.add(folder)
        return companion_folders

    def _is_in_companion_folder(self, path: str) -> bool:
        return bool(self._folders) and not self._folders.isdisjoint(_parents(path))

    def _find_labels(self, media: Sequence[str]) -> dict[str, str]:
        """Return the masks next to their clips, by the clip's path without suffix."""
        paths_by_stem = {}
        for path in media:
            stem = os.path.splitext(path)[0]
            if stem.endswith(MASK_LABEL):
                paths_by_stem[stem.removesuffix(MASK_LABEL)] = path
        if not paths_by_stem:
            return {}
        stems = {os.path.splitext(path)[0] for path in media}
        return {stem: path for stem, path in paths_by_stem.items() if stem in stems}

    def _find_start_images(self, media: Sequence[str]) -> dict[str, str]:
        """Return the start images by the path of their video."""
        if not self._settings.start_images:
            return {}

        images: dict[str, str] = {}
        for path in sorted(media):
            if path.lower().endswith(IMAGE_SUFFIXES):
                stem = os.path.splitext(path)[0]
                images.setdefault(stem, path)

        start_images = {}
        for path in media:
            if path.lower().endswith(IMAGE_SUFFIXES):
                continue
            for stem in _stems_beside(os.path.splitext(path)[0], "videos", "images"):
                if stem in images:
                    start_images[path] = images[stem]
                    break
        return start_images


def named_companions(
    paths: Mapping[Role, Path],
) -> tuple[tuple[Role, Path], ...]:
    """Return the companions of a clip that has only a row. Its mask is also the loss mask,
    unless the row names another one.
    """
    companions = dict(paths)
    if "mask" in companions:
        companions.setdefault("loss_mask", companions["mask"])
    return tuple((role, companions[role]) for role in ROLES if role in companions)


def companion_folders_beside(root: Path) -> list[Path]:
    """Return the folders of companions beside a root that is itself ``videos`` or
    ``images``.
    """
    root = named_path(root).absolute()
    if root.name not in CLIP_FOLDERS:
        return []
    siblings = [root.with_name(name) for name in COMPANION_FOLDERS]
    return [folder for folder in siblings if folder.is_dir()]


def _stems_in(stem: str, folder_names: Sequence[str]) -> Iterator[str]:
    """Yield the paths, without suffix, at which a clip's companion may be."""
    for folder_name in folder_names:
        for clip_folder in CLIP_FOLDERS:
            yield from _stems_beside(stem, clip_folder, folder_name)

    parent, name = os.path.split(stem)
    while True:
        for folder_name in folder_names:
            yield os.path.join(parent, folder_name, name)
        above, part = os.path.split(parent)
        if above == parent or not part:
            return
        parent = above
        name = os.path.join(part, name)


def _stems_beside(stem: str, clip_folder: str, sibling: str) -> Iterator[str]:
    """Yield a path with one of its folders ``clip_folder`` replaced by a sibling, the
    nearest first.
    """
    parts = stem.split(os.sep)
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] == clip_folder:
            yield os.sep.join([*parts[:index], sibling, *parts[index + 1 :]])


def _names_below(stem: str) -> Iterator[str]:
    """Yield the last parts of a path, from the longest to the name alone."""
    parts = stem.split(os.sep)
    for index in range(len(parts)):
        yield os.sep.join(parts[index:])


def _parents(path: str) -> list[str]:
    """Return all folders that a path is in, as strings."""
    parents = []
    folder = os.path.dirname(path)
    while folder:
        parents.append(folder)
        above = os.path.dirname(folder)
        if above == folder:
            break
        folder = above
    return parents


def _with_parents(folders: Collection[str]) -> set[str]:
    """Return folders and all that contain them."""
    with_parents = set(folders)
    for folder in folders:
        with_parents.update(_parents(folder))
    with_parents.discard("")
    return with_parents


def _masks_in(folder: Path | None) -> dict[str, str]:
    """Return the images and videos of a folder, by their path in it without suffix.

    Raises:
        VideotuneError: if the folder does not exist or has too many files.
    """
    if folder is None:
        return {}
    if not folder.is_dir():
        raise VideotuneError(
            f"datasets.loss_masks: {folder} is not a folder. Give the folder of the masks."
        )

    masks: dict[str, str] = {}
    num_files = 0
    for parent, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for file in sorted(files):
            if file.startswith(".") or not file.lower().endswith(CLIP_SUFFIXES):
                continue
            path = os.path.join(parent, file)
            stem = os.path.splitext(os.path.relpath(path, folder))[0]
            masks.setdefault(stem, path)

        num_files += len(files) + len(names)
        if num_files > MAX_EXTRA_MASKS:
            raise VideotuneError(
                f"datasets.loss_masks: {folder} has more than {MAX_EXTRA_MASKS:,} files. "
                "Give a folder of the masks of this dataset only."
            )
    return masks
