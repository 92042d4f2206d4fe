"""One network at a time: what makes room is gone before the next one is loaded."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from tests.support.command_line import Patch, sample, train
from tests.support.run_processes import Work
from tests.support.run_results import of_kind
from videotune.commands.sample_options import SampleOptions
from videotune.errors import DONE, DoesNotFit
from videotune.job.overrides import Overrides
from videotune.models.base import DiffusersModel
from videotune.models.registry import find, names
from videotune.planner import out_of_memory
from videotune.toy.dataset import write_dataset
from videotune.trainer import network_pass

EVERYTHING = (
    "steps=4",
    "expert_period=1",
    "expert_share=0.5",
    "validate_every=2",
    "sample_after=2",
    "sample.steps=2",
)


@pytest.fixture
def opened(monkeypatch: Patch) -> list[str]:
    """The experts in the order in which they are loaded; at each time none that was
    loaded before lives.
    """
    names: list[str] = []
    live: list[ref[Any]] = []
    load = DiffusersModel.denoiser

    def denoiser(self: Any, expert: str | None = None, **more: Any) -> Any:
        assert not [known for known in live if known() is not None], (
            f"{names[-1]} is in memory beside {expert}"
        )
        net = load(self, expert, **more)
        names.append(str(expert))
        live.append(ref(net))
        return net

    monkeypatch.setattr(DiffusersModel, "denoiser", denoiser)
    return names


@pytest.mark.parametrize(
    "sets",
    [(), ("layer_offload_fraction=0.5",), ("sample.strength=0.5",)],
    ids=["resident", "streamed", "at half strength"],
)
def test_one_expert_is_in_memory_at_a_time(
    opened: list[str], work: Work, clips: Path, sets: tuple[str, ...]
) -> None:
    write_dataset(work.tmp / "others", concept_clips=0, reminder_clips=3, seed=4)
    data = f"datasets={json.dumps([{'path': str(clips)}, {'path': str(work.tmp / 'others'), 'kind': 'validation'}])}"
    fixed = work.overrides(*EVERYTHING, data, *sets, base=("wan", "t2v-a14b")).sets
    assert train(Overrides(sets=fixed), work.run) == DONE
    assert (len(of_kind(work.run, "validation")), len(of_kind(work.run, "sample"))) == (
        3,
        6,
    )
    assert len(opened) > 8, "training, validation and previews change the expert"
    if not sets:
        assert sample(SampleOptions(["a"], 1, work.run), work.tmp / "out") == DONE


@pytest.mark.parametrize("name", names())
def test_a_freed_part_is_gone_without_a_search_for_cycles(
    name: str, tiny_family: Callable[..., Any]
) -> None:
    for variant in find(name).variants:
        family = tiny_family(name, variant=variant)
        parts = [
            ref(family.vae()),
            *(ref(part.encoder) for part in family.text_parts().values()),
        ]
        gc.collect()
        gc.disable()
        try:
            family.free("vae")
            family.free("text_encoder")
            assert [known() for known in parts] == [None] * len(parts), variant
        finally:
            gc.enable()


def test_a_failed_step_has_let_go_before_the_state_is_saved(
    work: Work, monkeypatch: Patch
) -> None:
    """What the step's frames hold would be in the way of what saving needs of the
    device.
    """
    held: list[ref[torch.Tensor]] = []
    loss, save = network_pass.denoising_loss, out_of_memory.save_before_error

    def greedy(*given: Any) -> Any:
        large = torch.ones(4, 4)
        held.append(ref(large))
        if len(held) == 3:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 MiB"
            )
        return loss(*given)

    def saving(*given: Any) -> str:
        assert [known() for known in held] == [None] * 3
        return save(*given)

    monkeypatch.setattr(network_pass, "denoising_loss", greedy)
    monkeypatch.setattr(out_of_memory, "save_before_error", saving)
    with pytest.raises(DoesNotFit, match="out of memory in step 3"):
        train(work.overrides("steps=4"), work.run)
    assert len(held) == 3
