"""Going on with a run, after public threads of other trainers.

musubi-tuner #927 (a resume counts from 0 again) and #497 (its rate is 0), diffusion-pipe #278 (another rate is taken for the
old one) and #263 (there is no way back to an earlier step), OneTrainer #132 (a run that is done resumes to nothing, and
nothing says so), SimpleTuner #2613 (a damaged checkpoint is loaded). SimpleTuner #2353 (a full disk ends the run) is in
tests/commands/test_full_disk.py, finetrainers #135 (a loss of NaN becomes a file) in tests/commands/test_not_finite.py.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands.safety_kit import resume
from tests.shell import Bases, Printed, train
from videotune.errors import DONE, VideotuneError
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides

STEPS, MIDDLE = 6, 3


@pytest.fixture(scope="module")
def whole(small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps whose rate rises and falls, saved at the third and the last one."""
    home = tmp_path_factory.mktemp("whole")
    sets = [f"steps={STEPS}", f"save_every={MIDDLE}", "learning_rate=0.01", "warmup_steps=1"]
    sets += ["learning_rate_scheduler=COSINE", "resolution=32x32", "lora.rank=2", "sample_after=0", "validate_every=0"]
    sets += [f"base_model_name={tiny_bases('wan')}", f"cache_dir={home / 'cache'}"]
    assert train(Overrides(data=str(small_clips), sets=tuple(sets)), home / "run") == DONE
    return home / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = (line for line in read_journal(run) if line["kind"] == "step")
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def rates(run: Path) -> list[float]:
    return [line["lr"]["transformer"] for line in steps_of(run)]


def test_musubi_tuner_927_a_resume_goes_on_at_its_step(run: Path, whole: Path, capfd: Printed) -> None:
    assert resume(run, step=MIDDLE) == DONE
    assert f"resuming from step {MIDDLE}" in capfd.readouterr().err
    assert [line["step"] for line in steps_of(run)] == list(range(1, STEPS + 1))
    assert steps_of(run) == steps_of(whole), "the same windows, losses and gradients, not those of the first steps"


def test_musubi_tuner_497_the_rate_of_a_resume_is_that_of_its_step(run: Path, whole: Path) -> None:
    assert resume(run, step=MIDDLE) == DONE
    assert rates(run) == rates(whole)
    assert min(rates(run)) > 0
    with pytest.raises(VideotuneError, match="the rate of a COSINE schedule depends on the number of steps"):
        resume(run, "steps=12")
    assert resume(run, "steps=12", override=True) == DONE
    assert min(rates(run)) > 0
    assert rates(run)[STEPS] > rates(run)[STEPS - 1], "on the longer curve, not beyond the end of the shorter one"


def test_diffusion_pipe_278_another_rate_is_refused_or_taken_and_never_ignored(run: Path) -> None:
    other = ("learning_rate=0.002", "learning_rate_scheduler=CONSTANT")
    with pytest.raises(VideotuneError, match=r"learning_rate: 0\.01 -> 0\.002"):
        resume(run, *other, step=MIDDLE)
    assert resume(run, *other, step=MIDDLE, override=True) == DONE
    assert rates(run)[MIDDLE:] == [0.002] * (STEPS - MIDDLE)


def test_diffusion_pipe_263_back_to_an_earlier_step_under_another_rate_keeps_the_later_ones(
    run: Path, whole: Path
) -> None:
    assert resume(run, "learning_rate=0.002", step=MIDDLE, override=True) == DONE
    old = run / "branches" / "1"
    assert [one.step for one in complete_checkpoints(old)] == [STEPS]
    assert steps_of(old) == steps_of(whole)
    for name in ("weights.safetensors", "optimizer.safetensors"):
        kept, first, now = (
            (folder / "checkpoints" / f"step-{STEPS}" / name).read_bytes() for folder in (old, whole, run)
        )
        assert kept == first
        assert now != first


def test_onetrainer_132_a_run_that_is_done_says_so_and_takes_more_steps(run: Path, capfd: Printed) -> None:
    assert resume(run) == DONE
    assert f"all {STEPS} steps are done already" in capfd.readouterr().err
    assert len(steps_of(run)) == STEPS
    assert resume(run, "steps=7", override=True) == DONE
    assert len(steps_of(run)) == STEPS + 1


@pytest.mark.parametrize("name", ["weights", "optimizer"])
def test_simpletuner_2613_a_damaged_checkpoint_is_named_and_never_loaded(name: str, run: Path, whole: Path) -> None:
    """It does not count as one: not for a resume, nor for an export; an older one is taken when the person says so."""
    path = run / "checkpoints" / f"step-{STEPS}" / f"{name}.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    with pytest.raises(VideotuneError) as caught:
        resume(run)
    assert f"{name}.safetensors has {size // 2} bytes of {size}" in str(caught.value)
    assert f"--from {MIDDLE}" in str(caught.value)
    assert resume(run, step=MIDDLE) == DONE
    assert steps_of(run) == steps_of(whole)
    assert [one.step for one in complete_checkpoints(run)] == [MIDDLE, STEPS]
