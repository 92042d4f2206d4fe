"""A process with the stand-in card: ``python -m tests.simcuda.child MODULE:FUNCTION ARGUMENTS`` prints the result.

Arguments are a list and the result a value, both as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULT = "RESULT "
LIBRARIES = (
    *("diffusers", "peft", "bitsandbytes", "diffusers.loaders.peft", "transformers.modeling_layers"),
    *("diffusers.models.transformers.transformer_wan", "transformers.models.t5.modeling_t5"),
)
"""Imported before there is a card: some look for the kernels of a real one."""


def on_card(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns for these arguments in a process with the card; its output where it fails."""
    words = [f"{function.__module__}:{function.__name__}", json.dumps(arguments, default=str)]
    command = [sys.executable, "-m", __name__, *words]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}  # bitsandbytes would compile its kernels for half a minute
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    *output, last = ["", *done.stdout.splitlines()]
    if done.returncode or not last.startswith(RESULT):
        pytest.fail(f"{words[0]} ended with {done.returncode}:\n" + "\n".join([*output, last][-60:]), pytrace=False)
    return json.loads(last.removeprefix(RESULT))


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
