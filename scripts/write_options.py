"""Prints docs/options.md from the config's own schema: python scripts/write_options.py > docs/options.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from videotune.config.schema import leaves

SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"), ("min_length", "length ≥"))
WORDS = {bool: "true, false", int: "integer", float: "number", str: "text"}

HEAD = """\
# Options

Every key of a config, as `videotune presets keys` lists them. This page is written by `scripts/write_options.py` from
`videotune/config/schema.py`; `tests/docs/test_options_page.py` holds the two together. How a config is put together from
files, presets and `--set` words is told in [config.md](config.md).

A dot is a level of the config: `lora.rank` is `{"lora": {"rank": 16}}` in a file and `--set lora.rank=16` on the command
line. `datasets` is a list of such objects. A default of `null` means that the value comes from elsewhere; the meaning
says from where. Words in capitals may be written in any case.
"""


def kinds(annotation: Any) -> Iterator[str]:
    """What a value may be, in words; None is left out, since it is the same as leaving out the key."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        yield ", ".join([" or ".join(kinds(inner)), *limits(metadata)])
    elif origin in (Union, UnionType):
        for inner in get_args(annotation):
            yield from kinds(inner)
    elif origin is Literal:
        yield ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in get_args(annotation))
    elif origin is list:
        yield f"list of {' or '.join(kinds(get_args(annotation)[0]))}"
    elif annotation is not type(None):
        yield WORDS[annotation]


def limits(metadata: Iterable[Any]) -> list[str]:
    """The range that a value must lie in."""
    items = [part for item in metadata for part in getattr(item, "metadata", [item])]
    found = {name: getattr(item, name) for item in items for name, _ in SIGNS if hasattr(item, name)}
    return [f"{sign} {found[name]:g}" for name, sign in SIGNS if name in found]


def values(field: Any) -> str:
    """What a value may be: its kind and its range."""
    return ", ".join([" or ".join(kinds(field.annotation)), *limits(field.metadata)])


def default(field: Any) -> str:
    """The default as JSON would say it."""
    if field.is_required():
        return "required"
    return f"`{json.dumps(field.get_default(call_default_factory=True))}`"


def page() -> str:
    """The whole page."""
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for name, field in leaves().items():
        meaning = field.description.replace("|", "\\|")
        rows.append(f"| `{name}` | {default(field)} | {values(field)} | {meaning} |")
    return "\n".join([HEAD, *rows]) + "\n"


if __name__ == "__main__":
    sys.stdout.buffer.write(page().encode("utf-8"))  # the same bytes in every locale
