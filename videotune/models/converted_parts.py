"""Text encoders and VAEs from the files that people have: ComfyUI's and the authors'.

A file in the libraries' own layout is used where it lies. Any other is converted once,
into the user's cache.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

from videotune.bounds import require_file
from videotune.errors import VideotuneError
from videotune.files import digest, size_text, user_cache, whole_folder, write_json
from videotune.lazy import diffusers, torch, transformers
from videotune.models import model_files, single_file
from videotune.models.key_names import KeyRules, add_file_rules
from videotune.models.other_models import other_model_of_keys, refuse_other_model
from videotune.models.part_check import check_part
from videotune.models.skeletons import explained, on_meta

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.models.model_files import Header
    from videotune.models.single_file import WeightSource
    from videotune.types import LogFn

SHARD_BYTES = 2 << 30
"""Bytes of weights that are in memory at once while a file is converted."""

TRANSFORMERS_STEM = "model"
"""How transformers calls the weights of a part."""

PICKLED = (".pth", ".pt", ".bin")
"""Endings of torch's own files, which are read without running code of theirs."""

VAE_PREFIXES = ("vae.", "first_stage_model.")
"""Prefixes of the VAE's keys in checkpoints of several parts."""

TIED_EMBEDDING: KeyRules = ((r"^encoder\.embed_tokens\.weight$", "shared.weight"),)
"""T5 as transformers stores it: the table of tokens is there once."""

AUTHORS_UMT5: KeyRules = (
    (r"^(shared|encoder\.embed_tokens)\.weight$", "token_embedding.weight"),
    (r"^encoder\.final_layer_norm\.", "norm."),
    (r"^encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.",
     r"blocks.\1.pos_embedding.embedding."),
    (r"^encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.", r"blocks.\1.attn."),
    (r"^encoder\.block\.(\d+)\.layer\.0\.layer_norm\.", r"blocks.\1.norm1."),
    (r"^encoder\.block\.(\d+)\.layer\.1\.layer_norm\.", r"blocks.\1.norm2."),
    (r"^encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wi_0\.", r"blocks.\1.ffn.gate.0."),
    (r"^encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wi_1\.", r"blocks.\1.ffn.fc1."),
    (r"^encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wo\.", r"blocks.\1.ffn.fc2."),
)  # fmt: skip
"""UMT5 as the authors of Wan store it."""

WITH_MODEL_PREFIX: KeyRules = ((r"^", "model."),)
"""A language model as a part of one that writes text."""

for _encoder, _layouts in {
    "T5EncoderModel": (TIED_EMBEDDING,),
    "UMT5EncoderModel": (TIED_EMBEDDING, AUTHORS_UMT5),
    "LlamaModel": (WITH_MODEL_PREFIX,),
}.items():
    add_file_rules(_encoder, "", _layouts)


def part_from_file(folder: Path, part: str, path: Path, key: str, echo: LogFn) -> Path:
    """Return a file or folder with the weights of a text encoder or VAE, as its library
    reads them.

    Args:
        folder: the base model, whose config of the part counts.
        part: such as "vae".
        path: the file.
        key: key of the config, for errors.
        echo: gets a line about a conversion.

    Raises:
        VideotuneError: if the file is of another model or cannot be read.
    """
    require_file(path, key)
    if not path.is_file():
        raise VideotuneError(f"{key}: no such file: {path}")
    parts = model_files.model_parts(
        model_files.read_config(folder / "model_index.json")
    )
    library, class_name = parts[part]
    cls = getattr(transformers if library == "transformers" else diffusers, class_name)

    config = model_files.read_config(folder / part / "config.json")
    target = _cache_of(path, digest([class_name, config]))
    if target.is_dir():
        return target
    if path.suffix.lower() in PICKLED:
        with _without_pickle(path, key) as tensors_file:
            usable = _usable(cls, folder, part, tensors_file, target, key, echo)
            if usable == tensors_file:
                echo(f"note: {path.name} is written once as safetensors: {target}")
                with whole_folder(target) as temporary_folder:
                    stem = _stem_of(part)
                    tensors_file.rename(temporary_folder / f"{stem}.safetensors")
        return target
    if path.suffix != ".safetensors":
        raise VideotuneError(
            f"{key}: {path.name} is not read: it must be a .safetensors file, or .pth"
        )
    return _usable(cls, folder, part, path, target, key, echo)


def _stem_of(part: str) -> str:
    """Return how the library of a part calls its weights."""
    return model_files.STEMS[0] if part == "vae" else TRANSFORMERS_STEM


def _usable(
    cls: Any,
    folder: Path,
    part: str,
    path: Path,
    target: Path,
    key: str,
    echo: LogFn,
) -> Path:
    """Return a file of tensors, if its library reads it, or what it is converted into.

    Args:
        cls: class of the part.
        folder: the base model.
        part: name of the part.
        path: the file, in safetensors.
        target: the folder that a conversion writes.
        key: key of the config, for errors.
        echo: gets a line about a conversion.
    """
    with _named(key):
        stored = model_files.headers([path])
    refuse_other_model(other_model_of_keys(stored), f"{key}: {path}")

    if part == "vae":
        return _vae(cls, folder / part, path, target, key, echo)
    _refuse_other_kind(
        stored, path, key, "a text encoder", single_file.TEXT_ENCODER_KINDS
    )
    net = on_meta(cls, folder / part)
    with _named(key):
        sources = check_part(cls, folder / part, net, echo, files=[path])
    untied = _untied(sources)
    if single_file.in_diffusers_layout(untied) and set(stored) <= set(untied):
        return path
    return _written(_converted(untied), target, path, TRANSFORMERS_STEM, echo)


def _untied(sources: Mapping[str, WeightSource]) -> dict[str, WeightSource]:
    """Return the sources without the longer name of each pair of tied weights."""
    shortest: dict[tuple[str, tuple[int, ...]], str] = {}
    for name in sorted(sources, key=len):
        source = sources[name]
        shortest.setdefault((source.name, source.parts), name)
    return {name: sources[name] for name in shortest.values()}


def _converted(
    sources: Mapping[str, WeightSource],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, those in fp8 as bfloat16, which holds each of their values."""
    for name, tensor in single_file.tensors(sources):
        is_fp8 = sources[name].stored.dtype in single_file.FP8
        yield name, tensor.bfloat16() if is_fp8 else tensor


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Put a key in front of errors about a file."""
    try:
        yield
    except VideotuneError as error:
        raise VideotuneError(f"{key}: {error}") from error


def _vae(
    cls: Any, folder: Path, path: Path, target: Path, key: str, echo: LogFn
) -> Path:
    """Return a VAE's file, or the folder that diffusers' converter has written."""
    net = on_meta(cls, folder)
    stored = model_files.headers([path])
    if set(net.state_dict()) <= set(stored):
        with _named(key):
            check_part(cls, folder, net, echo, files=[path])
        return path

    # A checkpoint of several parts is a transformer by most of its keys; the converter
    # takes the VAE out of it.
    if not any(name.startswith(VAE_PREFIXES) for name in stored):
        _refuse_other_kind(stored, path, key, "a VAE", single_file.VAE_KINDS)
    if converter_of(cls) is None:
        raise VideotuneError(
            f"{key}: {path.name} is not in diffusers' layout, and diffusers converts no"
            f" {cls.__name__}. Leave it out, or give the file in diffusers' layout"
        )
    with explained(f"{key}: {path} is not read by {cls.__name__}"):
        vae = cls.from_single_file(
            str(path),
            config=str(folder),
            local_files_only=True,
            torch_dtype=torch.float32,
        )
    fault = _fault_of(vae, net)
    if fault:
        raise VideotuneError(
            f"{key}: {path} is not the VAE of {folder.parent}: {fault}"
        )
    weights = vae.state_dict().items()
    return _written(weights, target, path, model_files.STEMS[0], echo)


def _refuse_other_kind(
    stored: Mapping[str, Header],
    path: Path,
    key: str,
    wanted: str,
    accepted_kinds: Collection[str],
) -> None:
    """Raise VideotuneError if a file holds another kind of weights than its key takes.

    The libraries do not notice it: they report weights that are missing.
    """
    kind = single_file.kind_of(stored)
    if kind is not None and kind not in accepted_kinds:
        single_file.refuse_kind(kind, path, key, wanted)


def converter_of(cls: Any) -> Callable[..., dict[str, Tensor]] | None:
    """Return diffusers' function from a file's weights to those of a class, or None."""
    from diffusers.loaders import single_file_model  # imports torch

    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES.get(cls.__name__)
    return None if entry is None else entry["checkpoint_mapping_fn"]


def _fault_of(vae: Any, net: Any) -> str:
    """Return in what a converted VAE differs from that of the config, or ""."""
    weights = vae.state_dict()
    for name, expected in net.state_dict().items():
        weight = weights.get(name)
        if weight is None or weight.is_meta:
            return f"it has no {name}"
        if weight.shape != expected.shape:
            return f"{name} has another shape"
    return ""


@contextmanager
def _without_pickle(path: Path, key: str) -> Iterator[Path]:
    """Yield a temporary file with the tensors of torch's own file in safetensors.

    Raises VideotuneError if it cannot be read without running code of its own.
    """
    try:
        # Files of torch before 1.6 are no archives, and cannot be mapped.
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)
        )
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        OSError,
    ) as error:
        reason = str(error).splitlines()[0][:200]
        raise VideotuneError(
            f"{key}: {path.name} is not read without running code of its own ({reason})."
            " Give it as .safetensors"
        ) from error

    tensors: dict[str, Tensor] = {}
    if isinstance(content, Mapping):
        inner = content.get("state_dict", content)
        is_flat = isinstance(inner, Mapping) and all(
            isinstance(name, str) and _is_plain(value) for name, value in inner.items()
        )
        if is_flat:
            tensors = {name: value.contiguous() for name, value in inner.items()}
    if not tensors:
        raise VideotuneError(f"{key}: {path.name} holds no weights by name")

    from safetensors.torch import save_file  # imports torch

    folder = user_cache() / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".part-") as temporary_folder:
        tensors_file = Path(temporary_folder) / f"{path.stem}.safetensors"
        # Tensors that share memory cannot be saved together.
        unshared = {name: value.clone() for name, value in tensors.items()}
        save_file(unshared, tensors_file)
        yield tensors_file


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor as files of weights hold them."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def _cache_of(path: Path, kind: str) -> Path:
    """Return the folder in which a file is kept after its conversion."""
    status = path.stat()
    identity = [
        str(path.resolve()),
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        kind,
    ]
    return user_cache() / "parts" / digest(identity)


def _written(
    weights: Iterable[tuple[str, Tensor]],
    target: Path,
    source: Path,
    stem: str,
    echo: LogFn,
) -> Path:
    """Write converted weights in files of ``SHARD_BYTES`` with their index."""
    from safetensors.torch import save_file  # imports torch

    echo(
        f"note: {source.name} ({size_text(source.stat().st_size)}) is converted once into {target}"
    )
    weight_map: dict[str, str] = {}
    with whole_folder(target) as temporary_folder:
        for number, shard in enumerate(_shards(weights), 1):
            name = f"{stem}-{number:05}.safetensors"
            save_file(shard, temporary_folder / name)
            weight_map.update(dict.fromkeys(shard, name))
        write_json(
            temporary_folder / f"{stem}.safetensors.index.json",
            {"metadata": {}, "weight_map": weight_map},
        )
    return target


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    byte_count = 0
    for name, tensor in weights:
        shard[name] = tensor.detach().clone().contiguous()
        byte_count += tensor.nbytes
        if byte_count >= SHARD_BYTES:
            yield shard
            shard = {}
            byte_count = 0
    if shard:
        yield shard
