"""Cards as the driver's library reports them, through a library that a test compiles:
the real path of ctypes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = """
#include <stdio.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory2;
typedef struct { unsigned int gpu, memory; } rates;
int nvmlInit_v2(void) { return INIT; }
int nvmlInitWithFlags(unsigned flags) { return INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
  snprintf(name, size, "Card %ld", (long)handle - 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory *found) {
  found->total = 24000000000ULL; found->used = 6000000000ULL; found->free = 18000000000ULL; return 0; }
int nvmlDeviceGetUtilizationRates(void *handle, rates *found) { found->gpu = 0; found->memory = 1; return 0; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *found) { *found = 61; return 0; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *found) { *found = 250500; return (long)handle == 2 ? 3 : 0; }
"""
ASK = "import json; from videotune.studio.gpu import list_gpus; print(json.dumps([one.__dict__ for one in list_gpus()]))"


def read_cards(folder: Path, init: int = 0) -> list[dict[str, object]]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler")
    (folder / "nvml.c").write_text(LIBRARY)
    library = folder / "libnvidia-ml.so.1"
    words = [
        "-shared",
        "-fPIC",
        "-w",
        f"-DINIT={init}",
        "-o",
        library,
        folder / "nvml.c",
    ]
    subprocess.run([compiler, *words], check=True)
    found = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    printed = subprocess.run(
        [sys.executable, "-c", ASK],
        env=found,
        check=True,
        capture_output=True,
        text=True,
    )
    return list(json.loads(printed.stdout))


def test_each_card_tells_its_memory_use_temperature_and_power(tmp_path: Path) -> None:
    first, second = read_cards(tmp_path)
    own = {
        "index": 0,
        "name": "Card 0",
        "memory_used": 6_000_000_000,
        "memory_total": 24_000_000_000,
        "utilization": 0,
        "celsius": 61,
    }
    assert first == own | {"watts": 250.5}
    assert second == own | {"index": 1, "name": "Card 1", "watts": None}, (
        "what one card does not tell is none"
    )


def test_a_driver_that_fails_has_no_cards(tmp_path: Path) -> None:
    assert read_cards(tmp_path, init=9) == []
