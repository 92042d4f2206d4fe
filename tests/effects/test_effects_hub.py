"""What the keys about checkpoints in a repository of the Hub send there."""

from typing import Any

import pytest

from tests.support.command_line import Patch, train
from tests.support.hub_runs import run_hub
from tests.support.run_results import facts_of
from tests.support.trainers import Lab, overrides_of
from videotune.errors import DONE, VideotuneError
from videotune.job.overrides import Overrides
from videotune.runs.hub_run import steps_of
from videotune.trainer.resume import Resume


@pytest.mark.effect("push_checkpoints_to")
@pytest.mark.parametrize(("repo", "steps"), [(None, []), ("user/run", [4])])
def test_checkpoints_are_uploaded_and_change_no_bit(
    repo: str | None, steps: list[int], lab: Lab, monkeypatch: Patch
) -> None:
    knobs: dict[str, Any] = {"push_checkpoints_to": repo} if repo else {}
    assert train(overrides_of(lab), lab.tmp / "straight") == DONE
    with run_hub(monkeypatch) as hub:
        assert train(overrides_of(lab, knobs), lab.tmp / "run") == DONE
    assert steps_of(hub.files) == steps
    assert hub.private == (True if repo else None)
    assert facts_of(lab.tmp / "run") == facts_of(lab.tmp / "straight")


@pytest.mark.effect("push_checkpoints_to", "push_checkpoints_keep")
@pytest.mark.parametrize(("keep", "steps"), [(1, {5}), (2, {4, 5})])
def test_the_newest_checkpoints_stay(
    keep: int, steps: set[int], lab: Lab, monkeypatch: Patch
) -> None:
    knobs = {"push_checkpoints_to": "user/run", "push_checkpoints_keep": keep}
    run = lab.tmp / "run"
    with run_hub(monkeypatch) as hub:
        assert train(overrides_of(lab, knobs), run) == DONE
        longer = Overrides(sets=("steps=5",))
        assert train(longer, run, resume=Resume()) == DONE
    assert set(steps_of(hub.files)) == steps


def test_a_new_run_without_a_token_is_refused_before_any_work(
    lab: Lab, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    knobs = {"push_checkpoints_to": "user/run"}
    with pytest.raises(VideotuneError, match="there is no token"):
        train(overrides_of(lab, knobs), lab.tmp / "run")
    assert not (lab.tmp / "run").exists()
