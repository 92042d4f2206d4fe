"""The base model of a run: find it on disk or on the Hub, its family, and files of its
weights."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.bounds import require_file
from videotune.errors import VideotuneError
from videotune.files import digest, read_json, user_cache
from videotune.lazy import diffusers, torch
from videotune.model_spec import ASSET, ModelSpec, asset_title
from videotune.models import model_files
from videotune.models.base import FAMILIES, DiffusersModel
from videotune.models.converted_parts import TRANSFORMERS_STEM, part_from_file
from videotune.models.hub import fetch, verify
from videotune.models.model_files import CONFIGS, STEMS, NotHere, note
from videotune.models.other_models import (
    not_trained,
    other_model_of_keys,
    other_model_of_name,
    other_model_of_pipeline,
    refuse_other_model,
)
from videotune.models.part_check import check_part
from videotune.models.registry import find, names
from videotune.models.single_file import kind_of, refuse_kind
from videotune.models.skeletons import explained, to_fill
from videotune.types import BasePlace, LogFn

if TYPE_CHECKING:
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
        weights: also require the weights, and check the headers of their files against
            the configs. Otherwise only configs and tokenizers are needed.
        files: files that replace the weights of parts, see ``part_files``.
        echo: gets a line about a download.

    Raises:
        VideotuneError: if the model or a part of it is missing or damaged.
    """
    files = files or {}
    folder = _folder(name, weights, files, echo)
    if weights:
        model_files.complete(name, folder, replaced_parts=files)
        parts = model_files.model_parts(
            model_files.read_config(folder / "model_index.json")
        )
        weight_files: list[Path] = []
        for part, (_, class_name) in parts.items():
            if model_files.has_weights(class_name) and part not in files:
                weight_files += model_files.weight_files(folder / part)
        verify(weight_files, echo)

        for part, path in files.items():
            library, _ = parts[part]
            if library == "transformers" or part == "vae":
                key = file_key(part)
                files = {**files, part: part_from_file(folder, part, path, key, echo)}
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
    if not name:
        raise VideotuneError(
            "base_model_name is not set: name the base model, or restore a copy of the run's config.json"
        )
    parts = settings.get("base_parts")
    if parts is None:
        return place(name, weights=False)
    require_file(Path(parts).expanduser(), "base_parts")
    path = Path(name).expanduser()
    require_file(path, "base_model_name")
    if not path.is_file():
        raise VideotuneError(
            f"base_parts: it goes with a .safetensors file as base_model_name; {name} is none"
        )
    return replace(place(parts, weights=False), name=name)


def own_files(config: Config, spec: ModelSpec) -> dict[str, Path]:
    """Return the files that replace the weights of parts.

    Those of the transformer are ``base_model_name`` if there is ``base_parts``, else
    ``transformer.file``.

    Raises:
        VideotuneError: as ``part_files`` does, for one file of a model with two
            experts, and for a number of files that is not that of the text encoders.
    """
    return _transformer_files(config, spec) | _other_files(config, spec)


def comfyui_reads_otherwise(name: str) -> bool:
    """Whether ComfyUI reads captions of a published base model differently from
    diffusers, by the configs that come with videotune.
    """
    folder = published(name)
    if folder is None:
        return False
    return spec_for(None, BasePlace(name, folder)).authors_read_otherwise


def has_weights_here(base: BasePlace) -> bool:
    """Whether the weights of a base model are on this machine."""
    if not (base.folder / "model_index.json").is_file():
        return False
    try:
        return not model_files.missing(base.folder, weights=True, replaced_parts=())
    except VideotuneError:
        return False


def lacking_parts(keys: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    """Return the parts with weights for which a config names no file."""
    parts: list[str] = []
    if keys.get("base_parts") is None and not _file_in(keys, "transformer"):
        parts += [spec.part_of(expert.name) for expert in spec.experts]
    if not _file_in(keys, "text_encoder"):
        parts += find(spec.name).text_encoders
    if not _file_in(keys, "vae"):
        parts.append("vae")
    return parts


def _file_in(keys: Mapping[str, Any], section: str) -> Any:
    values = keys.get(section)
    return values.get("file") if isinstance(values, Mapping) else None


def keys_of_files(files: Mapping[str, Path], spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of a config that name files, which are given by part."""
    groups = {
        "transformer": [spec.part_of(expert.name) for expert in spec.experts],
        "text_encoder": list(find(spec.name).text_encoders),
    }
    keys: dict[str, Any] = {}
    for section, parts in groups.items():
        values = [str(files[part]) if part in files else None for part in parts]
        if any(values):
            keys[section] = {"file": values[0] if len(values) == 1 else values}
    if "vae" in files:
        keys["vae"] = {"file": str(files["vae"])}
    return keys


def file_key(part: str) -> str:
    """Return the key of the config that names a file of a text encoder or VAE."""
    return "vae.file" if part == "vae" else "text_encoder.file"


def _other_files(config: Config, spec: ModelSpec) -> dict[str, Path]:
    """Return the files of text encoders and VAE, by part."""
    files: dict[str, Path] = {}
    if config.vae.file is not None:
        files["vae"] = Path(config.vae.file).expanduser().absolute()

    value = config.text_encoder.file
    values = [value] if isinstance(value, str) else list(value or ())
    parts = list(find(spec.name).text_encoders)
    if values and len(values) != len(parts):
        raise VideotuneError(
            f"text_encoder.file: {len(values)} given; {spec.title} has {len(parts)} text"
            f" encoders ({', '.join(parts)}; null for the base's own)"
        )
    for part, text in zip(parts, values, strict=False):
        if text is not None:
            files[part] = Path(text).expanduser().absolute()
    for part, path in files.items():
        if not path.is_file():
            raise VideotuneError(f"{file_key(part)}: no such file: {path}")
    return files


def _transformer_files(config: Config, spec: ModelSpec) -> dict[str, Path]:
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
    """Raise VideotuneError if the weights of diffusers' networks do not fit their
    configs.

    Only the headers of the files are read, so that a wrong file is found before
    anything is encoded. The VAE is compared when it is loaded, at the start of
    encoding.
    """
    parts = model_files.model_parts(
        model_files.read_config(folder / "model_index.json")
    )
    for part, (library, class_name) in parts.items():
        if (
            library != "diffusers"
            or part == "vae"
            or not model_files.has_weights(class_name)
        ):
            continue
        cls = _network_class(folder / part, class_name)
        check_part(cls, folder / part, to_fill(cls, folder / part, torch.float32))


def check_own_files(folder: Path, files: Mapping[str, Path]) -> None:
    """Raise VideotuneError if files that replace weights do not fit a base's configs.

    Only the headers of the files are read.

    Args:
        folder: the base model.
        files: by part, as ``part_files`` returns them.
    """
    parts = model_files.model_parts(
        model_files.read_config(folder / "model_index.json")
    )
    for part, path in files.items():
        library, class_name = parts[part]
        if library != "diffusers" or part == "vae":
            continue  # they are compared when they are opened
        cls = _network_class(folder / part, class_name)
        net = to_fill(cls, folder / part, torch.float32)
        check_part(cls, folder / part, net, files=[path])


def _network_class(folder: Path, class_name: str) -> Any:
    cls = getattr(diffusers, class_name, None)
    if cls is None:
        raise VideotuneError(
            f"{folder}: this diffusers has no {class_name}: install a newer one"
        )
    return cls


def _folder(name: str, weights: bool, files: Mapping[str, Path], echo: LogFn) -> Path:
    if name.startswith(ASSET):
        # By this file: a folder named videotune beside a script hides the package's name.
        folder = Path(__file__).parents[1] / "assets" / name.removeprefix(ASSET)
        if not (folder / "model_index.json").is_file():
            toy = f"{ASSET}toy"
            if name == toy:
                raise VideotuneError(
                    f"base_model_name: {folder}, which comes with videotune, is missing or "
                    "incomplete. Install videotune again"
                )
            raise VideotuneError(
                f"base_model_name: videotune comes with no model {name!r}; there is {toy}"
            )
        return folder
    folder = Path(name).expanduser()
    require_file(folder, "base_model_name")
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            title = other_model_of_name(str(folder))
            refuse_other_model(title, f"base_model_name: {folder}")
            raise VideotuneError(
                f"base_model_name: {folder} is not in diffusers layout: it has no model_index.json"
            )
        return folder
    if folder.is_file():
        _refuse_other_file(folder)
        remedy = "set base_parts to a folder or Hub id in diffusers layout, which gives the other parts"
        raise VideotuneError(
            f"base_model_name: {folder} is a file of weights: {remedy}"
        )
    if folder.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise NotHere(f"base_model_name: no such folder: {name}")
    return fetch(name, weights=weights, replaced_parts=tuple(files), echo=echo)


def _refuse_other_file(path: Path) -> None:
    """Raise NotTrained for a file of weights of a model that is not trained."""
    title = None
    if path.suffix == ".safetensors":
        title = other_model_of_keys(model_files.headers([path]))
    title = title or other_model_of_name(str(path))
    refuse_other_model(title, f"base_model_name: {path}")


def part_files(
    value: str | Sequence[str | None] | None,
    spec: ModelSpec,
    key: str = "transformer.file",
) -> dict[str, Path]:
    """Return the file that replaces the weights of each part, by part.

    Args:
        value: the files of the experts in order; None for those of the base model.
        spec: gives the experts and their parts (``ModelSpec.part_of``).
        key: key of the config, for errors.

    Raises:
        VideotuneError: for a missing or unusable file, a wrong number of files, or a
            file of another expert.
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
        keys = model_files.headers([path])
        refuse_other_model(other_model_of_keys(keys), f"{key}: {path}")
        kind = kind_of(keys, spec.name)
        if kind:
            refuse_kind(kind, path, key, f"the transformer of {spec.title}")
        files[spec.part_of(expert)] = path.absolute()
    return files


def _check_part_file(path: Path, expert: str, spec: ModelSpec, key: str) -> None:
    """Raise VideotuneError if a file cannot hold an expert's weights, by its path."""
    require_file(path, key)
    if not path.is_file():
        raise VideotuneError(f"{key}: no such file: {path}")
    if path.suffix.lower() == ".gguf":
        raise VideotuneError(
            f"{key}: {path.name} is GGUF, whose quantized weights are not read: it must be"
            " the .safetensors file of the same model, in bfloat16, float16 or fp8"
        )
    if path.suffix != ".safetensors":
        raise VideotuneError(
            f"{key}: {path.name} is not read: it must be a .safetensors file"
        )
    for name in re.findall("(high|low)[^a-z]?noise", path.stem.lower()):
        if name != expert:
            raise VideotuneError(
                f"{key}: {path.name} stands for the expert {expert!r}, and is one for {name!r} "
                f"by its name. The order of {spec.title}: {', '.join(s.name for s in spec.experts)}."
            )


def with_files(base: Path, files: Mapping[str, Path]) -> Path:
    """Return a folder of links: the model in ``base`` with other files as weights of
    some parts.

    It is in the user's cache, named by the hash of its links.
    """
    links = {
        entry.name: entry for entry in sorted(base.iterdir()) if entry.name not in files
    }
    index = model_files.read_config(base / "model_index.json")
    for part, path in files.items():
        library, _ = model_files.model_parts(index)[part]
        links[f"{part}/config.json"] = base / part / "config.json"
        if path.is_dir():
            for entry in sorted(path.iterdir()):
                links[f"{part}/{entry.name}"] = entry
        else:
            stem = TRANSFORMERS_STEM if library == "transformers" else STEMS[0]
            links[f"{part}/{stem}.safetensors"] = path
    targets = {name: str(target.absolute()) for name, target in links.items()}
    folder = user_cache() / "bases" / digest(targets)
    if folder.is_dir():
        return folder

    temporary = folder.with_name(f".part-{os.getpid()}-{folder.name}")
    try:
        for name, target in targets.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).symlink_to(target)
        temporary.rename(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if folder.is_dir():  # another process was faster
            return folder
        first_part = next(iter(files))
        raise VideotuneError(
            f"transformer.file: {folder} cannot be made of links ({error}). Copy {base}, and put "
            f"the file into it as {first_part}/{STEMS[0]}.safetensors."
        ) from error
    return folder


def of_base(folder: Path) -> type[DiffusersModel]:
    """Return the family whose pipeline class is named in the model's index.

    Raises:
        VideotuneError: if there is no such family.
    """
    pipeline = model_files.read_config(folder / "model_index.json").get(
        "_class_name", "?"
    )
    family_names = names()
    for family_name in family_names:
        family = FAMILIES[family_name]
        if pipeline in family.spec.aliases:
            return family
    title = other_model_of_pipeline(str(pipeline)) or f"the model of a {pipeline}"
    raise not_trained(title, str(folder))


ASSET_SHAPES = {f"{ASSET}toy": (17, 64, 64)}
"""(frames, height, width) that base models which come with videotune were trained at."""


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
        spec = cls.read_spec(base.folder)
    title = asset_title(base.name)
    if title is None:
        return spec
    shape = ASSET_SHAPES.get(base.name, spec.sample_shape)
    return replace(spec, title=title, sample_shape=shape)
