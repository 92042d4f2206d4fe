"""The base model of a run: where it lies, which family reads it, and the files that stand for its weights.

Of a model of the Hugging Face Hub what is needed is told before it is fetched, or found without a network.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.config.load import preset_names, read_preset
from videotune.errors import VideotuneError
from videotune.files import digest, read_json, size_text, user_cache, write_text
from videotune.hub_errors import hub_problem
from videotune.lazy import diffusers, torch
from videotune.lazy import huggingface_hub as hub
from videotune.models import model_files
from videotune.models.base import FAMILIES, DiffusersModel
from videotune.models.loading import check_part, explained, to_fill
from videotune.models.model_files import CONFIGS, STEMS, NotHere, note
from videotune.models.registry import find, names
from videotune.models.single_file import kind_of
from videotune.types import BasePlace, LogFn, ModelSpec

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

    from videotune.config.schema import Config


def published(name: str) -> Path | None:
    """Return the configs of a published base model that videotune includes, or None.

    With them a plan needs no network. ``name`` is the Hub id or the folder's name.
    """
    folders: dict[str, str] = read_json(CONFIGS / "index.json")
    if name in folders or name in folders.values():
        return CONFIGS / folders.get(name, name)
    return None


def place(
    name: str,
    *,
    weights: bool = True,
    files: Mapping[str, Path] | None = None,
    echo: LogFn = note,
) -> BasePlace:
    """Find a base model, and download missing files of a Hub model.

    Args:
        name: asset:NAME, a folder, or a Hub id.
        weights: also require the weights, and check the headers of their files against the
            configs. Otherwise only configs and tokenizers are needed.
        files: files that replace the weights of parts, see ``part_files``.
        echo: gets a line about a download.

    Raises:
        VideotuneError: if the model or a part of it is missing or damaged.
    """
    files = files or {}
    folder = _folder(name, weights, files, echo)
    if weights:
        model_files.complete(name, folder, own=files)
        parts = model_files.model_parts(model_files.read_config(folder / "model_index.json"))
        weight_files: list[Path] = []
        for part, (_, class_name) in parts.items():
            if model_files.has_weights(class_name) and part not in files:
                weight_files += model_files.weight_files(folder / part)
        verify(weight_files, echo)

        if files:
            folder = with_files(folder, files)
        check_base(folder)
    return BasePlace(name, folder)


def place_of(settings: Mapping[str, Any]) -> BasePlace:
    """Find the base model of a config, without its weights.

    If ``base_model_name`` is a file of weights, the folder is that of ``base_parts``.

    Raises:
        VideotuneError: as ``place`` does, and if the two keys do not fit together.
    """
    name = settings["base_model_name"]
    parts = settings.get("base_parts")
    if parts is None:
        return place(name, weights=False)
    if not Path(name).expanduser().is_file():
        raise VideotuneError(
            f"base_parts: it goes with a .safetensors file as base_model_name; {name} is none"
        )
    return replace(place(parts, weights=False), name=name)


def own_files(config: Config, spec: ModelSpec) -> dict[str, Path]:
    """Return the files that replace the weights of parts.

    They are ``base_model_name`` if there is ``base_parts``, else ``transformer.file``.

    Raises:
        VideotuneError: as ``part_files`` does, and for one file of a model with two experts.
    """
    if config.base_parts is None:
        return part_files(config.transformer.file, spec)
    name = str(config.base_model_name)
    if config.transformer.file or len(spec.experts) > 1:
        raise VideotuneError(
            f"base_model_name: {Path(name).name} is one file, and the model has two: "
            f"set base_model_name to {config.base_parts}, transformer.file to the list of files, "
            "and no base_parts"
        )
    return part_files(name, spec, "base_model_name")


def check_base(folder: Path) -> None:
    """Raise VideotuneError if the weights of diffusers' networks do not fit their configs.

    Only the headers of the files are read, so that a wrong file is found before anything is
    encoded. The VAE is compared when it is loaded, at the start of encoding.
    """
    parts = model_files.model_parts(model_files.read_config(folder / "model_index.json"))
    for part, (library, class_name) in parts.items():
        if library != "diffusers" or part == "vae" or not model_files.has_weights(class_name):
            continue
        cls = getattr(diffusers, class_name, None)
        if cls is None:
            raise VideotuneError(
                f"{folder / part}: this diffusers has no {class_name}: install a newer one"
            )
        check_part(cls, folder / part, to_fill(cls, folder / part, torch.float32))


def _folder(name: str, weights: bool, files: Mapping[str, Path], echo: LogFn) -> Path:
    if name.startswith("asset:"):
        folder = Path(
            str(resources.files("videotune") / "assets" / name.removeprefix("asset:"))
        )
        if not (folder / "model_index.json").is_file():
            raise VideotuneError(
                f"base_model_name: videotune comes with no model {name!r}; there is asset:toy"
            )
        return folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise VideotuneError(
                f"base_model_name: {folder} is not in diffusers layout: it has no model_index.json"
            )
        return folder
    if folder.is_file():
        remedy = "set base_parts to a folder or Hub id in diffusers layout, which gives the other parts"
        raise VideotuneError(f"base_model_name: {folder} is a file of weights: {remedy}")
    if folder.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise NotHere(f"base_model_name: no such folder: {name}")
    return fetch(name, weights=weights, own=tuple(files), echo=echo)


def part_files(
    value: str | Sequence[str | None] | None, spec: ModelSpec, key: str = "transformer.file"
) -> dict[str, Path]:
    """Return the file that replaces the weights of each part, by part.

    Args:
        value: the files of the experts in order; None for those of the base model.
        spec: gives the experts and their parts (``ModelSpec.part_of``).
        key: key of the config, for errors.

    Raises:
        VideotuneError: for a missing or unusable file, a wrong number of files, or a file of
            another expert.
    """
    values = [value] if isinstance(value, str) else list(value or ())
    experts = [expert.name for expert in spec.experts]
    if values and len(values) != len(experts):
        raise VideotuneError(
            f"{key}: {len(values)} given; {spec.title} takes {len(experts)} "
            f"({', '.join(experts)}; null for the base's own)"
        )

    files: dict[str, Path] = {}
    for expert, text in zip(experts, values, strict=False):
        if text is None:
            continue
        path = Path(text).expanduser()
        _check_part_file(path, expert, spec, key)
        if path.resolve() in {file.resolve() for file in files.values()}:
            raise VideotuneError(
                f"{key}: {path.name} is given for two experts: give a file for each"
            )
        kind = kind_of(model_files.headers([path]), spec.name)
        if kind:
            raise VideotuneError(
                f"{key}: {path} is {kind}, not the transformer of a {spec.title}"
            )
        files[spec.part_of(expert)] = path.absolute()
    return files


def _check_part_file(path: Path, expert: str, spec: ModelSpec, key: str) -> None:
    """Raise VideotuneError if a file cannot hold an expert's weights, by its path."""
    if not path.is_file():
        raise VideotuneError(f"{key}: no such file: {path}")
    if path.suffix != ".safetensors":
        raise VideotuneError(f"{key}: {path.name} is not read: it must be a .safetensors file")
    for name in re.findall("(high|low)[^a-z]?noise", path.stem.lower()):
        if name != expert:
            raise VideotuneError(
                f"{key}: {path.name} stands for the expert {expert!r}, and is one for {name!r} "
                f"by its name. The order of {spec.title}: {', '.join(s.name for s in spec.experts)}."
            )


def with_files(base: Path, files: Mapping[str, Path]) -> Path:
    """A folder of links that is the model in ``base`` with other files as the weights of some parts.

    It lies in the user's cache, named by what it links to, and takes no room.
    """
    links = {entry.name: entry for entry in sorted(base.iterdir()) if entry.name not in files}
    for part, path in files.items():
        links[f"{part}/config.json"] = base / part / "config.json"
        links[f"{part}/{STEMS[0]}.safetensors"] = path
    absolute = {name: str(target.absolute()) for name, target in links.items()}
    folder = user_cache() / "bases" / digest(absolute)
    if folder.is_dir():
        return folder
    aside = folder.with_name(f".part-{os.getpid()}-{folder.name}")
    try:
        for name, target in absolute.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).symlink_to(target)
        aside.rename(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        if folder.is_dir():  # another process of the run was quicker
            return folder
        remedy = f"Copy {base}, and put the file into it as {next(iter(files))}/{STEMS[0]}.safetensors."
        raise VideotuneError(
            f"transformer.file: {folder} cannot be made of links ({error}). {remedy}"
        ) from error
    return folder


def of_base(folder: Path) -> type[DiffusersModel]:
    """Return the family whose pipeline class is named in the model's index.

    Raises:
        VideotuneError: if there is no such family.
    """
    pipeline = model_files.read_config(folder / "model_index.json").get("_class_name", "?")
    family_names = names()
    for family_name in family_names:
        family = FAMILIES[family_name]
        if pipeline in family.spec.aliases:
            return family
    raise VideotuneError(
        f"{folder}: no family reads a {pipeline}. Families: {', '.join(family_names)}."
    )


def spec_for(family: str | None, base: BasePlace | None) -> ModelSpec:
    """Return the spec of a base model, or a family's own spec without a base model.

    Raises:
        VideotuneError: if the base model is of another family.
    """
    if base is None:
        assert family is not None
        return find(family).spec
    cls = of_base(base.folder)
    if family is not None and find(family) is not cls:
        raise VideotuneError(
            f"family: {family!r} does not read {base.name}, which is a {cls.spec.title}"
        )
    model_files.check_parts(base.folder)
    with explained(f"{base.folder}: its configs are not those of a {cls.spec.title}"):
        return cls.read_spec(base.folder)


_TRUE = ("1", "on", "yes", "true")
_WORTH_A_WORD = 64 << 20
"""Bytes; configs and tokenizers are fewer."""

_LONG = 1 << 30
"""Bytes of a file that take longer than about a second to hash."""

_SMALL = (".json", ".txt", ".model")


def offline() -> bool:
    """Whether the Hub must not be asked: by ``--offline``, HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE."""
    return any(
        os.environ.get(name, "").lower() in _TRUE
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def fetch(name: str, *, weights: bool, own: Collection[str], echo: LogFn) -> Path:
    """The folder in the Hub's cache with what videotune needs of the model ``name``; what is not there is downloaded.

    That is the parts of its model_index.json: configs and tokenizers, and with ``weights`` the safetensors of each part but
    those in ``own``; never variants, other formats or code. Before weights are fetched, ``echo`` is told their size, the
    licence and the place. A connection that breaks is taken up where it broke; of a run that was stopped, files that had
    come whole are kept. Raises VideotuneError that says what to do: for a wrong id, a gated or private model, a full disk,
    no network.
    """
    if offline():
        return cached(
            name,
            weights=weights,
            own=own,
            why="the Hub may not be asked (--offline or HF_HUB_OFFLINE)",
        )
    try:
        info = hub.HfApi().model_info(name)
        listed = {file.rfilename for file in info.siblings or ()}
        if "model_index.json" not in listed:
            raise VideotuneError(_no_layout(name, listed))
        with _bars(False):
            index = model_files.read_config(
                Path(hub.hf_hub_download(name, "model_index.json", revision=info.sha))
            )
            files = wanted(name, index, sorted(listed), weights=weights, own=own)
            patterns = [re.sub(r"([\[*?])", r"[\1]", file) for file in files]
            large = weights and _account(name, info, patterns, echo)
        with _bars(large):
            folder = Path(
                hub.snapshot_download(name, revision=info.sha, allow_patterns=patterns)
            )
        write_text(
            folder.parents[1] / "refs" / "main", str(info.sha)
        )  # where the cache serves without a network
    except VideotuneError:
        raise
    except Exception as error:  # the hub's library raises a dozen kinds; each is explained
        if not _unreached(error):
            raise VideotuneError(
                f"base_model_name: {hub_problem(name, error, _near(name))}"
            ) from error
        why = "the Hub is not reached: check the network; files that have come are kept"
        folder = cached(name, weights=weights, own=own, why=why)
        echo(f"note: the Hub is not reached; {name} is taken from {folder}")
    return folder


def wanted(
    name: str,
    index: dict[str, Any],
    listed: Sequence[str],
    *,
    weights: bool,
    own: Collection[str] = (),
) -> list[str]:
    """Return the files of a repository that videotune reads.

    Args:
        name: the Hub id, for errors.
        index: the model_index.json.
        listed: all files.
        weights: include weights.
        own: parts whose weights come from other files.

    Raises:
        VideotuneError: for a part whose weights have only formats that are not read.
    """
    files = ["model_index.json"]
    for part, (_, class_name) in model_files.model_parts(index).items():
        part_listed = [file for file in listed if file.startswith(f"{part}/")]
        files += [file for file in part_listed if file.endswith(_SMALL)]
        if not weights or part in own or not model_files.has_weights(class_name):
            continue
        weight_files = [file for file in part_listed if _is_weights(file.partition("/")[2])]
        if not weight_files:
            in_part = (file.partition("/")[2] for file in part_listed)
            formats = model_files.without_safetensors(in_part)
            raise VideotuneError(
                f"base_model_name: {name}: its {part}/ has no weights{formats}"
            )
        files += weight_files
    return files


def _is_weights(file: str) -> bool:
    """Whether a file of a part is of its plain weights, whole or a shard; ``model.fp16.safetensors`` is a variant."""
    return any(re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.safetensors", file) for stem in STEMS)


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """The Hub's progress bars, or none: of small files they say nothing worth reading."""
    change = not shown and not hub.utils.are_progress_bars_disabled()
    if change:
        hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        if change:
            hub.utils.enable_progress_bars()


def _account(name: str, info: ModelInfo, patterns: Sequence[str], echo: LogFn) -> bool:
    """Tell what will be fetched, if it is much; VideotuneError where the disk has no room for it."""
    files = hub.snapshot_download(
        name, revision=info.sha, allow_patterns=list(patterns), dry_run=True
    )
    size = sum(file.file_size or 0 for file in files)
    to_come = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(hub.constants.HF_HUB_CACHE)
    if to_come < _WORTH_A_WORD:
        return False
    here = f", {size_text(size - to_come)} of it are here" if to_come < size else ""
    echo(
        f"{name}: {len(files)} files, {size_text(size)}{here}; {size_text(to_come)} are fetched into {cache}; "
        f"licence: {_licence(info)}"
    )
    free = shutil.disk_usage(
        next(place for place in (cache, *cache.parents) if place.exists())
    ).free
    if free < to_come:
        room = f"{size_text(to_come)} more, and the disk of {cache} has {size_text(free)} free"
        raise VideotuneError(
            f"base_model_name: {name} needs {room}. Free some, or set HF_HOME to another disk."
        )
    return True


def _licence(info: ModelInfo) -> str:
    """As the model's card says it."""
    card = info.card_data
    named = (
        getattr(card, "license_name", None) or getattr(card, "license", None) if card else None
    )
    tags = [
        tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")
    ]
    return str(named or (tags[0] if tags else "its card names none"))


def cached(name: str, *, weights: bool, own: Collection[str] = (), why: str = "") -> Path:
    """The folder of a model in the Hub's cache, without a network.

    Raises VideotuneError naming what of it is not there, and ``why`` it cannot be fetched.
    """
    try:
        found = hub.try_to_load_from_cache(name, "model_index.json")
    except hub.errors.HFValidationError as error:
        raise VideotuneError(
            f"base_model_name: {hub_problem(name, error, _near(name))}"
        ) from error
    first = "Fetch it where there is a network, or give a local folder in diffusers layout."
    if not isinstance(found, str):
        cache = hub.constants.HF_HUB_CACHE
        raise NotHere(
            f"base_model_name: {name} is not in {cache}, and {why}. {first}{_near(name)}"
        )
    folder = Path(found).parent
    absent = model_files.missing(folder, weights=weights, own=own)
    if absent:
        what = f"{len(absent)} files are not in {folder}: {model_files.some(absent)}"
        raise NotHere(f"base_model_name: of {name}, {what}; and {why}. {first}")
    return folder


def _unreached(error: Exception) -> bool:
    """Whether the Hub could not be asked at all, or is out of order itself."""
    import httpx2  # light to start

    if isinstance(error, hub.errors.HfHubHTTPError):
        return error.response.status_code >= 500
    unreached = (httpx2.TransportError, hub.errors.OfflineModeIsEnabled)
    return isinstance(error, unreached) and not isinstance(error, httpx2.LocalProtocolError)


def _near(name: str) -> str:
    """The id of a preset that looks like it, or nothing."""
    ids = {str(read_preset(preset).get("base_model_name")) for preset in preset_names()}
    near = difflib.get_close_matches(name, sorted(one for one in ids if "/" in one), 1, 0.7)
    return f" (did you mean {near[0]}?)" if near and near[0] != name else ""


def _no_layout(name: str, listed: Collection[str]) -> str:
    weights = [
        file
        for file in sorted(listed)
        if file.endswith((".safetensors", ".pth", ".ckpt", ".gguf"))
    ]
    holds = f"it holds {model_files.some(weights or sorted(listed))}"
    remedy = (
        f"Look for {name}-Diffusers; a single file of a transformer goes into transformer.file"
    )
    return f"base_model_name: {name} is not in diffusers layout: it has no model_index.json; {holds}. {remedy}."


def verify(files: Iterable[Path], echo: LogFn) -> None:
    """Compare the bytes of files in the Hub's cache with their names, which are hashes.

    A file with the same path, size, time and inode is not read again. Only the first of several
    processes reads. Other files have no hash to compare with.

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
