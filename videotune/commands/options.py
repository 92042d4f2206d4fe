"""``config``: the schema of a config, and what one key means."""

from __future__ import annotations

import json

from videotune.config.explain import explain, json_schema
from videotune.errors import DONE


def show_schema() -> int:
    """The JSON Schema of a config file."""
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return DONE


def explain_key(key: str, *, as_json: bool = False) -> int:
    """A key's meaning, values, default with its reason, and what the guide advises."""
    facts = explain(key)
    if as_json:
        print(json.dumps({"key": key} | dict(facts), indent=2, ensure_ascii=False))
        return DONE
    wide = max(len(what) for what, _ in facts)
    print(key)
    for what, text in facts:
        print(f"  {what:<{wide}}  {text}")
    return DONE
