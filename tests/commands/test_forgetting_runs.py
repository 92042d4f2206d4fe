"""Readings of what a run costs its base model: every family, sound, and files that do
not fit.
"""

from pathlib import Path

import pytest

from tests.support.command_line import train
from tests.support.run_parts import build_trainer, open_run
from tests.support.run_processes import Make, resume
from tests.support.run_results import of_kind, warnings_of
from tests.support.sounding_clips import write_sounding_clips
from videotune.errors import DONE, INTERRUPTED
from videotune.models.registry import find, names
from videotune.trainer.loop import train_loop

READ = ("forgetting.budget=1000000", "forgetting.steps=1", "sample_after=0")

KINDS = [(name, variant) for name in sorted(names()) for variant in find(name).variants]
QUICK = [("wan", "t2v"), ("wan_vace", "vace"), ("kandinsky5", "i2v")]
"""A text-to-video model, one of control channels, and one that needs an image."""
TWO_EXPERTS = [("wan", "t2v-a14b")]
FIRST_OF_FAMILY = [(name, find(name).variants[0]) for name in names()]


def marks_of(kind: tuple[str, str]) -> list[pytest.MarkDecorator]:
    """A reading draws with the family's pipeline, whose kinds test_pipelines.py has: here
    are the first kind of each family and the first with two experts.
    """
    if kind in QUICK:
        return []
    if kind in (*FIRST_OF_FAMILY, *TWO_EXPERTS):
        return [pytest.mark.slow]
    return [pytest.mark.long]


EVERY_KIND = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=marks_of(kind)) for kind in KINDS],
    ids=lambda kind: "-".join(kind),
)


def settings(name: str, variant: str) -> tuple[str, ...]:
    own: tuple[str, ...] = ("steps=2", "save_every=0", "learning_rate=0.01")
    if name == "cogvideox":
        own += ("video_config.frames=49", "video_config.target_fps=60")
    if name == "ltx2":
        own += ("resolution=64x64",)
    if variant.endswith("a14b"):
        own += ("expert_period=1", "expert_share=0.5")
    return own


@EVERY_KIND
def test_every_family_is_read(
    kind: tuple[str, str], overrides: Make, tmp_path: Path
) -> None:
    words = overrides(*settings(*kind), *READ, base=kind)
    job = open_run(words, tmp_path / "run", None).job
    trainer = build_trainer(job, tmp_path / "run")
    train_loop(trainer)
    trainer.journal.close()

    assert warnings_of(tmp_path / "run") == []
    first, last = of_kind(tmp_path / "run", "forgetting")
    assert (first["step"], last["step"]) == (0, 2)
    assert first["forgetting"] == last["forgetting"]
    assert first["guidance"]["mean"] == 1
    assert first["distance"]["mean"] == 0
    assert last["distance"]["mean"] > 0
    assert len(last["guidance"]["by_prompt"]) == len(last["prompts"])
    assert last["guidance"]["mean"] is not None


def test_video_and_sound_are_read_together(overrides: Make, tmp_path: Path) -> None:
    folder = write_sounding_clips(tmp_path / "clips")
    sets = (
        *("steps=2", "save_every=0", 'generate=["video", "sound"]'),
        *("video_config.frames=17", "learning_rate=0.01"),
    )
    words = overrides(*sets, *READ, data=folder, base=("ltx2",))
    job = open_run(words, tmp_path / "run").job
    trainer = build_trainer(job, tmp_path / "run")
    train_loop(trainer)
    trainer.journal.close()
    assert warnings_of(tmp_path / "run") == []
    _, last = of_kind(tmp_path / "run", "forgetting")
    assert last["distance"]["mean"] > 0


@pytest.mark.parametrize("given", ["video", "sound"])
def test_a_run_that_is_given_a_part_of_its_clips_is_not_read(
    given: str, overrides: Make, tmp_path: Path
) -> None:
    folder = write_sounding_clips(tmp_path / "clips")
    learnt = "sound" if given == "video" else "video"
    sets = ("steps=1", f'generate=["{learnt}"]', "video_config.frames=17")
    words = overrides(*sets, *READ, data=folder, base=("ltx2",))
    job = open_run(words, tmp_path / "run").job
    trainer = build_trainer(job, tmp_path / "run")
    train_loop(trainer)
    trainer.journal.close()
    assert of_kind(tmp_path / "run", "forgetting") == []


@pytest.mark.parametrize("damage", ["missing", "torn", "of other prompts"])
def test_a_file_that_does_not_fit_is_not_compared_with(
    damage: str, overrides: Make, tmp_path: Path
) -> None:
    """The run goes on, and says that it has nothing to compare with."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "control.json").write_text('{"stop": true}')
    words = overrides("steps=4", "save_every=2", *READ)
    assert train(words, run) == INTERRUPTED

    path = run / "forgetting.safetensors"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(content[: len(content) // 2])
    else:
        (base, *_) = of_kind(run, "forgetting")
        identity = base["forgetting"].encode()
        path.write_bytes(content.replace(identity, b"0" * 8))
    assert resume(run) == DONE
    *_, last = of_kind(run, "forgetting")
    assert last["step"] == 4
    assert "not_measured" in last
    assert "guidance" not in last
