"""Translate another trainer's config into videotune's by the rules in JSON files."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from videotune.config import nested_keys, suggestions
from videotune.config.resolve import resolve
from videotune.errors import VideotuneError
from videotune.interop.addresses import (
    KEY,
    masked_config,
    masked_rows,
    with_all_addresses,
    without_addresses,
)
from videotune.interop.base_names import base_named, known_base, spec_of_base
from videotune.interop.command_files import parse_scalar
from videotune.interop.conversions import CONVERSIONS
from videotune.interop.files_here import seen_within
from videotune.interop.foreign_config import ForeignConfig
from videotune.interop.joined_lists import with_joined_lists
from videotune.interop.missing_files import is_missing_file, with_missing_file
from videotune.interop.optimizer_arguments import with_arguments
from videotune.interop.preview_rows import with_given_files, with_valid_previews
from videotune.interop.rule_tables import (
    conditions_hold,
    indices_in,
    load_rules,
    related_value,
    rule_for,
)
from videotune.interop.translated_key import TranslatedKey
from videotune.model_spec import ModelSpec
from videotune.models.other_models import (
    not_trained,
    other_model_of_name,
)

RETRIED_LAST = ("transformer.weight_dtype", "layer_offload_fraction", "compile")
"""Keys that are left out if they do not go with others."""


@dataclass(frozen=True)
class Imported:
    """A translated config."""

    trainer: str

    config: dict[str, Any]
    """videotune's config; it resolves without errors. It may hold addresses for messages,
    which are secret.
    """

    rows: tuple[TranslatedKey, ...]
    """One row per key of the other trainer's config, without secrets."""

    def shown(self) -> "Imported":
        """Return the translation with a config that may be printed."""
        return replace(self, config=masked_config(self.config))

    def for_studio(self) -> "Imported":
        """Return the translation without addresses, as the studio keeps it."""
        config = {key: value for key, value in self.config.items() if key != KEY}
        return replace(self, config=config, rows=without_addresses(self.rows))


def translate(theirs: ForeignConfig) -> Imported:
    """Translate a config; a value that videotune refuses becomes a row, not an error."""
    with seen_within(theirs.within):
        return _translate(theirs)


def _translate(theirs: ForeignConfig) -> Imported:
    """Translate a config, with the files that may be seen."""
    table = load_rules(theirs.trainer)
    folder = theirs.files[0].parent
    ruled = _with_rules(theirs)
    base = base_named(ruled.base_names(), folder)

    rows = []
    filled_values = _fill_placeholders(ruled.values, table.get("placeholders"))
    for key, rule in ruled.rules.items():
        row = _translate_key(key, filled_values, rule, base, folder)
        row = replace(row, theirs=ruled.values[key])
        rows.append(replace(row, given=key in ruled.given))
    rows = with_arguments(rows, table.get("optimizer arguments", ()))
    for key, path in theirs.missing:
        rows.append(TranslatedKey(key, path, "missing", note="its keys are not read"))

    rows = with_valid_previews(with_joined_lists(rows), spec_of_base(base))
    rows = with_given_files(rows)
    rows = with_all_addresses(rows)
    config, final_rows = _accept(rows, base)
    shown_rows = masked_rows(final_rows, table.get("secrets", ()))
    return Imported(theirs.trainer, config, shown_rows)


def refuse_config_of_other_model(theirs: ForeignConfig) -> None:
    """Raise NotTrained if a config is of a model that videotune does not train.

    A name without a folder or an ending, such as a model's type, counts before paths,
    whose folders have names of the user's.
    """
    texts = [str(name) for name in _with_rules(theirs).base_names() if name]
    types = [text for text in texts if not re.search(r"[/\\]|\.[a-z]+$", text)]
    for group in (types, texts):
        if known_base(" ".join(group)):
            return
        for text in group:
            title = other_model_of_name(text)
            if title is not None:
                raise not_trained(title, text)


class _RuledConfig(NamedTuple):
    """A config of another trainer with the rule for each of its keys."""

    given: Mapping[str, Any]
    """The values of the config."""

    values: Mapping[str, Any]
    """Those, and the trainer's defaults."""

    rules: Mapping[str, dict[str, Any]]

    def base_names(self) -> list[Any]:
        """Return the values that may name the base model."""
        return [self.values[key] for key, rule in self.rules.items() if "base" in rule]


def _with_rules(theirs: ForeignConfig) -> _RuledConfig:
    table = load_rules(theirs.trainer)
    given = _split_arguments(theirs.values, table.get("args", ()))
    defaults = _defaults(given, table.get("defaults", {}))
    values = given | {key: default["value"] for key, default in defaults.items()}

    rules = {}
    for key in values:
        rule = defaults.get(key, {}) | rule_for(table, key, values)
        # what an absent key means is no remark on one that is there
        if key not in given and "absent" in rule:
            rule["differs"] = rule["absent"]
        rules[key] = rule
    return _RuledConfig(given, values, rules)


def _split_arguments(
    values: Mapping[str, Any], options: Sequence[str]
) -> dict[str, Any]:
    """Split KEY=VALUE items of options such as optimizer_args into keys of their own."""
    split_values: dict[str, Any] = {}
    for key, value in values.items():
        items = value if isinstance(value, list) else [value]
        assignments = [str(item).partition("=") for item in items]
        are_assignments = bool(assignments) and all(
            equals for _, equals, _ in assignments
        )
        if suggestions.plain(key) not in options or not are_assignments:
            split_values[key] = value
            continue
        for name, _, text in assignments:
            split_values[f"{key}.{name.strip()}"] = parse_scalar(text.strip())
    return split_values


def _fill_placeholders(
    values: Mapping[str, Any], placeholders: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """Return the values with words such as [trigger] replaced by another key's value."""
    if placeholders is None:
        return values

    def filled(text: Any, replacement: str) -> Any:
        if isinstance(text, list):
            return [filled(entry, replacement) for entry in text]
        if isinstance(text, str):
            for word in placeholders["words"]:
                text = text.replace(word, replacement)
        return text

    filled_values = dict(values)
    for key, value in values.items():
        replacement = related_value(placeholders["for"], key, values)
        is_filled = suggestions.plain(key) in placeholders["in"]
        if is_filled and isinstance(replacement, str) and replacement:
            filled_values[key] = filled(value, replacement)
    return filled_values


def _defaults(
    values: Mapping[str, Any], table: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the trainer's defaults for keys that the config, or an entry of a list,
    lacks.
    """
    defaults = {}
    for pattern, default in table.items():
        head, dot, last = pattern.rpartition("N.")
        prefix_pattern = re.compile(re.escape(head + dot).replace("N", r"\d+"))
        matches = [prefix_pattern.match(key) for key in values]
        prefixes = sorted({match[0] for match in matches if match})
        for prefix in prefixes:
            is_missing = prefix + last not in values
            if is_missing and conditions_hold(default.get("when", {}), prefix, values):
                defaults[prefix + last] = default
    return defaults


def _translate_key(
    key: str,
    values: Mapping[str, Any],
    rule: Mapping[str, Any],
    base: Mapping[str, str],
    folder: Path,
) -> TranslatedKey:
    """Apply a rule to a key.

    Args:
        key: the key.
        values: the values of all keys.
        rule: the key's rule.
        base: videotune's keys for the base model.
        folder: the config's folder, which paths are relative to.
    """
    value = values[key]
    notes = [rule.get("differs", rule.get("note", ""))]
    ours = {}
    is_empty = value in (None, "", [], {})
    if "to" in rule and (not is_empty or "empty" in rule):
        try:
            divisor = (
                related_value(rule["over"], key, values) if "over" in rule else None
            )
            translated_value = -(-value // divisor) if divisor else value
            if "with" in rule:
                names = rule["with"]
                related_keys = [names] if isinstance(names, str) else names
                related = [related_value(name, key, values) for name in related_keys]
                translated_value = [value, *related]
            ours = _convert(key, translated_value, rule, folder)
        except VideotuneError as error:
            notes.append(str(error))
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError):
            notes.append(f"videotune has no counterpart of {value!r}")

    if "base" in rule:
        ours |= base
        if not base:
            notes.append(
                "it names no base model that videotune trains: set base_model_name"
            )

    verdict = _verdict(key, value, ours, rule)
    if is_missing_file(value, rule, folder):
        verdict, notes = with_missing_file(verdict, notes, rule, base)

    return TranslatedKey(
        key=key,
        theirs=value,
        verdict=verdict,
        ours=ours,
        note="; ".join(filter(None, notes)),
        source=rule.get("source", ""),
    )


def _verdict(
    key: str, value: Any, ours: Mapping[str, Any], rule: Mapping[str, Any]
) -> str:
    for verdict in ("differs", "unknown"):
        if verdict in rule:
            return verdict
    if not ours:
        return "none"

    last_part = key.split(".")[-1]
    is_same = all(
        name.split(".")[-1] == last_part and our_value == value
        for name, our_value in ours.items()
    )
    return "same" if is_same else "translated"


def _convert(
    key: str, value: Any, rule: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return videotune's keys and values for a value.

    Keys of a dataset have the indices of the other trainer's: ``datasets.0_2.path``.
    """
    conversion = rule.get("as")
    if isinstance(conversion, dict):
        text = str(value).lower()
        converted = conversion[text if text in conversion else "*"]
    else:
        converted = CONVERSIONS[conversion](value, folder)

    names = rule["to"] if isinstance(rule["to"], list) else [rule["to"]]
    if converted is None:
        return {}
    our_values = converted if len(names) > 1 else [converted]

    dataset_prefix = f"datasets.{'_'.join(indices_in(key))}."
    ours = {}
    for name, our_value in zip(names, our_values, strict=False):
        if isinstance(our_value, float) and our_value.is_integer():
            our_value = int(our_value)
        ours[name.replace("datasets.", dataset_prefix)] = our_value
    return ours


def _accept(
    rows: list[TranslatedKey], base: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[TranslatedKey, ...]]:
    """Build the config from the values that videotune accepts.

    If two rows set the same key, the first one wins.

    Returns:
        The config, and the rows without what was not accepted.
    """
    wanted: dict[str, Any] = {}
    for row in reversed(rows):
        wanted.update(row.ours)

    source_keys: dict[str, str] = {}
    for row in rows:
        for key in row.ours:
            if not key.startswith("datasets."):
                source_keys[key] = key
    dataset_keys = [key for key in wanted if key not in source_keys]
    dataset_keys.sort(key=lambda key: (len(key), key))
    source_keys.update(_expand_datasets(dataset_keys, wanted))

    accepted, refusals = _try_keys(source_keys, wanted, spec_of_base(base))

    accepted_keys = {source_keys[key] for key in accepted}
    reasons = dict.fromkeys(
        dataset_keys,
        "no folder of clips belongs to it, or only one that was named before",
    )
    reasons.update(refusals)
    final_reasons = {
        key: text for key, text in reasons.items() if key not in accepted_keys
    }
    final_rows = tuple(_without_refused(row, wanted, final_reasons) for row in rows)
    return _nest(accepted), final_rows


def _expand_datasets(
    dataset_keys: Sequence[str], wanted: Mapping[str, Any]
) -> dict[str, str]:
    """Apply values for all datasets, or for some, to each dataset that has a folder.

    Args:
        dataset_keys: ``datasets.INDICES.NAME``, the most general first.
        wanted: the values of all keys.

    Returns:
        The keys of each dataset, with the most specific key that sets it.
    """
    # Each folder once: the most general key, which comes last here, wins.
    indices_of_folder = {}
    for key in reversed(dataset_keys):
        if key.endswith(".path"):
            indices_of_folder[str(wanted[key])] = key.split(".")[1]

    source_keys = {}
    for dataset in sorted(
        indices_of_folder.values(), key=lambda indices: (len(indices), indices)
    ):
        for key in dataset_keys:
            _, indices, name = key.split(".")
            applies = not indices or f"{dataset}_".startswith(f"{indices}_")
            if applies:
                source_keys[f"datasets.{dataset}.{name}"] = key
    return source_keys


def _try_keys(
    source_keys: Mapping[str, str], wanted: Mapping[str, Any], spec: ModelSpec | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Find the keys that resolve together.

    Returns:
        The accepted keys with their values, and the last reason for each key that was
        refused.
    """

    def position(group: list[str]) -> int:
        (key,) = group
        return RETRIED_LAST.index(key) + 1 if key in RETRIED_LAST else 0

    single_keys = sorted(([key] for key in source_keys), key=position)
    # All at once, then one by one; three times, because a key may need another one.
    groups = [list(source_keys), *single_keys, *single_keys, *single_keys]

    accepted = dict[str, Any]()
    refusals: dict[str, str] = {}
    for group in groups:
        candidate = accepted | {key: wanted[source_keys[key]] for key in group}
        if len(candidate) == len(accepted):
            continue
        try:
            resolve(_nest(candidate), {}, spec)
            accepted = candidate
        except VideotuneError as error:
            reason = f"videotune refuses it: {str(error).splitlines()[0]}"
            refusals |= {source_keys[key]: reason for key in group}
    return accepted, refusals


def _without_refused(
    row: TranslatedKey, wanted: Mapping[str, Any], reasons: Mapping[str, str]
) -> TranslatedKey:
    """Return a row without the keys that were not accepted, with the reasons in its
    note.
    """
    refused = {}
    for key, value in row.ours.items():
        if wanted[key] != value:
            refused[key] = f"videotune has only one: {wanted[key]!r}"
    for key in row.ours:
        if key in reasons:
            refused[key] = reasons[key]

    ours = {key: value for key, value in row.ours.items() if key not in refused}
    verdict = row.verdict
    if refused and not ours and verdict not in ("differs", "missing"):
        verdict = "none"
    note = "; ".join(filter(None, [row.note, *refused.values()]))
    return replace(row, ours=ours, verdict=verdict, note=note)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config from dotted keys; its datasets become a list."""
    config = nested_keys.unflatten(flat)
    if "datasets" in config:
        config["datasets"] = list(config["datasets"].values())
    return config
