"""``lora``: inspect and convert adapter files of any program."""

from videotune.exporter.lora_inspect import inspect, summary
from videotune.exporter.lora_tools import Target, convert, extract, merge, resize

__all__ = ["Target", "convert", "extract", "inspect", "merge", "resize", "summary"]
