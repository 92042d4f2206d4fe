"""A CUDA device that is not there, for tests: ``enable()`` before anything asks
``torch.cuda``.

Afterwards ``torch.device("cuda")`` works on a CPU build of torch, and the product's own
CUDA branches run unchanged. The card finds tensors of two devices in one call, races
between streams, memory that is freed while another stream uses it, bytes that are read
before their copy has arrived (they are NaN), and each place where the host waits;
``card.cpp`` has how. Kernels are the CPU's, so speed and rounding are not a card's. It
cannot be undone: each test has a process of its own.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from filelock import FileLock

SOURCE = Path(__file__).with_name("card.cpp")
FOLDER = "VIDEOTUNE_SIMCUDA"
"""The environment variable that names the folder of what was built (default: one of the
user's in the temporary files).
"""
ops: Any = torch.ops.simcuda


def build() -> Path:
    """The card as a library, built once for each version of torch and of the source.

    Takes about half a minute.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    folder = Path(
        os.environ.get(FOLDER) or Path(tempfile.gettempdir()) / f"simcuda-{os.getuid()}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(
        f"{torch.__version__} {sysconfig.get_platform()}".encode() + SOURCE.read_bytes()
    ).hexdigest()
    library = folder / f"card-{key[:16]}.so"
    with FileLock(folder / "lock"):  # workers of one test session build it once
        if not library.exists():
            half = library.with_suffix(".half")
            words = [
                "g++",
                "-O1",
                "-std=c++20",
                "-fPIC",
                "-shared",
                str(SOURCE),
                "-o",
                str(half),
            ]
            words += [
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            ]
            words += [f"-isystem{path}" for path in include_paths()] + [
                f"-L{path}" for path in library_paths()
            ]
            try:
                subprocess.run(
                    [*words, "-ltorch", "-ltorch_cpu", "-lc10"],
                    check=True,
                    capture_output=True,
                    text=True,
                )
            except FileNotFoundError:
                sys.exit(
                    "the stand-in card is C++, and there is no g++ to build it with: apt-get install g++"
                )
            except subprocess.CalledProcessError as error:
                sys.exit(
                    f"{SOURCE.name} cannot be built with torch {torch.__version__}:\n{error.stderr[:4000]}"
                )
            half.replace(library)
    return library


def _names(generator: torch.Generator) -> dict[str, Any]:
    """What ``torch.cuda`` is asked for."""
    here = torch.accelerator
    facts = SimpleNamespace(
        name="stand-in card",
        total_memory=here.get_memory_info()[1],
        major=9,
        minor=0,
        multi_processor_count=1,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "init": None,
    }
    answers |= {
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "is_bf16_supported": True,
    }
    answers |= {
        "get_device_properties": facts,
        "get_device_name": facts.name,
        "get_device_capability": (9, 0),
    }
    answers |= {"empty_cache": None, "is_current_stream_capturing": False}
    functions = {
        name: lambda *_, _answer=answer, **__: _answer
        for name, answer in answers.items()
    }
    return functions | {
        "synchronize": here.synchronize,
        "memory_allocated": here.memory_allocated,
        "memory_reserved": here.memory_reserved,
        "max_memory_allocated": here.max_memory_allocated,
        "max_memory_reserved": here.max_memory_reserved,
        "reset_peak_memory_stats": here.reset_peak_memory_stats,
        "mem_get_info": here.get_memory_info,
        "current_stream": here.current_stream,
        "default_stream": lambda *_: stream(0),
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "device": lambda *_: nullcontext(),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda *_: generator.get_state(),
        "set_rng_state": lambda state, *_: generator.set_state(state),
        "set_sync_debug_mode": lambda mode: ops.may_wait(mode not in ("error", 2)),
        "OutOfMemoryError": torch.OutOfMemoryError,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "default_generators": (generator,),
        "_initialized": True,
    }


def stream(number: int) -> torch.Stream:
    """The card's stream of this number; 0 is the default one."""
    return torch.Stream(stream_id=number, device_index=0, device_type=1)


def _resize(
    storage: torch.UntypedStorage, size: int, own: Any = torch.UntypedStorage.resize_
) -> Any:
    return (
        ops.resize(storage._cdata, size)
        if storage.device.type == "cuda"
        else own(storage, size)
    )


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """The card does not wait, as ``card.cpp`` says of this fault."""
    ops.plant(fault)
    try:
        yield
    finally:
        ops.plant("")


def enable() -> None:
    """Make ``torch.cuda`` the stand-in card."""
    torch.ops.load_library(str(build()))
    ops.enable()
    torch.cuda._lazy_init = lambda: None
    for name, value in _names(ops.generator()).items():
        setattr(torch.cuda, name, value)
    torch.accelerator.empty_host_cache = ops.empty_host_cache  # type: ignore[assignment]
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
    torch.distributed.Backend.default_device_backend_map["cuda"] = "gloo"
    torch._C._cuda_getCurrentRawStream = lambda *_: (
        0
    )  # some libraries ask when they are imported


@dataclass
class Watched:
    """What was wrong within, and the places where the host waited."""

    errors: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Watched]:
    """What the card finds within the block."""
    ops.errors(), ops.waits()
    found = Watched()
    try:
        yield found
    finally:
        found.errors += ops.errors()
        found.waits += ops.waits()
