"""Runs over datasets that come and go, are weighted, mirrored and captioned anew: a resume
takes the same samples, and the account of views is exact.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

from tests.support.clips import noise, write_dataset
from tests.support.command_line import train
from tests.support.run_processes import Work, refusal, resume
from tests.support.run_results import assert_same_run, of_kind, steps_of
from videotune.config.schema import Dataset
from videotune.errors import DONE
from videotune.files import digest, read_json, write_json


def two_datasets(folder: Path) -> str:
    """The setting ``datasets`` with every key that moves the samples of a step."""
    for seed, name in enumerate("ab"):
        clips = {
            f"{name}{number}.mp4": noise(9, 32, 32, seed=10 * seed + number)
            for number in range(3)
        }
        captions = dict.fromkeys(clips, "ohwx, red, blue, {cat|dog}")
        write_dataset(folder / name, clips, captions, fps=16)
    rows = [
        {"path": str(folder / "a"), "flip": "always", "caption_shuffle": True,
         "caption_keep_tokens": 1, "caption_tag_dropout": 0.2, "caption_wildcards": True},
        {"path": str(folder / "b"), "from_step": 3, "until_step": 9, "probability": 0.6,
         "batch_size": 2, "caption_dropout": 0.5, "repeats": 2},
    ]  # fmt: skip
    return f"datasets={json.dumps(rows)}"


def test_a_resumed_run_takes_the_same_samples(work: Work, tmp_path: Path) -> None:
    sets = (two_datasets(tmp_path / "data"), "video_config.frames=9", "save_every=4")
    overrides = work.overrides(*sets, "steps=12")
    straight = tmp_path / "straight"
    assert train(overrides, straight) == DONE

    for step in (4, 8):
        run = shutil.copytree(straight, tmp_path / f"from {step}")
        assert resume(run, step=step) == DONE
        assert_same_run(run, straight, 12)

    lines = steps_of(straight)
    assert {len(line["window_ids"]) for line in lines} == {1, 2}
    views = Counter(
        window_id.partition("@")[0]
        for line in lines
        for window_id in line["window_ids"]
    )
    check = read_json(straight / "check.json")
    for clip in check["clips"]:
        assert clip["views"] == views[clip["id"][:12]]


def test_another_weight_of_a_dataset_is_a_change_of_the_data(work: Work) -> None:
    setting = two_datasets(work.tmp / "data")
    run = work.train(setting, "video_config.frames=9", "steps=4", "save_every=4")
    other = setting.replace('"probability": 0.6', '"probability": 0.3')
    assert "how they are shown differ" in refusal(run, other, "steps=6")
    assert resume(run, other, "steps=6", data_change=True) == DONE
    (resumed,) = of_kind(run, "resume")
    assert "datasets.1.probability: 0.6 -> 0.3" in str(resumed["changes"])


def test_a_run_from_before_these_keys_resumes_without_a_change(work: Work) -> None:
    """Its config.json names none of them, and its data has the same hash."""
    run = work.copy("steps=4", "save_every=2")
    kept = read_json(run / "config.json")
    known = {"path", "kind", "repeats", "trigger", "caption_weights", "resolution"}
    known |= {"windows", "loss_weight", "prior_preservation"}
    assert set(Dataset.model_fields) > known
    for row in kept["settings"]["datasets"]:
        for key in set(row) - known:
            del row[key]
    del kept["digest"]
    write_json(run / "config.json", kept | {"digest": digest(kept)})

    assert resume(run, "steps=5") == DONE
    assert of_kind(run, "resume")[0]["changes"] == [
        "steps: 4 -> 5 (the rate is constant)"
    ]
