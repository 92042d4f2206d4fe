"""The plan of several machines: what goes over their network, and how long it takes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.clips import noise, write_dataset
from tests.support.command_line import plan as plan_command
from videotune.commands.plan import plan
from videotune.errors import DONE, VideotuneError
from videotune.job.overrides import Overrides
from videotune.memory.context_parallel import process_mesh
from videotune.planner.cluster import (
    ETHERNET,
    LATENCY,
    LINK_REACHES,
    Cluster,
    Network,
    cluster_of,
    machines_json,
    message_seconds,
    refuse_unused_network,
    ways_of,
)
from videotune.planner.collectives import (
    all_reduced,
    exchanged,
    gathered,
    rounds_of_all_reduce,
    rounds_of_gather,
    scattered,
)
from videotune.planner.gpus import cards, find_card
from videotune.planner.traffic import Rounds, Traffic

PRESET = "wan 2.1 1.3B LoRA 16GB"
PART = 100


class Ring:
    """A ring of processes, each with a part of a tensor or with a tensor of parts, that
    runs its rounds and counts what goes over each edge.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.sent: Counter[tuple[int, int]] = Counter()
        self.rounds = 0

    def gather(self) -> None:
        """All-gather: each process ends with every part."""
        held = [{rank} for rank in range(self.processes)]
        while any(len(parts) < self.processes for parts in held):
            sent = [(rank - self.rounds) % self.processes for rank in self.ranks]
            for rank in self.ranks:
                assert sent[rank] in held[rank]
                held[self._send(rank)].add(sent[rank])
            self.rounds += 1

    def scatter(self) -> None:
        """Reduce-scatter: each process ends with one part of the sum."""
        terms = [[{rank} for _ in self.ranks] for rank in self.ranks]
        for number in range(self.processes - 1):
            sent = [(rank - number) % self.processes for rank in self.ranks]
            messages = [set(terms[rank][sent[rank]]) for rank in self.ranks]
            for rank in self.ranks:
                terms[self._send(rank)][sent[rank]] |= messages[rank]
            self.rounds += 1
        for rank in self.ranks:
            assert terms[rank][(rank + 1) % self.processes] == set(self.ranks)

    @property
    def ranks(self) -> range:
        return range(self.processes)

    def _send(self, rank: int) -> int:
        receiver = (rank + 1) % self.processes
        self.sent[rank, receiver] += PART
        return receiver


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_closed_forms_are_what_rings_send(processes: int) -> None:
    total = processes * PART
    gather = Ring(processes)
    gather.gather()
    assert set(gather.sent.values()) == {gathered(total, processes)}
    assert gather.rounds == rounds_of_gather(processes)

    scatter = Ring(processes)
    scatter.scatter()
    assert set(scatter.sent.values()) == {scattered(total, processes)}

    both = Ring(processes)
    both.scatter()
    scattering = both.rounds
    both.rounds = 0
    both.gather()
    assert set(both.sent.values()) == {all_reduced(total, processes)}
    assert scattering + both.rounds == rounds_of_all_reduce(processes)

    directly = sum(total / processes for other in range(processes) if other)
    assert directly == pytest.approx(exchanged(total, processes))


@pytest.mark.parametrize(("machines", "gpus"), [(2, 4), (4, 2), (3, 1)])
def test_a_machine_sends_as_much_as_a_process(machines: int, gpus: int) -> None:
    """A ring of all processes leaves each machine once."""
    cluster = Cluster(machines, gpus)
    ring = Ring(cluster.processes)
    ring.gather()
    left: Counter[int] = Counter()
    for (rank, receiver), count in ring.sent.items():
        if cluster.machine_of(rank) != cluster.machine_of(receiver):
            left[cluster.machine_of(rank)] += count
    sent = Traffic(weights=gathered(cluster.processes * PART, cluster.processes))
    ways = ways_of(sent, cluster, parts=1)
    assert set(left.values()) == {ways.between.weights}
    assert ways.within.weights == (sent.weights if gpus > 1 else 0)


@pytest.mark.parametrize(
    ("machines", "gpus", "parts"),
    [(2, 4, 2), (2, 4, 4), (2, 3, 2), (4, 2, 4), (2, 1, 2)],
)
def test_which_groups_leave_a_machine_follows_from_the_trainers_mesh(
    machines: int, gpus: int, parts: int
) -> None:
    cluster = Cluster(machines, gpus)
    size = cluster.processes
    torch_dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        groups = process_mesh("cpu", size // parts, parts).mesh.flatten(1).tolist()
    finally:
        torch_dist.destroy_process_group()

    pairs: Counter[int] = Counter()
    most_here = 0
    for group in groups:
        for rank in group:
            others = [other for other in group if other // gpus != rank // gpus]
            pairs[rank // gpus] += len(others)
            most_here = max(most_here, parts - 1 - len(others))
    are_within = all(len({rank // gpus for rank in group}) == 1 for group in groups)
    assert cluster.holds_groups(parts) == are_within
    _, most = cluster.most_pairs(parts)
    assert most == max(pairs.values())
    ways = ways_of(Traffic(attention=1.0, prediction=1.0), cluster, parts)
    assert (ways.between.attention == 0) == are_within
    assert (ways.between.prediction == 0) == are_within
    assert ways.between.attention == pytest.approx(most / (parts - 1))
    assert ways.within.attention == pytest.approx(most_here / (parts - 1))
    assert ways.within.prediction == (most_here > 0)


def test_seconds_are_those_of_the_slower_way() -> None:
    card = find_card("h100")
    sent = Traffic(attention=9e9, gradients=4.5e9, weights=90e9)
    rounds = Rounds(gradients=10, weights=1000)
    one = message_seconds(sent, rounds, card, Cluster(1, 8), parts=2)
    assert one.waiting == pytest.approx(13.5e9 / (LINK_REACHES * 450e9))

    four = cluster_of(card, 4, 8)
    assert four.network.rate == 8 * 50e9
    fast = message_seconds(sent, rounds, card, four, parts=2)
    waiting = 9e9 / (LINK_REACHES * 450e9) + 4.5e9 / (LINK_REACHES * 400e9)
    assert fast.waiting == pytest.approx(waiting + 10 * LATENCY)

    slow = message_seconds(sent, rounds, card, cluster_of(card, 4, 8, 100), parts=2)
    assert slow.beside == pytest.approx(90e9 / (LINK_REACHES * 12.5e9) + 1000 * LATENCY)


def test_a_machine_in_a_plan_has_its_network_and_what_it_sends() -> None:
    """Two machines of three cards: a group of two of them is in both."""
    network = Network("a network", 1234.5678)
    sent = Traffic(attention=10.4, prediction=3.0, gradients=20.6, weights=7.5)
    assert machines_json(sent, Cluster(2, 3, network), parts=2) == {
        "count": 2,
        "gpus": 3,
        "network": "a network",
        "network_bytes_a_second": 1235,
        "groups_within": False,
        "sent_bytes": {
            "within": {
                "attention": 10,
                "prediction": 3,
                "gradients": 21,
                "weights": 8,
            },
            "between": {
                "attention": 10,
                "prediction": 3,
                "gradients": 21,
                "weights": 8,
            },
        },
    }
    single = machines_json(sent, Cluster(2, 1, network), parts=1)
    nothing = dict.fromkeys(("attention", "prediction", "gradients", "weights"), 0)
    assert single["groups_within"] is True
    assert single["sent_bytes"] == {
        "within": nothing,
        "between": nothing | {"gradients": 21, "weights": 8},
    }


def test_on_one_machine_all_is_sent_within_it() -> None:
    sent = Traffic(attention=1.0, prediction=2.0, gradients=3.0, weights=4.0)
    ways = ways_of(sent, Cluster(1, 4), parts=2)
    assert (ways.within, ways.between) == (sent, Traffic())
    assert Cluster(1, 3).holds_groups(2)
    assert not Cluster(2, 3).holds_groups(2)
    assert Cluster(2, 4).holds_groups(2)


def test_machines_are_connected_as_given_or_as_usual_for_their_cards() -> None:
    h100 = find_card("h100")
    assert cluster_of(h100, 4, 8, 100) == Cluster(
        4, 8, Network("a network as given", 12.5e9)
    )
    assert cluster_of(None, 4, 8, 0.5).network.rate == 0.5e9 / 8
    usual = cluster_of(h100, 4, 8)
    assert usual == Cluster(4, 8, Network("InfiniBand NDR", 8 * h100.network))
    assert cluster_of(find_card("rtx 4090"), 2, 4) == Cluster(2, 4, ETHERNET)
    assert cluster_of(None, 2, 4) == Cluster(2, 4, ETHERNET)
    assert Network("Ethernet", 12.5e9) == ETHERNET


def test_only_machines_wait_for_the_latency_of_rounds() -> None:
    card = find_card("h100")
    rounds = Rounds(gradients=10, weights=1000)
    within = message_seconds(Traffic(), rounds, card, Cluster(1, 8), parts=1)
    assert (within.waiting, within.beside) == (0, 0)
    between = message_seconds(Traffic(), rounds, card, Cluster(2, 4), parts=1)
    assert between.waiting == pytest.approx(10 * LATENCY)
    assert between.beside == pytest.approx(1000 * LATENCY)
    shared = Traffic(attention=1e9, prediction=2e9, gradients=4e9)
    sent = message_seconds(shared, Rounds(), card, Cluster(1, 8), parts=2)
    assert sent.waiting == pytest.approx(7e9 / (LINK_REACHES * card.peer_link))


def test_a_network_of_one_machine_has_no_use() -> None:
    refuse_unused_network(1, None)
    refuse_unused_network(2, 100.0)
    refuse_unused_network(2, None)
    with pytest.raises(VideotuneError, match="--network"):
        refuse_unused_network(1, 100.0)


def test_each_card_with_links_has_a_network() -> None:
    for card in cards():
        assert bool(card.network) == (
            card.peer_link > card.link or "GH200" in card.name
        )
        assert bool(card.network) == bool(card.network_name)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips") / "clips"
    return write_dataset(folder, {"a.mkv": noise(17, 64, 64)}, {}, fps=16)


def words_of(clips: Path, *sets: str) -> Overrides:
    sets = ('resolution="64x64"', "video_config.frames=17", "steps=10", *sets)
    return Overrides(preset=PRESET, data=str(clips), sets=sets)


@pytest.mark.slow
def test_a_slow_network_makes_sharded_weights_late(clips: Path) -> None:
    sets = ("sharding=FULL", "training_method=FINE_TUNE")
    plans: dict[Any, dict[str, Any]] = {}
    for network in (None, 25):
        result = plan(
            words_of(clips, *sets), card="h100", gpus=8, nodes=4, network=network
        )
        plans[network] = result.plan
    machines = plans[None]["processes"]["machines"]
    assert (machines["count"], machines["gpus"]) == (4, 8)
    assert machines["network"] == "InfiniBand NDR"
    assert machines["network_bytes_a_second"] == 400e9
    assert plans[None]["processes"]["count"] == 32
    assert plans[None]["effective_batch"] == 32

    fast, slow = plans.values()
    sent = machines["sent_bytes"]["between"]["weights"]
    over_network = sent / (LINK_REACHES * 25e9 / 8)
    assert slow["seconds_a_step"] == pytest.approx(over_network, rel=0.02)
    assert slow["seconds_a_step"] > 3 * fast["seconds_a_step"]
    one = plan(words_of(clips, *sets), card="h100", gpus=8).plan
    held = one["device"]["phases"]["training"]["allocated_bytes"]
    assert fast["device"]["phases"]["training"]["allocated_bytes"] < held
    assert one["processes"]["machines"] is None


def test_the_text_of_a_plan_of_machines_fits_80_columns(
    clips: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = {"card": "h100", "gpus": 8, "nodes": 4, "price": 20.0, "network": 100.0}
    assert plan_command(words_of(clips), simulate=True, **options) == DONE
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.split())
    assert "on each of 32 in 4 machines" in joined
    assert "at 20 an hour of a machine" in joined
    assert "over a network as given of 100 Gbit/s: gradients" in joined
    assert "simulated: 10 of 10 steps, 32 processes on 4 machines" in joined

    assert plan_command(words_of(clips), as_json=True, **options) == DONE
    facts = json.loads(capsys.readouterr().out)
    hours = sum(
        facts[part] or 0 for part in ("hours", "hours_beside", "hours_encoding")
    )
    assert facts["price"]["total"] == pytest.approx(4 * 20 * hours, abs=0.01)
    assert facts["simulation"] is None


def test_options_without_a_use_are_refused(clips: Path, tmp_path: Path) -> None:
    words = words_of(clips)
    with pytest.raises(VideotuneError, match="--network"):
        plan(words, card="h100", gpus=8, network=100)
    with pytest.raises(VideotuneError, match="--storage"):
        plan_command(words, card="h100", gpus=2, storage=1.0)
    with pytest.raises(VideotuneError, match="--schedule"):
        plan_command(words, card="h100", gpus=2, schedule=tmp_path / "steps.jsonl")
