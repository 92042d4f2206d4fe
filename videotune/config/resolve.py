"""Layers -> one checked config in which every key says where its value comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from videotune.config.load import MOST_TOLD, flatten, merge, shortened
from videotune.config.optimizers import OPTIMIZERS
from videotune.config.schema import Config, leaves
from videotune.config.suggestions import nearest_value
from videotune.config.validators import refuse_what_does_not_apply
from videotune.errors import VideotuneError
from videotune.types import ModelSpec


@dataclass(frozen=True)
class Resolved:
    """A checked config, and for each dotted key "user", "preset", "family", "default" or "plan"."""

    config: Config
    origins: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """What ``config.json`` keeps."""
        return {"settings": self.config.model_dump(mode="json"), "origins": dict(self.origins)}

    def with_planned(self, values: Mapping[str, Any]) -> Resolved:
        """The same config with the values, by dotted keys, that a plan has chosen."""
        config = self.config
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            new = (
                {section: getattr(config, section).model_copy(update={name: value})}
                if section
                else {name: value}
            )
            config = config.model_copy(update=new)
        return Resolved(config, {**self.origins, **dict.fromkeys(values, "plan")})


def family_defaults(spec: ModelSpec) -> dict[str, Any]:
    """The keys whose default is the model's own."""
    told = {} if spec.first_frame is None else {"first_frame_probability": spec.first_frame}
    return told | {
        "family": spec.name,
        "resolution": spec.default_resolution,
        "timestep_distribution": spec.timestep_distribution,
        "timestep_shift": spec.timestep_shift,
        "video_config": {"target_fps": spec.rules.fps},
        "sample": {"steps": spec.sample_steps, "guidance": spec.sample_guidance},
    }


def method_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose default is the training method's or the optimizer's own."""
    defaults: dict[str, dict[str, Any]] = {
        "FINE_TUNE": {"learning_rate": 1e-5},
        "EMBEDDING": {
            "learning_rate": 1e-3,
            "caption_dropout": 0.0,
            "transformer": {"train": False},
        },
    }
    method = str(raw.get("training_method", "")).upper()
    optimizer = raw.get("optimizer")
    kind = (
        OPTIMIZERS.get(str(optimizer.get("name", "")).upper())
        if isinstance(optimizer, Mapping)
        else None
    )
    if kind is not None and kind.learning_rate is not None:
        return {**defaults.get(method, {}), "learning_rate": kind.learning_rate}
    if method in ("", "LORA") and variant_of(raw) in ("LOHA", "LOKR", "OFT"):
        return {"output_model_format": "peft"}
    return defaults.get(method, {})


def variant_of(raw: Mapping[str, Any]) -> str:
    """The kind of adapter that layers not checked yet ask for."""
    lora = raw.get("lora")
    return str(lora.get("variant", "")).upper() if isinstance(lora, Mapping) else ""


def resolve(
    user: Mapping[str, Any], preset: Mapping[str, Any], spec: ModelSpec | None
) -> Resolved:
    """Family defaults, then the preset, then the person's own keys.

    Raises VideotuneError with one line for each value out of its bounds.
    """
    asked = _without_none(flatten(user))
    if (
        "video_config.max_frames" in asked and "video_config.frames" not in asked
    ):  # a preset's frames would win over it
        preset = merge(preset, {"video_config": {"frames": None}})
    if (
        variant_of(merge(preset, user)) == "OFT" and "lora.alpha" not in asked
    ):  # a preset's is another adapter's
        preset = merge(preset, {"lora": {"alpha": None}})
    layers = {"family": family_defaults(spec) if spec else {}, "preset": preset, "user": user}
    layers = {
        name: _with_resolution(_without_none(merge(layer))) for name, layer in layers.items()
    }
    layers = {"default": method_defaults(merge(*layers.values()))} | layers
    config = parse(_with_prior(merge(*layers.values())))
    origins = dict.fromkeys(flatten(config.model_dump(mode="json")), "default")
    for name, layer in layers.items():
        origins |= {key: name for key, value in flatten(layer).items() if key in origins}
    refuse_what_does_not_apply(config, spec)
    return Resolved(config, origins)


def _with_prior(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys with ``prior_preservation`` as the dataset that it is short for."""
    if (path := raw.get("prior_preservation")) is None or not isinstance(
        datasets := raw.get("datasets", []), list
    ):
        return raw
    own = {"path": path, "kind": "regularization"}
    there = any(
        own.items() <= dataset.items() for dataset in datasets if isinstance(dataset, Mapping)
    )
    return raw | {
        "prior_preservation": None,
        "datasets": datasets if there else [*datasets, own],
    }


def _with_resolution(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer with ``resolution`` in the place of ``width`` and ``height``.

    Raises VideotuneError where one of them is alone, or a resolution is there too.
    """
    sides: dict[str, Any] = {name: layer[name] for name in ("height", "width") if name in layer}
    if not sides:
        return layer
    if len(sides) < 2 or "resolution" in layer:
        missing = "without height" if "width" in sides else "without width"
        fault = (
            f"{' and '.join(sides)}: {'with resolution' if 'resolution' in layer else missing}"
        )
        raise VideotuneError(
            f"{fault} it is not clear what size is meant. Set width and height, or resolution alone."
        )
    parse(sides)
    rest = {name: value for name, value in layer.items() if name not in sides}
    return rest | {"resolution": f"{sides['height']}x{sides['width']}"}


def parse(raw: Mapping[str, Any]) -> Config:
    """Validate against the schema; pydantic's findings in words."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        items = error.errors()
        more = [f"and {len(items) - MOST_TOLD} more"] if len(items) > MOST_TOLD else []
        raise VideotuneError("\n".join([*map(_explain, items[:MOST_TOLD]), *more])) from error


def _explain(item: Any) -> str:
    # pydantic adds kinds: samples.list[…].0.Prompt.frames
    name = ".".join(str(part) for part in item["loc"] if re.fullmatch("[a-z0-9_]+", str(part)))
    if (
        name not in leaves() and name.rpartition(".")[0] in leaves()
    ):  # pydantic adds the kind: samples.int
        name = name.rpartition(".")[0]
    given = shortened(repr(item["input"]))
    if item["type"] == "literal_error":
        expected = str(item["ctx"]["expected"])
        allowed = re.findall("'([^']*)'", expected)
        return (
            f"{name}: {given} is not one of {expected}{nearest_value(item['input'], allowed)}"
        )
    if item["type"] == "model_type":
        section = re.sub(
            r"\.\d+$", "", name
        )  # of a list of sections pydantic names the place too
        one = next((key for key in leaves() if key.startswith(f"{section}.")), section)
        return f"{name}: takes keys of its own, such as {one}, not {given}"
    text = f"{name}: {item['msg'][0].lower()}{item['msg'][1:]}, not {given}"
    field = leaves().get(name)
    return f"{text} ({field.description})" if field and field.description else text


def _without_none(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A null in a config says nothing: the key keeps what lies below."""
    return {
        k: _without_none(v) if isinstance(v, Mapping) else v
        for k, v in layer.items()
        if v is not None
    }


def total_steps(config: Config, windows: int, a_pass: Fraction) -> tuple[int, str | None]:
    """The number of optimizer updates, and the arithmetic in words where ``epochs`` was given.

    ``windows`` are in a pass over the data, repeats counted, and ``a_pass`` steps show each of them once.
    """
    if config.epochs is None:
        return config.steps, None
    steps = _in_steps(config.epochs, a_pass)
    each = f"{config.epochs:g} × {windows} windows in {float(a_pass):g} steps a pass"
    return steps, f"epochs {config.epochs:g}: {each} = {steps} steps"


INTERVALS = ("save_every", "validate_every", "sample_after")
"""Keys in steps; with _epochs behind them they are in passes over the data."""


def intervals(config: Config, a_pass: Fraction) -> dict[str, int]:
    """The intervals that the config gives in passes over the data, by their keys, in steps."""
    given = {key: getattr(config, f"{key}_epochs") for key in INTERVALS}
    return {
        key: _in_steps(epochs, a_pass) for key, epochs in given.items() if epochs is not None
    }


def _in_steps(epochs: float, a_pass: Fraction) -> int:
    return max(1, math.ceil(Fraction(str(epochs)) * a_pass))
