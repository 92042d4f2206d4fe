"""Projects as one file: export, import, and copies.

An imported project may be made by a stranger. Only files of known places and kinds enter
it, each checked by its content: clips, captions, settings, and what runs have written.
Jobs, processes, histories and caches of the other studio do not.
"""

import json
import os
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from videotune.config.load import checked_keys
from videotune.config.nested_keys import merge
from videotune.config.resolve import parse
from videotune.data.archives import unpack
from videotune.data.clip_file import CLIP_SUFFIXES
from videotune.errors import VideotuneError
from videotune.files import digest, read_typed, write_json
from videotune.presets.shipped import preset_named
from videotune.runs.schemas import parse_line
from videotune.runs.schemas import read_record as read_run_record
from videotune.studio.form import as_config, clip_keys_of, preset_keys
from videotune.studio.left_sources import names_of_sources
from videotune.studio.paths import (
    PathRule,
    names_prompts,
    refuse_imported_optimizer,
    refuse_object_stores,
)
from videotune.studio.project_names import MAX_TITLE_LENGTH, clean_title
from videotune.studio.projects import (
    CLIPS,
    HELD_OUT,
    MANAGED_KEYS,
    PROJECT_FILE,
    Project,
    new_facts,
    new_folder,
    place,
)
from videotune.studio.records import ProjectFacts, Try
from videotune.studio.tensor_file import TensorFile
from videotune.studio.uploads import MAX_FOLDER_DEPTH, content_kind, rejection_reason
from videotune.text import counted, some

NOT_EXPORTED = ("bin", "jobs", ".studio", ".unpacking")
"""Folders that an export leaves out: the bin, local processes, and what can be
recomputed.
"""

MAX_MEMBERS = 100_000
"""Files of an exported project, at most."""

MAX_DEPTH = 12
"""Folders in the path of such a file, at most."""

MAX_DOCUMENT_BYTES = 64_000_000
"""Size limit of a JSON file or a text that a run has written; a check of many clips, or
the vocabulary of a tokenizer.
"""

MAX_LINE_BYTES = 1_000_000
"""Size limit of a line of a journal."""

ELSEWHERE = "elsewhere"
"""Folder of a project, not made by anybody, that stands for all folders outside."""

EXPORT_REMEDY = "export the project again"

USUALLY_LEFT_OUT = re.compile(
    r"^(history\.jsonl|command\.json|sheet/)"
    r"|/(heartbeat\.json|report\.html|mlflow\.db)$|/(tensorboard|wandb|mlartifacts)/"
)
"""Files of every export that belong to the other computer, or can be made again; no
note is made of them.
"""

RUN = r"runs/[A-Za-z0-9][A-Za-z0-9._-]{0,60}/(branches/[0-9]{1,6}/)?"
TRY = r"tries/[A-Za-z0-9][A-Za-z0-9._-]{0,60}/[0-9a-f]{1,20}/"
CHECKPOINT = RUN + r"checkpoints/step-[0-9]{1,10}/"
FACTS_UNTIL = r"before/(config|check|plan)-until-step-[0-9]{1,10}\.json"
MEDIA_FOLDERS = r"(samples|compare|pictures|sample_metrics)/"


def is_exported(relative: Path) -> bool:
    """Return whether a file of a project belongs into its export."""
    is_hidden = any(part.startswith(".") for part in relative.parts)
    return relative.parts[0] not in NOT_EXPORTED and not is_hidden


def duplicate(root: Path, project: Project) -> Project:
    """Create a project with another's clips, captions and settings.

    Clips become hard links where the file system supports them.
    """
    title = f"{project.title[:72]} (copy)"
    with new_folder(root) as folder:
        for name in (CLIPS, HELD_OUT, "config.json"):
            source = project.folder / name
            target = folder / name
            if source.is_dir():
                shutil.copytree(
                    source, target, copy_function=_link_or_copy, dirs_exist_ok=True
                )
            elif source.is_file():
                shutil.copyfile(source, target)

        facts = cast(ProjectFacts, {**project.facts, **new_facts(title)})
        return place(root, folder, facts)


def _link_or_copy(source: str, target: str) -> None:
    """Link a file.

    That is safe, since clips and captions are replaced, never written into.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@dataclass
class Import:
    """An imported project."""

    project: Project

    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""


def import_project(root: Path, archive: Path, rule: PathRule) -> Import:
    """Create a project from an exported zip; its runs then refer to its new paths.

    Everything is checked in a hidden folder, which becomes the project as the last act.

    Args:
        root: folder of the projects.
        archive: the zip.
        rule: which paths the user may name.

    Raises:
        VideotuneError: if the archive holds no project.
    """
    _check_members(archive)
    with new_folder(root) as unpacked, new_folder(root) as folder:
        source = _unpack_project(archive, unpacked)
        exported = _exported_facts(source)
        notes: list[str] = []
        facts = _imported_facts(exported, source.name, notes)
        keys = _imported_keys(source, facts.get("preset", ""), rule, notes)
        _take_files(source, folder, notes)
        if keys:
            write_json(folder / "config.json", keys)

        def refer_to(final_folder: Path) -> None:
            rewriting = _Rewriting(exported.get("folder", ""), final_folder, rule)
            rewriting.rewrite_runs(folder)

        return Import(place(root, folder, facts, prepare=refer_to), notes)


def _check_members(archive: Path) -> None:
    """Raise VideotuneError if a file is no zip, or has too many or too deep members."""
    try:
        with zipfile.ZipFile(archive) as zip_file:
            names = zip_file.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise VideotuneError(
            f"{archive.name} is not an exported project: it must be a zip"
        ) from error

    if len(names) > MAX_MEMBERS:
        raise VideotuneError(
            f"{archive.name} holds more than {MAX_MEMBERS:,} files, more than a project"
        )
    if any(re.split(r"[/\\]", name)[MAX_DEPTH:] for name in names):
        raise VideotuneError(
            f"{archive.name} holds folders in more than {MAX_DEPTH} levels, more than "
            "a project"
        )


def _unpack_project(archive: Path, target: Path) -> Path:
    """Unpack an exported project and return its folder."""
    folder = unpack(archive, target)
    project_files = [
        path for path in folder.glob(f"*/{PROJECT_FILE}") if path.is_file()
    ]
    if len(project_files) != 1:
        raise VideotuneError(
            f"{archive.name} is not an exported project: "
            f"it must hold one folder with a {PROJECT_FILE}"
        )
    return project_files[0].parent


def _exported_facts(source: Path) -> ProjectFacts:
    """Return the content of ``project.json``; VideotuneError if it is damaged."""
    try:
        facts: ProjectFacts = read_typed(source / PROJECT_FILE, ProjectFacts)
    except ValueError as error:
        raise VideotuneError(
            f"{PROJECT_FILE} is damaged ({error}): {EXPORT_REMEDY}"
        ) from error
    return facts


def _imported_facts(
    exported: ProjectFacts, folder_name: str, notes: list[str]
) -> ProjectFacts:
    """Return the facts of the new project: what holds on any computer."""
    title = exported.get("title", "").strip() or folder_name
    facts = new_facts(clean_title(title[:MAX_TITLE_LENGTH]))
    for key in ("card", "vram", "allow_skips"):
        if key in exported:
            facts[key] = exported[key]
    try:
        if "preset" in exported:
            facts["preset"] = preset_named(exported["preset"])
    except VideotuneError as error:
        notes.append(f"its preset was left out: {error}")

    left_sources = names_of_sources(exported.get("sources", []))
    if left_sources:
        facts["left_sources"] = left_sources
        folders = counted(len(left_sources), "other folder")
        notes.append(
            f"the clips of {folders} ({some(left_sources)}) are not in its file"
        )
    return facts


def _imported_keys(
    source: Path, preset: str, rule: PathRule, notes: list[str]
) -> dict[str, Any]:
    """Return the settings of an exported project, without keys that the studio sets."""
    path = source / "config.json"
    if not path.is_file():
        return {}
    try:
        keys = checked_keys(read_typed(path, dict[str, Any]), path.name)
        for key in MANAGED_KEYS:
            keys.pop(key, None)
        clip_keys = clip_keys_of(keys.pop("datasets", None))
        if clip_keys:
            keys["datasets"] = clip_keys
        parse(merge(preset_keys(preset), as_config(keys)))
        rule.check_config(keys)
        refuse_imported_optimizer(keys)
        refuse_object_stores(keys)
    except ValueError as error:
        notes.append(f"its settings were left out: {error}")
        return {}
    return keys


def _take_files(source: Path, folder: Path, notes: list[str]) -> None:
    """Move the files that a project may have into its folder; note the others."""
    unknown_places: Counter[str] = Counter()
    for path in sorted(source.rglob("*")):
        if not path.is_file():
            continue
        relative = path.relative_to(source).as_posix()
        if relative in (PROJECT_FILE, "config.json"):
            continue
        check = _check_for(relative)
        if check is None:
            if not USUALLY_LEFT_OUT.search(relative):
                unknown_places[relative.partition("/")[0]] += 1
            continue

        try:
            check(path)
        except (VideotuneError, ValueError, OSError) as error:
            reason = str(error).replace(f"{source}/", "")
            notes.append(f"{relative} was left out: {reason}")
            continue
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)

    for place_name, count in sorted(unknown_places.items()):
        notes.append(
            f"{place_name} was left out" + (f": {count} files" if count > 1 else "")
        )


def _check_for(relative: str) -> Callable[[Path], object] | None:
    """Return the check of a file of a project; None if it does not enter a project."""
    for pattern, check in CHECKS.items():
        if re.fullmatch(pattern, relative):
            return check
    return None


def _check_clip(path: Path) -> None:
    """Check a clip, a caption or a list of captions as an upload is checked."""
    reason = rejection_reason(path, path.name)
    if reason is None and content_kind(path) == "archive":
        reason = "archives inside archives are not unpacked"
    if reason is not None:
        raise VideotuneError(reason)


def _check_media(path: Path) -> None:
    if content_kind(path) not in ("video", "image"):
        raise VideotuneError("its content is not a video or picture")


def _check_run_record(name: str, path: Path) -> None:
    """Check a JSON file of a run that has a schema."""
    _check_document(path)
    value = read_run_record(path, name, partial=True)
    if name == "config":
        refuse_imported_optimizer(value)
        refuse_object_stores(value)
    if name in ("exports", "compare"):
        for record in value:
            for key in ("path", "video", "sheet"):
                _check_inside(str(record.get(key, "")))


def _check_document(path: Path) -> None:
    """Check a JSON file that only the commands read."""
    value = read_typed(path, Any, MAX_DOCUMENT_BYTES)
    json.dumps(value, allow_nan=False)  # refuses NaN and infinity


def _check_try(path: Path) -> None:
    """Check ``try.json``, and remove the name of its entry in the other queue."""
    record: Try = read_typed(path, Try)
    record.pop("entry", None)
    write_json(path, record)


def _check_tensors(path: Path) -> None:
    TensorFile(path)


def _check_text(path: Path) -> None:
    is_text = content_kind(path) == "text"
    if not is_text or path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise VideotuneError("its content is not a text")


def _check_inside(path: str) -> None:
    """Raise VideotuneError if a path in a run's file leads out of the run."""
    parts = path.replace("\\", "/").split("/")
    if path and (not parts[0] or ".." in parts or ":" in parts[0]):
        raise VideotuneError(f"its path {path[:200]!r} leads out of the run")


def _take_journal(path: Path) -> None:
    """Keep the lines of a journal that are valid; a kill may have torn the last one."""
    temporary = path.with_name("journal.checked")
    with temporary.open("wb") as file:
        for line in _journal_lines(path):
            file.write(line)
    os.replace(temporary, path)


def _journal_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            try:
                record = parse_line(line)
                json.dumps(record, allow_nan=False)
                for entry in (record, *_entries(record.get("samples"))):
                    _check_inside(str(entry.get("path", "")))
            except (ValueError, RecursionError):
                continue
            yield line


def _entries(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, dict)]


def _suffixes(suffixes: tuple[str, ...]) -> str:
    """Return a pattern for the end of a file name, in upper or lower case."""
    return rf"(?i:{'|'.join(map(re.escape, suffixes))})"


CHECKS: dict[str, Callable[[Path], object]] = {
    rf"({CLIPS}|{HELD_OUT}|scenes)/([^/]+/){{0,{MAX_FOLDER_DEPTH}}}[^/]+": _check_clip,
    RUN + r"journal\.jsonl": _take_journal,
    CHECKPOINT + "COMPLETE": partial(_check_run_record, "COMPLETE"),
    CHECKPOINT + r"state\.json": partial(_check_run_record, "state"),
    CHECKPOINT + r"[\w-]+\.safetensors": _check_tensors,
    RUN + r"compare/compare\.json": partial(_check_run_record, "compare"),
    RUN + r"(validation|sample_metrics)\.json": _check_document,
    RUN + MEDIA_FOLDERS + "[^/]+" + _suffixes(CLIP_SUFFIXES): _check_media,
    RUN + r"(sample_metrics|export)/([^/]+/){0,4}[^/]+\.safetensors": _check_tensors,
    RUN + r"forgetting\.safetensors": _check_tensors,
    RUN + r"export/([^/]+/){0,4}[^/]+\.json": _check_document,
    RUN + r"export/([^/]+/){0,4}[^/]+\.(md|txt)": _check_text,
    TRY + r"try\.json": _check_try,
    TRY + "[^/]+" + _suffixes(CLIP_SUFFIXES): _check_media,
}
"""The files that an imported project may have, each with the check of its content."""

for _name in ("config", "check", "plan", "exports", "demo"):
    CHECKS[RUN + rf"{_name}\.json"] = partial(_check_run_record, _name)
for _name in ("config", "check", "plan"):
    _pattern = FACTS_UNTIL.replace("(config|check|plan)", _name)
    CHECKS[RUN + _pattern] = partial(_check_run_record, _name)


@dataclass(frozen=True)
class _Rewriting:
    """Makes the files of imported runs refer to their new project."""

    old: str
    """The folder from which the project was exported; empty if it is not known."""

    new: Path
    rule: PathRule

    def rewrite_runs(self, folder: Path) -> None:
        """Rewrite the JSON files of all runs below a folder."""
        for path in folder.glob("runs/**/*.json"):
            within_run = path.relative_to(folder).parts[2:]
            if "export" in within_run or "checkpoints" in within_run:
                continue
            value = json.loads(path.read_bytes())
            rewritten = self._with_new_folder(value)
            if path.name == "config.json" or path.name.startswith("config-until"):
                rewritten = self._settings(value, rewritten)
            if rewritten != value:
                write_json(path, rewritten)

    def _with_new_folder(self, value: Any) -> Any:
        """Replace the former folder at the start of every text."""
        if isinstance(value, dict):
            return {key: self._with_new_folder(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._with_new_folder(item) for item in value]
        is_below = isinstance(value, str) and value.startswith(
            (f"{self.old}/", f"{self.old}\\")
        )
        return f"{self.new}{value[len(self.old) :]}" if self.old and is_below else value

    def _settings(self, original: Any, config: Any) -> Any:
        """Return the config of a run without places that the studio sets itself.

        Paths that the user may not name are replaced by one that does not exist, so a
        resume reports them as missing.
        """
        config = self.rule.replace_paths(config, self._elsewhere)
        for section in ("settings", "asked"):
            for key in MANAGED_KEYS:
                if key in config.get(section, {}):
                    config[section] = {**config[section], key: None}
            if config.get(section, {}).get("notify"):
                # Messages would go to whoever sent the project.
                config[section] = {**config[section], "notify": []}
            if self.rule.is_restricted and names_prompts(
                config.get(section, {}).get("samples")
            ):
                # A file of prompts may name any image of the server's.
                config[section] = {**config[section], "samples": 0}

        # A run whose config was changed by hand is refused by its resume, as before.
        content = _without_digest(original)
        if original.get("digest") == digest(content):
            config["digest"] = digest(_without_digest(config))
        return config

    def _elsewhere(self, path: str) -> str:
        name = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
        return str(self.new / ELSEWHERE / re.sub(r"[^\w.-]|^\.+", "_", name))


def _without_digest(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "digest"}
