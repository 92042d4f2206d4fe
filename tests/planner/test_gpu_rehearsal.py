"""benchmarks/gpu.py is for a card; here it is rehearsed on the CPU with a tiny model,
without PyAV and bitsandbytes.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
WITHOUT = """
import runpy, sys
sys.modules["av"] = sys.modules["bitsandbytes"] = None  # importing either fails
script = sys.argv.pop(1)
sys.argv[0] = script
sys.path.insert(0, script.rpartition("/")[0])
runpy.run_path(script, run_name="__main__")
"""


def rehearsed(out: Path, *words: str) -> dict:
    """What a rehearsal writes."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable,
        "-c",
        WITHOUT,
        str(SCRIPT),
        *words,
        "--tiny",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_and_all_ways_have_the_same_losses(
    tmp_path: Path,
) -> None:
    out = tmp_path / "gpu.json"
    found = rehearsed(
        out,
        "memory",
        "streaming",
        "published",
        "equal",
        "sync",
        "quantised",
        "matmul8",
    )
    assert len(found["memory 5b 16 GB"]["losses"]) == 3
    assert all(math.isfinite(loss) for loss in found["memory 5b 16 GB"]["losses"])
    memory = found["memory 5b 16 GB"]
    assert memory["layer_offload_fraction"] > 0
    ways = found["streaming 5b 5k tokens"]
    assert ways["resident"]["ratio"] == 1
    assert ways["streamed"]["ratio"] == pytest.approx(
        ways["streamed"]["seconds"] / ways["resident"]["seconds"], rel=0.02
    )
    assert found["published wan 14b streamed"]["launches"] > 500
    packed = found["quantised 5b"]
    assert set(packed) == {"row_seconds"} | {
        f"{way} {kind}"
        for way in ("resident", "streamed")
        for kind in ("auto", "FLOAT_8", "INT_8")
    }
    for kind in ("FLOAT_8", "INT_8"):
        assert (
            packed[f"resident {kind}"]["planned_allocated_gib"]
            < packed["resident auto"]["planned_allocated_gib"]
        )
    products = found["matmul8 5b step"]
    assert set(products) == {"row_seconds", "auto", "stored", "FLOAT_8", "INT_8"}
    assert (
        len({tuple(products[kind]["losses"]) for kind in ("auto", "FLOAT_8", "INT_8")})
        == 3
    )
    layer = found["matmul8 5b layers, 64 tokens"]["in"]
    assert 0 < layer["INT_8"]["gradient_error"] < layer["FLOAT_8"]["gradient_error"]
    for kind in ("as usual", "deterministic"):
        losses = found["equal 1.3b"][kind]
        assert len(set(losses["losses"])) == 5, "it learns"
        assert set(losses["largest_difference"].values()) == {0.0}
    assert found["machine"]["device"] == "CPU"
    assert rehearsed(out, "memory", "sync") == found, "what is there is not done again"


@pytest.mark.long
def test_rates_are_read_with_compiled_blocks_too(tmp_path: Path) -> None:
    found = rehearsed(tmp_path / "gpu.json", "rate")["rate wan2.1-t2v-1.3b"]
    assert 0 < found["plain"]["reached"] < 1
    assert 0 < found["compiled"]["reached"] < 1
