"""The files of a base model, read without torch and within bounds: its parts, their
configs, their weights.

What is damaged, missing or absurd is a sentence that names file and key.
"""

import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.bounds import MODEL_FILE_BYTES, MODEL_FILE_DEPTH, read_limited
from videotune.console import for_stderr
from videotune.errors import VideotuneError
from videotune.files import read_json, walk_json
from videotune.models.file_kinds import describe_damage

_SIZES = "dim|width|height|size|channels|frames|position_embeddings|seq_len|d_model|d_ff|d_kv"
_AT_LEAST_1 = "z_dim|num_train_timesteps|(in|latent)_channels"
_BOUNDS = (
    (r"num_\w*(layers|blocks|experts)|\w*layers_per_block|block_repeats", 0, 1024),
    (
        rf"patch_size(_t)?|num_\w*heads|\w*compression_ratio|scale_factor_\w+|{_AT_LEAST_1}",
        1,
        1 << 20,
    ),
    (r"\w*(sample|sampling)_rate", 2_000, 768_000),
    (r"mel_bins|\w*hop_length|\w*upsample_factors", 1, 4096),
    (rf"(?!total_|use_)\w*({_SIZES})", 0, 1 << 20),
)
"""Whole numbers, or lists of them, by the key's name: least and most.

Models that are published stay far below.
"""

CONFIGS = Path(__file__).parents[1] / "assets" / "models"
"""A folder of configs for each published model; ``index.json`` says which base model
names mean it.
"""

_KERNELS = re.compile(r"_?(attn|experts)_implementation")
"""Keys by which transformers would fetch and run code of the Hub, where a repository
stands under them.
"""


STEMS = ("diffusion_pytorch_model", "model")
"""How the weights of a part are called, by diffusers and by transformers."""

_SHARD = re.compile(r"[\w.-]+\.safetensors")
_NO_WEIGHTS = (
    "Scheduler",
    "Tokenizer",
    "TokenizerFast",
    "Processor",
    "ProcessorFast",
    "FeatureExtractor",
    "Guidance",
)
_VOCABULARIES: Sequence[tuple[str, tuple[str, ...]]] = (
    ("ByT5", ()),  # its tokens are bytes
    ("T5", ("spiece.model",)),
    ("Llama", ("tokenizer.model",)),
    ("CLIP", ("vocab.json", "merges.txt")),
)
"""The files of a vocabulary, by a word of the tokenizer's class, in place of the
tokenizer.json that any may have.
"""

_HELPERS = frozenset(("prompt_enhancer", "duration_head", "processor"))
"""Parts beside a model that rewrite prompts or choose a length, which nothing here
reads.
"""

_SAME: list[tuple[str, list[str], str, list[str], str]] = read_json(
    Path(__file__).with_name("same_sizes.json")
)
"""What two parts of one checkpoint agree on: a part and its keys, another and its keys,
what it is. Either may be silent.
"""


class ConfigFile(dict[str, Any]):
    """An object of a JSON file; a key that it lacks is a VideotuneError that names
    both.
    """

    def __init__(self, path: Path, value: dict[str, Any]) -> None:
        super().__init__(value)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise VideotuneError(
            f"{self.path} lacks {key!r}: take the file that comes with the checkpoint"
        )


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a base model.

    Raises VideotuneError where the file is missing, damaged or too large, and for a
    value that no model has.
    """
    try:
        content = read_limited(path, MODEL_FILE_BYTES, "a config of a model")
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise VideotuneError(
            f"the base model is incomplete: {path} is missing"
        ) from None
    except UnicodeDecodeError as error:
        raise VideotuneError(
            f"{path} is not valid JSON: it is not UTF-8 text. Fetch it again"
        ) from error
    return ConfigFile(path, parse_object(text, str(path)))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object of a file from elsewhere, with checked values.

    Args:
        text: The JSON.
        where: Begins every error: the file.

    Raises:
        VideotuneError: It is not an object, or a value is out of bounds.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise VideotuneError(
            f"{where} is not valid JSON: {error.msg} in line {error.lineno}"
        ) from error
    except (
        RecursionError,
        ValueError,
    ) as error:  # nested too deep, or a number too long
        raise VideotuneError(
            f"{where} is not valid JSON: {str(error)[:100]}"
        ) from error

    if not isinstance(value, dict):
        raise VideotuneError(
            f"{where} holds {json.dumps(value)[:40]} where an object {{…}} is expected"
        )
    _check_values(value, where)
    return value


def _check_values(config: Any, where: str) -> None:
    """Raise VideotuneError, with its key, for a value that is out of bounds or names
    code.
    """
    for path, value in walk_json(config):
        names = [part for part in path if isinstance(part, str)]
        key = names[-1] if names else ""
        if len(path) > MODEL_FILE_DEPTH:
            raise VideotuneError(
                f"{where}: {key!r} is nested more than {MODEL_FILE_DEPTH} deep: it is no config of a model"
            )
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            raise VideotuneError(
                f"{where}: {key} is {str(value)[:40]}, no finite number"
            )
        if isinstance(value, str) and _KERNELS.fullmatch(key) and "/" in value:
            raise VideotuneError(
                f"{where}: {key} names code of the Hub ({value[:80]!r}), which videotune never runs"
            )
        if value is not None and not isinstance(value, dict | list):
            _check_bounds(key, value, where)


def _check_bounds(key: str, value: Any, where: str) -> None:
    """Raise VideotuneError for a size that is not a whole number within its bounds."""
    for pattern, least, most in _BOUNDS:
        if not re.fullmatch(pattern, key):
            continue
        is_whole = isinstance(value, int) or (
            isinstance(value, float) and value.is_integer()
        )
        if isinstance(value, bool) or not is_whole or not least <= value <= most:
            expected = f"a whole number from {least} to {most:,}"
            raise VideotuneError(
                f"{where}: {key} is {str(value)[:40]!r}, and must be {expected}"
            )
        return  # only the first pattern that matches counts


class NotHere(VideotuneError):
    """A base model that is neither a folder nor in the Hub's cache, and cannot be
    fetched.
    """


@dataclass(frozen=True)
class Header:
    """A tensor in a file: its dtype as safetensors writes it ("F32", "BF16", …), and
    its shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def note(text: str) -> None:
    """Tell the user, beside what a command prints as its result."""
    print(for_stderr(text), file=sys.stderr)


def model_parts(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The parts that a model_index.json names, with library and class; those that are
    null, or that nothing here reads, left out.

    Raises VideotuneError for an entry that names no library and class, or no folder
    beside the index.
    """
    parts = {}
    for part, value in index.items():
        if part in _HELPERS:
            continue
        if isinstance(value, list) and len(value) == 2 and value[1] is not None:
            if not re.fullmatch(r"\w+", part) or not all(
                isinstance(name, str) for name in value
            ):
                raise VideotuneError(
                    f"model_index.json: {part[:40]!r} must be a library and a class, not {value}"
                )
            parts[part] = (value[0], value[1])
    return parts


def has_weights(cls: str) -> bool:
    """Whether a part of this class is a network; schedulers, tokenizers, processors and
    guiders are none.
    """
    # TokenizerFast, ImageProcessorPil …
    return not any(word in cls for word in _NO_WEIGHTS)


def check_parts(folder: Path) -> None:
    """Check that a model's parts exist and belong to one model, by their configs.

    Weights are not looked for: see ``missing``.

    Raises:
        VideotuneError: A part of the index is missing, or two parts do not fit
            together.
    """
    parts = model_parts(read_config(folder / "model_index.json"))
    for part in parts:
        if not (folder / part).is_dir():
            raise VideotuneError(
                f"{folder} is incomplete: it has no {part}/, which its model_index.json names"
            )

    configs = {}
    for part, (_, named_class) in parts.items():
        if not has_weights(named_class):
            continue
        config = read_config(folder / part / "config.json")
        config_class = config.get("_class_name")
        if config_class is not None and config_class != named_class:
            fault = (
                f"holds a {config_class}, where model_index.json names a {named_class}"
            )
            raise VideotuneError(
                f"{folder / part} {fault}: take all parts from one model"
            )
        configs[part] = config
    _check_sizes(folder, configs)


def _check_sizes(folder: Path, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise VideotuneError if a part expects another size than a second part gives."""
    for part, keys, giving_part, giving_keys, unit in _SAME:
        for name in (part, f"{part}_2"):
            expected = _size(configs.get(name, {}), keys)
            size = _size(configs.get(giving_part, {}), giving_keys)
            if expected is not None and size is not None and expected != size:
                fault = f"its {name} takes {expected} {unit}, its {giving_part} gives {size}"
                raise VideotuneError(
                    f"{folder} mixes two models: {fault}. Take both parts from one checkpoint."
                )


def _size(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """Return the first whole number under one of the keys."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int):
            return value
    return None


def shards(folder: Path) -> list[str]:
    """Return the names of a part's weight files: of its index, or the usual name.

    The list is empty if neither exists.
    """
    for stem in STEMS:
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            names = read_config(index)["weight_map"]
            are_names = isinstance(names, dict) and bool(names)
            if not are_names or not all(
                _SHARD.fullmatch(str(name)) for name in names.values()
            ):
                raise VideotuneError(
                    f"{index}: weight_map must give each tensor the name of a file beside it"
                )
            return sorted(set(names.values()))
        if (folder / f"{stem}.safetensors").is_file():
            return [f"{stem}.safetensors"]
    return []


def weight_files(folder: Path) -> list[Path]:
    """A part's files of weights.

    Raises VideotuneError naming the shard that is missing, or what stands there instead
    of safetensors.
    """
    names = shards(folder)
    if not names:
        raise VideotuneError(
            f"{folder} has no weights{without_safetensors(p.name for p in folder.glob('*'))}"
        )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        count = f"{len(absent)} of {len(names)} files of weights"
        raise VideotuneError(
            f"{folder} lacks {some(absent)}: {count}. Fetch the model again, or copy all of it."
        )
    return [folder / name for name in names]


def without_safetensors(names: Iterable[str]) -> str:
    """What to say of weights in a form that is not read; the names are those of the
    part's files.
    """
    names = sorted(names)
    variants = [name for name in names if name.endswith(".safetensors")]
    pickled = [
        name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))
    ]
    if variants:
        return f" called {STEMS[0]}.safetensors or {STEMS[1]}.safetensors; it has {some(variants)}"
    return (
        f" in safetensors; {some(pickled)} can run code when it is read, and is not"
        if pickled
        else ""
    )


def some(names: Sequence[str]) -> str:
    """The first three of a list in words."""
    return ", ".join(names[:3]) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


def missing(
    folder: Path, *, weights: bool, replaced_parts: Collection[str] = ()
) -> list[str]:
    """Return the files and parts that a model folder lacks, relative to it.

    Args:
        folder: The model.
        weights: Also look for the weights.
        replaced_parts: Parts that need no weights, because they come from another file.
    """
    index = folder / "model_index.json"
    if not index.is_file():
        return ["model_index.json"]

    absent = []
    for part, (_, class_name) in model_parts(read_config(index)).items():
        part_folder = folder / part
        if not part_folder.is_dir() or not any(part_folder.iterdir()):
            absent.append(f"{part}/")
            continue
        needs_weights = weights and part not in replaced_parts
        for name in _missing_of_part(part_folder, class_name, needs_weights):
            absent.append(f"{part}/{name}")
    return absent


def _missing_of_part(folder: Path, class_name: str, needs_weights: bool) -> list[str]:
    """Return the files that the folder of a part lacks."""
    if has_weights(class_name):
        config = folder / "config.json"
        absent = [] if config.is_file() else ["config.json"]
        if needs_weights:
            of_diffusers = config.is_file() and "_class_name" in read_config(config)
            names = shards(folder) or [f"{STEMS[0 if of_diffusers else 1]}.safetensors"]
            absent += [name for name in names if not (folder / name).is_file()]
        return absent
    if class_name.endswith("Scheduler"):
        has_config = (folder / "scheduler_config.json").is_file()
        return [] if has_config else ["scheduler_config.json"]
    if class_name.endswith("Guidance"):
        has_config = (folder / "guider_config.json").is_file()
        return [] if has_config else ["guider_config.json"]
    if "Tokenizer" in class_name:
        return _missing_vocabulary(folder, class_name)
    return []


def _missing_vocabulary(folder: Path, class_name: str) -> list[str]:
    """Return the vocabulary files that a tokenizer's folder lacks.

    Without them, transformers would make an empty vocabulary without an error.
    """
    forms: list[tuple[str, ...]] = [("tokenizer.json",)]
    forms += [files for kind, files in _VOCABULARIES if kind in class_name]
    incomplete = []
    for files in forms:
        absent = [name for name in files if not (folder / name).is_file()]
        if not absent:
            return []
        if len(absent) < len(files):
            incomplete.append(absent)
    return incomplete[0] if incomplete else list(forms[0])


def complete(name: str, folder: Path, *, replaced_parts: Collection[str] = ()) -> None:
    """Raise VideotuneError that lists what the folder of the base model ``name`` lacks,
    weights included.
    """
    absent = missing(folder, weights=True, replaced_parts=replaced_parts)
    for part in sorted(
        {path.partition("/")[0] for path in absent if path.endswith(".safetensors")}
    ):
        instead = without_safetensors(p.name for p in (folder / part).glob("*"))
        if instead and not shards(folder / part):
            raise VideotuneError(
                f"base_model_name: {folder / part} has no weights{instead}"
            )
    if absent:
        raise VideotuneError(
            f"base_model_name: {name} is incomplete: {folder} lacks {some(absent)}. Fetch all of it."
        )


def headers(files: Sequence[Path]) -> dict[str, Header]:
    """What tensors files of weights hold; only the files' heads are read.

    Raises VideotuneError for a file that is damaged, truncated, or a pointer of
    git-lfs.
    """
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for path in files:
        try:
            with safe_open(path, "np") as file:
                for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    part = file.get_slice(key)
                    tensors[key] = Header(part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise VideotuneError(
                f"{path} cannot be read: {describe_damage(path, error)}"
            ) from error
    return tensors


def spans_of(path: Path) -> dict[str, tuple[int, int]]:
    """Return the first byte of each tensor of a safetensors file, and the one after its
    last.

    A file is a length of 8 bytes, a header of JSON, and the tensors' bytes.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    start = 8 + length
    spans = {}
    for name, tensor in header.items():
        if "data_offsets" in tensor:
            begin, end = tensor["data_offsets"]
            spans[name] = (start + begin, start + end)
    return spans
