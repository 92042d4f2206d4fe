"""``doctor``: show what is installed, and what each missing part is for."""

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
from videotune.memory.accelerator import (
    has_bf16,
    has_streams,
    local_device,
    needs_float16,
)
from videotune.presets.shipped import preset_card, preset_names
from videotune.text import memory_size


def needed() -> list[str]:
    """Return the names of the packages that videotune needs."""
    requirements = requires("videotune") or []
    always = [
        requirement for requirement in requirements if "extra ==" not in requirement
    ]
    return [re.split(r"[^\w.-]", requirement)[0] for requirement in always]


def machine() -> tuple[list[list[str]], list[str]]:
    """Return rows of (part, version, note) on the machine and its packages, and the
    needed packages that are missing.
    """
    free = size(shutil.disk_usage(Path.cwd()).free)
    rows = [
        ["videotune", __version__, ""],
        ["python", platform.python_version(), sys.executable],
        [
            "system",
            f"{platform.system()} {platform.machine()}",
            f"{os.cpu_count()} cores",
        ],
        ["disk here", f"{free} free", str(Path.cwd())],
    ]
    missing = []
    for name in needed():
        try:
            rows.append([name, version(name), ""])
        except PackageNotFoundError:
            missing.append(name)
            rows.append([name, "MISSING", f"pip install {name}"])
    if "torch" not in missing:
        rows += _devices()
    return rows, missing


def _devices() -> list[list[str]]:
    import torch

    kind = local_device().type
    if kind == "cpu":
        note = "trains on the CPU: the toy base and tiny models in minutes, real models not in reasonable time"
        return [["accelerator", "none", note]]

    rows = []
    module = torch.get_device_module(kind)
    for index in range(torch.accelerator.device_count()):
        device = torch.device(kind, index)
        torch.ones(8, device=device).sum().item()
        memory = "in the host's memory"
        if has_streams(device):
            _, total = torch.accelerator.get_memory_info(device)
            memory = f"{module.get_device_name(device)}, {memory_size(total)}"
        note = "bf16"
        if not has_bf16(device):
            dtype = "FLOAT_16" if needs_float16(device) else "FLOAT_32"
            note = f"no bf16: train_dtype is {dtype}"
        rows.append([str(device), memory, note])
    return rows


def can_train() -> str:
    """Return what this machine can train, in a sentence."""
    import torch

    device = local_device()
    if device.type == "cpu":
        return (
            "This machine has no card that videotune uses: it trains the toy base model "
            "(--preset toy) and tiny models in minutes. A real model needs a card of "
            "8 GB or more."
        )
    if not has_streams(device):
        return (
            f"This machine trains on {device.type}, which shares the host's memory: "
            "small models only, see the table."
        )

    _, total = torch.accelerator.get_memory_info(device)
    gigabytes = round(total / 2**30)
    classes = {name: preset_card(name) for name in preset_names()}
    fitting = [name for name, card in classes.items() if card and card <= gigabytes]
    if not fitting:
        return (
            f"This card of {gigabytes} GB is smaller than those of all presets (8 GB)."
        )
    largest = max(fitting, key=lambda name: classes[name] or 0)
    return (
        f"This card of {gigabytes} GB trains {len(fitting)} of {len(classes)} presets, "
        f'such as "{largest}"; `videotune plan CLIPS --preset NAME` answers for your clips.'
    )


COLUMNS, KINDS = read_json(Path(__file__).with_name("devices.json")).values()
"""For each kind of device: training, bfloat16, weight streaming, weight_dtype, several
processes, and what has been run.
"""


def devices() -> list[list[str]]:
    """Return rows of COLUMNS: for each kind of device whether it is here, what works on
    it, and what has been run.
    """
    import torch

    kind = local_device().type.upper()
    present = {"CPU", "ROCm" if kind == "CUDA" and torch.version.hip else kind}
    rows = []
    for name, columns in KINDS.items():
        rows.append([name, "yes" if name in present else "no", *columns])
    return rows
