"""``presets``: what comes with the package, and every key there is."""

from __future__ import annotations

import json
import re

from videotune.config.load import flatten, preset_about, preset_named, preset_names, preset_reasons, read_preset
from videotune.config.schema import leaves
from videotune.console import echo, print_table
from videotune.errors import DONE


def list_presets() -> int:
    """A line for each preset: its model, what trains, and the memory of the cards that it is for."""
    rows = []
    for name in preset_names():
        settings, about = read_preset(name), preset_about(name)
        card = re.search(r"cards of (\d+ GB)", about)
        method = {"FINE_TUNE": "all weights", "EMBEDDING": "new tokens"}.get(
            settings.get("training_method", ""), "LoRA"
        )
        rows.append([name, re.split(", |: ", about)[0], method, card[1] if card else "any"])
    print_table("presets", ["preset", "model", "trains", "card"], rows)
    print("Memory is calculated, see `videotune plan`. `videotune presets show NAME`: every setting, and why.")
    return DONE


def show_preset(name: str) -> int:
    """A preset as a config that can be saved and changed; beside it, on standard error, the reason of each value."""
    print(json.dumps(read_preset(name), indent=2, ensure_ascii=False))
    values, reasons = flatten(read_preset(name)), preset_reasons(name)
    echo(f"{preset_named(name)}: {preset_about(name)}")
    for key, value in values.items():
        echo(f"  {key} {json.dumps(value)}: {reasons.get(key, 'no reason is given')}")
    return DONE


def list_keys() -> int:
    """Every key with its default and its meaning."""
    rows = []
    for name, field in leaves().items():
        default = "required" if field.is_required() else field.get_default(call_default_factory=True)
        rows.append([name, "" if default is None else default, field.description])
    print_table("keys", ["key", "default", "meaning"], rows)
    return DONE
