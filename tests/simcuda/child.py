"""Processes with the stand-in card, forked from one that has imported the libraries.

Importing them anew takes each process five seconds. The server, ``python -m
tests.simcuda.child``, reads a request a line, as JSON: what each process of it is told.
It answers with their exit codes, as a list.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

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
        "diffusers.models.autoencoders.autoencoder_kl_wan",
        "diffusers.models.transformers.transformer_wan",
        "diffusers.pipelines.wan.pipeline_wan",
        "transformers.models.t5.modeling_t5",
        "transformers.models.umt5.modeling_umt5",
    ),
    *("videotune.commands.train", "tests.simcuda.lab"),
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
    target = f"{function.__module__}:{function.__name__}"
    environment = dict(os.environ)
    if count > 1:
        environment |= {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank-{rank}" for rank in range(count)]
        orders = []
        for rank, file in enumerate(files):
            own = {"RANK": str(rank)} if count > 1 else {}
            order = {"target": target, "environment": environment | own}
            orders.append({**order, "arguments": arguments, "output": file})
        codes = ask(orders)
        outputs = [file.read_text(errors="replace") for file in files]

    results = []
    for code, out in zip(codes, outputs, strict=True):
        *output, last = ["", *out.splitlines()]
        if code or not last.startswith(RESULT):
            lines = "\n".join([*output, last][-60:])
            pytest.fail(f"{target} ended with {code}:\n{lines}", pytrace=False)
        results.append(json.loads(last.removeprefix(RESULT)))
    return results


@cache
def server() -> subprocess.Popen[str]:
    """The process that has imported the libraries; it ends with this one."""
    # bitsandbytes would compile its kernels for half a minute
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(orders: list[dict[str, Any]]) -> list[int]:
    """The exit codes of processes of the server that do this at the same time."""
    pipes = server()
    assert pipes.stdin is not None
    assert pipes.stdout is not None
    pipes.stdin.write(f"{json.dumps(orders, default=str)}\n")
    pipes.stdin.flush()
    return list(json.loads(pipes.stdout.readline()))


def serve() -> None:
    """Import the libraries, then fork for each order until nobody asks any more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # no library's words among them
    import torch

    from tests.simcuda import card  # noqa: F401

    torch.set_num_threads(1)
    for library in LIBRARIES:
        import_module(library)
    gc.collect()
    gc.freeze()  # a fork has little to look through

    for line in sys.stdin:
        children = []
        for order in json.loads(line):
            child = os.fork()
            if child == 0:
                work(**order)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        codes = [os.waitstatus_to_exitcode(status) for status in statuses]
        print(json.dumps(codes), file=answers, flush=True)


def work(
    target: str, arguments: list[Any], environment: dict[str, str], output: str
) -> NoReturn:
    """Make the card, call the function, print what it returns, and end the process."""
    with open(os.devnull) as nothing, open(output, "w") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        from tests.simcuda import card

        card.enable()
        module, _, name = target.partition(":")
        result = getattr(import_module(module), name)(*arguments)
        print(f"\n{RESULT}{json.dumps(result)}")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
