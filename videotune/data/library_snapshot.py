"""The snapshot of a large library: its clips and windows as arrays and rows, so that a
run starts without going through a million files again.

A snapshot counts only for the same settings, versions and files: names, sizes,
modification times and modes of all files of the datasets are compared. It lies in the
user's own cache, since a dataset is not to be trusted with it.

    snapshot.json   what it was made of; notes, kinds of windows, pacings
    NAME.npy        columns of clips and windows
    NAME.rows       JSON rows of clips, accounts and media, with NAME.offsets.npy
"""

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune import files
from videotune._version import __version__
from videotune.config.schema import Config
from videotune.data.clip_file import CLIP_FOLDERS
from videotune.data.clip_table import (
    ClipColumns,
    ClipTable,
    IdArray,
    RowFile,
    RowsById,
    clip_from_json,
)
from videotune.data.companion_files import COMPANION_FOLDERS
from videotune.data.folder_listing import named_path
from videotune.data.folder_walk import LinkGuard, walk_folders
from videotune.data.media_info import MediaInfo
from videotune.data.packed_texts import PackedTexts
from videotune.data.remarks import codes_of, with_codes
from videotune.data.window_table import WindowTable, WindowTableBuilder
from videotune.model_spec import VideoRules
from videotune.types import Clip, ClipShape, Pacing, Window

SNAPSHOT_VERSION = 3
"""Increase it whenever a scan gives another library for the same files and settings."""

FEWEST_CLIPS = 5000
"""Smaller libraries are scanned each time."""

MOST_SNAPSHOTS = 4
"""Snapshots that are kept; those that were used longest ago are removed."""

KEYS_WITHOUT_EFFECT = (
    "base_model_name",
    "base_parts",
    "init_from",
    "base_loras",
    "cache_dir",
    "object_cache_gb",
    "steps",
    "epochs",
    "batch_size",
    "gradient_accumulation_steps",
    "micro_batch_size",
    "shuffle",
    "deterministic",
    "allow_crop",
    "experts",
    "expert_share",
    "expert_period",
    "lora",
    "transformer",
    "optimizer",
    "learning_rate",
    "learning_rate_low",
    "embedding_learning_rate",
    "learning_rate_scheduler",
    "learning_rate_min",
    "learning_rate_cycles",
    "learning_rate_power",
    "learning_rate_decay_steps",
    "learning_rate_timescale",
    "warmup_steps",
    "ema",
    "max_grad_norm",
    "out_of_memory",
    "train_dtype",
    "weight_dtype",
    "gradient_checkpointing",
    "layer_offload_fraction",
    "attention",
    "compile",
    "cuda_graphs",
    "sharding",
    "timestep_distribution",
    "timestep_shift",
    "timestep_mean",
    "timestep_std",
    "timestep_scale",
    "timestep_alpha",
    "timestep_beta",
    "timestep_min",
    "timestep_max",
    "timestep_stratified",
    "loss",
    "loss_delta",
    "loss_weighting",
    "loss_weighting_gamma",
    "dataloader_threads",
    "validate_every",
    "validate_every_epochs",
    "early_stopping",
    "save_every",
    "save_every_epochs",
    "save_keep",
    "backup_after",
    "backup_every",
    "backup_keep",
    "sample_after",
    "sample_after_epochs",
    "samples",
    "sample",
    "trackers",
    "tracker_project",
    "sample_metrics",
    "forgetting",
    "output_model_destination",
    "output_model_format",
    "output_dtype",
    "push_to",
    "push_checkpoints_to",
    "push_checkpoints_keep",
    "notify",
    "notify_on",
)
"""Settings that do not change a library, such as the learning rate."""

MANIFEST = "snapshot.json"

TABLES = ("windows", "held_out_windows")
COLUMNS = ("owner", "kind", "start", "end")
CLIP_COLUMNS = ("held_out", "still", "regularization", "repeats", "pacing")


def snapshots_folder() -> Path:
    """Return the folder of all snapshots."""
    return files.user_cache() / "libraries"


class Inputs:
    """What a library is made of, read before the library is.

    Args:
        config: the run's config.
        rules: frames and sizes that the model accepts.
    """

    def __init__(self, config: Config, rules: VideoRules) -> None:
        self.needs_captions = config.missing_caption == "error"
        """Whether a scan refuses clips without a caption."""
        self.folders = _folders_of(config)
        """Folders whose files are compared; empty if some dataset is no plain folder."""
        settings = {
            "snapshot": SNAPSHOT_VERSION,
            "videotune": __version__,
            "av": version("av"),
            "config": _deciding_settings(config),
            "rules": asdict(rules),
            "folders": [os.path.abspath(folder) for folder in self.folders],
        }
        self.key = files.digest(settings)

    @property
    def folder(self) -> Path:
        """Where the snapshot of these inputs is."""
        return snapshots_folder() / self.key

    @cached_property
    def fingerprint(self) -> str:
        """Hash of names, sizes, times and modes of all files, when it was first read.

        Raises:
            OSError: if a folder cannot be read.
        """
        digest = hashlib.blake2b(digest_size=16)
        for folder in self.folders:
            digest.update(b"\0folder\0")
            if os.path.isdir(folder):
                _hash_folder(os.path.abspath(folder), digest, LinkGuard(), frozenset())
        return digest.hexdigest()

    def take_fingerprint(self) -> None:
        """Compute the fingerprint now, before the files are read.

        A file that changes during the scan then makes the snapshot differ.

        Raises:
            OSError: if a folder cannot be read.
        """
        _ = self.fingerprint

    def covers(self, paths: Iterable[str]) -> bool:
        """Return whether all paths are below the folders."""
        prefixes = tuple(os.path.join(folder, "") for folder in self.folders)
        return all(path.startswith(prefixes) for path in paths)


def _deciding_settings(config: Config) -> dict[str, Any]:
    """Return the settings that decide a library.

    ``missing_caption`` "error" counts as "skip": ``read_snapshot`` looks at captions itself.
    """
    settings = config.model_dump(mode="json", exclude=set(KEYS_WITHOUT_EFFECT))
    if config.missing_caption == "error":
        settings["missing_caption"] = "skip"
    return settings


def has_many_files(folders: Sequence[str], count: int) -> bool:
    """Return whether folders have at least ``count`` files, at any depth."""
    for folder in folders:
        for _, file_names in walk_folders(folder):
            count -= len(file_names)
            if count <= 0:
                return True
    return False


def _folders_of(config: Config) -> list[str]:
    """Return the folders whose files decide a library; none if there may be others."""
    folders: list[str] = []
    for dataset in config.datasets:
        root = Path(dataset.path).expanduser()
        if not root.is_dir() or dataset.frame_folder_fps is not None:
            return []
        folders.append(str(root))
        root = named_path(root).absolute()
        if root.name in CLIP_FOLDERS:
            folder_names = ("captions", *COMPANION_FOLDERS)
            folders += [str(root.with_name(name)) for name in folder_names]
        if dataset.loss_masks is not None:
            folders.append(str(Path(dataset.loss_masks).expanduser()))
    return folders


def _hash_folder(
    folder: str, digest: Any, guard: LinkGuard, ancestors: frozenset[str]
) -> None:
    """Hash a folder's files, and those of the folders in it, as a dataset reads them."""
    inner_ancestors = guard.enter(folder, ancestors)
    if inner_ancestors is None:
        return

    lines = []
    subfolders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                subfolders.append(entry.path)
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:  # a link to nowhere
                lines.append(entry.name)
                continue
            lines.append(
                f"{entry.name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_mode}"
            )
    lines.sort()
    text = "\n".join([folder, *lines, ""])
    digest.update(text.encode(errors="surrogateescape"))
    for subfolder in sorted(subfolders):
        _hash_folder(subfolder, digest, guard, inner_ancestors)


# -- writing ---------------------------------------------------------------------------


class LibraryWriter:
    """Writes a library into a folder while it is made, so that no row stays in memory.

    Args:
        folder: where the files go; it exists and is empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.skipped: list[tuple[str, str, str]] = []
        self._clips = _RowWriter(folder, "clips")
        self._accounts = _RowWriter(folder, "accounts")
        self._media = _RowWriter(folder, "media")
        self._clip_ids = PackedTexts()
        self._media_ids = PackedTexts()
        self._facts = {name: array("i") for name in CLIP_COLUMNS}
        self._pacings: dict[Pacing, int] = {}
        self._windows = {name: WindowTableBuilder() for name in TABLES}

    def add_account(self, account: dict[str, Any]) -> None:
        """Append the account of a file."""
        self._accounts.add(account)

    def add_media(self, file_id: str, info: MediaInfo) -> None:
        """Append the media info of a clip or a file that belongs to one."""
        self._media_ids.append(file_id)
        self._media.add(info.to_json())

    def add_clip(self, clip: Clip, windows: Sequence[Window]) -> None:
        """Append a clip with its windows."""
        self._clip_ids.append(clip.id)
        self._clips.add(asdict(clip))
        pacing = self._pacings.setdefault(clip.pacing, len(self._pacings))
        facts = {
            "held_out": clip.held_out,
            "still": clip.still,
            "regularization": clip.kind == "regularization",
            "repeats": clip.repeats,
            "pacing": pacing,
        }
        for name, value in facts.items():
            self._facts[name].append(value)
        table = self._windows["held_out_windows" if clip.held_out else "windows"]
        table.add_clip(windows)

    def finish(
        self, notes: Sequence[str], roots: Sequence[Path], fingerprint: str
    ) -> None:
        """Write everything that is still in memory, the manifest last."""
        for rows in (self._clips, self._accounts, self._media):
            rows.close()
        self._save("clip_ids", self._clip_ids.fixed_width())
        self._save("media_ids", self._media_ids.fixed_width())
        for name, values in self._facts.items():
            column = np.frombuffer(values, np.int32)
            is_flag = name not in ("repeats", "pacing")
            self._save(name, column.astype(bool) if is_flag else column)

        manifest: dict[str, Any] = {
            "fingerprint": fingerprint,
            "notes": list(notes),
            "note_codes": codes_of(notes),
            "skipped": self.skipped,
            "roots": [str(root) for root in roots],
            "pacings": [asdict(pacing) for pacing in self._pacings],
        }
        for name, builder in self._windows.items():
            table = builder.table()
            self._save(f"{name}.clip_ids", IdArray.of(table.clip_ids).array)
            for column_name in COLUMNS:
                self._save(f"{name}.{column_name}", getattr(table, column_name))
            manifest[name] = {
                "kinds": [asdict(kind) for kind in table.kinds],
                "companions": list(table.companions.items()),
            }
        files.write_json(self.folder / MANIFEST, manifest, durable=False)

    def _save(self, name: str, array: NDArray[Any]) -> None:
        np.save(self.folder / f"{name}.npy", array)


class _RowWriter:
    """Writes rows as JSON, and where each begins."""

    def __init__(self, folder: Path, name: str) -> None:
        self._offsets = array("q", [0])
        self._offsets_path = folder / f"{name}.offsets.npy"
        self._file = (folder / f"{name}.rows").open("wb")

    def add(self, row: Any) -> None:
        """Append a row."""
        content = json.dumps(row).encode() + b"\n"
        self._file.write(content)
        self._offsets.append(self._offsets[-1] + len(content))

    def close(self) -> None:
        """Finish both files."""
        self._file.close()
        np.save(self._offsets_path, np.array(self._offsets, np.int64))


@contextmanager
def library_folder(inputs: Inputs) -> Iterator[Path]:
    """Let this block fill a folder, then make it the snapshot of these inputs."""
    with files.whole_folder(inputs.folder) as part:
        yield part
    _remove_old_snapshots()


def temporary_folder() -> Path:
    """Return a new folder that is removed when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="videotune-library-")
    _temporary_folders.append(folder)
    return Path(folder.name)


_temporary_folders: list[tempfile.TemporaryDirectory[str]] = []


def _remove_old_snapshots() -> None:
    """Remove the snapshots that were used longest ago."""
    folders = [
        folder
        for folder in snapshots_folder().iterdir()
        if (folder / MANIFEST).is_file()
    ]
    folders.sort(key=lambda folder: (folder / MANIFEST).stat().st_mtime, reverse=True)
    for folder in folders[MOST_SNAPSHOTS:]:
        shutil.rmtree(folder, ignore_errors=True)


# -- reading ---------------------------------------------------------------------------


def read_snapshot(inputs: Inputs) -> dict[str, Any] | None:
    """Return the fields of a library that was written for the same inputs, or None.

    Rows are read when they are asked for.
    """
    folder = inputs.folder
    if not (folder / MANIFEST).is_file():
        return None
    try:
        fingerprint = files.read_json(folder / MANIFEST)["fingerprint"]
        if fingerprint != inputs.fingerprint:
            return None
        os.utime(folder / MANIFEST)  # it was used now
        parts = read_library(folder)
    except (OSError, ValueError, KeyError, TypeError):
        # Torn by a full disk, or changed by hand: the library is made anew.
        return None
    lacks_captions = any(
        reason.endswith("_caption") for _, reason, _ in parts["skipped"]
    )
    return None if inputs.needs_captions and lacks_captions else parts


def read_library(folder: Path) -> dict[str, Any]:
    """Return the fields of a library that a ``LibraryWriter`` wrote."""
    manifest = files.read_json(folder / MANIFEST)

    def column(name: str) -> NDArray[Any]:
        return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    def rows(name: str, convert: Callable[[Any], Any]) -> RowFile[Any]:
        return RowFile(folder / f"{name}.rows", column(f"{name}.offsets"), convert)

    columns = ClipColumns(
        ids=IdArray(column("clip_ids")),
        **{name: column(name) for name in CLIP_COLUMNS},
        pacings=tuple(Pacing(**pacing) for pacing in manifest["pacings"]),
    )
    tables = {}
    for name in TABLES:
        table = manifest[name]
        tables[name] = WindowTable(
            clip_ids=IdArray(column(f"{name}.clip_ids")),
            companions={
                owner: tuple((role, file_id) for role, file_id in pairs)
                for owner, pairs in table["companions"]
            },
            kinds=tuple(map(_kind_from_json, table["kinds"])),
            **{part: column(f"{name}.{part}") for part in COLUMNS},
        )
    media = RowsById(IdArray(column("media_ids")), rows("media", MediaInfo.from_json))
    return {
        "clips": ClipTable(columns, rows("clips", clip_from_json)),
        **tables,
        "accounts": rows("accounts", _account_from_json),
        "media": media,
        "notes": tuple(with_codes(manifest["notes"], manifest["note_codes"])),
        "skipped": tuple(tuple(row) for row in manifest["skipped"]),
        "roots": tuple(map(Path, manifest["roots"])),
    }


def _account_from_json(account: dict[str, Any]) -> dict[str, Any]:
    """Give an account's remarks their codes again."""
    warnings = with_codes(account["warnings"], account["warning_codes"])
    # The serious warnings are the first ones.
    serious = warnings[: len(account["serious"])]
    notes = with_codes(account["notes"], account["note_codes"])
    return account | {"warnings": warnings, "serious": serious, "notes": notes}


def _kind_from_json(value: dict[str, Any]) -> Window:
    value["shape"] = ClipShape(**value["shape"])
    value["companions"] = ()
    return Window(**value)
