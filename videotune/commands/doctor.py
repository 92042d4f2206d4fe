"""``doctor``: what is there, and what each missing part would give."""

import os
import platform
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from videotune._version import __version__
from videotune.console import size
from videotune.files import read_json
from videotune.memory.accelerator import has_bf16, local_device, overlaps


def needed() -> list[str]:
    """The names of the packages that videotune is installed with."""
    return [
        re.split(r"[^\w.-]", one)[0]
        for one in requires("videotune") or ()
        if "extra ==" not in one
    ]


def machine() -> tuple[list[list[str]], list[str]]:
    """Rows of (what, found, note) about the machine and the packages, and the needed packages that are missing."""
    rows = [
        ["videotune", __version__, ""],
        ["python", platform.python_version(), sys.executable],
    ]
    rows += [["system", f"{platform.system()} {platform.machine()}", f"{os.cpu_count()} cores"]]
    rows += [["disk here", f"{size(shutil.disk_usage(Path.cwd()).free)} free", str(Path.cwd())]]
    missing = []
    for name in needed():
        try:
            rows.append([name, version(name), ""])
        except PackageNotFoundError:
            missing.append(name)
            rows.append([name, "MISSING", f"pip install {name}"])
    return rows + ([] if "torch" in missing else _devices()), missing


def _devices() -> list[list[str]]:
    import torch

    kind = local_device().type
    if kind == "cpu":
        note = "trains on the CPU: the toy base and tiny models in minutes, real models not in reasonable time"
        return [["accelerator", "none", note]]
    rows = []
    module = torch.get_device_module(kind)
    for device in (
        torch.device(kind, index) for index in range(torch.accelerator.device_count())
    ):
        torch.ones(8, device=device).sum().item()
        found = "in the host's memory"
        if overlaps(device):
            found = f"{module.get_device_name(device)}, {size(torch.accelerator.get_memory_info(device)[1])}"
        rows.append(
            [
                str(device),
                found,
                "bf16" if has_bf16(device) else "no bf16: use train_dtype FLOAT_32",
            ]
        )
    return rows


COLUMNS, KINDS = read_json(Path(__file__).with_name("devices.json")).values()
"""By kind of device: training, bfloat16, weight streaming, weight_dtype, several processes, what the project has run."""


def devices() -> list[list[str]]:
    """Rows of COLUMNS: of each kind of device whether it is here, what works on it, and what of it has ever been run."""
    import torch

    kind = local_device().type.upper()
    here = {"CPU", "ROCm" if kind == "CUDA" and torch.version.hip else kind}
    return [[name, "yes" if name in here else "no", *what] for name, what in KINDS.items()]
