"""What a project takes of the datasets of another trainer's config.

An existing folder is used where it is, with its own settings. The clips of any other are
for the user to add, so its settings become those of the project's own clips, as far as
these have such settings.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from videotune.config.data_schema import Dataset
from videotune.data.clip_file import CAPTION_SUFFIXES
from videotune.errors import VideotuneError
from videotune.studio.clip_keys import CLIP_KEYS
from videotune.studio.paths import names_object_store
from videotune.studio.projects import CLIPS, Project, has_visible_files
from videotune.studio.records import SourceFacts
from videotune.studio.sources import checked_source
from videotune.studio.web import PageContext

RUN_KEYS = {
    "windows": "video_config.windows",
    "resolution": "resolution",
    "batch_size": "batch_size",
}
"""Keys of a dataset that stand for one of the whole run."""

OTHER_FOLDERS = "other folders and datasets"
"""The name under which the studio has the folders that it uses where they are."""

ADD_CLIPS = "add the clips on the page Data"

WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]|\\\\")
"""The beginning of an absolute path of Windows."""

FOLDER_KEYS = ("loss_masks",)
"""Keys of a dataset that name a further folder."""


@dataclass(frozen=True)
class ImportedDataset:
    """A dataset of the config."""

    path: str
    """Its path, as translated."""

    kind: str

    settings: Mapping[str, Any]
    """Its other keys."""

    source: SourceFacts | None = None
    """The dataset that the project takes; None if it takes none."""

    reason: str = ""
    """Why it takes none."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Why keys of a taken one are left out."""


@dataclass(frozen=True)
class ImportedData:
    """The datasets of the config, and what the project takes of them."""

    datasets: Sequence[ImportedDataset]

    clip_keys: Mapping[str, Any]
    """Settings of the project's own clips."""

    run_keys: Mapping[str, Any]
    """Settings of the whole run, by dotted name, that its datasets had."""

    @property
    def sources(self) -> list[SourceFacts]:
        """The datasets outside of the project that it takes."""
        # While there are no clips, their settings hold for a source that lacks them.
        defaults = {key: _default(key) for key in self.clip_keys}
        rows = []
        for dataset in self.datasets:
            if dataset.source is None:
                continue
            row: SourceFacts = {**dataset.source}
            settings = {**defaults, **dataset.source.get("settings", {})}
            if settings:
                row["settings"] = settings
            rows.append(row)
        return rows

    def reason_against(self, dataset: ImportedDataset, key: str) -> str:
        """Return why a key of a dataset is not taken; empty if it is."""
        if key == "path":
            return dataset.reason
        if dataset.source:
            return dataset.refused.get(key, "")

        # The clips of this one are for the user to add.
        if key in self.clip_keys or RUN_KEYS.get(key) in self.run_keys:
            return ""
        if key == "kind" or dataset.kind != "train":
            return "it belongs to a folder that is not taken over"

        if key in CLIP_KEYS and _has_one_value(self.datasets, key):
            return f"captions beside clips end in {' or '.join(CAPTION_SUFFIXES)} here"
        if key in CLIP_KEYS or key in RUN_KEYS:
            return (
                "the datasets differ in it, and the clips of a project share one value"
            )
        return "only other folders and datasets have this setting, the clips of a project do not"

    def place_of(self, dataset: ImportedDataset, key: str) -> str:
        """Return the name under which the project has a key that it takes."""
        if not dataset.source and key not in self.clip_keys:
            return RUN_KEYS.get(key, key)
        return OTHER_FOLDERS if key == "path" else f"datasets.{key}"


def imported_data(page: PageContext, config: Mapping[str, Any]) -> ImportedData:
    """Return what the open project takes of the datasets of a translated config.

    No folder is looked for before the user may name it.
    """
    datasets = [_imported_dataset(page, row) for row in config.get("datasets", ())]
    clips_to_add = _train_datasets(datasets)

    clip_keys = {}
    run_keys = {}
    has_sources = any(dataset.source for dataset in datasets)
    names: dict[str, None] = {}
    for dataset in clips_to_add:
        names |= dict.fromkeys(dataset.settings)
    for key in names:
        if not _has_one_value(clips_to_add, key):
            continue
        value = clips_to_add[0].settings[key]
        if key in CLIP_KEYS and _is_taken_by_clips(key, value):
            clip_keys[key] = value
        elif key in RUN_KEYS and not has_sources:
            run_keys[RUN_KEYS[key]] = value

    return ImportedData(datasets, clip_keys, run_keys)


def own_clip_keys(page: PageContext, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the project's own clips, of which an import keeps those that
    it does not name; none if there are no clips yet.
    """
    project = page.current_project
    clip_keys = keys.get("datasets")
    if not has_visible_files(project.folder / CLIPS):
        return {}
    return dict(clip_keys) if isinstance(clip_keys, Mapping) else {}


def _train_datasets(datasets: Sequence[ImportedDataset]) -> list[ImportedDataset]:
    """Return the training datasets whose clips the user has to add."""
    return [row for row in datasets if not row.source and row.kind == "train"]


def _has_one_value(datasets: Sequence[ImportedDataset], key: str) -> bool:
    """Return whether all training datasets that are not taken have the same value."""
    values = [row.settings.get(key, _default(key)) for row in _train_datasets(datasets)]
    return all(value == values[0] for value in values)


def _default(key: str) -> Any:
    field_of_key = Dataset.model_fields.get(key)
    return field_of_key.default if field_of_key else None


def _is_taken_by_clips(key: str, value: Any) -> bool:
    """Return whether the clips of a project can have a value."""
    if key != "caption_extension":
        return True
    return str(value).lower() in CAPTION_SUFFIXES


def _imported_dataset(page: PageContext, row: Mapping[str, Any]) -> ImportedDataset:
    settings = {key: value for key, value in row.items() if key not in ("path", "kind")}
    path = str(row.get("path", ""))
    kind = str(row.get("kind", "train"))
    try:
        source_path = _usable_path(page, path)
    except VideotuneError as error:
        return ImportedDataset(path, kind, settings, reason=str(error))

    refused = {}
    for key in FOLDER_KEYS:
        if key in settings:
            try:
                _usable_path(page, str(settings[key]))
            except VideotuneError as error:
                refused[key] = str(error)

    source: SourceFacts = {"path": source_path}
    if kind != "train":
        source["kind"] = kind
    source_settings = {key: settings[key] for key in settings if key not in refused}
    if source_settings:
        source["settings"] = source_settings
    return ImportedDataset(path, kind, settings, source, refused=refused)


def _usable_path(page: PageContext, path: str) -> str:
    """Return a dataset of a config as the project takes it.

    Raises:
        VideotuneError: if it is not here, or the user may not name it.
    """
    text = path_in_config(page, path)
    if names_object_store(text):
        raise VideotuneError(
            f"{text} would be read with your own credentials, and the config names it:"
            " add it on the page Data, if you trust it"
        )
    if WINDOWS_PATH.match(text) and os.name != "nt":
        raise VideotuneError(f"{text} is a folder of another computer: {ADD_CLIPS}")
    if text != path and not text.startswith("~"):
        raise VideotuneError(
            f"{text} is relative to the folder of its config, which the studio does not"
            f" know: {ADD_CLIPS}"
        )
    if not page.path_rule.allows(text):
        raise VideotuneError(
            f"only a user on the server itself can name the folder {text}: {ADD_CLIPS}"
        )
    if Path(text).is_absolute() and not os.path.exists(text):
        raise VideotuneError(f"no folder {text} on this computer: {ADD_CLIPS}")

    usable = checked_source(page, text)
    if Path(usable).is_relative_to(page.current_project.folder.resolve()):
        raise VideotuneError(f"{text} is in the folder of this project itself")
    return usable


def path_in_config(page: PageContext, path: str) -> str:
    """Return a path as the config has it: a relative one was translated to one in the
    folder of the imported files.
    """
    folder = f"{foreign_folder(page.current_project).absolute()}{os.sep}"
    return path.removeprefix(folder)


def foreign_folder(project: Project) -> Path:
    """Return the folder of the uploaded config of another trainer."""
    return project.folder / ".studio" / "theirs"
