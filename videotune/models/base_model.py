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
    """The configs that come with videotune, of a base model by its Hub id or by its folder's name; None: there are none.

    With them a plan needs no network.
    """
    known: dict[str, str] = read_json(CONFIGS / "index.json")
    return CONFIGS / known.get(name, name) if name in {*known, *known.values()} else None


def place(
    name: str,
    *,
    weights: bool = True,
    files: Mapping[str, Path] | None = None,
    echo: LogFn = note,
) -> BasePlace:
    """Where the base model called ``name`` lies: asset:NAME, a folder, or a Hub id.

    What of a Hub model is not here is downloaded; without ``weights`` its configs and tokenizers alone. With ``weights``
    all of the model must be there, and the heads of its files must fit its configs. ``files`` (``part_files``) stand for
    the weights of the parts that they name. ``echo`` is told what a download takes.

    Raises VideotuneError that says what was looked for, or what is missing.
    """
    files = files or {}
    folder = _folder(name, weights, files, echo)
    if weights:
        model_files.complete(name, folder, own=files)
        parts = model_files.model_parts(model_files.read_config(folder / "model_index.json"))
        nets = {
            part: library
            for part, (library, cls) in parts.items()
            if model_files.has_weights(cls)
        }
        verify(
            (
                file
                for part in nets
                if part not in files
                for file in model_files.weight_files(folder / part)
            ),
            echo,
        )
        folder = with_files(folder, files) if files else folder
        check_base(folder)
    return BasePlace(name, folder)


def place_of(settings: Mapping[str, Any]) -> BasePlace:
    """Where the base model of a config lies, without its weights; of a file of weights, where its ``base_parts`` lie.

    Raises VideotuneError as ``place`` does, and where the two keys do not go together.
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
    """The files that stand for the weights of parts: ``base_model_name`` beside ``base_parts``, or ``transformer.file``.

    Raises VideotuneError as ``part_files`` does, and for a file beside parts of a model with two experts.
    """
    if config.base_parts is None:
        return part_files(config.transformer.file, spec)
    name = str(config.base_model_name)
    if config.transformer.file or len(spec.experts) > 1:
        remedy = f"set base_model_name to {config.base_parts}, transformer.file to the list of files, and no base_parts"
        raise VideotuneError(
            f"base_model_name: {Path(name).name} is one file, and the model has two: {remedy}"
        )
    return part_files(name, spec, "base_model_name")


def check_base(folder: Path) -> None:
    """Raise VideotuneError where the weights of a network of diffusers are not those of its config.

    Only the heads of the files are read, so that a wrong file is known before anything is encoded. The VAE is compared where
    it is loaded, which encoding begins with.
    """
    for part, (library, name) in model_files.model_parts(
        model_files.read_config(folder / "model_index.json")
    ).items():
        if library == "diffusers" and model_files.has_weights(name) and part != "vae":
            cls = getattr(diffusers, name, None)
            if cls is None:
                raise VideotuneError(
                    f"{folder / part}: this diffusers has no {name}: install a newer one"
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
    """The files under ``key`` of the config -> the file that stands for the weights of each part it names.

    The n-th expert of a family lies in ``transformer``, ``transformer_2`` …, as ``ModelSpec.part_of`` says. Raises
    VideotuneError for a file that is not there or cannot be one, for too few or too many, and for one of another expert.
    """
    given = [value] if isinstance(value, str) else list(value or ())
    experts = [expert.name for expert in spec.experts]
    if given and len(given) != len(experts):
        order = (
            f"{spec.title} takes {len(experts)} ({', '.join(experts)}; null for the base's own)"
        )
        raise VideotuneError(f"{key}: {len(given)} given; {order}")
    found: dict[str, Path] = {}
    for expert, text in zip(experts, given, strict=False):
        if text is None:
            continue
        path = Path(text).expanduser()
        if not path.is_file():
            raise VideotuneError(f"{key}: no such file: {path}")
        if path.suffix != ".safetensors":
            raise VideotuneError(
                f"{key}: {path.name} is not read: it must be a .safetensors file"
            )
        others = [
            name
            for name in re.findall("(high|low)[^a-z]?noise", path.stem.lower())
            if name != expert
        ]
        if others:
            fault = f"{path.name} stands for the expert {expert!r}, and is one for {others[0]!r} by its name"
            raise VideotuneError(
                f"{key}: {fault}. The order of {spec.title}: {', '.join(experts)}."
            )
        if path.resolve() in {other.resolve() for other in found.values()}:
            raise VideotuneError(
                f"{key}: {path.name} is given for two experts: give a file for each"
            )
        if what := kind_of(model_files.headers([path]), spec.name):
            raise VideotuneError(
                f"{key}: {path} is {what}, not the transformer of a {spec.title}"
            )
        found[spec.part_of(expert)] = path.absolute()
    return found


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
    """The family whose pipeline class stands in the model's index.

    Raises VideotuneError naming the class where no family reads it.
    """
    name = model_files.read_config(folder / "model_index.json").get("_class_name", "?")
    found = next((FAMILIES[own] for own in names() if name in FAMILIES[own].spec.aliases), None)
    if found is None:
        raise VideotuneError(
            f"{folder}: no family reads a {name}. Families: {', '.join(names())}."
        )
    return found


def spec_for(family: str | None, base: BasePlace | None) -> ModelSpec:
    """The spec of a base model, or a family's own where no base is given.

    Raises VideotuneError where the named family and the base's disagree.
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
    """Of a repository's files those that videotune reads.

    Raises VideotuneError for a part whose weights are there only in a form that is not read.
    """
    files = ["model_index.json"]
    for part, (_, cls) in model_files.model_parts(index).items():
        inside = [file for file in listed if file.startswith(f"{part}/")]
        files += [file for file in inside if file.endswith(_SMALL)]
        if weights and part not in own and model_files.has_weights(cls):
            found = [file for file in inside if _is_weights(file.partition("/")[2])]
            if not found:
                said = model_files.without_safetensors(
                    file.partition("/")[2] for file in inside
                )
                raise VideotuneError(
                    f"base_model_name: {name}: its {part}/ has no weights{said}"
                )
            files += found
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
        mark = (
            user_cache()
            / "verified"
            / digest([str(blob), facts.st_size, facts.st_mtime_ns, facts.st_ino])
        )
        if mark.exists():
            continue
        if facts.st_size > _LONG:
            echo(f"checking the bytes of {path.name} ({facts.st_size / 1e9:.1f} GB), once")
        with blob.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != blob.name:
            fault = f"its sha256 is {found[:12]}…, the Hub's {blob.name[:12]}…"
            raise VideotuneError(
                f"base_model_name: {path} is damaged: {fault}. Delete {blob} and start again"
            )
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            echo(
                f"note: {path.name} is checked again at the next start: {mark} cannot be written ({error})"
            )
