"""What is freed stays with the process once that is asked for."""

import subprocess
import sys

import pytest

LOOP = """
import resource, torch
from pathlib import Path
from videotune.memory.host_memory import keep_freed_memory
torch.set_num_threads(1)
kept = keep_freed_memory() if {keep} else None
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before = resident()
block = torch.ones(1 << 24)  # 64 MB, written to
del block
print(kept, (resident() - before) >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc; elsewhere nothing is changed")
def test_freed_memory_is_kept() -> None:
    def left(keep: bool) -> tuple[str, int]:
        command = [sys.executable, "-c", LOOP.format(keep=keep)]
        kept, megabytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return kept, int(megabytes)

    kept, with_it = left(True)
    _, without = left(False)
    assert without < 32
    if kept == "True":
        assert with_it >= 60
    else:
        assert with_it < 32, "another C library is left as it is"
