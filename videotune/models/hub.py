"""Base models of the Hugging Face Hub: download what is needed, or find it without a
network."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.files import (
    digest,
    existing_folder,
    read_json,
    size_text,
    user_cache,
    write_text,
)
from videotune.http_limits import limited_hub
from videotune.hub_errors import hub_problem, is_unreached
from videotune.lazy import huggingface_hub as hub
from videotune.models import model_files
from videotune.models.model_files import STEMS, NotHere
from videotune.models.other_models import (
    other_model_of_name,
    other_model_of_pipeline,
    refuse_other_model,
)
from videotune.presets.shipped import preset_names, read_preset
from videotune.text import counted, counted_are
from videotune.types import LogFn

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_TRUE = ("1", "on", "yes", "true")
_WORTH_A_WORD = 64 << 20
"""Bytes of a download that is announced; configs and tokenizers are smaller."""

_LONG = 1 << 30
"""Bytes of a file whose hash takes more than about a second."""

_FORBIDDEN = "the Hub may not be asked (--offline or HF_HUB_OFFLINE)"
_UNREACHED = "the Hub is not reached: check the network"

_SMALL = (".json", ".txt", ".model")


def offline() -> bool:
    """Return whether --offline or an environment variable forbids the Hub."""
    return any(
        os.environ.get(name, "").lower() in _TRUE
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def fetch(
    name: str, *, weights: bool, replaced_parts: Collection[str], echo: LogFn
) -> Path:
    """Download what is missing of a model, and return its folder in the Hub's cache.

    That is the parts of its model_index.json: configs, tokenizers and the weights in
    safetensors; never variants, other formats or code. A broken connection resumes;
    files that were complete when a run stopped are kept.

    Args:
        name: the Hub id.
        weights: include weights.
        replaced_parts: parts whose weights come from other files.
        echo: gets size, licence and folder before weights are downloaded.

    Raises:
        VideotuneError: for a wrong id, a gated or private model, a full disk or no
            network; it contains a remedy.
    """
    if offline():
        return cached(
            name, weights=weights, replaced_parts=replaced_parts, why=_FORBIDDEN
        )
    try:
        with _hub_errors(name):
            return _download(
                name, weights=weights, replaced_parts=replaced_parts, echo=echo
            )
    except HubUnreached:
        reason = f"{_UNREACHED}; files that have come are kept"
        folder = cached(
            name, weights=weights, replaced_parts=replaced_parts, why=reason
        )
        echo(f"note: the Hub is not reached; {name} is taken from {folder}")
        return folder


class HubUnreached(VideotuneError):
    """The Hub cannot be reached or may not be asked, or has an internal error."""


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn errors of the Hub's library into sentences.

    Raises:
        HubUnreached: there is no network.
        VideotuneError: for every other error.
    """
    try:
        yield
    except VideotuneError:
        raise
    except Exception as error:  # huggingface_hub raises a dozen classes
        if is_unreached(error):
            raise HubUnreached(f"base_model_name: {name}: {_UNREACHED}") from error
        refuse_other_model(other_model_of_name(name), f"base_model_name: {name}")
        raise VideotuneError(
            f"base_model_name: {hub_problem(name, error, _near(name))}"
        ) from error


@dataclass(frozen=True)
class Download:
    """What a download of a model takes."""

    files: int
    bytes: int
    missing_bytes: int
    """Bytes that are not in the cache yet."""
    cache: Path
    """The folder of the Hub's cache."""
    licence: str


def describe_download(name: str) -> Download:
    """Return what the download of a model with its weights takes; its small files are
    fetched.

    Raises:
        VideotuneError: as ``fetch`` does; also if the Hub may not be asked or is not
            reached.
    """
    if offline():
        raise HubUnreached(f"base_model_name: {name}: {_FORBIDDEN}")
    with _hub_errors(name), _bars(False):
        info, patterns = _list_files(name, weights=True, replaced_parts=())
        return _describe(name, info, patterns)


def _list_files(
    name: str, *, weights: bool, replaced_parts: Collection[str]
) -> tuple[ModelInfo, list[str]]:
    """Return the Hub's facts on a model, and the files to fetch, as patterns."""
    with limited_hub():
        info = hub.HfApi().model_info(name)
    listed = {file.rfilename for file in info.siblings or ()}
    if "model_index.json" not in listed:
        refuse_other_model(other_model_of_name(name), f"base_model_name: {name}")
        raise VideotuneError(_no_layout(name, listed))

    index_path = hub.hf_hub_download(name, "model_index.json", revision=info.sha)
    index = model_files.read_config(Path(index_path))
    title = other_model_of_pipeline(str(index.get("_class_name")))
    refuse_other_model(title, f"base_model_name: {name}")
    files = wanted(
        name, index, sorted(listed), weights=weights, replaced_parts=replaced_parts
    )
    return info, [re.sub(r"([\[*?])", r"[\1]", file) for file in files]


def _describe(name: str, info: ModelInfo, patterns: Sequence[str]) -> Download:
    files = hub.snapshot_download(
        name, revision=info.sha, allow_patterns=list(patterns), dry_run=True
    )
    return Download(
        files=len(files),
        bytes=sum(file.file_size or 0 for file in files),
        missing_bytes=sum(file.file_size or 0 for file in files if file.will_download),
        cache=Path(hub.constants.HF_HUB_CACHE),
        licence=_licence(info),
    )


def _download(
    name: str, *, weights: bool, replaced_parts: Collection[str], echo: LogFn
) -> Path:
    with _bars(False):
        info, patterns = _list_files(
            name, weights=weights, replaced_parts=replaced_parts
        )
        is_large = weights and _account(name, info, patterns, echo)
    with _bars(is_large):
        snapshot = hub.snapshot_download(
            name, revision=info.sha, allow_patterns=patterns
        )
        folder = Path(snapshot)

    # The cache looks here for the revision when there is no network.
    write_text(folder.parents[1] / "refs" / "main", str(info.sha))
    return folder


def wanted(
    name: str,
    index: dict[str, Any],
    listed: Sequence[str],
    *,
    weights: bool,
    replaced_parts: Collection[str] = (),
) -> list[str]:
    """Return the files of a repository that videotune reads.

    Args:
        name: the Hub id, for errors.
        index: the model_index.json.
        listed: all files.
        weights: include weights.
        replaced_parts: parts whose weights come from other files.

    Raises:
        VideotuneError: for a part whose weights have only formats that are not read.
    """
    files = ["model_index.json"]
    for part, (_, class_name) in model_files.model_parts(index).items():
        part_listed = [file for file in listed if file.startswith(f"{part}/")]
        files += [file for file in part_listed if file.endswith(_SMALL)]
        if (
            not weights
            or part in replaced_parts
            or not model_files.has_weights(class_name)
        ):
            continue
        weight_files = [
            file for file in part_listed if _is_weights(file.partition("/")[2])
        ]
        if not weight_files:
            in_part = (file.partition("/")[2] for file in part_listed)
            formats = model_files.without_safetensors(in_part)
            raise VideotuneError(
                f"base_model_name: {name}: its {part}/ has no weights{formats}"
            )
        files += weight_files
    return files


def _is_weights(file: str) -> bool:
    """Return whether a file has plain weights; ``model.fp16.safetensors`` is a variant."""
    return any(
        re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.safetensors", file) for stem in STEMS
    )


@contextmanager
def _bars(visible: bool) -> Iterator[None]:
    """Hide the Hub's progress bars unless ``visible``; those of small files are noise."""
    hide = not visible and not hub.utils.are_progress_bars_disabled()
    if hide:
        hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            hub.utils.enable_progress_bars()


def _account(name: str, info: ModelInfo, patterns: Sequence[str], echo: LogFn) -> bool:
    """Announce a large download, and return whether it is large.

    Raises:
        VideotuneError: if the disk is too full.
    """
    download = _describe(name, info, patterns)
    missing_size = download.missing_bytes
    cache = download.cache
    if missing_size < _WORTH_A_WORD:
        return False

    echo(f"{name}: {download_text(download)}")

    free = shutil.disk_usage(existing_folder(cache)).free
    if free < missing_size:
        raise VideotuneError(
            f"base_model_name: {name} needs {size_text(missing_size)} more, and the disk of "
            f"{cache} has {size_text(free)} free. Free some, or set HF_HOME to another disk."
        )
    return True


def download_text(download: Download) -> str:
    """Return files, sizes, folder and licence of a download in a sentence."""
    size = download.bytes
    missing_size = download.missing_bytes
    present = ""
    if missing_size < size:
        present = f", {size_text(size - missing_size)} of it are here"
    return (
        f"{counted(download.files, 'file')}, {size_text(size)}{present}; {size_text(missing_size)} are "
        f"fetched into {download.cache}; licence: {download.licence}"
    )


def _licence(info: ModelInfo) -> str:
    """Return the licence in the model's card or tags."""
    card = info.card_data
    if card:
        licence = getattr(card, "license_name", None) or getattr(card, "license", None)
        if licence:
            return str(licence)
    for tag in info.tags or ():
        if tag.startswith("license:"):
            return tag.removeprefix("license:")
    return "its card names none"


def cached(
    name: str, *, weights: bool, replaced_parts: Collection[str] = (), why: str = ""
) -> Path:
    """Return a model's folder in the Hub's cache, without a network.

    Args:
        name: the Hub id.
        weights: weights are needed too.
        replaced_parts: parts whose weights come from other files.
        why: reason why the model cannot be downloaded.

    Raises:
        VideotuneError: if files are missing.
    """
    try:
        index_path = hub.try_to_load_from_cache(name, "model_index.json")
    except hub.errors.HFValidationError as error:
        raise VideotuneError(
            f"base_model_name: {hub_problem(name, error, _near(name))}"
        ) from error

    remedy = (
        "Fetch it where there is a network, or give a local folder in diffusers layout."
    )
    if not isinstance(index_path, str):
        refuse_other_model(other_model_of_name(name), f"base_model_name: {name}")
        cache = hub.constants.HF_HUB_CACHE
        raise NotHere(
            f"base_model_name: {name} is not in {cache}, and {why}. {remedy}{_near(name)}"
        )
    folder = Path(index_path).parent
    absent = model_files.missing(folder, weights=weights, replaced_parts=replaced_parts)
    if absent:
        raise NotHere(
            f"base_model_name: of {name}, {counted_are(len(absent), 'file')} not in {folder}: "
            f"{model_files.some(absent)}; and {why}. {remedy}"
        )
    return folder


def is_complete_here(name: str) -> bool:
    """Return whether the Hub's cache has a model with its weights; no network is used."""
    try:
        cached(name, weights=True)
    except VideotuneError:
        return False
    return True


def _near(name: str) -> str:
    """Return a hint with a preset's id that is similar, or ""."""
    ids = {str(read_preset(preset).get("base_model_name")) for preset in preset_names()}
    near = difflib.get_close_matches(
        name, sorted(hub_id for hub_id in ids if "/" in hub_id), 1, 0.7
    )
    return f" (did you mean {near[0]}?)" if near and near[0] != name else ""


def _no_layout(name: str, listed: Collection[str]) -> str:
    weights = [
        file
        for file in sorted(listed)
        if file.endswith((".safetensors", ".pth", ".ckpt", ".gguf"))
    ]
    holds = f"it holds {model_files.some(weights or sorted(listed))}"
    remedy = f"Look for {_in_layout(name)}; a single file of a transformer goes into transformer.file"
    return f"base_model_name: {name} is not in diffusers layout: it has no model_index.json; {holds}. {remedy}."


def _in_layout(name: str) -> str:
    """Return the Hub id of a model in diffusers layout, by its authors' id.

    Somebody else than the authors may publish it; then it is among the known ids.
    """
    wanted = f"{name.rpartition('/')[2]}-Diffusers"
    known_ids: dict[str, str] = read_json(model_files.CONFIGS / "index.json")
    for known_id in known_ids:
        if known_id.rpartition("/")[2].lower() == wanted.lower():
            return known_id
    return f"{name}-Diffusers"


def verify(files: Iterable[Path], echo: LogFn) -> None:
    """Compare the bytes of files in the Hub's cache with their names, which are hashes.

    A file with the same path, size, time and inode is not read again. Only the first of
    several processes reads. Other files have no hash to compare with.

    Raises:
        VideotuneError: for a file with other bytes.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for path in files:
        blob = path.resolve()
        if re.fullmatch("[0-9a-f]{64}", blob.name):
            _verify_blob(path, blob, echo)


def _verify_blob(path: Path, blob: Path, echo: LogFn) -> None:
    stat = blob.stat()
    key = digest([str(blob), stat.st_size, stat.st_mtime_ns, stat.st_ino])
    mark = user_cache() / "verified" / key
    if mark.exists():
        return

    if stat.st_size > _LONG:
        echo(f"checking the bytes of {path.name} ({stat.st_size / 1e9:.1f} GB), once")
    with blob.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != blob.name:
        raise VideotuneError(
            f"base_model_name: {path} is damaged: its sha256 is {sha256[:12]}…, "
            f"the Hub's {blob.name[:12]}…. Delete {blob} and start again"
        )

    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        echo(
            f"note: {path.name} is checked again at the next start: "
            f"{mark} cannot be written ({error})"
        )
