"""``lora``: inspect and convert adapter files of any program."""

from videotune.exporter.lora_extract import extract
from videotune.exporter.lora_inspect import inspect, summary_lines
from videotune.exporter.lora_tools import convert, merge, resize

__all__ = [
    "convert",
    "extract",
    "inspect",
    "merge",
    "resize",
    "summary_lines",
]
