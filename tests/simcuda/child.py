"""A process with the stand-in card: ``python -m tests.simcuda.child MODULE:FUNCTION
ARGUMENTS`` prints the result.

Arguments are a list and the result a value, both as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher import free_port

ROOT = Path(__file__).parents[2]
RESULT = "RESULT "
LIBRARIES = (
    *(
        "diffusers",
        "peft",
        "bitsandbytes",
        "diffusers.loaders.peft",
        "transformers.modeling_layers",
    ),
    *(
        "diffusers.models.transformers.transformer_wan",
        "transformers.models.t5.modeling_t5",
    ),
)
"""Imported before there is a card: some look for the kernels of a real one."""


def on_card(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns for these arguments in a process with the
    card; its output where it fails.
    """
    return on_cards(1, function, *arguments)[0]


def on_cards(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The same of so many processes, each with a card of its own, told of each other as
    torchrun does.
    """
    words = [
        f"{function.__module__}:{function.__name__}",
        json.dumps(arguments, default=str),
    ]
    command = [sys.executable, "-m", __name__, *words]
    environment = os.environ | {
        "TORCHDYNAMO_DISABLE": "1"
    }  # bitsandbytes would compile its kernels for half a minute
    if count > 1:
        environment |= {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
    told = {
        "cwd": ROOT,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    each = [
        environment | ({"RANK": str(rank)} if count > 1 else {})
        for rank in range(count)
    ]
    started: list[subprocess.Popen[str]] = [
        subprocess.Popen(command, env=own, **told) for own in each
    ]  # type: ignore[call-overload]
    with ThreadPoolExecutor(
        count
    ) as readers:  # a full pipe would hold one up, and so the others
        outputs = [out for out, _ in readers.map(subprocess.Popen.communicate, started)]
    results = []
    for process, out in zip(started, outputs, strict=True):
        *output, last = ["", *out.splitlines()]
        if process.returncode or not last.startswith(RESULT):
            lines = "\n".join([*output, last][-60:])
            pytest.fail(
                f"{words[0]} ended with {process.returncode}:\n{lines}", pytrace=False
            )
        results.append(json.loads(last.removeprefix(RESULT)))
    return results


def main(target: str, arguments: str) -> None:
    """Make the card, call the function, print what it returns."""
    import torch

    from tests.simcuda import card

    torch.set_num_threads(1)
    for library in LIBRARIES:
        import_module(library)
    card.enable()
    module, _, name = target.partition(":")
    result = getattr(import_module(module), name)(*json.loads(arguments))
    print(f"\n{RESULT}{json.dumps(result)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
