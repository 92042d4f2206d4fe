"""The heartbeat follows the state of its run."""

import json
import time
from pathlib import Path

from videotune.runs.heartbeat import EVERY, keep_heartbeat

FOLLOWS_WITHIN = 2.0
"""Seconds within which a page shows what a run does now."""


def test_another_state_is_in_the_file_long_before_the_next_regular_beat(
    tmp_path: Path,
) -> None:
    assert FOLLOWS_WITHIN < EVERY

    def written() -> str:
        return str(json.loads((tmp_path / "heartbeat.json").read_text())["state"])

    with keep_heartbeat(tmp_path) as heartbeat:
        assert written() == "starting"
        for state in ("training", "sampling", "training"):
            heartbeat.set(state)
            deadline = time.monotonic() + FOLLOWS_WITHIN
            while written() != state:
                assert time.monotonic() < deadline, f"{state} is not written"
                time.sleep(0.05)
        changed = (tmp_path / "heartbeat.json").stat().st_mtime_ns
        time.sleep(1.0)
        assert (tmp_path / "heartbeat.json").stat().st_mtime_ns == changed
    assert written() == "ended"
