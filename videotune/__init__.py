"""videotune fine-tunes video diffusion models on your own clips, and tells the truth about the run.

The functions of the Python API are those of the command line: each returns what its command prints.
"""

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from videotune._version import __version__ as __version__

if TYPE_CHECKING:
    from videotune.commands.cache import cache as cache
    from videotune.commands.caption import caption as caption
    from videotune.commands.check import check as check
    from videotune.commands.compare import compare as compare
    from videotune.commands.export import export as export
    from videotune.commands.plan import plan as plan
    from videotune.commands.report import report as report
    from videotune.commands.sample import sample as sample
    from videotune.commands.train import train as train
    from videotune.config.schema import Config as Config

# Products of matrices on the CPU have the same bits wherever their operands lie: without it a weight that is mapped from a
# file and its copy elsewhere round differently on some processors. MKL reads it at its first call.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

logging.getLogger("bitsandbytes").setLevel(
    logging.ERROR
)  # on some CPUs it asks for a package that is not needed

COMMANDS = (
    "cache",
    "caption",
    "check",
    "compare",
    "export",
    "plan",
    "report",
    "sample",
    "train",
)


def __getattr__(name: str) -> Any:
    """A function of the API, imported at its first use: ``import videotune`` loads no torch."""
    if name in COMMANDS:
        return getattr(getattr(import_module("videotune.commands"), name), name)
    if name == "Config":
        return import_module("videotune.config.schema").Config
    raise AttributeError(f"module 'videotune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*COMMANDS, "Config", "__version__"]
