"""One network at a time: what makes room is gone before the next one is loaded."""

import json
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from tests.commands.safety_kit import Work
from tests.read_runs import of_kind
from tests.shell import Patch, sample, train
from videotune.commands.sample import SampleOptions
from videotune.errors import DONE
from videotune.models.base import DiffusersModel
from videotune.toy.dataset import write_dataset
from videotune.trainer.resolve_config import Overrides

EVERYTHING = ("steps=4", "expert_period=1", "expert_share=0.5", "validate_every=2", "sample_after=2", "sample.steps=2")


@pytest.fixture
def opened(monkeypatch: Patch) -> list[str]:
    """The experts in the order in which they are loaded; at each time none that was loaded before lives."""
    names: list[str] = []
    live: list[ref[Any]] = []
    load = DiffusersModel.denoiser

    def denoiser(self: Any, expert: str | None = None, **more: Any) -> Any:
        assert not [known for known in live if known() is not None], f"{names[-1]} is in memory beside {expert}"
        net = load(self, expert, **more)
        names.append(str(expert))
        live.append(ref(net))
        return net

    monkeypatch.setattr(DiffusersModel, "denoiser", denoiser)
    return names


@pytest.mark.parametrize("sets", [(), ("layer_offload_fraction=0.5",)], ids=["resident", "streamed"])
def test_one_expert_is_in_memory_at_a_time(opened: list[str], work: Work, clips: Path, sets: tuple[str, ...]) -> None:
    write_dataset(work.tmp / "others", concept_clips=0, reminder_clips=3, seed=4)
    data = f"datasets={json.dumps([{'path': str(clips)}, {'path': str(work.tmp / 'others'), 'kind': 'validation'}])}"
    fixed = work.overrides(*EVERYTHING, data, *sets, base=("wan", "t2v-a14b")).sets
    assert train(Overrides(sets=fixed), work.run) == DONE
    assert (len(of_kind(work.run, "validation")), len(of_kind(work.run, "sample"))) == (3, 6)
    assert len(opened) > 8, "training, validation and previews change the expert"
    if not sets:
        assert sample(SampleOptions(["a"], 1, work.run), work.tmp / "out") == DONE
