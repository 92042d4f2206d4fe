"""What a model's folder in diffusers layout must hold, told without torch: its parts, their configs, their weights."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.models.config_file import read_config

STEMS = ("diffusion_pytorch_model", "model")
"""How the weights of a part are called, by diffusers and by transformers."""

_NO_WEIGHTS = ("Scheduler", "Tokenizer", "TokenizerFast", "Processor", "ProcessorFast", "FeatureExtractor")
_VOCABULARIES = (("T5", ("spiece.model",)), ("Llama", ("tokenizer.model",)), ("CLIP", ("vocab.json", "merges.txt")))
"""The files of a vocabulary, by a word of the tokenizer's class, in place of the tokenizer.json that any may have."""

_SAME = (
    ("transformer", ("out_channels",), "vae", ("z_dim", "latent_channels"), "latent channels"),
    ("transformer", ("text_dim", "text_embed_dim", "caption_channels"), "text_encoder", ("d_model", "hidden_size"),
     "numbers a text token"),
    ("transformer", ("image_dim",), "image_encoder", ("hidden_size",), "numbers an image token"),
)  # fmt: skip
"""What two parts of one checkpoint agree on: a part and its keys, another and its keys, what it is. Either may be silent."""


class NotHere(VideotuneError):
    """A base model that is neither a folder nor in the Hub's cache, and cannot be fetched."""


@dataclass(frozen=True)
class Header:
    """A tensor in a file: its dtype as safetensors writes it ("F32", "BF16", …), its shape, and the file's name."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def note(text: str) -> None:
    """Tell the user, beside what a command prints as its result."""
    print(text, file=sys.stderr)


def model_parts(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The parts that a model_index.json names, with library and class; those that are null left out.

    Raises VideotuneError for an entry that names no library and class, or no folder beside the index.
    """
    parts = {}
    for part, value in index.items():
        if isinstance(value, list) and len(value) == 2 and value[1] is not None:
            if not re.fullmatch(r"\w+", part) or not all(isinstance(name, str) for name in value):
                raise VideotuneError(
                    f"model_index.json: {part[:40]!r} must be a part with its library and class, not {value}"
                )
            parts[part] = (value[0], value[1])
    return parts


def has_weights(cls: str) -> bool:
    """Whether a part of this class is a network; schedulers, tokenizers and processors are none."""
    return not any(word in cls for word in _NO_WEIGHTS)  # TokenizerFast, ImageProcessorPil …


def check_parts(folder: Path) -> None:
    """Raise VideotuneError where a part that the model's index names is not there, or two are not of one model.

    By the configs alone: whether the weights are there, ``missing`` says.
    """
    parts = model_parts(read_config(folder / "model_index.json"))
    for part in parts:
        if not (folder / part).is_dir():
            raise VideotuneError(
                f"the base model is incomplete: {folder} has no {part}/, which its model_index.json names"
            )
    configs = {part: read_config(folder / part / "config.json") for part, (_, cls) in parts.items() if has_weights(cls)}
    for part, config in configs.items():
        own, named = config.get("_class_name"), parts[part][1]
        if own is not None and own != named:
            raise VideotuneError(
                f"{folder / part} holds a {own}, where model_index.json names a {named}: take all parts from one model"
            )
    for part, keys, other, other_keys, what in _SAME:
        for name in (part, f"{part}_2"):
            taken, given = _size(configs.get(name, {}), keys), _size(configs.get(other, {}), other_keys)
            if taken is not None and given is not None and taken != given:
                raise VideotuneError(
                    f"{folder} mixes two models: its {name} ({parts[name][1]}) takes {taken} {what}, its {other} "
                    f"({parts[other][1]}) gives {given}. Take both parts from one checkpoint."
                )


def _size(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """The whole number under the first of the keys that has one."""
    return next((value for key in keys if isinstance(value := config.get(key), int)), None)


def shards(folder: Path) -> list[str]:
    """The names of a part's files of weights, as its index lists them or as they must be called; [] where none is known."""
    for stem in STEMS:
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            names = read_config(index)["weight_map"]
            if not isinstance(names, dict) or not names or not all(_plain(name) for name in names.values()):
                raise VideotuneError(f"{index}: weight_map must give each tensor the name of a file beside it")
            return sorted(set(names.values()))
        if (folder / f"{stem}.safetensors").is_file():
            return [f"{stem}.safetensors"]
    return []


def _plain(name: Any) -> bool:
    """Whether a shard is called by a file's name alone."""
    return isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name) is not None


def weight_files(folder: Path) -> list[Path]:
    """A part's files of weights.

    Raises VideotuneError naming the shard that is missing, or what stands there instead of safetensors.
    """
    names = shards(folder)
    if not names:
        raise VideotuneError(f"{folder} has no weights{without_safetensors(p.name for p in folder.glob('*'))}")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise VideotuneError(
            f"{folder} lacks {some(absent)}: of {len(names)} files of weights that its index lists, "
            f"{len(absent)} are missing. Fetch the model again, or copy all of it."
        )
    return [folder / name for name in names]


def without_safetensors(names: Iterable[str]) -> str:
    """What to say of weights in a form that is not read; the names are those of the part's files."""
    names = sorted(names)
    variants = [name for name in names if name.endswith(".safetensors")]
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if variants:
        return f" called {STEMS[0]}.safetensors or {STEMS[1]}.safetensors; it has {some(variants)}"
    if pickled:
        return f" in safetensors; {some(pickled)} can run code when it is read, and is not"
    return ""


def some(names: Sequence[str]) -> str:
    """The first three of a list in words."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def missing(folder: Path, *, weights: bool, own: Collection[str] = ()) -> list[str]:
    """The files and parts that a model folder lacks, relative to it; of the parts ``own`` no weights are needed."""
    if not (folder / "model_index.json").is_file():
        return ["model_index.json"]
    absent = []
    for part, (_, cls) in model_parts(read_config(folder / "model_index.json")).items():
        here = folder / part
        if not here.is_dir() or not any(here.iterdir()):
            absent.append(f"{part}/")
        elif has_weights(cls):
            absent += [] if (here / "config.json").is_file() else [f"{part}/config.json"]
            if weights and part not in own:
                names = shards(here) or [f"{STEMS[0 if _of_diffusers(here) else 1]}.safetensors"]
                absent += [f"{part}/{name}" for name in names if not (here / name).is_file()]
        elif cls.endswith("Scheduler") and not (here / "scheduler_config.json").is_file():
            absent.append(f"{part}/scheduler_config.json")
        elif "Tokenizer" in cls:
            absent += [f"{part}/{name}" for name in _lacks_of_vocabulary(here, cls)]
    return absent


def _lacks_of_vocabulary(here: Path, cls: str) -> list[str]:
    """The files that a tokenizer's folder lacks of its vocabulary: transformers would make an empty one without a word."""
    forms = [("tokenizer.json",), *(files for kind, files in _VOCABULARIES if kind in cls)]
    absent = [[name for name in files if not (here / name).is_file()] for files in forms]
    begun = [lacks for lacks, files in zip(absent, forms, strict=True) if len(lacks) < len(files)]
    return [] if [] in absent else begun[0] if begun else absent[0]


def _of_diffusers(part: Path) -> bool:
    """Whether a part's config is one of diffusers'."""
    path = part / "config.json"
    return path.is_file() and "_class_name" in read_config(path)


def complete(name: str, folder: Path, *, own: Collection[str] = ()) -> None:
    """Raise VideotuneError that lists what the folder of the base model ``name`` lacks, weights included."""
    absent = missing(folder, weights=True, own=own)
    for part in sorted({path.partition("/")[0] for path in absent if path.endswith(".safetensors")}):
        instead = without_safetensors(p.name for p in (folder / part).glob("*"))
        if instead and not shards(folder / part):
            raise VideotuneError(f"base_model_name: {folder / part} has no weights{instead}")
    if absent:
        raise VideotuneError(
            f"base_model_name: {name} is incomplete: {folder} lacks {some(absent)}. Copy or fetch all of the model."
        )


def headers(files: Sequence[Path]) -> dict[str, Header]:
    """What tensors files of weights hold; only the files' heads are read.

    Raises VideotuneError for a file that is damaged, cut short, or a mere pointer of git-lfs.
    """
    from safetensors import SafetensorError, safe_open

    found = {}
    for path in files:
        try:
            with safe_open(path, "np") as file:
                for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    part = file.get_slice(key)
                    found[key] = Header(part.get_dtype(), tuple(part.get_shape()), path.name)
        except (SafetensorError, OSError) as error:
            raise VideotuneError(f"{path} cannot be read: {_damage(path, error)}") from error
    return found


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in a file: its first byte and how many there are."""

    start: int
    length: int


def spans_of(path: Path) -> dict[str, Span]:
    """Where each tensor of a safetensors file lies: a length of 8 bytes, a head of JSON, and the tensors' bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head: dict[str, Any] = json.loads(file.read(length))
    return {
        name: Span(8 + length + tensor["data_offsets"][0], tensor["data_offsets"][1] - tensor["data_offsets"][0])
        for name, tensor in head.items()
        if "data_offsets" in tensor
    }


def _damage(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            return "it is a pointer of git-lfs, not the weights: run `git lfs pull` in that folder"
    size = path.stat().st_size
    return f"it is damaged, or was not copied to its end ({size:,} bytes; {error}). Fetch it again."


SAMPLED_ABOVE, BLOCKS, BLOCK = 64 << 20, 256, 64 << 10
"""Files above the first are not read whole: safetensors in two blocks a tensor, others in so many; each of so many bytes."""


def fingerprint(folder: Path) -> str:
    """16 hex digits that name a part on disk by its files' names, sizes and bytes.

    Files up to 64 MB are read whole; of larger safetensors the head, and of each tensor the first 64 KB and as much from
    its middle: so a tensor that was changed is seen, wherever it lies in the file. A few numbers in its depth may not be.
    """
    name = hashlib.blake2b(digest_size=8)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
        size = path.stat().st_size
        name.update(f"{path.relative_to(folder).as_posix()}:{size}".encode())
        with path.open("rb") as file:
            if size <= SAMPLED_ABOVE:
                name.update(file.read())
                continue
            for start, length in _blocks(path, size):
                file.seek(start)
                name.update(file.read(length))
    return name.hexdigest()


def _blocks(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read of a large file, in the file's order."""
    if path.suffix != ".safetensors":
        yield from (((size - BLOCK) * block // (BLOCKS - 1), BLOCK) for block in range(BLOCKS))
        return
    spans = sorted((span.start, span.start + span.length) for span in spans_of(path).values())
    yield 0, spans[0][0] if spans else BLOCK
    for lo, hi in spans:
        yield lo, min(BLOCK, hi - lo)
        if hi - lo > BLOCK:
            middle = max(lo + BLOCK, (lo + hi - BLOCK) // 2)
            yield middle, min(BLOCK, hi - middle)
