"""What ``sharding`` does: a process of two has half of the weights, and half of what trains of them."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.effects.effects_kit import Lab, job_of
from videotune.trainer.components import make_objective, open_models
from videotune.trainer.denoisers import make_expert_schedule, open_pool
from videotune.trainer.distributed import DistributedContext


@pytest.fixture
def one_of_two() -> Iterator[DistributedContext]:
    """This process as the first of two, of which the other one is not there: nothing is sent."""
    torch_dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DistributedContext(0, 2)
    torch_dist.destroy_process_group()


@pytest.mark.effect("sharding")
@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
def test_sharding_leaves_a_process_its_part_of_the_weights(
    method: str, lab: Lab, one_of_two: DistributedContext
) -> None:
    held, trained = {}, {}
    for value in ("OFF", "FULL"):
        job = job_of(lab, {"sharding": value, "training_method": method})
        family = open_models(job.spec, job.base, job.config)
        expert_schedule = make_expert_schedule(job.spec, job.config, make_objective(job.spec, job.config))
        pool = open_pool(family, job.config, expert_schedule, 4, 1, one_of_two)
        weights = [p.detach() for name, p in pool.net.named_parameters() if "lora" not in name]
        held[value] = sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights)
        trained[value] = sum(p.numel() for p in pool.trainable.parameters.values())
        assert all(type(p.data) is torch.Tensor for p in pool.trainable.parameters.values())
    assert 0.5 * held["OFF"] <= held["FULL"] <= 0.55 * held["OFF"]
    if method == "LORA":
        assert trained["FULL"] == trained["OFF"], "the adapter each process has whole"
    else:
        assert trained == held
