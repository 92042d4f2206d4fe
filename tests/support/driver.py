"""A library in the place of NVIDIA's: two cards that nobody computes on."""

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


def build_driver(folder: Path, init: int = 0) -> None:
    """Compile the library into a folder, which LD_LIBRARY_PATH then names.

    Args:
        folder: where it goes.
        init: what its start returns; 0: it works.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler")
    (folder / "nvml.c").write_text(LIBRARY)
    library = folder / "libnvidia-ml.so.1"
    options = ["-shared", "-fPIC", "-w", f"-DINIT={init}"]
    command = [compiler, *options, "-o", library, folder / "nvml.c"]
    subprocess.run(command, check=True)
