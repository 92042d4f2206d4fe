"""Cards as the driver's library reports them, through a library that a test compiles:
the real path of ctypes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.driver import build_driver
from tests.support.reports import visible_text
from videotune.studio import web
from videotune.studio.gpu import Gpu
from videotune.studio.memory_bar import gigabytes

ASK = "import json; from videotune.studio.gpu import list_gpus; print(json.dumps([one.__dict__ for one in list_gpus()]))"


def read_cards(folder: Path, init: int = 0) -> list[dict[str, object]]:
    build_driver(folder, init)
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


def test_a_card_has_as_many_gb_on_the_queue_as_in_the_plan() -> None:
    card = Gpu(
        index=0,
        name="RTX 4090",
        memory_used=6 * 2**30,
        memory_total=24 * 2**30,
        utilization=None,
        celsius=None,
        watts=None,
    )
    assert gigabytes(card.memory_total) == "24.0 GB"
    assert "6.0 of 24.0 GB" in visible_text(web.render("gpu", cards=[card]))
