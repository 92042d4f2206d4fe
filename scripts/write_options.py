"""Prints docs/options.md from the config's own schema: python scripts/write_options.py
> docs/options.md.
"""

import sys

from videotune.config.applies import applies_when
from videotune.config.explain import default, values
from videotune.config.schema import leaves

HEAD = """\
# Options

Every key of a config, as `videotune presets keys` lists them. This page is written by `scripts/write_options.py` from
`videotune/config/schema.py`; `tests/docs/test_options_page.py` holds the two together. How a config is put together from
files, presets and `--set` words is told in [config.md](config.md).

A dot is a level of the config: `lora.rank` is `{"lora": {"rank": 16}}` in a file and `--set lora.rank=16` on the command
line. `datasets` is a list of such objects. A default of `null` means that the value comes from elsewhere; the meaning
says from where. Words in capitals may be written in any case. Where the meaning ends with a
condition, the key acts only under it: a key that you set and that cannot act is refused, or `plan` and `train` say that it
is unused.
"""


def page() -> str:
    """The whole page."""
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for name, field in leaves().items():
        meaning = field.description.replace("|", "\\|")
        condition = applies_when(name)
        if condition:
            meaning += f". *Applies when {condition}.*"
        rows.append(f"| `{name}` | {default(field)} | {values(field)} | {meaning} |")
    return "\n".join([HEAD, *rows]) + "\n"


if __name__ == "__main__":
    sys.stdout.buffer.write(page().encode("utf-8"))  # the same bytes in every locale
