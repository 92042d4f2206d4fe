"""The heartbeat counts the seconds of a run's earlier processes."""

import json
from pathlib import Path

from videotune.trainer.logging.heartbeat import keep_heartbeat


def test_damaged_seconds_of_earlier_processes_count_for_nothing(tmp_path: Path) -> None:
    with keep_heartbeat(tmp_path):
        pass
    path = tmp_path / "heartbeat.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"seconds": {"training": 7.5, "exporting": "x", "saving": None, "loading": []}}))
    with keep_heartbeat(tmp_path, goes_on=True) as heartbeat:
        seconds = heartbeat.seconds()
    assert seconds["training"] == 7.5
    assert not {"exporting", "saving", "loading"} & set(seconds)
