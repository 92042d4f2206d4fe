"""When to stop and which checkpoint to take, after public threads of other trainers.

musubi-tuner #218 #477 #635, LTX trainer #37 #61, OneTrainer #772, SimpleTuner #2057: a training loss that says nothing, a
validation loss that is another one after each resume, no word of which checkpoint was the good one. The experiment with
many seeds is scripts/verdict.py.
"""

import json
from pathlib import Path

import pytest

from tests.shell import train
from videotune.errors import DONE
from videotune.files import read_json
from videotune.toy.dataset import write_dataset
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides


def words(folder: Path, own: int, *sets: str) -> Overrides:
    """The toy base on so many clips of a concept, measured on eight others."""
    write_dataset(folder / "own", concept_clips=own, reminder_clips=0)
    write_dataset(folder / "others", concept_clips=8, reminder_clips=0, seed=1)
    data = [{"path": str(folder / "own")}, {"path": str(folder / "others"), "kind": "validation"}]
    fixed = (
        "sample_after=0",
        "learning_rate_scheduler=CONSTANT",
        "learning_rate=0.002",
        f"cache_dir={folder / 'cache'}",
    )
    return Overrides(preset="toy", sets=(*fixed, f"datasets={json.dumps(data)}", *sets))


@pytest.mark.long
def test_a_planted_overfit_is_stopped_near_its_minimum_and_the_good_file_is_there(tmp_path: Path) -> None:
    """Two minutes on an idle core: four clips, and a run that would go on ten times longer than it should."""
    run = tmp_path / "run"
    often = ("steps=600", "validate_every=15", "save_every=0", "early_stopping=1")
    assert train(words(tmp_path, 4, *often), run) == DONE
    lines = read_journal(run)
    end, readings = lines[-1], [line for line in lines if line["kind"] == "validation"]
    assert end["why"] == "early"
    assert end["step"] < 300
    lowest = min(readings, key=lambda line: line["held_out"]["normalised"])["step"]
    assert end["take"]["step"] == lowest < end["step"]
    assert f"-step-{lowest}." in read_json(run / "exports.json")[0]["path"]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "OVERFITTING" in page
    assert f"It should have stopped at step {lowest}" in page
