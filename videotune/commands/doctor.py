"""``doctor``: what is there, and what each missing part would give."""

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from videotune._version import __version__
from videotune.console import size

NEEDED = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "av",
    "pydantic",
    "typer",
    "rich",
    "ftfy",
)


def machine() -> tuple[list[list[str]], list[str]]:
    """Rows of (what, found, note) about the machine and the packages, and the needed packages that are missing."""
    rows = [["videotune", __version__, ""], ["python", platform.python_version(), sys.executable]]
    rows += [["system", f"{platform.system()} {platform.machine()}", f"{os.cpu_count()} cores"]]
    rows += [["disk here", f"{size(shutil.disk_usage(Path.cwd()).free)} free", str(Path.cwd())]]
    missing = []
    for name in NEEDED:
        try:
            rows.append([name, version(name), ""])
        except PackageNotFoundError:
            missing.append(name)
            rows.append([name, "MISSING", f"pip install {name}"])
    return rows + ([] if "torch" in missing else _devices()), missing


def _devices() -> list[list[str]]:
    import torch

    if not torch.cuda.is_available():
        note = "trains on the CPU: the toy base and tiny models in minutes, real models not in reasonable time"
        return [["CUDA", "none", note]]
    rows = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        torch.ones(8, device=f"cuda:{index}").sum().item()
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        note = "bf16" if native else "no bf16: use train_dtype FLOAT_32"
        rows.append([f"CUDA {index}", f"{facts.name}, {size(facts.total_memory)}", note])
    return rows
