"""What a run says of its captions, its speed and its end, after public threads of other
trainers.

Captions: musubi-tuner #209 #434 #990. Speed: diffusion-pipe #152 (which phase is slow?)
and #410 (buckets throw the time left off; the bar's time left is tested in
tests/validation/test_monitor.py), DiffSynth-Studio #658 (the GPU waits for data and
nothing says so). When to stop and which checkpoint to take: musubi-tuner #218 #477
#635, LTX trainer #37 #61, OneTrainer #772, SimpleTuner #2057; the experiment with many
seeds is research/verdict.py.

Going on with a run (musubi-tuner #927 #497, diffusion-pipe #278 #263, OneTrainer #132,
SimpleTuner #2613) is tested in tests/commands/test_resume_changes.py and
test_rollback_runs.py, a full disk (SimpleTuner #2353) in test_full_disk.py, a loss of
NaN (finetrainers #135) in test_not_finite.py.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import Bases, Patch, train
from tests.support.run_parts import build_trainer, open_run
from tests.support.run_results import of_kind, steps_of
from videotune.errors import DONE
from videotune.files import read_json
from videotune.job.overrides import Overrides
from videotune.runs.journal import read_journal
from videotune.toy.dataset import write_dataset
from videotune.trainer.loop import train_loop
from videotune.trainer.progress import WAITS, announce

Words = Callable[..., Overrides]


@pytest.fixture
def words(small_clips: Path, tiny_bases: Bases, tmp_path: Path) -> Words:
    """Settings of a run over the tiny base, without readings, previews or saves unless
    they are named.
    """
    fixed = (
        f"base_model_name={tiny_bases('wan')}",
        f"cache_dir={tmp_path / 'cache'}",
        "resolution=32x32",
    )
    fixed += (
        "lora.rank=2",
        "dataloader_threads=0",
        "validate_every=0",
        "sample_after=0",
        "save_every=0",
    )
    return lambda *sets, data=small_clips: Overrides(
        data=str(data), sets=(*fixed, *sets)
    )


def test_musubi_tuner_434_the_exact_text_of_every_step_can_be_recovered(
    words: Words, small_clips: Path, tmp_path: Path
) -> None:
    data, run = shutil.copytree(small_clips, tmp_path / "data"), tmp_path / "run"
    for path in (data / "captions").iterdir():
        path.write_text(f"one of {path.stem}\ntwo of {path.stem}", encoding="utf-8")
    sets = ("steps=12", "batch_size=2", "caption_dropout=0.3", "video_config.frames=9")
    assert train(words(*sets, data=data), run) == DONE
    clips = {clip["id"][:12]: clip for clip in read_json(run / "check.json")["clips"]}
    seen = set()
    for line in steps_of(run):
        for window, number in zip(line["window_ids"], line["captions"], strict=True):
            clip = clips[window[:12]]
            text = "" if number is None else clip["captions"][number]
            assert text == "" or text.endswith(Path(clip["path"]).stem)
            seen.add(text.split(" ")[0])
    assert seen == {"one", "two", ""}


def trained(said: Overrides, run: Path) -> float:
    """Train, as a run does after its clips are encoded; the seconds that it took."""
    trainer = build_trainer(open_run(said, run).job, run, False)
    announce(trainer, None)
    begun = time.perf_counter()
    assert train_loop(trainer) == "done"
    took = time.perf_counter() - begun
    trainer.journal.close()
    return took


def test_seconds_by_phase_sum_to_the_wall_time(words: Words, tmp_path: Path) -> None:
    """Steps by their phases, readings, previews and saves: what is left over is the
    journal and the looks between steps.

    The promise is 2 % of a run whose steps take a second; here a step is 30 ms, other
    programs run, and 20 % are allowed.
    """
    sets = (
        "steps=12",
        "batch_size=6",
        "validate_every=6",
        "sample_after=6",
        "save_every=6",
        "sample.steps=2",
    )
    wall = trained(words(*sets), tmp_path / "run")
    parts = Counter[str]()
    for line in read_journal(tmp_path / "run"):
        seconds = line.get("seconds", {})
        parts.update(seconds if isinstance(seconds, dict) else {line["kind"]: seconds})
    wanted = (
        "data",
        "forward",
        "backward",
        "optimizer",
        "validation",
        "sample",
        "save",
    )
    assert all(parts[key] for key in wanted)
    beside = parts.pop("save")  # by a thread, while steps go on
    assert 0.8 * wall <= sum(parts.values()) + beside
    assert sum(parts.values()) <= 1.02 * wall


def test_a_run_that_waits_for_data_says_so(
    words: Words, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Each batch takes 60 ms longer to come than it does; the warning comes once, after
    twenty steps.
    """
    import videotune.trainer.loop as train

    batches = train.stream

    def slow(*arguments: object, **keywords: object) -> object:
        for batch in batches(*arguments, **keywords):  # type: ignore[arg-type]
            time.sleep(0.06)
            yield batch

    trained(words("steps=26"), tmp_path / "fast")
    monkeypatch.setattr(train, "stream", slow)
    trained(words("steps=26"), tmp_path / "slow")
    warned = of_kind(tmp_path / "slow", "warning")
    assert len([line for line in warned if line["text"].startswith(WAITS)]) == 1
    assert warned[0]["step"] == 21


@pytest.mark.long
def test_a_planted_overfit_is_stopped_near_its_minimum_and_the_good_file_is_there(
    tmp_path: Path,
) -> None:
    """Two minutes on an idle core: four clips, and a run that would go on ten times
    longer than it should.
    """
    run = tmp_path / "run"
    write_dataset(tmp_path / "own", concept_clips=4, reminder_clips=0)
    write_dataset(tmp_path / "others", concept_clips=8, reminder_clips=0, seed=1)
    data = [
        {"path": str(tmp_path / "own")},
        {"path": str(tmp_path / "others"), "kind": "validation"},
    ]
    sets = (
        f"datasets={json.dumps(data)}",
        f"cache_dir={tmp_path / 'cache'}",
        "sample_after=0",
        "save_every=0",
    )
    often = ("steps=600", "validate_every=15", "early_stopping=1")
    rate = ("learning_rate_scheduler=CONSTANT", "learning_rate=0.002")
    assert train(Overrides(preset="toy", sets=(*sets, *often, *rate)), run) == DONE
    lines = read_journal(run)
    end, readings = lines[-1], of_kind(run, "validation")
    assert end["why"] == "early"
    assert end["step"] < 300
    lowest = min(readings, key=lambda line: line["held_out"]["normalised"])["step"]
    assert end["take"]["step"] == lowest < end["step"]
    assert f"-step-{lowest}." in read_json(run / "exports.json")[0]["path"]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "OVERFITTING" in page
    assert f"It should have stopped at step {lowest}" in page
