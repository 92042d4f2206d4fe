"""The plan of several cards that share samples: what each holds, computes and sends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.clips import noise, write_dataset
from videotune.cli.plan_verdict import verdict
from videotune.commands.plan import plan
from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.memory.context_parallel import process_mesh, split_tokens
from videotune.planner import gpus
from videotune.planner.gpus import find_card
from videotune.planner.measure import FakeNetwork, FakeRun
from videotune.planner.plan_inputs import PlanInputs
from videotune.planner.read_step import open_family, read_step_spec
from videotune.planner.step_spec import with_shared_samples
from videotune.planner.traffic import exchanged_bytes_per_token

Bases = Callable[..., Path]
PRESET = "wan 2.1 1.3B LoRA 16GB"
PARTS = 2


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two processes that share samples, of which the other one is not there."""
    torch_dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PARTS)
    yield process_mesh("cpu", 1, PARTS)
    torch_dist.destroy_process_group()


class SharedRun(FakeRun):
    """A run on fake tensors whose network diffusers has split."""

    mesh: DeviceMesh

    def _make_network(self, depths: Any) -> FakeNetwork:
        network = super()._make_network(depths)
        plan = self.family.token_plan(network.net)
        split_tokens(
            network.net, plan, self.family.video_attentions(network.net), self.mesh
        )
        return network


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ON", "OFF"])
def test_a_process_holds_and_computes_what_the_plan_of_shared_samples_says(
    mode: str, small_clips: Path, mesh: DeviceMesh
) -> None:
    """Against a reading of the split network, of Wan 1.3B's size, on fake tensors."""
    sets = ('resolution="512x512"', "video_config.frames=17", "steps=10")
    words = Overrides(preset=PRESET, data=str(small_clips), sets=sets)
    job = open_job(*resolve_config(words, planning=True))
    inputs = PlanInputs.of(job, "BFLOAT_16")
    run = SharedRun(open_family(inputs), inputs.config)
    run.mesh = mesh
    shape = job.shapes_by_cost[0]

    tokens = job.spec.video_tokens(shape)
    exchanged = tokens * exchanged_bytes_per_token(job, "BFLOAT_16")
    planned = with_shared_samples(read_step_spec(inputs), PARTS, exchanged).at(mode, 1)
    read = run.deep_step(shape, 1, mode)
    for phase in ("forward", "backward"):
        parts = planned.phases[phase]
        held = parts["activations"] + parts["exchanged by attention"]
        assert held == pytest.approx(read.phases[phase]["activations"], rel=0.15)
    assert planned.work.flops == pytest.approx(read.work.flops, rel=0.1)
    assert planned.work.moved == pytest.approx(read.work.moved, rel=0.1)


@pytest.fixture(scope="module")
def large_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of a size that no card of 24 GB holds in one pass with LoRA of 14B."""
    folder = tmp_path_factory.mktemp("large") / "clips"
    return write_dataset(folder, {"a.mkv": noise(33, 480, 832)}, {}, fps=16)


def planned(clips: Path, *sets: str, preset: str = PRESET, **options: Any) -> Any:
    """The plan of eight cards, and its job."""
    words = ('resolution="480x832"', "video_config.frames=33", "steps=10", *sets)
    options = {"gpus": 8, "card": "rtx 4090"} | options
    return plan(Overrides(preset=preset, data=str(clips), sets=words), **options)


def test_cards_share_samples_where_one_does_not_hold_a_sample(
    large_clips: Path,
) -> None:
    """And take samples of their own where it does."""
    held = planned(large_clips, card="h100").plan
    assert held["fits"]
    assert held["processes"]["context_parallel"] == 1
    assert held["processes"]["groups"] == 8

    large = ("sharding=FULL", "video_config.frames=33", "gradient_checkpointing=OFF")
    whole = planned(large_clips, *large, "context_parallel=1").plan
    assert not whole["fits"]
    shared = planned(large_clips, *large)
    processes = shared.plan["processes"]
    parts = processes["context_parallel"]
    assert shared.plan["fits"]
    assert parts > 1
    assert processes["groups"] == 8 // parts
    assert shared.plan["effective_batch"] * parts == whole["effective_batch"]
    text = verdict(shared.plan)
    assert f"on each of 8 (context {parts} × data {8 // parts})" in text


@pytest.mark.effect("context_parallel")
def test_messages_and_memory_follow_how_many_cards_share_a_sample(
    large_clips: Path,
) -> None:
    """Bytes of attention as Ulysses sends them: 4 tensors for each of 3 passes of a block,
    of which a process keeps its part.
    """
    plans = {}
    for parts in (2, 4):
        sets = (f"context_parallel={parts}", "gradient_checkpointing=ON")
        result = planned(large_clips, *sets)
        tokens = result.job.spec.video_tokens(result.job.shapes[0])
        sent = result.plan["processes"]["sent_bytes"]
        tensor = tokens / parts * 1536 * 2
        samples = result.job.config.batch_size
        expected = 30 * 3 * 4 * tensor * (parts - 1) / parts * samples
        assert sent["attention"] == pytest.approx(expected, rel=1e-6)
        plans[parts] = result.plan
    activations = [
        facts["device"]["phases"]["training"]["allocated_bytes"]
        for facts in plans.values()
    ]
    assert activations[0] > 1.2 * activations[1]


def test_a_plan_of_several_cards_needs_their_memory_and_a_number_that_divides(
    large_clips: Path, small_clips: Path, tiny_bases: Bases
) -> None:
    base = tiny_bases("wan")
    words = Overrides(data=str(small_clips), sets=(f"base_model_name={base}",))
    with pytest.raises(VideotuneError, match="--gpus: "):
        plan(words, gpus=2)
    assert plan(words).plan["processes"] is None
    shared = Overrides(data=words.data, sets=(*words.sets, "context_parallel=2"))
    assert plan(shared).plan["processes"]["groups"] == 1
    with pytest.raises(VideotuneError, match="multiple of 3"):
        planned(large_clips, "context_parallel=3")


def test_links_between_cards_are_those_of_cards_in_the_table() -> None:
    content = read_json(Path(gpus.__file__).with_name("gpus.json"))
    names = {row[0] for row in content["cards"]}
    assert set(content["nvlink"]) <= names
    assert find_card("h100").peer_link == 450e9
    assert find_card("rtx 4090").peer_link == find_card("rtx 4090").link == 24e9
