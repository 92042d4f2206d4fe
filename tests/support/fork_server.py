"""Real processes that start at once: forked from a server that has imported everything
and computed nothing.

Starting Python and its libraries anew for each would take ten times as long as what is
tested. There is one such server in a test session, since multiprocessing knows no more:
whoever needs one takes this.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

IMPORTED = (
    *(
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "safetensors.torch",
        "av",
        "accelerate",
        "peft",
    ),
    *(
        "transformers.models.umt5.modeling_umt5",
        "transformers.models.t5.tokenization_t5",
    ),
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "diffusers.models.transformers.transformer_wan",
    "diffusers.pipelines.wan.pipeline_wan",
    *("rich.console", "rich.table"),
    *("videotune.cli.main", "videotune.models.wan", "videotune.reporter.build"),
    *("videotune.trainer.init_from", "videotune.commands.train"),
    "tests.support.frozen_imports",
)
"""Modules that every process of a run imports, and after them the one that freezes them.

The server says nothing of one that it cannot find.
"""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(IMPORTED))


def start(target: Callable[..., None], *given: Any) -> ForkServerProcess:
    """``target(*given)`` in a process of its own."""
    process = CONTEXT.Process(target=target, args=given)
    process.start()
    return process


def nothing() -> None:
    """What a process does that is only to wake its server."""


def wake() -> None:
    """Wait until the server has imported everything."""
    start(nothing).join()
