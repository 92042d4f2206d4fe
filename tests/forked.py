"""Real processes that start at once: forked from a server that has imported everything and computed nothing.

Starting Python and its libraries anew for each would take ten times as long as what is tested. There is one such server in
a test session, whoever asks first: multiprocessing knows no more.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")


def preload() -> None:
    """What every process of a run imports."""
    import av
    import diffusers
    import peft
    import safetensors.torch
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import transformers
    import transformers.models.t5.tokenization_t5

    import videotune.cli.main
    import videotune.families.wan
    import videotune.report.html
    import videotune.run.begin_from
    import videotune.run.train

    torch.set_num_threads(1)
    _ = (
        av,
        diffusers.WanPipeline,
        diffusers.AutoencoderKLWan,
        transformers.UMT5EncoderModel,
        peft.LoraConfig,
        safetensors.torch,
        videotune,
    )


if multiprocessing.current_process().name == "MainProcess" and __name__ == "forked" and "pytest" not in sys.modules:
    preload()  # this is the server


def serve() -> None:
    """Start the server, once, where it finds this file: Python 3.11 tells it of no path but its environment."""
    CONTEXT.set_forkserver_preload(["forked"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def start(target: Callable[..., None], *given: Any) -> ForkServerProcess:
    """``target(*given)`` in a process of its own."""
    serve()
    process = CONTEXT.Process(target=target, args=given)
    process.start()
    return process


def nothing() -> None:
    """What a process does that is only to wake its server."""


def wake() -> None:
    """Wait until the server has imported everything."""
    start(nothing).join()
