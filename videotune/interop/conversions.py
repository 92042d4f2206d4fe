"""Convert single values of other trainers' configs; the rules name a conversion under
"as".
"""

import math
import re
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from videotune.config import suggestions
from videotune.config.installed import refuse_what_is_not_installed
from videotune.config.optimizer_classes import is_imported
from videotune.config.optimizers import OPTIMIZERS, optimizer_named
from videotune.errors import VideotuneError
from videotune.interop import files_here
from videotune.interop.command_files import parse_scalar
from videotune.sampling.prompts import FLAGS, parse_prompt

_DISCORD_WEBHOOK = re.compile(
    r"https://(?:\w+\.)?discord(?:app)?\.com/api(?:/v\d+)?/webhooks/(\d{1,32})/([\w-]{1,200})"
    r"/?(?:\?thread_id=(\d{1,32}))?"
)
"""Id and token of a webhook, and the thread if the URL names one."""


def _as_is(value: Any, _: Path) -> Any:
    return parse_scalar(value) if isinstance(value, str) else value


def _size(value: Any, folder: Path) -> Any:
    """Convert one size or a list of sizes, width first, to R or "HxW"."""
    if isinstance(value, str) and "," in value:
        return [_size(size, folder) for size in value.split(",")]

    numbers = value
    if not isinstance(value, list):
        numbers = re.findall(r"\d+", str(value))
    sides = [int(number) for number in numbers]
    if len(sides) == 1:
        return sides[0]
    return f"{sides[1]}x{sides[0]}"


def _area_side(value: Any, _: Path) -> int:
    """Convert [width, height] or a side to the side of the square with this area."""
    if isinstance(value, list):
        width = value[0]
        height = value[1]
        return round(math.sqrt(width * height))
    return int(value)


def _megapixels_side(value: Any, _: Path) -> int:
    return round(math.sqrt(value * 1e6))


def _area_sides(value: Any, folder: Path) -> list[Any]:
    sides = []
    for size in value:
        side = _area_side(size, folder) if isinstance(size, list) else size
        sides.append(side)
    return sides


def _as_shapes(value: Any) -> list[Any]:
    """Return a list of shapes; a single shape may come without one."""
    if isinstance(value, list) and isinstance(value[0], list):
        return value
    return [value]


def _buckets(value: Any, _: Path) -> list[Any]:
    """Convert shapes, [F, H, W] or "FxHxW", to the most frames and the sizes."""
    shapes = []
    for shape in _as_shapes(value):
        numbers = re.findall(r"\d+", str(shape))
        shapes.append([int(number) for number in numbers])

    sizes = list(dict.fromkeys(f"{height}x{width}" for _, height, width in shapes))
    max_frames = max(shape[0] for shape in shapes)
    return [max_frames, sizes[0] if len(sizes) == 1 else sizes]


def _sizes_with_frames(value: Any, folder: Path) -> list[Any]:
    """Convert shapes [W, H, F] to the sizes and the most frames."""
    shapes = [shape[::-1] for shape in _as_shapes(value)]
    max_frames, sizes = _buckets(shapes, folder)
    return [sizes, max_frames]


def _path(value: Any, folder: Path) -> str:
    return str((folder / value).absolute())


def _path_or_id(value: Any, folder: Path) -> Any:
    return _path(value, folder) if files_here.exists(folder / value) else value


def _weights(value: Any, folder: Path) -> str | None:
    path = folder / value
    # Path.is_file raises OSError for a name that is too long.
    is_weights = path.suffix == ".safetensors" and files_here.is_file(path)
    return str(path.absolute()) if is_weights else None


def _lora_files(value: Any, folder: Path) -> list[dict[str, Any]]:
    """Convert [files, strengths] of LoRA files; either may be single or missing."""
    files, strengths = value
    if not isinstance(files, list):
        files = [files]
    if not isinstance(strengths, list):
        strengths = [strengths] * len(files)
    entries = []
    strengths = strengths[: len(files)]
    for file, strength in zip_longest(files, strengths):
        entry: dict[str, Any] = {"file": _path(file, folder)}
        if strength is not None:
            entry["strength"] = float(strength)
        entries.append(entry)
    return entries


def _training_adapter(value: Any, folder: Path) -> list[dict[str, Any]]:
    return [{"file": _path(value, folder), "training_only": True}]


def _part_file(value: Any, folder: Path) -> str | None:
    """Convert the file of a text encoder or VAE, if it is here and of a kind that is
    read.
    """
    path = folder / value
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        return None
    return str(path.absolute()) if files_here.is_file(path) else None


def _part_files(value: Any, folder: Path) -> list[str | None] | None:
    """Convert the files of two text encoders, of which one may be missing."""
    files = [None if text is None else _part_file(text, folder) for text in value]
    return files if any(files) else None


def _low_expert(value: Any, folder: Path) -> list[Any]:
    """Convert the file of the expert for low noise to ``experts`` and the files of
    both.
    """
    path = _weights(value, folder)
    return ["low"] if path is None else ["low", [None, path]]


def _high_expert(value: Any, folder: Path) -> list[Any]:
    path = _weights(value, folder)
    return ["high"] if path is None else ["high", [path, None]]


def _prompts(value: Any, folder: Path) -> list[Any]:
    """Convert prompts with options (``--w 640``) to entries of ``samples``.

    Options that videotune lacks are left out. The paths of images are relative to the
    folder.
    """
    prompts = []
    for text in value if isinstance(value, list) else [value]:
        prompt, *options = re.split(r"\s--(?=[a-z_]+\s)", f" {text} ")
        flags = [option.split()[0] for option in options]
        left_out = set(flags) - set(FLAGS)
        if len({"w", "h"} & set(flags)) == 1:  # a size needs both
            left_out |= {"w", "h"}
        parts = [prompt]
        for flag, option in zip(flags, options, strict=True):
            if flag not in left_out:
                parts.append(option)
        entry = parse_prompt(" --".join(parts), "samples")
        for key in ("image", "last_frame"):
            if isinstance(entry, dict) and key in entry:
                entry[key] = _path(entry[key], folder)
        prompts.append(entry)
    return prompts


def _discord_address(value: Any, _: Path) -> list[str]:
    """Convert the URL of a Discord webhook, or [type, URL], to Apprise's address of it."""
    text = value[-1] if isinstance(value, list) else value
    address = str(text).strip()
    url = _DISCORD_WEBHOOK.fullmatch(address)
    if url is None:
        raise VideotuneError(
            "it is not the URL of a Discord webhook (https://discord.com/api/webhooks/…)"
        )
    thread = f"?thread={url[3]}" if url[3] else ""
    return [f"discord://{url[1]}/{url[2]}{thread}"]


def _one_more(value: Any, _: Path) -> Any:
    return value + 1


def _repeats(value: Any, _: Path) -> list[Any]:
    """Convert a number of repeats, which may have a fraction, to whole repeats and a
    probability.
    """
    number = float(value)
    if number <= 0:
        raise ValueError(value)
    repeats = math.ceil(number)
    return [repeats] if repeats == number else [repeats, number / repeats]


def _ending(value: Any, _: Path) -> str:
    """Convert the ending of caption files, with or without its dot."""
    return f".{str(value).removeprefix('.')}"


def _separator(value: Any, _: Path) -> str:
    """Convert what is between tags; spaces about it count for nothing."""
    return str(value).strip() or str(value)


def _shuffles(value: Any, _: Path) -> list[Any] | None:
    """Convert a number of shuffled captions to caption_shuffle and caption_variants."""
    count = int(value)
    return [True, max(2, count)] if count > 0 else None


def _thousandths(value: Any, _: Path) -> Any:
    return value / 1000


def _numbers(value: Any, _: Path) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.eE+-]+", str(value))]


def _largest(value: Any, _: Path) -> Any:
    return max(value) if isinstance(value, list) else value


def _enum_value(value: Any, _: Path) -> Any:
    name = str(value).upper()
    return suggestions.others()["values"].get(name, name)


def _optimizer(value: Any, folder: Path) -> str:
    """Convert an optimizer's name, or its class as "module.Class".

    A name that means nothing stays, so that the config says what it may be.
    """
    text = str(value).strip()
    known_name = _enum_value(KNOWN_CLASSES.get(text, text), folder)
    if known_name in OPTIMIZERS:
        return str(known_name)
    if "." in text and ":" not in text:
        module, _, class_name = text.rpartition(".")
        text = f"{module}:{class_name}"
    spellings = [text]
    if ":" not in text:
        spellings.insert(0, text.replace("_", ""))
    names = [optimizer_named(spelling) for spelling in spellings]
    name = next(filter(None, names), text)
    if is_imported(name):
        refuse_what_is_not_installed(name.partition(":")[0], "optimizer.name")
    return name


KNOWN_CLASSES = {
    "prodigyopt.Prodigy": "PRODIGY",
    "schedulefree.AdamWScheduleFree": "SCHEDULE_FREE",
    "came_pytorch.CAME": "CAME",
    "transformers.Adafactor": "ADAFACTOR",
    "transformers.optimization.Adafactor": "ADAFACTOR",
}
"""Classes that videotune has by a name of its own."""


def _class_of_pytorch_optimizer(value: Any, _: Path) -> str:
    return f"pytorch_optimizer:{str(value).strip()}"


def _share_of_rate(value: Any, _: Path) -> float:
    """Convert [a share, the peak rate] to a rate."""
    share, rate = value
    return float(share) * float(rate)


def _condition(value: Any, _: Path) -> list[dict[str, Any]]:
    """Convert [type, probability, latent frames], of which the last two may be missing,
    to ``conditions``.
    """
    names = ("type", "probability", "latent_frames")
    entry = dict(zip(names, value, strict=False))
    return [{name: part for name, part in entry.items() if part is not None}]


def _prefix(value: Any, folder: Path) -> list[dict[str, Any]] | None:
    """Convert [probability, latent frames] to ``conditions``; 0 is none."""
    probability, latent_frames = value
    if float(probability) == 0:
        return None
    return _condition(["prefix", float(probability), latent_frames], folder)


FROZEN = {"video_to_audio": "video", "audio_to_video": "sound"}
"""Conditions that give a preview a whole video or sound, and the key of its file."""


def _given_prompt(value: Any, folder: Path) -> list[Any]:
    """Convert [prompt, and of each condition its type, video and audio] to an entry of
    ``samples``; a file that is not here is left out.
    """
    prompt, *parts = value
    files = {}
    for i in range(0, len(parts), 3):
        condition, video, audio = parts[i : i + 3]
        name = FROZEN.get(condition)
        file = video if name == "video" else audio
        if name and isinstance(file, str) and files_here.is_file(folder / file):
            files[name] = _path(file, folder)
    return [{"prompt": str(prompt), **files} if files else str(prompt)]


def _mask_folder(value: Any, folder: Path) -> list[Any]:
    """Convert a folder of masks to itself and the weight outside of them, 0."""
    return [_path(value, folder), 0.0]


CONVERSIONS: Mapping[Any, Callable[[Any, Path], Any]] = {
    None: _as_is,
    "size": _size,
    "area": _area_side,
    "megapixels": _megapixels_side,
    "buckets": _buckets,
    "path": _path,
    "mask folder": _mask_folder,
    "condition": _condition,
    "prefix": _prefix,
    "given prompt": _given_prompt,
    "path or id": _path_or_id,
    "weights": _weights,
    "LoRA files": _lora_files,
    "training adapter": _training_adapter,
    "part file": _part_file,
    "part files": _part_files,
    "low expert": _low_expert,
    "high expert": _high_expert,
    "prompts": _prompts,
    "Discord address": _discord_address,
    "sides": _area_sides,
    "sizes with frames": _sizes_with_frames,
    "one more": _one_more,
    "repeats": _repeats,
    "ending": _ending,
    "separator": _separator,
    "shuffles": _shuffles,
    "thousandths": _thousandths,
    "numbers": _numbers,
    "most": _largest,
    "word": _enum_value,
    "optimizer": _optimizer,
    "class of pytorch_optimizer": _class_of_pytorch_optimizer,
    "share of rate": _share_of_rate,
}
"""Names in the rules -> functions of a value and the config's folder."""
