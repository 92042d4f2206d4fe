"""The prompts of a resumed run's previews are read from its journal."""

import json
from pathlib import Path

from tests.support import reports
from videotune.runs.journal import History
from videotune.trainer.resume import sampled_prompts


def test_the_newest_prompt_of_each_seed_counts(tmp_path: Path) -> None:
    """A line without a seed, as in a journal that somebody has edited, ends no resume."""
    lines = [
        {"kind": "sample", "step": 0, "seed": 1, "prompt": "a cat", "path": "a.mp4"},
        {"kind": "sample", "step": 0, "seed": 2, "prompt": "a dog", "path": "b.mp4"},
        {"kind": "sample", "step": 5, "seed": 1, "prompt": "a lion", "path": "c.mp4"},
        {"kind": "sample", "step": 5, "prompt": "a bird", "path": "d.mp4"},
        {"kind": "sample", "step": 5, "seed": [3], "prompt": "a fish", "path": "e.mp4"},
    ]
    journal = tmp_path / "journal.jsonl"
    journal.write_text(
        "".join(json.dumps(line) + "\n" for line in [reports.start(), *lines])
    )
    assert sampled_prompts(History(tmp_path)) == {1: "a lion", 2: "a dog"}
