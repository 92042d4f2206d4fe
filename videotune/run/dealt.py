"""A run whose processes share its weights out (``sharding`` FULL): what they must do together, and what cannot be shared."""

from __future__ import annotations

from videotune.config.schema import Config
from videotune.train.crew import Crew


def sharded(config: Config, crew: Crew) -> bool:
    """Whether no process has the whole network: then all run it in step, also for readings and previews."""
    return config.sharding == "FULL" and crew.size > 1
