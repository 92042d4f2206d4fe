"""Fine-tune video diffusion models on your own clips.

The Python API has the functions of the command line: each returns what its command
prints.
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

# Matrix products on the CPU then have the same bits at any address. Without it, a
# weight mapped from a file and its copy round differently on some processors. MKL reads
# it at its first call.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# on some CPUs bitsandbytes asks for a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

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
    """Import a function of the API at its first use: ``import videotune`` loads no
    torch.
    """
    if name in COMMANDS:
        return getattr(import_module(f"videotune.commands.{name}"), name)
    if name == "Config":
        return import_module("videotune.config.schema").Config
    raise AttributeError(f"module 'videotune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*COMMANDS, "Config", "__version__"]
