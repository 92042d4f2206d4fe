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
from videotune.config.numbers import refuse_numbers_of_others
from videotune.config.schema import Config, leaves
from videotune.config.suggestions import nearest_value
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
        "EMBEDDING": {"learning_rate": 1e-3, "caption_dropout": 0.0, "transformer": {"train": False}},
    }
    method = str(raw.get("training_method", "")).upper()
    optimizer = raw.get("optimizer")
    if isinstance(optimizer, Mapping) and str(optimizer.get("name", "")).upper() == "PRODIGY":
        return {**defaults.get(method, {}), "learning_rate": 1.0}
    if method in ("", "LORA") and variant_of(raw) in ("LOHA", "LOKR", "OFT"):
        return {"output_model_format": "peft"}
    return defaults.get(method, {})


def variant_of(raw: Mapping[str, Any]) -> str:
    """The kind of adapter that layers not checked yet ask for."""
    lora = raw.get("lora")
    return str(lora.get("variant", "")).upper() if isinstance(lora, Mapping) else ""


def resolve(user: Mapping[str, Any], preset: Mapping[str, Any], spec: ModelSpec | None) -> Resolved:
    """Family defaults, then the preset, then the person's own keys.

    Raises VideotuneError with one line for each value out of its bounds.
    """
    asked = _without_none(flatten(user))
    if "video_config.max_frames" in asked and "video_config.frames" not in asked:  # a preset's frames would win over it
        preset = merge(preset, {"video_config": {"frames": None}})
    if variant_of(merge(preset, user)) == "OFT" and "lora.alpha" not in asked:  # a preset's is another adapter's
        preset = merge(preset, {"lora": {"alpha": None}})
    layers = {"family": family_defaults(spec) if spec else {}, "preset": preset, "user": user}
    layers = {name: _with_resolution(_without_none(merge(layer))) for name, layer in layers.items()}
    layers = {"default": method_defaults(merge(*layers.values()))} | layers
    config = parse(merge(*layers.values()))
    origins = dict.fromkeys(flatten(config.model_dump(mode="json")), "default")
    for name, layer in layers.items():
        origins |= {key: name for key, value in flatten(layer).items() if key in origins}
    refuse_what_does_not_apply(config)
    if spec and spec.first_frame is None and config.first_frame_probability is not None:
        raise VideotuneError(
            f"first_frame_probability: {spec.title} takes no image; it is drawn from text alone. Leave it out."
        )
    if spec and isinstance(config.lora.targets, str) and config.lora.targets not in spec.lora_targets:
        known = ", ".join(sorted(spec.lora_targets))
        raise VideotuneError(
            f"lora.targets: {config.lora.targets!r} is no named set of {spec.title} ({known}) and no list of patterns"
        )
    if spec and len(spec.experts) == 1 and config.sample.guidance_2 is not None:
        raise VideotuneError(f"sample.guidance_2: {spec.title} has one denoiser, which sample.guidance is for")
    if spec and config.timestep_shift == "resolution" and spec.shift_by_tokens is None:
        raise VideotuneError(
            f"timestep_shift: {spec.title} publishes no shift by resolution; give a number, say {spec.timestep_shift:g}"
        )
    if spec and spec.path != "v" and config.loss_weighting != "none":
        raise VideotuneError(
            f"loss_weighting {config.loss_weighting!r} is defined for v-prediction; {spec.title} is flow"
        )
    return Resolved(config, origins)


def _with_resolution(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer with ``resolution`` in the place of ``width`` and ``height``.

    Raises VideotuneError where one of them is alone, or a resolution is there too.
    """
    sides: dict[str, Any] = {name: layer[name] for name in ("height", "width") if name in layer}
    if not sides:
        return layer
    if len(sides) < 2 or "resolution" in layer:
        others = "resolution" if "resolution" in layer else "height" if "width" in sides else "width"
        raise VideotuneError(
            f"{' and '.join(sides)}: {'with' if 'resolution' in layer else 'without'} {others} it is not clear what size is "
            "meant. Set width and height, or resolution alone."
        )
    parse(sides)
    rest = {name: value for name, value in layer.items() if name not in sides}
    return rest | {"resolution": f"{sides['height']}x{sides['width']}"}


def refuse_what_does_not_apply(config: Config) -> None:
    """VideotuneError for keys that the choice beside them does not use, and for a text that is not there."""
    refuse_numbers_of_others(config)
    if (config.missing_caption == "text") != (config.missing_caption_text is not None):
        raise VideotuneError('missing_caption "text" and missing_caption_text belong together: set both or neither')
    refuse_what_would_not_train(config)
    full = config.training_method == "FINE_TUNE"
    if config.transformer.layers is not None and not full:
        raise VideotuneError("transformer.layers: it is for FINE_TUNE; where an adapter goes, lora.targets says")
    if config.lora.variant == "OFT" and not full:
        refuse_for_rotations(config)
    for dataset in config.datasets:
        if full and dataset.kind == "regularization" and dataset.target != "clip":
            raise VideotuneError(
                f'datasets.target: FINE_TUNE keeps no base model beside the one it changes; give {dataset.path} "clip"'
            )
        of = f"the {dataset.kind} dataset {dataset.path} does not use"
        if dataset.target is not None and dataset.kind != "regularization":
            raise VideotuneError(f'datasets.target: {of} it; it is for kind "regularization"')
        for name, default in (("repeats", 1), ("loss_weight", 1.0)):
            if dataset.kind == "validation" and getattr(dataset, name) != default:
                raise VideotuneError(f"datasets.{name}: {of} it: it is measured, never trained")


def refuse_for_rotations(config: Config) -> None:
    """VideotuneError for keys of the adapter that mean nothing to OFT."""
    if config.lora.alpha is not None:
        raise VideotuneError("lora.alpha: OFT turns weights and scales nothing; leave it out")
    if config.lora.dropout:
        raise VideotuneError("lora.dropout: PEFT's OFT drops nothing out; leave it at 0")
    if config.lora.rank < 2:
        raise VideotuneError("lora.rank: OFT turns so many inputs together, at least 2")


def refuse_what_would_not_train(config: Config) -> None:
    """VideotuneError where the method cannot train what is to train, or nothing would."""
    method, net, text = config.training_method, config.transformer.train, config.text_encoder.train
    if method == "EMBEDDING" and (net or text):
        key = "transformer.train" if net else "text_encoder.train"
        raise VideotuneError(f"{key}: EMBEDDING trains new tokens and leaves all weights as they are: leave it out")
    if method == "LORA" and not net:
        raise VideotuneError("transformer.train: LORA trains an adapter of the transformer; without it nothing trains")
    if method == "LORA" and text:
        raise VideotuneError(
            "text_encoder.train: FINE_TUNE trains the text encoder, and EMBEDDING new tokens of it; LORA does not, since "
            "the pipelines of video models read no adapter of a text encoder"
        )
    if method == "FINE_TUNE":
        refuse_rounded(config)
    if method == "FINE_TUNE" and not (net or text):
        raise VideotuneError("transformer.train: nothing would train: set it, or text_encoder.train, to true")
    others = [dataset.path for dataset in config.datasets if dataset.kind == "regularization"]
    if method == "EMBEDDING" and others:
        raise VideotuneError(
            f"datasets.kind: a regularization clip does not hold the new token, so EMBEDDING learns nothing of {others[0]}"
        )


def refuse_rounded(config: Config) -> None:
    """VideotuneError where weights that train would be kept in another dtype: updates are smaller than its steps."""
    for name, part in (("transformer", config.transformer), ("text_encoder", config.text_encoder)):
        own = part.weight_dtype != "auto"
        kept, key = (part.weight_dtype, f"{name}.weight_dtype") if own else (config.weight_dtype, "weight_dtype")
        if part.train and kept not in ("auto", config.train_dtype):
            other = "text_encoder" if name == "transformer" else "transformer"
            raise VideotuneError(
                f"{key}: FINE_TUNE trains the {name.replace('_', ' ')}, and {kept} is for frozen weights: weights that "
                f"train are in train_dtype. Leave it out{'' if own else f', or set {other}.weight_dtype alone'}."
            )


def parse(raw: Mapping[str, Any]) -> Config:
    """Validate against the schema; pydantic's findings in words."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        items = error.errors()
        more = [f"and {len(items) - MOST_TOLD} more"] if len(items) > MOST_TOLD else []
        raise VideotuneError("\n".join([*map(_explain, items[:MOST_TOLD]), *more])) from error


def _explain(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if name not in leaves() and name.rpartition(".")[0] in leaves():  # pydantic adds the kind: samples.int
        name = name.rpartition(".")[0]
    given = shortened(repr(item["input"]))
    if item["type"] == "literal_error":
        expected = str(item["ctx"]["expected"])
        allowed = re.findall("'([^']*)'", expected)
        return f"{name}: {given} is not one of {expected}{nearest_value(item['input'], allowed)}"
    if item["type"] == "model_type":
        section = re.sub(r"\.\d+$", "", name)  # of a list of sections pydantic names the place too
        one = next((key for key in leaves() if key.startswith(f"{section}.")), section)
        return f"{name}: takes keys of its own, such as {one}, not {given}"
    text = f"{name}: {item['msg'][0].lower()}{item['msg'][1:]}, not {given}"
    field = leaves().get(name)
    return f"{text} ({field.description})" if field and field.description else text


def _without_none(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A null in a config says nothing: the key keeps what lies below."""
    return {k: _without_none(v) if isinstance(v, Mapping) else v for k, v in layer.items() if v is not None}


def total_steps(config: Config, windows: int, a_pass: Fraction) -> tuple[int, str | None]:
    """The number of optimizer updates, and the arithmetic in words where ``epochs`` was given.

    ``windows`` are in a pass over the data, repeats counted, and ``a_pass`` steps show each of them once.
    """
    if config.epochs is None:
        return config.steps, None
    steps = max(1, math.ceil(Fraction(str(config.epochs)) * a_pass))
    return (
        steps,
        f"epochs {config.epochs:g}: {config.epochs:g} × {windows} windows in {float(a_pass):g} steps a pass = {steps} steps",
    )
