"""Merge overrides, preset and defaults into one checked config that knows where each
value comes from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from videotune.config.load import EPOCH_KEYS, MOST_TOLD, without_epochs_overridden
from videotune.config.nested_keys import flatten, merge
from videotune.config.optimizer_classes import is_class
from videotune.config.optimizers import (
    NUMBERS_OF_NAMES,
    finds_its_rate,
    kind_of,
    optimizer_named,
)
from videotune.config.schema import Config, leaves
from videotune.config.suggestions import nearest_value
from videotune.config.usual_rates import USUAL_RATES
from videotune.config.validators import refuse_what_does_not_apply
from videotune.errors import VideotuneError
from videotune.model_spec import ModelSpec
from videotune.text import shortened


@dataclass(frozen=True)
class Resolved:
    """A checked config with its origins."""

    config: Config
    origins: Mapping[str, str]
    """Where each dotted key's value comes from: "user", "preset", "family", "default"
    or "plan".
    """
    preset: str | None = None
    """Name of the preset below the config, or None if it has none."""

    def to_json(self) -> dict[str, Any]:
        """Return what ``config.json`` keeps."""
        return {
            "settings": self.config.model_dump(mode="json"),
            "origins": dict(self.origins),
            "preset": self.preset,
        }

    def with_planned(self, values: Mapping[str, Any]) -> Resolved:
        """Return the same config with values, by dotted keys, that a plan has chosen or
        that follow from others, such as steps from passes over the data.
        """
        config = self.config
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            changes = {name: value}
            if section:
                changes = {section: getattr(config, section).model_copy(update=changes)}
            config = config.model_copy(update=changes)
        origins = {**self.origins, **dict.fromkeys(values, "plan")}
        return replace(self, config=config, origins=origins)


def family_defaults(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys whose default depends on the model."""
    defaults: dict[str, Any] = {}
    if spec.first_frame_probability is not None:
        defaults["first_frame_probability"] = spec.first_frame_probability
    required = sorted(spec.required_conditions - {"first_frame"})
    if required:
        defaults["conditions"] = [{"type": name} for name in required]
    sample: dict[str, Any] = {
        "steps": spec.sample_steps,
        "guidance": spec.sample_guidance,
    }
    if spec.sample_rescale:
        sample["guidance_rescale"] = spec.sample_rescale
    return defaults | {
        "family": spec.name,
        "resolution": spec.default_resolution,
        "timestep_distribution": spec.timestep_distribution,
        "timestep_shift": "resolution"
        if spec.shifts_in_training
        else spec.timestep_shift,
        "video_config": {"target_fps": spec.rules.fps},
        "sample": sample,
    }


def method_defaults(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys whose default depends on the training method or the optimizer."""
    method = str(merged.get("training_method", "")).upper()
    defaults: dict[str, Any] = {}
    if method in USUAL_RATES and method != "LORA":
        defaults = {"learning_rate": USUAL_RATES[method]}
    if method == "EMBEDDING":
        defaults |= {"caption_dropout": 0.0, "transformer": {"train": False}}

    optimizer = merged.get("optimizer")
    if isinstance(optimizer, Mapping):
        name = optimizer_named(str(optimizer.get("name", "")))
        if name is not None and finds_its_rate(name):
            return {**defaults, "learning_rate": kind_of(name).learning_rate}
    return defaults


def _gives_video(merged: Mapping[str, Any]) -> bool:
    """Whether unchecked keys say that the whole video is given and only sound is learnt."""
    return merged.get("generate") in ("sound", ["sound"])


def variant_of(merged: Mapping[str, Any]) -> str:
    """Return the adapter's variant that unchecked keys name."""
    lora = merged.get("lora")
    return str(lora.get("variant", "")).upper() if isinstance(lora, Mapping) else ""


def resolve(
    user: Mapping[str, Any], preset: Mapping[str, Any], spec: ModelSpec | None
) -> Resolved:
    """Merge the training method's defaults, the family's, the preset and the user's own
    keys, in this order.

    Raises VideotuneError with a line for each value out of its bounds.
    """
    user_keys = _without_none(flatten(user))
    # A preset's frames must not win over the user's max_frames, and its alpha is
    # another adapter's.
    if (
        "video_config.max_frames" in user_keys
        and "video_config.frames" not in user_keys
    ):
        preset = merge(preset, {"video_config": {"frames": None}})
    if variant_of(merge(preset, user)) == "OFT" and "lora.alpha" not in user_keys:
        preset = merge(preset, {"lora": {"alpha": None}})
    # Merging one layer brings its keys into one form, such as ``optimizer: {name: …}``.
    preset = _without_numbers_of_names(preset, merge(user))
    preset = without_epochs_overridden(preset, user)

    layers: dict[str, dict[str, Any]] = {}
    family = family_defaults(spec) if spec else {}
    if _gives_video(merge(preset, user)):
        family.pop("first_frame_probability", None)
    for name, layer in (("family", family), ("preset", preset), ("user", user)):
        layers[name] = _with_resolution(_without_none(merge(layer)))
    layers = {"default": method_defaults(merge(*layers.values()))} | layers

    config = parse(_with_prior(merge(*layers.values())))
    origins = dict.fromkeys(flatten(config.model_dump(mode="json")), "default")
    for name, layer in layers.items():
        origins |= {key: name for key in flatten(layer) if key in origins}
    refuse_what_does_not_apply(config, spec)
    return Resolved(config, origins)


def _without_numbers_of_names(
    preset: Mapping[str, Any], user: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Leave out a preset's numbers for AdamW where the user names a class, which has its
    own.
    """
    optimizer = user.get("optimizer")
    if not isinstance(optimizer, Mapping) or "optimizer" not in preset:
        return preset
    name = optimizer_named(str(optimizer.get("name") or ""))
    if name is None or not is_class(name):
        return preset
    return merge(preset, {"optimizer": dict.fromkeys(NUMBERS_OF_NAMES)})


def _with_prior(merged: dict[str, Any]) -> dict[str, Any]:
    """Replace ``prior_preservation`` by the dataset that it is short for."""
    path = merged.get("prior_preservation")
    datasets = merged.get("datasets", [])
    if path is None or not isinstance(datasets, list):
        return merged

    regularization = {"path": path, "kind": "regularization"}
    has_it = any(
        regularization.items() <= dataset.items()
        for dataset in datasets
        if isinstance(dataset, Mapping)
    )
    if not has_it:
        datasets = [*datasets, regularization]
    return merged | {"prior_preservation": None, "datasets": datasets}


def _with_resolution(layer: dict[str, Any]) -> dict[str, Any]:
    """Replace ``width`` and ``height`` by ``resolution``.

    Raises VideotuneError if only one of them is given, or a resolution as well.
    """
    sides: dict[str, Any] = {
        name: layer[name] for name in ("height", "width") if name in layer
    }
    if not sides:
        return layer

    conflict = None
    if "resolution" in layer:
        conflict = "with resolution"
    elif len(sides) < 2:
        conflict = "without height" if "width" in sides else "without width"
    if conflict is not None:
        raise VideotuneError(
            f"{' and '.join(sides)}: {conflict} it is not clear what size is meant. "
            "Set width and height, or only resolution."
        )
    parse(sides)
    others = {name: value for name, value in layer.items() if name not in sides}
    return others | {"resolution": f"{sides['height']}x{sides['width']}"}


def parse(raw: Mapping[str, Any]) -> Config:
    """Validate keys against the schema.

    Raises VideotuneError with pydantic's findings in words.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        findings = error.errors()
        lines = [_explain(finding) for finding in findings[:MOST_TOLD]]
        if len(findings) > MOST_TOLD:
            lines.append(f"and {len(findings) - MOST_TOLD} more")
        raise VideotuneError("\n".join(lines)) from error


def check_values(*layers: Mapping[str, Any]) -> None:
    """Check keys of a config each by itself; the rest of the config may be elsewhere.

    Raises VideotuneError as ``parse`` does.
    """
    parse(merge(*(_without_none(layer) for layer in layers)))


def _explain(finding: Any) -> str:
    """Return one of pydantic's findings in words."""
    key = _key_of(finding)
    value = shortened(repr(finding["input"]))
    if key.partition(".")[0] == "notify":  # the value may hold a password
        return f"{key}: {finding['msg'].removeprefix('Value error, ')}"
    if finding["type"] == "optimizer_name":
        return f"{key}: {finding['msg']}"
    if finding["type"] == "literal_error":
        expected = str(finding["ctx"]["expected"])
        allowed = re.findall("'([^']*)'", expected)
        hint = nearest_value(finding["input"], allowed)
        return f"{key}: {value} is not one of {expected}{hint}"
    if finding["type"] == "model_type":
        # Of a list of sections pydantic names the index, too.
        section = re.sub(r"\.\d+$", "", key)
        example = next(
            (leaf for leaf in leaves() if leaf.startswith(f"{section}.")), section
        )
        return f"{key}: takes keys of its own, such as {example}, not {value}"

    message = finding["msg"]
    text = f"{key}: {message[0].lower()}{message[1:]}, not {value}"
    field = leaves().get(key)
    if field and field.description:
        text += f" ({field.description})"
    return text


def _key_of(finding: Any) -> str:
    """Return the dotted key of a finding, without the types that pydantic adds to it."""
    # samples.list[…].0.Prompt.frames
    parts = [str(part) for part in finding["loc"]]
    key = ".".join(part for part in parts if re.fullmatch("[a-z0-9_]+", part))
    # samples.int
    section = key.rpartition(".")[0]
    return section if key not in leaves() and section in leaves() else key


def _without_none(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys that are null: such a key keeps the value below it."""
    values = {}
    for key, value in layer.items():
        if value is not None:
            values[key] = _without_none(value) if isinstance(value, Mapping) else value
    return values


def total_steps(
    config: Config, windows: int, steps_per_pass: Fraction
) -> tuple[int, str | None]:
    """Return the number of optimizer updates, and the arithmetic in words if ``epochs``
    is set.

    Args:
        config: the settings.
        windows: in a pass over the data, repeats counted.
        steps_per_pass: how many steps show each of them once.
    """
    if config.epochs is None:
        return config.steps, None
    steps = _in_steps(config.epochs, steps_per_pass)
    arithmetic = (
        f"epochs {config.epochs:g}: {config.epochs:g} × {windows} windows in "
        f"{float(steps_per_pass):g} steps a pass = {steps} steps"
    )
    return steps, arithmetic


INTERVALS = tuple(key for key in EPOCH_KEYS if key != "steps")
"""Keys in steps. With the suffix _epochs they are in passes over the data."""


def intervals(config: Config, steps_per_pass: Fraction) -> dict[str, int]:
    """Return the intervals that the config gives in passes over the data, by their
    keys, in steps.
    """
    steps = {}
    for key in INTERVALS:
        epochs = getattr(config, f"{key}_epochs")
        if epochs is not None:
            steps[key] = _in_steps(epochs, steps_per_pass)
    return steps


def _in_steps(epochs: float, steps_per_pass: Fraction) -> int:
    return max(1, math.ceil(Fraction(str(epochs)) * steps_per_pass))
